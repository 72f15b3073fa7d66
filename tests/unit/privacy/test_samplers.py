"""The samplers are exact: their weights, and their value for every sequence of words."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import cast, get_args

import mpmath  # type: ignore[import-untyped]  # it has no stubs
import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

from checks import SEED
from sfumato.errors import SpecError
from sfumato.privacy import SeededRng, SystemRng, discrete_gaussian, discrete_laplace, skellam
from sfumato.privacy.noise_kinds import NOISES, Noise
from sfumato.privacy.samplers import (
    LARGEST_SCALE,
    WORD_BITS,
    Inversion,
    SecretRng,
    bound,
    log_mass,
    sampler_of,
    stream,
)
from unit.privacy import exact

U64 = npt.NDArray[np.uint64]

ONES = 2**WORD_BITS - 1


def test_every_noise_has_a_record_and_an_exact_law() -> None:
    assert set(NOISES) == set(get_args(Noise)), "add it to Noise and NOISES (noise_kinds.py)"
    assert set(NOISES) == set(exact.LAWS), "add its law to LAWS (tests/unit/privacy/exact.py)"


def test_the_functions_for_each_noise_draw_from_its_sampler() -> None:
    functions = {"gaussian": discrete_gaussian, "laplace": discrete_laplace, "skellam": skellam}
    for noise, draw in functions.items():
        expected = sampler_of(cast(Noise, noise), 2.0).draw((2, 5), SeededRng(SEED))
        assert np.array_equal(draw(2.0, (2, 5), SeededRng(SEED)), expected)


class WantsMoreError(Exception):
    """The sampler asked for a word that the script does not have."""


class Script:
    """An Rng that gives these words in turn; `bits` of each are used, the rest are zero."""

    def __init__(self, words: Sequence[int], bits: int = WORD_BITS) -> None:
        self.left = [word << (WORD_BITS - bits) for word in words]

    def words(self, count: int) -> U64:
        if count > len(self.left):
            raise WantsMoreError
        words, self.left = self.left[:count], self.left[count:]
        return np.array(words, dtype=np.uint64)


def small_words(noise: Noise, scale: float, bits: int) -> Inversion:
    weights, number = NOISES[noise].weights, Fraction(scale)
    return Inversion.of(lambda precision: weights(number, precision), word_bits=bits)


def paths(
    sampler: Inversion, depth: int
) -> tuple[dict[tuple[int, ...], int], list[tuple[int, ...]]]:
    """Every sequence of at most `depth` words that decides a value; and those that do not yet."""
    decided: dict[tuple[int, ...], int] = {}
    undecided: list[tuple[int, ...]] = [()]
    for _ in range(depth):
        longer = [(*path, word) for path in undecided for word in range(1 << sampler.word_bits)]
        undecided = []
        for path in longer:
            script = Script(path, sampler.word_bits)
            try:
                decided[path] = int(sampler.draw(1, script)[0])
            except WantsMoreError:
                undecided.append(path)
            else:
                assert not script.left
    return decided, undecided


def interval(path: Sequence[int], bits: int) -> tuple[Fraction, Fraction]:
    """The reals whose binary digits begin with these words."""
    prefix = sum(word << (bits * place) for place, word in enumerate(reversed(path)))
    unit = Fraction(1, 1 << (bits * len(path)))
    return prefix * unit, (prefix + 1) * unit


def as_fraction(number: mpmath.mpf) -> Fraction:
    mantissa, exponent = number.man_exp
    size: Fraction = Fraction(int(mantissa)) * Fraction(2) ** int(exponent)
    return -size if number < 0 else size


ERROR = Fraction(1, 1 << 300)  # of the oracle, which works with 400 bits


class Law:
    """Cumulative probabilities of the oracle, remembered."""

    def __init__(self, noise: Noise, scale: float) -> None:
        self.noise, self.scale = noise, scale
        self._known: dict[int, Fraction] = {}

    def __call__(self, value: int) -> Fraction:
        if value not in self._known:
            bounds = exact.cumulative(self.noise, self.scale, value, bits=400)
            self._known[value] = as_fraction(bounds)
        return self._known[value]

    def holds(self, value: int, low: Fraction, high: Fraction) -> bool:
        """Whether every U in [low, high) is inverted to `value`."""
        return self(value - 1) <= low + ERROR and high <= self(value) + ERROR


@pytest.mark.parametrize("bits", [64, 200])
@pytest.mark.parametrize("scale", [0.3, 1.0, 9.4467])
@pytest.mark.parametrize("noise", NOISES)
def test_weights_are_within_the_stated_error_of_the_closed_form(
    noise: Noise, scale: float, bits: int
) -> None:
    half = NOISES[noise].weights(Fraction(scale), bits)
    total = 2 * sum(half) - half[0]
    error = Fraction(1, 1 << bits)
    oracle = [as_fraction(exact.mass(noise, scale, x, bits=bits + 100)) for x in range(len(half))]
    assert all(
        abs(Fraction(weight, total) - true) <= error
        for weight, true in zip(half, oracle, strict=True)
    )
    assert 1 - (2 * sum(oracle) - oracle[0]) <= error  # what the table leaves out


@pytest.mark.parametrize("scale", [0.3, 2.5, 30.0])
@pytest.mark.parametrize("noise", NOISES)
def test_log_masses_are_those_of_the_closed_form(noise: Noise, scale: float) -> None:
    """A logarithm is the difference of two of at most 2**8; floats of that size are 2**-45 apart.

    Below 2**-128 masses have lost digits; no accountant uses them.
    """
    first, logs = log_mass(noise, scale)
    assert first == -(logs.size // 2)
    reach = min(int((logs > -128 * math.log(2)).sum()) // 2, 200)
    oracle = [float(mpmath.log(exact.mass(noise, scale, x))) for x in range(reach + 1)]
    middle = logs.size // 2
    assert np.abs(logs[middle : middle + reach + 1] - oracle).max() <= 2**-44
    assert np.array_equal(logs, logs[::-1])


@pytest.mark.parametrize("stddev", [0.7, 4.0, 25.0])
def test_skellam_masses_are_those_of_scipy(stddev: float) -> None:
    """scipy goes through a noncentral chi-square and keeps about nine digits."""
    first, logs = log_mass("skellam", stddev)
    values = np.arange(-first + 1)
    theirs = stats.skellam.pmf(values, stddev**2 / 2, stddev**2 / 2)
    likely = theirs > 1e-12
    assert np.allclose(np.exp(logs[-first:])[likely], theirs[likely], rtol=1e-8, atol=0)


@pytest.mark.parametrize("scale", [0.4, 1.0, 2.3])
@pytest.mark.parametrize("noise", NOISES)
def test_every_sequence_of_small_words_is_inverted_exactly(noise: Noise, scale: float) -> None:
    """Words of four bits tie all the time. A value is decided only where all of U agrees on it."""
    sampler, law = small_words(noise, scale, bits=4), Law(noise, scale)
    decided, undecided = paths(sampler, depth=3)
    points = [law(value) for value in range(-40, 40)]
    for path, value in decided.items():
        assert law.holds(value, *interval(path, 4)), f"{path} must not give {value}"
    for path in undecided:  # only a cumulative probability inside keeps a sequence open
        low, high = interval(path, 4)
        assert points[bisect.bisect_left(points, low - ERROR)] <= high + ERROR


@pytest.mark.parametrize("noise", NOISES)
def test_words_of_six_bits_give_every_value_its_share(noise: Noise) -> None:
    """After three words, the missing part of a value's share is undecided, not misplaced."""
    sampler, scale = small_words(noise, 1.0, bits=6), 1.0
    decided, undecided = paths(sampler, depth=3)
    shares: dict[int, Fraction] = {}
    for path, value in decided.items():
        shares[value] = shares.get(value, Fraction(0)) + Fraction(1, 1 << (6 * len(path)))
    open_share = Fraction(len(undecided), 1 << 18)
    assert sum(shares.values()) + open_share == 1
    assert len(undecided) <= 40  # one each cumulative probability from 2**-18 to 1 - 2**-18
    for value, share in shares.items():
        true = as_fraction(exact.mass(noise, scale, value))
        assert true - open_share <= share <= true


def test_a_sampler_of_another_scale_is_caught_by_the_exhaustive_test() -> None:
    """The negative control: the scale is off by one in a thousand."""
    decided, _ = paths(small_words("gaussian", 1.001, bits=4), depth=3)
    law = Law("gaussian", 1.0)
    assert not all(law.holds(value, *interval(path, 4)) for path, value in decided.items())


def test_ties_are_settled_with_words_of_their_own() -> None:
    """A draw of many takes one word each, then more for those that tie, in order."""
    sampler = small_words("gaussian", 1.0, bits=4)
    alone, _ = paths(sampler, depth=4)
    firsts, extra = list(range(16)), [7, 12, 1, 9, 14, 3, 2, 8] * 8
    values = sampler.draw((4, 4), Script(firsts + extra, 4))
    assert values.shape == (4, 4)
    more = iter(extra)
    for word, value in zip(firsts, values.ravel(), strict=True):
        path = [word]
        while tuple(path) not in alone:
            path.append(next(more))
        assert value == alone[tuple(path)]


@pytest.mark.parametrize("noise", NOISES)
def test_tails_beyond_the_first_table_are_reached(noise: Noise) -> None:
    """Four words of ones put U within 2**-256 of one: past the end of the first table."""
    sampler, law = sampler_of(noise, 3.0), Law(noise, 3.0)
    upper = int(sampler.draw(1, Script([ONES] * 4 + [0]))[0])
    lower = int(sampler.draw(1, Script([0] * 4 + [ONES]))[0])
    assert upper > -sampler.first
    assert lower < sampler.first
    assert law.holds(upper, *interval([ONES] * 4 + [0], WORD_BITS))
    assert law.holds(lower, *interval([0] * 4 + [ONES], WORD_BITS))


@pytest.mark.parametrize("noise", NOISES)
def test_a_word_next_to_a_cumulative_probability_is_not_decided_alone(noise: Noise) -> None:
    sampler = sampler_of(noise, 2.0)
    edge = int(sampler.cumulative[sampler.cumulative.size // 2])
    for word in (edge, edge + 1):
        with pytest.raises(WantsMoreError):
            sampler.draw(1, Script([word]))
    sampler.draw(1, Script([edge + 2]))
    sampler.draw(1, Script([edge - 1]))


@pytest.mark.parametrize("noise", NOISES)
def test_a_tiny_scale_draws_zeros_and_still_has_tails(noise: Noise) -> None:
    draws = sampler_of(noise, 1e-3).draw(100, SeededRng(SEED))
    assert not draws.any()


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf])
def test_impossible_scales_are_refused(noise: Noise, scale: float) -> None:
    with pytest.raises(SpecError, match="noise must be"):
        sampler_of(noise, scale).draw(1, SeededRng(SEED))


@pytest.mark.parametrize("noise", NOISES)
def test_scales_beyond_the_limit_are_refused(noise: Noise) -> None:
    limit = LARGEST_SCALE[noise]
    with pytest.raises(SpecError, match=f"to {limit}; got {limit + 1}"):
        sampler_of(noise, limit + 1).draw(1, SeededRng(SEED))


@pytest.mark.slow
@pytest.mark.parametrize("noise", NOISES)
def test_the_largest_scale_can_be_drawn(noise: Noise) -> None:
    """Not one of 1000 draws may be beyond 40 scales: probability < 1e-14 each, Laplace the most."""
    draws = sampler_of(noise, LARGEST_SCALE[noise]).draw(1000, SeededRng(SEED))
    assert np.abs(draws).max() < 40 * LARGEST_SCALE[noise]
    assert np.unique(draws).size > 900


@pytest.mark.parametrize("noise", NOISES)
def test_shapes_and_types_are_as_asked(noise: Noise) -> None:
    for size, shape in ((0, (0,)), (3, (3,)), ((2, 5), (2, 5)), ((), ())):
        draws = sampler_of(noise, 2.0).draw(size, SeededRng(SEED))
        assert draws.shape == shape
        assert draws.dtype == np.int64


def test_system_words_do_not_repeat() -> None:
    """A repeat among 2**16 words has probability below 2**-32 if they are uniform."""
    words = np.concatenate([SystemRng().words(1 << 15), SystemRng().words(1 << 15)])
    assert np.unique(words).size == words.size


def test_a_seed_repeats_its_words_and_another_does_not() -> None:
    words = SeededRng(SEED, 1).words(1000)
    assert np.array_equal(words, SeededRng(SEED, 1).words(1000))
    assert not np.intersect1d(words, SeededRng(SEED, 2).words(1000)).size


def test_words_are_the_same_however_they_are_asked_for() -> None:
    whole, parts = SeededRng(SEED), SeededRng(SEED)
    assert np.array_equal(whole.words(7), np.concatenate([parts.words(3), parts.words(4)]))


def test_a_generator_prints_no_state() -> None:
    rng = SeededRng(123456789)
    rng.words(5)
    assert repr(rng) == "SeededRng(…)"
    assert repr(SystemRng()) == "SystemRng()"


def test_a_stream_depends_on_its_purpose_and_not_on_what_was_drawn() -> None:
    rng = SeededRng(SEED, 3)
    first = stream(rng, "a").words(4).tolist()
    rng.words(100)
    assert stream(rng, "a").words(4).tolist() == first
    assert stream(rng, "b").words(4).tolist() != first
    assert stream(SeededRng(SEED, 4), "a").words(4).tolist() != first
    system = SystemRng()
    assert stream(system, "a") is system


def test_words_of_a_secret_repeat_for_the_same_purpose_and_data_alone() -> None:
    """False alarm below 2**-300: five words of another source are the same."""
    secret = SecretRng(b"1" * 32)
    first = secret.bound("counts", b"ab", b"c").words(5).tolist()
    again = SecretRng(b"1" * 32).bound("counts", b"ab", b"c")
    assert again.words(5).tolist() == first
    assert again.words(5).tolist() != first  # a call draws new ones
    for other in (
        SecretRng(b"2" * 32).bound("counts", b"ab", b"c"),
        secret.bound("coins", b"ab", b"c"),
        secret.bound("counts", b"ab", b"d"),
        secret.bound("counts", b"a", b"bc"),  # where parts end matters
        secret.bound("counts", b"abc"),
        secret.bound("counts", b"ab", b"c", b""),
        secret.bound("counts", b"c", b"ab"),
    ):
        assert other.words(5).tolist() != first
    assert "1" not in repr(again)


def test_words_of_a_secret_are_bound_to_something() -> None:
    with pytest.raises(SpecError, match="bound to the data that they are added to"):
        SecretRng(b"1" * 32).words(1)
    assert bound(SecretRng(b"1" * 32), "a").words(1).size == 1
    system = SystemRng()
    assert bound(system, "a", b"b") is system
