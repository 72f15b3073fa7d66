"""The devices of paper 004's experiments.

Paper 004 describes its questions and parameters, not its results. Its devices are replaced by
counts of emoji on Twitter, hosts in the rank order of a browser report, the names of HealthKit's
types, and English words that are in no dictionary. Where no frequency is public, shares are made up
by a law i^-1 of the rank, and `data`, which is in every number and title, says so. Without files
everything is made up, in the same shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sfumato.arrays import F64, I64, U16
from sfumato.errors import DataError
from sfumato.privacy import CountMeanSketch, HadamardCountMeanSketch
from sfumato.reproduce.files import find_file, read_arrays
from sfumato.reproduce.frequencies.data import power_law_shares
from sfumato.sketch.words import LATIN

EMOJI, EMOJI_USED, EMOJI_VERSION = 2_623, 845, 5.0  # all of 2017; those with a count
EMOJI_LAW = 1.2  # made-up counts fall off about as fast as Twitter's
DOMAINS = 250_000
HEALTH_TYPES = 190
MADE_UP = 1.0  # the exponent where no frequency is known
WORDS, SHORTEST, LONGEST = 100, 3, 10
DICTIONARY_SIZE = 70  # words of a SCOWL list up to this size are in the keyboard's dictionary


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A dictionary, and the share of devices that hold each item, one item per device."""

    data: str  # a full description
    items: pa.Array  # most common first
    shares: F64
    measured: bool = False  # whether shares are measured, not made up

    def first(self, items: int | None) -> Source:
        """The most common items only, or all."""
        if items is None or items >= len(self.items):
            return self
        shares = self.shares[:items]
        data = f"{self.data}, the first {items:,}"
        return replace(self, data=data, items=self.items[:items], shares=shares / shares.sum())

    def counts(self, devices: int, rng: np.random.Generator) -> I64:
        """The number of devices that hold each item."""
        return rng.multinomial(devices, self.shares)


def emoji() -> Source:
    """The emoji of 2017 by their count on Twitter; two thirds have none."""
    path = find_file("emoji_list.csv.gz")
    if path is None:
        shares = np.zeros(EMOJI)
        shares[:EMOJI_USED] = power_law_shares(EMOJI_LAW, EMOJI_USED)
        data = f"made-up emoji: law i^-{EMOJI_LAW:g} for {EMOJI_USED} of {EMOJI:,}"
        return Source(data=data, items=_made_up("emoji", EMOJI), shares=shares)
    names, versions, uses = read_arrays(
        path, name=pa.string(), emoji_version=pa.float64(), twitter_count=pa.int64()
    )
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
    """Hosts in the order of their rank buckets; their shares are made up."""
    path = find_file("domains_crux_au.parquet")
    if path is None:
        return _by_rank("made-up domains", _made_up("domain", DOMAINS))
    (hosts,) = read_arrays(path, host=pa.string())
    if len(hosts) < DOMAINS:
        raise DataError(f"{path} must hold at least {DOMAINS} hosts; got {len(hosts)}")
    return _by_rank("web hosts in rank order", hosts[:DOMAINS], path)


def health_types() -> Source:
    """HealthKit's types; their shares are not public."""
    path = find_file("healthkit_types.csv.gz")
    if path is None:
        return _by_rank("made-up health types", _made_up("health type", HEALTH_TYPES))
    return _by_rank("HealthKit types", read_arrays(path, identifier=pa.string())[0], path)


def new_words() -> Source:
    """The most common words of three to ten letters that are in no dictionary."""
    path = find_file("words_en.parquet")
    if path is None:
        rng = np.random.default_rng(WORDS)
        made_up: dict[str, None] = {}
        while len(made_up) < WORDS:
            letters = rng.choice(list(LATIN), size=rng.integers(SHORTEST, LONGEST + 1))
            made_up["".join(letters)] = None
        return _by_rank(f"{WORDS} made-up words", pa.array(list(made_up)))
    words, often, size = read_arrays(
        path, word=pa.string(), freq=pa.float64(), scowl_size=pa.int64()
    )
    new = pc.or_(pc.equal(size, 0), pc.greater(size, DICTIONARY_SIZE))
    plain = pc.match_substring_regex(words, f"^[a-z]{{{SHORTEST},{LONGEST}}}$")
    candidates = np.flatnonzero(np.asarray(pc.and_(new, plain)))
    if candidates.size < WORDS:
        raise DataError(f"{path} must hold at least {WORDS} words in no dictionary")
    best = candidates[np.argsort(-np.asarray(often)[candidates], kind="stable")[:WORDS]]
    name = f"the {WORDS} most common words in no dictionary"
    return _by_rank(name, words.take(pa.array(best)), path)


def _by_rank(name: str, items: pa.Array, path: Path | None = None) -> Source:
    """Items whose order is known and whose shares are not."""
    file = f" ({path.name})" if path else ""
    data = f"{name}, law i^-{MADE_UP:g} made up{file}"
    return Source(data=data, items=items, shares=power_law_shares(MADE_UP, len(items)))


def _made_up(kind: str, count: int) -> pa.Array:
    return pa.array([f"{kind} {rank}" for rank in range(1, count + 1)])


def random_words(count: int, rng: np.random.Generator) -> U16:
    """Codes of words of three to ten random letters, (count, 10)."""
    codes = rng.integers(1, len(LATIN) + 1, (count, LONGEST), dtype=np.uint16)
    length = rng.integers(SHORTEST, LONGEST + 1, count)
    codes[np.arange(LONGEST) >= length[:, None]] = 0
    return codes


@dataclass(frozen=True, slots=True, kw_only=True)
class UseSize:
    """How much of a use case is run."""

    repeats: int
    items: int | None = None  # how many of the most common; None for all
    devices: int = 100_000

    @property
    def has_reference(self) -> bool:
        """Whether the known numbers are for this size."""
        return self.items is None


def _paper(repeats: int) -> UseSize:
    """Enough repeats to know a standard error to about 1%."""
    return UseSize(repeats=repeats, devices=1_000_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A use case of paper 004, and its known numbers for a million devices."""

    name: str
    title: str
    source: Callable[[], Source]
    sketch: CountMeanSketch | HadamardCountMeanSketch  # the paper's
    error: float  # standard error of a rare item
    threshold: float  # 5%, family-wise
    share: float  # bound on our variance, as a share of the paper's
    small: UseSize
    paper: UseSize


CASES = (
    Case(
        name="004-emoji",
        title="popular emoji",
        source=emoji,
        sketch=CountMeanSketch(epsilon=4.0, rows=65_536, width=1_024, seed=0),
        error=427,
        threshold=1_758,
        share=0.5,
        small=UseSize(repeats=2, items=1_000),
        paper=_paper(4),
    ),
    Case(
        name="004-autoplay",
        title="domains where videos are played",
        source=domains,
        sketch=CountMeanSketch(epsilon=8.0, rows=65_536, width=1_024, seed=0),
        error=142,
        threshold=717,
        share=0.1,
        small=UseSize(repeats=1, items=2_000),
        paper=_paper(1),
    ),
    Case(
        name="004-energy",
        title="domains that take much energy",
        source=domains,
        sketch=HadamardCountMeanSketch(epsilon=4.0, rows=1_024, width=32_768, seed=0),
        error=1_037,
        threshold=5_258,
        share=0.1,
        small=UseSize(repeats=2, items=2_000),
        paper=_paper(3),
    ),
    Case(
        name="004-health",
        title="health types in use",
        source=health_types,
        sketch=CountMeanSketch(epsilon=2.0, rows=65_536, width=256, seed=0),
        error=965,
        threshold=3_360,
        share=0.9,
        small=UseSize(repeats=12, items=100),
        paper=_paper(20),
    ),
)
