"""Audits of local randomizers: a lower bound on epsilon, from records alone, against the claim.

Two items are randomised a million times each. What a record says about the two is one of a few
classes (which of their bits are set, say); the best set of classes is chosen on half of the
records and counted on the other half. With p and q its probabilities for the two items,
p ≤ e^epsilon·q, so log(p/q) at the pessimistic ends of exact intervals bounds epsilon from below.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from scipy import stats

from checks import SEED
from marks import quick
from sfumato.flow.word_discovery import FragmentPuzzle, PrefixExtension
from sfumato.kernels import local
from sfumato.privacy import (
    CountMeanSketch,
    DirectResponse,
    HadamardCountMeanSketch,
    HashedResponse,
    SeededRng,
)
from sfumato.privacy.randomizers import no_item
from sfumato.spec import kinds

U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]

RECORDS = 1_000_000  # of each item; half choose the event, half are counted
FALSE_ALARM = 1e-6
TIGHT = 0.9  # of the claim: what an audit must at least find


class Audit(NamedTuple):
    """An honest randomizer, and an epsilon at which its claim would be false."""

    randomizer: Any
    too_large: float

    @property
    def claim(self) -> float:
        return float(self.randomizer.epsilon)

    def measure(self, epsilon: float) -> float:
        """A lower bound on the epsilon of this randomizer with its coins set for `epsilon`."""
        randomizer = replace(self.randomizer, epsilon=epsilon)
        items = randomizer.values(np.array([3, 1]))
        samples = []
        for seed, item in enumerate(items):
            values = np.full(RECORDS, item)
            records = randomizer.randomize(values, rng=SeededRng(SEED, seed))
            samples.append(classes(randomizer, records, items))
        return lower_bound(*samples)


def classes(randomizer: Any, records: U8, items: npt.NDArray[Any]) -> I64:
    """What each record says about the two items: for the first and for the second, 0 or 1."""
    if isinstance(randomizer, DirectResponse):
        codes = little_endian(records)
        return np.asarray((codes == items[0]) + 2 * (codes == items[1]))
    if isinstance(randomizer, CountMeanSketch):
        row_bytes = records.shape[1] - -(-randomizer.width // 8)
        rows = little_endian(records[:, :row_bytes])
    else:
        signs = 2 if isinstance(randomizer, HadamardCountMeanSketch) else 1
        rows = little_endian(records) // (signs * randomizer.width)
    first, second = (
        local.row_cells(np.full(rows.size, item), rows, randomizer.hashes, randomizer.width)
        for item in items
    )
    if isinstance(randomizer, CountMeanSketch):
        bits = np.unpackbits(records[:, row_bytes:], axis=1, bitorder="little").astype(np.int64)
        every = np.arange(rows.size)
        return np.asarray(bits[every, first] + 2 * bits[every, second])
    codes = little_endian(records)
    if isinstance(randomizer, HadamardCountMeanSketch):
        place, minus = (codes >> 1) % randomizer.width, codes & 1
        agrees = [(np.bitwise_count(place & cell) & 1) == minus for cell in (first, second)]
        return np.asarray(agrees[0] + 2 * agrees[1])
    cells = codes % randomizer.width
    return np.asarray((cells == first) + 2 * (cells == second))


def little_endian(records: U8) -> I64:
    return np.asarray(records.astype(np.int64) @ (1 << 8 * np.arange(records.shape[1])))


def lower_bound(present: I64, absent: I64) -> float:
    """An epsilon that the randomizer exceeds, wrong with probability at most FALSE_ALARM."""
    half = present.size // 2
    tries = (np.bincount(present[:half], minlength=4), np.bincount(absent[:half], minlength=4))
    ratio = (tries[0] + 0.5) / (tries[1] + 0.5)
    order = np.argsort(-ratio, kind="stable")  # the likelihood ratio's best sets, one in the other
    sets = [order[:size] for size in range(1, 5)]
    region = max(sets, key=lambda part: _bound(tries[0][part].sum(), tries[1][part].sum(), half))
    hits = np.isin(present[half:], region).sum(), np.isin(absent[half:], region).sum()
    return _bound(*hits, present.size - half)


def _bound(hits: Any, other: Any, runs: int) -> float:
    """Clopper and Pearson 1934, half of the false alarm on either probability."""
    low = float(stats.beta.ppf(FALSE_ALARM / 2, hits, runs - hits + 1)) if hits else 0.0
    high = float(stats.beta.isf(FALSE_ALARM / 2, other + 1, runs - other)) if other < runs else 1.0
    return math.log(low / high) if low > 0 else -math.inf


AUDITS = {
    "count mean": Audit(  # too large: flips at e^epsilon where e^(epsilon/2) must stand
        CountMeanSketch(epsilon=2.0, rows=16, width=64, seed=1), 4.0
    ),
    "count mean, a few cells": Audit(CountMeanSketch(epsilon=1.0, rows=8, width=3, seed=1), 1.1),
    "count mean, optimal flips": Audit(
        CountMeanSketch(epsilon=2.0, rows=16, width=64, seed=1, flips="optimal"), 2.2
    ),
    "hadamard": Audit(HadamardCountMeanSketch(epsilon=3.0, rows=16, width=64, seed=1), 3.3),
    "hashed": Audit(HashedResponse(epsilon=4.0, rows=64, width=56, seed=1), 4.4),
    "hashed, two cells": Audit(HashedResponse(epsilon=1.0, rows=16, width=2, seed=1), 1.1),
    "direct": Audit(DirectResponse(epsilon=4.0, categories=20), 4.4),
}


@pytest.mark.parametrize("name", quick(AUDITS, "hashed", "hadamard", "direct"))
def test_records_betray_what_is_claimed_and_no_more(name: str) -> None:
    """False alarm 1e-6 (Clopper-Pearson) above the claim. Below 0.9 of it the audit would be too
    blunt to mean anything; its bounds are at 0.97 to 0.99 of it. Power: see the next test."""
    audit = AUDITS[name]
    bound = audit.measure(audit.claim)
    assert TIGHT * audit.claim < bound <= audit.claim


@pytest.mark.parametrize("name", quick(AUDITS, "hashed", "hadamard", "direct"))
def test_coins_that_are_too_honest_are_caught(name: str) -> None:
    """The negative control: twice the epsilon in the paper's own trap, a tenth more elsewhere.
    Missed with probability below 1e-6: over other seeds, the bound that each control gives is 16 or
    more of its own standard deviations above the claim."""
    audit = AUDITS[name]
    assert audit.measure(audit.too_large) > audit.claim


def test_every_randomizer_is_audited() -> None:
    randomizers = {
        kind
        for kind in kinds().values()
        if hasattr(kind, "randomize") and hasattr(kind, "readings")
    }
    assert randomizers == {type(audit.randomizer) for audit in AUDITS.values()}


# Searches for words: a record is several things at once, so what it betrays is audited whole.


def word_bound(search: Any, words: tuple[str, str]) -> float:
    """A lower bound on the epsilon of the records of these searches, of two cells each."""
    samples = []
    for seed, word in enumerate(words):
        codes, _ = search.codes(pa.array([word]))
        records = search.randomize(np.repeat(codes, RECORDS, axis=0), rng=SeededRng(SEED, seed))
        if isinstance(search, FragmentPuzzle):  # one position: a fragment's cell and a word's
            samples.append(records[:, 1].astype(np.int64) + 2 * records[:, 2])
        else:
            samples.append(records[:, 0].astype(np.int64) + 2 * records[:, 1])
    return lower_bound(*samples)


def told_apart(search: Any, first: str = "ab") -> tuple[str, str]:
    """Two words whose every part falls into different cells, found by the hash functions alone."""
    sure = seeded_sure(search)
    for other in ("cd", "ef", "gh", "ij", "kl", "mn", "op", "qr", "st", "uv", "wx", "yz"):
        batches = []
        for word in (first, other):
            codes, _ = search.codes(pa.array([word]))
            records = sure.randomize(np.repeat(codes, 64, axis=0), rng=SeededRng(SEED))
            batches.append({tuple(record) for record in records.tolist()})
        if not any(_shares_a_cell(one, two) for one in batches[0] for two in batches[1]):
            return first, other
    raise AssertionError("no two words are told apart by these hash functions")


def seeded_sure(search: Any) -> Any:
    """The same search with coins that all but never lie."""
    if isinstance(search, FragmentPuzzle):
        word, fragment = (replace(part, epsilon=32.0) for part in (search.word, search.fragment))  # type: ignore[type-var]  # specs
        return replace(search, word=word, fragment=fragment)
    return replace(search, prefix=replace(search.prefix, epsilon=32.0))


def _shares_a_cell(one: tuple[int, ...], two: tuple[int, ...]) -> bool:
    return one[0] == two[0] and any(a == b for a, b in zip(one[1:], two[1:], strict=True))


def narrow(epsilon: float, seed: int) -> HashedResponse:
    return HashedResponse(epsilon=epsilon, rows=1, width=2, seed=seed)


def searches(scale: float) -> dict[str, Any]:
    """Both searches, with the epsilons of their coins times `scale`."""
    return {
        "puzzle": FragmentPuzzle(
            word=narrow(scale, 1), fragment=narrow(2 * scale, 2), seed=3, length=2
        ),
        "prefixes": PrefixExtension(prefix=narrow(2 * scale, 1), lengths=(1, 2)),
    }


CLAIMS = {"puzzle": 3.0, "prefixes": 2.0}


@pytest.mark.parametrize("name", CLAIMS)
def test_word_records_betray_what_is_claimed_and_no_more(name: str) -> None:
    """False alarm 1e-6, by exact intervals; the bound is within a tenth of the claim."""
    search = searches(1.0)[name]
    assert search.epsilon == CLAIMS[name]
    assert TIGHT * CLAIMS[name] < word_bound(search, told_apart(search)) <= CLAIMS[name]


@pytest.mark.parametrize("name", CLAIMS)
def test_word_records_with_coins_a_fifth_too_honest_are_caught(name: str) -> None:
    search = searches(1.2)[name]
    assert word_bound(search, told_apart(search)) > CLAIMS[name]


@pytest.mark.parametrize("name", CLAIMS)
def test_a_record_betrays_that_there_is_no_word_no_more_than_which_it_is(name: str) -> None:
    """ "None", the empty word, against a word; a word of another alphabet is the same row of codes.
    False alarm 1e-6; the control's coins are a fifth too honest, and are caught."""
    search = searches(1.0)[name]
    codes, fits = search.codes(pa.array(["", "h2"]))
    assert not codes.any()
    assert not fits.any()
    none_or_word = told_apart(search, first="")
    assert TIGHT * CLAIMS[name] < word_bound(search, none_or_word) <= CLAIMS[name]
    too_honest = searches(1.2)[name]
    assert word_bound(too_honest, told_apart(too_honest, first="")) > CLAIMS[name]


def test_a_record_of_nothing_betrays_what_is_claimed_and_no_more() -> None:
    """The same of frequencies: "none" against an item, for a hashed and for a direct response."""
    for randomizer in (AUDITS["hashed"].randomizer, AUDITS["direct"].randomizer):
        items = np.concatenate([no_item(randomizer), randomizer.values(np.array([1]))])
        samples = [
            classes(
                randomizer,
                randomizer.randomize(np.full(RECORDS, item), rng=SeededRng(SEED, seed)),
                items,
            )
            for seed, item in enumerate(items)
        ]
        assert TIGHT * randomizer.epsilon < lower_bound(*samples) <= randomizer.epsilon
