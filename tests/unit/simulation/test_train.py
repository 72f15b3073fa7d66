"""The question train: plans, charges, resuming, and the command."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from dp_accounting.rdp import compute_epsilon

from marks import quick
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
from sfumato.flow.release import NoisedSum
from sfumato.learn import data as loaders
from sfumato.learn.campaign import TrainingCampaign
from sfumato.learn.data import TESTED_ON_CLIENTS, Federated, group_by_client
from sfumato.learn.design import TrainingDesign
from sfumato.learn.training import Training
from sfumato.privacy import AdditiveLoss, Budget, Ledger, epsilon_of
from sfumato.privacy.accounting import ORDERS, SampledLoss, sampled_renyi
from sfumato.questions.promise import TIME
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
    if changes.get("trust") == "secure":
        changes = {"dropout": 0.1, **changes}  # a dozen devices are too few for the default
    return {**KEYS, **changes, "training": {**MODEL, **model}}


_MODEL_KEYS = {
    "model", "cohort", "sampling", "steps", "noise_multiplier", "rate", "adaptive_clip", "server",
}  # fmt: skip


def population() -> Federated:
    chance = torch.Generator().manual_seed(1)
    inputs = torch.randn(300, 4, generator=chance)
    targets = (inputs.sum(dim=1) > 0).long()
    clients = group_by_client(inputs[:240], targets[:240], torch.arange(240) % 24, 24)
    return Federated(
        train=clients, test_inputs=inputs[240:], test_targets=targets[240:], name="sums"
    )


def designed(**changes: Any) -> TrainingDesign:
    design = plan(study(devices=24, **changes)).design
    assert isinstance(design, TrainingDesign)
    return design


@pytest.mark.parametrize(
    ("sampling", "trust"),
    [("poisson", "central"), ("fixed", "central"), (None, "secure"), ("fixed", "secure")],
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
    assert f"Not covered: {planned.influence}" in planned.privacy.lines
    assert planned.influence.most is None


@pytest.mark.parametrize("trust", ["central", "secure"])
def test_passes_promise_what_needs_no_secret(trust: str) -> None:
    """Twelve of 24 clients at a time: two rounds per pass, three passes in six rounds."""
    planned = plan(study(devices=24, trust=trust, sampling="passes"))
    statement = planned.privacy.statement
    assert "a client is in at most 3 of them; they need not be secret" in statement
    assert "stay secret" not in statement
    assert planned.privacy.neighbours.startswith("zero-out")
    assert planned.privacy.epsilon is not None
    assert 0.98 * 8 < planned.privacy.epsilon <= 8
    assert planned.parameters["rounds_of_a_client_at_most"] == 3


def numbers_in(statement: str) -> set[float]:
    """All epsilons in a privacy statement."""
    pairs = re.findall(r"\(([\d.]+), [\d.e-]+\)-differential", statement)
    return {float(each) for each in (*pairs, *re.findall(r"epsilon ([\d.]+)", statement))}


def known_members(design: TrainingDesign, rounds: int, *, replaced: bool = False) -> float:
    """The epsilon of `rounds` rounds against an observer who knows that a client was in all of
    them, from the noise alone: its table becomes zero, or another table, twice as far."""
    far = 2 if replaced else 1
    one = AdditiveLoss(
        noise="skellam" if design.secure is not None else "gaussian",
        scale=design.noise_multiplier * 1e3, l1=far * 1e6, l2=far * 1e3, unit_cells=0,
    )  # fmt: skip
    return epsilon_of([one] * rounds, 1e-3)


@pytest.mark.parametrize("sampling", [None, "passes", "fixed"])
def test_a_secure_training_promises_what_holds_against_its_server(sampling: str | None) -> None:
    """The server knows who is in a cohort. Every epsilon in the statement is that of the rounds
    that one client can be in, each of them known, for the relation that the statement names."""
    planned = plan(study(devices=24, trust="secure", sampling=sampling))
    design = planned.design
    assert isinstance(design, TrainingDesign)
    rounds = 6 if sampling == "fixed" else 3
    assert planned.privacy.neighbours.startswith("zero-out")
    holds = known_members(design, rounds)
    assert planned.privacy.epsilon == pytest.approx(holds, rel=1e-9)
    assert planned.predicted["epsilon"] == planned.privacy.epsilon
    assert numbers_in(planned.privacy.statement) == {math.ceil(1e3 * holds) / 1e3}
    assert "stay secret" not in planned.privacy.statement


def test_a_replaced_client_costs_another_number_than_one_that_is_zeroed() -> None:
    """The control of the test above: the two relations, which statements once confused, differ
    much, and so does the epsilon of random cohorts from that against a server that knows them."""
    design = designed(trust="secure", sampling="fixed")
    zeroed = known_members(design, 6)
    assert known_members(design, 6, replaced=True) > 2 * zeroed
    trusted = replace(design, secure=None, cohort=6)
    assert trusted.neighbours == "replace"
    secret = replace(trusted, sampling="poisson")
    assert secret.neighbours == "zero-out"
    assert epsilon_of([secret.loss], 1e-3) < 0.8 * known_members(secret, 6)


def test_a_trusted_server_keeps_cohorts_secret_and_the_statement_says_so() -> None:
    for sampling, relation in (("poisson", "zero-out"), ("fixed", "replace")):
        privacy = plan(study(devices=24, sampling=sampling)).privacy
        assert privacy.neighbours.startswith(relation)
        assert any(
            "stay secret: the trusted server knows them" in each for each in privacy.assumptions
        )


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
        ({"trust": "local"}, StudyError, 'needs trust = "secure" or "central"'),
        ({"clip": None}, StudyError, "needs clip"),
        ({"cohort": 25}, StudyError, "must not exceed the 24 devices; got 25"),
        ({"noise_multiplier": 1.0}, StudyError, "give epsilon or training.noise_multiplier"),
        ({"compression": "fixed"}, StudyError, "needs training.rate"),
        ({"epsilon": float("inf"), "compression": "free_norm"}, StudyError, "there is none"),
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


@pytest.mark.parametrize("device", ["cuda:99", "gpu"])
def test_a_device_that_pytorch_cannot_use_is_refused(device: str) -> None:
    with pytest.raises(SpecError, match=f"that PyTorch can use on this machine; got {device}"):
        train(study(), population(), device=device)


def test_other_keys_of_the_table_are_refused_by_name() -> None:
    with pytest.raises(StudyError, match=r"unknown key colour in \[training\]"):
        Study.from_mapping({**KEYS, "training": {**MODEL, "colour": 1}})
    with pytest.raises(StudyError, match=r"\[training\] must have cohort"):
        Study.from_mapping({**KEYS, "training": {}})
    with pytest.raises(StudyError, match=r"needs a \[training\] table"):
        Study.from_mapping(KEYS)


def test_a_model_is_not_simulated() -> None:
    with pytest.raises(StudyError, match="sfumato train"):
        simulate(study(), {"item": ["oak"]})


class InterruptionError(Exception):
    """The process dies."""


def interrupted(monkeypatch: pytest.MonkeyPatch, books: Ledger, file: Path, **keys: Any) -> None:
    """A training that dies in its fourth round, which is charged but not saved."""
    once = TrainingCampaign.absorb

    def dies(self: TrainingCampaign, answer: NoisedSum) -> None:
        if self.done == 3:
            raise InterruptionError
        once(self, answer)

    monkeypatch.setattr(TrainingCampaign, "absorb", dies)
    with pytest.raises(InterruptionError):
        train(study(**keys), population(), ledger=books, seed=1, checkpoint=file)
    monkeypatch.setattr(TrainingCampaign, "absorb", once)


@pytest.mark.parametrize("keys", [{}, {"trust": "secure"}, {"sampling": "fixed"}])
def test_every_round_is_charged_before_anything_of_it_is_seen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, keys: dict[str, Any]
) -> None:
    """All rounds together cost what the plan says."""
    books = Ledger(Budget(epsilon=8.0, delta=1e-3), tmp_path / "ledger.db")
    charged: list[int] = []
    once = TrainingCampaign.absorb

    def watched(self: TrainingCampaign, answer: NoisedSum) -> None:
        charged.append(len(books.entries()))
        once(self, answer)

    monkeypatch.setattr(TrainingCampaign, "absorb", watched)
    trained = train(study(**keys), population(), ledger=books, seed=1)
    assert charged == [1, 2, 3, 4, 5, 6]
    assert books.spent() == pytest.approx(trained.privacy.epsilon, rel=1e-9)
    with pytest.raises(BudgetError, match="is refused"):
        train(study(**keys), population(), ledger=books, seed=2)
    assert len(charged) == len(books.entries()) == 6  # the second one did not begin


def test_floats_are_charged_like_whole_numbers() -> None:
    books = [Ledger(Budget(epsilon=8.0, delta=1e-3)) for _ in range(2)]
    for exact, ledger in zip((True, False), books, strict=True):
        train(study(), population(), ledger=ledger, seed=1, exact=exact)
    assert [ledger.spent() for ledger in books] == [books[0].spent()] * 2
    assert len(books[1].entries()) == 6
    with pytest.raises(BudgetError, match="is refused"):
        train(study(), population(), ledger=books[1], seed=2, exact=False)


@pytest.mark.parametrize("keys", [{}, {"trust": "secure"}, {"sampling": "fixed"}])
def test_the_same_training_again_is_another_plan_and_shows_nothing_unless_all_of_it_is_paid_for(
    keys: dict[str, Any],
) -> None:
    """A budget for one and a half: the second starts only if the budget covers its last round. The
    control has no limit, and twelve rounds of one client cost more than six."""
    books = Ledger(Budget(epsilon=12.0, delta=1e-3))
    train(study(**keys), population(), ledger=books, seed=1)
    once = books.spent()
    with pytest.raises(BudgetError, match="is refused"):
        train(study(**keys), population(), ledger=books, seed=1)
    assert len(books.entries()) == 6
    open_ended = Ledger(Budget(epsilon=None, delta=1e-3))
    for _ in range(2):
        train(study(**keys), population(), ledger=open_ended, seed=1)
    assert len({entry.campaign for entry in open_ended.entries()}) in (
        6,
        12,
    )  # two rounds per pass, or one
    assert len({entry.loss for entry in open_ended.entries()}) == 2
    assert open_ended.spent() > 1.3 * once


def test_what_is_resumed_ends_with_the_same_model_and_pays_for_the_round_that_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(study(), population(), seed=1)
    books, file = Ledger(Budget(epsilon=None, delta=1e-3)), tmp_path / "run.pt"
    interrupted(monkeypatch, books, file)
    with pytest.raises(DataError, match="there is already a checkpoint"):
        train(study(), population(), ledger=books, seed=1, checkpoint=file)
    rest = train(study(), population(), ledger=books, seed=1, checkpoint=file, resume=True)
    assert len(books.entries()) == 7
    assert any(note.startswith("1 more round was charged") for note in rest.notes)
    assert not any("charged" in note for note in whole.notes)
    for name, value in whole.parameters.items():
        assert torch.equal(value, rest.parameters[name])


@pytest.mark.parametrize("keys", [{}, {"trust": "secure"}, {"sampling": "fixed"}])
def test_one_checkpoint_that_is_resumed_three_times_is_charged_three_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any]
) -> None:
    """Copies of a file do not know of each other; the ledger has all rounds. Rounds 0 to 3 were run
    once and 3 to 5 three times more. A pass has two rounds, so a client may have been in the first
    pass once, in the second four times (round 3) and in the third three times."""
    books, file = Ledger(Budget(epsilon=None, delta=1e-3)), tmp_path / "run.pt"
    interrupted(monkeypatch, books, file, **keys)
    spent = [books.spent()]
    for number in range(3):
        copy = Path(shutil.copy(file, tmp_path / f"copy {number}.pt"))
        train(study(**keys), population(), ledger=books, checkpoint=copy, resume=True)
        spent.append(books.spent())
    assert len(books.entries()) == 4 + 3 * 3
    assert all(after > 1.1 * before for before, after in pairwise(spent[1:]))
    design = designed(**keys)
    assert isinstance(design.round_loss, SampledLoss)
    most = 1 + 4 + 3 if design.sampling == "passes" else 4 + 3 * 3
    rounds = replace(design.round_loss, times=most)
    filtered, _ = compute_epsilon(ORDERS, sampled_renyi(rounds), 1e-3)
    whole = epsilon_of([rounds], 1e-3)
    # As a list fixed in advance: exactly, or by Rényi divergences. Each exact loss is rounded up by
    # at most 1e-3.
    assert whole - 1e-3 * most <= spent[-1] <= filtered * (1 + 1e-9)
    once = epsilon_of([design.loss], 1e-3)
    assert whole > 1.3 * once  # the control: one training costs far less


def test_a_budget_for_one_training_pays_for_one_and_not_for_three(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lost round stays charged, so training ends one round early; a copy of the checkpoint
    gets no further round, and gives its own model."""
    books, file = Ledger(Budget(epsilon=8.0, delta=1e-3)), tmp_path / "run.pt"
    interrupted(monkeypatch, books, file)
    copy = Path(shutil.copy(file, tmp_path / "copy.pt"))
    first = train(study(), population(), ledger=books, checkpoint=file, resume=True)
    assert first.cost.rounds == 5
    assert any(note.startswith("5 of 6 rounds were run") for note in first.notes)
    for _ in range(2):
        again = train(study(), population(), ledger=books, checkpoint=copy, resume=True)
        assert again.cost.rounds == 3
    assert len(books.entries()) == 6
    assert books.spent() <= 8


def test_a_checkpoint_goes_with_the_ledger_of_its_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    books, file = Ledger(Budget(epsilon=8.0, delta=1e-3)), tmp_path / "run.pt"
    with pytest.raises(SpecError, match="resume continues from a checkpoint"):
        train(study(), population(), ledger=books, resume=True)
    with pytest.raises(SpecError, match="a checkpoint needs the ledger") as refused:
        train(study(), population(), checkpoint=file)
    assert "--ledger" in str(refused.value.hint)
    interrupted(monkeypatch, books, file)
    other = Ledger(Budget(epsilon=8.0, delta=1e-3))
    with pytest.raises(DataError, match="it lacks 3 of them"):
        train(study(), population(), ledger=other, checkpoint=file, resume=True)
    assert not other.entries()


def test_runs_for_study_say_so() -> None:
    seeded = train(study(), population(), seed=1)
    assert "comes from a seed" in seeded.privacy.statement
    floats = train(study(), population(), exact=False)
    assert "for experiments only" in floats.privacy.statement
    real = train(study(), replace(population(), public_test=True))
    assert real.privacy.not_covered == (TIME,)


def test_figures_of_clients_own_data_are_labelled_wherever_they_are_told(tmp_path: Path) -> None:
    """In the release, its short form, every line of metrics and TensorBoard; the control is a test
    set that is declared public."""
    for public in (False, True):
        data, folder = replace(population(), public_test=public), tmp_path / str(public)
        lines = tmp_path / f"{public}.jsonl"
        trained = train(study(), data, evaluate_every=2, metrics=lines, tensorboard=folder)
        release = trained.to_dict()
        labelled = not public
        assert (TESTED_ON_CLIENTS in release["privacy"]["not_covered"]) == labelled
        assert (f"Not covered: {TESTED_ON_CLIENTS}" in release["privacy"]["statement"]) == labelled
        assert ("(exact)" in repr(trained)) == labelled
        for line in map(json.loads, lines.read_text(encoding="utf-8").splitlines()):
            is_shown = line["accuracy"] is not None
            assert (line["not_covered"] == TESTED_ON_CLIENTS) == (is_shown and labelled)
        names = tags_in(folder)
        assert ("accuracy" in names) == ("loss" in names) == public
        assert ("accuracy (exact, on clients' data)" in names) == labelled


def test_a_set_without_tests_has_nothing_to_label() -> None:
    data = population()
    none = replace(data, test_inputs=data.test_inputs[:0], test_targets=data.test_targets[:0])
    assert data.not_covered == (TESTED_ON_CLIENTS,)
    assert none.not_covered == ()


@pytest.mark.parametrize("trust", quick(["central", "secure"], "central"))
def test_all_that_a_release_tells_follows_from_noise_and_public_numbers(
    tmp_path: Path, trust: str
) -> None:
    """With the same randomness, clients without examples give the same release, metrics and
    checkpoint as clients with many, except for the noised parameters, their test on public
    examples, and time. The control: the progress shown to the operator does differ."""
    results: list[Any] = []
    texts: list[Any] = []
    for data in (population(), _emptied(population())):
        data = replace(data, public_test=True)
        folder = tmp_path / str(len(results))
        folder.mkdir()
        books = Ledger(Budget(epsilon=None, delta=1e-3))
        keys = {"epsilon": float("inf"), "noise_multiplier": 20.0, "compression": "none"}
        trained = train(
            study(trust=trust, **keys), data, seed=1, ledger=books,
            metrics=folder / "run.jsonl", checkpoint=folder / "run.pt",
        )  # fmt: skip
        release = trained.to_dict()
        release["cost"].pop("seconds")
        for each in (release, *release["history"]):
            each.pop("accuracy"), each.pop("loss")
        lines = [json.loads(each) for each in (folder / "run.jsonl").read_text().splitlines()]
        for line in lines:
            line.pop("accuracy"), line.pop("loss")
        state = torch.load(folder / "run.pt", weights_only=True)
        fields = {
            key: state[key] for key in ("sizing", "clip", "done", "held", "cells_sent", "design")
        }
        assert set(state) - set(fields) == {"id", "flat", "memory", "history"}
        results.append((release, lines, fields))
        training = Training(designed(trust=trust, **keys), data, noise_seed=1)
        texts.append([(figures.left_out, figures.empty) for figures in training.run()])
    assert results[0] == results[1]
    assert texts[0] != texts[1]


def _emptied(data: Federated) -> Federated:
    """The same clients, without examples."""
    train_data = data.train
    none = replace(
        train_data, inputs=train_data.inputs[:0], targets=train_data.targets[:0],
        offsets=torch.zeros_like(train_data.offsets),
    )  # fmt: skip
    return replace(data, train=none)


def tags_in(folder: Path) -> set[str]:
    """The names of TensorBoard's curves."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder))
    board.Reload()
    return set(board.Tags()["scalars"])


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
    with pytest.raises(SfumatoError, match="TensorBoard is not installed"):
        train({**KEYS, "training": MODEL}, population(), seed=1, tensorboard=tmp_path)


def toml() -> str:
    return (
        "\n".join(f"{key} = {json.dumps(value)}" for key, value in KEYS.items())
        + "\n[training]\n"
        + "\n".join(f"{key} = {json.dumps(value)}" for key, value in MODEL.items())
    )


def test_the_command_trains_and_writes_what_was_asked(tmp_path: Path) -> None:
    loaders.save(tmp_path / "clients.npz", population())
    (tmp_path / "study.toml").write_text(toml(), encoding="utf-8")
    command = [
        "train", str(tmp_path / "study.toml"), "--data", str(tmp_path / "clients.npz"),
        "--checkpoint", str(tmp_path / "run.pt"), "--metrics", str(tmp_path / "run.jsonl"),
        "--tensorboard", str(tmp_path / "board"), "--model", str(tmp_path / "model.pt"),
        "--ledger", str(tmp_path / "ledger.db"), "--seed", "1", "--json",
    ]  # fmt: skip
    done = CliRunner().invoke(main, command, catch_exceptions=False)
    assert done.exit_code == 0
    output = json.loads(done.stdout)
    assert output["accuracy"] > 0.5
    assert output["privacy"]["epsilon"] <= 8
    assert TESTED_ON_CLIENTS in output["privacy"]["not_covered"]
    lines = (tmp_path / "run.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert shown_in(tmp_path / "board") == [json.loads(line)["clip"] for line in lines]
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert sum(value.numel() for value in state.values()) == 10
    again = CliRunner().invoke(main, command)
    assert again.exit_code == 2
    assert "there is already a checkpoint" in again.stderr


def test_the_command_takes_the_word_of_who_says_that_test_examples_are_public(
    tmp_path: Path,
) -> None:
    loaders.save(tmp_path / "clients.npz", population())
    (tmp_path / "study.toml").write_text(toml(), encoding="utf-8")
    command = ["train", str(tmp_path / "study.toml"), "--data", str(tmp_path / "clients.npz")]
    for flags, labelled in (([], True), (["--public-test"], False)):
        done = CliRunner().invoke(main, [*command, *flags], catch_exceptions=False)
        assert (f"Not covered: {TESTED_ON_CLIENTS}" in done.stdout) == labelled
    refused = CliRunner().invoke(main, [*command, "--checkpoint", str(tmp_path / "run.pt")])
    assert refused.exit_code == 2
    assert "--ledger" in refused.stderr
