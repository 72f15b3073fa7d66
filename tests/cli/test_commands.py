"""The command line does what the library does, and says so in JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from running import within as run

WORDS = "word\n" + "oak\n" * 60 + "elm\n" * 25 + "fir\n" * 5


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "study.toml").write_text(
        'question = "frequencies"\ntrust = "central"\nepsilon = 1.0\ndelta = 1e-6\n'
        'devices = 90\ndictionary = "words.csv"\n'
    )
    (tmp_path / "words.csv").write_text("word\noak\nelm\nfir\n")
    (tmp_path / "data.csv").write_text(WORDS)
    return tmp_path


def test_plan_prints_json_with_sizes_prediction_and_promise(folder: Path) -> None:
    code, out, err = run("plan", "study.toml", "--json", cwd=folder)
    assert (code, err) == (0, "")
    data = json.loads(out)
    assert data["plan"].keys() == {"algorithm", "parameters", "predicted"}
    assert data["plan"]["predicted"]["bytes_per_device"] > 0
    assert data["privacy"]["epsilon"] == 1.0


def test_plan_compares_all_algorithms_and_marks_the_plans(folder: Path) -> None:
    code, out, err = run("plan", "study.toml", "--compare", cwd=folder)
    assert (code, err) == (0, "")
    names = [line[2:].split()[0] for line in out.splitlines()[1:4]]
    assert names == ["sparse", "one_hot", "count_sketch"]
    assert [line[0] for line in out.splitlines()[1:4]].count("*") == 1
    assert "* chosen: " in out
    code, out, err = run("plan", "study.toml", "--compare", "--json", cwd=folder)
    assert (code, err) == (0, "")
    data = json.loads(out)
    assert [each["algorithm"] for each in data["alternatives"]] == names
    chosen_plans = [each["plan"] for each in data["alternatives"] if each["chosen"]]
    plan = json.loads(run("plan", "study.toml", "--json", cwd=folder)[1])["plan"]
    assert chosen_plans == [plan]


def test_a_comparison_is_drawn(folder: Path) -> None:
    code, out, err = run("plan", "study.toml", "--compare", "--plot", "plot.png", cwd=folder)
    assert (code, err) == (0, "wrote plot.png\n")
    assert "* chosen: " in out
    assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_rounds_on_the_command_line_replace_the_studys(folder: Path) -> None:
    code, out, _ = run(
        "simulate", "study.toml", "--data", "data.csv", "--rounds", "3", "--json", cwd=folder
    )
    assert code == 0
    assert json.loads(out)["cost"]["rounds"] == 3


def test_a_ledger_file_is_charged_and_then_refuses(folder: Path) -> None:
    command = ["simulate", "study.toml", "--data", "data.csv", "--ledger", "ledger.db"]
    assert run(*command, cwd=folder)[0] == 0
    code, out, err = run(*command, cwd=folder)
    assert (code, out) == (1, "")
    assert "is refused" in err


def test_a_ledger_file_is_charged_for_the_reports_of_a_local_study(folder: Path) -> None:
    study = 'question = "frequencies"\ntrust = "local"\nepsilon = 4.0\ndaily_reports = 2\n'
    (folder / "local.toml").write_text(study)
    command = ["simulate", "local.toml", "--data", "data.csv", "--ledger", "local.db"]
    assert run(*command, cwd=folder)[0] == 0
    code, out, err = run(*command, cwd=folder)
    assert (code, out) == (1, "")
    assert "this budget allows epsilon 8 at delta 1e-06 and has spent 8" in err


def test_people_get_a_table_with_intervals_and_the_promise(folder: Path) -> None:
    code, out, _ = run("simulate", "study.toml", "--data", "data.csv", "--seed", "3", cwd=folder)
    assert code == 0
    assert "95% interval" in out
    assert "differential privacy for each device" in out


def test_figures_are_listed(tmp_path: Path) -> None:
    code, out, _ = run("reproduce", "list", cwd=tmp_path)
    assert code == 0
    assert {"000-fig1", "000-fig2", "000-fig3"} <= {line.split()[0] for line in out.splitlines()}


def test_every_command_has_help_with_an_example(tmp_path: Path) -> None:
    for command in ([], ["plan"], ["simulate"], ["reproduce"], ["demo"]):
        code, out, _ = run(*command, "--help", cwd=tmp_path)
        assert code == 0
        assert "Example:" in out
