"""Memory for long bodies: a little of it, used again and again.

A thousand devices send their masked tables at once. To read all of them at once would take memory
that the system has to find and to clear, which takes longer than to receive them; so a few are read
at a time, into what those before have left, and the others wait where they are, in the network; who
has waited for some seconds is read by the application.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

MOST_BYTES = 32 << 20
_SCRATCH_BYTES = 1 << 14

Begin = Callable[[bytearray], None]
"""Is called with memory for a body; what is in it is of no meaning."""


class LongBodies:
    """At most so many bytes of bodies, but one always fits. For the connections of one loop."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0  # that are lent
        self._left: dict[int, list[bytearray]] = {}  # by size, while any are lent
        # For what is read and done with at once.
        self.scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._waiting: OrderedDict[object, tuple[int, Begin]] = OrderedDict()

    def lend(self, who: object, size: int, begin: Begin) -> None:
        """Call `begin`, now or when others have given back enough: whoever waits longest first."""
        self._waiting[who] = size, begin
        self._go_on()

    def forget(self, who: object) -> None:
        """It waits no longer."""
        if self._waiting.pop(who, None) is not None:
            self._go_on()

    def give_back(self, body: bytearray) -> None:
        """Nobody reads or writes it any more."""
        self._bytes -= len(body)
        self._left.setdefault(len(body), []).append(body)
        self._go_on()
        if not self._bytes:
            self._left.clear()

    def _go_on(self) -> None:
        while self._waiting:
            who, (size, begin) = next(iter(self._waiting.items()))
            if self._bytes and self._bytes + size > self._most_bytes:
                return
            del self._waiting[who]
            if not self._left.get(size):
                self._left.clear()  # what is of another size is of no use now
                self._left[size] = [bytearray(size)]
            self._bytes += size
            begin(self._left[size].pop())
