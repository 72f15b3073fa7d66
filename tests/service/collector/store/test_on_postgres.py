"""The service on PostgreSQL: the same answers, also after an outage."""

from __future__ import annotations

import re
from pathlib import Path

from databases import Server
from serving import TASK, ask, body, opened, settings, stored, wait_for
from sfumato.collector.serve import running
from sfumato.collector.store.database import database

UPLOAD = f"/v1/tasks/{TASK.id}/reports"


def test_an_outage_of_the_server_is_reported_and_nothing_acknowledged_is_lost(
    postgres: Server, postgres_url: str, tmp_path: Path
) -> None:
    options = settings(tmp_path, store=postgres_url)
    with running(options, with_worker=False) as collector:
        opened(collector.store, key=collector.key)
        assert ask(collector.address, "POST", UPLOAD, body(2)).status == 201
        postgres.stop()
        try:
            answer = ask(collector.address, "POST", UPLOAD, body(2))
            assert (answer.status, answer.code) == (503, "store-unavailable")
            assert int(answer.headers["retry-after"]) >= 1
            wait_for(lambda: ask(collector.address, "GET", "/ready").status == 503, "it to notice")
            assert ask(collector.address, "GET", "/health").status == 200
        finally:
            postgres.start()
        assert ask(collector.address, "POST", UPLOAD, body(2)).status == 201
        wait_for(lambda: ask(collector.address, "GET", "/ready").status == 200, "it to be ready")
        assert stored(collector.store) == 4


def test_one_of_two_collectors_is_the_worker_and_says_so(
    postgres: Server, postgres_url: str, tmp_path: Path
) -> None:
    """The worker's connection is cut, as when its machine is gone; one of them takes over."""
    options = settings(tmp_path, store=postgres_url, open_metrics=True)

    def roles() -> list[str]:
        answers = [ask(each.address, "GET", "/ready").json() for each in both]
        return sorted(answer.get("worker", "failing") for answer in answers)

    def worker_metric(address: str) -> float:
        text = ask(address, "GET", "/metrics").body.decode()
        return float(re.findall(r"^sfumato_worker_active (.*)$", text, re.MULTILINE)[0])

    worker_session = "FROM pg_stat_activity WHERE application_name = 'sfumato worker'"
    with (
        running(options) as first,
        running(options) as second,
        running(options, with_worker=False) as third,
    ):
        both = (first, second)
        wait_for(lambda: roles() == ["active", "standby"], "one worker")
        assert ask(third.address, "GET", "/ready").json()["worker"] == "none"
        assert "sfumato_worker_active" not in ask(third.address, "GET", "/metrics").body.decode()
        wait_for(lambda: sum(worker_metric(each.address) for each in both) == 1, "its metric")
        ((pid,),) = postgres.execute(f"SELECT pid {worker_session}")
        postgres.execute(f"SELECT pg_terminate_backend({pid})")
        wait_for(
            lambda: (
                (pid,) not in (pids := postgres.execute(f"SELECT pid {worker_session}"))
                and len(pids) == 1
            ),
            "another session to have the lock",
        )
        wait_for(lambda: roles() == ["active", "standby"], "one worker again")


def test_a_worker_that_is_gone_without_a_word_loses_its_lock(postgres_url: str) -> None:
    """Its machine is down, so that nobody closes its connection: the server asks for it."""
    with database(postgres_url).worker_lock() as connection:
        assert connection is not None
        names = ("idle", "interval", "count")
        idle, interval, count = (
            int(connection.execute(f"SHOW tcp_keepalives_{name}")[0][0]) for name in names
        )
        assert 0 < idle + interval * count <= 11
        assert connection.execute("SHOW tcp_user_timeout") == [("11000",)]
        assert connection.execute("SHOW client_connection_check_interval") == [("1s",)]


def test_two_collectors_share_a_store(postgres_url: str, tmp_path: Path) -> None:
    options = settings(tmp_path, store=postgres_url)
    with (
        running(options, with_worker=False) as first,
        running(options, with_worker=False) as second,
    ):
        assert first.public_key == second.public_key
        opened(first.store, key=first.key)
        assert ask(first.address, "POST", UPLOAD, body(2)).status == 201
        assert ask(second.address, "POST", UPLOAD, body(3)).status == 201
        with first.store.transaction() as tx:
            tx.set_task_state(TASK.id, "closing", expected=["open"])
        assert ask(second.address, "POST", UPLOAD, body(1)).code == "task-closed"
        assert stored(second.store) == 5
