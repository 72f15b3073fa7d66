"""Local studies with devices that have no value: they send as many records as others, and no
release reveals their number."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

import sfumato
from checks import SEED
from sfumato.flow import word_discovery
from sfumato.flow.release import CountRelease
from sfumato.flow.word_discovery import FragmentPuzzle, PrefixExtension, no_words, with_seed
from sfumato.privacy import SeededRng, Tally, debias
from sfumato.privacy.randomizers import no_item
from sfumato.questions.local_frequencies.design import LocalDesign
from sfumato.questions.new_words import plan as word_plan
from sfumato.simulation.fleet import each_record

U8 = npt.NDArray[np.uint8]
WORDS = ["abba", "baba", "bb"]
NEIGHBOURS: dict[str, list[str]] = {  # the words of one device
    "a new word": ["aabb"],
    "a known word": ["ab"],
    "a word of another alphabet": ["h2o"],
    "the empty word": [""],
    "several new words": ["aabb", "bbaa", "abab"],
    "several known and unfit words": ["ab", "ab", "h2o"],
}


def study_of(tmp_path: Path, **keys: Any) -> dict[str, Any]:
    (tmp_path / "known.csv").write_text("word\nab\n")
    return {
        "question": "new_words",
        "trust": "local",
        "epsilon": 4.0,
        "alphabet": "ab",
        "word_length": 4,
        "devices": 301,
        "dictionary": str(tmp_path / "known.csv"),
        **keys,
    }


def population(holdings: list[list[str]]) -> dict[str, list[str]]:
    rows = [(str(device), word) for device, words in enumerate(holdings) for word in words]
    return {"device": [device for device, _ in rows], "word": [word for _, word in rows]}


def public_part(release: CountRelease) -> dict[str, Any]:
    """A release without the numbers computed from randomised records, and without the time."""
    everything = release.to_dict()
    del everything["estimates"]
    del everything["cost"]["seconds"]
    for name in ("candidates", "significant_from"):
        del everything["plan"]["parameters"][name]
    return everything


def audit(
    study: dict[str, Any], holdings: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, Any], list[tuple[int, ...]]]:
    """The public part of a release for these words, and the shapes of all records."""
    shapes: list[tuple[int, ...]] = []
    for kind in (FragmentPuzzle, PrefixExtension):
        fold = kind.fold

        def counted(self: Any, records: U8, tallies: list[Tally], fold: Any = fold) -> int:
            shapes.append(records.shape)
            return int(fold(self, records, tallies))

        monkeypatch.setattr(kind, "fold", counted)
    release = sfumato.simulate(
        study, population(holdings), item_column="word", device_column="device", seed=SEED
    )
    monkeypatch.undo()
    sizes = {shape[1:] for shape in shapes}
    return public_part(release), [(sum(shape[0] for shape in shapes), *size) for size in sizes]


@pytest.mark.filterwarnings("ignore::sfumato.errors.SimulationWarning")
@pytest.mark.parametrize("keys", [{}, {"daily_reports": 2}, {"paper_mode": True}], ids=str)
def test_a_release_is_the_same_whatever_one_device_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any]
) -> None:
    """Neighbours differ in the words of one device: everything in a release but the estimates is
    the same, to the letter, and the number of records is the same. This test is deterministic.

    The control: without the device they differ. A device with a known word used to send nothing."""
    study = study_of(tmp_path, **keys)
    others = [[WORDS[number % 3]] for number in range(300)]
    results = {
        name: audit(study, [*others, words], monkeypatch) for name, words in NEIGHBOURS.items()
    }
    first = results["a new word"]
    assert first[1][0][0] == 301 * keys.get("daily_reports", 1)
    for name in NEIGHBOURS:
        assert results[name] == first, name
    assert audit(study, others, monkeypatch) != first


@pytest.mark.filterwarnings("ignore::sfumato.errors.SimulationWarning")
def test_the_number_of_local_records_does_not_depend_on_how_much_devices_hold() -> None:
    """Listed and unlisted counts add up to all records, so a release reveals their number."""
    study = {"question": "frequencies", "trust": "local", "epsilon": 4.0, "daily_reports": 3}
    sums = []
    for most in (1, 2, 3, 9):
        holdings = [
            ["oak", "elm", "fir"][: 1 + device % most] * (1 + most // 9) for device in range(60)
        ]
        plan = sfumato.plan({**study, "devices": 60}, items=["oak", "elm"])
        release = sfumato.simulate(
            plan, population(holdings), item_column="word", device_column="device", seed=SEED
        )
        sums.append(release.counts.sum() + release.plan["parameters"]["unlisted"])
    assert sums == pytest.approx([3 * 60] * 4)


def test_records_that_say_nothing_leave_intervals_true() -> None:
    """Two records of three are "none". 400 items; false alarm 1e-6 for a coverage of 95% (exact
    binomial). Power: in the control, without the correction for "none", errors are three times as
    large."""
    counts = np.maximum(1, (60_000 * np.arange(1, 401) ** -1.2 / 4).astype(np.int64))
    items = [f"item {number}" for number in range(400)]
    study = {
        "question": "frequencies",
        "trust": "local",
        "epsilon": 4.0,
        "devices": int(counts.sum()),
        "daily_reports": 3,
    }
    plan = sfumato.plan(study, items=items)
    assert plan.algorithm == "hashed response"
    release = sfumato.simulate(
        plan, {"item": items, "count": counts}, count_column="count", seed=SEED
    )
    truth = dict(zip(items, counts.tolist(), strict=True))
    true = np.array([truth[item] for item in release.items.to_pylist()])
    inside = (release.low <= true) & (true <= release.high)
    assert stats.binom.cdf(int(inside.sum()), 400, 0.95) > 1e-6
    assert isinstance(plan.design, LocalDesign)
    oracle = plan.design.randomizer
    values, none = oracle.values(items), no_item(oracle)
    records = np.concatenate([np.repeat(values, counts), np.repeat(none, 2 * counts.sum())])
    tally = Tally(oracle)
    tally.fold(oracle.randomize(records, rng=SeededRng(SEED)))
    solved, unsolved = debias.estimate(tally, values, none=none), debias.estimate(tally, values)
    assert float(np.std(unsolved.counts - counts)) > 3 * float(np.std(solved.counts - counts))
    assert abs(solved.unlisted - 2 * counts.sum()) < 5 * solved.unlisted_error


def test_nine_devices_of_ten_without_a_word_add_noise_and_no_false_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Listed at a family-wise level of 1e-6, which is the false alarm. Power: in the control, which
    does not know of the collisions with "none", dozens of false words are listed with any seed."""
    words = [f"{first}{second}id" for first in "abc" for second in "xyz"]
    search = with_seed(word_plan.prefix_search(8.0, alphabet="abcdeixyz", length=4), SEED)
    codes, _ = search.codes(words)
    rows = np.concatenate([np.repeat(codes, 4_000, axis=0), no_words(search, 324_000)])
    tallies = search.tallies()
    search.fold(search.randomize(rows, rng=SeededRng(SEED)), tallies)
    result = search.find(tallies, level=1e-6)
    assert sorted(result.words.to_pylist()) == sorted(words)
    assert np.all(np.abs(result.counts - 4_000) < 6 * result.standard_error)

    def limit_of_coins(table: npt.NDArray[np.float64], rate: float) -> float:
        mean = float(table.mean(axis=1).sum())
        return mean - NormalDist().inv_cdf(rate) * math.sqrt(mean)

    monkeypatch.setattr(word_discovery, "sum_limit", limit_of_coins)
    monkeypatch.setattr(word_discovery, "PASSES", 1)
    control = search.find(tallies, level=1e-6)
    assert len(set(control.words.to_pylist()) - set(words)) > 10


@pytest.mark.parametrize("paper_mode", [True, False], ids=["puzzle", "prefixes"])
def test_none_is_never_listed(paper_mode: bool) -> None:
    """All 20,000 devices send it; any false word is listed with probability 1e-6."""
    make = word_plan.puzzle if paper_mode else word_plan.prefix_search
    search = with_seed(make(8.0, length=4), SEED)
    tallies = search.tallies()
    search.fold(search.randomize(no_words(search, 20_000), rng=SeededRng(SEED)), tallies)
    assert len(search.find(tallies, level=1e-6)) == 0


def test_every_record_is_made_of_a_value_or_of_none() -> None:
    values = np.array([5, 6, 7])
    pieces = list(each_record(values, np.array([2, 0, 1]), np.array([9]), 5))
    assert np.concatenate(pieces).tolist() == [5, 5, 7, 9, 9]
    alone = list(each_record(values, None, np.array([9]), 3))
    assert np.concatenate(alone).tolist() == [5, 6, 7]
    assert list(each_record(values[:0], None, np.array([9]), 0)) == []
