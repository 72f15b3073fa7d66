"""Any `threshold` shares rebuild a secret, fewer fit every secret, malformed ones are refused."""

from __future__ import annotations

import itertools
import struct
import traceback
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks import SEED
from sfumato.errors import MismatchError, SfumatoError, SpecError
from sfumato.privacy.samplers import SeededRng
from sfumato.secagg.sharing import (
    LIMB_BITS,
    LIMBS,
    MOST_SHARES,
    PRIME,
    SECRET_BYTES,
    SHARE_BYTES,
    are_shares,
    join,
    join_many,
    multiply_matrices,
    split,
    split_many,
)

CANARY = b"canary-0f1e2d-of-thirty-two-byte"
EDGES = [bytes(32), b"\xff" * 32, b"\xff" * 31 + b"\0", b"\0" * 31 + b"\x80", b"\1" + bytes(31)]
GOLDEN = "000102031114181c8290a03005438303131011125150541877819121cd064707261f0000"

secrets = st.one_of(st.binary(min_size=32, max_size=32), st.sampled_from(EDGES))
points_of_any_size = st.lists(st.integers(1, PRIME - 1), min_size=2, max_size=40, unique=True)


class Script:
    """An Rng that gives these words, and then no more."""

    def __init__(self, words: Sequence[int]) -> None:
        self.left = list(words)

    def words(self, count: int) -> npt.NDArray[np.uint64]:
        words, self.left = self.left[:count], self.left[count:]
        assert len(words) == count, "more words were asked for than the script has"
        return np.array(words, dtype=np.uint64)


def together(shares: Sequence[Sequence[bytes]], *, points: Sequence[int]) -> list[bytes | None]:
    """Secrets that were shared at the same points."""
    rows = np.array([list(points)] * len(shares), dtype=np.int64).reshape(len(shares), len(points))
    return join_many(b"".join(share for each in shares for share in each), rows)


def limbs(secret: bytes) -> list[int]:
    number = int.from_bytes(secret, "little")
    return [(number >> 30 * limb) % 2**30 for limb in range(9)]


def elements(share: bytes) -> tuple[int, ...]:
    return struct.unpack("<9I", share)


def interpolate(values: dict[int, int]) -> list[int]:
    """The coefficients, lowest first, of the polynomial through these points: Newton's way."""
    total, basis = [0] * len(values), [1] + [0] * (len(values) - 1)
    for point, value in values.items():
        here, product = (
            sum(c * pow(point, degree, PRIME) for degree, c in enumerate(p)) for p in (total, basis)
        )
        factor = (value - here) * pow(product, -1, PRIME)
        total = [(old + factor * new) % PRIME for old, new in zip(total, basis, strict=True)]
        basis = [
            (before - point * now) % PRIME
            for before, now in zip([0, *basis[:-1]], basis, strict=True)
        ]
    return total


@given(secrets, points_of_any_size, st.data())
def test_any_threshold_of_the_shares_rebuild_the_secret(
    secret: bytes, points: list[int], data: st.DataObject
) -> None:
    threshold = data.draw(st.integers(2, len(points)))
    all_shares = split(secret, threshold=threshold, points=points, rng=SeededRng(SEED))
    shares = dict(zip(points, all_shares, strict=True))
    order = data.draw(st.permutations(points))
    for count in {threshold, len(points)}:
        some = {point: shares[point] for point in order[:count]}
        assert join(some, threshold=threshold) == secret
        assert together([list(some.values())] * 2, points=list(some)) == [secret] * 2


def test_every_choice_of_shares_rebuilds_the_secret() -> None:
    points = [3, 1, 4, 15, 9, 26]
    shares = dict(
        zip(points, split(CANARY, threshold=4, points=points, rng=SeededRng(SEED)), strict=True)
    )
    for subset in itertools.combinations(points, 4):
        assert join({point: shares[point] for point in subset}, threshold=4) == CANARY


@pytest.mark.parametrize("secret", EDGES)
def test_limbs_of_all_ones_and_all_zeros_come_back(secret: bytes) -> None:
    shares = split(secret, threshold=2, points=[1, 2], rng=SeededRng(SEED))
    assert join({1: shares[0], 2: shares[1]}, threshold=2) == secret


def test_shares_are_what_the_description_says() -> None:
    """Words are coefficients, by degree and then by limb; every field element can be one."""
    threshold, points = 4, [1, 2, PRIME - 1, 77]
    words = SeededRng(SEED).words((threshold - 1) * LIMBS) % np.uint64(PRIME)
    words[:2] = words[-2:] = (0, PRIME - 1)
    shares = split(CANARY, threshold=threshold, points=points, rng=Script(words.tolist()))
    rows = words.reshape(threshold - 1, LIMBS).tolist()
    for point, share in zip(points, shares, strict=True):
        polynomials = zip(limbs(CANARY), *rows, strict=True)
        expected = [
            sum(coefficient * point**degree for degree, coefficient in enumerate(polynomial))
            for polynomial in polynomials
        ]
        assert share == b"".join((value % PRIME).to_bytes(4, "little") for value in expected)


def test_a_share_is_golden() -> None:
    share, _ = split(bytes(range(32)), threshold=2, points=[1, 2], rng=Script(range(9)))
    assert share.hex() == GOLDEN


def test_coefficients_are_uniform_because_words_that_are_not_are_drawn_again() -> None:
    largest = 2**64 - 1  # 2**64 is 4 more than a multiple of the prime
    plain = split(CANARY, threshold=2, points=[1, 2], rng=Script(range(9)))
    again = split(CANARY, threshold=2, points=[1, 2], rng=Script([largest, *range(1, 9), 0]))
    assert plain == again


@given(secrets, secrets, st.data())
def test_fewer_shares_fit_every_secret_equally(
    secret: bytes, other: bytes, data: st.DataObject
) -> None:
    """For each other secret there is exactly one choice of coefficients that gives the same shares.

    The choices are all as likely, so the shares say nothing about which secret it was.
    """
    points = data.draw(st.lists(st.integers(1, PRIME - 1), min_size=1, max_size=6, unique=True))
    threshold, spare = len(points) + 1, next(p for p in range(1, 9) if p not in points)
    shares = split(secret, threshold=threshold, points=[*points, spare], rng=SeededRng(SEED))[:-1]
    values = [elements(share) for share in shares]
    polynomials = [
        interpolate({0: limb, **{p: v[place] for p, v in zip(points, values, strict=True)}})
        for place, limb in enumerate(limbs(other))
    ]
    assert [polynomial[0] for polynomial in polynomials] == limbs(other)
    script = Script([p[degree] for degree in range(1, threshold) for p in polynomials])
    assert split(other, threshold=threshold, points=[*points, spare], rng=script)[:-1] == shares


def test_too_few_shares_do_not_rebuild_the_secret() -> None:
    shares = split(CANARY, threshold=3, points=[1, 2, 3], rng=SeededRng(SEED))
    with pytest.raises(MismatchError, match="needs 3 shares; got 2"):
        join({1: shares[0], 2: shares[1]}, threshold=3)
    assert together([shares[:2]], points=[1, 2]) != [CANARY]


@given(secrets, st.integers(0, 2), st.integers(0, LIMBS - 1), st.integers(1, PRIME - 1))
def test_a_changed_share_never_rebuilds_the_secret(
    secret: bytes, which: int, limb: int, change: int
) -> None:
    shares = dict(enumerate(split(secret, threshold=3, points=[1, 2, 3], rng=SeededRng(SEED)), 1))
    values = list(elements(shares[which + 1]))
    values[limb] = (values[limb] + change) % PRIME
    shares[which + 1] = struct.pack("<9I", *values)
    assert together([list(shares.values())], points=[1, 2, 3]) != [secret]


def test_a_well_chosen_lie_is_another_secret() -> None:
    """At points 1 and 2 the value at 0 is 2·first − second: one less in the second is one more."""
    first, second = split(bytes(32), threshold=2, points=[1, 2], rng=SeededRng(SEED))
    values = list(elements(second))
    values[0] = (values[0] - 1) % PRIME
    lie = struct.pack("<9I", *values)
    assert join({1: first, 2: lie}, threshold=2) == b"\1" + bytes(31)


@pytest.mark.parametrize(
    ("limb", "bits"), [(0, LIMB_BITS), (7, LIMB_BITS), (8, 256 - 8 * LIMB_BITS)]
)
def test_what_is_no_secret_of_32_bytes_is_refused(limb: int, bits: int) -> None:
    """Constant polynomials: each share is the secret's limbs, one of them a bit too long."""
    for excess, fits in ((0, True), (1, False)):
        values = [0] * LIMBS
        values[limb] = 2**bits - 1 + excess
        share = struct.pack("<9I", *values)
        if fits:
            assert limbs(join({1: share, 2: share}, threshold=2)) == values
        else:
            with pytest.raises(MismatchError, match="not of one secret"):
                join({1: share, 2: share}, threshold=2)
        assert (together([[share, share]], points=[1, 2]) != [None]) is fits


MALFORMED = {
    "empty": b"",
    "short": bytes(SHARE_BYTES - 1),
    "long": bytes(SHARE_BYTES + 1),
    "twice": bytes(2 * SHARE_BYTES),
    "the prime": struct.pack("<9I", *[0] * 8, PRIME),
    "above the prime": struct.pack("<9I", 2**32 - 1, *[0] * 8),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_share_is_refused_by_its_point(name: str) -> None:
    good = split(CANARY, threshold=2, points=[1, 2, 3], rng=SeededRng(SEED))
    assert are_shares(b"".join(good))
    if name not in ("empty", "twice"):  # no share, and two
        assert not are_shares(MALFORMED[name])
    for place in range(3):
        shares = {**dict(enumerate(good, 1)), place + 1: MALFORMED[name]}
        with pytest.raises(MismatchError, match=f"the share at {place + 1} is not"):
            join(shares, threshold=2)
        many = [good, list(shares.values()), good]
        if len(MALFORMED[name]) == SHARE_BYTES:
            assert together(many, points=[1, 2, 3]) == [CANARY, None, CANARY]
        else:
            with pytest.raises(MismatchError, match="need 9 shares of 36 bytes"):
                together(many, points=[1, 2, 3])


def test_another_spelling_of_a_field_element_is_refused() -> None:
    """The prime is zero in the field, so the secret would be that of two shares of zeros."""
    zeros = bytes(SHARE_BYTES)
    assert together([[zeros, zeros]], points=[1, 2]) == [bytes(SECRET_BYTES)]
    assert together([[zeros, MALFORMED["the prime"]]], points=[1, 2]) == [None]


def test_many_secrets_come_back_in_their_order() -> None:
    points = [5, 2, 900]
    given_secrets = [bytes([number]) * 32 for number in range(100)]
    shares = [
        split(each, threshold=3, points=points, rng=SeededRng(SEED)) for each in given_secrets
    ]
    assert together(shares, points=points) == given_secrets
    assert together([], points=points) == []
    with pytest.raises(MismatchError, match="need 303 shares of 36 bytes; got 10872 bytes"):
        together([*shares, shares[0][:2]], points=points)


def test_secrets_that_are_split_together_are_each_their_own() -> None:
    points = [7, 3, 11, 2]
    all_shares = split_many([CANARY, *EDGES], threshold=3, points=points, rng=SeededRng(SEED))
    for place, secret in enumerate([CANARY, *EDGES]):
        at = place * SHARE_BYTES
        shares = {p: all_shares[k][at : at + SHARE_BYTES] for k, p in enumerate(points)}
        assert join(shares, threshold=3) == secret
        assert join({2: shares[2], 7: shares[7], 3: shares[3]}, threshold=3) == secret
    rows = [
        [elements(each[at : at + SHARE_BYTES]) for each in all_shares] for at in (0, SHARE_BYTES)
    ]
    assert rows[0] != rows[1]


def test_the_largest_sharing_comes_back() -> None:
    points = range(PRIME - MOST_SHARES, PRIME)
    shares = split(EDGES[1], threshold=300, points=points, rng=SeededRng(SEED))
    assert join(dict(zip(points, shares, strict=True)), threshold=300) == EDGES[1]


def test_the_longest_sums_do_not_wrap() -> None:
    """The largest terms there can be, as many as there can be; malformed shares have 32 bits."""
    matrix = np.full(MOST_SHARES, PRIME - 1, dtype=np.uint64)
    for value in (PRIME - 1, 2**32 - 1):
        product = multiply_matrices(matrix, np.full((MOST_SHARES, 1), value, dtype=np.uint64))
        assert int(product[0]) == MOST_SHARES * (PRIME - 1) * value % PRIME


@pytest.mark.parametrize(
    ("threshold", "points", "message"),
    [
        (1, [1, 2], "threshold must be at least 2"),
        (3, [1, 2], "threshold must be at most"),
        (2, [0, 1], "points must be distinct, 1 to"),
        (2, [1, PRIME], "points must be distinct, 1 to"),
        (2, [-1, 1], "points must be distinct, 1 to"),
        (2, [1, 2, 1], "points must be distinct, 1 to"),
        (2, range(1, MOST_SHARES + 2), "at most 4096 shares"),
    ],
)
def test_what_cannot_be_shared_is_refused(
    threshold: int, points: Sequence[int], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        split(CANARY, threshold=threshold, points=points, rng=SeededRng(SEED))


def test_joining_at_impossible_points_is_refused() -> None:
    share = bytes(SHARE_BYTES)
    for points in ([0, 1], [1, PRIME]):
        with pytest.raises(SpecError, match="points must be"):
            join(dict.fromkeys(points, share), threshold=2)
    for points in ([0, 1], [1]):
        with pytest.raises(SpecError, match="must be"):
            together([[share] * len(points)], points=points)
    with pytest.raises(SpecError, match="threshold must be"):
        join({1: share, 2: share}, threshold=1)


def test_a_secret_of_another_length_is_refused() -> None:
    for secret in (b"", bytes(SECRET_BYTES - 1), bytes(SECRET_BYTES + 1)):
        with pytest.raises(SpecError, match="a secret must be 32 bytes"):
            split(secret, threshold=2, points=[1, 2], rng=SeededRng(SEED))


def leaks() -> list[Callable[[], object]]:
    good = (CANARY + bytes(4),) * 2  # shares that hold the canary as it is
    return [
        lambda: split(CANARY + b"!", threshold=2, points=[1, 2], rng=SeededRng(SEED)),
        lambda: split(CANARY, threshold=3, points=[1, 2], rng=SeededRng(SEED)),
        lambda: split(CANARY, threshold=2, points=[0, 2], rng=SeededRng(SEED)),
        lambda: join({1: good[0]}, threshold=2),
        lambda: join({1: good[0], 2: CANARY}, threshold=2),
        lambda: join({1: good[0], 2: good[1]}, threshold=2),
        lambda: together([good], points=[1, 2, 3]),
    ]


@pytest.mark.parametrize("leak", leaks())
def test_no_error_shows_a_secret_or_a_share(leak: Callable[[], object]) -> None:
    with pytest.raises(SfumatoError) as caught:
        leak()
    text = f"{caught.value} {caught.value!r} {caught.value.hint}"
    numbers = [str(number) for number in (*limbs(CANARY), *elements(CANARY + bytes(4))[:8])]
    for spelling in ("canary", CANARY.hex()[:12], *numbers):
        assert spelling not in text
    # The lines of code that a traceback quotes may name the canary, but not show it.
    assert CANARY.decode() not in "".join(traceback.format_exception(caught.value))
