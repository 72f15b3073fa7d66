"""Randomizers: every output listed with its exact probability, every claim checked against it.

The law of a record is written out here from the class's own coins, as fractions; estimates are
written out from algorithms 3, 4, 6 and 7 of paper 004. Nothing here reads a formula of `debias`
except to compare it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from decimal import Context, Decimal
from fractions import Fraction
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from scipy import linalg, stats

from checks import SEED, assert_binomial, assert_chi_square, assert_mean
from marks import quick
from sfumato import hashing
from sfumato.errors import MismatchError, SpecError
from sfumato.kernels.count.plain import PRIME
from sfumato.privacy import (
    CountMeanSketch,
    DirectResponse,
    HadamardCountMeanSketch,
    HashedResponse,
    Randomizer,
    SeededRng,
    SystemRng,
    Tally,
    debias,
)
from sfumato.privacy.samplers import Bernoulli, below
from sfumato.spec import digest, from_json, kinds, to_json

U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
Law = dict[int, Fraction]  # law of a record, read as a little-endian number

REPORTS = 1 << 19
ONE = Fraction(1)
SMALL: dict[str, Any] = {
    "count mean": CountMeanSketch(epsilon=1.3, rows=2, width=4, seed=1),
    "optimal flips": CountMeanSketch(epsilon=1.3, rows=2, width=4, seed=1, flips="optimal"),
    "hadamard": HadamardCountMeanSketch(epsilon=1.3, rows=2, width=8, seed=1),
    "hashed": HashedResponse(epsilon=1.3, rows=3, width=5, seed=1),
    "direct": DirectResponse(epsilon=1.3, categories=4),
}
EPSILONS = [1e-6, 0.01, 0.7, 1.3, 4.0, 8.0, 17.3, 32.0]


@pytest.fixture(params=SMALL)
def randomizer(request: pytest.FixtureRequest) -> Any:
    return SMALL[request.param]


def cells_of(randomizer: Any, value: int) -> tuple[int, ...]:
    """The cell of a value in every row, in Python's whole numbers."""
    if isinstance(randomizer, DirectResponse):
        return (value,)
    table = hashing.row_hashes(randomizer.seed, randomizer.epoch, randomizer.rows).tolist()
    return tuple(
        ((a * value * value + b * value + c) % PRIME) * randomizer.width >> 61 for a, b, c in table
    )


def coin_of(randomizer: Any) -> Fraction:
    return Fraction(randomizer.coin.numerator, 1 << 256)


def law(randomizer: Any, cells: Sequence[int]) -> Law:
    """The probability of every record of an item with these cells, one for each row."""
    coin, chances = coin_of(randomizer), dict[int, Fraction]()
    for row, own in enumerate(cells):
        for number, chance in _row_law(randomizer, coin, own):
            if isinstance(randomizer, CountMeanSketch):
                code = row + (number << 8 * randomizer.row_bytes)
            elif isinstance(randomizer, HadamardCountMeanSketch):
                code = row * 2 * randomizer.width + number
            else:
                code = row * randomizer.width + number
            chances[code] = chance / randomizer.rows
    return chances


def _row_law(randomizer: Any, coin: Fraction, own: int) -> Iterator[tuple[int, Fraction]]:
    width = randomizer.width
    if isinstance(randomizer, CountMeanSketch):
        half = Fraction(1, 2)
        mine = 1 - coin if randomizer.flips == "symmetric" else half
        for bits in range(1 << width):
            chance = ONE
            for cell in range(width):
                on = mine if cell == own else coin
                chance *= on if bits >> cell & 1 else 1 - on
            yield bits, chance
    elif isinstance(randomizer, HadamardCountMeanSketch):
        matrix = linalg.hadamard(width)
        for place, minus in product(range(width), (0, 1)):
            honest = (matrix[place, own] < 0) == bool(minus)
            yield 2 * place + minus, (1 - coin if honest else coin) / width
    else:
        for answer in range(width):
            yield answer, coin if answer == own else (1 - coin) / (width - 1)


def codes_of(records: U8) -> I64:
    return np.asarray(records.astype(np.int64) @ (1 << 8 * np.arange(records.shape[1])))


def rows_of(randomizer: Any, records: U8) -> I64:
    rows = randomizer.count_rows(records, np.zeros(randomizer.rows, dtype=np.int64))
    return np.asarray(rows, dtype=np.int64)


def folded(randomizer: Any, records: U8, kind: Any = np.int64) -> npt.NDArray[Any]:
    """The cells that valid records add up to, in cells of this kind."""
    cells = np.zeros((randomizer.rows, randomizer.width), dtype=kind)
    rows = randomizer.count_rows(records, np.zeros(randomizer.rows, dtype=np.int64))
    randomizer.fold(records, rows, cells)
    return cells


def worst_ratio(laws: Sequence[Law]) -> Fraction:
    """The largest ratio of the probabilities that two items give to one record."""
    return max(
        max(each[code] for each in laws) / min(each[code] for each in laws) for code in laws[0]
    )


def below_exp(epsilon: float) -> Fraction:
    """A rational number below e^epsilon, by less than one part in 10¹¹⁵."""
    context = Context(prec=120)
    return Fraction(context.exp(Decimal(epsilon))) * (1 - Fraction(1, 10**116))


# Privacy, exactly


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_no_record_says_more_than_epsilon(randomizer: Any, epsilon: float) -> None:
    """Every record against every pair of items, whatever their cells: in exact fractions."""
    variant = replace(randomizer, epsilon=epsilon)
    if isinstance(variant, DirectResponse):
        items: list[tuple[int, ...]] = [(cell,) for cell in range(variant.width)]
    else:  # rows do not mix, so equal cells in every row are all there is to list
        items = [(cell,) * variant.rows for cell in range(variant.width)]
    laws = [law(variant, cells) for cells in items]
    assert all(sum(each.values()) == 1 for each in laws)
    worst = worst_ratio(laws)
    assert worst <= below_exp(epsilon)
    assert math.log(worst) == pytest.approx(epsilon, abs=1e-9)


@pytest.mark.parametrize("name", ["count mean", "optimal flips", "hadamard", "hashed"])
def test_pairs_that_share_cells_in_some_rows_are_no_worse(name: str) -> None:
    """All items over both rows: the same ratio, and none at all where two items share all cells."""
    randomizer = SMALL[name] if name == "hadamard" else replace(SMALL[name], rows=2, width=3)
    randomizer = replace(randomizer, rows=2, width=4) if name == "hadamard" else randomizer
    items = list(product(range(randomizer.width), repeat=2))
    laws = {cells: law(randomizer, cells) for cells in items}
    ratios = {
        (a, b): max(laws[a][code] / laws[b][code] for code in laws[a])
        for a, b in product(items, repeat=2)
    }
    assert max(ratios.values()) <= below_exp(randomizer.epsilon)
    for (a, b), ratio in ratios.items():
        assert (ratio == 1) == (a == b)


def test_the_loss_of_small_sketches_is_the_oracle_s() -> None:
    """DIGEST 5E: four cells by 2⁴ outputs, eight cells by all coordinates: 1.300000."""
    for name in ("count mean", "hadamard"):
        randomizer = replace(SMALL[name], rows=1)
        laws = [law(randomizer, (cell,)) for cell in range(randomizer.width)]
        assert f"{math.log(worst_ratio(laws)):.6f}" == "1.300000"


def test_flips_at_epsilon_would_cost_twice_as_much() -> None:
    """The negative control. Paper 004's trap: e^epsilon where e^(epsilon/2) must stand."""
    twin = CountMeanSketch(epsilon=2.6, rows=1, width=4, seed=1)  # it flips at e^1.3
    worst = worst_ratio([law(twin, (cell,)) for cell in range(4)])
    assert worst > below_exp(1.3)
    assert f"{math.log(worst):.6f}" == "2.600000"


def test_rates_are_those_of_the_coin(randomizer: Any) -> None:
    coin = float(coin_of(randomizer))
    if isinstance(randomizer, CountMeanSketch):
        own = 1 - coin if randomizer.flips == "symmetric" else 0.5
        assert randomizer.rates == (own, coin)
    elif isinstance(randomizer, HashedResponse):
        assert randomizer.truth == coin
    else:
        assert randomizer.coin.probability == coin


@pytest.mark.parametrize("epsilon", [1e-17, 1e-100])
def test_an_epsilon_too_small_to_work_with_is_refused(randomizer: Any, epsilon: float) -> None:
    """At 1e-17 two rates are one float and nothing can be estimated; at 1e-100 a probability of 256
    digits is so far on the safe side of 1/2 that it betrays more than epsilon (4·2⁻²⁵⁶)."""
    with pytest.raises(SpecError, match="epsilon"):
        replace(randomizer, epsilon=epsilon)


# Records follow the law


def record_codes(randomizer: Any, value: int, count: int, *seed: int) -> I64:
    kind = np.int64 if isinstance(randomizer, DirectResponse) else np.uint64
    values = np.full(count, value, dtype=kind)
    records = randomizer.randomize(values, rng=SeededRng(SEED, *seed))
    assert randomizer.valid(records).all()
    return codes_of(records)


def assert_law(codes: I64, expected: Law, false_alarm: float = 1e-6) -> None:
    order = sorted(expected)
    counts = np.bincount(np.searchsorted(order, codes), minlength=len(order))
    assert set(np.unique(codes).tolist()) <= set(order), "a record that cannot be"
    assert_chi_square(counts, [float(expected[code]) for code in order], false_alarm)


def missed(expected: Law, true: Law, count: int, false_alarm: float = 1e-6) -> float:
    """The probability that the chi-square test accepts `true` as `expected`: the noncentral
    limit."""
    p = np.array([float(expected[code]) for code in expected])
    q = np.array([float(true[code]) for code in expected])
    shift = count * float(np.sum((q - p) ** 2 / p))
    bar = stats.chi2.isf(false_alarm, p.size - 1)
    return float(stats.ncx2.cdf(bar, p.size - 1, shift))


@pytest.mark.parametrize("item", [0, 3])
def test_records_follow_their_law(randomizer: Any, item: int) -> None:
    """False alarm 1e-6 (chi-square over all records). Power: an epsilon that is 5% off is missed
    with probability below 1e-6, which is computed here."""
    value = int(randomizer.values(np.array([item]))[0])
    expected = law(randomizer, cells_of(randomizer, value))
    assert_law(record_codes(randomizer, value, REPORTS, 1, item), expected)
    wrong = law(replace(randomizer, epsilon=1.05 * randomizer.epsilon), cells_of(randomizer, value))
    assert missed(expected, wrong, REPORTS) < 1e-6


def test_a_twin_that_flips_at_epsilon_is_caught() -> None:
    """The negative control."""
    honest = SMALL["count mean"]
    twin = replace(honest, epsilon=2 * honest.epsilon)  # its flips are at e^epsilon of `honest`
    value = int(honest.values(np.array([0]))[0])
    expected = law(honest, cells_of(honest, value))
    with pytest.raises(AssertionError, match="chi-square"):
        assert_law(record_codes(twin, value, REPORTS, 2), expected)


def test_an_epsilon_five_per_cent_off_is_caught(randomizer: Any) -> None:
    """The negative control of the power that is claimed above."""
    value = int(randomizer.values(np.array([0]))[0])
    twin = replace(randomizer, epsilon=1.05 * randomizer.epsilon)
    with pytest.raises(AssertionError, match="chi-square"):
        assert_law(
            record_codes(twin, value, REPORTS, 3), law(randomizer, cells_of(randomizer, value))
        )


@pytest.mark.parametrize("lag", [1, 4, 64, 256])
def test_records_are_independent_of_one_another(randomizer: Any, lag: int) -> None:
    """Pairs `lag` apart follow the product law; words and blocks of words are shared by neighbours.
    False alarm 1e-6. Power: records that repeat their partner once in thirty are missed with
    probability below 1e-6, which is computed here."""
    value = int(randomizer.values(np.array([0]))[0])
    single = law(randomizer, cells_of(randomizer, value))
    codes = record_codes(randomizer, value, REPORTS, 4, lag).reshape(-1, 2, lag)
    pairs = codes[:, 0].ravel() << 32 | codes[:, 1].ravel()
    expected = {a << 32 | b: single[a] * single[b] for a, b in product(single, repeat=2)}
    assert_law(pairs, expected)
    copied = {
        pair: Fraction(29, 30) * chance
        + (Fraction(1, 30) * single[pair >> 32] if pair >> 32 == pair & 0xFFFFFFFF else 0)
        for pair, chance in expected.items()
    }
    assert missed(expected, copied, pairs.size) < 1e-6


def test_a_batch_of_one_follows_the_same_law(randomizer: Any) -> None:
    """What a device does. False alarm 1e-6. Power: twice the epsilon is missed with probability
    below 1e-6, which is computed here."""
    count = 4_000
    value = randomizer.values(np.array([2]))
    rng = SeededRng(SEED, 5)
    records = np.concatenate([randomizer.randomize(value, rng=rng) for _ in range(count)])
    cells = cells_of(randomizer, int(value[0]))
    expected = law(randomizer, cells)
    assert_law(codes_of(records), expected)
    wrong = law(replace(randomizer, epsilon=2 * randomizer.epsilon), cells)
    assert missed(expected, wrong, count) < 1e-6


def test_the_system_s_generator_gives_the_same_law(randomizer: Any) -> None:
    """Through its stream cipher, whose arrays are read-only. False alarm 1e-6 on every run."""
    values = np.repeat(randomizer.values(np.array([1])), REPORTS)
    codes = codes_of(randomizer.randomize(values, rng=SystemRng()))
    assert_law(codes, law(randomizer, cells_of(randomizer, int(values[0]))))


# Coins


class Script:
    """An Rng that gives these words, then those of a seed."""

    def __init__(self, words: Sequence[int]) -> None:
        self.left = list(words)
        self.after = SeededRng(SEED, 6)

    def words(self, count: int) -> U64:
        words, self.left = self.left[:count], self.left[count:]
        rest = self.after.words(count - len(words))
        return np.concatenate([np.array(words, dtype=np.uint64), rest])


def exact_flip(epsilon: float) -> tuple[Fraction, Fraction]:
    """Bounds on 1/(1 + e^epsilon), a part in 10¹¹⁵ apart."""
    low = below_exp(epsilon)
    return 1 / (1 + low * (1 + Fraction(3, 10**116))), 1 / (1 + low)


@pytest.mark.parametrize("epsilon", [*EPSILONS, 1e-5, 0.1, 1.0, 2.0, math.pi, 16.0, 31.999])
def test_flips_are_rounded_up_by_less_than_two_places(epsilon: float) -> None:
    low, high = exact_flip(epsilon)
    flip = Fraction(Bernoulli.flip(epsilon).numerator, 1 << 256)
    assert high <= flip <= low + Fraction(2, 1 << 256)
    assert (1 - flip) / flip <= below_exp(epsilon)


@pytest.mark.parametrize("others", [1, 2, 55, 2**31 - 1])
@pytest.mark.parametrize("epsilon", [*EPSILONS, 1e-5, 0.1, 1.0, 2.0, math.pi, 16.0, 31.999])
def test_truths_are_rounded_down_by_less_than_two_places(epsilon: float, others: int) -> None:
    odds = below_exp(epsilon)
    low = odds / (odds + others)
    truth = Fraction(Bernoulli.truth(epsilon, others).numerator, 1 << 256)
    assert low * (1 + Fraction(1, 10**115)) - Fraction(2, 1 << 256) <= truth <= low
    assert truth / ((1 - truth) / others) <= odds


@pytest.mark.parametrize("numerator", [1 << 255, 1 << 253, (1 << 256) // 3, (1 << 256) - 1])
def test_bits_have_their_probability(numerator: int) -> None:
    """False alarm 1e-6 (exact binomial). Power: a probability of a half, a quarter or a third
    that is off by 0.005 is missed with probability below 1e-9 (10 or more deviations away)."""
    coin = Bernoulli(numerator)
    count = 1_000_000
    ones = int(coin.bits(count, SeededRng(SEED, 7)).sum())
    assert_binomial(ones, count, coin.probability)
    wrong = coin.probability - 0.005
    with pytest.raises(AssertionError):
        assert_binomial(ones, count, wrong)


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 1000, 20_000 * 64 + 1])
def test_as_many_bits_come_as_are_asked_for(count: int) -> None:
    bits = Bernoulli.flip(1.0).bits(count, SeededRng(SEED))
    assert bits.shape == (count,)
    assert bits.dtype == np.bool_


ONES = (1 << 64) - 1


@pytest.mark.parametrize("words", [1, 2, 4, 8])
@pytest.mark.parametrize("place", [40, 100, 250])
def test_a_lane_that_takes_long_is_not_drawn_anew(place: int, words: int) -> None:
    """A probability of 1 − 2^-place, and numbers 0.1111… that are above it: decided by the digit
    after that place, so that every bit is 0.

    To throw such numbers away because the random words at hand have run out, and to begin again,
    would favour numbers that are decided early.
    """
    block = min(words, 4)  # words that are decided together
    numbers = [ONES] * ((place + 5) * block)
    bits = Bernoulli((1 << 256) - (1 << 256 - place)).words(words, Script(numbers))
    assert not bits[:block].any()


@pytest.mark.parametrize("words", [2, 4, 8])
def test_a_lie_that_takes_long_is_told(words: int) -> None:
    """Numbers that begin with sixty ones are above e^32/(e^32 + 1), so their bits are 0: a lie.
    Were they drawn anew, 256 devices that are randomised together would never lie at epsilon 24,
    and any claim of epsilon would be false."""
    block = min(words, 4)
    bits = Bernoulli.truth(32.0, 1).words(words, Script([ONES] * (60 * block)))
    assert not bits[:block].any()


@pytest.mark.parametrize("bound", [1, 2, 3, 5, 7, 56, 1000, 1024, 2**31 - 1, 3 * 2**40])
def test_whole_numbers_are_rejected_just_where_they_would_favour_some(bound: int) -> None:
    limit = 2**64 - 2**64 % bound
    assert limit % bound == 0  # as many words for every number
    assert below(bound, 1, Script([limit - 1])).tolist() == [bound - 1]
    if limit < 2**64:  # drawn again, as often as it takes, and in its own place
        script = Script([4, limit, 2**64 - 1, 2**64 - 1, limit, 9, 8])
        assert below(bound, 3, script).tolist() == [4 % bound, 9 % bound, 8 % bound]


@pytest.mark.parametrize("bound", [1, 3, 4, 56])
def test_whole_numbers_are_uniform(bound: int) -> None:
    """False alarm 1e-6 (chi-square)."""
    numbers = below(bound, REPORTS, SeededRng(SEED, 8))
    assert numbers.dtype == np.int64
    assert (numbers.min(), numbers.max()) == (0, bound - 1)
    if bound > 1:
        assert_chi_square(np.bincount(numbers), np.full(bound, 1 / bound))


def test_whole_numbers_need_a_bound() -> None:
    for bound in (0, -3):
        with pytest.raises(SpecError, match="bound must be at least 1"):
            below(bound, 5, SeededRng(SEED))
    assert below(7, 0, SystemRng()).shape == (0,)


# Moments, exactly


class Enumerated(NamedTuple):
    mean: float
    variance: float


Hash = tuple[int, ...]  # the cell of every key


def every_hash(keys: int, width: int) -> list[Hash]:
    return list(product(range(width), repeat=keys))


def outputs(kind: str, epsilon: float, width: int, own: int) -> list[tuple[float, Any]]:
    """Every record of one row with its probability, from the paper's words."""
    if kind in ("symmetric", "optimal"):
        flip = 1 / (1 + math.exp(epsilon / 2 if kind == "symmetric" else epsilon))
        rate = [flip] * width
        rate[own] = 1 - flip if kind == "symmetric" else 0.5
        return [
            (math.prod(r if b else 1 - r for r, b in zip(rate, bits, strict=True)), bits)
            for bits in product((0, 1), repeat=width)
        ]
    if kind == "hadamard":
        flip = 1 / (1 + math.exp(epsilon))
        matrix = linalg.hadamard(width)
        return [
            ((flip if flipped else 1 - flip) / width, (place, int(matrix[place, own]) * sign))
            for place in range(width)
            for flipped, sign in ((False, 1), (True, -1))
        ]
    truth = math.exp(epsilon) / (math.exp(epsilon) + width - 1)
    return [(truth if cell == own else (1 - truth) / (width - 1), cell) for cell in range(width)]


def contribution(kind: str, epsilon: float, width: int, output: Any, query: int) -> float:
    """What a record adds to M[j, asked]/k: algorithms 3 and 6, and likewise for the other two."""
    if kind == "symmetric":
        c = (math.exp(epsilon / 2) + 1) / (math.exp(epsilon / 2) - 1)
        return float(c / 2 * (2 * output[query] - 1) + 0.5)
    if kind == "optimal":
        flip = 1 / (1 + math.exp(epsilon))
        return float((output[query] - flip) / (0.5 - flip))
    if kind == "hadamard":
        place, sign = output
        c = (math.exp(epsilon) + 1) / (math.exp(epsilon) - 1)
        return float(c * sign * linalg.hadamard(width)[place, query])
    truth = math.exp(epsilon) / (math.exp(epsilon) + width - 1)
    lie = (1 - truth) / (width - 1)
    return (float(output == query) - lie) / (truth - lie)


def enumerated(
    kind: str,
    epsilon: float,
    rows: int,
    width: int,
    keys: Sequence[int],
    query: int,
    family: Sequence[Hash],
) -> Enumerated:
    """Mean and variance of the plain estimate over hash functions, rows and coins: all of them.

    `keys` is the key of every device; algorithm 4 corrects for collisions, unless the family is one
    function alone, which has none.
    """
    count, alone = len(keys), len(family) == 1
    law_of = {own: outputs(kind, epsilon, width, own) for own in range(width)}
    first = second = 0.0
    for functions in product(family, repeat=rows):
        for choice in product(range(rows), repeat=count):
            weight = (1 / len(family)) ** rows * (1 / rows) ** count
            each = [
                [
                    (chance, contribution(kind, epsilon, width, output, functions[row][query]))
                    for chance, output in law_of[functions[row][key]]
                ]
                for key, row in zip(keys, choice, strict=True)
            ]
            for records in product(*each):
                chance = weight * math.prod(p for p, _ in records)
                total = sum(x for _, x in records)
                answer = total if alone else width / (width - 1) * (total - count / width)
                first += chance * answer
                second += chance * answer**2
    return Enumerated(first, second - first**2)


def randomizer_of(kind: str, epsilon: float, rows: int, width: int) -> Any:
    if kind in ("symmetric", "optimal"):
        return CountMeanSketch(epsilon=epsilon, rows=rows, width=width, seed=1, flips=kind)  # type: ignore[arg-type]
    if kind == "hadamard":
        return HadamardCountMeanSketch(epsilon=epsilon, rows=rows, width=width, seed=1)
    if kind == "hashed":
        return HashedResponse(epsilon=epsilon, rows=rows, width=width, seed=1)
    return DirectResponse(epsilon=epsilon, categories=width - 1)


def formula(kind: str, epsilon: float, rows: int, width: int, keys: list[int], query: int) -> float:
    others = [keys.count(key) for key in set(keys) if key != query]
    return float(
        debias.variance(
            randomizer_of(kind, epsilon, rows, width),
            count=len(keys),
            holders=float(keys.count(query)),
            squares=float(sum(count**2 for count in others)),
        )
    )


GOLDEN_MOMENTS = [
    ("symmetric", (0, 1), 0, 1.0, "32.341585"),
    ("symmetric", (1, 1), 0, 0.0, "34.341585"),
    ("symmetric", (0, 1, 1), 2, 0.0, "51.012377"),
    ("hadamard", (0, 1), 0, 1.0, "32.461555"),
    ("hadamard", (1, 1), 0, 0.0, "36.461555"),
]


@pytest.mark.parametrize(("kind", "keys", "query", "mean", "golden"), GOLDEN_MOMENTS)
def test_moments_are_the_oracle_s(
    kind: str, keys: tuple[int, ...], query: int, mean: float, golden: str
) -> None:
    """DIGEST 5E: two rows of two cells, epsilon 1, three keys."""
    moments = enumerated(kind, 1.0, 2, 2, keys, query, every_hash(3, 2))
    assert moments.mean == pytest.approx(mean, abs=1e-12)
    assert f"{moments.variance:.6f}" == golden
    assert f"{formula(kind, 1.0, 2, 2, list(keys), query):.6f}" == golden


@pytest.mark.parametrize("keys", [[0, 1], [1, 1], [0, 0, 1], [1, 2, 2]])
@pytest.mark.parametrize(
    ("kind", "rows", "width", "epsilon"),
    [
        ("symmetric", 2, 2, 0.5),
        ("symmetric", 1, 3, 4.0),
        ("optimal", 2, 2, 1.0),
        ("optimal", 1, 3, 4.0),
        ("hadamard", 2, 2, 3.0),
        ("hadamard", 1, 4, 2.0),
        ("hashed", 2, 2, 1.0),
        ("hashed", 2, 3, 4.0),
        ("hashed", 3, 2, 0.5),
    ],
)
def test_the_variance_is_that_of_all_outcomes(
    kind: str, rows: int, width: int, epsilon: float, keys: list[int]
) -> None:
    """Every hash function, row and coin. To 1e-9: sums of at most a million floats."""
    moments = enumerated(kind, epsilon, rows, width, keys, 0, every_hash(3, width))
    assert moments.mean == pytest.approx(keys.count(0), abs=1e-9)
    assert moments.variance == pytest.approx(formula(kind, epsilon, rows, width, keys, 0), rel=1e-9)


@pytest.mark.parametrize("keys", [[0, 1], [1, 1], [0, 0, 1, 2]])
@pytest.mark.parametrize("width", [2, 3, 4])
def test_the_variance_of_direct_responses_is_that_of_all_outcomes(
    keys: list[int], width: int
) -> None:
    keys = [key % width for key in keys]
    moments = enumerated("direct", 1.7, 1, width, keys, 0, [tuple(range(width))])
    assert moments.mean == pytest.approx(keys.count(0), abs=1e-9)
    assert moments.variance == pytest.approx(formula("direct", 1.7, 1, width, keys, 0), rel=1e-9)


def polynomials(degree: int, field: int, keys: int) -> list[Hash]:
    """All polynomials of at most this degree: (degree + 1)-wise independent, and no more."""
    return [
        tuple(sum(c * key**power for power, c in enumerate(each)) % field for key in range(keys))
        for each in product(range(field), repeat=degree + 1)
    ]


@pytest.mark.parametrize("kind", ["symmetric", "hashed"])
def test_three_wise_independence_is_enough_for_the_variance(kind: str) -> None:
    """Parabolas over five elements, four keys: not all functions, and the same variance."""
    keys = [0, 1, 2] if kind == "hashed" else [0, 1]
    moments = enumerated(kind, 2.0, 1, 5, keys, 3, polynomials(2, 5, 4))
    assert moments.mean == pytest.approx(0.0, abs=1e-9)
    assert moments.variance == pytest.approx(formula(kind, 2.0, 1, 5, keys, 3), rel=1e-9)


@pytest.mark.parametrize("kind", ["symmetric", "optimal", "hashed"])
def test_two_wise_independence_is_enough_for_the_mean_only(kind: str) -> None:
    """Lines over three elements: an item that collides with one of two others collides with
    both."""
    moments = enumerated(kind, 2.0, 1, 3, [0, 1], 2, polynomials(1, 3, 3))
    assert moments.mean == pytest.approx(0.0, abs=1e-9)
    assert moments.variance > 1.01 * formula(kind, 2.0, 1, 3, [0, 1], 2)


# Golden numbers and simulation


def test_golden_numbers_at_epsilon_four() -> None:
    """DIGEST 5E and 5C.10."""
    emoji = CountMeanSketch(epsilon=4.0, rows=65_536, width=1024, seed=1)
    own, other = emoji.rates
    assert f"{other:.9f}" == "0.119202922"
    assert f"{1 / (own - other):.9f}" == "1.313035285"
    alone = float(debias.variance(emoji, count=1.0, holders=0.0, squares=0.0))
    bound = (emoji.moments.own + 1 / 1024) * (1024 / 1023) ** 2  # theorem 4.2, for one device
    assert f"{bound:.9f}" == "0.182347952"
    assert bound * (1 - 1e-5) < alone < bound  # without terms such as −1/width²
    energy = HadamardCountMeanSketch(epsilon=4.0, rows=1024, width=32_768, seed=1)
    assert f"{energy.coin.probability:.9f}" == "0.017986210"
    assert f"{math.sqrt(energy.moments.miss):.9f}" == "1.037314721"
    small = CountMeanSketch(epsilon=4.0, rows=4, width=8, seed=1)
    squares = float(600**2 + 60**2 + 30**2 + 10**2)
    assert round(debias.variance(small, count=1000, holders=300.0, squares=squares)) == 13_333


def test_a_bit_reads_as_the_paper_s_debiased_bit() -> None:
    """k·(c/2·(±1) + 1/2) with k = 65,536 rows: 75,793.540235 and −10,257.540235, once over k."""
    randomizer = CountMeanSketch(epsilon=4.0, rows=65_536, width=8, seed=1)
    values = randomizer.values(["oak"])
    cell = cells_of(randomizer, int(values[0]))[777]
    for on, golden in ((True, "75793.540235"), (False, "-10257.540235")):
        bits = (1 << cell) if on else 0xFF & ~(1 << cell)
        record = np.array([[777 % 256, 777 // 256, bits]], dtype=np.uint8)
        cells = folded(randomizer, record, np.uint16)
        reading = float(randomizer.readings(cells, 1, values)[0])
        assert f"{65_536 * reading:.6f}" == golden


REPEATS = 1500
POPULATION = np.array([600, 300, 60, 30, 10])  # DIGEST 5C.10


@pytest.mark.parametrize("kind", quick(["symmetric", "optimal", "hadamard", "hashed"], "hashed"))
def test_over_seeds_estimates_have_the_stated_mean_and_variance(kind: str) -> None:
    """1500 seeds of the hash functions, by the four items but the first and four that nobody holds:
    6000 errors each. The mean of an item within 5 standard errors: false alarm 6e-7. The variance
    within 12%, which is five of its standard errors (2.4% over seeds other than these): the same.
    Power: a variance that is 25% off is missed with probability below 1e-4, four of them away."""
    randomizer = randomizer_of(kind, 4.0, 4, 8)
    estimates = np.empty((REPEATS, 8))
    rng = SeededRng(SEED, 9)
    for repeat in range(REPEATS):
        one = replace(randomizer, seed=repeat)
        values = one.values(np.arange(9))
        cells = folded(one, one.randomize(np.repeat(values[:5], POPULATION), rng=rng))
        estimates[repeat] = (one.readings(cells, 1000, values[1:]) - 1000 / 8) * 8 / 7
    holders = np.r_[POPULATION[1:], np.zeros(4)].astype(np.float64)
    others = float((POPULATION**2).sum()) - holders**2
    stated = debias.variance(randomizer, count=1000, holders=holders, squares=others)
    deviations = (estimates - holders) / np.sqrt(stated)
    for item in range(8):
        assert_mean(deviations[:, item], 0.0, 1.0, false_alarm=6e-7)
    for items in (slice(0, 4), slice(4, 8)):
        assert float(np.mean(deviations[:, items] ** 2)) == pytest.approx(1.0, abs=0.12)


@pytest.mark.parametrize("count", [1, 70, 3000])
def test_estimates_are_those_of_the_paper_s_algorithms(count: int) -> None:
    """Algorithms 3, 4, 6 and 7 in full, with floats: M is rows × width of debiased numbers."""
    epsilon, rows, width = 3.0, 6, 16
    for kind in ("symmetric", "optimal", "hadamard", "hashed"):
        randomizer = randomizer_of(kind, epsilon, rows, width)
        values = randomizer.values(np.arange(20))
        items = np.random.default_rng(SEED).integers(0, 20, count)
        records = randomizer.randomize(values[items], rng=SeededRng(SEED, 10))
        matrix = np.zeros((rows, width))
        for code in codes_of(records).tolist():
            if kind in ("symmetric", "optimal"):
                row, bits = code & 0xFF, code >> 8
                output: Any = tuple(bits >> cell & 1 for cell in range(width))
            elif kind == "hadamard":
                row, place, minus = code // (2 * width), code // 2 % width, code & 1
                output = (place, 1 - 2 * minus)
            else:
                row, output = divmod(code, width)
            matrix[row] += [
                rows * contribution(kind, epsilon, width, output, cell) for cell in range(width)
            ]
        cells = np.array([cells_of(randomizer, value) for value in values.tolist()])
        mean = matrix[np.arange(rows), cells].mean(axis=1)
        paper = width / (width - 1) * (mean - count / width)
        tally = Tally(randomizer)
        assert tally.fold(records) == 0
        estimates = debias.estimate(tally, values, collision_aware=False).counts
        assert np.allclose(estimates, paper, rtol=1e-9, atol=1e-9 * count)


# Records


def test_records_have_the_stated_size() -> None:
    randomizer: Any
    for randomizer, size in (
        (CountMeanSketch(epsilon=4.0, rows=65_536, width=1024, seed=1), 130),
        (CountMeanSketch(epsilon=4.0, rows=65_537, width=1025, seed=1), 132),
        (CountMeanSketch(epsilon=4.0, rows=1, width=2, seed=1), 2),
        (HadamardCountMeanSketch(epsilon=4.0, rows=1024, width=32_768, seed=1), 4),
        (HadamardCountMeanSketch(epsilon=4.0, rows=1024, width=1024, seed=1), 3),
        (HashedResponse(epsilon=4.0, rows=1024, width=56, seed=1), 2),
        (HashedResponse(epsilon=4.0, rows=65_536, width=56, seed=1), 3),
        (DirectResponse(epsilon=4.0, categories=255), 1),
        (DirectResponse(epsilon=4.0, categories=256), 2),
    ):
        assert randomizer.record_bytes == size
        values = randomizer.values(np.arange(3))
        records = randomizer.randomize(values, rng=SeededRng(SEED))
        assert records.shape == (3, size)
        assert records.dtype == np.uint8


SHAPES: list[Any] = [
    CountMeanSketch(epsilon=2.0, rows=5, width=5, seed=3),
    CountMeanSketch(epsilon=2.0, rows=256, width=8, seed=3, flips="optimal"),
    CountMeanSketch(epsilon=2.0, rows=7, width=2, seed=3, flips="optimal"),
    HadamardCountMeanSketch(epsilon=2.0, rows=3, width=4, seed=3),
    HadamardCountMeanSketch(epsilon=2.0, rows=40, width=32, seed=3),
    HashedResponse(epsilon=2.0, rows=5, width=7, seed=3),
    HashedResponse(epsilon=2.0, rows=64, width=56, seed=3),
    HashedResponse(epsilon=2.0, rows=1, width=256, seed=3),  # every byte is a record
    HashedResponse(epsilon=2.0, rows=1, width=65_536, seed=3),
    HadamardCountMeanSketch(epsilon=2.0, rows=1, width=128, seed=3),
    HadamardCountMeanSketch(epsilon=2.0, rows=1, width=32_768, seed=3),
    DirectResponse(epsilon=2.0, categories=1),
    DirectResponse(epsilon=2.0, categories=255),
    DirectResponse(epsilon=2.0, categories=300),
]


def decoded(randomizer: Any, code: int) -> tuple[int, dict[int, int]] | None:
    """The row of a record and its contributions to cells; nothing if it is invalid."""
    if isinstance(randomizer, CountMeanSketch):
        row, bits = code & 0xFF, code >> 8
        added = {cell: 1 for cell in range(randomizer.width) if bits >> cell & 1}
        fits = row < randomizer.rows and bits < 1 << randomizer.width
    elif isinstance(randomizer, HadamardCountMeanSketch):
        row, place = divmod(code >> 1, randomizer.width)
        added = {place: 1 - 2 * (code & 1)}
        fits = row < randomizer.rows
    else:
        row, cell = divmod(code, randomizer.width)
        added = {cell: 1}
        fits = row < randomizer.rows
    return (row, added) if fits else None


@pytest.mark.parametrize("randomizer", SHAPES, ids=repr)
def test_of_all_records_just_those_are_valid_that_could_have_been_made(randomizer: Any) -> None:
    """Every string of one or two bytes; each valid one is folded into its own row as it should."""
    size = randomizer.record_bytes
    codes = np.arange(1 << 8 * size)
    records = (codes[:, None] >> 8 * np.arange(size) & 0xFF).astype(np.uint8)
    parts = [decoded(randomizer, code) for code in codes.tolist()]
    valid = np.array([part is not None for part in parts])
    assert np.array_equal(randomizer.valid(records), valid)
    assert rows_of(randomizer, records[valid]).tolist() == [p[0] for p in parts if p is not None]
    expected = np.zeros((randomizer.rows, randomizer.width), dtype=np.int64)
    for part in parts:
        if part is not None:
            for cell, sign in part[1].items():
                expected[part[0], cell] += sign
    assert np.array_equal(folded(randomizer, records[valid], np.int32), expected)
    tally = Tally(randomizer)
    assert tally.fold(records) == int((~valid).sum())
    assert np.array_equal(tally.cells, expected)
    assert tally.count == int(valid.sum())


@pytest.mark.parametrize("width", [63, 64, 65, 100, 128, 130])
def test_rows_of_any_width_are_folded_bit_by_bit(width: int) -> None:
    for flips in ("symmetric", "optimal"):
        randomizer = CountMeanSketch(epsilon=2.0, rows=3, width=width, seed=3, flips=flips)
        records = randomizer.randomize(randomizer.values(np.arange(500)), rng=SeededRng(SEED))
        assert randomizer.valid(records).all()
        bits = np.unpackbits(records[:, 1:], axis=1, bitorder="little")
        assert not bits[:, width:].any()
        expected = np.zeros((3, width), dtype=np.int64)
        np.add.at(expected, records[:, 0], bits[:, :width])
        assert np.array_equal(folded(randomizer, records, np.uint16), expected)
        if width % 8:  # every bit of padding is refused
            for spare in range(width % 8, 8):
                bad = records[:1].copy()
                bad[0, -1] |= 1 << spare
                assert not randomizer.valid(bad)[0]


def test_rows_are_drawn_without_a_look_at_the_item(randomizer: Any) -> None:
    """The same words give the same rows, whatever the items are; and a record has its row.

    The Hadamard sketch flips its coins first, and draws row and column as one number.
    """
    values = [np.repeat(randomizer.values(np.array([item])), 500) for item in (0, 1)]
    rows = [rows_of(randomizer, randomizer.randomize(each, rng=SeededRng(SEED))) for each in values]
    assert np.array_equal(rows[0], rows[1])
    rng = SeededRng(SEED)
    if isinstance(randomizer, HadamardCountMeanSketch):
        Bernoulli.flip(randomizer.epsilon).words(8, rng)
        places = below(randomizer.rows * randomizer.width, 500, rng)
        assert np.array_equal(rows[0], places // randomizer.width)
    elif not isinstance(randomizer, DirectResponse):
        assert np.array_equal(rows[0], below(randomizer.rows, 500, rng))


def test_numbers_in_records_are_little_endian() -> None:
    """At epsilon 32 a lie among these has a probability of 1e-5 (bits) or far less."""
    items = np.arange(100)
    randomizer: Any
    for randomizer in (
        CountMeanSketch(epsilon=32.0, rows=1000, width=12, seed=3),
        HadamardCountMeanSketch(epsilon=32.0, rows=1000, width=16, seed=3),
        HashedResponse(epsilon=32.0, rows=1000, width=56, seed=3),
        DirectResponse(epsilon=32.0, categories=1000),
    ):
        values = randomizer.values(items)
        records = randomizer.randomize(values, rng=SeededRng(SEED, 11))
        for value, record in zip(values.tolist(), records, strict=True):
            number = int.from_bytes(record.tobytes(), "little")
            if isinstance(randomizer, DirectResponse):
                assert number == value
                continue
            cells = cells_of(randomizer, value)
            if isinstance(randomizer, CountMeanSketch):
                assert record.size == 4
                assert number >> 16 == 1 << cells[number & 0xFFFF]
            elif isinstance(randomizer, HadamardCountMeanSketch):
                row, place, minus = number // 32, number // 2 % 16, number & 1
                assert minus == (place & cells[row]).bit_count() % 2
            else:
                row, cell = divmod(number, 56)
                assert cell == cells[row]


def test_categories_that_are_not_listed_count_as_other() -> None:
    direct = DirectResponse(epsilon=2.0, categories=3)
    items = np.array([-5, -1, 0, 2, 3, 2**62])
    assert direct.values(items).tolist() == [3, 3, 0, 2, 3, 3]
    assert direct.values(np.array([2**64 - 1, 2**63, 1], dtype=np.uint64)).tolist() == [3, 3, 1]
    assert direct.values([]).tolist() == []
    for wrong in (np.array([0.5]), ["oak"]):
        with pytest.raises(SpecError, match="whole numbers"):
            direct.values(wrong)


def test_inputs_are_not_changed(randomizer: Any) -> None:
    values = randomizer.values(np.arange(50))
    values.flags.writeable = False
    records = randomizer.randomize(values, rng=SeededRng(SEED))
    records.flags.writeable = False
    randomizer.valid(records)
    cells = folded(randomizer, records)
    cells.flags.writeable = False
    before = cells.copy()
    randomizer.readings(cells, 50, values)
    assert np.array_equal(cells, before)


def test_nobody_makes_no_records(randomizer: Any) -> None:
    nothing = randomizer.values(np.arange(0))
    for rng in (SeededRng(SEED), SystemRng()):
        records = randomizer.randomize(nothing, rng=rng)
        assert records.shape == (0, randomizer.record_bytes)
    assert Tally(randomizer).fold(records) == 0


def test_records_repeat_with_their_seed_and_differ_with_another(randomizer: Any) -> None:
    values = randomizer.values(np.arange(200))
    first, again, other = (
        randomizer.randomize(values, rng=SeededRng(SEED, seed)) for seed in (1, 1, 2)
    )
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_epochs_have_hash_functions_of_their_own(randomizer: Any) -> None:
    if isinstance(randomizer, DirectResponse):
        pytest.skip("a direct response has no hash functions")
    values = randomizer.values(np.arange(100))
    cells = [
        [cells_of(replace(randomizer, epoch=epoch), value) for value in values.tolist()]
        for epoch in (0, 1)
    ]
    assert np.array_equal(replace(randomizer, epoch=1).values(np.arange(100)), values)
    assert cells[0] != cells[1]


def test_tallies_of_another_randomizer_or_length_are_refused(randomizer: Any) -> None:
    tally = Tally(randomizer)
    with pytest.raises(MismatchError, match=f"must have {randomizer.record_bytes} bytes"):
        tally.fold(np.zeros((3, randomizer.record_bytes + 1), dtype=np.uint8))
    with pytest.raises(MismatchError, match="do not add"):
        tally + Tally(replace(randomizer, epsilon=2.0))


def test_a_tally_outgrows_sixteen_bits_without_losing_a_record() -> None:
    """More records in one row than sixteen bits count; parts and the whole give the same."""
    randomizer: Any
    for randomizer in (
        CountMeanSketch(epsilon=8.0, rows=1, width=3, seed=1),
        HadamardCountMeanSketch(epsilon=8.0, rows=1, width=2, seed=1),
        HashedResponse(epsilon=8.0, rows=1, width=3, seed=1),
        DirectResponse(epsilon=8.0, categories=2),
    ):
        values = np.repeat(randomizer.values(np.array([1])), 70_000)
        records = randomizer.randomize(values, rng=SeededRng(SEED))
        whole, first, second = (Tally(randomizer) for _ in range(3))
        assert whole.cells.dtype.itemsize == 2
        whole.fold(records)
        first.fold(records[:40_000])
        second.fold(records[40_000:])
        assert whole.cells.dtype.itemsize == 4
        assert np.array_equal((first + second).cells, whole.cells)
        assert np.array_equal(whole.cells, folded(randomizer, records))
        assert whole.count == (first + second).count == 70_000


# Specs


def test_every_registered_randomizer_is_tested_here() -> None:
    registered = {
        cls for cls in kinds().values() if hasattr(cls, "randomize") and hasattr(cls, "readings")
    }
    assert registered == {type(each) for each in SMALL.values()}


def test_it_is_a_randomizer(randomizer: Any) -> None:
    assert isinstance(randomizer, Randomizer)


def test_it_survives_its_json(randomizer: Any) -> None:
    again = from_json(to_json(randomizer))
    assert again == randomizer
    assert digest(again) == digest(randomizer)
    assert digest(replace(randomizer, epsilon=2.0)) != digest(randomizer)


@pytest.mark.parametrize("epsilon", [0.0, -1.0, 32.000001, math.inf, math.nan])
def test_impossible_epsilons_are_refused(randomizer: Any, epsilon: float) -> None:
    with pytest.raises(SpecError):
        replace(randomizer, epsilon=epsilon)


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        ("count mean", {"width": 1}, "width must be at least 2; got 1"),
        ("count mean", {"width": 0}, "width must be at least 2"),
        ("count mean", {"rows": 0}, "rows must be at least 1; got 0"),
        ("count mean", {"rows": 65_536, "width": 65_536}, "rows × width must be at most"),
        ("count mean", {"seed": -1}, "seed must be"),
        ("count mean", {"seed": 2**53}, "seed"),
        ("count mean", {"epoch": -1}, "epoch must be"),
        ("count mean", {"flips": "fair"}, "flips"),
        ("hadamard", {"width": 1}, "width must be at least 2; got 1"),
        ("hadamard", {"width": 6}, "width must be a power of two; got 6"),
        ("hadamard", {"width": 1000}, "power of two"),
        ("hashed", {"width": 1}, "width must be at least 2; got 1"),
        ("hashed", {"rows": -1}, "rows must be at least 1"),
        ("direct", {"categories": 0}, "categories must be"),
        ("direct", {"categories": 2**31}, "categories must be"),
    ],
)
def test_impossible_sizes_are_refused(name: str, change: dict[str, Any], match: str) -> None:
    with pytest.raises(SpecError, match=match):
        replace(SMALL[name], **change)


def test_the_largest_epsilon_and_the_smallest_sizes_work() -> None:
    randomizer: Any
    for randomizer in (
        CountMeanSketch(epsilon=32.0, rows=1, width=2, seed=0),
        CountMeanSketch(epsilon=32.0, rows=1, width=2, seed=0, flips="optimal"),
        HadamardCountMeanSketch(epsilon=32.0, rows=1, width=2, seed=2**53 - 1),
        HashedResponse(epsilon=32.0, rows=1, width=2, seed=0),
        DirectResponse(epsilon=32.0, categories=1),
    ):
        values = randomizer.values(np.arange(3))
        records = randomizer.randomize(values, rng=SeededRng(SEED))
        assert randomizer.valid(records).all()
        tally = Tally(randomizer)
        tally.fold(records)
        assert np.isfinite(debias.estimate(tally, values).counts).all()
        assert np.isfinite(randomizer.moments).all()
