"""Paper 002's rules in its own setting: trained by secure sums over HTTP, with dropouts, a model is
as accurate as one that is trained in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from checks import SEED
from service.restarting import Admin, KillableCollector, running_collectors
from service.test_secure_rounds import Line
from sfumato.device import offers
from sfumato.learn import models
from sfumato.learn.data import Federated, group_by_client
from sfumato.learn.local_update import trainers
from sfumato.learn.training import evaluate
from sfumato.simulation.network_fleet import DROPPED_OUT, NetworkFleet
from sfumato.simulation.train import train

COHORT, ROUNDS, RUNS, DROPOUT = 24, 5, 4, 0.2
INPUTS = 400
CLIENTS = COHORT * ROUNDS  # one pass: a device that drops out is not needed again
FALSE_ALARM = 1e-3
PATIENCE_SECONDS = 300.0  # for a collector on a busy machine
STUDY: dict[str, Any] = {
    "question": "train", "trust": "secure", "epsilon": 8.0, "delta": 1e-3, "devices": CLIENTS,
    "rounds": ROUNDS, "clip": 1.0, "corrupt": 0.05, "dropout": DROPOUT, "relative_error": 1.0,
    "training": {
        "model": "softmax", "inputs": INPUTS, "classes": 3, "cohort": COHORT, "batch": 4,
        "epochs": 2, "warm_up": 2, "learning_rate": 0.2, "momentum": 0.5,
    },
}  # fmt: skip


def population() -> Federated:
    """Three classes around three places that are not far apart; a client has six examples."""
    draw = torch.Generator().manual_seed(3)
    places = 0.2 * torch.randn(3, INPUTS, generator=draw)
    tested, owner = 2_000, torch.arange(6 * CLIENTS) % CLIENTS
    targets = torch.randint(0, 3, (len(owner) + tested,), generator=draw)
    inputs = places[targets] + torch.randn(len(targets), INPUTS, generator=draw)
    examples = group_by_client(inputs[tested:], targets[tested:], owner, CLIENTS)
    return Federated(examples, inputs[:tested], targets[:tested], "made up", public_test=True)


@pytest.mark.slow
@pytest.mark.timeout(1_800)  # four trainings over HTTP, on a busy machine
@pytest.mark.parametrize("rule", ["adapt_norm", "two_stage", "adapt_tail"])
def test_secure_sums_over_http_train_as_well_as_one_process(rule: str, tmp_path: Path) -> None:
    """Means of four accuracies each, by Welch's test: false alarm 1e-3. The control: models
    that were trained with a hundredth of the epsilon differ."""
    data, study = population(), STUDY | {"compression": rule}
    alone = [train(study, data, seed=SEED + run) for run in range(RUNS)]
    collector = KillableCollector(
        tmp_path, f"sqlite:///{tmp_path}/collector.db", worker_seconds=0.05, phase_seconds=3
    )
    accuracies = []
    with running_collectors(collector):
        admin = Admin([collector])
        key = offers.public_key(bytes.fromhex((tmp_path / "collector.key").read_text().strip()))
        for run in range(RUNS):
            name = f"{rule} {run}"
            request = {"name": name, "purpose": "To tell places apart.", "study": study}
            study_id, _ = admin.open(request)
            with NetworkFleet(
                "", key, trainers(data.train), seed=SEED + run, connections=2,
                connect=lambda: Line(collector),
            ) as fleet:  # fmt: skip
                done = fleet.ask(
                    name, dropout_rates={"mask": DROPOUT}, timeout_seconds=PATIENCE_SECONDS
                )
            assert done.outcomes[DROPPED_OUT] > 0
            released = admin.wait_for_release(study_id)
            assert released["rounds_held"] == ROUNDS
            accuracies.append(accuracy_of(model_of(admin, study_id), data))
    expected = [each.accuracy for each in alone]
    assert not differ(accuracies, expected), (accuracies, expected)
    little = study | {"epsilon": 0.08}
    noisy = [train(little, data, seed=SEED + run, exact=False).accuracy for run in range(16)]
    assert differ(noisy, expected), (noisy, expected)


def model_of(admin: Admin, study_id: str) -> bytes:
    return admin.ask(lambda client: client.model(study_id))


def differ(ones: list[float | None], others: list[float | None]) -> bool:
    return bool(stats.ttest_ind(ones, others, equal_var=False).pvalue < FALSE_ALARM)


def accuracy_of(parameters: bytes, data: Federated) -> float | None:
    model = models.make("softmax", inputs=INPUTS, classes=3, seed=0)
    return evaluate(model, torch.tensor(np.frombuffer(parameters, dtype="<f4")), data)[0]
