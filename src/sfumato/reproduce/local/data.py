"""The devices of paper 004's experiments, and a tally's law without its records.

Paper 004 tells what was asked and with which parameters, not what came back. What stands for its
devices: counts of emoji on Twitter, hosts in the rank order of a browser report, the names of
HealthKit's types, and English words that are in no dictionary. Where no frequency is public a law
i^-1 of the rank is made up, and `data` says so: it goes into every number and title. Files are
looked for as in `frequency_data`; without them everything is made up, in the same shape.

`simulated_tally` draws a tally of any number of devices cell by cell. It is exact: given how many
devices hold what is in a cell, a count mean sketch's cell is a sum of two binomial variables, and
nothing else of the records is in the tally.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sfumato import hashing
from sfumato.errors import DataError
from sfumato.flow.word_discovery import FragmentPuzzle, PrefixExtension
from sfumato.kernels import local
from sfumato.privacy import (
    CountMeanSketch,
    DirectResponse,
    HadamardCountMeanSketch,
    HashedResponse,
    Randomizer,
    SeededRng,
    Tally,
    debias,
)
from sfumato.privacy.debias import LocalEstimates
from sfumato.privacy.randomizers import in_epoch
from sfumato.questions.new_words import plan as word_plan
from sfumato.reproduce.frequencies.data import _file, _read, power_law_shares
from sfumato.sketch.words import LATIN

U64 = npt.NDArray[np.uint64]
U16 = npt.NDArray[np.uint16]
I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

EMOJI, EMOJI_USED, EMOJI_VERSION = 2_623, 845, 5.0  # of 2017; those with a count
EMOJI_LAW = 1.2  # made-up counts fall off about as fast as Twitter's
DOMAINS = 250_000
HEALTH_TYPES = 190
MADE_UP = 1.0  # the exponent where nothing is known
WORDS, SHORTEST, LONGEST = 100, 3, 10
DICTIONARY_SIZE = 70  # words of a SCOWL list up to this size are in the keyboard's dictionary
PIECE = 250_000  # devices whose records are made together
WORD_EPSILON = 8.0
_ROWS = 1_024  # of a simulated tally that are drawn together


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A dictionary, and how common each of its items is among devices that hold one each."""

    data: str  # what it is, in full
    items: pa.Array  # most common first
    shares: F64
    measured: bool = False  # whether an item's share is its own, not a made-up law's

    def first(self, items: int) -> Source:
        """Only the most common ones."""
        if items >= len(self.items):
            return self
        kept = self.shares[:items]
        data = f"{self.data}, the first {items:,}"
        return replace(self, data=data, items=self.items[:items], shares=kept / kept.sum())

    def counts(self, devices: int, rng: np.random.Generator) -> I64:
        """How many of these devices hold each item."""
        return rng.multinomial(devices, self.shares)


def emoji() -> Source:
    """The emoji of 2017 by their count on Twitter; two thirds have none."""
    path = _file("emoji_list.csv.gz")
    if path is None:
        shares = np.zeros(EMOJI)
        shares[:EMOJI_USED] = power_law_shares(EMOJI_LAW, EMOJI_USED)
        data = f"made-up emoji: law i^-{EMOJI_LAW:g} for {EMOJI_USED} of {EMOJI:,}"
        return Source(data=data, items=_made_up("emoji", EMOJI), shares=shares)
    columns = ("name", "emoji_version", "twitter_count")
    names, versions, uses = _read(path, columns, (pa.string(), pa.float64(), pa.int64()))
    old = pc.less_equal(versions, EMOJI_VERSION)
    counts = np.asarray(pc.fill_null(uses.filter(old), 0)).astype(np.float64)
    if not counts.sum() > 0:
        raise DataError(f"{path} must hold emoji of version {EMOJI_VERSION:g} with a count")
    order = np.argsort(-counts, kind="stable")
    return Source(
        data=f"emoji of 2017 by use on Twitter ({path.name})",
        items=names.filter(old).take(pa.array(order)),
        shares=counts[order] / counts.sum(),
        measured=True,
    )


def domains() -> Source:
    """Hosts in the order of their rank buckets; how common each is, is made up."""
    path = _file("domains_crux_au.parquet")
    law = f"law i^-{MADE_UP:g} made up"
    shares = power_law_shares(MADE_UP, DOMAINS)
    if path is None:
        data, items = f"made-up domains, {law}", _made_up("domain", DOMAINS)
        return Source(data=data, items=items, shares=shares)
    (hosts,) = _read(path, ("host",), (pa.string(),))
    if len(hosts) < DOMAINS:
        raise DataError(f"{path} must hold at least {DOMAINS} hosts; got {len(hosts)}")
    return Source(
        data=f"web hosts in rank order, {law} ({path.name})", items=hosts[:DOMAINS], shares=shares
    )


def health_types() -> Source:
    """HealthKit's types; nobody outside knows how often each is used."""
    path = _file("healthkit_types.csv.gz")
    law = f"law i^-{MADE_UP:g} made up"
    if path is None:
        data, names = f"made-up health types, {law}", _made_up("health type", HEALTH_TYPES)
    else:
        (names,) = _read(path, ("identifier",), (pa.string(),))
        data = f"HealthKit types, {law} ({path.name})"
    return Source(data=data, items=names, shares=power_law_shares(MADE_UP, len(names)))


def new_words() -> Source:
    """The most common words of three to ten letters that are in no dictionary."""
    path = _file("words_en.parquet")
    law = f"law i^-{MADE_UP:g} made up"
    shares = power_law_shares(MADE_UP, WORDS)
    if path is None:
        rng = np.random.default_rng(WORDS)
        found: dict[str, None] = {}
        while len(found) < WORDS:
            letters = rng.choice(list(LATIN), size=rng.integers(SHORTEST, LONGEST + 1))
            found["".join(letters)] = None
        data = f"{WORDS} made-up words, {law}"
        return Source(data=data, items=pa.array(list(found)), shares=shares)
    columns, types = ("word", "freq", "scowl_size"), (pa.string(), pa.float64(), pa.int64())
    words, often, size = _read(path, columns, types)
    new = pc.or_(pc.equal(size, 0), pc.greater(size, DICTIONARY_SIZE))
    plain = pc.match_substring_regex(words, f"^[a-z]{{{SHORTEST},{LONGEST}}}$")
    kept = np.flatnonzero(np.asarray(pc.and_(new, plain)))
    if kept.size < WORDS:
        raise DataError(f"{path} must hold at least {WORDS} words in no dictionary")
    best = kept[np.argsort(-np.asarray(often)[kept], kind="stable")[:WORDS]]
    data = f"the {WORDS} most common words in no dictionary, {law} ({path.name})"
    return Source(data=data, items=words.take(pa.array(best)), shares=shares)


def random_words(count: int, rng: np.random.Generator) -> U16:
    """Codes of words of random letters, three to ten of them: (count, 10)."""
    codes = rng.integers(1, len(LATIN) + 1, (count, LONGEST), dtype=np.uint16)
    length = rng.integers(SHORTEST, LONGEST + 1, count)
    codes[np.arange(LONGEST) >= length[:, None]] = 0
    return codes


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A use of paper 004, and what is known of it for a million devices."""

    name: str
    title: str
    source: Callable[[], Source]
    sketch: CountMeanSketch | HadamardCountMeanSketch  # the paper's
    error: float  # standard error of an item that few hold
    threshold: float  # 5%, family-wise
    share: float  # at most this of the paper's variance is ours
    repeats: int  # enough to tell a standard error to about 1%
    small_items: int
    small_repeats: int = 2


CASES = (
    Case(
        name="004-emoji",
        title="popular emoji",
        source=emoji,
        sketch=CountMeanSketch(epsilon=4.0, rows=65_536, width=1_024, seed=0),
        error=427,
        threshold=1_758,
        share=0.5,
        repeats=4,
        small_items=1_000,
    ),
    Case(
        name="004-autoplay",
        title="domains where videos are played",
        source=domains,
        sketch=CountMeanSketch(epsilon=8.0, rows=65_536, width=1_024, seed=0),
        error=142,
        threshold=717,
        share=0.1,
        repeats=1,
        small_items=2_000,
        small_repeats=1,
    ),
    Case(
        name="004-energy",
        title="domains that take much energy",
        source=domains,
        sketch=HadamardCountMeanSketch(epsilon=4.0, rows=1_024, width=32_768, seed=0),
        error=1_037,
        threshold=5_258,
        share=0.1,
        repeats=3,
        small_items=2_000,
    ),
    Case(
        name="004-health",
        title="health types in use",
        source=health_types,
        sketch=CountMeanSketch(epsilon=2.0, rows=65_536, width=256, seed=0),
        error=965,
        threshold=3_360,
        share=0.9,
        repeats=20,
        small_items=100,
        small_repeats=12,
    ),
)


SEARCHES = {"puzzle": "sequence fragment puzzle", "prefixes": "prefix extension"}


def search(series: str, seed: int, rows: int) -> FragmentPuzzle | PrefixExtension:
    """The search with the hash functions of a seed."""
    if series == "prefixes":
        search = word_plan.prefix_search(WORD_EPSILON)
        return replace(search, prefix=in_epoch(search.prefix, 0, seed))
    puzzle = word_plan.puzzle(WORD_EPSILON, rows=rows)
    word, fragment = (
        in_epoch(part, 0, 3 * seed + k) for k, part in enumerate((puzzle.word, puzzle.fragment))
    )
    return replace(puzzle, word=word, fragment=fragment, seed=3 * seed + 2)


def estimates(
    oracle: Randomizer,
    source: Source,
    counts: I64,
    seed: int,
    tell: Callable[[float], None],
    *,
    aware: bool,
) -> LocalEstimates:
    """Make every device's record, fold all of them and read the tally."""
    direct = isinstance(oracle, DirectResponse)
    values = oracle.values(np.arange(counts.size) if direct else source.items)
    held = np.repeat(np.arange(counts.size), counts)
    tally, rng = Tally(oracle), SeededRng(seed, oracle.rows, oracle.width)
    for start in range(0, held.size, PIECE):
        tell(start / held.size / 2)
        tally.fold(oracle.randomize(values[held[start : start + PIECE]], rng=rng))
    tell(0.5)
    return debias.estimate(tally, values, aware=aware)


def exact_error(oracle: Randomizer, counts: I64) -> F64:
    """Each item's standard error by the formula."""
    truth = counts.astype(np.float64)
    squares = float(truth @ truth) - truth**2
    spread = debias.variance(oracle, count=float(truth.sum()), held=truth, squares=squares)
    return np.asarray(np.sqrt(spread))


def simulated_tally(
    oracle: CountMeanSketch | HashedResponse, values: U64, counts: I64, rng: np.random.Generator
) -> Tally:
    """The tally of devices of which `counts` hold each value, drawn from its exact law.

    A device draws its row alone, so an item's devices fall on rows by a multinomial law; in a row
    they are in the item's cell. Then coins: the bits of a count mean sketch are independent, and a
    lie of a hashed response is in any other cell of its row alike.
    """
    tally = Tally(oracle)
    hashes = hashing.row_hashes(oracle.seed, oracle.epoch, oracle.rows)
    tally.cells = np.empty(tally.cells.shape, dtype=np.int64)
    left = counts.astype(np.int64)
    for start in range(0, oracle.rows, _ROWS):
        rows = min(_ROWS, oracle.rows - start)
        taken = rng.binomial(left, rows / (oracle.rows - start))
        left = left - taken
        spread = rng.multinomial(taken, np.full(rows, 1 / rows))  # (items, rows)
        row = np.tile(np.arange(rows), values.size)
        cell = local.row_cells(
            np.repeat(values, rows), row, hashes[start : start + rows], oracle.width
        )
        place = row * oracle.width + cell
        held = np.bincount(place, spread.reshape(-1), rows * oracle.width)  # exact below 2**53
        held = held.astype(np.int64).reshape(rows, oracle.width)
        total = spread.sum(axis=0)
        tally.row_counts[start : start + rows] = total
        tally.cells[start : start + rows] = _told(oracle, held, total, rng)
    return tally


def _told(
    oracle: CountMeanSketch | HashedResponse, held: I64, total: I64, rng: np.random.Generator
) -> I64:
    """What cells hold after the coins, (rows, width)."""
    if isinstance(oracle, CountMeanSketch):
        own, other = oracle.rates
        return rng.binomial(held, own) + rng.binomial(total[:, None] - held, other)
    honest = rng.binomial(held, oracle.truth)
    others = oracle.width - 1
    lies = rng.multinomial(held - honest, np.full(others, 1 / others))  # (rows, width, others)
    for step in range(others):
        honest += np.roll(lies[:, :, step], step + 1, axis=1)
    return honest


def _made_up(kind: str, count: int) -> pa.Array:
    return pa.array([f"{kind} {rank}" for rank in range(1, count + 1)])
