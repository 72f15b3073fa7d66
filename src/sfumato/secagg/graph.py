"""Who is whose neighbour: a ring of the cohort in an order that a public seed shuffles.

On the ring each device is joined to the k/2 before it and the k/2 after it (Harary's graph, the one
with the fewest edges that k − 1 missing devices cannot disconnect). As the order is random, nobody
chooses who sits next to whom.

Members are numbered from 0. The order is a Fisher-Yates shuffle, which any language can follow:

1. The stream is SHAKE-128 over the ASCII label "sfumato/1/secagg/ring/" followed by the seed's
   bytes. It is read as 32-bit words, four bytes each, little-endian.
2. Start with the order 0, 1, …, cohort − 1. For place = cohort − 1, cohort − 2, …, 1: take the
   next word that is below the largest multiple of place + 1 that is at most 2**32 (others are
   skipped), let other = word mod (place + 1), and swap what stands at place and at other.

Claim: if the words are uniform and independent, every order has the same probability.
Proof: `other` is uniform on 0 .. place, since the words that are taken are a whole number of runs
    of place + 1; so the draws, whose number is cohort!, are equally likely, and no two of them give
    one order.
Assumes: who wants a certain graph cannot choose the seed; who can try many seeds gains as many
    tries, which `security_bits` must leave room for.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Set
from dataclasses import dataclass, field

import numpy as np

from sfumato.secagg.parameters import LARGEST_COHORT
from sfumato.spec import require

LABEL = b"sfumato/1/secagg/ring/"
WORD_BITS = 32
_SPARE_WORDS = 8


def permutation(seed: bytes, cohort: int) -> tuple[int, ...]:
    """The members 0 .. cohort − 1 in the order that `seed` gives.

    >>> permutation(b"a public seed", 5)
    (3, 2, 4, 1, 0)
    """
    require(1 <= cohort <= LARGEST_COHORT, f"cohort must be 1 to {LARGEST_COHORT}; got {cohort}")
    return _shuffle(_words(seed, cohort), cohort)


@dataclass(frozen=True, slots=True)
class Ring:
    """The graph in which each member is joined to `degree` others: half before it, half after.

    `order` is the members as they stand on the ring. `degree` is even, or joins all with all.

    >>> Ring((3, 2, 4, 1, 0), degree=2).neighbours(3)
    [0, 2]
    """

    order: tuple[int, ...]
    degree: int
    _places: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        cohort = len(self.order)
        require(
            sorted(self.order) == list(range(cohort)),
            f"order must hold each of 0 to {cohort - 1} once, {cohort} being its length",
        )
        require(
            1 <= self.degree < cohort and (self.degree % 2 == 0 or self.degree == cohort - 1),
            f"degree must be even and below {cohort}, or {cohort - 1}; got {self.degree}",
        )
        places = [0] * cohort
        for place, member in enumerate(self.order):
            places[member] = place
        object.__setattr__(self, "_places", tuple(places))  # the way of a frozen class

    @classmethod
    def draw(cls, seed: bytes, cohort: int, *, degree: int) -> Ring:
        """The ring that a public seed gives."""
        return cls(permutation(seed, cohort), degree)

    def neighbours(self, member: int) -> list[int]:
        """The members that share with this one, in ascending order."""
        cohort = len(self.order)
        require(0 <= member < cohort, f"member must be 0 to {cohort - 1}; got {member}")
        if self.degree == cohort - 1:
            return [other for other in range(cohort) if other != member]
        place, reach = self._places[member], self.degree // 2
        steps = (*range(-reach, 0), *range(1, reach + 1))
        return sorted(self.order[(place + step) % cohort] for step in steps)

    def fewest(self, members: Set[int], run: int) -> int:
        """How many of these there are at least among `run` in a row, anywhere on the ring.

        >>> Ring((3, 2, 4, 1, 0), degree=2).fewest({3, 2, 1}, 2)
        1
        """
        flags = np.isin(self.order, np.fromiter(members, dtype=np.int64))
        sums = np.cumsum(np.r_[0, flags, flags[:run]])
        return int((sums[run : run + flags.size] - sums[: flags.size]).min())


def _shuffle(words: Iterator[int], cohort: int, word_bits: int = WORD_BITS) -> tuple[int, ...]:
    """`word_bits` is 32; tests make it small, to go through every sequence of words."""
    order, span = list(range(cohort)), 1 << word_bits
    for place in range(cohort - 1, 0, -1):
        limit = span - span % (place + 1)
        while (word := next(words)) >= limit:
            pass
        other = word % (place + 1)
        order[place], order[other] = order[other], order[place]
    return tuple(order)


def _words(seed: bytes, cohort: int) -> Iterator[int]:
    """The stream's words without end; at least those that a cohort needs come in one piece."""
    stream, count, given = hashlib.shake_128(LABEL + seed), cohort + _SPARE_WORDS, 0
    while True:
        words = struct.unpack(f"<{count}I", stream.digest(4 * count))
        yield from words[given:]
        count, given = 2 * count, count
