"""A device that runs by itself: values in from files or lines, offers and uploads on timers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from sfumato.device.device import Device, Sending
from sfumato.errors import ServiceError, SpecError
from sfumato.privacy import Rng, SystemRng

OFFERS_SECONDS = 3_600.0  # between two looks at the offers, on average
SEND_SECONDS = 900.0
_UNFINISHED = (".part", ".tmp")


@dataclass(slots=True)
class Done:
    """What a runner did since it was last asked; counts only, no value and no time."""

    values: Counter[str] = field(default_factory=Counter)  # by outcome
    sending: Sending = field(default_factory=Sending)
    problems: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, object]:
        sending = self.sending
        return {
            "values": dict(sorted(self.values.items())),
            "sent": sending.sent,
            "rejected": sending.rejected,
            "forgotten": sending.forgotten,
            "kept": sending.kept,
            "problems": self.problems,
        }


class Runner:
    """Drives a device: call `step` every second or so.

    A value comes as a line `study<TAB>value`. Files of such lines are taken out of `spool`, where
    another program puts them under their final name when they are whole; names that start with a
    dot or end in .part or .tmp are left alone. A file is deleted before its values are recorded: a
    crash in between loses them, and records none twice.
    """

    def __init__(
        self, device: Device, *, spool: Path | None = None, rng: Rng | None = None
    ) -> None:
        self._device = device
        self._spool = spool
        self._rng: Rng = rng or SystemRng()
        self._offers_at = self._send_at = 0.0
        self.done = Done()

    def step(self, now: float) -> None:
        """Look at offers, take what is in the spool, send: each if it is time."""
        self.look(now)
        self._take(now)
        if now >= self._send_at:
            self._send_at = now + self._jittered(SEND_SECONDS)
            self.done.sending += self._device.send(now)

    def look(self, now: float) -> None:
        """Look at the offers, if it is time, and take part in what the user agreed to."""
        if now < self._offers_at:
            return
        self._offers_at = now + self._jittered(OFFERS_SECONDS)
        try:
            self._device.offers(now)
        except ServiceError as problem:
            self.done.problems.append(str(problem))
        self._device.take_part(now)

    def record(self, lines: Iterable[str], now: float) -> None:
        """Record what these lines say. One that cannot be read is counted, and not shown."""
        for line in lines:
            study, tab, value = line.rstrip("\r\n").partition("\t")
            try:
                outcome = str(self._device.record(study, value, now)) if tab else "unreadable"
            except SpecError:
                outcome = "unreadable"
            self.done.values[outcome] += 1

    def report(self) -> Done:
        """What was done since the last report."""
        done, self.done = self.done, Done()
        return done

    def _take(self, now: float) -> None:
        if self._spool is None:
            return
        try:
            names = sorted(path for path in self._spool.iterdir() if _is_whole(path))
        except OSError as problem:
            raise SpecError(f"the spool {self._spool} must be a folder to read from") from problem
        for path in names:
            text = path.read_bytes()
            path.unlink()
            self.record(text.decode(errors="surrogateescape").splitlines(), now)

    def _jittered(self, seconds: float) -> float:
        """Half to one and a half of it, so that devices do not all come at once."""
        return seconds * (0.5 + int(self._rng.words(1)[0]) / 2.0**64)


def _is_whole(path: Path) -> bool:
    return path.is_file() and not path.name.startswith(".") and path.suffix not in _UNFINISHED
