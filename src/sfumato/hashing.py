"""From an item to cells and signs, under a public seed. The only file that hashes items.

Two steps, both over the prime field of p = 2**61 - 1, so both have proofs and neither needs more
than a 64-bit multiplication (docs/proofs/hashing.md):

1. `fingerprint`: bytes to a field element. The bytes are cut into chunks of seven, read as
   little-endian integers, and evaluated as a polynomial at a seeded point, the length last; the
   value is then scattered, one to one (`kernels.count.plain.mix`). Two different items of at most n
   bytes collide with probability at most (n/7 + 2)/p over the seed. An integer item is its eight
   bytes, two's complement, little-endian.
2. `Polynomial`: a field element to a field element by a random polynomial of degree k - 1, which
   makes the values of any k distinct fingerprints independent and uniform.

A cell is value × width >> 61 and a sign is the value's lowest bit (odd is +1). Seeds are labelled:
every coefficient is drawn from SHAKE-128 over the JSON list ["sfumato", 1, seed, label, ...], so
hash functions with different labels are unrelated. Golden vectors are in
tests/vectors.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from sfumato import kernels
from sfumato.arrays import U8, U64, Whole
from sfumato.errors import SpecError
from sfumato.kernels.count import plain
from sfumato.kernels.count.plain import PRIME
from sfumato.spec import FORMAT, canonical

if TYPE_CHECKING:  # not installed on devices
    import pyarrow as pa

Items: TypeAlias = "pa.Array | pa.ChunkedArray | Whole | Sequence[bytes] | Sequence[str]"


def coefficients(seed: int, *labels: str | int, count: int) -> U64:
    """`count` field elements drawn uniformly under a labelled public seed."""
    text = canonical(["sfumato", FORMAT, seed, *labels]).encode()
    stream = hashlib.shake_128(text).digest(8 * (count + 4))
    words = np.frombuffer(stream, dtype="<u8") & np.uint64(PRIME)
    words = words[words != PRIME]  # one word in 2**61 is not below the prime; four are spare
    return np.asarray(words[:count], dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class Polynomial:
    """A k-wise independent family over 2**61 - 1; `coefficients`, highest degree first, is (k,).

    >>> quadratic = Polynomial((123456789, 987654321, 555555555))
    >>> int(quadratic(np.array([42], dtype=np.uint64))[0])
    259814812833
    """

    coefficients: tuple[int, ...]

    @classmethod
    def draw(cls, seed: int, *labels: str | int, independence: int) -> Polynomial:
        words = coefficients(seed, *labels, count=independence)
        return cls(tuple(int(word) for word in words))

    def __call__(self, points: U64) -> U64:
        return plain.evaluate(np.array(self.coefficients, dtype=np.uint64), points)


@lru_cache(maxsize=1024)
def row_polynomials(seed: int, label: str, round: int, rows: int, independence: int) -> U64:
    """The hash functions of a sketch's rows in one round, as coefficients (rows, independence)."""
    table = np.stack(
        [coefficients(seed, label, round, row, count=independence) for row in range(rows)]
    )
    table.flags.writeable = False  # cached, so shared
    return table


ROW_BLOCK = 256  # rows per stream of coefficients, so that a device computes few


@lru_cache(maxsize=64)
def row_hashes(seed: int, epoch: int, rows: int) -> U64:
    """Three-wise independent cell hashes of many rows, (rows, 3), under a seed and its epoch."""
    blocks = [
        coefficients(seed, "row", epoch, block, count=3 * ROW_BLOCK).reshape(ROW_BLOCK, 3)
        for block in range(-(-rows // ROW_BLOCK))
    ]
    table = np.concatenate(blocks)[:rows]
    table.flags.writeable = False  # cached, so shared
    return table


def fingerprint(items: Items, seed: int) -> U64:
    """One field element per item, for strings, bytes or integers; vectorised over Arrow buffers.

    Strings are hashed as their UTF-8 bytes. Nulls are refused: a missing item is not an item.

    >>> fingerprint(["oak", "elm"], seed=1)
    array([...], dtype=uint64)
    """
    point = int(coefficients(seed, "fingerprint", count=1)[0])
    if isinstance(items, np.ndarray) and items.dtype.kind in "iu":
        return _integers(items, point)
    if not _is_arrow(items):
        return _sequence(list(items), point)
    if not hasattr(items, "chunks"):
        return _arrow(items, point)
    parts = [_arrow(chunk, point) for chunk in items.chunks]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint64)


def fingerprint_rows(rows: U8, seed: int) -> U64:
    """One field element per row of bytes, (n, size): that of the row as a byte string."""
    point = int(coefficients(seed, "fingerprint", count=1)[0])
    offsets = np.arange(rows.shape[0] + 1, dtype=np.int64) * rows.shape[1]
    return kernels.fingerprint_bytes(np.ascontiguousarray(rows).reshape(-1), offsets, point)


def _is_arrow(items: Any) -> bool:
    """Whether this is an Arrow column; if so, pyarrow has been imported."""
    arrow = sys.modules.get("pyarrow")
    return arrow is not None and isinstance(items, arrow.Array | arrow.ChunkedArray)


def _sequence(items: Sequence[bytes] | Sequence[str], point: int) -> U64:
    encoded = [item.encode() if isinstance(item, str) else item for item in items]
    if not all(isinstance(item, bytes) for item in encoded):
        raise SpecError("items must be strings, bytes or integers")
    offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    return kernels.fingerprint_bytes(np.frombuffer(b"".join(encoded), np.uint8), offsets, point)


def _integers(items: Whole, point: int) -> U64:
    if items.dtype == np.uint64 and items.size and items.max() >= np.uint64(1 << 63):
        raise SpecError("an integer item must fit in 64 signed bits; got one of 2**63 or more")
    return kernels.fingerprint_integers(items.astype(np.int64, copy=False), point)


def _arrow(items: Any, point: int) -> U64:
    import pyarrow as pa

    if items.null_count:
        raise SpecError(f"items must not be missing; got {items.null_count} nulls")
    if isinstance(items, pa.DictionaryArray):  # each distinct string once
        codes = items.indices.to_numpy(zero_copy_only=False)
        return np.asarray(_arrow(items.dictionary, point)[codes])
    if pa.types.is_integer(items.type):
        return _integers(items.to_numpy(zero_copy_only=False), point)
    if pa.types.is_string(items.type) or pa.types.is_binary(items.type):
        offset_type: type[np.int32] | type[np.int64] = np.int32
    elif pa.types.is_large_string(items.type) or pa.types.is_large_binary(items.type):
        offset_type = np.int64
    else:
        raise SpecError(f"items must be strings, bytes or integers; got Arrow type {items.type}")
    if len(items) == 0:
        return np.empty(0, dtype=np.uint64)
    _, offset_buffer, data_buffer = items.buffers()
    every = np.frombuffer(offset_buffer, dtype=offset_type)
    offsets = every[items.offset : items.offset + len(items) + 1].astype(np.int64)
    data = np.frombuffer(data_buffer, dtype=np.uint8) if data_buffer else np.empty(0, np.uint8)
    return kernels.fingerprint_bytes(data, offsets, point)
