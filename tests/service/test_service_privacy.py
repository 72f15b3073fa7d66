"""Nothing about a device is left in a collector: canaries go through it, and are searched for."""

from __future__ import annotations

import socket

import pytest

from databases import ON_SERVERS, server_of
from service.canaries import (
    CANARIES,
    DEVICES,
    ITEMS,
    PASSCODE,
    PEER,
    TYPO,
    Run,
    drive,
    files,
    find_canaries,
    rows,
    traces,
)
from service.processes import collector
from sfumato.device import passcodes
from sfumato.flow.report import Report, from_frames


@pytest.fixture(
    scope="module",
    params=["sqlite", *(pytest.param(name, marks=pytest.mark.slow) for name in ON_SERVERS)],
)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run over each database, at the most detailed log level."""
    folder = tmp_path_factory.mktemp("collector")
    server = server_of(request.param, request)
    store = None if server is None else server.empty_database()
    with socket.socket() as probe:
        try:
            probe.bind((PEER, 0))
        except OSError:
            pytest.skip(f"this machine does not have the address {PEER}")
    with collector(folder, store, log_level="debug", seal_seconds=0.2) as served:
        run = drive(served, folder)
        run.rows = rows(served.store)
        run.places["the store's files"] = files(folder, "collector.db")
    run.places["the store's files at the end"] = files(folder, "collector.db")
    run.places["the store's rows"] = b"\n".join(run.rows.values())
    run.places["the log"] = served.stderr.read_bytes()
    run.places["stdout"] = served.stdout.read_bytes()
    return run


def test_no_canary_is_anywhere(run: Run) -> None:
    assert find_canaries(run.places, CANARIES) == set()
    assert find_canaries({"answers to mistakes": run.echoes}, CANARIES) == set()


def test_an_administrators_mistake_appears_nowhere_else(run: Run) -> None:
    assert find_canaries(run.places, {"a mistake": TYPO}) == set()
    assert TYPO.encode() in run.echoes


def test_a_passcode_is_on_devices_only_and_its_digest_in_the_store(run: Run) -> None:
    digest = passcodes.digest(PASSCODE)
    assert [table for table, data in run.rows.items() if digest in data] == ["passcode"]
    for where, data in run.places.items():
        assert (PASSCODE.encode() in data) == (where == "devices' files"), where
        assert where.startswith("the store's") or digest.hex().encode() not in data, where


def test_the_scan_finds_what_is_there(run: Run) -> None:
    """The control: every place was read, and texts that must be in it are found."""
    expected = {
        "the log": run.studies["Trees"],
        "metrics": "sfumato_worker_last_success_age_seconds",  # few reports are not counted
        "the store's rows": run.studies["Trees"],
        "administrators' answers": run.studies["Trees"],
        "devices' answers": ITEMS[7],
        "devices' files": "To plant.",
        "releases": ITEMS[7],
        "stdout": "127.0.0.1",
    }
    if run.places["the store's files"]:
        expected |= dict.fromkeys(("the store's files", "the store's files at the end"), ITEMS[7])
    for place, text in expected.items():
        assert find_canaries({place: run.places[place]}, {"it": text}) == {("it", place)}


@pytest.mark.parametrize("name", ["a value", "the peer's address", "the header User-Agent"])
def test_a_canary_that_was_planted_is_found_in_any_form(run: Run, name: str) -> None:
    text = CANARIES[name]
    for planted in traces(text):
        spoilt = {where: data[:100] + planted + data[100:] for where, data in run.places.items()}
        assert find_canaries(spoilt, {name: text}) == {(name, where) for where in run.places}


def test_no_report_id_stands_beside_its_record_once_it_is_sealed(run: Run) -> None:
    """Nor in free pages of the file, nor in the log of a running collector. When the task is over,
    no id is left at all."""
    reports = [report for _, body in run.uploads for report in from_frames(body)]
    assert len(reports) == 3 * DEVICES
    assert not run.rows["upload"]
    for report in reports:
        report_id = Report.from_bytes(report).report_id
        assert not [table for table, data in run.rows.items() if report_id in data]
        assert report_id not in run.places["the store's files at the end"]
        left = [where for where, data in run.places.items() if report in data]
        assert not left


def test_nothing_of_a_masked_round_is_left_when_it_is_over(run: Run) -> None:
    """No message, since all of them together could be unmasked, and no ticket; on either side."""
    assert len(run.messages) == 4 * DEVICES  # enrol, share, mask, unmask
    assert len(run.tickets) == DEVICES
    tickets = [form for ticket in run.tickets for form in (ticket.encode(), bytes.fromhex(ticket))]
    for where, data in run.places.items():
        if where != "devices' answers":  # these have tickets and neighbours' keys
            assert not [text for text in (*run.messages, *tickets) if text in data], where
