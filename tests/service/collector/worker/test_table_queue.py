"""Masked tables added to a sum from memory: each once, and acknowledged when the sum is stored."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from databases import execute
from masking import NAME, Masking, devices, go, masking, parts, play, play_on
from serving import settings, wait_for
from sfumato.collector.serve import running
from sfumato.collector.store.round_tables import Message, StoreOutcome
from sfumato.collector.worker.table_queue import QueuedTable, TableQueue
from sfumato.device import Http, RoundClient, RoundOutcome
from sfumato.errors import StoreFull
from sfumato.secagg.coordinator import Coordinator

COUNT = 12


class Table(QueuedTable):
    """A table that remembers its outcomes."""

    def __init__(self, member: int, body: bytes) -> None:
        self.outcomes: list[StoreOutcome | None] = []
        super().__init__(member, body, self.outcomes.append)


# Waiting


def test_only_rounds_that_are_open_take_tables_and_tables_are_taken_in_turn() -> None:
    queue, tables = TableQueue(100), [Table(k, bytes(10)) for k in range(4)]
    assert not queue.offer("a", tables[0])
    queue.open("a")
    queue.open("a")  # is not emptied
    assert all(queue.offer("a", table) for table in tables)
    assert queue.take("a", 15) == tables[:2]
    assert queue.take("b", 15) == []
    queue.settle(tables[:2], ["new", "late"])
    assert [table.outcomes for table in tables] == [["new"], ["late"], [], []]
    queue.close("a")
    queue.close("a")
    assert [table.outcomes for table in tables[2:]] == [[None], [None]]
    assert not queue.offer("a", tables[0])


def test_tables_wait_up_to_so_many_bytes_and_those_that_are_being_added_count() -> None:
    queue = TableQueue(25)
    queue.open("a")
    first, second, third = (Table(k, bytes(10)) for k in range(3))
    assert queue.offer("a", first)
    assert queue.offer("a", second)
    assert not queue.offer("a", third)
    assert queue.take("a", 1) == [first]
    assert not queue.offer("a", third)
    queue.settle([first], ["new"])
    assert queue.offer("a", third)
    assert third.outcomes == []


def test_a_table_can_be_withdrawn_unless_it_is_being_added() -> None:
    queue = TableQueue(100)
    queue.open("a")
    first, second = Table(0, bytes(10)), Table(1, bytes(10))
    for table in (first, second):
        queue.offer("a", table)
    assert queue.take("a", 1) == [first]
    for table in (first, second, second):
        queue.withdraw("a", table)
    assert (first.outcomes, second.outcomes) == ([], [None])
    assert queue.take("a", 1) == []
    queue.withdraw("b", first)


# Being added


class Round:
    """A round in the phase mask, and the table of each device."""

    def __init__(self, stage: Masking, members: list[RoundClient]) -> None:
        self.stage, self.parts = stage, members
        request = [part.request(0) for part in members]
        self.id = request[0].path.split("/")[3]
        self.tables = [Table(int(each.path.rsplit("/", 1)[1]), each.body) for each in request]
        self.queue = stage.tables
        assert self.queue is not None
        stage.worker.step()  # opens the round

    def arrive(self, tables: list[Table]) -> None:
        assert self.queue is not None
        for table in tables:
            assert self.queue.offer(self.id, table)

    def rows(self, columns: str = "outcome, LENGTH(body)") -> list[Any]:
        query = f"SELECT {columns} FROM round_message WHERE phase = 'mask' ORDER BY member"  # noqa: S608
        return self.execute(query)

    def execute(self, sql: str) -> list[Any]:
        return execute(self.stage.collector.service.settings.store, sql)

    def end(self, study: Any) -> None:
        """All members repeat their messages, and the round goes on to its end."""
        play(self.stage, self.parts)
        assert {part.outcome for part in self.parts} == {RoundOutcome.DONE}
        assert self.stage.release(study).counts.tolist() == [1.0] * COUNT
        assert self.stage.charges() == 1


@contextmanager
def masked(folder: Path) -> Iterator[tuple[Round, Any]]:
    with masking(folder) as stage:
        stage.tables = TableQueue(1 << 30)
        stage.restart()
        study = stage.create(COUNT)
        with devices(stage, COUNT) as fleet, Http(stage.collector.address) as send:
            members = parts(fleet, stage.clock)
            for _ in range(8):
                for part in members:
                    go(part, send, until="mask")
                    if part.phase == "mask" and part.waits:  # for the first message of the phase
                        request = part.request(0)
                        part.receive(
                            send(request.method, request.path, request.body, request.headers)
                        )
                if all(part.phase == "mask" and not part.waits for part in members):
                    break
                stage.work()
            yield Round(stage, members), study


@pytest.fixture
def at_mask(tmp_path: Path) -> Iterator[tuple[Round, Any]]:
    with masked(tmp_path) as round:
        yield round


def test_tables_are_added_and_never_stored(at_mask: tuple[Round, Any]) -> None:
    round, study = at_mask
    round.arrive(round.tables[:5])
    assert round.stage.worker.step()
    assert [table.outcomes for table in round.tables[:5]] == [["new"]] * 5
    assert round.rows() == [("taken", 0)] * 5
    round.stage.restart()  # the next worker has the acknowledged tables in its sum
    round.stage.worker.step()
    round.arrive(round.tables[5:])
    assert round.stage.worker.step()
    assert round.rows() == [("taken", 0)] * COUNT
    round.end(study)


def test_a_group_is_as_large_as_it_may_be(
    at_mask: tuple[Round, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    round, study = at_mask
    monkeypatch.setattr("sfumato.collector.worker.rounds.GROUP_BYTES", 1)  # one table per group
    round.arrive(round.tables[:3])
    assert round.stage.worker.step()
    assert [table.outcomes for table in round.tables[:3]] == [["new"], [], []]
    round.stage.work()
    assert [table.outcomes for table in round.tables[:3]] == [["new"]] * 3
    round.end(study)


def test_a_table_that_comes_twice_is_added_once(at_mask: tuple[Round, Any]) -> None:
    round, study = at_mask
    table = round.tables[0]
    again, other = Table(table.member, table.body), Table(table.member, bytes(len(table.body)))
    round.arrive([table, again, other])
    assert round.stage.worker.step()
    assert (table.outcomes, again.outcomes, other.outcomes) == (
        ["new"],
        [None],
        [None],
    )  # the store answers
    round.arrive([later := Table(table.member, table.body)])
    assert not round.stage.worker.step()  # there was nothing to add
    assert later.outcomes == [None]
    assert round.rows("digest") == round.rows("DISTINCT digest")
    round.end(study)


def test_a_member_cannot_keep_a_phase_open_by_repeating_its_table(
    at_mask: tuple[Round, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    round, _ = at_mask
    round.arrive(round.tables[: COUNT - 1])
    round.stage.worker.step()
    member = round.tables[0].member
    take = TableQueue.take

    def never_empty(self: TableQueue, *arguments: Any) -> list[QueuedTable]:
        return [*take(self, *arguments), Table(member, b"x")]

    monkeypatch.setattr(TableQueue, "take", never_empty)
    monkeypatch.setattr(Coordinator, "add_all", lambda *arguments: pytest.fail("nothing to add"))
    round.stage.wait_out()
    with round.stage.collector.store.reading() as tx:
        row = tx.round(round.id)
    assert row is not None
    assert row.phase == "unmask"


def test_a_malformed_table_is_refused_and_the_others_are_added(
    at_mask: tuple[Round, Any],
) -> None:
    round, _ = at_mask
    wrong = Table(round.tables[0].member, round.tables[0].body[:-1])
    round.arrive([wrong, *round.tables[1:]])
    assert round.stage.worker.step()
    assert {table.outcomes[0] for table in (wrong, *round.tables[1:])} == {"new"}
    assert sorted(round.rows("outcome")) == [("malformed",), *[("taken",)] * (COUNT - 1)]


def test_a_table_that_was_stored_meanwhile_is_added_from_the_store(
    at_mask: tuple[Round, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    round, study = at_mask
    table, add_all = round.tables[0], Coordinator.add_all

    def store_first(*arguments: Any) -> Any:
        with round.stage.collector.store.transaction() as tx:
            assert tx.add_messages(
                [Message(round.id, "mask", table.member, bytes(16), table.body)]
            ) == ["new"]
        return add_all(*arguments)

    monkeypatch.setattr(Coordinator, "add_all", store_first)
    round.arrive(round.tables[:3])
    round.stage.worker.step()
    assert [each.outcomes for each in round.tables[:3]] == [[None]] * 3
    assert round.rows() == [("", len(table.body))]
    monkeypatch.undo()
    round.execute("DELETE FROM round_message WHERE phase = 'mask'")  # to store its true digest
    round.end(study)


@pytest.mark.parametrize(
    "meanwhile",
    [
        "UPDATE round SET is_open = 0",
        "UPDATE round SET phase = 'unmask'",
        "UPDATE round SET phase = 'aborted'",
        "DELETE FROM round_message",
    ],
)
def test_nothing_is_added_to_a_round_that_has_changed(
    at_mask: tuple[Round, Any], monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    round, _ = at_mask
    round.arrive(round.tables[:1])
    round.stage.worker.step()
    store, add_all = round.stage.collector.store, Coordinator.add_all

    def change_first(*arguments: Any) -> Any:
        round.execute(meanwhile)
        return add_all(*arguments)

    monkeypatch.setattr(Coordinator, "add_all", change_first)
    with store.reading() as tx:
        checkpoint = tx.checkpoint(round.id)
    round.arrive(round.tables[1:3])
    round.stage.worker.step()
    assert [table.outcomes for table in round.tables[1:3]] == [[None]] * 2
    assert len(round.rows()) <= 1
    with store.reading() as tx:
        assert tx.checkpoint(round.id) == checkpoint


def test_a_store_that_fails_keeps_nothing_and_says_so(
    at_mask: tuple[Round, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    round, study = at_mask

    def fails(*arguments: Any) -> None:
        raise StoreFull("no room")

    with monkeypatch.context() as patch:
        patch.setattr("sfumato.collector.store.store.Transaction.set_checkpoint", fails)
        round.arrive(round.tables[:3])
        with pytest.raises(StoreFull, match="no room"):
            round.stage.worker.step()
    assert [table.outcomes for table in round.tables[:3]] == [[None]] * 3
    assert round.rows() == []
    round.end(study)


def test_a_phase_that_is_over_takes_no_more(at_mask: tuple[Round, Any]) -> None:
    round, _ = at_mask
    round.arrive(round.tables[: COUNT - 1])
    round.stage.worker.step()
    round.stage.wait_out()
    assert round.queue is not None
    assert not round.queue.offer(round.id, round.tables[-1])
    with round.stage.collector.store.reading() as tx:
        row = tx.round(round.id)
    assert row is not None
    assert row.phase == "unmask"


@pytest.mark.parametrize("with_worker", [True, False])
def test_over_http_tables_reach_the_worker_of_the_same_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_worker: bool
) -> None:
    """Without a worker they are stored: the control."""
    outcomes: list[StoreOutcome | None] = []
    settle = TableQueue.settle

    def note(self: TableQueue, tables: Any, results: Any) -> None:
        outcomes.extend(results)
        settle(self, tables, results)

    monkeypatch.setattr(TableQueue, "settle", note)
    options = settings(tmp_path, worker_seconds=0.01)
    with running(options, with_worker=with_worker) as collector:
        stage = Masking(collector)
        study = stage.create(COUNT)
        with devices(stage, COUNT) as fleet, Http(collector.address) as send:
            members = parts(fleet, stage.clock)
            play_on(stage, study, members, send, step=(lambda: None) if with_worker else stage.work)
        assert stage.release(study).counts.tolist() == [1.0] * COUNT
    assert set(outcomes) - {None} == ({"new"} if with_worker else set())  # None: not in time


# Long tables, over connections


class Site:
    """A collector with its worker, and devices about to send long tables."""

    def __init__(self, stage: Masking, study: Any, members: list[RoundClient]) -> None:
        self.stage, self.study, self.parts = stage, study, members
        host, port = stage.collector.address.removeprefix("http://").split(":")
        self.address = host, int(port)

    def request(self, part: RoundClient) -> bytes:
        request = part.request(0)
        head = f"{request.method} {request.path} HTTP/1.1\r\nHost: c\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
        return f"{head}Content-Length: {len(request.body)}\r\n\r\n".encode() + request.body

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=20)

    def end(self) -> None:
        with Http(self.stage.collector.address) as send:
            play_on(self.stage, self.study, self.parts, send)
        with self.stage.collector.store.reading() as tx:
            (answer,) = tx.answer_rows(self.study.id)
        assert answer.count == COUNT


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with running(settings(tmp_path, worker_seconds=0.01, upload_seconds=1.0)) as collector:
        stage = Masking(collector)
        cells = 1 << 16
        study = stage.create(
            COUNT, question="mean", epsilon=None, dimensions=cells, clip=1.0, compression="none"
        )
        with devices(stage, COUNT) as fleet, Http(collector.address) as send:
            members = [device.part(NAME, np.full(cells, 1e-3), stage.clock()) for device in fleet]
            joining = [part for part in members if isinstance(part, RoundClient)]
            assert len(joining) == COUNT

            def all_at_mask() -> bool:
                for part in joining:
                    go(part, send, until="mask")
                    if part.phase == "mask" and part.waits:
                        request = part.request(0)
                        part.receive(
                            send(request.method, request.path, request.body, request.headers)
                        )
                return all(part.phase == "mask" and not part.waits for part in joining)

            wait_for(all_at_mask, "the phase mask")
            yield Site(stage, study, joining)


def test_long_tables_are_accepted_in_pieces_of_any_size(site: Site) -> None:
    for part, size in zip(site.parts[:3], (1 << 30, 100_000, 65_536), strict=True):
        data = site.request(part)
        assert len(data) > 150_000
        with closing(site.connect()) as connection:
            for start in range(0, len(data), size):
                connection.sendall(data[start : start + size])
                time.sleep(0.02)
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 201 ")
    site.end()


def test_a_device_that_hangs_up_or_stops_within_a_table_blocks_no_other(site: Site) -> None:
    """Though others wait for their turn to be read."""
    data = site.request(site.parts[0])
    with closing(site.connect()) as connection:
        connection.sendall(data[:100_000])
    with closing(site.connect()) as connection:
        connection.sendall(data[:100_000])
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 408 ")
    site.end()


@pytest.mark.parametrize(
    ("change", "status"), [("ticket", 403), ("longer", 413), ("phase", 413), ("nothing", 201)]
)
def test_only_a_members_table_is_accepted(site: Site, change: str, status: int) -> None:
    data = site.request(site.parts[0])
    if change == "ticket":
        data = re.sub(rb"Ticket [0-9a-f]+", b"Ticket " + b"0" * 64, data)
    elif change == "longer":
        size = len(site.parts[0].request(0).body)
        data = data.replace(b"Length: %d" % size, b"Length: %d" % (size + 1)) + b"x"
    elif change == "phase":
        data = data.replace(b"/mask/", b"/share/")
    with closing(site.connect()) as connection:
        connection.sendall(data)
        assert int(connection.recv(1 << 16).split()[1]) == status
    site.end()
