"""A stranger who takes all the room there is: people and other studies still have theirs."""

from __future__ import annotations

import hashlib
import json
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from serving import KEY, TASK, ask, body, opened, served, settings
from sfumato.collector import tokens
from sfumato.collector.http.service import Service
from sfumato.collector.store.store import Store
from sfumato.flow.task import LocalTask
from sfumato.privacy import HashedResponse

MEBIBYTE = 1 << 20
HOLDERS = 40  # connections that keep bodies incomplete
OTHER = LocalTask(
    randomizer=HashedResponse(epsilon=4.0, rows=64, width=56, seed=2), cohort="everybody"
)
PLAN = json.dumps(
    {
        "study": {"question": "frequencies", "trust": "local", "epsilon": 4.0, "devices": 20},
        "items": ["oak", "elm"],
    }
)
DICTIONARY = b'"tree"\n' * MEBIBYTE
DIGEST = hashlib.sha256(DICTIONARY).hexdigest()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(Store.open(f"sqlite:///{tmp_path}/collector.db")) as store:
        store.migrate()
        opened(store)
        opened(store, task=OTHER, name="Birds")
        yield store


def hold_body(address: str, path: str, size: int) -> socket.socket:
    """A connection that has sent all of a body but its last byte."""
    host, port = address.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=20)
    head = f"POST {path} HTTP/1.1\r\nHost: collector\r\nContent-Length: {size}\r\n\r\n"
    connection.sendall(head.encode())
    with suppress(OSError):  # refused
        connection.sendall(bytes(size - 1))
    return connection


def test_bodies_of_one_study_keep_neither_people_nor_other_studies_out(
    store: Store, tmp_path: Path
) -> None:
    limits = settings(
        tmp_path, queue_bytes=8 * MEBIBYTE, upload_bytes=MEBIBYTE, study_bytes=MEBIBYTE
    )
    service = Service(store, limits, key=KEY)
    _, token = tokens.create(store, role="admin", name="ops", days=1)
    with served(service) as address, ExitStack() as stack:
        for _ in range(HOLDERS):
            connection = hold_body(address, f"/v1/tasks/{TASK.id}/reports", MEBIBYTE)
            stack.enter_context(closing(connection))
        time.sleep(0.5)
        reports = f"/v1/tasks/{TASK.id}/reports"
        assert ask(address, "POST", reports, body(1)).status == 429
        others = f"/v1/tasks/{OTHER.id}/reports"
        assert ask(address, "POST", others, body(1, OTHER)).status == 201
        answer = ask(address, "POST", "/v1/plan", PLAN, token=token)
        assert answer.status == 200, answer.body


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def test_a_dictionary_that_nobody_reads_is_in_memory_once(store: Store, tmp_path: Path) -> None:
    with store.transaction() as tx:
        tx.add_dictionary(DIGEST, DICTIONARY)
    question = f"GET /v1/dictionaries/{DIGEST} HTTP/1.1\r\nHost: collector\r\n\r\n".encode()
    with (
        served(Service(store, settings(tmp_path), key=KEY)) as address,
        ExitStack() as stack,
    ):
        host, port = address.removeprefix("http://").split(":")
        before = resident_bytes()
        for _ in range(HOLDERS):
            connection = socket.create_connection((host, int(port)), timeout=20)
            stack.enter_context(closing(connection)).sendall(question)
        time.sleep(1)
        assert resident_bytes() - before < 6 * len(DICTIONARY)
        answer = ask(address, "GET", f"/v1/dictionaries/{DIGEST}")
        assert answer.body == DICTIONARY
