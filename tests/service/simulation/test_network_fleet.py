"""Many devices and a real collector: every record counts once, on a bad network, too."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from running import sfumato
from service.device.standin import PUBLIC, running
from service.device.test_device import HASHED, TWO
from serving import PATIENCE_SECONDS, opened, settings, stored, wait_for
from sfumato.collector import studies
from sfumato.collector.serve import CollectorServer
from sfumato.device import Response
from sfumato.errors import ImpossibleError, ServiceError, SpecError
from sfumato.privacy import SystemRng
from sfumato.simulation.network_fleet import (
    TIMEOUT_SECONDS,
    NetworkFleet,
    Unreliable,
    draw_holdings,
)
from sfumato.simulation.population import Population

TREES = [f"tree {number}" for number in range(20)]


@contextmanager
def collecting(folder: Path, *, with_worker: bool = True) -> Iterator[CollectorServer]:
    collector = CollectorServer(settings(folder), with_worker=with_worker)
    started = threading.Event()
    thread = threading.Thread(target=collector.run, args=(started.set,))
    thread.start()
    try:
        assert started.wait(PATIENCE_SECONDS)
        yield collector
    finally:
        collector.stop()
        thread.join()


def create(collector: CollectorServer, name: str, **study: object) -> str:
    request = {
        "name": name,
        "purpose": "Which trees to plant next.",
        "study": {"question": "frequencies", **study},
        "items": TREES,
        "delay_seconds": 3600,
    }
    row = studies.create(
        collector.store, request, key=collector.key, rng=SystemRng(), now=lambda: 0.0
    )
    return row.id


def released(collector: CollectorServer, study: str) -> dict[str, object]:
    def release_text() -> str | None:
        with collector.store.reading() as tx:
            return tx.release(study)

    wait_for(lambda: release_text() is not None, "a release")
    release: dict[str, object] = json.loads(release_text() or "")
    return release


def test_a_fleet_on_a_bad_network_is_counted_exactly(tmp_path: Path) -> None:
    """Without noise every count is the truth: nothing is lost and nothing counts twice."""
    holdings = [[TREES[number % 7 + number % 3]] for number in range(60)]
    truth = Counter(items[0] for items in holdings)
    with collecting(tmp_path) as collector:
        study = create(collector, "Trees", trust="central", epsilon=None, devices=10_000)
        key = bytes.fromhex(collector.public_key)
        with NetworkFleet(collector.address, key, holdings, drop=0.3, connections=4) as fleet:
            summary = fleet.ask("Trees", days=2)
        assert (summary.sent, summary.unsent, summary.forgotten) == (60, 0, 0)
        assert summary.outcomes == {"kept": 60}
        assert summary.repeated > 0  # zero has probability below 0.7^60
        assert summary.lost > 0
        studies.close(collector.store, study)
        release = released(collector, study)
    estimates = release["estimates"]
    assert isinstance(estimates, list)
    counts = {row["item"]: round(row["count"]) for row in estimates}
    assert {tree: count for tree, count in counts.items() if count} == truth


def test_a_local_study_gets_every_record_of_every_day(tmp_path: Path) -> None:
    holdings = [["tree 1", "tree 2", "tree 1"] for _ in range(30)]
    with collecting(tmp_path, with_worker=False) as collector:
        opened(collector.store, key=collector.key, name="Trees")
        key = bytes.fromhex(collector.public_key)
        with NetworkFleet(collector.address, key, holdings, seed=1) as fleet:
            summary = fleet.ask("Trees", days=3)
        assert (summary.sent, summary.outcomes) == (90, {"kept": 90})
        assert stored(collector.store) == 90


def test_a_day_reports_how_far_it_is() -> None:
    """One connection has four devices: each of them moves the progress."""
    reports: list[tuple[str, float]] = []
    with running() as server:
        server.offer(HASHED)
        with NetworkFleet(server.url, PUBLIC, [["oak"]] * 4, connections=1) as fleet:
            fleet.ask("Street trees", progress=lambda *report: reports.append(report))
    stages = list(dict.fromkeys(stage for stage, _ in reports))
    assert stages[0] == "day 1"
    assert all(stage.endswith("sending what is due") for stage in stages[1:])
    shares = [share for stage, share in reports if stage == "day 1"]
    assert len(set(shares)) == 4
    assert shares == sorted(shares)
    assert shares[-1] < 1


def test_every_device_of_a_fleet_sends_as_much_whatever_it_holds() -> None:
    holdings = [["oak"], [], ["oak", "elm", "fir"], ["elm", "elm"]]
    for offer, days, each in ((HASHED, 1, 1), (HASHED, 3, 3), (TWO, 2, 4)):
        with running() as server:
            server.offer(offer)
            with NetworkFleet(server.url, PUBLIC, holdings, connections=1) as fleet:
                summary = fleet.ask("Street trees", days=days)
            assert (summary.sent, len(server.messages)) == (4 * each, 4 * each)


def test_a_busy_collector_is_asked_again(tmp_path: Path) -> None:
    with running() as server:
        server.offer(HASHED)
        server.script = [(429, {"Retry-After": "1"})] * 5 + [(503, {})] * 2
        with NetworkFleet(server.url, PUBLIC, [["oak"]] * 3, connections=1) as fleet:
            summary = fleet.ask("Street trees")
        assert (summary.sent, summary.unsent) == (3, 0)
        assert summary.refused == {429: 5, 503: 2}
        assert len(server.messages) == 3


def test_a_study_that_is_not_offered_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sfumato.simulation.network_fleet.STUDY_SECONDS", 0.0)
    with running() as server:
        server.offer(HASHED)
        with (
            NetworkFleet(server.url, PUBLIC, [["oak"]]) as fleet,
            pytest.raises(ServiceError, match="does not offer 'Trees': it is not open") as caught,
        ):
            fleet.ask("Trees")
    assert caught.value.hint == "it offers 'Street trees'"


def test_a_key_that_is_not_the_collectors_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sfumato.simulation.network_fleet.STUDY_SECONDS", 0.0)
    with running() as server:
        server.offer(HASHED)
        with (
            NetworkFleet(server.url, bytes(32), [["oak"]]) as fleet,
            pytest.raises(ServiceError, match="must be this collector's; it has signed") as caught,
        ):
            fleet.ask("Street trees")
    assert "key show" in (caught.value.hint or "")


def test_a_fleet_does_not_wait_where_nothing_listens() -> None:
    with running() as server:
        address = server.url
    started = time.monotonic()
    with (
        NetworkFleet(address, PUBLIC, [["oak"]]) as fleet,
        pytest.raises(ServiceError, match="did not answer"),
    ):
        fleet.ask("Street trees")
    assert time.monotonic() - started < TIMEOUT_SECONDS / 2


def test_devices_leave_masked_rounds_only() -> None:
    with running() as server:
        server.offer(HASHED)
        with (
            NetworkFleet(server.url, PUBLIC, [["oak"]]) as fleet,
            pytest.raises(SpecError, match="studies with masked rounds; this one has none"),
        ):
            fleet.ask("Street trees", dropout_rates={"mask": 0.05})


def test_what_devices_hold_is_drawn_from_the_data() -> None:
    rows = {"who": ["a", "b", "a", "c"], "item": ["oak", "elm", "ash", "fir"]}
    population = Population.load(rows, item_column="item", device_column="who")
    assert draw_holdings(population, None, seed=1) == [["oak", "ash"], ["elm"], ["fir"]]
    two = draw_holdings(population, 2, seed=1)
    assert two == draw_holdings(population, 2, seed=1)
    assert all(items in [["oak", "ash"], ["elm"], ["fir"]] for items in two)
    alone = Population.load(["oak", "elm"])
    assert draw_holdings(alone, None, seed=None) == [["oak"], ["elm"]]
    few = Population.load({"item": ["oak", "elm"], "devices": [2, 1]}, count_column="devices")
    assert draw_holdings(few, None, seed=None) == [["oak"], ["oak"], ["elm"]]
    with pytest.raises(ImpossibleError, match="must be 1 to 3, the number in the data; got 4"):
        draw_holdings(population, 4, seed=1)


def test_a_network_loses_and_repeats_at_its_rate() -> None:
    """Over 2,000 uploads both counts are binomial: 5 deviations of 600 are 103 (below 1e-6)."""
    with running() as server:
        server.offer(HASHED)

        def stores(*request: object) -> object:
            return Response(201, {}, b"{}")

        send = Unreliable(stores, 0.3, np.random.default_rng(1))  # type: ignore[arg-type]  # any
        for _ in range(2_000):
            try:
                send("POST", "/", b"", {})
            except ServiceError:
                continue
        assert abs(send.traffic.lost - 600) < 103
        assert abs(send.traffic.repeated - 600) < 103
        assert send.traffic.uploads == 2_000


def test_the_command_prints_its_summary(tmp_path: Path) -> None:
    (tmp_path / "trees.csv").write_text("item\n" + "oak\nelm\n" * 3)
    with running() as server:
        server.offer(HASHED)
        code, out, err = sfumato(
            "fleet", "--server", server.url, "--key", PUBLIC.hex(), "--study", "Street trees",
            "--data", "trees.csv", "--devices", "5", "--seed", "1", "--json", cwd=tmp_path,
        )  # fmt: skip
    assert code == 0, err
    summary = json.loads(out)
    assert (summary["devices"], summary["sent"], summary["unsent"]) == (5, 5, 0)
    assert "day 1" in err


def test_a_fleet_with_respondents_takes_one_day() -> None:
    with (
        NetworkFleet(
            "http://127.0.0.1:1", PUBLIC, [["oak"]], respondents=lambda cohort: [0]
        ) as fleet,
        pytest.raises(SpecError, match="one day; got 2 days"),
    ):
        fleet.ask("Trees", days=2)
