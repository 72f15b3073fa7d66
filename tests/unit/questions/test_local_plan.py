"""Local studies: sizes, guarantees and simulated answers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from scipy import stats

import sfumato
from checks import SEED
from marks import quick
from sfumato.errors import ImpossibleError, SimulationWarning, SpecError, StudyError
from sfumato.flow.contribute import local_report
from sfumato.flow.word_discovery import FragmentPuzzle, PrefixExtension, WordTask
from sfumato.privacy import HashedResponse, SeededRng, Tally, debias
from sfumato.questions.local_frequencies import plan as local_plan
from sfumato.questions.local_frequencies.design import LocalDesign, oracle_of
from sfumato.questions.new_words import plan as word_plan
from sfumato.sketch.words import codes_of, words_of

I64 = npt.NDArray[np.int64]
ITEMS = pa.array([f"item {number}" for number in range(400)])


def planned(**keys: Any) -> sfumato.Plan:
    study = {"question": "frequencies", "trust": "local", "epsilon": 4.0, "devices": 100_000}
    return sfumato.plan({**study, **keys}, items=ITEMS)


def design(plan: sfumato.Plan) -> LocalDesign:
    assert isinstance(plan.design, LocalDesign)
    return plan.design


def zipf(items: int, devices: int, seed: int = SEED) -> I64:
    shares = np.arange(1, items + 1, dtype=np.float64) ** -1.2
    return np.random.default_rng(seed).multinomial(devices, shares / shares.sum())


def tally_of(randomizer: HashedResponse, counts: I64, seed: int) -> Tally:
    """A tally drawn cell by cell from its exact law, for any number of devices."""
    chance = np.random.default_rng([SEED, seed])
    tally = Tally(randomizer)
    rows, width = randomizer.rows, randomizer.width
    totals = np.zeros((rows, width), dtype=np.int64)
    split = chance.multinomial(counts, np.full(rows, 1 / rows))  # (items, rows)
    points = randomizer.values(np.arange(counts.size))
    hashes = randomizer.hashes
    from sfumato.kernels import local

    for row in range(rows):
        cells = local.row_cells(points, np.full(points.size, row), hashes, width)
        totals[row] = np.bincount(cells, split[:, row], minlength=width)
    honest = chance.binomial(totals, randomizer.truth)
    lies = totals - honest
    tally.row_counts = totals.sum(axis=1)
    cells = honest.astype(np.int64)
    for row in range(rows):  # a lie is uniform over the other cells
        for cell in np.flatnonzero(lies[row]):
            fallen = chance.multinomial(lies[row, cell], np.full(width - 1, 1 / (width - 1)))
            cells[row, :cell] += fallen[:cell]
            cells[row, cell + 1 :] += fallen[cell:]
    tally.cells = cells.astype(np.int32)
    return tally


@pytest.mark.parametrize("items", [100, 1_000, 2_600, 6_000])
@pytest.mark.parametrize("devices", [100_000, 1_000_000, 10_000_000])
def test_the_default_at_epsilon_4_is_optimal_small_and_short(items: int, devices: int) -> None:
    best = local_plan.options(epsilon=4.0, items=items, records=devices)[0]
    optimal = math.sqrt(debias.optimal_variance(4.0) * devices)
    assert best.standard_error**2 <= 1.05 * optimal**2
    assert best.table_bytes < 1_000_000
    assert best.record_bytes < 8


@pytest.mark.parametrize("devices", quick([100_000, 10_000_000], 100000))
def test_what_the_default_promises_is_measured(devices: int) -> None:
    """1,000 items. The mean square error over items has a relative deviation of √(2/1000) = 4.5%;
    over 8 runs 1.6%, so that 1.05 + 5 × 1.6% = 1.13 is passed by chance with probability 3e-7. The
    f-dependent part adds 1/1000 of the devices' own variance, 1%."""
    best = local_plan.options(epsilon=4.0, items=1_000, records=devices)[0].randomizer
    assert isinstance(best, HashedResponse)
    counts = zipf(1_000, devices)
    values = best.values(np.arange(1_000))
    squares, errors = [], []
    for seed in range(8):
        estimates = debias.estimate(tally_of(best, counts, seed), values)
        squares.append(np.mean((estimates.counts - counts) ** 2))
        errors.append(np.mean(estimates.standard_error**2))
    optimal = debias.optimal_variance(4.0) * devices
    assert np.mean(squares) / optimal < 1.14
    assert 0.9 < np.mean(squares) / np.mean(errors) < 1.1


def test_plain_means_would_be_far_from_it() -> None:
    """The control: the same tallies, decoded as in the paper."""
    best = local_plan.options(epsilon=4.0, items=1_000, records=10_000_000)[0].randomizer
    assert isinstance(best, HashedResponse)
    counts = zipf(1_000, 10_000_000)
    estimates = debias.estimate(
        tally_of(best, counts, 0), best.values(np.arange(1_000)), collision_aware=False
    )
    optimal = debias.optimal_variance(4.0) * 10_000_000
    assert np.mean((estimates.counts - counts) ** 2) / optimal > 10


def test_a_short_list_at_a_large_epsilon_is_asked_directly() -> None:
    plan = planned(epsilon=8.0)
    assert oracle_of(design(plan).randomizer) == "direct"
    assert plan.predicted["times_optimal_variance"] < 0.5
    assert "direct response" in repr(plan)


def test_paper_mode_takes_the_papers_sketch() -> None:
    local_design = design(planned(paper_mode=True))
    assert oracle_of(local_design.randomizer) == "count_mean"
    assert (local_design.randomizer.rows, local_design.randomizer.width) == (65_536, 1_024)
    assert local_design.aware is False


def test_a_byte_limit_is_kept_or_refused() -> None:
    plan = planned(bytes_per_device=52)
    assert plan.predicted["bytes_per_device"] <= 52
    with pytest.raises(ImpossibleError, match="bytes for a record") as refused:
        planned(bytes_per_device=49)
    enough = int((refused.value.hint or "").split()[3])
    assert planned(bytes_per_device=enough).predicted["bytes_per_device"] == enough


def test_a_target_is_checked_and_the_hint_reaches_it() -> None:
    with pytest.raises(ImpossibleError, match=r"target_error is 0\.001") as refused:
        planned(target_error=0.001)
    devices = int((refused.value.hint or "").split()[1].replace(",", ""))
    assert planned(target_error=0.001, devices=devices).predicted["standard_error"] > 0


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"epsilon": math.inf}, "needs a finite epsilon"),
        ({"items_per_device": 2}, "items_per_device has no effect"),
        ({"publish": "rounds"}, "is for trust"),
        ({"question": "new_words", "trust": "central"}, 'new_words needs trust = "local"'),
        ({"question": "new_words", "rounds": 2}, "rounds has no effect"),
        ({"question": "new_words", "target_error": 0.1}, "target_error has no effect on new_words"),
        ({"question": "new_words", "alphabet": "aa"}, "each character once"),
        ({"question": "new_words", "word_length": 65}, "1 to 64"),
    ],
)
def test_what_does_not_go_together_is_refused(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        planned(**keys)


def test_the_promise_names_the_report_and_the_day() -> None:
    once = planned().privacy
    assert (once.unit, once.epsilon, once.delta) == ("report", 4.0, 0.0)
    assert "4-local differential privacy for each report" in once.statement
    twice = planned(daily_reports=2).privacy
    assert "at most 2 reports per day, with a total epsilon of 8" in twice.statement


def simulated(**keys: Any) -> tuple[sfumato.CountRelease, dict[str, int]]:
    counts = zipf(len(ITEMS), 100_000)
    study = {"question": "frequencies", "trust": "local", "epsilon": 4.0, **keys}
    plan = sfumato.plan({"devices": 100_000, **study}, items=ITEMS)
    release = sfumato.simulate(
        plan, {"item": ITEMS, "count": counts}, count_column="count", seed=SEED
    )
    return release, dict(zip(ITEMS.to_pylist(), counts.tolist(), strict=True))


def assert_covered(inside: Any) -> None:
    """At least 95% of 400 intervals, with a false alarm of 1e-6; coarse noise may cover more."""
    assert stats.binom.cdf(int(inside.sum()), inside.size, 0.95) > 1e-6


@pytest.mark.parametrize(
    "keys", [{}, {"rounds": 4}, {"dropout": 0.5}, {"epsilon": 8.0}, {"epsilon": 1.0}], ids=str
)
def test_local_intervals_cover_the_truth(keys: dict[str, Any]) -> None:
    """400 items; false alarm 1e-6 for a coverage of 95% (exact binomial). Intervals two thirds as
    wide would cover 81%, and pass with probability below 1e-6."""
    release, truth = simulated(**keys)
    assert len(release) == 400
    true = np.array([truth[item] for item in release.items.to_pylist()])
    assert_covered((release.low <= true) & (true <= release.high))


def test_the_significant_are_there_and_only_they_are_published() -> None:
    release, truth = simulated()
    items = release.items.to_pylist()
    listed = [item for item, sure in zip(items, release.significant, strict=True) if sure]
    level = release.plan["parameters"]["significant_from"]
    assert 20 < len(listed) < 400
    assert all(truth[item] > 0 for item in listed)
    published, _ = simulated(publish="significant")
    assert published.items.to_pylist() == listed
    assert published.counts.min() > 0.9 * level


def test_a_device_with_many_items_sends_its_daily_limit() -> None:
    owners = np.repeat(np.arange(2_000), 5)
    items = [f"item {number % 7}" for number in range(10_000)]
    study = {
        "question": "frequencies",
        "trust": "local",
        "epsilon": 4.0,
        "daily_reports": 2,
    }
    with pytest.warns(SimulationWarning, match="10,000 values and report 4,000"):
        release = sfumato.simulate(
            study, {"item": items, "device": owners.astype(str)}, device_column="device", seed=SEED
        )
    assert any("at most 2 values, drawn at random" in note for note in release.notes)
    assert abs(release.counts.sum() - 4_000) < 1_000
    assert release.cost.bytes_per_device == 49 + 2 * release.plan["predicted"]["bytes_per_report"]


def test_what_nobody_listed_is_seen_as_unlisted() -> None:
    counts = zipf(400, 60_000)
    items = pa.concat_arrays([ITEMS, pa.array(["strange", "stranger"])])
    data = {"item": items, "count": np.r_[counts, 30_000, 10_000]}
    study = {"question": "frequencies", "trust": "local", "epsilon": 4.0, "devices": 100_000}
    plan = sfumato.plan(study, items=ITEMS)
    release = sfumato.simulate(plan, data, count_column="count", seed=SEED)
    parameters = release.plan["parameters"]
    assert abs(parameters["unlisted"] - 40_000) < 5 * parameters["unlisted_error"]
    truth = dict(zip(ITEMS.to_pylist(), counts.tolist(), strict=True))
    true = np.array([truth[item] for item in release.items.to_pylist()])
    assert_covered((release.low <= true) & (true <= release.high))


def test_a_trade_off_is_drawn(tmp_path: Path) -> None:
    local_plan.draw(planned().study, 400).savefig(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes()[:4] == b"\x89PNG"


# New words.

WORDS = ["lol", "tryna", "bae", "mayweather", "wyd", "bruh", "moana", "idc"]


def draw_words(devices: int, rare: int) -> pa.Array:
    """Words that many devices hold, and random letters."""
    chance = np.random.default_rng(SEED)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    noise = ["".join(row) for row in letters[chance.integers(0, 26, (rare, 8))]]
    common = chance.choice(WORDS, devices - rare, p=np.arange(8, 0, -1) / 36)
    return pa.array([*common.tolist(), *noise])


@pytest.mark.slow
@pytest.mark.parametrize("paper_mode", [True, False], ids=["puzzle", "prefixes"])
def test_common_words_are_found_and_no_others(paper_mode: bool) -> None:
    """Every word is at least about 10 deviations above zero. A run lists a false word with
    probability 5% (the level is family-wise); this seed does not."""
    devices = 400_000 if paper_mode else 100_000
    words = draw_words(devices, devices // 4)
    study = {"question": "new_words", "trust": "local", "epsilon": 8.0, "paper_mode": paper_mode}
    release = sfumato.simulate(study, words, seed=SEED)
    items = release.items.to_pylist()
    assert set(items) <= set(WORDS)
    assert set(WORDS[:5]) <= set(items)
    truth = {word: words.to_pylist().count(word) for word in WORDS}
    inside = [
        low <= truth[word] <= high
        for word, low, high in zip(items, release.low, release.high, strict=True)
    ]
    assert sum(inside) >= len(items) - 1
    assert release.significant.all()


def test_known_words_are_not_sent(tmp_path: Path) -> None:
    (tmp_path / "known.csv").write_text("word\nlol\ntryna\n")
    study = {
        "question": "new_words",
        "trust": "local",
        "epsilon": 8.0,
        "word_length": 5,
        "dictionary": str(tmp_path / "known.csv"),
    }
    release = sfumato.simulate(study, draw_words(100_000, 10_000), seed=SEED)
    assert not {"lol", "tryna"} & set(release.items.to_pylist())
    assert "bae" in release.items.to_pylist()


def test_words_of_any_alphabet_are_found_and_others_count_as_none() -> None:
    words = pa.array(["森の木"] * 60_000 + ["žluťoučký"] * 40_000 + ["oak!"] * 5_000)
    study = {
        "question": "new_words",
        "trust": "local",
        "epsilon": 8.0,
        "alphabet": "".join(sorted(set("森の木žluťoučký"))),
    }
    release = sfumato.simulate(study, words, seed=SEED)
    assert release.items.to_pylist() == ["森の木", "žluťoučký"]
    assert not any("alphabet" in note for note in release.notes)
    assert release.plan["parameters"]["reports"] == 105_000


def test_too_few_words_say_so() -> None:
    study = {"question": "new_words", "trust": "local", "epsilon": 8.0, "devices": 10}
    with pytest.raises(ImpossibleError, match="too few to find any"):
        sfumato.simulate(study, ["lol"] * 2, seed=SEED)


def test_codes_and_words_round_trip() -> None:
    words = pa.array(["森", "abc", "abcdefghijkl", "", "a b"])
    codes, fits = codes_of(words, "cab森defghij", 10)
    assert fits.tolist() == [True, True, True, False, False]
    assert words_of(codes[fits], "cab森defghij").to_pylist() == ["森", "abc", "abcdefghij"]
    plain_codes, plain_fits = codes_of(words.to_pylist(), "cab森defghij", 10)
    assert np.array_equal(plain_codes, codes)
    assert np.array_equal(plain_fits, fits)


@pytest.mark.parametrize(
    "search",
    [word_plan.puzzle(8.0, rows=64), word_plan.prefix_search(8.0)],
    ids=lambda search: type(search).__name__,
)
def test_word_records_are_whole_or_refused(search: FragmentPuzzle | PrefixExtension) -> None:
    codes, _ = search.codes(pa.array(WORDS * 50))
    records = search.randomize(codes, rng=SeededRng(SEED))
    assert records.shape == (400, search.record_bytes)
    tallies = search.tallies()
    records[7, 0] = 255  # no such position or length
    assert np.flatnonzero(~search.valid(records)).tolist() == [7]
    assert search.fold(records, tallies) == 1
    whole = tallies[-1].count if isinstance(search, FragmentPuzzle) else None
    parts = sum(tally.count for tally in tallies) - (whole or 0)
    assert parts == 399
    assert whole in (None, 399)
    with pytest.raises(SpecError, match="must have records"):
        search.find(search.tallies())


def test_a_report_has_as_many_records_whatever_a_device_has_to_say() -> None:
    task = WordTask(
        discoverer=word_plan.prefix_search(8.0), cohort="everybody", records_per_report=3
    )
    for words in (["lol", "h2o", "omg"], ["h2o"], [""], []):
        report = local_report(task, words, rng=SeededRng(SEED))
        assert report.task_id == task.id
        assert len(report.message) == task.message_bytes == 3 * task.discoverer.record_bytes
    with pytest.raises(SpecError, match="at most 3 items per report; got 4"):
        local_report(task, ["lol"] * 4, rng=SeededRng(SEED))


def test_word_studies_need_devices_to_be_planned() -> None:
    with pytest.raises(StudyError, match="the number of devices"):
        sfumato.plan({"question": "new_words", "trust": "local", "epsilon": 8.0})
    plan = sfumato.plan(
        {"question": "new_words", "trust": "local", "epsilon": 8.0, "devices": 10_000}
    )
    assert plan.predicted["detectable_count"] > 0
    assert "prefix extension" in repr(plan)
