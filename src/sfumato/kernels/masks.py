"""The masks of secure aggregation: key streams that are added to an accumulator, in place.

A stream is AES-128 in counter mode (NIST SP 800-38A), made by the `cryptography` package: block k
is the cipher of start + k, where `start` is sixteen bytes, big-endian, and the sum is modulo
2**128. It is read as little-endian words of the accumulator's type, and sums wrap around.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from sfumato.errors import SpecError
from sfumato.kernels import Words, in_parts
from sfumato.spec import require

KEY_BYTES = 16  # length of a key, and of a start
CHUNK = 1 << 18  # bytes of a stream that are made at a time
BYTES_PER_CORE = 1 << 25  # bytes of streams for which another core is worthwhile
_KINDS = tuple(np.dtype(kind) for kind in (np.uint8, np.uint16, np.uint32, np.uint64))


def add_streams(
    total: Words,
    keys_and_starts: Sequence[tuple[bytes, bytes]],
    signs: Sequence[int],
    *,
    modulus: int | None = None,
) -> None:
    """Add the streams of these keys to `total`, each times its sign, 1 or -1.

    `total` is (n,) of uint8, uint16, uint32 or uint64. All streams are added to a part of it that
    stays in the cache before the next part, so this is faster than one stream after another.

    With a `modulus` of 2**b − 1 sums are taken modulo it, and `total` must be below it. The high b
    bits of a word are the mask; 2**b − 1, which has one chance in 2**b, counts as zero, so that a
    mask is uniform up to a distance of 2**−b.

    >>> total = np.zeros(2, dtype=np.uint32)
    >>> add_streams(total, [(bytes(16), bytes(16))], [1])
    >>> [f"{word:x}" for word in total]
    ['d44be966', '3b2c8aef']
    """
    _check(total, keys_and_starts, signs)
    work = total.nbytes * len(signs)
    if work == 0:
        return
    if modulus is not None:
        _add_modulo(total, keys_and_starts, signs, modulus)
        return
    each = KEY_BYTES // total.itemsize  # cells per block of the cipher
    blocks = -(-total.size // each)

    def add_part(first: int, last: int) -> None:
        streams = [(key, _later(start, first)) for key, start in keys_and_starts]
        _add_chunks(total[first * each : last * each], streams, signs)

    in_parts(add_part, blocks, work // BYTES_PER_CORE)


def _later(start: bytes, blocks: int) -> bytes:
    """The counter after this many blocks."""
    return ((int.from_bytes(start, "big") + blocks) % 2**128).to_bytes(KEY_BYTES, "big")


def _add_chunks(
    total: Words, keys_and_starts: Sequence[tuple[bytes, bytes]], signs: Sequence[int]
) -> None:
    streams = [
        Cipher(algorithms.AES(key), modes.CTR(start)).encryptor() for key, start in keys_and_starts
    ]
    size = min(CHUNK, total.nbytes)
    zeros = memoryview(bytes(size))
    stream_bytes = np.empty(size + KEY_BYTES, dtype=np.uint8)  # update_into requires spare space
    words = stream_bytes[:size].view(total.dtype.newbyteorder("<"))
    for first in range(0, total.size, CHUNK // total.itemsize):
        part = total[first : first + words.size]
        for stream, sign in zip(streams, signs, strict=True):
            stream.update_into(zeros[: part.nbytes], stream_bytes.data)
            combine = np.add if sign > 0 else np.subtract
            combine(part, words[: part.size], out=part)
    stream_bytes.fill(0)


def _add_modulo(
    total: Words,
    keys_and_starts: Sequence[tuple[bytes, bytes]],
    signs: Sequence[int],
    modulus: int,
) -> None:
    bits = modulus.bit_length()
    kind = total.dtype.type
    require(
        modulus == 2**bits - 1 and bits < 8 * total.itemsize,
        f"a modulus must be 2**b − 1 for a b below {8 * total.itemsize}; got {modulus}",
    )
    prime, shift = kind(modulus), kind(8 * total.itemsize - bits)
    for key_and_start, sign in zip(keys_and_starts, signs, strict=True):
        mask = np.zeros_like(total)
        add_streams(mask, [key_and_start], [1])
        mask >>= shift
        mask[mask == prime] = 0
        if sign < 0:
            np.subtract(prime, mask, out=mask)
        total += mask  # both below 2**b, so nothing wraps
        total[:] = np.where(total >= prime, total - prime, total)


def _check(
    total: Words, keys_and_starts: Sequence[tuple[bytes, bytes]], signs: Sequence[int]
) -> None:
    """Messages name sizes and types, never bytes."""
    require(isinstance(total, np.ndarray), f"total must be an array; got {type(total).__name__}")
    require(
        total.dtype in _KINDS,
        f"total must be of uint8, uint16, uint32 or uint64; got {total.dtype}",
    )
    require(total.ndim == 1, f"total must have one dimension; got {total.ndim}")
    require(total.flags.c_contiguous, "total must be contiguous; got a strided view")
    require(total.flags.writeable, "total is added to in place; got an array that is read-only")
    require(
        len(keys_and_starts) == len(signs),
        f"every key needs a sign; got {len(keys_and_starts)} keys and {len(signs)} signs",
    )
    for sign in set(signs) - {1, -1}:
        raise SpecError(f"a sign must be 1 or -1; got {sign}")
    for pair in keys_and_starts:
        for value in pair:
            if not isinstance(value, bytes) or len(value) != KEY_BYTES:
                name = "key" if value is pair[0] else "start"
                if not isinstance(value, bytes):
                    raise SpecError(f"a {name} must be bytes; got {type(value).__name__}")
                raise SpecError(f"a {name} must have {KEY_BYTES} bytes; got {len(value)}")
