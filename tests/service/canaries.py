"""Canaries that go through a collector: recognisable data about callers of all kinds.

`drive` runs studies of each trust, from their opening to their release, from an address of its own
and with recognisable headers, values and mistakes, and collects everything that is left.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import secrets
import socket
import string
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from databases import table_names
from service.processes import PATIENCE_SECONDS, Collector, wait_for_end
from sfumato.collector.store.database import database
from sfumato.device import Device, Response, RoundClient, RoundOutcome, SqliteBox, passcodes
from sfumato.device.outbox import DAY_SECONDS
from sfumato.flow.report import to_frames

PEER = "127.77.0.9"  # the whole of 127.0.0.0/8 is this machine
DEVICES = 12
FEW = {"dropout": 0.1, "corrupt": 0.05}  # allows masked rounds of few devices
ITEMS = [f"tree {number}" for number in range(60)]
TABLES = table_names()
WITH_PASSCODE = ("Parks", "Lakes")


def canary(kind: str) -> str:
    return f"canary-{kind}-{secrets.token_hex(8)}"


VALUE, HOME, QUERY, PAYLOAD, TYPO = map(canary, ("value", "home", "query", "payload", "typo"))
WORDS = ["".join(secrets.choice(string.ascii_lowercase) for _ in range(10)) for _ in range(DEVICES)]
BAD_TOKEN = "sfu_" + secrets.token_urlsafe(32)
PASSCODE, BAD_PASSCODE = passcodes.create(), passcodes.create()
HEADER_CANARIES = {  # by header
    "User-Agent": canary("agent"),
    "X-Forwarded-For": "203.0.113.77",
    "Forwarded": "198.51.100.23",
    "X-Real-IP": "2001:db8::7:9",
    "Cookie": canary("cookie"),
    "Referer": canary("referer"),
    "X-Request-ID": canary("request"),
    "Accept-Language": canary("language"),
    "From": canary("from"),
    "If-None-Match": canary("tag"),
}
HEADERS = HEADER_CANARIES | {
    "Forwarded": f"for={HEADER_CANARIES['Forwarded']}",
    "Cookie": f"device={HEADER_CANARIES['Cookie']}",
    "Referer": f"http://example.org/{HEADER_CANARIES['Referer']}",
    "If-None-Match": f'"{HEADER_CANARIES["If-None-Match"]}"',
}
CANARIES = {
    "a value": VALUE,
    "a device's home": HOME,
    "a query": QUERY,
    "a refused payload": PAYLOAD,
    "a refused token": BAD_TOKEN,
    "a refused passcode": BAD_PASSCODE,
    "the peer's address": PEER,
    **{f"the header {name}": text for name, text in HEADER_CANARIES.items()},
    **{f"word {number}": word for number, word in enumerate(WORDS)},
}


def traces(text: str) -> Iterator[bytes]:
    """The forms in which a text could be stored: plain, encoded, or as a hash."""
    plain = text.encode()
    yield plain
    yield text.encode("utf-16-le")
    for form in (plain, *(hashlib.new(name, plain).digest() for name in ("md5", "sha1", "sha256"))):
        if form is not plain:
            yield form
        yield form.hex().encode()
        yield form.hex().upper().encode()
        for shift in range(3):  # its offset in the encoded text
            yield base64.b64encode(bytes(shift) + form)[4 * (shift > 0) : -4]


def find_canaries(places: Mapping[str, bytes], canaries: Mapping[str, str]) -> set[tuple[str, str]]:
    """The canaries in each place, in any form."""
    return {
        (what, where)
        for what, text in canaries.items()
        for where, data in places.items()
        if any(trace in data for trace in traces(text))
    }


@dataclass
class Wire:
    """A client with an address of its own, and headers that identify it.

    It keeps every byte of the answers.
    """

    address: str
    token: str | None = None
    answers: bytearray = field(default_factory=bytearray)
    uploads: list[tuple[str, bytes]] = field(default_factory=list)  # stored ones
    messages: list[bytes] = field(default_factory=list)  # of masked rounds
    tickets: set[str] = field(default_factory=set)

    def __call__(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> Response:
        bearer = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        connection = http.client.HTTPConnection(
            self.address.removeprefix("http://"), timeout=30, source_address=(PEER, 0)
        )
        with closing(connection):
            all_headers = {**HEADERS, **bearer, **(headers or {})}
            query = f"{'&' if '?' in path else '?'}who={QUERY}"
            connection.request(method, path + query, body or None, all_headers)
            answer = connection.getresponse()
            assert connection.sock is None or connection.sock.getsockname()[0] == PEER
            data = answer.read()
        self.answers += f"{answer.status} {answer.headers}".encode() + data
        if method == "POST" and path.endswith("/reports") and answer.status == 201:
            self.uploads.append((path.split("/")[3], body))
        if method == "PUT" and answer.status == 201:
            self.messages.append(body)
        if all_headers.get("Authorization", "").startswith("Ticket "):
            self.tickets.add(all_headers["Authorization"].removeprefix("Ticket "))
        fields = {name.lower(): value for name, value in answer.headers.items()}
        return Response(answer.status, fields, data)

    def raw(self, data: bytes) -> None:
        """Send data that need not be HTTP, and read the answer."""
        host, _, port = self.address.removeprefix("http://").rpartition(":")
        with socket.create_connection((host, int(port)), 30, source_address=(PEER, 0)) as line:
            line.sendall(data)
            line.shutdown(socket.SHUT_WR)
            while part := line.recv(1 << 16):
                self.answers += part

    def json(self, method: str, path: str, body: Any = None) -> Any:
        answer = self(method, path, b"" if body is None else json.dumps(body).encode())
        assert answer.status < 300, answer.body
        return json.loads(answer.body)


def rows(store: str) -> dict[str, bytes]:
    """The contents of each table of a store: every column of every row."""
    content = {}
    with closing(database(store).connect()) as connection:
        connection.begin(writing=False)
        for table in (*TABLES, "migration"):
            rows_of_table = connection.execute(f"SELECT * FROM {table}")  # noqa: S608  # names of our own
            cells = [cell for row in rows_of_table for cell in row]
            content[table] = b"\n".join(
                cell if isinstance(cell, bytes) else str(cell).encode() for cell in cells
            )
        connection.rollback()
    return content


def files(folder: Path, name: str) -> bytes:
    """The bytes of a database on disk: its file and its log, including free pages."""
    return b"".join(path.read_bytes() for path in sorted(folder.glob(f"{name}*")))


@dataclass
class Run:
    """All places where a run may have left traces, and the messages of devices."""

    places: dict[str, bytes] = field(default_factory=dict)
    echoes: bytes = b""  # answers to an administrator's mistakes
    uploads: list[tuple[str, bytes]] = field(default_factory=list)
    messages: list[bytes] = field(default_factory=list)
    tickets: set[str] = field(default_factory=set)
    rows: dict[str, bytes] = field(default_factory=dict)
    studies: dict[str, str] = field(default_factory=dict)


def create(admin: Wire) -> dict[str, str]:
    """Create a study of each kind; return ids by name."""
    defaults = {"devices": DEVICES, "delta": 1e-6}
    studies: dict[str, tuple[dict[str, Any], list[str] | None]] = {
        "Trees": ({"question": "frequencies", "trust": "local", "epsilon": 4.0}, ITEMS),
        "Parks": ({"question": "frequencies", "trust": "central", "epsilon": None}, ITEMS),
        "Words": ({"question": "new_words", "trust": "local", "epsilon": 8.0}, None),
        "Lakes": ({"question": "frequencies", "trust": "secure", "epsilon": None, **FEW}, ITEMS),
    }
    needed = {"passcode_digest": passcodes.digest(PASSCODE).hex()}
    return {
        name: admin.json(
            "POST",
            "/v1/studies",
            {"name": name, "purpose": "To plant.", "study": {**defaults, **keys}, "items": items}
            | (needed if name in WITH_PASSCODE else {}),
        )["id"]
        for name, (keys, items) in studies.items()
    }


def answer(wire: Wire, key: bytes, home: Path) -> bytes:
    """Let devices record canaries and send them; return their files, logs and representations."""
    home.mkdir()
    today = int(time.time() // DAY_SECONDS) * DAY_SECONDS
    lines = []
    for number in range(DEVICES):
        with Device(SqliteBox(home / f"{number}.db"), wire, key) as device:
            for offered in device.offers(today):
                device.consent(offered.offer.study)
            for name in WITH_PASSCODE:
                device.set_passcode(name, PASSCODE)
            assert device.record("Trees", VALUE, today) == "kept"
            assert device.record("Parks", [VALUE, ITEMS[number]], today) == "kept"
            assert device.record("Words", WORDS[number], today) == "kept"
            assert device.send(today + 2 * DAY_SECONDS).delivered == 3
            lines += [repr(device), *map(repr, device.log()), *map(str, device.log())]
    lines += take_part(wire, key, home, today)
    return "\n".join(lines).encode() + files(home, "")


def take_part(wire: Wire, key: bytes, home: Path, today: int) -> list[str]:
    """Run a masked round with the same devices, each with its own item; return their reprs."""
    with ExitStack() as stack:
        boxes = [SqliteBox(home / f"{number}.db") for number in range(DEVICES)]
        devices = [stack.enter_context(Device(box, wire, key)) for box in boxes]
        parts = [device.part("Lakes", ITEMS[place], today) for place, device in enumerate(devices)]
        until = time.monotonic() + PATIENCE_SECONDS
        while any(part.outcome is None for part in parts if isinstance(part, RoundClient)):
            assert time.monotonic() < until, "the masked round does not end"
            for part in parts:
                assert isinstance(part, RoundClient)
                if part.outcome is None:
                    request = part.request(0)
                    part.receive(wire(request.method, request.path, request.body, request.headers))
        assert {part.outcome for part in parts if isinstance(part, RoundClient)} == {
            RoundOutcome.DONE
        }
        return [repr(part) for part in parts]


def misbehave(wire: Wire, task_id: str, strangers: Sequence[str]) -> None:
    """Send uploads and requests that are refused, with content that must not be kept; also to
    tasks for which this caller is a stranger."""
    noise = PAYLOAD.encode()
    header = b"\x01" + bytes.fromhex(task_id)
    path = f"/v1/tasks/{task_id}/reports"
    rejected = to_frames([noise, b"\x09" + noise * 4, b"\x01" + noise * 4, header + noise * 2])
    assert wire("POST", path, rejected).status == 200
    assert wire("POST", path, noise).status == 400
    assert wire("POST", path, (len(noise) - 1).to_bytes(4, "little") + noise).status == 400
    assert wire("POST", f"/v1/tasks/{PAYLOAD}/reports", noise).status == 404
    assert wire("POST", f"/v1/tasks/{'0' * 64}/reports", noise).status == 404
    assert wire("GET", f"/v1/dictionaries/{PAYLOAD}").status == 404
    assert wire("GET", f"/{PAYLOAD}/%0a%00{PAYLOAD}").status == 404
    assert wire("PATCH", path, noise).status == 405
    for other in strangers:
        bad = {passcodes.HEADER: BAD_PASSCODE}
        assert wire("POST", f"/v1/tasks/{other}/reports", noise, bad).status == 403
    assert wire("POST", path, noise * 200_000).status == 413
    for line in (noise, b"GET " + noise + b"\r\n\r\n", b"GET / HTTP/1.1\r\n" + noise + b"\r\n\r\n"):
        wire.raw(line + b"\r\n\r\n")
    wire.raw(b"POST " + path.encode() + b" HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
             b"\r\nZZ\r\n" + noise)  # fmt: skip


def err(admin: Wire, study_id: str) -> None:
    """Make an administrator's mistakes; only the answers to them may repeat them."""
    good = {"question": "frequencies", "trust": "local", "epsilon": 4.0, "devices": 5}
    for study in ({TYPO: 1}, {**good, "trust": TYPO}, {**good, "epsilon": TYPO}, {**good, TYPO: 1}):
        for path in ("/v1/plan", "/v1/studies"):
            request: dict[str, Any] = {"study": study, "items": [TYPO]}
            if path == "/v1/studies":
                request |= {"name": TYPO, "purpose": TYPO}
            assert admin("POST", path, json.dumps(request).encode()).status in (400, 422)
    assert admin("POST", "/v1/plan", f'{{"{TYPO}'.encode()).status == 400
    assert admin("POST", "/v1/studies", json.dumps({TYPO: TYPO}).encode()).status == 400
    name_taken = {"name": "Trees", "purpose": TYPO, "study": good, "items": [TYPO]}
    assert admin("POST", "/v1/studies", json.dumps(name_taken).encode()).status == 409
    assert admin("GET", f"/v1/studies/{TYPO}").status == 404
    assert admin("POST", f"/v1/studies/{study_id}/close", TYPO.encode()).status == 200
    bad = Wire(admin.address, BAD_TOKEN)
    assert bad("GET", "/v1/me").status == 401
    assert bad("POST", "/v1/studies", json.dumps(name_taken).encode()).status == 401
    admin.answers += bad.answers


def look(admin: Wire, studies: Mapping[str, str]) -> bytes:
    """Ask everything that an administrator can; return the releases."""
    released = b""
    for path in ("/v1/me", "/v1/studies", "/v1/ledger", "/health", "/ready", "/openapi.json"):
        admin.json("GET", path)
    for study_id in studies.values():
        admin.json("GET", f"/v1/studies/{study_id}")
        released += admin("GET", f"/v1/studies/{study_id}/release").body
    return released


def drive(served: Collector, folder: Path) -> Run:
    """Run everything: studies, devices, mistakes, releases."""
    admin, wire, erring = (
        Wire(served.address, token) for token in (served.token(), None, served.token())
    )
    run = Run(studies=create(admin))
    offered = json.loads(wire("GET", "/v1/offers").body)["offers"]
    offers = [json.loads(envelope["offer"]) for envelope in offered]
    tasks = {
        name: admin.json("GET", f"/v1/studies/{study_id}")["tasks"][0]["id"]
        for name, study_id in run.studies.items()
    }
    misbehave(wire, tasks["Trees"], [tasks[name] for name in WITH_PASSCODE])
    run.places["devices' files"] = answer(wire, served.public_key, folder / HOME)
    states = {
        name: wait_for_end(served.admin(), study_id)["state"]
        for name, study_id in run.studies.items()
    }
    assert states.pop("Words") in ("released", "failed")  # fails if a length was not drawn
    assert set(states.values()) == {"released"}
    for offer in offers:
        if offer["dictionary"]:
            wire("GET", f"/v1/dictionaries/{offer['dictionary']}")
    task_id, body = wire.uploads[0]
    assert wire("POST", f"/v1/tasks/{task_id}/reports", body).status == 410
    err(erring, run.studies["Trees"])
    run.places["releases"] = look(admin, run.studies)
    run.places["metrics"] = admin("GET", "/metrics").body
    run.places["administrators' answers"] = bytes(admin.answers)
    run.places["devices' answers"] = bytes(wire.answers)
    run.echoes, run.uploads = bytes(erring.answers), wire.uploads
    run.messages, run.tickets = wire.messages, wire.tickets
    return run
