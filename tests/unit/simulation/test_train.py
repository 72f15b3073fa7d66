"""The question train: plans, charges, resuming, and the command."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from sfumato import plan, simulate
from sfumato.cli.main import main
from sfumato.errors import (
    BudgetError,
    DataError,
    ImpossibleError,
    SfumatoError,
    SpecError,
    StudyError,
)
from sfumato.learn import data as loaders
from sfumato.learn.data import Federated, grouped
from sfumato.learn.design import TrainingDesign
from sfumato.learn.training import Training
from sfumato.privacy import Budget, Ledger, epsilon_of
from sfumato.simulation.train import train
from sfumato.study import Study

KEYS: dict[str, Any] = {
    "question": "train",
    "trust": "central",
    "epsilon": 8.0,
    "delta": 1e-3,
    "rounds": 6,
    "clip": 0.5,
}
MODEL: dict[str, Any] = {
    "model": "softmax", "inputs": 4, "classes": 2, "cohort": 12, "batch": 10, "server_rate": 0.5,
}  # fmt: skip


def study(**changes: Any) -> dict[str, Any]:
    model = {key: changes.pop(key) for key in list(changes) if key in _MODEL_KEYS}
    return {**KEYS, **changes, "training": {**MODEL, **model}}


_MODEL_KEYS = {
    "model", "cohort", "sampling", "steps", "noise_multiplier", "rate", "adaptive_clip", "server",
}  # fmt: skip


def population() -> Federated:
    chance = torch.Generator().manual_seed(1)
    inputs = torch.randn(300, 4, generator=chance)
    targets = (inputs.sum(dim=1) > 0).long()
    clients = grouped(inputs[:240], targets[:240], torch.arange(240) % 24, 24)
    return Federated(
        train=clients, test_inputs=inputs[240:], test_targets=targets[240:], name="sums"
    )


def designed(**changes: Any) -> TrainingDesign:
    design = plan(study(devices=24, **changes)).design
    assert isinstance(design, TrainingDesign)
    return design


@pytest.mark.parametrize(
    ("sampling", "trust"), [("poisson", "central"), ("fixed", "central"), (None, "secure")]
)
def test_the_noise_is_the_least_that_keeps_the_promise(sampling: str | None, trust: str) -> None:
    design = designed(sampling=sampling, trust=trust)
    assert 0.98 * 8 < epsilon_of([design.loss], 1e-3) <= 8
    less = replace(design, noise_multiplier=0.99 * design.noise_multiplier)
    assert epsilon_of([less.loss], 1e-3) > 8


def test_a_plan_tells_epsilon_bytes_and_parameters_beforehand() -> None:
    planned = plan(study(devices=24))
    assert planned.predicted["model_parameters"] == 10
    assert planned.predicted["epsilon"] <= 8
    assert planned.predicted["rounds_per_device"] == 3.0
    assert planned.predicted["bytes_per_device"] > 0
    assert planned.predicted["bytes_per_round"] <= planned.predicted["bytes_per_round_at_most"]
    assert "over all 6 rounds" in planned.privacy.statement


@pytest.mark.parametrize("trust", ["central", "secure"])
def test_passes_promise_what_needs_no_secret(trust: str) -> None:
    """Twelve of 24 at a time: two rounds to a pass, three passes of six rounds."""
    planned = plan(study(devices=24, trust=trust, sampling="passes"))
    said = planned.privacy.statement
    assert "a client is in 3 of them at most; who is in which need not be secret" in said
    assert "must stay secret" not in said
    assert "sampling hides nobody" not in said
    assert planned.privacy.neighbours.startswith("zero-out")
    assert planned.privacy.epsilon is not None
    assert 0.98 * 8 < planned.privacy.epsilon <= 8
    assert planned.parameters["rounds_of_a_client_at_most"] == 3


def test_a_client_that_could_be_in_more_rounds_costs_more() -> None:
    few = designed(sampling="passes", rounds=2)
    assert few.passes == 1
    more = replace(few, rounds=3)
    assert epsilon_of([more.loss], 1e-3) > 1.3 * epsilon_of([few.loss], 1e-3)


def test_noise_without_a_promise_says_what_it_costs() -> None:
    planned = plan(study(devices=24, epsilon=float("inf"), noise_multiplier=1.0))
    assert any("spends epsilon" in warning for warning in planned.warnings)


def test_without_noise_vectors_are_whole_and_nothing_is_promised() -> None:
    planned = plan(study(devices=24, epsilon=float("inf")))
    assert planned.privacy.epsilon is None
    assert planned.parameters["compression"] == "no_compression"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"trust": "local"}, StudyError, 'needs trust = "central" or "secure"'),
        ({"clip": None}, StudyError, "needs clip"),
        ({"cohort": 25}, StudyError, "must not exceed the 24 devices; got 25"),
        ({"noise_multiplier": 1.0}, StudyError, "give epsilon or training.noise_multiplier"),
        ({"compression": "fixed"}, StudyError, "needs training.rate"),
        ({"epsilon": float("inf"), "compression": "free_norm"}, StudyError, "there is none"),
        ({"trust": "secure", "compression": "adapt_norm"}, SpecError, "use free_norm"),
        ({"delta": 0.0}, ImpossibleError, "needs a delta above 0"),
        ({"epsilon": 1e-4, "delta": 1e-30}, ImpossibleError, "no noise multiplier"),
        ({"model": "oracle"}, SpecError, "a model must be one of"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        plan(study(devices=24, **changes))


def test_other_keys_of_the_table_are_refused_by_name() -> None:
    with pytest.raises(StudyError, match=r"unknown key colour in \[training\]"):
        Study.from_mapping({**KEYS, "training": {**MODEL, "colour": 1}})
    with pytest.raises(StudyError, match=r"\[training\] must have model, cohort"):
        Study.from_mapping({**KEYS, "training": {}})
    with pytest.raises(StudyError, match=r"has a table \[training\]"):
        Study.from_mapping(KEYS)


def test_a_model_is_not_simulated() -> None:
    with pytest.raises(StudyError, match="sfumato train"):
        simulate(study(), {"item": ["oak"]})


def test_a_training_is_charged_once_and_before_its_first_round(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    books = Ledger(Budget(epsilon=8.0, delta=1e-3), tmp_path / "ledger.db")
    spent: list[float] = []
    once = Training.round

    def watched(self: Training) -> Any:
        spent.append(books.spent())
        return once(self)

    monkeypatch.setattr(Training, "round", watched)
    train(study(), population(), ledger=books, seed=1)
    assert spent[0] > 7
    assert len(books.entries()) == 1
    with pytest.raises(BudgetError, match="is refused"):
        train(study(), population(), ledger=books, seed=2)
    assert len(spent) == 6  # the second one did not begin


def test_what_is_resumed_is_not_charged_again_and_ends_with_the_same_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(study(), population(), seed=1)
    books = Ledger(Budget(epsilon=8.0, delta=1e-3))
    file, once = tmp_path / "run.pt", Training.round

    def dies(self: Training) -> Any:
        if self.done == 3:
            raise KeyboardInterrupt
        return once(self)

    monkeypatch.setattr(Training, "round", dies)
    with pytest.raises(KeyboardInterrupt):
        train(study(), population(), ledger=books, seed=1, checkpoint=file)
    monkeypatch.undo()
    with pytest.raises(DataError, match="there is a checkpoint"):
        train(study(), population(), ledger=books, seed=1, checkpoint=file)
    rest = train(study(), population(), ledger=books, seed=1, checkpoint=file, resume=True)
    assert len(books.entries()) == 1
    for name, value in whole.parameters.items():
        assert torch.equal(value, rest.parameters[name])


def test_runs_for_study_say_so() -> None:
    seeded = train(study(), population(), seed=1)
    assert "drawn from a seed" in seeded.privacy.statement
    floats = train(study(), population(), exact=False)
    assert "for experiments only" in floats.privacy.statement
    assert "not covered" not in train(study(), population()).privacy.statement


def shown_in(folder: Path) -> list[float]:
    """The clip of every round, as TensorBoard reads it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder))
    board.Reload()
    return [event.value for event in board.Scalars("clip")]


def test_tensorboard_is_asked_for_by_name_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(SfumatoError, match="need the package tensorboard"):
        train({**KEYS, "training": MODEL}, population(), seed=1, tensorboard=tmp_path)


def test_the_command_trains_and_writes_what_was_asked(tmp_path: Path) -> None:
    loaders.save(tmp_path / "clients.npz", population())
    text = (
        "\n".join(f"{key} = {json.dumps(value)}" for key, value in KEYS.items())
        + "\n[training]\n"
        + "\n".join(f"{key} = {json.dumps(value)}" for key, value in MODEL.items())
    )
    (tmp_path / "study.toml").write_text(text, encoding="utf-8")
    command = [
        "train", str(tmp_path / "study.toml"), "--data", str(tmp_path / "clients.npz"),
        "--checkpoint", str(tmp_path / "run.pt"), "--metrics", str(tmp_path / "run.jsonl"),
        "--tensorboard", str(tmp_path / "board"), "--model", str(tmp_path / "model.pt"),
        "--seed", "1", "--json",
    ]  # fmt: skip
    done = CliRunner().invoke(main, command, catch_exceptions=False)
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert found["accuracy"] > 0.5
    assert found["privacy"]["epsilon"] <= 8
    lines = (tmp_path / "run.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert shown_in(tmp_path / "board") == [json.loads(line)["clip"] for line in lines]
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert sum(value.numel() for value in state.values()) == 10
    again = CliRunner().invoke(main, command)
    assert again.exit_code == 2
    assert "there is a checkpoint" in again.stderr
