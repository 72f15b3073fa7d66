"""The worker's thread: it repeats steps, retries after errors, and is the only one on its store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from sfumato.collector.logs import log, log_error
from sfumato.collector.metrics import Metrics
from sfumato.collector.store.store import Store

_FIRST_PAUSE_SECONDS = 1.0  # after an error; doubled by each further one
_LONGEST_PAUSE_SECONDS = 60.0
_GATHER_SECONDS = 0.01  # how long nothing new must come before a step, to do more in one step
_MOST_GATHER_SECONDS = 0.25  # a step waits no longer than this


class WorkerThread:
    """Runs `step` while it does something, and every `pause_seconds` when it has nothing to do.

    If several processes run one over the same store, the others wait until the first has ended.
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
        self._wakeup = threading.Event()
        self._errors = 0  # consecutive ones
        self.is_active = False  # the only worker of its store; else it waits until that one ends
        self._succeeded_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="worker", daemon=True)
        self._metrics.watch(
            self._metrics.worker_success_age, lambda: time.monotonic() - self._succeeded_at
        )
        self._metrics.watch(self._metrics.worker_active, lambda: self.is_active)

    def start(self) -> None:
        self._thread.start()

    def stop(self, seconds: float | None = None) -> bool:
        """End after the current step; return whether it ended within this time."""
        self._stop.set()
        self.wake()
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def wake(self) -> None:
        """End the pause: there is something to do."""
        self._wakeup.set()

    @property
    def healthy(self) -> bool:
        """Whether the thread runs and its last step did not fail."""
        return self._thread.is_alive() and not self._errors

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                with self._store.worker_lock() as alone:
                    if alone:
                        self._set_active(True)
                        self._steps()
                    else:
                        self._note_success()  # another worker runs
                pause = self._pause_seconds
            except Exception as problem:  # of any kind: the next step may succeed
                self._errors += 1
                self._metrics.worker_errors.inc()
                log_error("worker-failed", problem, count=self._errors)
                pause = min(
                    _FIRST_PAUSE_SECONDS * 2 ** min(self._errors - 1, 10), _LONGEST_PAUSE_SECONDS
                )
            self._set_active(False)
            self._stop.wait(pause)
        log("worker-stopped")

    def _steps(self) -> None:
        """Run steps under the lock, until one fails or `stop` is called."""
        while True:
            self._wakeup.clear()
            if self._stop.is_set():  # checked after clearing, since `stop` also wakes
                return
            self._store.check_worker()  # a step without anything to write would not notice
            is_busy = self._step()
            self._note_success()
            if not is_busy:
                self._wakeup.wait(self._pause_seconds)
            if self._wakeup.is_set():
                self._gather()

    def _gather(self) -> None:
        """Wait until nothing more comes for a moment: one step per message of a round would take
        the GIL from the event loop each time."""
        until = time.monotonic() + _MOST_GATHER_SECONDS
        while self._wakeup.is_set() and time.monotonic() < until:
            self._wakeup.clear()
            self._stop.wait(_GATHER_SECONDS)

    def _set_active(self, is_active: bool) -> None:
        if is_active != self.is_active:
            self.is_active = is_active
            log("worker-active" if is_active else "worker-inactive")

    def _note_success(self) -> None:
        self._errors = 0
        self._succeeded_at = time.monotonic()
