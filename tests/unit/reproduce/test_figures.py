"""Properties of every figure of every paper."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from marks import quick
from sfumato.errors import DataError, SfumatoError, SpecError
from sfumato.reproduce import Outcome, figures
from sfumato.reproduce.runner import conduct
from tiny_figures import EXPERIMENTS

NAMES = tuple(figures())
FIRST = ("000-fig2", "001-fig1", "002-fig2", "003-fig3", "004-emoji")  # one of each paper
QUICK_NAMES = quick(NAMES, *FIRST)
TRAINED = tuple(name for name in NAMES if name.startswith(("002", "003")))
FIELDS = {"figure", "panel", "data", "series", "x_name", "x", "y_name", "y", "y_low", "y_high"}
FIELDS |= {"y_stderr", "repeats", "seeds"}
# Descriptions of data without a data file.
STAND_INS = (
    "law ",
    "made-up ",
    "three centres",
    "as in the paper",
    "printed in the paper",
    "any data",
)
PANELS = {
    "000-fig1": 9,
    "000-fig2": 3,
    "000-fig3": 1,
    **dict.fromkeys(("001-fig1", "001-fig2", "001-fig3", "001-fig4"), 2),
    "001-table1": 2,
    "002-fig1": 3,
    "002-fig2": 2,
    **dict.fromkeys(("002-table1", "002-table2", "002-table3"), 4),
    **dict.fromkeys(("003-fig2", "003-fig3", "003-fig4", "003-fig6", "003-fig9"), 1),
    "003-fig5": 2,
    **dict.fromkeys(("004-emoji", "004-autoplay", "004-energy", "004-health"), 3),
    **dict.fromkeys(("004-fig4", "004-new-words"), 2),
}
OutcomeOf = Callable[[str], Outcome]


def silent(stage: str, share: float) -> None:
    pass


def test_every_figure_is_tried_and_its_title_names_the_paper() -> None:
    assert EXPERIMENTS.keys() == PANELS.keys() == figures().keys()
    for name, figure in figures().items():
        assert figure.name == name
        assert figure.title.endswith(f"(paper {name[:3]})")


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_scale_is_refused(name: str) -> None:
    unknown: Any = "huge"
    with pytest.raises(SpecError, match="scale must be small or paper; got 'huge'"):
        figures()[name].run(unknown, silent)


@pytest.mark.parametrize("name", QUICK_NAMES)
def test_numbers_are_plain_json_and_say_which_data_and_seeds(
    name: str, outcome_of: OutcomeOf
) -> None:
    numbers = outcome_of(name).numbers
    assert numbers
    for line in numbers:
        assert json.loads(json.dumps(line, allow_nan=False)) == line
        assert line["figure"] == name
        assert any(stand_in in line["data"] for stand_in in STAND_INS)  # there are no files
        if "panel" in line:
            assert line.keys() >= FIELDS
            assert line["y_low"] <= line["y_high"]
            seeds = line["seeds"] or {"first": 1, "last": 1}  # None: printed in the paper
            assert 1 <= line["repeats"] <= seeds["last"] - seeds["first"] + 1


@pytest.mark.parametrize("name", QUICK_NAMES)
def test_claims_have_numbers(name: str, outcome_of: OutcomeOf) -> None:
    claims = outcome_of(name).claims
    assert claims
    assert len({claim.text for claim in claims}) == len(claims)
    for claim in claims:
        assert isinstance(claim.holds, bool)
        assert any(character.isdigit() for character in claim.detail)


@pytest.mark.parametrize("name", QUICK_NAMES)
def test_progress_goes_from_nothing_to_everything(
    name: str, make_figure: Callable[[str], tuple[Outcome, list[tuple[str, float]]]]
) -> None:
    _, stages = make_figure(name)
    shares = [share for _, share in stages]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert all(stage for stage, _ in stages)


@pytest.mark.parametrize("name", QUICK_NAMES)
def test_the_picture_has_every_panel_with_names_for_its_axes(
    name: str, outcome_of: OutcomeOf
) -> None:
    pytest.importorskip("matplotlib")
    outcome = outcome_of(name)
    picture = outcome.draw()
    assert len(picture.axes) == PANELS[name]
    assert f"Paper {name[:3]}" in picture.get_suptitle()
    titles = picture.get_suptitle() + "".join(a.get_title(loc="left") for a in picture.axes)
    assert any(stand_in in titles for stand_in in (*STAND_INS, "epsilon"))
    for axes in picture.axes:
        assert axes.get_xlabel()
        assert axes.get_ylabel()
        assert axes.lines
    legends = picture.legends or [axes.get_legend() for axes in picture.axes]
    assert all(legend is not None and legend.get_texts() for legend in legends)


@pytest.mark.parametrize("name", QUICK_NAMES)
def test_a_missing_matplotlib_is_one_line_with_a_hint(
    name: str, outcome_of: OutcomeOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = outcome_of(name)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SfumatoError) as problem:
        outcome.draw()
    assert problem.value.hint == 'pip install "sfumato[plot]"'


@pytest.mark.parametrize("name", TRAINED)
def test_without_torch_the_error_says_what_to_install(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "sfumato.learn")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SfumatoError, match="needs PyTorch") as problem:
        figures()[name].run("small", silent)
    assert problem.value.hint == 'pip install "sfumato[learn]"'


@pytest.mark.parametrize("name", TRAINED)
def test_without_the_data_the_error_names_the_file(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SFUMATO_DATA", str(tmp_path))
    with pytest.raises(DataError, match="there is no data file") as problem:
        figures()[name].run("small", silent)
    assert problem.value.hint is not None
    assert "SFUMATO_DATA" in problem.value.hint


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("002")])
def test_paper_scale_without_a_gpu_says_what_it_would_take(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SfumatoError, match=r"needs a GPU .* \d+ trainings of \d+ rounds"):
        figures()[name].run("paper", silent)


@pytest.mark.parametrize("name", quick(["002-fig2", "003-fig3"], "002-fig2"))
def test_the_same_seeds_give_the_same_numbers(name: str, outcome_of: OutcomeOf) -> None:
    again = conduct(name, EXPERIMENTS[name](), silent)
    assert again.numbers == outcome_of(name).numbers
    assert again.claims == outcome_of(name).claims


class Backwards:
    """An engine that computes every shard twice, and adds the last one first."""

    def sum(self, function: Callable[[Any], Any], shards: Iterable[Any]) -> Any:
        total = None
        for shard in reversed(list(shards)):
            function(shard)
            part = function(shard)
            total = part if total is None else total + part
        return total


def test_the_numbers_do_not_depend_on_the_order_in_which_an_engine_adds(
    outcome_of: OutcomeOf, no_files: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SFUMATO_DATA", no_files)
    stages: list[tuple[str, float]] = []
    ours = conduct(
        "000-fig2", EXPERIMENTS["000-fig2"](), lambda *stage: stages.append(stage), Backwards()
    )
    assert ours.numbers == outcome_of("000-fig2").numbers
    assert ours.claims == outcome_of("000-fig2").claims
    shares = [share for _, share in stages]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)
