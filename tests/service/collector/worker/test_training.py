"""Models that devices train through a collector: its tasks, its parameters, its release."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from databases import execute
from masking import NAME, Masking, agreed, masking, play
from service.test_training_rounds import MODEL as LARGER
from service.test_training_rounds import STUDY, population
from serving import ask, settings, wait_for
from sfumato import plan
from sfumato.cli.main import main
from sfumato.collector import studies, tokens
from sfumato.collector.client import AdminClient
from sfumato.collector.serve import running
from sfumato.collector.store.store import StudyRow
from sfumato.device import Device, Http, MemoryBox, RoundClient, RoundOutcome
from sfumato.device.offers import Offer, public_key, verify
from sfumato.device.outbox import Outcome
from sfumato.errors import (
    BudgetError,
    DataError,
    NotReadyError,
    ServiceError,
    SpecError,
    StudyError,
)
from sfumato.flow.model_terms import digest_of, to_bytes
from sfumato.flow.release import ModelRelease
from sfumato.learn import data as loaders
from sfumato.learn import models
from sfumato.learn.design import TrainingDesign
from sfumato.learn.local_update import trainers
from sfumato.learn.models import state_file
from sfumato.privacy import SeededRng
from sfumato.simulation.train import train
from sfumato.spec import from_json
from sfumato.study import Study

SEED = 11
MODEL = {**LARGER, "cohort": 10}
CLIENTS = 33
KEYS: dict[str, Any] = {
    **{name: value for name, value in STUDY.items() if name != "devices"},
    "dropout": 0.0,
    "training": MODEL,
}
DATA = population(CLIENTS)
TRAINERS = trainers(DATA.train)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Masking]:
    with masking(tmp_path) as stage:
        yield stage


def design_of(study: StudyRow) -> TrainingDesign:
    design = plan(from_json(study.study)).design
    assert isinstance(design, TrainingDesign)
    return design


class Fleet:
    """All clients as devices over one connection, which take part when a test asks them to."""

    def __init__(self, stage: Masking, send: Http) -> None:
        key = bytes.fromhex(stage.collector.public_key)
        shared: dict[str, tuple[str, bytes]] = {}
        self._stage, self._send = stage, send
        self.boxes = [MemoryBox(None, shared) for _ in TRAINERS]
        self.devices = [
            Device(box, send, key, rng=SeededRng(SEED, number))
            for number, box in enumerate(self.boxes)
        ]

    def parts(self, numbers: Sequence[int]) -> list[RoundClient]:
        parts = []
        for number in numbers:
            device = agreed(self.devices[number], self._stage.clock)
            part = device.part(NAME, TRAINERS[number], self._stage.clock())
            assert isinstance(part, RoundClient), part
            parts.append(part)
        return parts

    def wait_for_offer(self, device: Device) -> None:
        """Wait until the latest task is offered: offers may be a second old."""
        with self._stage.collector.store.reading() as tx:
            (latest,) = [row.id for row in tx.open_tasks()]
        clock = self._stage.clock

        def is_offered() -> bool:
            return [each.offer.task.id for each in device.offers(clock())] == [latest]

        wait_for(is_offered, "the latest task to be offered")

    def round(self, numbers: Sequence[int], **options: Any) -> list[RoundClient]:
        self.wait_for_offer(self.devices[0])
        parts = self.parts(numbers)
        play(self._stage, parts, **options)
        self._stage.work()
        return parts


@pytest.fixture
def fleet(stage: Masking) -> Iterator[Fleet]:
    with Http(stage.collector.address) as send:
        yield Fleet(stage, send)


def client(stage: Masking, role: Any = "analyst") -> AdminClient:
    token = tokens.create(stage.collector.store, role=role, name=role, days=1)[1]
    return AdminClient(stage.collector.address, token)


def offer(stage: Masking, study: StudyRow) -> Offer:
    with stage.collector.store.reading() as tx:
        row = tx.tasks(study.id)[-1]
    return verify(json.loads(row.envelope), public_key(stage.collector.key))


def test_workers_that_restart_train_the_same_model_as_one_process(
    stage: Masking, fleet: Fleet
) -> None:
    study = stage.create(CLIENTS, **KEYS)
    design = design_of(study)
    digests = []
    for number in range(design.rounds):
        stage.restart()
        terms = offer(stage, study)
        assert terms.model is not None
        assert (terms.model.round, terms.contributions) == (number + 1, design.passes)
        digests.append(terms.model.digest)
        parts = fleet.round(design.members(number).tolist())
        assert {part.outcome for part in parts} == {RoundOutcome.DONE}
        url = stage.collector.service.settings.store
        assert execute(url, "SELECT COUNT(*) FROM model") == [(1,)]  # of the latest task only
    assert len(set(digests)) == design.rounds
    release, body = client(stage).release(study.id), client(stage).model(study.id)
    alone = train(release["study"], DATA, protocol=True, seed=SEED)
    model = design.make()
    model.load_state_dict(alone.parameters)
    assert body == to_bytes(models.flatten(model).numpy())
    assert release["rate"] == alone.rate
    assert release["rounds_held"] == release["cost"]["rounds"] == design.rounds
    assert release["cost"]["devices"] == 30
    assert release["cost"]["bytes_per_device"] > 0
    assert ModelRelease.from_dict(release).to_dict() == release


def test_a_device_takes_part_once_per_pass(stage: Masking, fleet: Fleet) -> None:
    study = stage.create(CLIENTS, **KEYS)
    members = design_of(study).members(0).tolist()
    fleet.round(members)
    again = fleet.devices[members[0]]
    fleet.wait_for_offer(again)
    assert again.part(NAME, TRAINERS[members[0]], stage.clock()) is Outcome.LIFETIME_SPENT


@pytest.mark.slow
def test_a_round_that_is_aborted_too_often_is_skipped(stage: Masking, fleet: Fleet) -> None:
    study = stage.create(CLIENTS, **KEYS)
    before = offer(stage, study).model
    numbers = list(range(10))
    dropouts = dict.fromkeys(range(5), "share")  # half of them vanish
    for _ in range(stage.tries):
        parts = fleet.parts(numbers)
        play(stage, parts, leaving=dropouts)
        stage.wait_out()
        for box in fleet.boxes[:10]:
            box.drop_round(NAME)  # so that the same devices take part again
    after = offer(stage, study).model
    assert before is not None
    assert after is not None
    assert (after.round, after.digest) == (2, before.digest)
    assert stage.charges() == 0
    members = design_of(study).members
    for number in (1, 2, 3):
        fleet.round(members(number).tolist())
    release = client(stage).release(study.id)
    assert release["rounds_held"] == 3
    assert "3 of 4 rounds were held" in release["notes"][-1]


def test_a_study_that_is_closed_releases_the_model_so_far(stage: Masking, fleet: Fleet) -> None:
    study = stage.create(CLIENTS, **KEYS)
    fleet.round(design_of(study).members(0).tolist())
    terms = offer(stage, study).model
    studies.close(stage.collector.store, study.id)
    stage.work()
    assert terms is not None
    assert digest_of(client(stage).model(study.id)) == terms.digest
    assert client(stage).release(study.id)["rounds_held"] == 1


def test_a_study_without_a_round_has_no_model(stage: Masking) -> None:
    study = stage.create(CLIENTS, **KEYS)
    with pytest.raises(NotReadyError):
        client(stage).model(study.id)
    studies.close(stage.collector.store, study.id)
    stage.work()
    assert "no round was held" in stage.state(study)["problem"]


def test_parameters_are_served_by_digest_and_dropped_with_the_study(stage: Masking) -> None:
    study = stage.create(CLIENTS, **KEYS)
    terms = offer(stage, study).model
    assert terms is not None
    path = f"/v1/models/{terms.digest}"
    answer = ask(stage.collector.address, "GET", path)
    assert answer.status == 200
    assert len(answer.body) == terms.size
    assert digest_of(answer.body) == terms.digest
    assert answer.headers["cache-control"] == "public, max-age=31536000, immutable"
    for wrong in ("0" * 64, "..", terms.digest.upper()):
        refused = ask(stage.collector.address, "GET", f"/v1/models/{wrong}")
        assert (refused.status, refused.code) in ((404, "unknown-model"), (404, "not-found"))
    studies.delete(stage.collector.store, study.id)
    assert ask(stage.collector.address, "GET", path).status == 404


def test_another_study_trains_no_model(stage: Masking) -> None:
    study = stage.create(12)
    with stage.collector.store.transaction() as tx:
        tx.put_release(study.id, "{}")
    with pytest.raises(ServiceError, match="trains no model"):
        client(stage).model(study.id)


@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
def test_a_collector_goes_through_passes_and_says_so(stage: Masking, sampling: str) -> None:
    with pytest.raises(StudyError, match="a collector trains in passes") as refused:
        stage.create(CLIENTS, **{**KEYS, "training": {**MODEL, "sampling": sampling}})
    assert 'training.sampling = "passes"' in str(refused.value.hint)
    for training in (MODEL, {**MODEL, "sampling": "passes"}):
        study = stage.create(CLIENTS, **{**KEYS, "training": training})  # the second is the first
        spec = from_json(study.study)
        assert isinstance(spec, Study)
        assert spec.training is not None
        assert spec.training.sampling == "passes"


def test_a_training_with_a_trusted_collector_is_not_answered(stage: Masking) -> None:
    with pytest.raises(StudyError, match="does not answer train with trust central"):
        stage.create(CLIENTS, **{**KEYS, "trust": "central"})


def test_a_training_that_would_exceed_the_budget_is_refused_before_its_first_round(
    tmp_path: Path,
) -> None:
    """One pass is within it and two are not: all rounds are one plan."""
    with (
        masking(tmp_path, budget_epsilon=2.5, budget_delta=1e-3) as stage,
        pytest.raises(BudgetError, match=r"this budget allows epsilon 2\.5"),
    ):
        stage.create(CLIENTS, **KEYS)


@pytest.mark.slow
def test_a_training_that_takes_the_whole_budget_goes_to_its_end(tmp_path: Path) -> None:
    with (
        masking(tmp_path, budget_epsilon=KEYS["epsilon"], budget_delta=1e-3) as stage,
        Http(stage.collector.address) as send,
    ):
        study, fleet = stage.create(CLIENTS, **KEYS), Fleet(stage, send)
        design = design_of(study)
        for number in range(design.rounds):
            fleet.round(design.members(number).tolist())
        assert stage.charges() == design.rounds
        assert stage.state(study)["state"] == "released"


def test_two_studies_with_the_same_keys_are_two_trainings(stage: Masking) -> None:
    one = stage.create(CLIENTS, **KEYS)
    request = {"name": "Another", "purpose": "The same.", "study": {**KEYS, "devices": CLIENTS}}
    other = studies.create(
        stage.collector.store, request, key=stage.collector.key, rng=SeededRng(1), now=stage.clock
    )
    assert design_of(one).seed != design_of(other).seed
    assert offer(stage, one).task.id != offer(stage, other).task.id


def test_where_pytorch_is_missing_a_training_is_refused_by_name() -> None:
    script = f"""
import sys
sys.modules["torch"] = None
from sfumato import plan
from sfumato.errors import StudyError
import sfumato.collector.studies
try:
    plan({ {**KEYS, "devices": CLIENTS}!r})
except StudyError as problem:
    print(problem, "|", problem.hint)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("a train study needs PyTorch, and it is not installed |")
    assert "sfumato[learn]" in done.stdout


def test_a_model_too_large_for_devices_is_refused(stage: Masking) -> None:
    large = {**MODEL, "inputs": 3_000, "hidden": 12_000}
    with pytest.raises(SpecError, match="must have 1 to 33,554,432 parameters; got 36,0"):
        stage.create(
            CLIENTS, **{**KEYS, "compression": "fixed", "training": {**large, "rate": 1e5}}
        )


@pytest.fixture
def command(stage: Masking) -> Callable[..., Any]:
    token = tokens.create(stage.collector.store, role="analyst", name="analyst", days=1)[1]
    environment = {"SFUMATO_TOKEN": token, "SFUMATO_SERVER": stage.collector.address}
    return lambda *words: CliRunner().invoke(main, words, env=environment)


def test_a_release_is_shown_and_exported(
    stage: Masking, fleet: Fleet, command: Callable[..., Any], tmp_path: Path
) -> None:
    study = stage.create(CLIENTS, **{**KEYS, "rounds": 1})
    fleet.round(design_of(study).members(0).tolist())
    result = command("release", "show", NAME)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("ModelRelease: 131 parameters after 1 rounds")
    file = tmp_path / "model.pt"
    done = command("release", "export", NAME, "--to", str(file))
    assert done.exit_code == 0, done.stderr
    model = design_of(study).make()
    model.load_state_dict(torch.load(file, weights_only=True))
    assert to_bytes(models.flatten(model).numpy()) == client(stage).model(study.id)
    assert command("release", "export", NAME, "--to", str(tmp_path / "m.json")).exit_code == 0
    refused = command("release", "export", NAME, "--to", str(tmp_path / "m.csv"))
    assert refused.exit_code == 2
    assert "a file of this release must end in json; got csv" in refused.stderr


def test_parameters_of_another_release_are_not_exported() -> None:
    released = {"model": {"sha256": "0" * 64}, "study": {"training": MODEL}}
    with pytest.raises(DataError, match="their digest differs"):
        state_file(released, b"\0" * 524)


def test_a_fleet_from_the_command_line_trains_a_model(tmp_path: Path) -> None:
    """All devices ask to take part in every round, and may do so once per pass."""
    loaders.save(tmp_path / "clients.npz", DATA)
    with running(settings(tmp_path, worker_seconds=0.05)) as collector:
        token = tokens.create(collector.store, role="admin", name="admin", days=1)[1]
        admin = AdminClient(collector.address, token)
        keys = {**KEYS, "rounds": 4, "devices": CLIENTS}
        study = admin.create_study({"name": NAME, "purpose": "To tell trees.", "study": keys})
        words = ["fleet", "--server", collector.address, "--key", collector.public_key]
        words += ["--study", NAME, "--data", str(tmp_path / "clients.npz"), "--kind", "examples"]
        done = CliRunner().invoke(main, [*words, "--json"])
        assert done.exit_code == 0, done.stderr
        wait_for(lambda: admin.study(study["id"])["state"] == "released", "the release")
        release = admin.release(study["id"])
    assert json.loads(done.stdout)["outcomes"]["done"] == 40
    assert release["rounds_held"] == 4
    assert release["cost"]["devices"] == 30
