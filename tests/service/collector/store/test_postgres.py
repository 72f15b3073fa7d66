"""A store on a server: outages, restarts and settings of the server."""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from databases import Server
from serving import PATIENCE_SECONDS, wait_for
from sfumato.collector.backup import backup
from sfumato.collector.store.postgres import Postgres
from sfumato.collector.store.store import Store, StudyRow, TaskRow
from sfumato.collector.worker.thread import WorkerThread
from sfumato.errors import StoreError, StoreFull, StoreReadOnly, StoreUnavailable

STUDY = StudyRow("0a" * 16, "Popular emoji", "Which to offer", "collecting", "{}", "{}", "{}", "{}")
TASK = TaskRow("a1" * 32, STUDY.id, 0, "{}", "{}", "open", None)
UPLOAD = (TASK.id, 1, os.urandom(100_000))


@pytest.fixture
def store(postgres_url: str) -> Iterator[Store]:
    with closing(Store.open(postgres_url)) as store:
        store.migrate()
        with store.transaction() as tx:
            tx.add_study(STUDY)
            tx.add_task(TASK)
        yield store


def upload(store: Store) -> None:
    with store.transaction() as tx:
        assert tx.insert_uploads([UPLOAD]) == ["stored"]


def fill(store: Store) -> int:
    """Upload until the store is full; return how many uploads were acknowledged."""
    for acknowledged in range(1_000):
        try:
            upload(store)
        except StoreFull:
            return acknowledged
    raise AssertionError("it never filled up")


def received_count(store: Store) -> int:
    with store.reading() as tx:
        return tx.received_count(TASK.id)


@contextmanager
def setting(server: Server, name: str, value: str) -> Iterator[None]:
    """A setting of the whole server; in effect within the block."""
    before = server.execute(f"SHOW {name}")[0][0]
    server.execute(f"ALTER SYSTEM SET {name} = {value}")
    try:
        _reload(server, name, value)
        yield
    finally:
        server.execute(f"ALTER SYSTEM RESET {name}")
        _reload(server, name, before)


def _reload(server: Server, name: str, expected: str) -> None:
    server.execute("SELECT pg_reload_conf()")
    deadline = time.monotonic() + 30
    while server.execute(f"SHOW {name}") != [(expected,)]:
        assert time.monotonic() < deadline


def test_a_server_that_is_away_is_unavailable_until_it_is_back(
    store: Store, postgres: Server
) -> None:
    upload(store)
    postgres.stop()
    try:
        for _ in range(2):  # on a connection that was there, and on a new one
            with pytest.raises(StoreUnavailable, match="cannot be reached"), store.transaction():
                pass
        with pytest.raises(StoreUnavailable), store.worker_lock():
            pass
    finally:
        postgres.start()
    upload(store)
    assert received_count(store) == 2


def test_a_server_that_was_started_anew_is_used_without_an_error(
    store: Store, postgres: Server
) -> None:
    with store.reading(), store.reading():  # two connections
        pass
    postgres.restart()
    upload(store)
    assert received_count(store) == 1


def test_a_server_that_goes_away_within_a_transaction_undoes_it(
    store: Store, postgres: Server
) -> None:
    def interrupted() -> None:
        with store.transaction() as tx:
            tx.insert_uploads([UPLOAD])
            postgres.restart()

    with pytest.raises(StoreUnavailable):
        interrupted()
    assert received_count(store) == 0
    upload(store)


def test_a_server_that_only_reads_says_so(store: Store, postgres: Server) -> None:
    with setting(postgres, "default_transaction_read_only", "on"):
        with pytest.raises(StoreReadOnly, match="read-only"), store.transaction():
            pass
        assert received_count(store) == 0
    upload(store)


def test_a_user_who_may_not_write_is_told_so(postgres: Server, postgres_url: str) -> None:
    with closing(Store.open(postgres_url)) as store:
        store.migrate()
    schema = postgres_url.rpartition("%3D")[2]
    postgres.execute(f"CREATE ROLE {schema}_reader LOGIN PASSWORD 'pass'")
    postgres.execute(f"GRANT USAGE ON SCHEMA {schema} TO {schema}_reader")
    postgres.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO {schema}_reader")
    place = postgres_url.rpartition("@")[2]
    with closing(Store.open(f"postgresql://{schema}_reader:pass@{place}")) as store:
        with store.reading() as tx:
            assert tx.studies() == []
        with pytest.raises(StoreReadOnly), store.transaction() as tx:
            tx.add_study(STUDY)


def test_a_wrong_password_is_not_repeated(postgres: Server) -> None:
    url = f"postgresql://tester:canary7391@127.0.0.1:{postgres.port}/postgres"
    with pytest.raises(StoreUnavailable, match="password") as raised, Store.open(url).reading():
        pass
    assert "canary" not in f"{raised.value} {raised.value.hint}"


def test_a_server_that_does_not_sync_is_refused(postgres: Server, postgres_url: str) -> None:
    with setting(postgres, "fsync", "off"), pytest.raises(StoreError, match="fsync is off"):
        Postgres(postgres_url).connect()
    Postgres(postgres_url).connect().close()


def test_a_commit_is_synced_whatever_the_default(postgres: Server) -> None:
    for default, effective in (("off", "on"), ("remote_apply", "remote_apply")):
        with (
            setting(postgres, "synchronous_commit", default),
            closing(Postgres(postgres.url()).connect()) as connection,
        ):
            assert connection.execute("SHOW synchronous_commit") == [(effective,)]


def test_a_row_that_another_holds_is_waited_for_and_then_given_up(
    store: Store, postgres_url: str
) -> None:
    hasty = Postgres(postgres_url, wait_seconds=0.05)
    with closing(Store(hasty)) as other:
        with store.transaction() as tx:
            tx.set_task_state(TASK.id, "closing", expected=["open"])
            with pytest.raises(StoreUnavailable, match="lock"):
                upload(other)
            tx.set_task_state(TASK.id, "open", expected=["closing"])
        upload(other)


def test_two_that_wait_for_each_other_do_not_wait_for_ever(store: Store) -> None:
    """Each locks a row that the other needs; one of them has to try again."""
    second = TaskRow("a2" * 32, STUDY.id, 1, "{}", "{}", "open", None)
    with store.transaction() as tx:
        tx.add_task(second)
    both_hold_one = threading.Barrier(2)
    outcomes: list[str] = []

    def close(task_ids: list[str]) -> None:
        try:
            with store.transaction() as tx:
                tx.set_task_state(task_ids[0], "closing", expected=["open"])
                both_hold_one.wait(30)
                tx.set_task_state(task_ids[1], "closing", expected=["open"])
            outcomes.append("done")
        except StoreUnavailable:
            outcomes.append("try again")

    orders = [TASK.id, second.id], [second.id, TASK.id]
    threads = [threading.Thread(target=close, args=(order,)) for order in orders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["done", "try again"]


def test_a_worker_whose_lock_is_gone_writes_nothing_more(
    store: Store, postgres: Server, postgres_url: str
) -> None:
    with closing(Store.open(postgres_url)) as other, store.worker_lock() as is_only:
        assert is_only
        upload(store)
        cut_worker(postgres)
        with other.worker_lock() as is_other:
            assert is_other
            for _ in range(2):
                with pytest.raises(StoreUnavailable):
                    upload(store)
            upload(other)
        assert received_count(store) == 2  # reading does no harm
    with store.worker_lock() as is_only:
        assert is_only
        upload(store)
    assert received_count(store) == 3


def test_a_worker_loses_its_lock_within_a_transaction_and_keeps_nothing_of_it(
    store: Store, postgres: Server
) -> None:
    def interrupted() -> None:
        with store.worker_lock(), store.transaction() as tx:
            tx.insert_uploads([UPLOAD])
            cut_worker(postgres)

    with pytest.raises(StoreUnavailable):
        interrupted()
    assert received_count(store) == 0


def test_a_worker_that_lost_its_lock_takes_it_again_and_goes_on(
    store: Store, postgres: Server
) -> None:
    def step() -> bool:
        upload(store)
        return False

    worker = WorkerThread(store, step, pause_seconds=0.01)
    worker.start()
    try:
        wait_for(lambda: received_count(store) > 0, "it to work")
        cut_worker(postgres)
        wait_for(lambda: not worker.healthy, "it to notice")
        wait_for(lambda: worker.healthy, "it to go on")
    finally:
        assert worker.stop(PATIENCE_SECONDS)


def cut_worker(server: Server) -> None:
    """Cut the connection that holds the worker's lock; return when the lock is free."""
    holders = "FROM pg_locks WHERE locktype = 'advisory'"
    assert server.execute(f"SELECT pg_terminate_backend(pid) {holders}")
    wait_for(lambda: not server.execute(f"SELECT 1 {holders}"), "the lock to be free")


def test_a_full_disk_keeps_what_was_acknowledged(
    store: Store, postgres: Server, postgres_url: str
) -> None:
    with tempfile.TemporaryDirectory(prefix="sfumato-") as name:
        disk = Path(name)
        mount = ["mount", "-t", "tmpfs", "-o", "size=4m,mode=0777", "tmpfs", name]
        try:
            process = subprocess.run(mount, capture_output=True, check=False)
        except FileNotFoundError:
            pytest.skip("there is no mount here")
        if process.returncode != 0:
            pytest.skip("a small disk cannot be mounted here: that takes root and its capabilities")
        try:
            postgres.lend(disk / "tables")
            postgres.execute(f"CREATE TABLESPACE small LOCATION '{disk}/tables'")
            with closing(Postgres(postgres_url).connect()) as connection:
                connection.execute("ALTER TABLE upload SET TABLESPACE small")
            acknowledged = fill(store)
            assert 3 < acknowledged == received_count(store)
            with closing(Postgres(postgres_url).connect()) as connection:
                connection.execute("DROP TABLE upload")
            postgres.execute("DROP TABLESPACE small")
        finally:
            subprocess.run(["umount", name], check=True)


def test_the_password_is_not_among_the_arguments_of_another_program(
    postgres: Server,
    store: Store,
    postgres_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = tmp_path / "pg_dump"
    program.write_text(
        '#!/bin/sh\ncd "${0%/*}"\necho "$@" > arguments\necho "$PGPASSWORD" > password\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    backup(postgres_url, tmp_path / "copy")
    password = postgres.url().split(":")[2].partition("@")[0]
    assert (tmp_path / "password").read_text().strip() == password
    arguments = (tmp_path / "arguments").read_text()
    assert f"port={postgres.port}" in arguments
    assert password not in arguments


def test_a_program_that_fails_says_why_in_one_line(
    store: Store, postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "pg_dump"
    program.write_text("#!/bin/sh\necho 'pg_dump: it failed' >&2\necho 'canary7391' >&2\nexit 1")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(StoreError, match="it failed") as raised:
        backup(postgres_url, tmp_path / "copy")
    assert "canary" not in str(raised.value)
    assert not (tmp_path / "copy").exists()
