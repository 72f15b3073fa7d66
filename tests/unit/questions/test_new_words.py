"""New words: what a plan says is found is found, and nothing else."""

from __future__ import annotations

import importlib
import math
from bisect import bisect_left
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pytest
from scipy import stats

from checks import SEED
from sfumato import plan, simulate
from sfumato.errors import StudyError
from sfumato.flow.word_discovery import FragmentPuzzle, PrefixExtension, with_seed
from sfumato.privacy import CountMeanSketch, HashedResponse, SeededRng
from sfumato.questions.new_words import plan as word_plan
from sfumato.questions.new_words.design import WordDesign
from sfumato.questions.new_words.detection import (
    Stage,
    detectable,
    listing_chance,
    stages,
    tail,
)
from sfumato.sketch.words import BYTES, LATIN

STUDY: dict[str, Any] = {"question": "new_words", "trust": "local", "epsilon": 8.0}
MEASURED = [(500, 8.0), (6_000, 4.0), (30_000, 8.0), (300_000, 8.0)]
SIZES = [(n, e) for n in (500, 1_500, 6_000, 30_000, 300_000) for e in (2.0, 4.0, 8.0)]
TRIALS = 240
POINTS = 0.10  # largest error of a prediction


def letters(count: int, rng: np.random.Generator, length: int = 8) -> list[str]:
    return ["".join(row) for row in np.array(list(LATIN))[rng.integers(0, 26, (count, length))]]


def count_of(search: Any, records: int, chance: float) -> int:
    """The least count that is predicted to be listed with this chance."""
    return bisect_left(
        range(records + 1), True, key=lambda c: listing_chance(search, c, records) >= chance
    )


def simulated(search: Any, count: int, records: int, runs: int = 4_000) -> float:
    """The share of runs in which a word passes every stage, if each record supports it by itself:
    the devices choose among the stages, and a binomial number of them supports the word."""
    rng = np.random.default_rng([SEED, records, count])
    tests = stages(search)
    even = np.full(len(tests), 1 / len(tests))
    own, others = (rng.multinomial(size, even, runs) for size in (count, records - count))
    passed = np.ones(runs, dtype=np.bool_)
    for stage, mine, rest in zip(tests, own.T, others.T, strict=True):
        total, place = np.unique(mine + rest, return_inverse=True)
        need = np.array([math.floor(stage.limit(int(size))) + 1 for size in total])
        support = rng.binomial(mine, stage.truth) + rng.binomial(rest, stage.oracle.support)
        passed &= support >= need[place]
    return float(passed.mean())


@pytest.mark.parametrize("size", [(500, 2.0), (500, 8.0), (6_000, 8.0)], ids=str)
def test_predictions_are_those_of_the_coins(size: tuple[int, float]) -> None:
    """4,000 runs have a deviation of 0.8 points at most, and the prediction an error of 2.4 points:
    a false alarm of 1e-3 needs 5 points. One that is wrong by 8 points passes as seldom."""
    records, epsilon = size
    search = word_plan.prefix_search(epsilon, records=records)
    for count in (count_of(search, records, 0.5), detectable(search, records)):
        chance = listing_chance(search, count, records)
        assert abs(simulated(search, count, records) - chance) <= 0.05
    fewer = simulated(search, round(0.8 * count), records)
    assert abs(fewer - chance) > 0.05  # the control


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_predictions_are_those_of_the_coins_at_every_size(size: tuple[int, float]) -> None:
    test_predictions_are_those_of_the_coins(size)


@pytest.fixture
def listing_shares(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The measurement of the benchmark, which is not part of the package."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[3]))
    return importlib.import_module("benchmarks.accuracy.words").listing_shares


def check_detection(listing_shares: Any, search: Any, records: int) -> None:
    """240 words with a predicted chance of a half, and 240 of the detectable count. If predictions
    are exact, this fails with a probability of 0.2% (a deviation of 3.2 points); a prediction that
    is wrong by 20 points passes as seldom. False words are within their level of 5% at a risk of
    0.1%."""
    counts = [count_of(search, records, 0.5), detectable(search, records)]
    shares, false = listing_shares(search, counts, records, trials=TRIALS, first=SEED)
    for count, share in zip(counts, shares.mean(axis=1), strict=True):
        assert abs(share - listing_chance(search, count, records)) <= POINTS
    assert sum(false) <= stats.binom.isf(0.001, len(false), 0.05)


@pytest.mark.slow
def test_short_words_are_listed_as_often_as_predicted(listing_shares: Any) -> None:
    oracle = HashedResponse(epsilon=8.0, rows=1_024, width=700, seed=1)
    search = PrefixExtension(prefix=oracle, lengths=(2, 3, 4), width=64)
    check_detection(listing_shares, search, 500)
    half = count_of(search, 500, 0.5)
    shares, _ = listing_shares(search, [round(0.7 * half)], 500, trials=TRIALS, first=SEED)
    assert shares.mean() < listing_chance(search, half, 500) - POINTS  # the control


@pytest.mark.slow
@pytest.mark.parametrize("size", MEASURED, ids=str)
def test_words_are_listed_as_often_as_predicted(
    listing_shares: Any, size: tuple[int, float]
) -> None:
    """The other sizes are measured by the benchmark `words`."""
    records, epsilon = size
    check_detection(listing_shares, word_plan.prefix_search(epsilon, records=records), records)


@pytest.mark.slow
@pytest.mark.parametrize("size", [(1_500, 8.0), (30_000, 4.0)], ids=str)
def test_words_of_any_script_are_listed_as_often_as_predicted(
    listing_shares: Any, size: tuple[int, float]
) -> None:
    records, epsilon = size
    search = word_plan.prefix_search(epsilon, alphabet=BYTES, length=12, records=records)
    check_detection(listing_shares, search, records)


def test_a_stage_has_the_chance_of_its_binomials() -> None:
    oracle = HashedResponse(epsilon=3.0, rows=64, width=12, seed=1)
    stage = Stage(oracle=oracle, share=0.25, rate=0.01)
    count, records = 40, 400
    sizes = np.arange(records + 1)
    need = np.array([math.floor(stage.limit(int(size))) + 1 for size in sizes])
    exact = 0.0
    mine = stats.binom.pmf(np.arange(count + 1), count, 0.25)
    rest = stats.binom.pmf(np.arange(records - count + 1), records - count, 0.25)
    for own in np.flatnonzero(mine > 1e-9):
        support = stats.binom.pmf(np.arange(own + 1), own, oracle.truth)
        for others in np.flatnonzero(rest > 1e-9):
            least = need[own + others] - np.arange(own + 1)
            passed = float(support @ stats.binom.sf(least - 1, others, oracle.support))
            exact += mine[own] * rest[others] * passed
    assert stage.truth == pytest.approx(oracle.truth)
    assert stage.chance(count, records) == pytest.approx(exact, abs=0.02)
    assert stats.binom.sf(need[100] - 1, 100, oracle.support) <= 0.01
    sketch = CountMeanSketch(epsilon=3.0, rows=64, width=12, seed=1)
    assert Stage(oracle=sketch, share=1.0, rate=0.01).truth == pytest.approx(sketch.rates[0])


def test_a_limit_that_no_number_of_records_reaches_is_beyond_them() -> None:
    oracle = HashedResponse(epsilon=1.0, rows=64, width=4, seed=1)
    stage = Stage(oracle=oracle, share=1.0, rate=1e-9)
    assert stage.limit(5) == 6
    assert stage.chance(5, 5) == 0


def test_a_false_word_is_listed_at_the_level_and_no_more_often() -> None:
    """Nobody has a word in common. With a level of 5%, seven or more of 20 runs with false words
    have a probability of 4e-5, which is the false alarm. Power: the control, at a level of 3,000
    words, lists false ones in nearly every run."""
    search = word_plan.prefix_search(8.0, length=3, records=400)
    rng = np.random.default_rng(SEED)
    false, control = 0, 0
    for run in range(20):
        words = letters(400, rng, 3)
        seeded: Any = with_seed(search, run)
        tallies = seeded.tallies()
        rows = seeded.codes(words)[0]
        seeded.fold(seeded.randomize(rows, rng=SeededRng(run)), tallies)
        false += bool(set(seeded.find(tallies).words.to_pylist()) - set(words))
        many = seeded.find(tallies, level=3_000.0).words.to_pylist()
        control += bool(set(many) - set(words))
    assert false < 7
    assert control >= 10


@pytest.mark.parametrize("epsilon", [2.0, 8.0])
@pytest.mark.parametrize("devices", [500, 30_000, 300_000])
def test_prefixes_find_rarer_words_than_the_puzzle(devices: int, epsilon: float) -> None:
    prefixes = word_plan.prefix_search(epsilon, records=devices)
    assert detectable(prefixes, devices) < detectable(word_plan.puzzle(epsilon), devices)


@pytest.mark.slow
@pytest.mark.timeout(1_800)  # 240 searches of more than a second of processor time each
@pytest.mark.parametrize("devices", [6_000, 100_000])
def test_the_puzzle_lists_words_as_often_as_predicted(listing_shares: Any, devices: int) -> None:
    """As for prefixes; see there."""
    check_detection(listing_shares, word_plan.puzzle(8.0), devices)


def test_a_fleet_that_is_too_small_is_told_so_and_how_many_are_enough() -> None:
    study = {**STUDY, "epsilon": 1.0, "alphabet": LATIN, "word_length": 3}
    small = plan({**study, "devices": 200})
    (warning,) = (text for text in small.warnings if "too few" in text)
    assert "200 records are too few to find words with epsilon 1" in warning
    enough = int(warning.split("about ")[1].split()[0].replace(",", ""))
    assert plan({**study, "devices": enough}).predicted["detectable_count"] <= 0.1 * enough
    assert small.predicted["detectable_count"] > 200
    assert not plan({**STUDY, "devices": 10_000}).warnings


def test_dropouts_and_shorter_words_change_what_is_least() -> None:
    def least(**keys: Any) -> float:
        return float(plan({**STUDY, "devices": 20_000, **keys}).predicted["detectable_count"])

    assert least(dropout=0.5) > least()
    assert least(word_length=6) < least()
    assert least(alphabet=LATIN) < least()
    assert least(epsilon=4.0) > least()


def test_words_of_any_script_are_found_by_their_bytes() -> None:
    words = (
        ["森の木"] * 3_000 + ["žluť"] * 2_000 + ["naïveté2.0 & more"] * 2_000 + ["привет"] * 2_000
    )
    release = simulate(STUDY, words, seed=SEED)
    assert set(release.items.to_pylist()) == {"森の木", "žluť", "naïveté2.0", "привет"}
    parameters = release.plan["parameters"]
    assert parameters["alphabet"] == "any text, by its bytes"
    assert 'With alphabet = "abc' in plan({**STUDY, "devices": 9_000}).predicted["assumes"]


def test_a_byte_search_extends_only_what_begins_a_text() -> None:
    search = PrefixExtension(
        prefix=HashedResponse(epsilon=8.0, rows=64, width=300, seed=1),
        lengths=(1, 2),
        alphabet=BYTES,
    )
    first = search._extend(np.empty((1, 0), dtype=np.uint16), 0)
    assert first.ravel().tolist() == [*range(1, 0x80), *range(0xC2, 0xF5)]
    second = search._extend(np.array([[97], [0xC3], [0xE3]], dtype=np.uint16), 1).tolist()
    assert [97, 0] in second
    assert [0xC3, 0xA9] in second
    assert [97, 0xC3] not in second  # a word ends with a whole character
    assert not any(row[0] == 0xE3 for row in second)


def puzzle_of(**keys: Any) -> FragmentPuzzle:
    design = plan({**STUDY, "algorithm": "puzzle", "devices": 50_000, **keys}).design
    assert isinstance(design, WordDesign)
    assert isinstance(design.discoverer, FragmentPuzzle)
    return design.discoverer


def test_the_puzzle_has_the_sizes_of_the_study() -> None:
    search = puzzle_of(
        fragments=300, fragment_length=1, fragment_share=0.6, rows=99, width=70, word_length=7
    )
    assert (search.fragments, search.fragment_length, search.length) == (300, 1, 7)
    assert search.fragment.epsilon == pytest.approx(4.8)
    assert search.word.epsilon == pytest.approx(3.2)
    assert {(each.rows, each.width) for each in (search.word, search.fragment)} == {(99, 70)}
    assert puzzle_of(word_length=7).length == 8  # a multiple of the fragments' length
    assert (
        "fragments"
        in plan({**STUDY, "algorithm": "puzzle", "devices": 50_000}).summary()["parameters"]
    )


def test_the_preset_is_the_papers_setting() -> None:
    design = plan({"preset": "apple-new-words-2017", "devices": 50_000}).design
    assert isinstance(design, WordDesign)
    search: Any = design.discoverer
    assert (search.word.epsilon, search.fragment.epsilon) == (2.0, 6.0)
    assert {(each.rows, each.width) for each in (search.word, search.fragment)} == {(2_048, 1_024)}
    assert (search.length, search.fragment_length, search.positions) == (10, 2, 5)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"fragments": 100}, "fragments of new_words: only the puzzle has them"),
        ({"rows": 100, "width": 64}, "rows, width of new_words: only the puzzle"),
        ({"algorithm": "puzzle", "fragment_length": 5}, "reads every possible fragment"),
        ({"algorithm": "puzzle", "fragment_share": 1.0}, "above 0 and below 1"),
        ({"algorithm": "puzzle", "fragments": 0}, "fragments must be at least 1"),
    ],
)
def test_sizes_without_effect_or_sense_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(StudyError, match=message):
        plan({**STUDY, "devices": 1_000, **keys})


def test_a_plan_for_the_puzzle_says_that_prefixes_find_more() -> None:
    (warning,) = plan({**STUDY, "devices": 10_000, "algorithm": "puzzle"}).warnings
    assert 'algorithm = "prefixes" finds them from' in warning


@pytest.mark.parametrize("fragment_length", [1, 2])
def test_a_puzzle_keeps_the_most_common_fragments(fragment_length: int) -> None:
    """All 20,000 devices have one of two words, some 90 deviations above chance."""
    search = word_plan.puzzle(
        8.0, rows=64, length=4, alphabet="abcde", fragments=8, fragment_length=fragment_length
    )
    codes, _ = search.codes(["bead", "cab"])
    tallies = search.tallies()
    records = search.randomize(np.repeat(codes, 10_000, axis=0), rng=SeededRng(SEED))
    search.fold(records, tallies)
    assert sorted(search.find(tallies).words.to_pylist()) == ["bead", "cab"]
    best = search._fragments(tallies[0])
    assert sum(len(rows) for rows in best.values()) == 8


def test_the_words_of_a_release_are_known_to_the_next_study(tmp_path: Path) -> None:
    texts = ["hello"] * 3_000 + ["bruh"] * 3_000 + ["tryna"] * 4_000
    dictionary = ["hello"]
    study = {**STUDY, "alphabet": LATIN, "word_length": 5}
    for new in ({"bruh", "tryna"}, set()):
        path = tmp_path / "known.csv"
        pa_csv.write_csv(pa.table({"word": dictionary}), path)
        release = simulate({**study, "dictionary": str(path)}, texts, seed=SEED)
        assert set(release.items.to_pylist()) == new
        dictionary = [*dictionary, *release.items.to_pylist()]


def test_stages_are_those_of_the_search() -> None:
    search = word_plan.prefix_search(8.0, records=10_000)
    assert len(stages(search)) == len(search.lengths)
    puzzle = word_plan.puzzle(8.0)
    assert [stage.ranked for stage in stages(puzzle)] == [True] * 5 + [False]


@pytest.mark.parametrize("support", [0.5, 0.25, 1 / 56, 1e-3])
@pytest.mark.parametrize("variance", [1.01e4, 1e5, 1e7])
def test_tails_of_many_records_are_right_to_a_hundred_thousandth(
    support: float, variance: float
) -> None:
    """Exact, against scipy's binomial. The control: a normal law without its correction, which was
    used before, errs by up to 0.066 of a deviation's inverse where support is rare."""
    records = math.ceil(variance / (support * (1 - support)))
    mean, deviation = records * support, math.sqrt(records * support * (1 - support))
    least = np.rint(mean + deviation * np.linspace(-5, 5, 201))
    exact = stats.binom.sf(least - 1, records, support)
    assert np.abs(tail(least, np.array([records]), support) - exact).max() < 0.1 / variance + 1e-9
    normal = stats.norm.sf((least - 0.5 - mean) / deviation)
    if support < 0.1:
        assert np.abs(normal - exact).max() > 0.05 / deviation
