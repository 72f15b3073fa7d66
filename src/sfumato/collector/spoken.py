"""What members are told in a phase, while it is on its way to the store.

It follows from messages that are stored, and from the phase, which is stored when members are told;
a worker that starts anew works out the same bytes. So devices that ask the process of the worker
need not wait until all of it, which is megabytes, is on disk; other processes read it from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

MOST_BYTES = 64 << 20  # of a phase; more than that is not kept in memory


class Spoken:
    """By round, for the phase that it is in. One thread says, others hear."""

    def __init__(self) -> None:
        self._said: dict[str, tuple[str, Mapping[int, bytes]]] = {}

    def say(self, round_id: str, phase: str, bodies: Mapping[int, bytes]) -> None:
        """Members are told this, and will be when it is stored."""
        self._said[round_id] = phase, MappingProxyType(bodies)

    def heard(self, round_id: str, phase: str) -> Mapping[int, bytes] | None:
        """What members are told in a phase of a round, if it is known here."""
        said = self._said.get(round_id)
        return said[1] if said is not None and said[0] == phase else None

    def forget(self, round_id: str) -> None:
        """The phase is over."""
        self._said.pop(round_id, None)
