"""Shamir's secret sharing: `threshold` shares recover a secret, and fewer reveal nothing about it.

A secret of 32 bytes is read as a little-endian number and cut into nine limbs of 30 bits, lowest
first. (Limbs of 31 bits would not work: one of all ones is the prime itself, and would be read as
zero.) Each limb is the value at 0 of its own random polynomial of degree threshold − 1 over the
prime field of p = 2**31 − 1. The share at a point is the nine values there, each in four bytes,
little-endian: 36 bytes.

Claim: fewer than `threshold` shares have the same distribution for every secret.
Proof: for threshold − 1 points other than 0, coefficients and shares determine one another whatever
    the secret is, as one polynomial of degree threshold − 1 goes through threshold points; the
    coefficients are uniform, so the shares are.
Assumes: the words of `rng` are uniform. A changed share is not detected: it yields another secret,
    or none, never the right one; keep a hash of the secret to check. Nothing is constant-time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from sfumato.arrays import I64, U32, U64
from sfumato.errors import MismatchError
from sfumato.privacy.samplers import Rng, below
from sfumato.spec import require

PRIME = 2**31 - 1
SECRET_BYTES = 32
LIMBS = 9
LIMB_BITS = 30
SHARE_BYTES = 4 * LIMBS
_MOST_FACTORS = 1 << 20  # most factors in memory when many secrets are joined
MOST_SHARES = 4096  # of one secret; `multiply_matrices` adds up to this many terms
_BROKEN = b"\xff" * SHARE_BYTES  # stands for a share of another length: not field elements
_P = np.uint64(PRIME)
_HALF, _LOW_HALF = np.uint64(16), np.uint64(2**16 - 1)
_BITS_OF_LIMBS = np.array([LIMB_BITS] * 8 + [8 * SECRET_BYTES - LIMB_BITS * 8], dtype=np.uint64)


def split(secret: bytes, *, threshold: int, points: Sequence[int], rng: Rng) -> list[bytes]:
    """One share of `secret` for each of `points`; any `threshold` of them recover it.

    >>> from sfumato.privacy.samplers import SystemRng
    >>> secret = bytes(range(32))
    >>> shares = split(secret, threshold=2, points=[1, 2, 3], rng=SystemRng())
    >>> join({1: shares[0], 3: shares[2]}, threshold=2) == secret
    True
    """
    return split_many([secret], threshold=threshold, points=points, rng=rng)


def split_many(
    secrets: Sequence[bytes], *, threshold: int, points: Sequence[int], rng: Rng
) -> list[bytes]:
    """As `split` for several secrets at the same points: for each point one share of every secret,
    one after another."""
    require(
        all(len(secret) == SECRET_BYTES for secret in secrets),
        f"a secret must be {SECRET_BYTES} bytes",
    )
    _check(points, threshold)
    require(
        threshold <= len(points),
        f"threshold must be at most the number of points, {len(points)}; got {threshold}",
    )
    width = LIMBS * len(secrets)
    random = below(PRIME, (threshold - 1) * width, rng).astype(np.uint64)
    limbs = np.concatenate([_limbs(secret) for secret in secrets])
    coefficients = np.vstack([limbs, random.reshape(threshold - 1, width)])
    data = multiply_matrices(_powers(points, threshold), coefficients).astype("<u4").tobytes()
    size = SHARE_BYTES * len(secrets)
    return [data[start : start + size] for start in range(0, len(data), size)]


def join(shares: Mapping[int, bytes], *, threshold: int) -> bytes:
    """Recover the secret of `shares`, a mapping from points.

    The form of all shares is checked; those at the `threshold` lowest points are used. Raises
    MismatchError if there are fewer, one is malformed, or they are not shares of one secret.
    """
    points = sorted(shares)
    _check(points, threshold)
    if len(points) < threshold:
        raise MismatchError(f"a secret needs {threshold} shares; got {len(points)}")
    values = _values([shares[point] for point in points])
    if (malformed := np.flatnonzero((values >= PRIME).any(axis=1))).size:
        raise MismatchError(
            f"a share must be {LIMBS} field elements of 4 bytes, below {PRIME}; the share at "
            f"{points[malformed[0]]} is not"
        )
    lowest = np.array([points[:threshold]], dtype=np.uint64)
    (secret,) = _rebuild(values[np.newaxis, :threshold], lowest)
    if secret is None:
        raise MismatchError(
            f"the shares at {points[:threshold]} are not of one secret of {SECRET_BYTES} bytes; "
            "try others"
        )
    return secret


def join_many(shares: bytes, points: I64) -> list[bytes | None]:
    """As `join` for many secrets at once: much faster than one by one.

    `points` is (secrets, threshold), each row the points of one secret; `shares` holds a share for
    each of them, one after another. A secret is None if a share is malformed or they are not shares
    of one secret; the others are not affected.
    """
    threshold, ordered = points.shape[1], np.sort(points, axis=1)
    wrong = (ordered <= 0).any(axis=1) | (ordered >= PRIME).any(axis=1)
    wrong |= (np.diff(ordered, axis=1) == 0).any(axis=1)
    for row in [*points[:1], *points[wrong][:1]]:
        _check(row.tolist(), threshold)
    if len(shares) != SHARE_BYTES * points.size:
        raise MismatchError(
            f"secrets need {points.size} shares of {SHARE_BYTES} bytes; got {len(shares)} bytes"
        )
    values = np.frombuffer(shares, dtype="<u4").reshape(*points.shape, LIMBS)
    secrets: list[bytes | None] = []
    at_once = max(1, _MOST_FACTORS // threshold**2)
    for start in range(0, len(points), at_once):
        some = slice(start, start + at_once)
        secrets += _rebuild(values[some], points[some].astype(np.uint64))
    return secrets


def are_shares(data: bytes) -> bool:
    """Whether `data` has the form of concatenated shares; a collector checks before storing
    them."""
    if len(data) % SHARE_BYTES:
        return False
    return bool((np.frombuffer(data, dtype="<u4") < PRIME).all())


def _check(points: Sequence[int], threshold: int) -> None:
    require.at_least(2, threshold=threshold)
    require(
        len(points) <= MOST_SHARES,
        f"a secret has at most {MOST_SHARES} shares; got {len(points)} points",
    )
    require(
        len(set(points)) == len(points) and all(0 < point < PRIME for point in points),
        f"points must be distinct, 1 to {PRIME - 1}; got {list(points)}",
    )


def _values(shares: Sequence[bytes]) -> U32:
    """Shares as rows of field elements; malformed ones have a number that is not below p."""
    data = b"".join([share if len(share) == SHARE_BYTES else _BROKEN for share in shares])
    return np.frombuffer(data, dtype="<u4").reshape(len(shares), LIMBS)


def _rebuild(values: U32, points: U64) -> list[bytes | None]:
    """The secrets of shares (secrets, points, limbs); None where there is none."""
    weights = lagrange_weights(points)
    limbs = multiply_matrices(weights[:, np.newaxis], values.astype(np.uint64))[:, 0]
    sound = (values < PRIME).all(axis=(1, 2)) & (limbs >> _BITS_OF_LIMBS == 0).all(axis=1)
    packed = _pack(limbs)
    return [
        packed[start : start + SECRET_BYTES] if good else None
        for start, good in zip(range(0, len(packed), SECRET_BYTES), sound, strict=True)
    ]


def multiply_matrices(matrix: U64, values: U64) -> U64:
    """The matrix product over the field, of at most 2**12 terms.

    The matrix is split into two halves, so that a term is below 2**48 and a sum below 2**60.
    """
    high = (matrix >> _HALF) @ values % _P
    return ((high << _HALF) + (matrix & _LOW_HALF) @ values) % _P


def _powers(points: Sequence[int], count: int) -> U64:
    """Each point's powers 0 .. count − 1, (points, count): twice as many at a time."""
    at = np.array(points, dtype=np.uint64)[:, np.newaxis]
    powers = np.ones_like(at)
    while powers.shape[1] < count:
        powers = np.concatenate([powers, powers * at % _P], axis=1)
        at = at * at % _P
    return powers[:, :count]


def lagrange_weights(points: U64) -> U64:
    """Lagrange weights for each row of points: the value at 0 is the sum of weight × value.

    The weight of x is the product of y/(y − x) over the other points y.
    """
    count = points.shape[1]
    factors = (points[:, np.newaxis] + _P - points[:, :, np.newaxis]) % _P
    every = np.arange(count)
    factors[:, every, every] = points  # y − x = 0 here; cancels y = x in the numerator
    numerator = _product(points)[:, np.newaxis]
    return numerator * _inverse(_product(factors)) % _P


def _inverse(values: U64) -> U64:
    """The inverses of nonzero field elements, by Fermat: the power p − 2."""
    result, power = np.ones_like(values), values
    for bit in range(31):
        if (PRIME - 2) >> bit & 1:
            result = result * power % _P
        power = power * power % _P
    return result


def _product(factors: U64) -> U64:
    """The product over the last axis, by halves."""
    while (length := factors.shape[-1]) > 1:
        half = length // 2
        pairs = factors[..., :half] * factors[..., half : 2 * half] % _P
        factors = np.concatenate([pairs, factors[..., 2 * half :]], axis=-1)
    return factors[..., 0]


def _limbs(secret: bytes) -> U64:
    number = int.from_bytes(secret, "little")
    mask = (1 << LIMB_BITS) - 1
    return np.array([number >> LIMB_BITS * limb & mask for limb in range(LIMBS)], dtype=np.uint64)


def _pack(limbs: U64) -> bytes:
    """Rows of limbs as concatenated secrets; excess bits of a limb or a secret are dropped."""
    each = limbs.astype("<u4").view(np.uint8).reshape(len(limbs), LIMBS, 4)
    bits = np.unpackbits(each, axis=2, bitorder="little")[..., :LIMB_BITS]
    joined = bits.reshape(len(limbs), LIMBS * LIMB_BITS)[:, : 8 * SECRET_BYTES]
    return np.packbits(joined, axis=1, bitorder="little").tobytes()
