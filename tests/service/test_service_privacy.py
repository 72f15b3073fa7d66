"""Nothing about a device is left in a collector: canaries go through it, and are looked for."""

from __future__ import annotations

import socket

import pytest

from service.canaries import (
    CANARIES,
    DEVICES,
    ITEMS,
    PEER,
    TYPO,
    Run,
    drive,
    files,
    found,
    rows,
    traces,
)
from service.processes import collector
from sfumato.flow.report import Report, from_frames


@pytest.fixture(
    scope="module", params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)]
)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run over each database, at the log level that tells most."""
    folder = tmp_path_factory.mktemp("collector")
    store = None
    if request.param == "postgresql":
        store = request.getfixturevalue("postgres").empty_database()
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
    assert found(run.places, CANARIES) == set()
    assert found({"answers to mistakes": run.echoes}, CANARIES) == set()


def test_an_administrators_mistake_is_told_to_nobody_else(run: Run) -> None:
    assert found(run.places, {"a mistake": TYPO}) == set()
    assert TYPO.encode() in run.echoes


def test_the_scan_finds_what_is_there(run: Run) -> None:
    """The control: every place was read, and what is known to be in it is found."""
    known = {
        "the log": run.studies["Trees"],
        "metrics": "sfumato_worker_last_success_age_seconds",  # few reports are in none
        "the store's rows": run.studies["Trees"],
        "administrators' answers": run.studies["Trees"],
        "devices' answers": ITEMS[7],
        "devices' files": "To plant.",
        "releases": ITEMS[7],
        "stdout": "127.0.0.1",
    }
    if run.places["the store's files"]:
        known |= dict.fromkeys(("the store's files", "the store's files at the end"), ITEMS[7])
    for place, text in known.items():
        assert found({place: run.places[place]}, {"it": text}) == {("it", place)}


@pytest.mark.parametrize("name", ["a value", "the peer's address", "the header User-Agent"])
def test_a_canary_that_was_planted_is_found_in_any_form(run: Run, name: str) -> None:
    text = CANARIES[name]
    for planted in traces(text):
        spoilt = {where: data[:100] + planted + data[100:] for where, data in run.places.items()}
        assert found(spoilt, {name: text}) == {(name, where) for where in run.places}


def test_no_report_id_stands_beside_its_record_once_it_is_sealed(run: Run) -> None:
    """Nor in free pages of the file, nor in the log of a collector that goes on."""
    sent = [report for _, body in run.uploads for report in from_frames(body)]
    assert len(sent) == 3 * DEVICES
    assert not run.rows["upload"]
    for report in sent:
        report_id = Report.from_bytes(report).report_id
        assert [table for table, data in run.rows.items() if report_id in data] == ["seen"]
        left = [where for where, data in run.places.items() if report in data]
        assert not left


def test_nothing_of_a_masked_round_is_left_when_it_is_over(run: Run) -> None:
    """No message, which with all others could be unmasked, and no ticket; on either side."""
    assert len(run.messages) == 4 * DEVICES  # enrol, share, mask, unmask
    assert len(run.tickets) == DEVICES
    tickets = [form for told in run.tickets for form in (told.encode(), bytes.fromhex(told))]
    for where, data in run.places.items():
        if where != "devices' answers":  # they are told their tickets, and what neighbours enrol
            assert not [text for text in (*run.messages, *tickets) if text in data], where
