"""A model trained by devices through a collector that is killed is the same, bit for bit, as one
trained in a single process, and costs what was planned."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from service.restarting import Admin, KillableCollector, running_collectors
from service.test_secure_rounds import Line
from sfumato import plan
from sfumato.arrays import F32
from sfumato.device import offers
from sfumato.flow.model_terms import ModelTerms, Train, digest_of, to_bytes
from sfumato.learn import models
from sfumato.learn.data import Federated, group_by_client
from sfumato.learn.design import TrainingDesign
from sfumato.learn.local_update import trainers
from sfumato.privacy import Rng, epsilon_of
from sfumato.simulation.network_fleet import NetworkFleet
from sfumato.simulation.train import train

NAME, SEED, CLIENTS, ROUNDS = "Which tree is it", 7, 64, 4
PATIENCE_SECONDS = 300.0  # for a collector that starts on a busy machine
STUDY: dict[str, Any] = {
    "question": "train", "trust": "secure", "epsilon": 3.0, "delta": 1e-3, "devices": CLIENTS,
    "rounds": ROUNDS, "clip": 0.5, "corrupt": 0.05, "dropout": 0.0, "compression": "free_norm",
    "relative_error": 1.0,
}  # fmt: skip
MODEL: dict[str, Any] = {
    "model": "mlp", "inputs": 12, "classes": 3, "hidden": 8, "cohort": 20, "batch": 4, "epochs": 2,
}  # fmt: skip


def population(clients: int = CLIENTS) -> Federated:
    """Three classes around three places; a client has one to six examples."""
    draw = torch.Generator().manual_seed(3)
    places = torch.randn(3, 12, generator=draw)
    owner = torch.repeat_interleave(torch.arange(clients), 1 + torch.arange(clients) % 6)
    targets = torch.randint(0, 3, (len(owner) + 60,), generator=draw)
    inputs = places[targets] + 0.3 * torch.randn(len(targets), 12, generator=draw)
    examples = group_by_client(inputs[60:], targets[60:], owner, clients)
    return Federated(examples, inputs[:60], targets[:60], "made up")


class Fate:
    """Kills the collector while a round collects masked tables, and between two rounds; callers
    continue when it answers again."""

    def __init__(self, collector: KillableCollector, design: TrainingDesign) -> None:
        self._collector, self._design = collector, design
        self._lock = threading.Lock()
        self._computed = 0  # updates
        self.killed: list[str] = []

    def members(self, cohort: str) -> list[int]:
        """The devices that answer the task of a cohort, which is offered and not yet joined."""
        number = int(cohort.split()[1])
        if number == 2:
            self._kill("between rounds")
        return self._design.members(number).tolist()  # type: ignore[no-any-return]  # numpy's

    def over(self, train: Train) -> Train:
        """The same function, during which the collector may be killed."""

        def watched(terms: ModelTerms, parameters: F32, rng: Rng) -> Any:
            with self._lock:  # devices of a connection mask one after another: some have
                self._computed += 1
                if self._computed == self._design.cohort + 6:
                    self._kill("within a round")
            return train(terms, parameters, rng)

        return watched

    def _kill(self, moment: str) -> None:
        if moment not in self.killed:
            self.killed.append(moment)
            self._collector.kill()
            self._collector.start()


@pytest.mark.slow
def test_a_collector_that_is_killed_trains_the_model_that_one_process_does(tmp_path: Path) -> None:
    collector = KillableCollector(
        tmp_path, f"sqlite:///{tmp_path}/collector.db", worker_seconds=0.05, phase_seconds=600
    )
    data = population()
    request = {
        "name": NAME,
        "purpose": "To tell trees apart.",
        "study": {**STUDY, "training": MODEL},
    }
    with running_collectors(collector):
        admin = Admin([collector])
        study_id, _ = admin.open(request)
        key = offers.public_key(bytes.fromhex((tmp_path / "collector.key").read_text().strip()))
        study = admin.ask(lambda client: client.study(study_id))["study"]
        design = plan(study).design
        assert isinstance(design, TrainingDesign)
        fate = Fate(collector, design)
        with NetworkFleet(
            "",
            key,
            [fate.over(each) for each in trainers(data.train)],
            seed=SEED,
            connections=2,
            respondents=fate.members,
            connect=lambda: Line(collector),
        ) as fleet:
            done = fleet.ask(NAME, timeout_seconds=PATIENCE_SECONDS)
        released = admin.wait_for_release(study_id)
        parameters = admin.ask(lambda client: client.model(study_id))
        ledger = admin.ask(lambda client: client.ledger())
    assert fate.killed == ["within a round", "between rounds"]
    assert done.outcomes == {"done": ROUNDS * design.cohort}
    alone = train(released["study"], data, protocol=True, seed=SEED)
    model = design.make()
    model.load_state_dict(alone.parameters)
    assert parameters == to_bytes(models.flatten(model).numpy())
    assert released["model"] == {
        "parameters": models.count(model),
        "sha256": digest_of(parameters),
    }
    assert released["rate"] == alone.rate > 1
    assert released["rounds_held"] == ROUNDS
    check_ledger(ledger, design)


def check_ledger(ledger: dict[str, Any], design: TrainingDesign) -> None:
    """One charge per round, in total no more than planned, and without sampling not much less."""
    assert [entry["cohort"] for entry in ledger["entries"]] == [f"round {k}" for k in range(ROUNDS)]
    assert len({entry["campaign"] for entry in ledger["entries"]}) == design.passes == 2
    planned = epsilon_of([design.loss], ledger["delta"])
    assert 0.99 * planned <= ledger["spent"] <= planned
