"""A model that devices train through a collector, which is killed on the way, is the one that one
process trains alone: bit for bit, and at the price that was planned."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from integration.serving import Admin, Mortal, living
from integration.test_secure_rounds import Line
from sfumato import offers, plan
from sfumato.collector.store import Store
from sfumato.learn import models
from sfumato.learn.data import Federated, grouped
from sfumato.learn.design import TrainingDesign
from sfumato.learn.on_device import trainers
from sfumato.model_terms import digest_of, to_bytes
from sfumato.network_fleet import NetworkFleet
from sfumato.privacy import epsilon_of
from sfumato.train import train

NAME, SEED, CLIENTS, ROUNDS = "Which tree is it", 7, 64, 4
PATIENCE_SECONDS = 300.0  # for a collector that starts on a busy machine
STUDY: dict[str, Any] = {
    "question": "train", "trust": "secure", "epsilon": 8.0, "delta": 1e-3, "devices": CLIENTS,
    "rounds": ROUNDS, "clip": 0.5, "corrupt": 0.05, "compression": "free_norm",
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
    held = grouped(inputs[60:], targets[60:], owner, clients)
    return Federated(held, inputs[:60], targets[:60], "made up")


class Fate:
    """Kills the collector while a round collects masked tables, and between two rounds."""

    def __init__(self, collector: Mortal) -> None:
        self._collector = collector
        self._over = threading.Event()
        self._problem: BaseException | None = None
        self.killed: list[str] = []

    @contextmanager
    def at_work(self) -> Iterator[None]:
        thread = threading.Thread(target=self._live)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()
        if self._problem is not None:
            raise self._problem

    def _live(self) -> None:
        try:
            with closing(Store.open(self._collector.store)) as store:
                while not self._over.wait(0.003):
                    moment = self._moment(store)
                    if moment is not None and moment not in self.killed:
                        self._collector.kill()
                        self.killed.append(moment)
                        self._collector.start()
        except BaseException as problem:
            self._problem = problem

    @staticmethod
    def _moment(store: Store) -> str | None:
        with store.reading() as tx:
            live = tx._run("SELECT id, phase FROM round WHERE phase NOT IN ('done', 'aborted')")
            answered = tx._run("SELECT COUNT(*) FROM answer")[0][0]
            came = sum(len(tx.senders(round_id, phase)) for round_id, phase in live)
        if live and answered >= 1 and live[0][1] == "mask" and came >= 3:
            return "within a round"
        return "between rounds" if not live and answered == 2 else None


def test_a_collector_that_is_killed_trains_the_model_that_one_process_does(tmp_path: Path) -> None:
    collector = Mortal(
        tmp_path, f"sqlite:///{tmp_path}/collector.db", worker_seconds=0.05, phase_seconds=600
    )
    data = population()
    request = {
        "name": NAME,
        "purpose": "To tell trees apart.",
        "study": {**STUDY, "training": MODEL},
    }
    with living(collector):
        admin = Admin([collector])
        study_id, _ = admin.open(request)
        key = offers.public_key(bytes.fromhex((tmp_path / "collector.key").read_text().strip()))
        asked = admin.ask(lambda client: client.study(study_id))["study"]
        design = plan(asked).design
        assert isinstance(design, TrainingDesign)
        lines: list[Line] = []

        def connect() -> Line:
            lines.append(Line(collector))
            return lines[-1]

        fate = Fate(collector)
        with (
            fate.at_work(),
            NetworkFleet(
                "",
                key,
                trainers(data.train),
                seed=SEED,
                connections=2,
                come=lambda cohort: design.members(int(cohort.split()[1])).tolist(),
                connect=connect,
            ) as fleet,
        ):
            done = fleet.ask(NAME, patience_seconds=PATIENCE_SECONDS)
            released = admin.released(study_id)
        parameters = admin.ask(lambda client: client.model(study_id))
        ledger = admin.ask(lambda client: client.ledger())
    assert sorted(fate.killed) == ["between rounds", "within a round"]
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
    """A charge a round, and no more than planned in all; sampling nobody, not much less either."""
    assert [entry["cohort"] for entry in ledger["entries"]] == [f"round {k}" for k in range(ROUNDS)]
    assert len({entry["campaign"] for entry in ledger["entries"]}) == design.passes == 2
    planned = epsilon_of([design.loss], ledger["delta"])
    assert 0.99 * planned <= ledger["spent"] <= planned
