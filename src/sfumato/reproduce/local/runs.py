"""The runs behind paper 004's figures: records made, folded and read as by a service, and compared
with the truth; and tallies drawn without records.

`simulated_tally` draws a tally of any number of devices cell by cell. It is exact: given the number
of devices whose items are in a cell, a count mean sketch's cell is a sum of two binomial variables,
and the tally contains nothing else of the records.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from sfumato import hashing
from sfumato.arrays import F64, I64, U64
from sfumato.flow.word_discovery import DiscoveredWords, FragmentPuzzle, PrefixExtension
from sfumato.kernels import local
from sfumato.privacy import (
    CountMeanSketch,
    DirectResponse,
    HashedResponse,
    Randomizer,
    SeededRng,
    Tally,
    debias,
)
from sfumato.privacy.debias import LocalEstimates
from sfumato.privacy.randomizers import in_epoch
from sfumato.questions.new_words import plan as word_plan
from sfumato.reproduce.local.data import Source, random_words
from sfumato.reproduce.runner import Job

PIECE = 250_000  # devices whose records are made together
WORD_EPSILON = 8.0
COVERED = 0.95  # coverage of intervals
ROWS_AT_ONCE = 1_024  # rows of a simulated tally that are drawn together


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One run of one oracle, compared with the truth."""

    series: str
    oracle: str
    seed: int
    record_bytes: int
    table_cells: int
    mean_off: float  # mean error over items, in standard errors of that mean
    slope_off: float  # slope of estimates over true counts, minus one, in its standard errors
    error_ratio: float  # root mean square of errors over the formula's standard errors
    coverage: float  # of 95% intervals
    error: float  # root mean square
    error_unheld: float  # reported standard error of an item that nobody holds
    threshold: float  # 5%, family-wise, for an item that collides with no heavy one
    listed: int
    listed_unheld: int
    above: int  # items whose true count is above the threshold


def measure(
    series: str,
    oracle: str,
    seed: int,
    randomizer: Randomizer,
    counts: I64,
    estimates: LocalEstimates,
    predicted: F64,
) -> Measurement:
    """`predicted` is each item's standard error by the formula."""
    truth = counts.astype(np.float64)
    wrong = estimates.counts - truth
    # Errors of items that share a cell of a sketch are correlated; a response's cells add up to its
    # number of records.
    together = 0.0 if isinstance(randomizer, HashedResponse) else randomizer.collision
    threshold = estimates.null.threshold(counts.size)
    listed = estimates.significant()
    half = NormalDist().inv_cdf((1 + COVERED) / 2) * estimates.standard_error
    return Measurement(
        series=series,
        oracle=oracle,
        seed=seed,
        record_bytes=randomizer.record_bytes,
        table_cells=randomizer.rows * randomizer.width,
        mean_off=float(wrong.sum()) / _error_of_sum(predicted, together),
        slope_off=float(truth @ wrong) / _error_of_sum(truth * predicted, together),
        error_ratio=root_mean_square(wrong / predicted),
        coverage=float(np.mean(np.abs(wrong) <= half)),
        error=root_mean_square(wrong),
        error_unheld=estimates.null.error,
        threshold=threshold,
        listed=int(listed.sum()),
        listed_unheld=int(np.sum(listed & (counts == 0))),
        above=int(np.sum(truth > threshold)),
    )


def _error_of_sum(errors: F64, together: float) -> float:
    alone = float(errors @ errors)
    return math.sqrt(alone + together * (float(errors.sum()) ** 2 - alone))


def root_mean_square(values: F64) -> float:
    return float(np.sqrt(np.mean(values**2)))


def estimates(
    oracle: Randomizer,
    source: Source,
    counts: I64,
    seed: int,
    tell: Callable[[float], None] = lambda share: None,
    *,
    collision_aware: bool,
) -> LocalEstimates:
    """Make every device's record, fold all of them and read the tally."""
    direct = isinstance(oracle, DirectResponse)
    values = oracle.values(np.arange(counts.size) if direct else source.items)
    items = np.repeat(np.arange(counts.size), counts)
    tally, rng = Tally(oracle), SeededRng(seed, oracle.rows, oracle.width)
    for start in range(0, items.size, PIECE):
        tell(start / items.size / 2)
        tally.fold(oracle.randomize(values[items[start : start + PIECE]], rng=rng))
    tell(0.5)
    return debias.estimate(tally, values, collision_aware=collision_aware)


def exact_error(oracle: Randomizer, counts: I64) -> F64:
    """Each item's standard error by the formula."""
    truth = counts.astype(np.float64)
    squares = float(truth @ truth) - truth**2
    spread = debias.variance(oracle, count=float(truth.sum()), holders=truth, squares=squares)
    return np.asarray(np.sqrt(spread))


def simulated_tally(
    oracle: CountMeanSketch | HashedResponse, values: U64, counts: I64, rng: np.random.Generator
) -> Tally:
    """A tally of devices of which `counts` hold each value, drawn from its exact distribution.

    Each device draws its row independently, so an item's devices are multinomial over rows; in a
    row they are in the item's cell. Then come the coins: the bits of a count mean sketch are
    independent, and a lie of a hashed response is uniform over the other cells of its row.
    """
    tally = Tally(oracle)
    hashes = hashing.row_hashes(oracle.seed, oracle.epoch, oracle.rows)
    tally.cells = np.empty(tally.cells.shape, dtype=np.int64)
    left = counts.astype(np.int64)
    for start in range(0, oracle.rows, ROWS_AT_ONCE):
        rows = min(ROWS_AT_ONCE, oracle.rows - start)
        now = rng.binomial(left, rows / (oracle.rows - start))
        left = left - now
        spread = rng.multinomial(now, np.full(rows, 1 / rows))  # (items, rows)
        row = np.tile(np.arange(rows), values.size)
        cell = local.row_cells(
            np.repeat(values, rows), row, hashes[start : start + rows], oracle.width
        )
        place = row * oracle.width + cell
        holders = np.bincount(place, spread.reshape(-1), rows * oracle.width)  # exact below 2**53
        holders = holders.astype(np.int64).reshape(rows, oracle.width)
        total = spread.sum(axis=0)
        tally.row_counts[start : start + rows] = total
        tally.cells[start : start + rows] = _after_coins(oracle, holders, total, rng)
    return tally


def _after_coins(
    oracle: CountMeanSketch | HashedResponse, holders: I64, total: I64, rng: np.random.Generator
) -> I64:
    """The counts of cells after the coins, (rows, width)."""
    if isinstance(oracle, CountMeanSketch):
        own, other = oracle.rates
        return rng.binomial(holders, own) + rng.binomial(total[:, None] - holders, other)
    honest = rng.binomial(holders, oracle.truth)
    others = oracle.width - 1
    lies = rng.multinomial(holders - honest, np.full(others, 1 / others))  # (rows, width, others)
    for step in range(others):
        honest += np.roll(lies[:, :, step], step + 1, axis=1)
    return honest


SEARCHES = {"puzzle": "sequence fragment puzzle", "prefixes": "prefix extension"}


def search_for(series: str, seed: int, rows: int, devices: int) -> FragmentPuzzle | PrefixExtension:
    """A search among so many devices, with the hash functions of a seed."""
    if series == "prefixes":
        search = word_plan.prefix_search(WORD_EPSILON, records=devices)
        return replace(search, prefix=in_epoch(search.prefix, 0, seed))
    puzzle = word_plan.puzzle(WORD_EPSILON, rows=rows)
    word, fragment = (
        in_epoch(part, 0, 3 * seed + k) for k, part in enumerate((puzzle.word, puzzle.fragment))
    )
    return replace(puzzle, word=word, fragment=fragment, seed=3 * seed + 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """One search for words, compared with the truth."""

    series: str
    seed: int
    devices: int
    record_bytes: int
    found: int
    false: int
    candidates: int
    rarest: int  # true count of the rarest word found
    threshold: float
    seconds: float  # processor time of the discovery alone


def find_words(source: Source, job: Job, rows: int) -> tuple[Search, DiscoveredWords, I64]:
    """Search for words among devices of which half hold a word of the source; return the result,
    the words found, and the number of devices that hold each word of the source."""
    devices, series = job.workload
    rng = np.random.default_rng([job.seed, devices])
    counts = source.counts(devices // 2, rng)
    search = search_for(series, job.seed, rows, devices)
    codes = np.concatenate(
        [
            np.repeat(search.codes(source.items)[0], counts, axis=0),
            random_words(devices - devices // 2, rng),
        ]
    )
    tallies, coins = search.tallies(), SeededRng(job.seed, devices)
    for start in range(0, devices, PIECE):
        job.tell(start / devices / 2)
        search.fold(search.randomize(codes[start : start + PIECE], rng=coins), tallies)
    job.tell(0.5)
    begin = time.process_time()
    words = search.find(tallies)
    seconds = time.process_time() - begin
    truth = dict(zip(source.items.to_pylist(), counts.tolist(), strict=True))
    right = [word for word in words.words.to_pylist() if word in truth]
    outcome = Search(
        series=series,
        seed=job.seed,
        devices=devices,
        record_bytes=search.record_bytes,
        found=len(right),
        false=len(words) - len(right),
        candidates=words.candidates,
        rarest=min((truth[word] for word in right), default=0),
        threshold=words.threshold,
        seconds=seconds,
    )
    return outcome, words, counts
