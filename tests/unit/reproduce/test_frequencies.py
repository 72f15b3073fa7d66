from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from scipy.stats import binomtest

from sfumato.errors import DataError
from sfumato.reproduce import Claim, Outcome
from sfumato.reproduce.frequencies import data
from sfumato.reproduce.frequencies.figures import LAW_DEVICES, claims_1, claims_2, claims_3
from sfumato.reproduce.frequencies.runs import MODES, encode_rounds, errors, item_points
from sfumato.reproduce.panels import Curves
from tiny_figures import only

FALSE_ALARM = 1e-6


@pytest.fixture
def first(outcome_of: Callable[[str], Outcome]) -> Outcome:
    return outcome_of("000-fig1")


@pytest.fixture
def second(outcome_of: Callable[[str], Outcome]) -> Outcome:
    return outcome_of("000-fig2")


@pytest.fixture
def third(outcome_of: Callable[[str], Outcome]) -> Outcome:
    return outcome_of("000-fig3")


@pytest.mark.slow
def test_targets_below_twenty_devices_are_left_out(first: Outcome) -> None:
    curves = Curves(first.numbers)
    assert curves.get("a", "minimax", "x").tolist() == [0.0012, 0.02]
    assert curves.get("g", "minimax", "x").tolist() == [0.02]  # 20 of 6,906 devices are 0.0029


@pytest.mark.slow
def test_smaller_sizes_are_found_and_miss_the_target(first: Outcome) -> None:
    """Deterministic for the fixed seed. Equation (2) with constant 2 errs 1.4 to 7 times the
    target, here on the law i^-1.8 with five rows, where it is worst."""
    assert only(first.claims, "1(a)", "minimax").holds
    assert only(first.claims, "1(d)", "minimax").holds
    missed = only(first.claims, "1(e)", "constant 2")
    assert not missed.holds
    assert "5 rows where theory asks for 15" in missed.detail


@pytest.mark.slow
def test_a_target_that_is_reached_is_not_called_missed(first: Outcome) -> None:
    """The negative control: the same numbers with errors below every target."""
    better = [
        {**line, "y": line["x"] / 2, "y_high": line["x"] / 2} if line["panel"] in "beh" else line
        for line in first.numbers
    ]
    assert only(_claims_1(better), "1(e)", "constant 2").holds


def _claims_1(numbers: Sequence[Mapping[str, Any]]) -> list[Claim]:
    return list(claims_1(("d", "e", "f"), data.c4_law(), Curves(numbers)))


@pytest.mark.slow
def test_fresh_beats_hybrid_where_rows_and_width_are_few() -> None:
    """False alarm 1e-6 (exact binomial): on i^-1.1 at width 50 Fresh wins 98% of runs or more.

    Power: were it a toss-up, the test would pass with probability 0.003; the control is the same
    runs with Fresh and Hybrid swapped.
    """
    runs = 30
    shares = data.power_law_shares(1.1, data.LAW_ITEMS)
    counts = np.tile(np.rint(shares * LAW_DEVICES).astype(np.int64), (data.ROUNDS, 1))
    wins = 0
    for seed in range(1, runs + 1):
        points = item_points(data.LAW_ITEMS, seed)
        hybrid, fresh = (
            errors(mode, counts, points, rows=data.LAW_ROWS, width=50, seed=seed).max()
            for mode in ("hybrid", "fresh")
        )
        wins += int(fresh < hybrid)
    assert binomtest(wins, runs, 0.98, alternative="less").pvalue > FALSE_ALARM
    assert binomtest(runs - wins, runs, 0.98, alternative="less").pvalue < FALSE_ALARM


@pytest.mark.parametrize(("factor", "holds"), [(0.01, True), (100.0, False)])
def test_hybrid_is_called_worse_than_fresh_only_where_it_is(
    factor: float, holds: bool, second: Outcome
) -> None:
    changed = [
        {**line, "y": _best_other(second, line) * factor} if line["series"] == "hybrid" else line
        for line in second.numbers
    ]
    claims = list(claims_2(Curves(changed)))
    claim = only(claims, "never worse than Fresh")
    assert claim.holds is holds
    assert ("× at 50" in claim.detail) is not holds
    assert only(claims, "clearly best").holds is holds


def _best_other(outcome: Outcome, line: Mapping[str, Any]) -> float:
    curves = Curves(outcome.numbers)
    return min(curves.at(line["panel"], mode, line["x"]) for mode in ("shared", "fresh"))


def test_a_difference_that_chance_explains_is_not_called_one() -> None:
    lines = [
        {"panel": "a", "series": series, "x": 50, "y": y, "y_stderr": 1.0}
        for series, y in (("hybrid", 14.2), ("fresh", 10.0), ("shared", 9.0))
    ]
    curves = Curves(lines)  # three standard errors of a difference are 4.24
    assert not curves.behind("a", "hybrid", "fresh").any()
    assert curves.behind("a", "hybrid", "shared").all()


def test_figure_3_comes_out_in_the_order_of_the_paper(third: Outcome) -> None:
    """False alarm about 1e-6: the bands are five deviations wide for three seeds."""
    assert len(third.claims) == 2
    for claim in third.claims:
        assert claim.holds, claim.detail


def test_figure_3_with_shared_and_hybrid_swapped_does_not_hold(third: Outcome) -> None:
    """The negative control."""
    other = {"shared": "hybrid", "hybrid": "shared", "fresh": "fresh"}
    swapped = [{**line, "series": other[line["series"]]} for line in third.numbers]
    assert not any(claim.holds for claim in claims_3("a", data.c4_law(), Curves(swapped)))


def test_modes_share_what_their_names_say() -> None:
    counts = np.array([[3, 0, 1], [2, 2, 0]])
    points = item_points(3, seed=1)
    rounds = {
        mode: encode_rounds(mode, counts, points, rows=3, width=8, seed=1).sketches
        for mode in MODES
    }
    assert len(rounds["shared"]) == 1  # tables of one spec, added up
    assert [s.bucket_round for s in rounds["hybrid"]] == [0, 0]
    assert [s.sign_round for s in rounds["hybrid"]] == [0, 1]
    assert [s.bucket_round for s in rounds["fresh"]] == [0, 1]


def test_a_named_folder_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SFUMATO_DATA", "no/such/folder")
    with pytest.raises(DataError, match="SFUMATO_DATA must name a folder; got no/such/folder"):
        data.gowalla()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SFUMATO_DATA", str(tmp_path))
    return tmp_path


def write(folder: Path, name: str, **columns: Any) -> None:
    pa.parquet.write_table(pa.table(columns), folder / name)


def test_gowalla_rows_stand_for_their_count_of_check_ins(folder: Path) -> None:
    write(
        folder,
        "gowalla_us_cells.parquet",
        user=[0, 1, 1],
        us_cell=[7, 7, 174_999],
        count=[50_000, 25_000, 100_000],
    )
    source = data.gowalla()
    assert "gowalla_us_cells.parquet" in source.data
    assert (source.categories, source.rows, source.one_round) == (175_000, 16, 17_500)
    counts = source.counts(10, source.per_round, np.random.default_rng(1))
    total = counts.sum(axis=0)
    assert counts.sum(axis=1).tolist() == [17_500] * 10
    assert (total[7], total[174_999]) == (75_000, 100_000)  # all of them, so none twice


def test_too_few_devices_are_refused(folder: Path) -> None:
    write(folder, "gowalla_us_cells.parquet", us_cell=[7], count=[174_999])
    with pytest.raises(DataError, match="must hold at least 175000 devices; got 174999"):
        data.gowalla()


def test_a_cell_outside_the_grid_is_refused(folder: Path) -> None:
    write(folder, "gowalla_us_cells.parquet", us_cell=[175_000], count=[175_000])
    with pytest.raises(DataError, match="must be 0 to 174999"):
        data.gowalla()


def test_an_author_holds_its_number_of_commits(folder: Path) -> None:
    write(folder, "commit_users.parquet", user=range(10_000), commits=[1] * 9_000 + [4] * 1_000)
    source = data.c4_commits()
    assert source is not None
    assert "commit_users.parquet" in source.data
    assert (source.one_round, source.per_round) == (5_000, 1_000)  # a pilot takes the rest
    total = source.counts(10, 1_000, np.random.default_rng(1)).sum(axis=0)
    assert (total[1], total[4]) == (9_000, 1_000)


def test_a_registered_domain_holds_its_number_of_hosts(folder: Path) -> None:
    single = [f"site{i}.net" for i in range(155_000)]
    write(
        folder,
        "domains_crux_au.parquet",
        host=["shop.oak.com.au", "oak.com.au", "a.b.elm.org", *single],
        domain_labels=pa.array([3, 3, 2] + [2] * 155_000, type=pa.int8()),
    )
    source = data.c4_hosts()
    assert source is not None
    total = np.bincount(source.draw(155_002, np.random.default_rng(1)))
    assert total.tolist() == [0, 155_001, 1]


USERS = 12_000


@pytest.fixture
def tweets(folder: Path) -> data.Source:
    """Each user wrote "oak" three times, "elm" once, and one word of its own once; rows mixed."""
    rows = [(u, word, n) for u in range(USERS) for word, n in (("oak", 3), ("elm", 1))]
    rows += [(u, f"own {u}", 1) for u in range(USERS)]
    user, word, count = zip(*rows, strict=True)
    write(
        folder,
        "sentiment140_user_words.parquet",
        user=pa.array(user, type=pa.int32()),
        word=pa.array(word).dictionary_encode(),
        count=pa.array(count, type=pa.int16()),
    )
    return data.sentiment()


def test_a_user_draws_one_of_its_words_by_how_often_it_wrote_it(tweets: data.Source) -> None:
    """False alarm 1e-6 (exact binomial). Power: a draw that ignores counts would take "oak" a third
    of the time instead of three fifths, 54 deviations away; the control below is that draw."""
    total = np.bincount(tweets.draw(USERS, np.random.default_rng(1)), minlength=tweets.categories)
    assert tweets.categories == 2 + USERS
    assert total.sum() == USERS
    assert total[2:].max() == 1  # nobody draws another's word, and nobody is drawn twice
    oaks = int(total[0])
    assert binomtest(oaks, USERS, 3 / 5).pvalue > FALSE_ALARM
    assert binomtest(oaks, USERS, 1 / 3).pvalue < FALSE_ALARM


def test_a_power_law_is_drawn_by_its_shares() -> None:
    """False alarm 1e-6 (exact binomial). Power: the exponent 1.7 has a share 0.03 lower, which is
    missed with probability below 1e-6; the control is that exponent."""
    devices = 100_000
    items = data.power_law(1.8, 1_000)(devices, np.random.default_rng(1))
    ones = int(np.sum(items == 0))
    assert 0 <= items.min() <= items.max() < 1_000
    assert binomtest(ones, devices, data.power_law_shares(1.8, 1_000)[0]).pvalue > FALSE_ALARM
    assert binomtest(ones, devices, data.power_law_shares(1.7, 1_000)[0]).pvalue < FALSE_ALARM
