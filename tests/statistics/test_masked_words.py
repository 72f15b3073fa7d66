"""The masked table of a device with zeros is noise to everybody without its keys.

Tables are sparse, so an attacker knows most cells: the masks there must reveal nothing about the
rest. Two tests on the words of real devices: chi-square on their bytes, and the linear complexity
of their lowest bits, which a Mersenne Twister gives away however many masks are summed.

Linear complexity: of the 2^n sequences of n bits, 2^min(2n − 2c, 2c − 1) have complexity c ≥ 1
(Rueppel 1986), so that of random bits it is n/2 but for |c − n/2| ≥ d with probability below
2^(1 − 2d)·4/3, and 45,000 bits have it within 12 of 22,500 but for a chance of 1.6e-7.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import product

import numpy as np
import numpy.typing as npt
import pytest

from checks import SEED, assert_chi_square
from linear import shortest_register
from sfumato.secagg.coordinator import Phase
from unit.secagg.stage import ROUND, Stage

U32 = npt.NDArray[np.uint32]

WORDS = 45_000
SLACK = 12  # from half the length, that random bits exceed with probability below 1.6e-7
TWISTER = 19_937  # bits of state of a Mersenne Twister, and the complexity of its lowest bits
MEMBERS = (0, 5, 11, 23)  # the lowest only adds masks, the highest only subtracts them


def assert_no_register(words: U32) -> None:
    """No shift register shorter than random bits need makes the lowest bits."""
    length, _ = shortest_register((words & np.uint32(1)).tolist())
    assert abs(2 * length - words.size) < 2 * SLACK, (
        f"a register of {length} makes {words.size} bits; half as many, give or take {SLACK}, "
        f"were to be expected"
    )


def assert_bytes_are_even(words: U32) -> None:
    """False alarm 1e-6 (chi-square of 256 bins)."""
    counts = np.bincount(words.view(np.uint8), minlength=256)
    assert_chi_square(counts, np.full(256, 1 / 256))


@cache
def masked_words(kind: str) -> dict[int, U32]:
    """What devices send of tables of zeros, or of ones in one cell of a thousand."""
    round = replace(ROUND, cells=WORDS, modulus_bits=32)
    tables = np.zeros((round.cohort, WORDS), dtype=np.int64)
    if kind == "sparse":
        chance = np.random.default_rng([SEED, 1])
        tables[chance.random(tables.shape) < 1e-3] = 1
    stage = Stage(round, tables=tables)
    stage.until(Phase.MASK)
    words_by_member = {}
    for member in MEMBERS:
        stage.answers[Phase.MASK, member] = stage.answer(Phase.MASK, member)
        words_by_member[member] = stage.words_of(member).astype(np.uint32)
    return words_by_member


CASES = [(kind, member) for kind in ("zero", "sparse") for member in MEMBERS]


@pytest.mark.parametrize(("kind", "member"), CASES)
def test_bytes_of_masked_words_are_even(kind: str, member: int) -> None:
    """False alarm 1e-6. Power: 180,000 bytes, so one byte in 100 that is zero more than chance has
    it (noncentrality 4,600 against a bar of 377) is missed with probability below 1e-100."""
    assert_bytes_are_even(masked_words(kind)[member])


@pytest.mark.parametrize(("kind", "member"), CASES)
def test_lowest_bits_of_masked_words_have_no_short_register(kind: str, member: int) -> None:
    """False alarm 1.6e-7. Power: a register of up to 22,488 bits is always found, whatever makes
    it, as twice its length is below the number of bits."""
    assert_no_register(masked_words(kind)[member])


def test_what_two_devices_send_has_nothing_in_common() -> None:
    """False alarm 4e-6 (four chi-squares). Power: two messages under the same masks, or under masks
    that are shifted by up to three words, differ by constants: always caught."""
    first, second = masked_words("zero")[0], masked_words("zero")[23]
    for shift in range(4):
        assert_bytes_are_even(first[shift:] - second[: WORDS - shift])


def twister(seed: int) -> U32:
    """A mask as a peer makes it: numpy's Mersenne Twister under 32 bits of seed."""
    return np.random.RandomState(seed).randint(0, 2**32, WORDS, dtype=np.uint32)


def seeds(count: int) -> Iterator[int]:
    return iter(np.random.default_rng([SEED, 2]).integers(0, 2**32, count).tolist())


def test_a_mask_of_a_mersenne_twister_is_caught() -> None:
    """The control. Its bytes are even; its lowest bits are those of a register of 19,937."""
    mask = twister(next(seeds(1)))
    assert_bytes_are_even(mask)
    with pytest.raises(AssertionError, match=f"a register of {TWISTER} makes"):
        assert_no_register(mask)


@pytest.mark.parametrize("count", [2, 11, 24])
def test_a_sum_of_masks_of_mersenne_twisters_is_caught(count: int) -> None:
    """All lowest bits follow one recurrence, so that their sum does, with either sign."""
    total = np.zeros(WORDS, dtype=np.uint32)
    for place, seed in enumerate(seeds(count)):
        total += twister(seed) if place % 2 else np.uint32(0) - twister(seed)
    assert_bytes_are_even(total)
    with pytest.raises(AssertionError, match=f"a register of {TWISTER} makes"):
        assert_no_register(total)


def test_words_that_are_a_little_too_often_zero_are_caught() -> None:
    """The control for bytes: one word in 100 was not masked."""
    words = masked_words("zero")[5].copy()
    words[::100] = 0
    with pytest.raises(AssertionError, match="chi-square"):
        assert_bytes_are_even(words)


def test_words_of_fewer_bits_than_the_modulus_are_caught() -> None:
    """A mask of 31 bits for a modulus of 32: the highest is always clear."""
    with pytest.raises(AssertionError, match="chi-square"):
        assert_bytes_are_even(masked_words("zero")[5] & np.uint32(2**31 - 1))


@pytest.mark.parametrize("length", [1, 2, 9, 10])
def test_complexities_of_all_short_sequences_are_as_many_as_counted(length: int) -> None:
    """The law that the false alarm rests on, sequence by sequence."""
    complexities = [shortest_register(bits)[0] for bits in product((0, 1), repeat=length)]
    for complexity in range(length + 1):
        power = min(2 * length - 2 * complexity, 2 * complexity - 1)
        assert complexities.count(complexity) == (2**power if complexity else 1)


def test_the_false_alarm_is_as_stated() -> None:
    """The probability of a complexity that is 12 or more from half of 45,000, summed exactly."""
    half = WORDS // 2
    inside = sum(
        Fraction(2 ** min(2 * WORDS - 2 * c, 2 * c - 1), 2**WORDS)
        for c in range(half - SLACK + 1, half + SLACK)
    )
    assert float(1 - inside) < 1.6e-7


@pytest.mark.parametrize("taps", [0b1011, 0b100101])
def test_a_register_is_found_again(taps: int) -> None:
    """A sequence that a register makes has its taps and its length, which are primitive here."""
    length = taps.bit_length() - 1
    bits = [1] + [0] * (length - 1)
    while len(bits) < 200:
        bits.append(sum(bits[-j] for j in range(1, length + 1) if taps >> j & 1) % 2)
    assert shortest_register(bits) == (length, taps)
