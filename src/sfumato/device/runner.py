"""A device that runs by itself: reads values from files or lines, sends reports on a timer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from sfumato.device.device import Device, SendSummary
from sfumato.errors import ServiceError, SpecError
from sfumato.privacy import Rng, SystemRng

OFFERS_SECONDS = 3_600.0  # the average time between two fetches of offers
SEND_SECONDS = 900.0  # the average time between two uploads
_UNFINISHED = (".part", ".tmp")


@dataclass(slots=True)
class Activity:
    """What a runner did since its last report: only counts, without values and times."""

    values: Counter[str] = field(default_factory=Counter)  # by outcome
    sending: SendSummary = field(default_factory=SendSummary)
    problems: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, object]:
        return {
            "values": dict(sorted(self.values.items())),
            **self.sending.to_dict(),
            "problems": self.problems,
        }


class Runner:
    """Drives a device: call `step` every second or so.

    Values come as lines `study<TAB>value`, in files in the folder `spool`. Another program must
    write each file under a temporary name and rename it when it is complete: names that start with
    a dot or end in .part or .tmp are ignored. A file is deleted before its values are recorded, so
    a crash in between loses them, but never records a value twice.

    `may_send` says whether the device's conditions allow traffic now: whether it is charging, idle,
    on a network without fees. While it returns False, nothing is fetched or sent; values are
    recorded, and days begin, as always. It must not depend on the values.
    """

    def __init__(
        self,
        device: Device,
        *,
        spool: Path | None = None,
        may_send: Callable[[], bool] | None = None,
        rng: Rng | None = None,
    ) -> None:
        self._device = device
        self._spool = spool
        self._may_send = may_send or (lambda: True)
        self._rng: Rng = rng or SystemRng()
        self._offers_at = self._send_at = 0.0
        self.activity = Activity()

    def step(self, now: float) -> None:
        """Fetch offers if it is time, record the files in the spool, send if it is time."""
        self.fetch_offers(now)
        self._record_spool(now)
        if now >= self._send_at:  # at random times, which do not tell when conditions changed
            self._send_at = now + self._jitter(SEND_SECONDS)
            if self._may_send():
                self.activity.sending += self._device.send(now)

    def fetch_offers(self, now: float) -> None:
        """Fetch the offers, if it is time, and begin the day in the studies agreed to."""
        if now < self._offers_at:
            return
        may_send = self._may_send()
        self._offers_at = now + self._jitter(OFFERS_SECONDS if may_send else SEND_SECONDS)
        try:
            if may_send:
                self._device.offers(now)
        except ServiceError as problem:
            self.activity.problems.append(str(problem))
        self._device.take_part(now)

    def record(self, lines: Iterable[str], now: float) -> None:
        """Record the values in these lines. Unreadable lines are counted, but not shown."""
        for line in lines:
            study, tab, value = line.rstrip("\r\n").partition("\t")
            try:
                outcome = str(self._device.record(study, value, now)) if tab else "unreadable"
            except SpecError:
                outcome = "unreadable"
            self.activity.values[outcome] += 1

    def report(self) -> Activity:
        """The activity since the last report."""
        activity, self.activity = self.activity, Activity()
        return activity

    def _record_spool(self, now: float) -> None:
        if self._spool is None:
            return
        try:
            paths = sorted(path for path in self._spool.iterdir() if _is_complete(path))
        except OSError as problem:
            raise SpecError(
                f"the spool {self._spool} must be a readable folder; create it, or give another"
            ) from problem
        for path in paths:
            try:
                text = path.read_bytes()
                path.unlink()
            except FileNotFoundError:  # another runner has taken it
                continue
            except OSError as problem:
                raise SpecError(
                    f"the files in the spool {self._spool} must be readable, and may be deleted; "
                    f"one is not: {problem.strerror}"
                ) from problem
            self.record(text.decode(errors="surrogateescape").splitlines(), now)

    def _jitter(self, seconds: float) -> float:
        """A random time from 0.5 to 1.5 times `seconds`, so that devices do not come at once."""
        return seconds * (0.5 + int(self._rng.words(1)[0]) / 2.0**64)


def _is_complete(path: Path) -> bool:
    return path.is_file() and not path.name.startswith(".") and path.suffix not in _UNFINISHED
