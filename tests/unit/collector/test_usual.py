"""Requests read at a glance: as the parser reads them, or not at all."""

from __future__ import annotations

from typing import Any

import httptools
import numpy as np
import pytest

from sfumato.collector.usual import HEAD_BYTES, SHORT_BYTES, usual

PUT = (
    b"PUT /v1/rounds/0af3/share/17?wait=3 HTTP/1.1\r\nHost: localhost:80\r\n"
    b"Authorization: Ticket ab cd\r\nContent-Length: 5\r\n\r\nabcde"
)


class Parsed:
    """What uvicorn's parser finds in some bytes: whole requests, in their order."""

    def __init__(self, data: bytes) -> None:
        self.requests: list[tuple[bytes, bytes, list[tuple[bytes, bytes]], bytes]] = []
        self.parser = httptools.HttpRequestParser(self)
        self.parser.feed_data(data)

    def on_message_begin(self) -> None:
        self.url, self.body = b"", b""
        self.headers: list[tuple[bytes, bytes]] = []

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        method = self.parser.get_method()
        assert self.parser.should_keep_alive()
        assert not self.parser.should_upgrade()
        self.requests.append((method, self.url, self.headers, self.body))


def assert_same(data: bytes) -> bool:
    """Whether it is a usual request; if so, the parser sees the same one, and nothing else."""
    found = usual(data)
    if found is None:
        return False
    ((method, url, headers, body),) = Parsed(data).requests
    parts = httptools.parse_url(url)
    scope = found.scope
    assert (scope["method"].encode(), scope["path"].encode()) == (method, parts.path)
    assert (scope["query_string"], scope["headers"]) == (parts.query or b"", headers)
    assert found.body == body
    return True


@pytest.mark.parametrize(
    "data",
    [
        PUT,
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /v1/tickets? HTTP/1.1\r\nHost: a\r\n\r\n",
        b"POST /v1/a HTTP/1.1\r\nContent-Length: 0\r\nX: a:b, c\r\n\r\n",
        b"PUT /v1/a HTTP/1.1\r\nContent-Length: 4\r\n\r\n\r\n\r\n",
        b"PUT /v1/a HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % SHORT_BYTES + bytes(SHORT_BYTES),
    ],
)
def test_what_is_usual_is_read_as_the_parser_reads_it(data: bytes) -> None:
    assert assert_same(data)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"PUT /", b"DELETE /"),
        (b"PUT /", b"put /"),
        (b"PUT /", b"PUT  /"),
        (b"/share", b"/%2e"),
        (b"/share", b"/Share"),
        (b"/share", b"/../share"),
        (b" /v1", b" http://localhost/v1"),
        (b"wait=3", b"wait=3#"),
        (b"HTTP/1.1", b"HTTP/1.0"),
        (b"HTTP/1.1", b"HTTP/2.0"),
        (b"Host:", b"Host :"),
        (b"Host: ", b"Host:"),
        (b"Host: ", b"Host: \x00"),
        (b"Host: ", b"Host: \xff"),
        (b"Host: localhost", b" Host: localhost"),
        (b"Authorization", b"Connection: close\r\nAuthorization"),
        (b"Authorization", b"Connection: keep-alive\r\nAuthorization"),
        (b"Authorization", b"Transfer-Encoding: chunked\r\nAuthorization"),
        (b"Authorization", b"Expect: 100-continue\r\nAuthorization"),
        (b"Authorization", b"UPGRADE: h2c\r\nAuthorization"),
        (b"Authorization", b"Content-Length: 5\r\nAuthorization"),
        (b"Authorization", b"Content-Length: 0\r\nAuthorization"),
        (b"Authorization", b"Folded: a\r\n b\r\nAuthorization"),
        (b"Authorization", b"Long: " + b"a" * HEAD_BYTES + b"\r\nAuthorization"),
        (b": 5", b": 4"),
        (b": 5", b": 6"),
        (b": 5", b": +5"),
        (b": 5", b": 5, 5"),
        (b": 5", b": 0x5"),
        (b": 5", b": \xb25"),
        (b"\r\n\r\n", b"\n\n"),
        (b"\r\n\r\n", b"\r\n\r\n\r\n"),
        (b"abcde", b""),
        (b"abcde", b"abcdeGET / HTTP/1.1\r\nHost: a\r\n\r\n"),
    ],
)
def test_what_is_not_is_left_to_the_parser(old: bytes, new: bytes) -> None:
    assert old in PUT
    assert usual(PUT.replace(old, new, 1)) is None


def test_a_body_that_is_long_or_a_head_without_headers_is_left_to_the_parser() -> None:
    long = SHORT_BYTES + 1
    assert usual(b"PUT / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % long + bytes(long)) is None
    assert usual(b"GET / HTTP/1.1\r\n\r\n") is None
    assert usual(b"") is None
    assert usual(bytes(70_000)) is None


def test_whatever_is_changed_is_read_the_same_or_not_at_all() -> None:
    """Bytes of a usual request are changed, dropped, doubled and moved, 20,000 times; some changes
    leave it usual, or the test would show nothing."""
    chance = np.random.default_rng(1)
    marks = [b"\r", b"\n", b"\r\n", b" ", b":", b"0", b"5", b"\x00", b"%", b"?", b"-", b"T", b"\t"]
    kept = 0
    for _ in range(20_000):
        data: Any = bytearray(PUT)
        for _ in range(int(chance.integers(1, 4))):
            at, how = int(chance.integers(len(data))), int(chance.integers(4))
            mark = marks[int(chance.integers(len(marks)))]
            if how == 0:
                data[at : at + 1] = mark
            elif how == 1:
                del data[at]
            elif how == 2:
                data[at:at] = mark
            else:
                data[at:at] = data[at : at + int(chance.integers(30))]
        kept += assert_same(bytes(data))
    assert 200 < kept < 15_000
