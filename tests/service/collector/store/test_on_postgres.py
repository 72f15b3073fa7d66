"""The service on PostgreSQL: the same answers, also after an outage."""

from __future__ import annotations

from pathlib import Path

from databases import Server
from serving import TASK, ask, body, opened, settings, stored, wait_for
from sfumato.collector.serve import running

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
