"""Merkle trees: one hash stands for a list, and a short proof shows what is at some of its places.

The hash is that of RFC 9162, section 2.1 (SHA-256), of a list with at least one leaf. A proof here
is for several places at once: the hashes, from the leaves up, that do not follow from those leaves.

    >>> tree = Tree([b"oak", b"elm", b"fir"])
    >>> root_from({0: b"oak", 2: b"fir"}, tree.proof([0, 2]), count=3) == tree.root
    True
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence

from sfumato.errors import MismatchError

HASH_BYTES = 32


class Tree:
    """The tree over these leaves, for whoever has all of them."""

    def __init__(self, leaves: Sequence[bytes]) -> None:
        self._levels = [[_leaf(leaf) for leaf in leaves]]
        while len(level := self._levels[-1]) > 1:
            pairs = zip(level[::2], level[1::2], strict=False)
            odd = level[-1:] if len(level) % 2 else []
            self._levels.append([_node(left, right) for left, right in pairs] + odd)

    @property
    def root(self) -> bytes:
        return self._levels[-1][0]

    def proof(self, places: Collection[int]) -> bytes:
        """What `root_from` needs beside the leaves at these places."""
        nodes, hashes = set(places), []
        for level in self._levels[:-1]:
            siblings = sorted({place ^ 1 for place in nodes} - nodes)
            hashes += [level[place] for place in siblings if place < len(level)]
            nodes = {place >> 1 for place in nodes}
        return b"".join(hashes)


def root_from(leaves: Mapping[int, bytes], proof: bytes, *, count: int) -> bytes:
    """The root of a tree of `count` leaves that has these among them, as this proof says.

    Raises MismatchError if the proof has the wrong length. To find other leaves with the same root
    and `count` is to find a collision of SHA-256.
    """
    if not leaves or min(leaves) < 0 or max(leaves) >= count:
        raise MismatchError(f"a proof must be of some of the places 0 to {count - 1}")
    level, size, start = {place: _leaf(leaf) for place, leaf in leaves.items()}, count, 0
    while size > 1:
        for place in sorted({place ^ 1 for place in level} - level.keys()):
            if place < size:
                level[place] = proof[start : start + HASH_BYTES]
                start += HASH_BYTES
        level = {
            place >> 1: _node(level[place], level[place + 1]) if place + 1 < size else level[place]
            for place in level
            if place % 2 == 0
        }
        size = (size + 1) // 2
    if start != len(proof):
        raise MismatchError(f"the proof must have {start} bytes; got {len(proof)}")
    return level[0]


def most_proof_bytes(places: int, count: int) -> int:
    """The longest proof of this many places in a tree of `count` leaves.

    It is of leaves as far apart as possible, which share only the uppermost levels.
    """
    height, shared = (count - 1).bit_length(), (places - 1).bit_length()
    return HASH_BYTES * (places * (height - shared) + (1 << shared) - places)


def _leaf(leaf: bytes) -> bytes:
    return hashlib.sha256(b"\x00" + leaf).digest()


def _node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\x01" + left + right).digest()
