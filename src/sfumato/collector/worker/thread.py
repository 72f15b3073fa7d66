"""The worker's thread: step after step, again after an error, at most one worker over a store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from sfumato.collector.logs import log, log_error
from sfumato.collector.metrics import Metrics
from sfumato.collector.store.store import Store

_FIRST_PAUSE_SECONDS = 1.0  # after an error; doubled by each that follows
_LONGEST_PAUSE_SECONDS = 60.0
_GATHER_SECONDS = 0.01  # without anything new before a step, so that what comes together is done
_MOST_GATHER_SECONDS = 0.25  # together; but a step waits no longer than this


class WorkerThread:
    """Runs `step` while it does something, and every `pause_seconds` when it has nothing to do.

    Several processes may run one over the same store: the others wait until the first is gone.
    """

    def __init__(
        self,
        store: Store,
        step: Callable[[], bool],
        *,
        pause_seconds: float,
        metrics: Metrics | None = None,
    ) -> None:
        self._store = store
        self._step = step
        self._pause_seconds = pause_seconds
        self._metrics = metrics or Metrics()
        self._stop = threading.Event()
        self._woken = threading.Event()
        self._errors = 0  # one after another
        self._succeeded_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="worker", daemon=True)
        self._metrics.watch(
            self._metrics.worker_success_age, lambda: time.monotonic() - self._succeeded_at
        )

    def start(self) -> None:
        self._thread.start()

    def stop(self, seconds: float | None = None) -> bool:
        """End after the step under way; whether that was within so many seconds."""
        self._stop.set()
        self.wake()
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def wake(self) -> None:
        """There is something to do: do not wait for the pause to end."""
        self._woken.set()

    @property
    def healthy(self) -> bool:
        """Whether the thread lives and its last step did not fail."""
        return self._thread.is_alive() and not self._errors

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                with self._store.worker_lock() as alone:
                    if alone:
                        self._steps()
                    else:
                        self._succeeded()  # another worker does it
                pause = self._pause_seconds
            except Exception as problem:  # whatever it is, the next step may fare better
                self._errors += 1
                self._metrics.worker_errors.inc()
                log_error("worker-failed", problem, count=self._errors)
                pause = min(
                    _FIRST_PAUSE_SECONDS * 2 ** min(self._errors - 1, 10), _LONGEST_PAUSE_SECONDS
                )
            self._stop.wait(pause)
        log("worker-stopped")

    def _steps(self) -> None:
        """Steps under the lock, until one fails or it is to stop."""
        while True:
            self._woken.clear()
            if self._stop.is_set():  # after that: who stops it, wakes it
                return
            is_busy = self._step()
            self._succeeded()
            if not is_busy:
                self._woken.wait(self._pause_seconds)
            if self._woken.is_set():
                self._gather()

    def _gather(self) -> None:
        """Wait until nothing more comes for a moment: a step for each message of a round would take
        the interpreter from the loop each time."""
        until = time.monotonic() + _MOST_GATHER_SECONDS
        while self._woken.is_set() and time.monotonic() < until:
            self._woken.clear()
            self._stop.wait(_GATHER_SECONDS)

    def _succeeded(self) -> None:
        self._errors = 0
        self._succeeded_at = time.monotonic()
