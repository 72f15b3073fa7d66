from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from scipy.stats import binomtest, chi2

from marks import quick
from sfumato.hashing import Polynomial
from sfumato.reproduce import Claim, Outcome
from sfumato.reproduce.files import data_folder
from sfumato.reproduce.frequencies.runs import item_points
from sfumato.reproduce.heavy_hitters import data, runs
from sfumato.reproduce.heavy_hitters.data import CATEGORIES, DEVICES, Words
from sfumato.reproduce.heavy_hitters.figures import (
    best_rows,
    budget_for,
    claims_2,
    claims_3,
    claims_4,
)
from sfumato.reproduce.heavy_hitters.runs import COUNTING, Counting, Setting
from sfumato.reproduce.panels import Curves, Reading
from sfumato.sketch import CountSketch
from tiny_figures import only

FALSE_ALARM = 1e-6
FOLDER = data_folder()  # before a test changes the environment
SETTING = Setting(rounds=4, threshold=20, budget=3_000)


@pytest.fixture
def second(outcome_of: Callable[[str], Outcome]) -> Outcome:
    return outcome_of("001-fig2")


@pytest.fixture(scope="module")
def law() -> Words:
    return data.law(2, 1.1)


@pytest.mark.parametrize(
    "name", quick(["001-fig2", "001-fig3", "001-fig4"], "001-fig3", "001-fig4")
)
def test_scores_are_shares_and_lines_say_the_rows(
    name: str, outcome_of: Callable[[str], Outcome]
) -> None:
    for line in outcome_of(name).numbers:
        assert 0 <= line["y"] <= 1
        assert line["rows"] == (5 if line["series"] in COUNTING else 3)


@pytest.mark.slow
def test_figure_2_comes_out_in_the_order_of_an_independent_simulation(second: Outcome) -> None:
    """Deterministic for the fixed seeds. That simulation, on the same law, had .63 to .67 against
    .21 at 2,000 words, and .81 against .01 at 5,000."""
    claim = only(second.claims, "(i+2)^-1.1", "independent simulation")
    assert claim.holds, claim.detail


@pytest.mark.slow
def test_figure_2_with_adaptive_and_fresh_swapped_does_not_hold(second: Outcome) -> None:
    """The negative control."""
    other = {"adaptive": "fresh", "fresh": "adaptive"}
    swapped = [
        {**line, "series": other.get(line["series"], line["series"])} for line in second.numbers
    ]
    assert not only(_claims_2(swapped), "independent simulation").holds


def _claims_2(numbers: Sequence[Mapping[str, Any]]) -> list[Claim]:
    return list(claims_2("a", data.law(2, 1.1), Curves(numbers)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", ["at least the paper's IBLTs", "at least every CountSketch", "nobody held"]
)
def test_claims_about_ours_hold_and_would_not_for_worse_numbers(
    words: str, second: Outcome
) -> None:
    """Deterministic for the fixed seeds; the control is ours with a lower F1 and a wrong key."""
    assert only(_claims_2(second.numbers), words).holds
    worse = [
        {**line, "y": 1.0 if "wrong" in line["panel"] else 0.0}
        if line["series"] == "ours"
        else line
        for line in second.numbers
    ]
    assert not only(_claims_2(worse), words).holds


def curves_of(**series: Sequence[float]) -> Curves:
    """Panel a, with x = 100, 1000, ..."""
    return Curves(
        [
            {"panel": "a", "series": name, "x": 10.0 ** (2 + k), "y": y, "y_stderr": 0.0}
            for name, values in series.items()
            for k, y in enumerate(values)
        ]
    )


def test_a_budget_is_interpolated_by_its_logarithm() -> None:
    curves = curves_of(half=[0.6, 1.0, 1.0], never=[0.1, 0.5, 0.7], always=[0.9, 0.9, 0.9])
    assert budget_for(curves, "a", "half") == pytest.approx(10**2.5)
    assert budget_for(curves, "a", "never") == float("inf")
    assert budget_for(curves, "a", "always") == 100


@pytest.mark.slow
def test_a_level_that_is_never_reached_is_not_reached_with_less(second: Outcome) -> None:
    lower = [
        {**line, "y": 0.5} if line["y_name"].startswith("F1") else line for line in second.numbers
    ]
    claims = _claims_2(lower)
    assert not only(claims, "words of the paper's adaptive IBLT").holds
    assert not only(claims, "10 times less", "without signs").holds


@pytest.mark.slow
@pytest.mark.parametrize(("count_median", "holds"), [(1.0, False), (0.0, True)])
def test_ten_times_less_is_compared_with_the_named_method(
    count_median: float, holds: bool, second: Outcome
) -> None:
    changed = [
        {**line, "y": count_median} if line["series"] == "unsigned" else line
        for line in second.numbers
    ]
    assert only(_claims_2(changed), "10 times less", "without signs").holds is holds


def test_flat_may_rise_and_falling_is_by_a_tenth() -> None:
    flat, rising, falling = [0.9, 0.89, 0.91], [0.9, 0.91, 0.94], [0.9, 0.5, 0.4]
    others = dict.fromkeys(("unsigned", "fresh"), flat)
    others |= {"ours": rising, "adaptive": [0.9, 0.94, 0.9], "fixed": flat}
    curves = curves_of(shared=falling, **others)
    claims = list(claims_3("a", data.law(2, 1.1), curves))
    assert only(claims, "fixed sampling", "does not fall").holds
    assert only(claims, "ours", "does not fall").holds
    assert not only(claims, "adaptive", "does not fall").holds
    assert only(claims, "Shared", "falls").holds
    assert not only(claims, "Fresh", "falls").holds


@pytest.mark.parametrize(("score", "holds"), [(0.79, True), (0.77, False)])
def test_adaptive_is_compared_with_the_best_t(score: float, holds: bool) -> None:
    curves = curves_of(fixed=[0.0, 0.8, 0.6], adaptive=[score] * 3, ours=[score] * 3)
    claims = list(claims_4("a", data.law(2, 1.1), curves))
    assert only(claims, "within 0.02").holds is holds
    assert not only(claims, "(ours)").holds


def test_the_rows_with_the_best_mean_are_used_at_each_x() -> None:
    tried = {(5, 1): [0.5, 0.7], (9, 1): [0.8, 0.1], (5, 2): [0.1], (9, 2): [0.2]}
    readings = [
        Reading("a", f"fresh/{rows}", x, y) for (rows, x), values in tried.items() for y in values
    ]
    best = best_rows([*readings, Reading("a", "ours", 1, 0.9)])
    rows_by_series = {(series, x): more["rows"] for _, series, x, _, more in best}
    assert rows_by_series == {("fresh", 1): 5, ("fresh", 2): 9, ("ours", 1): 3}
    assert [reading.y for reading in best] == [0.5, 0.7, 0.2, 0.9]
    assert {reading.series for reading in best} == {"fresh", "ours"}


def test_count_median_is_the_sum_of_medians_of_plain_counts() -> None:
    """Against a slow reference."""
    rows, width, seed = 5, 7, 3
    counts = np.random.default_rng(1).integers(4, size=(3, 40))
    points = item_points(60, seed)  # twenty strings that nobody holds
    expected = np.zeros(60)
    for round, count in enumerate(counts):
        sketch = CountSketch(rows=rows, width=width, seed=seed, bucket_round=round)
        readings = np.zeros((rows, 60))
        for row, coefficients in enumerate(sketch.buckets.tolist()):
            values = Polynomial(tuple(coefficients))(points)
            cells = np.array([int(value) * width >> 61 for value in values])
            readings[row] = np.bincount(cells[:40], count, minlength=width)[cells]
        expected += np.median(readings, axis=0)
    totals = runs.sketch_totals("unsigned", counts, points, rows=rows, width=width, seed=seed)
    assert totals.tolist() == expected.tolist()


@pytest.mark.parametrize("mode", COUNTING)
def test_count_sketches_that_are_wide_enough_count_exactly(mode: Counting) -> None:
    counts = np.random.default_rng(1).integers(4, size=(3, 20))
    points = item_points(30, seed=1)
    totals = runs.sketch_totals(mode, counts, points, rows=9, width=5_000, seed=1)
    assert totals.tolist() == [*counts.sum(axis=0).tolist(), *[0] * 10]


def test_f1_is_the_harmonic_mean_of_precision_and_recall() -> None:
    precision, recall = 3 / 4, 3 / 6
    assert runs.f1(3, 4, 6) == pytest.approx(2 / (1 / precision + 1 / recall))
    assert runs.f1(0, 0, 6) == 0
    assert runs.f1(0, 0, 0) == 1


@pytest.mark.parametrize(
    ("budget", "threshold", "times"), [(2_000, 50, 25), (50_000, 50, 1.76), (100_000, 50, 1)]
)
def test_fixed_sampling_is_the_papers(
    budget: int, threshold: int, times: float, law: Words
) -> None:
    counts = np.zeros((2, CATEGORIES), dtype=np.int64)
    counts[0, 0], counts[1, 0] = 9_000, 11_000
    setting = Setting(rounds=2, threshold=threshold, budget=budget)
    assert runs.fixed_times(law, counts, setting) == pytest.approx(times)


def test_nobody_sends_more_than_the_budget(folder: Path) -> None:
    write(folder, "commit_user_words.parquet", word=["oak", "elm"], count=[7, 3])
    (whole,) = data.whole_words()
    for words in (*data.short_words(), whole):
        counts = words.rounds(2, seed=1)
        for budget in (100, 1_000, 50_000):
            setting = Setting(rounds=2, threshold=50, budget=budget)
            ours = runs.our_design(words, counts, setting, seed=1, adaptive=True)
            paper = runs.paper_design(words, counts, setting, times=None, seed=1)
            for rate in (1.0, 0.1, 0.01):
                sketch = ours.sketch(0, rate)
                assert sketch.cell_bits * sketch.rows * sketch.width <= 16 * budget
                assert paper.sketch(0, rate).cell_bits <= 16 * words.paper_cell_words
            assert words.paper_cell_words * paper.rows * paper.width <= budget
    assert (whole.paper_key_words, data.law(2, 1.1).paper_key_words) == (16, 8)


def test_a_round_that_fits_is_not_sampled_and_is_listed_exactly() -> None:
    words = few_words()
    counts = words.rounds(SETTING.rounds, seed=1)
    design = runs.our_design(words, counts, SETTING, seed=1)
    assert (design.adaptive, design.mechanism.rate) == (False, 1)
    assert runs.score_campaign(design, words, counts, SETTING, seed=1) == (1.0, 0)


def test_a_round_that_does_not_fit_is_sampled_or_lost() -> None:
    words, small = few_words(), replace(SETTING, budget=600)
    counts = words.rounds(SETTING.rounds, seed=1)
    ours = runs.our_design(words, counts, small, seed=1)
    assert ours.adaptive
    assert ours.mechanism.rate < 1
    whole = runs.paper_design(words, counts, small, times=1.0, seed=1)
    assert runs.score_campaign(whole, words, counts, small, seed=1) == (0.0, 0)


def test_keys_that_nobody_held_are_counted() -> None:
    """The control of "0 in … campaigns": devices that hold other items than they sent."""
    words = few_words()
    counts = words.rounds(SETTING.rounds, seed=1)
    design = runs.our_design(words, counts, SETTING, seed=1)
    others = replace(words, items=pa.array(np.asarray(words.items) + np.uint64(1_000)))
    score = runs.score_campaign(design, others, counts, SETTING, seed=1)
    assert score == (0.0, int(np.count_nonzero(counts)))


def few_words() -> Words:
    """A law over five hundred keys."""
    law = data.law(2, 1.1)
    shares = law.shares[:500] / law.shares[:500].sum()
    numbers = np.arange(500, dtype=np.uint64)
    return replace(law, items=pa.array(numbers), numbers=numbers[:, None], shares=shares)


def test_words_are_drawn_by_their_shares_in_rounds_of_varying_size() -> None:
    """False alarm 2e-6 (exact binomial; chi-square of a normal sample). Power: a spread of √M,
    or shares of a law with the exponent 1.2, are missed with probability below 1e-6; both are the
    controls."""
    words = few_words()
    counts = words.rounds(100, seed=1)
    sizes = counts.sum(axis=1)
    spread = float(((sizes - sizes.mean()) ** 2).sum())
    assert _chance(spread / (0.1 * DEVICES) ** 2) > FALSE_ALARM
    assert _chance(spread / DEVICES) < FALSE_ALARM
    holders, total = int(counts[:, 0].sum()), int(sizes.sum())
    steeper = (np.arange(1, 501) + 2.0) ** -1.2
    assert binomtest(holders, total, float(words.shares[0])).pvalue > FALSE_ALARM
    assert binomtest(holders, total, float(steeper[0] / steeper.sum())).pvalue < FALSE_ALARM


def _chance(squares: float) -> float:
    """The probability of a sum of squares this extreme, for a hundred normal sizes."""
    return 2 * float(min(chi2.cdf(squares, 99), chi2.sf(squares, 99)))


def test_the_number_of_distinct_words_is_that_of_balls_in_urns(law: Words) -> None:
    urns = replace(law, shares=np.full(10_000, 1e-4))
    assert urns.distinct == pytest.approx(10_000 * (1 - 0.9999**DEVICES))
    assert len(law.items) == CATEGORIES == 97_336


def test_without_files_laws_stand_in_and_whole_words_are_left_out(folder: Path) -> None:
    assert [words.name for words in data.short_words()] == ["law (i+2)^-1.1", "law (i+5)^-1.3"]
    assert data.whole_words() == []


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SFUMATO_DATA", str(tmp_path))
    return tmp_path


def write(folder: Path, name: str, **columns: Any) -> None:
    pa.parquet.write_table(pa.table(columns), folder / name)


def test_words_are_cut_or_whole_and_what_has_no_key_is_left_out(folder: Path) -> None:
    words = ["to", "tool", "tools", "é", "a-very-long-word"]
    write(
        folder,
        "stackexchange_user_words.parquet",
        user=range(5),
        word=pa.array(words).dictionary_encode(),
        count=pa.array([2, 3, 5, 7, 10], type=pa.int16()),
    )
    short, stand_in = data.short_words()
    assert "stackexchange_user_words.parquet" in short.data
    assert "law" in stand_in.data
    assert shares_of(short) == {"to": 0.1, "too": 0.4, "a-v": 0.5}
    (whole,) = data.whole_words()
    assert shares_of(whole) == {"to": 2 / 17, "tool": 3 / 17, "tools": 5 / 17, "é": 7 / 17}
    for each in (short, whole):
        assert each.keys.items(each.numbers)[0].to_pylist() == each.items.to_pylist()


def shares_of(words: Words) -> dict[str, float]:
    return dict(zip(words.items.to_pylist(), words.shares.tolist(), strict=True))


def test_ours_beats_the_paper_on_real_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deterministic for the fixed seed; over four seeds the gaps were .18 and .12."""
    if FOLDER is None or not (FOLDER / "stackexchange_user_words.parquet").is_file():
        pytest.skip("the words of Stack Exchange are not here")
    monkeypatch.setenv("SFUMATO_DATA", str(FOLDER))
    setting = Setting(rounds=30, threshold=50, budget=500)
    for words in (data.short_words()[0], data.whole_words()[0]):
        counts = words.rounds(setting.rounds, seed=1)
        paper = runs.paper_design(words, counts, setting, times=None, seed=1)
        ours = runs.our_design(words, counts, setting, seed=1)
        score = runs.score_campaign(ours, words, counts, setting, seed=1)
        assert score.f1 > runs.score_campaign(paper, words, counts, setting, seed=1).f1
        assert score.wrong == 0
