"""Discover common words that nobody listed: two methods under local privacy.

`FragmentPuzzle` is the Sequence Fragment Puzzle of paper 004 (algorithms 8 to 10): a device sends a
noisy fragment of two characters, tagged with an eight-bit hash of the whole word, and the noisy
word itself. The collector finds the common fragments of each position, joins those with one tag
into words, and estimates their counts from the words' own sketch. Unlike the paper, it drops a
joined word whose own hash is not its tag (which drops almost all wrong ones), lists only the words
that are significant, and bounds the number of joins.

`PrefixExtension` goes further (after Wang, Li and Jha 2018): a device draws one of several lengths
and sends a noisy prefix of that length, with all of its epsilon in one record. The collector
extends the common prefixes of one length by the next characters, up to whole words.

Candidates are tested against the law of a reading that nobody holds: the coins' (`coin_limit`), or
that of the table itself if collisions add to it (`sum_limit`). Only those that pass are solved for,
so that there are never more unknowns than records. The number of tests that a threshold allows for
is fixed in advance, so that plans can predict which words are found.

Words are rows of `length` character codes: 0 pads, k is the alphabet's k-th character. Longer words
are cut. The empty word, all padding, is reserved and stands for "none": a device whose word is
known or has other characters, or that has no word, sends it like any other word, so that such a
device cannot be recognised. "None" is never listed, and the estimates correct for its collisions
like those of a frequent word.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from sfumato import hashing
from sfumato.arrays import F64, I64, U8, U64, Bool
from sfumato.errors import SpecError, TaskError
from sfumato.flow.task import RecordTask
from sfumato.kernels import local
from sfumato.kernels.count import plain
from sfumato.privacy import Randomizer, Rng, Tally, debias
from sfumato.privacy.randomizers import Hashed, in_epoch
from sfumato.privacy.samplers import below
from sfumato.sketch.absent import coin_limit, sum_limit
from sfumato.sketch.words import (
    BYTES,
    LATIN,
    Codes,
    Words,
    check_alphabet,
    codes_of,
    extend,
    starts_text,
    words_of,
)
from sfumato.spec import LARGEST_INTEGER, Requirement, later, require, spec

if TYPE_CHECKING:  # devices do not need it
    import pyarrow as pa


PUZZLE = 256  # number of tags for a word's fragments: an eight-bit hash
MOST_JOINS = 200_000  # largest number of words joined from the fragments of one tag
PASSES = 2  # the second over a table without the collisions of items that passed the first
_FALSE_PREFIXES = 0.5  # number of false prefixes of a length, as a share of those that are extended
_LEAST_SURPRISE = 0.1  # largest chance to extend a false prefix
_CROWDED = 4.0  # records of sure items in a cell, times those of others and one, that are too many
_QUERY = 1 << 18  # number of words or prefixes that are read together


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DiscoveredWords:
    """Significant words, most common first, and how they were found."""

    words: pa.Array
    counts: F64
    standard_error: F64
    estimates: debias.LocalEstimates | None  # from the last records, before scaling
    shown_from: float  # smallest estimate that is listed
    threshold: float  # smallest count that is listed
    candidates: int  # number of words that were tested
    left_out: int  # number of fragments or prefixes dropped because there were too many
    records: int

    def interval(self, devices: int) -> tuple[F64, F64]:
        """95% intervals for counts over all `devices`, given that a word is listed."""
        if self.estimates is None:
            return np.empty(0), np.empty(0)
        records = round(self.estimates.null.records)
        return self.estimates.interval(
            devices=max(devices, records), respondents=records, above=self.shown_from
        )

    def __len__(self) -> int:
        return len(self.words)

    def __repr__(self) -> str:
        return f"DiscoveredWords({len(self)} words of {self.candidates:,} candidates)"


@runtime_checkable
class Discoverer(Protocol):
    """A method to discover words."""

    @property
    def epsilon(self) -> float: ...

    @property
    def length(self) -> int: ...

    @property
    def alphabet(self) -> str: ...

    @property
    def record_bytes(self) -> int: ...

    def codes(self, words: Words) -> tuple[Codes, Bool]: ...

    def randomize(self, codes: Codes, *, rng: Rng) -> U8: ...

    def valid(self, records: U8) -> Bool:
        """Which records a device could have sent: (n,)."""
        ...

    def tallies(self) -> list[Tally]: ...

    def fold(self, records: U8, tallies: list[Tally]) -> int: ...

    def find(self, tallies: list[Tally], *, level: float = debias.LEVEL) -> DiscoveredWords: ...


def no_words(search: Discoverer, count: int) -> Codes:
    """The codes of `count` empty words, which stand for "none": (count, length)."""
    return np.zeros((count, search.length), dtype=np.uint16)


@spec("fragment_puzzle")
class FragmentPuzzle:
    """The Sequence Fragment Puzzle: a fragment and the whole word, in one record.

    Byte 0 is the fragment's position; the fragment's record and the word's record follow.

    Claim: (word.epsilon + fragment.epsilon)-local differential privacy for one record, neighbours
        being any two words, "none" among them.
    Proof: the position is drawn independently of the word; the two records are two independent
        randomizations of the same word, so their epsilons add up.
    Differs from the paper: counts of fragments are over the devices that drew the position (the
        paper's step would use all of them).
    """

    word: Randomizer
    fragment: Randomizer
    seed: int
    length: int = 10
    alphabet: str = LATIN
    fragments: int = later(1024)  # the paper's T: how many of each position are kept
    fragment_length: int = later(2)  # characters

    def check(self) -> None:
        check_alphabet(self.length, self.alphabet)
        require.at_least(1, fragments=self.fragments)
        require(
            1 <= self.fragment_length <= self.length and self.length % self.fragment_length == 0,
            f"length must be a multiple of fragment_length; got {self.length} and "
            f"{self.fragment_length}",
        )

    @property
    def epsilon(self) -> float:
        return self.word.epsilon + self.fragment.epsilon

    @property
    def positions(self) -> int:
        return self.length // self.fragment_length

    @property
    def fragment_keys(self) -> int:
        """The number of possible fragments of a position, with their tags."""
        return PUZZLE * int((len(self.alphabet) + 1) ** self.fragment_length)

    @property
    def most_candidates(self) -> int:
        """The number of joined words that a threshold allows for: about as many false ones as are
        joined by chance, and at least one for every fragment."""
        false = (self.fragments / PUZZLE) ** self.positions
        return max(self.fragments, math.ceil(min(false, PUZZLE * MOST_JOINS)))

    @property
    def record_bytes(self) -> int:
        return 1 + self.fragment.record_bytes + self.word.record_bytes

    def codes(self, words: Words) -> tuple[Codes, Bool]:
        return codes_of(words, self.alphabet, self.length)

    def randomize(self, codes: Codes, *, rng: Rng) -> U8:
        """A record for each word: (n, record_bytes)."""
        position = below(self.positions, codes.shape[0], rng)
        tags = self._tags(codes)
        records = np.empty((codes.shape[0], self.record_bytes), dtype=np.uint8)
        records[:, 0] = position
        split = 1 + self.fragment.record_bytes
        for place in range(self.positions):
            mine = np.flatnonzero(position == place)
            oracle = in_epoch(self.fragment, place)
            start = self.fragment_length * place
            keys = self._keys(tags[mine], codes[mine, start : start + self.fragment_length])
            records[mine, 1:split] = oracle.randomize(oracle.values(keys), rng=rng)
        records[:, split:] = self.word.randomize(_points(codes, self.word), rng=rng)
        return records

    def tallies(self) -> list[Tally]:
        """One empty tally per position, and one for whole words at the end."""
        places = [in_epoch(self.fragment, place) for place in range(self.positions)]
        return [*(Tally(oracle) for oracle in places), Tally(self.word)]

    def valid(self, records: U8) -> Bool:
        split = 1 + self.fragment.record_bytes
        return np.asarray(
            (records[:, 0] < self.positions)
            & self.fragment.valid(records[:, 1:split])
            & self.word.valid(records[:, split:])
        )

    def fold(self, records: U8, tallies: list[Tally]) -> int:
        """Add the valid records, and return the number of invalid ones."""
        split = 1 + self.fragment.record_bytes
        valid = self.valid(records)
        records = records if valid.all() else records[valid]
        for place in range(self.positions):
            tallies[place].fold(np.ascontiguousarray(records[records[:, 0] == place, 1:split]))
        tallies[-1].fold(np.ascontiguousarray(records[:, split:]))
        return int(np.count_nonzero(~valid))

    def find(self, tallies: list[Tally], *, level: float = debias.LEVEL) -> DiscoveredWords:
        """Join the most common fragments of all positions, and list the significant words.

        `level` is family-wise: with at most that probability any listed word is false.
        """
        if any(tally.count == 0 for tally in tallies):
            raise SpecError("every position must have records before words can be found")
        joined, left_out = self._join([self._fragments(tally) for tally in tallies[:-1]])
        tests = max(self.most_candidates, joined.shape[0])
        return _list_words(joined, tallies[-1], 1.0, level / tests, self.alphabet, left_out)

    def _fragments(self, tally: Tally) -> dict[int, I64]:
        """The most common fragments of one position as rows of codes, by tag, the most common
        first."""
        symbols, oracle = len(self.alphabet) + 1, tally.randomizer
        readings = np.concatenate(
            [
                oracle.readings(tally.cells, tally.count, oracle.values(keys))
                for start in range(0, self.fragment_keys, _QUERY)
                for keys in [np.arange(start, min(start + _QUERY, self.fragment_keys))]
            ]
        )
        ranked = np.argsort(-readings, kind="stable")[: self.fragments]
        tags, rest = np.divmod(ranked, symbols**self.fragment_length)
        places = symbols ** np.arange(self.fragment_length)[::-1]
        codes = rest[:, None] // places % symbols
        return {int(tag): codes[tags == tag] for tag in np.unique(tags)}

    def _join(self, fragments: list[dict[int, I64]]) -> tuple[Codes, int]:
        """Words of one fragment per position, all with one tag that is also the word's hash."""
        parts, left_out = [np.empty((0, self.length), dtype=np.uint16)], 0
        for tag in sorted(set.intersection(*(set(place) for place in fragments))):
            rows = np.empty((1, 0), dtype=np.uint16)
            for pairs in (place[tag] for place in fragments):
                most = max(1, MOST_JOINS // max(rows.shape[0], 1))
                left_out += max(0, len(pairs) - most)
                pairs = pairs[:most].astype(np.uint16)
                rows = np.concatenate(
                    [np.repeat(rows, len(pairs), axis=0), np.tile(pairs, (rows.shape[0], 1))],
                    axis=1,
                )
                rows = rows[_no_gap(rows)]
            parts.append(rows[self._tags(rows) == tag] if rows.size else parts[0])
        joined = np.concatenate(parts)
        return joined[joined[:, 0] != 0], left_out  # the empty word is "none"

    def _tags(self, codes: Codes) -> I64:
        """Each word's eight-bit hash, which joins its fragments."""
        hash_ = hashing.coefficients(self.seed, "puzzle", count=3)
        points = hashing.fingerprint_rows(_bytes(codes), self.seed)
        return plain.cells(plain.evaluate(hash_, points), PUZZLE)

    def _keys(self, tags: I64, fragments: Codes) -> I64:
        keys = tags
        for codes in fragments.T:
            keys = keys * (len(self.alphabet) + 1) + codes
        return keys


@spec("prefix_extension")
class PrefixExtension:
    """Prefixes of random lengths, each sent with all of the epsilon; whole words last.

    Byte 0 is the index in `lengths`; the prefix's record follows.

    Claim: prefix.epsilon-local differential privacy for one record, neighbours being any two words,
        "none" among them.
    Proof: the length is drawn independently of the word, and the record is one randomization of
        the word's prefix.
    """

    prefix: Randomizer
    lengths: tuple[int, ...] = (3, 4, 5, 6, 8, 10)  # the last is the length of words
    alphabet: str = LATIN
    width: int = 1024  # largest number of prefixes of one length that are extended

    def check(self) -> None:
        require(len(self.lengths) >= 1, "lengths must name at least one length")
        require(
            all(a < b for a, b in zip((0, *self.lengths), self.lengths, strict=False)),
            f"lengths must increase from at least 1; got {self.lengths}",
        )
        require(
            len(self.lengths) <= 256, f"there must be at most 256 lengths; got {len(self.lengths)}"
        )
        require.at_least(1, width=self.width)
        check_alphabet(self.lengths[-1], self.alphabet)

    @property
    def epsilon(self) -> float:
        return self.prefix.epsilon

    @property
    def length(self) -> int:
        return self.lengths[-1]

    @property
    def record_bytes(self) -> int:
        return 1 + self.prefix.record_bytes

    def codes(self, words: Words) -> tuple[Codes, Bool]:
        return codes_of(words, self.alphabet, self.length)

    def randomize(self, codes: Codes, *, rng: Rng) -> U8:
        step = below(len(self.lengths), codes.shape[0], rng)
        records = np.empty((codes.shape[0], self.record_bytes), dtype=np.uint8)
        records[:, 0] = step
        for place, length in enumerate(self.lengths):
            mine = np.flatnonzero(step == place)
            oracle = in_epoch(self.prefix, place)
            points = _points(codes[mine, :length], oracle)
            records[mine, 1:] = oracle.randomize(points, rng=rng)
        return records

    def tallies(self) -> list[Tally]:
        return [Tally(in_epoch(self.prefix, place)) for place in range(len(self.lengths))]

    def valid(self, records: U8) -> Bool:
        return np.asarray((records[:, 0] < len(self.lengths)) & self.prefix.valid(records[:, 1:]))

    def fold(self, records: U8, tallies: list[Tally]) -> int:
        valid = self.valid(records)
        records = records if valid.all() else records[valid]
        for place, tally in enumerate(tallies):
            tally.fold(np.ascontiguousarray(records[records[:, 0] == place, 1:]))
        return int(np.count_nonzero(~valid))

    def find(self, tallies: list[Tally], *, level: float = debias.LEVEL) -> DiscoveredWords:
        if any(tally.count == 0 for tally in tallies):
            raise SpecError("every length must have records before words can be found")
        rows, left_out = np.empty((1, 0), dtype=np.uint16), 0
        for place, tally in enumerate(tallies[:-1]):
            rows = self._extend(rows, place)
            passed, heights, _ = _test(
                rows, tally, self.rate(place), level / self.candidates(place)
            )
            best = np.flatnonzero(passed)
            best = best[np.argsort(-heights[best], kind="stable")]
            left_out += max(0, best.size - self.width)
            rows = rows[best[: self.width]]
        rows = self._extend(rows, len(self.lengths) - 1)
        scale = sum(tally.count for tally in tallies) / tallies[-1].count
        rate = level / self.candidates(len(self.lengths) - 1)
        return _list_words(rows, tallies[-1], scale, rate, self.alphabet, left_out)

    def candidates(self, place: int) -> int:
        """The most prefixes of a length that are tested."""
        before = self.lengths[place - 1] if place else 0
        endings = int((len(self.alphabet) + 1) ** (self.lengths[place] - before))
        return endings * (self.width if place else 1)

    def rate(self, place: int) -> float:
        """The largest chance that a false prefix of a length is extended. False prefixes are
        dropped at the next length, so that many may pass."""
        return min(_FALSE_PREFIXES * self.width / self.candidates(place), _LEAST_SURPRISE)

    def _extend(self, rows: Codes, place: int) -> Codes:
        """Every row with every ending up to a length that the start of a word can have; complete
        words last."""
        if place:
            rows = rows[np.argsort(rows[:, -1] == 0, kind="stable")]
        longer = extend(rows, self.lengths[place] - rows.shape[1], len(self.alphabet) + 1)
        if self.alphabet == BYTES:
            longer = longer[starts_text(longer, whole=longer.shape[1] == self.length)]
        return longer


def with_seed(search: Discoverer, seed: int) -> Discoverer:
    """The same search with the hash functions of another public seed."""
    if isinstance(search, PrefixExtension):
        return replace(search, prefix=in_epoch(search.prefix, 0, seed))
    assert isinstance(search, FragmentPuzzle)  # the only other method
    other = (seed + 1) % (LARGEST_INTEGER + 1)
    word, fragment = in_epoch(search.word, 0, seed), in_epoch(search.fragment, 0, other)
    return replace(search, word=word, fragment=fragment, seed=seed)


@spec("word_task")
class WordTask(RecordTask):
    """A search for new words as a question to devices. Its id is its digest.

    >>> from sfumato.flow.contribute import local_report
    >>> from sfumato.privacy import HashedResponse, SeededRng
    >>> prefix = HashedResponse(epsilon=4.0, rows=1024, width=56, seed=1)
    >>> task = WordTask(discoverer=PrefixExtension(prefix=prefix), cohort="everybody")
    >>> local_report(task, ["oak"], rng=SeededRng(1)).message.hex()
    '04acc3'
    >>> len(local_report(task, [], rng=SeededRng(1)).message)
    3
    """

    discoverer: Discoverer
    campaign: str = ""
    cohort: str  # the devices to ask
    records_per_report: int = 1  # always this many, however many words a device has

    def check(self) -> None:
        Requirement(TaskError).at_least(1, records_per_report=self.records_per_report)

    @property
    def source(self) -> Discoverer:
        return self.discoverer

    def values(self, words: Words) -> Codes:
        """Words as codes; a word with other characters becomes "none"."""
        return self.discoverer.codes(words)[0]

    def none(self, count: int) -> Codes:
        """`count` values that stand for "none"."""
        return no_words(self.discoverer, count)

    def tallies(self) -> list[Tally]:
        """Empty tallies for its records."""
        return self.discoverer.tallies()

    def fold(self, records: U8, tallies: list[Tally]) -> int:
        """Add the valid records, and return the number of invalid ones."""
        return self.discoverer.fold(records, tallies)


def _bytes(codes: Codes) -> U8:
    wide = np.ascontiguousarray(codes.astype("<u2")).view(np.uint8)
    return wide.reshape(codes.shape[0], 2 * codes.shape[1])


def _points(codes: Codes, oracle: Any) -> U64:
    return hashing.fingerprint_rows(_bytes(codes), oracle.seed)


def _no_gap(rows: Codes) -> Bool:
    """Whether padding is at the end only, with no character after it."""
    return np.asarray(~((rows[:, :-1] == 0) & (rows[:, 1:] != 0)).any(axis=1))


def _test(rows: Codes, tally: Tally, rate: float, sure: float) -> tuple[Bool, F64, float]:
    """Which words or prefixes pass a test that one that nobody holds passes with a chance of at
    most `rate` in each pass; their heights above chance; and the height from which they pass.

    Items with a chance of at most `sure`, "none" among them, which may be the most common of all,
    are solved for; then their collisions are taken out of the table, and the others are tested once
    more. (Until a false item is called sure, that table depends on items that are held, so that an
    absent item's cells are independent of it: docs/proofs/intervals.md.)
    """
    oracle = tally.randomizer
    assert isinstance(oracle, Hashed)  # others have no hash functions for words
    none = np.zeros((1, rows.shape[1]), dtype=np.uint16)
    points = np.concatenate([_points(none, oracle), _points(rows, oracle)])
    filled = np.flatnonzero(tally.row_counts)  # other rows say nothing
    hashes, shares = oracle.hashes[filled], tally.row_counts[filled] / tally.count
    cells = tally.cells[filled].astype(np.float64)
    if oracle.signed:
        local.hadamard(cells)
    table, heights, limit = cells, np.empty(0), math.inf
    passed = np.zeros(points.size, dtype=np.bool_)

    def least(rate: float) -> float:
        """The plan's limit, or that of a table with more noise: never less."""
        coins = coin_limit(tally.count, oracle.support, rate) - tally.count * oracle.support
        return max(2 * coins if oracle.signed else coins, sum_limit(table, rate) - chance)

    for _ in range(PASSES):
        chance = float(table.mean(axis=1).sum())
        readings = local.gather(points, table, hashes) - chance
        heights = np.where(passed, heights, readings) if heights.size else readings
        limit = least(rate)
        fresh = ~passed & (heights > (limit if sure == rate else least(sure)))
        if not fresh.any():
            break
        passed |= fresh
        fill = np.maximum(debias.estimate(tally, points[passed]).counts, 0.0) / _gain(oracle)
        before = table
        table = _without(cells, _expected(points[passed], fill, hashes, shares, oracle.width))
        if float(table.var(axis=1).sum()) > (1 - debias.MATTERS) * float(before.var(axis=1).sum()):
            break
    passed |= heights > limit
    return passed[1:], heights[1:], limit


def _gain(oracle: Randomizer) -> float:
    """The devices for which one unit of a sum of cells stands, before collisions."""
    return oracle.reach / 2 if oracle.signed else oracle.reach  # a sign that changes moves it by 2


def _without(cells: F64, expected: F64) -> F64:
    """A table without what these items fill on average. A cell that is mostly theirs still varies
    more than others, so that whoever meets it would stand out: it is left out, which costs others
    one cell in a row."""
    table = cells - expected
    crowded = expected > _CROWDED * (1 + table.mean(axis=1, keepdims=True))
    table[crowded] = 0.0
    rest = table.sum(axis=1) / np.maximum((~crowded).sum(axis=1), 1)
    return np.where(crowded, rest[:, None], table)


def _expected(points: U64, fill: F64, hashes: U64, shares: F64, width: int) -> F64:
    """The cells that these items fill on average, spread over the rows by their shares."""
    table = np.zeros((shares.size, width))
    rows = np.arange(shares.size)
    for point, count in zip(points, fill, strict=True):
        cells = local.row_cells(np.full(rows.size, point, dtype=np.uint64), rows, hashes, width)
        table[rows, cells] += count * shares
    return table


def _list_words(
    rows: Codes,
    tally: Tally,
    scale: float,
    rate: float,
    alphabet: str,
    left_out: int,
) -> DiscoveredWords:
    """The significant words among the candidates, with counts over all devices.

    `rate` is the largest chance that a false word is listed.
    """
    empty, oracle = np.empty(0), tally.randomizer
    limit, listed = math.inf, np.empty(0, dtype=np.int64)
    if rows.shape[0]:
        passed, _, height = _test(rows, tally, rate / PASSES, rate / PASSES)
        limit = height * _gain(oracle) / (1 - oracle.collision)
        listed = np.flatnonzero(passed)
    numbers: dict[str, Any] = {"counts": empty, "standard_error": empty, "estimates": None}
    if listed.size:
        none = _points(np.zeros((1, rows.shape[1]), dtype=np.uint16), oracle)
        estimates = debias.estimate(tally, _points(rows[listed], oracle), none=none)
        order = np.argsort(-estimates.counts, kind="stable")
        listed = listed[order]
        estimates = replace(
            estimates,
            counts=estimates.counts[order],
            standard_error=estimates.standard_error[order],
            null_error=estimates.null_error[order],
        )
        counts = scale * estimates.counts
        sampling = np.maximum(counts, 0) * (scale - 1)  # from drawing the last length at random
        error = np.sqrt((scale * estimates.standard_error) ** 2 + sampling)
        numbers = {"counts": counts, "standard_error": error, "estimates": estimates}
    return DiscoveredWords(
        words=words_of(rows[listed], alphabet),
        **numbers,
        shown_from=limit,
        threshold=scale * limit,
        candidates=rows.shape[0],
        left_out=left_out,
        records=round(tally.count * scale),
    )
