"""The short way takes what is usual, and leaves the rest to the route, untouched."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp

from serving import KEY, TASK, ask, body, opened, reports, served, settings, stored
from sfumato.collector.http.service import Service
from sfumato.collector.quick_uploads import QuickUploads
from sfumato.collector.settings import Settings
from sfumato.collector.store.store import Store
from sfumato.flow.report import to_frames

PATH = f"/v1/tasks/{TASK.id}/reports"
UNKNOWN = replace(TASK, cohort="of nobody")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store.open(tmp_path / "collector.db")
    store.migrate()
    opened(store)
    yield store
    store.close()


def taken(
    store: Store, limits: Settings, *uploads: tuple[str, bytes]
) -> list[bytes | ASGIApp | None]:
    """What is answered to each upload; None for one that is not taken."""

    async def run() -> list[bytes | ASGIApp | None]:
        service = Service(store, limits, key=KEY)
        service.start()
        await service.tasks.snapshot()
        quick = QuickUploads(service)
        answers: list[bytes | ASGIApp | None] = []
        for path, data in uploads:
            answer: asyncio.Future[bytes | ASGIApp] = asyncio.get_running_loop().create_future()
            if quick.take({"path": path}, data, answer.set_result):
                async with asyncio.timeout(20):
                    answers.append(await answer)
            else:
                answers.append(None)
        await service.drain()
        return answers

    return asyncio.run(run())


def test_an_upload_of_good_reports_is_taken_and_stored(store: Store, tmp_path: Path) -> None:
    answers = taken(store, settings(tmp_path), (PATH, body(1)), (PATH, body(100)))
    assert all(isinstance(answer, bytes) and answer.endswith(b"{}") for answer in answers)
    assert stored(store) == 101


@pytest.mark.parametrize(
    ("path", "data"),
    [
        (PATH, b""),
        (PATH, b"\5\0\0\0abc"),
        (PATH, to_frames([*reports(2), b"nonsense"])),
        (PATH, body(1, UNKNOWN)),
        (PATH, body(21)),
        (f"/v1/tasks/{UNKNOWN.id}/reports", body(1, UNKNOWN)),
    ],
    ids=["empty", "no frames", "one bad", "of another task", "too many", "unknown task"],
)
def test_what_is_not_usual_is_left_alone(
    store: Store, tmp_path: Path, path: str, data: bytes
) -> None:
    assert taken(store, settings(tmp_path, upload_reports=20), (path, data)) == [None]
    assert stored(store) == 0


def test_beyond_the_rate_of_a_task_the_route_says_so(store: Store, tmp_path: Path) -> None:
    limits = settings(tmp_path, reports_per_second=1, upload_reports=5)
    first, second = taken(store, limits, (PATH, body(5)), (PATH, body(5)))
    assert (first is not None, second) == (True, None)
    assert stored(store) == 5


def test_a_task_that_was_closed_meanwhile_is_answered_as_closed(
    store: Store, tmp_path: Path
) -> None:
    class Closing(QuickUploads):
        def take(self, *arguments: Any) -> bool:
            with store.transaction() as tx:
                tx.set_task_state(TASK.id, "closing", expected=["open"])
            return super().take(*arguments)

    service = Service(store, settings(tmp_path), key=KEY)
    with served(service, Closing(service)) as address:
        assert ask(address, "GET", "/v1/offers").status == 200
        answer = ask(address, "POST", PATH, body(1))
    assert (answer.status, answer.code) == (410, "task-closed")
    assert stored(store) == 0


@pytest.mark.parametrize(
    ("change", "is_taken"),
    [
        ({}, True),
        ({"method": "PUT"}, False),
        ({"path": "/v1/offers"}, False),
        ({"path": PATH.upper()}, False),
        ({"headers": []}, False),
        ({"headers": [(b"transfer-encoding", b"chunked")]}, False),
        ({"headers": [(b"content-length", b"65537")]}, False),
        ({"headers": [(b"content-length", b"-1")]}, False),
        ({"headers": [(b"content-length", b"9"), (b"content-length", b"9")]}, False),
    ],
)
def test_only_uploads_that_say_how_short_they_are_may_be_taken(
    store: Store, tmp_path: Path, change: dict[str, Any], is_taken: bool
) -> None:
    quick = QuickUploads(Service(store, settings(tmp_path), key=KEY))
    scope = {"method": "POST", "path": PATH, "headers": [(b"content-length", b"65536")], **change}
    assert quick.may_take(scope) == is_taken


def test_most_uploads_go_the_short_way(store: Store, tmp_path: Path) -> None:
    class Counted(QuickUploads):
        count = 0

        def take(
            self, scope: Mapping[str, Any], body: bytes | bytearray, answer: Callable[..., None]
        ) -> bool:
            taken = super().take(scope, body, answer)
            self.count += taken
            return taken

    service = Service(store, settings(tmp_path), key=KEY)
    quick = Counted(service)
    with served(service, quick) as address:
        for _ in range(20):
            assert ask(address, "POST", PATH, body(1)).status == 201
    assert quick.count >= 15  # all but those that find what is known too old
    assert stored(store) == 20
