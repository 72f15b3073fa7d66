"""The dense sketch's moments against what is stated of them, and its hashes against chance.

Moments are tested as means of many independent draws of the map: by the normal law, whose
deviation is the sample's, at a false alarm of 1e-6. Each has a control that must fail.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import numpy as np
import numpy.typing as npt
import pytest

from checks import SEED, assert_binomial, assert_chi_square, assert_mean
from marks import quick
from sfumato.kernels import dense
from sfumato.kernels.dense import plain as plain_dense
from sfumato.sketch.dense import DenseSketch

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]
Placing = Literal["rotation", "hashed"]

LENGTH, ROWS, WIDTH, DRAWS = 400, 15, 4, 3000  # of the paper's identity
RAGGED_LENGTH, RAGGED_WIDTH = 100, 30  # chunks of 30, 30, 30 and 10


@cache
def vector(length: int = LENGTH) -> F32:
    """Positive, so that a map without signs is caught; the end is heavy, as a short chunk is."""
    drawn = np.abs(np.random.default_rng([SEED, length]).normal(size=length))
    drawn[-10:] *= 3
    drawn = drawn.astype(np.float32)
    drawn.flags.writeable = False
    return drawn


@cache
def readings(placing: Placing, length: int, rows: int, width: int, draws: int = DRAWS) -> F64:
    """decode(encode(vector)) under independent maps, (draws, length)."""
    dense._compiled()
    found = np.empty((draws, length))
    for round in range(draws):
        sketch = DenseSketch(
            length=length, rows=rows, width=width, placing=placing, seed=SEED, round=round
        )
        found[round] = sketch.decode(sketch.encode(vector(length)))
    return found


def squared_errors(placing: Placing, length: int, rows: int, width: int) -> F64:
    return np.asarray(((readings(placing, length, rows, width) - vector(length)) ** 2).sum(axis=1))


def squared_norms(
    placing: Placing, values: npt.ArrayLike, rows: int, width: int, draws: int
) -> F64:
    """‖encode(values)‖² under independent maps, the blocks of one sketch: (draws,)."""
    values = np.asarray(values)
    sketch = DenseSketch(
        length=values.size, rows=rows, width=width, blocks=draws, placing=placing, seed=SEED
    )
    tables = sketch.encode(values).reshape(draws, -1).astype(np.float64)
    return np.asarray((tables**2).sum(axis=1))


def chunk_norms(values: F64, width: int) -> tuple[F64, F64]:
    """‖z_q‖² and |z_q| of the chunks of a vector."""
    parts = np.split(values, range(width, values.size, width))
    return np.array([np.sum(part**2) for part in parts]), np.array([float(p.size) for p in parts])


# --- reading back


@pytest.mark.parametrize("placing", quick(["rotation", "hashed"], "hashed"))
def test_one_block_reads_without_bias(placing: Placing) -> None:
    """A coordinate and two sums of them. Power: 15% of the first sum is over 5 deviations."""
    found = readings(placing, LENGTH, ROWS, WIDTH)
    signs = np.random.default_rng(SEED).choice([-1.0, 1.0], LENGTH)
    for weights in (np.eye(LENGTH)[7], np.ones(LENGTH), signs):
        seen = found @ weights
        assert_mean(seen, float(vector() @ weights), float(seen.std()))


def test_without_signs_the_reading_is_seen_to_be_biased(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: what meets is added, a quarter of all."""
    monkeypatch.setattr(dense, "_pick", lambda work: None)
    monkeypatch.setattr(
        plain_dense, "sign_words", lambda keys, count: np.zeros(count, dtype=np.uint32)
    )
    seen = []
    for round in range(100):
        sketch = DenseSketch(length=LENGTH, rows=ROWS, width=WIDTH, seed=SEED, round=round)
        seen.append(float(sketch.decode(sketch.encode(vector()))[7]))
    with pytest.raises(AssertionError):
        assert_mean(seen, float(vector()[7]), float(np.std(seen)))


def test_the_error_of_a_hashed_sketch_is_the_paper_s() -> None:
    """(length − 1)/(rows·width)·‖z‖², which is 6.65·‖z‖² here. Power: 5% are 8 deviations."""
    seen = squared_errors("hashed", LENGTH, ROWS, WIDTH) / float(vector() @ vector())
    assert_mean(seen, (LENGTH - 1) / (ROWS * WIDTH), float(seen.std()))
    for wrong in (1.05, 0.95):
        with pytest.raises(AssertionError):
            assert_mean(seen, wrong * (LENGTH - 1) / (ROWS * WIDTH), float(seen.std()))


def stated_error(width: int, rows: int, values: F64) -> float:
    """Coordinates of a chunk never meet, those of two chunks meet with probability 1/width."""
    squares, sizes = chunk_norms(values, width)
    return float(np.sum(squares * (values.size - sizes)) / (rows * width))


@pytest.mark.parametrize(
    ("length", "rows", "width"),
    [
        pytest.param(LENGTH, ROWS, WIDTH, marks=pytest.mark.slow),
        (RAGGED_LENGTH, 3, RAGGED_WIDTH),
    ],
)
def test_the_error_with_rotations_follows_the_chunks(length: int, rows: int, width: int) -> None:
    """Σ ‖z_q‖²·(length − |z_q|)/(rows·width), which is no more than the paper's."""
    values = vector(length).astype(np.float64)
    seen, stated = (
        squared_errors("rotation", length, rows, width),
        stated_error(width, rows, values),
    )
    assert stated < (length - 1) / (rows * width) * float(values @ values)
    assert_mean(seen, stated, float(seen.std()))


def test_the_two_errors_are_told_apart() -> None:
    """The control, where chunks are long: each kind of sketch against the other's formula."""
    values = vector(RAGGED_LENGTH).astype(np.float64)
    hashed = (RAGGED_LENGTH - 1) / (3 * RAGGED_WIDTH) * float(values @ values)
    rotated = stated_error(RAGGED_WIDTH, 3, values)
    wrong: list[tuple[Placing, float]] = [("rotation", hashed), ("hashed", rotated)]
    for placing, stated in wrong:
        seen = squared_errors(placing, RAGGED_LENGTH, 3, RAGGED_WIDTH)
        with pytest.raises(AssertionError):
            assert_mean(seen, stated, float(seen.std()))


@pytest.mark.parametrize("placing", quick(["rotation", "hashed"], "hashed"))
def test_noise_of_the_cells_is_noise_of_the_coordinates(placing: Placing) -> None:
    """E‖decode(ξ)‖² = length for a ξ of unit variance. Power: 1.1 times it is 7 deviations."""
    dense._compiled()
    rng, seen = np.random.default_rng([SEED, 5]), np.empty(1000)
    for round in range(seen.size):
        sketch = DenseSketch(
            length=LENGTH, rows=ROWS, width=20, placing=placing, seed=SEED, round=round
        )
        read = sketch.decode(rng.normal(size=sketch.shape))
        seen[round] = float(read @ read)
    assert_mean(seen, LENGTH, float(seen.std()))
    with pytest.raises(AssertionError):
        assert_mean(seen, 1.1 * LENGTH, float(seen.std()))


# --- norms

BLOCKS = 20_000


def check_norm(placing: Placing, values: F64, rows: int, width: int, variance: float) -> None:
    """The mean of norm² is ‖z‖² and its variance the stated one: 10% more or less are caught."""
    square = float(values @ values)
    seen = squared_norms(placing, values, rows, width, BLOCKS)
    assert_mean(seen, square, float(seen.std()))
    deviations = (seen - square) ** 2
    assert_mean(deviations, variance, float(deviations.std()))
    for wrong in (1.1, 0.9):
        with pytest.raises(AssertionError):
            assert_mean(deviations, wrong * variance, float(deviations.std()))


def stated_variance(values: F64, rows: int, width: int) -> float:
    squares, _ = chunk_norms(values, width)
    return float(2 * (squares.sum() ** 2 - np.sum(squares**2)) / (rows * width))


def hashed_variance(values: F64, rows: int, width: int) -> float:
    squares = values**2
    return float(2 * (squares.sum() ** 2 - np.sum(squares**2)) / (rows * width))


def test_the_norm_of_a_hashed_sketch_has_the_paper_s_variance() -> None:
    values = vector(60).astype(np.float64)
    check_norm("hashed", values, 2, 8, hashed_variance(values, 2, 8))


def test_the_norm_with_rotations_has_the_stated_variance() -> None:
    values = vector(RAGGED_LENGTH).astype(np.float64)
    stated = stated_variance(values, 2, RAGGED_WIDTH)
    assert stated < hashed_variance(values, 2, RAGGED_WIDTH)
    check_norm("rotation", values, 2, RAGGED_WIDTH, stated)


def test_equal_chunks_do_no_harm_to_the_norm() -> None:
    """Constant over chunks, every coordinate meets its like: still no more than stated, which is
    2·length²·(1 − 1/chunks)/(rows·width)."""
    values, width = np.ones(120), 30
    stated = 2 * 120**2 * (1 - 1 / 4) / (2 * width)
    assert stated_variance(values, 2, width) == pytest.approx(stated)
    assert stated < hashed_variance(values, 2, width)
    check_norm("rotation", values, 2, width, stated)


RUN, RUN_WIDTH = 8, 512


def two_runs() -> F64:
    """Eight ones in each of two chunks."""
    values = np.zeros(2 * RUN_WIDTH)
    values[3 : 3 + RUN] = values[900 : 900 + RUN] = 1
    return values


def fourth_moments(placing: Placing) -> F64:
    square = 2 * RUN
    return (squared_norms(placing, two_runs(), 1, RUN_WIDTH, 20_000) - square) ** 4


@pytest.mark.slow
def test_runs_that_meet_meet_together() -> None:
    """The fourth moment of a row's ‖·‖² is 16·(2m³ − 2m² + m)/width for two runs of m: an overlap
    of k has the chance 1/width for each shift, and four signs pair up in 3k² − 2k ways.

    The control is a hashed sketch, which has about a quarter of it.
    """
    stated = 16 * (2 * RUN**3 - 2 * RUN**2 + RUN) / RUN_WIDTH
    seen = fourth_moments("rotation")
    assert_mean(seen, stated, float(seen.std()))
    seen = fourth_moments("hashed")
    with pytest.raises(AssertionError):
        assert_mean(seen, stated, float(seen.std()))


def test_errors_of_neighbours_are_uncorrelated_and_not_independent() -> None:
    """A run of m ones, read in another chunk: e_i·e_(i+1) is 0 in the mean, and its square
    (m − 1)/width, as both meet the run or none does; were they independent, (m/width)²."""
    values = np.zeros(2 * RUN_WIDTH, dtype=np.float32)
    values[900 : 900 + RUN] = 1
    draws = 20_000
    sketch = DenseSketch(length=values.size, rows=1, width=RUN_WIDTH, blocks=draws, seed=SEED)
    table = sketch.encode(values)
    cells = (20 + np.arange(2)[:, None] + sketch.rotations[:, 0]) % RUN_WIDTH
    words = np.array([plain_dense.sign_words(keys, 1)[0] for keys in sketch.sign_keys])
    minus = (words >> np.array([[20], [21]], dtype=np.uint32)) & np.uint32(1)
    errors = table[np.arange(draws), cells] * np.where(minus, -1, 1)
    products = errors[0].astype(np.float64) * errors[1]
    assert_mean(products, 0.0, float(products.std()))
    squares = products**2
    assert_mean(squares, (RUN - 1) / RUN_WIDTH, float(squares.std()))
    with pytest.raises(AssertionError):  # the control
        assert_mean(squares, (RUN / RUN_WIDTH) ** 2, float(squares.std()))


# --- the hashes: false alarm 1e-6 for each count that is looked at

CHUNKS = 60_000
LAGS = (1, 2, 3, 7, 64, 1024, 4097)


def check_rotations(turns: I64, width: int) -> None:
    """One row's rotations are uniform, and so are pairs of them at several distances."""
    even = np.full(width, 1 / width)
    assert_chi_square(np.bincount(turns, minlength=width), even)
    for lag in LAGS:
        pairs = turns[lag:] * width + turns[:-lag]
        assert_chi_square(np.bincount(pairs, minlength=width**2), np.full(width**2, width**-2.0))
        assert_chi_square(np.bincount((turns[lag:] - turns[:-lag]) % width, minlength=width), even)


@pytest.mark.parametrize("width", [2, 7, 37])
def test_rotations_are_uniform_and_pairwise_independent(width: int) -> None:
    sketch = DenseSketch(length=CHUNKS * width, rows=3, width=width, seed=SEED)
    turns = sketch.rotations.astype(np.int64)
    for row in turns:
        check_rotations(row, width)
    pairs = turns[0] * width + turns[1]
    assert_chi_square(np.bincount(pairs, minlength=width**2), np.full(width**2, width**-2.0))


def test_chunks_meet_with_the_chance_of_a_cell() -> None:
    """Over 20,000 rows, exact binomial: for near chunks, far ones and those `width` apart."""
    width, rows = 20, 20_000
    sketch = DenseSketch(length=50 * width, rows=rows, width=width, seed=SEED)
    for one, other in ((0, 1), (0, width), (3, 23), (7, 49)):
        meet = sketch.rotations[:, one] == sketch.rotations[:, other]
        assert_binomial(int(meet.sum()), rows, 1 / width)


def test_a_linear_hash_is_caught() -> None:
    """The control: chunks turn in step, and those `width` apart always meet."""
    width, rng = 37, np.random.default_rng(SEED)
    prime = (1 << 61) - 1
    slope, start = (int(word) for word in rng.integers(1, prime, 2))
    turns = np.array([(slope * chunk + start) % prime % width for chunk in range(CHUNKS)])
    with pytest.raises(AssertionError):
        check_rotations(turns, width)
    slopes, starts = rng.integers(1, width, 20_000), rng.integers(0, width, 20_000)
    meet = (slopes * 3 + starts) % width == (slopes * (3 + width) + starts) % width
    with pytest.raises(AssertionError):
        assert_binomial(int(meet.sum()), meet.size, 1 / width)


SIGN_WORDS = 1 << 15
SIGN_LAGS = (1, 2, 31, 32, 33, 64, 1000, 1 << 15, (1 << 18) + 5)


def check_signs(words: U32) -> None:
    """Signs, products of two and products of four that meet together are fair coins; and bytes of
    them uniform."""
    every = words.astype("<u4").view(np.uint8)
    bits = np.unpackbits(every, bitorder="little")
    assert_binomial(int(bits.sum()), bits.size, 0.5)
    assert_chi_square(np.bincount(every, minlength=256), np.full(256, 1 / 256))
    for lag in SIGN_LAGS:
        products = bits[lag:] ^ bits[:-lag]
        assert_binomial(int(products.sum()), products.size, 0.5)
        fours = products[1:] ^ products[:-1]
        if lag > 1:  # else two of the four are one
            assert_binomial(int(fours.sum()), fours.size, 0.5)
    for place in range(32):  # a bit of each word, and its like in the next
        column = (words >> np.uint32(place)) & np.uint32(1)
        assert_binomial(int((column[1:] ^ column[:-1]).sum()), column.size - 1, 0.5)


def test_signs_are_fair_coins_by_twos_and_fours() -> None:
    sketch = DenseSketch(length=32 * SIGN_WORDS, rows=3, width=1000, seed=SEED)
    words = [plain_dense.sign_words(keys, SIGN_WORDS) for keys in sketch.sign_keys]
    for row in words:
        check_signs(row)
    for one, other in ((0, 1), (0, 2), (1, 2)):
        check_signs(words[one] ^ words[other])


def test_signs_of_two_coordinates_are_independent_over_rows() -> None:
    """Exact binomial over 20,000 rows, for coordinates of one word, of two and far apart."""
    rows = 20_000
    sketch = DenseSketch(length=1, rows=rows, width=1, seed=SEED)
    words = np.array([plain_dense.sign_words(keys, 500) for keys in sketch.sign_keys])
    for one, other in ((0, 1), (5, 37), (31, 32), (17, 12_345)):
        signs = [(words[:, i >> 5] >> np.uint32(i & 31)) & np.uint32(1) for i in (one, other)]
        assert_binomial(int(signs[0].sum()), rows, 0.5)
        assert_binomial(int((signs[0] ^ signs[1]).sum()), rows, 0.5)


def test_linear_signs_are_caught() -> None:
    """The control: the low bits of a linear sequence take turns."""
    slope, start = np.random.default_rng(SEED).integers(0, 1 << 31, 2, dtype=np.uint32)
    words = np.arange(SIGN_WORDS, dtype=np.uint32) * (2 * slope + np.uint32(1)) + start
    with pytest.raises(AssertionError):
        check_signs(words)


def test_hashed_cells_and_signs_are_uniform_together() -> None:
    width, length = 11, 200_000
    sketch = DenseSketch(length=length, rows=2, width=width, placing="hashed", seed=SEED)
    every, plus = plain_dense.hashed_cells(sketch._keys[:, 0], length, width)
    for cells, signs in zip(every, plus, strict=True):
        both = 2 * cells + (signs > 0)
        assert_chi_square(np.bincount(both, minlength=2 * width), np.full(2 * width, 0.5 / width))
        for lag in LAGS:
            met = cells[lag:] == cells[:-lag]
            assert_binomial(int(met.sum()), met.size, 1 / width)
            alike = signs[lag:] == signs[:-lag]
            assert_binomial(int(alike.sum()), alike.size, 0.5)
