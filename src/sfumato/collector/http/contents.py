"""Long contents for devices: in memory once, however many read them, and however slowly."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sfumato.collector.problems import Problem

CHUNK_BYTES = 64 << 10  # given to the server at a time, once the client has read the one before
_RETRY_SECONDS = 10


class ChunkedResponse(Response):
    """A response whose body is not copied as a whole, as the server would do it."""

    done: Callable[[], None] | None = None  # called at the end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = self.body
        try:
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            for start in range(0, max(len(body), 1), CHUNK_BYTES):
                end = start + CHUNK_BYTES
                await send(
                    {
                        "type": "http.response.body",
                        "body": bytes(body[start:end]),
                        "more_body": end < len(body),
                    }
                )
        finally:
            if self.done is not None:
                self.done()


class _Content:
    """Bytes that are being read from the store or were read, and how many use them."""

    def __init__(self, body: asyncio.Future[bytes | None]) -> None:
        self.body = body
        self.users = 0

    @property
    def size(self) -> int:
        if not self.body.done() or self.body.cancelled() or self.body.exception():
            return 0
        return len(self.body.result() or b"")


class Contents:
    """Contents that are being sent, by name, with at most about `most_bytes` in memory. Each is
    dropped when nobody reads it any more, so what was deleted from the store is gone."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._contents: dict[str, _Content] = {}
        self._turn = asyncio.Lock()  # one is read at a time: its size is not known before

    async def take(self, name: str, read: Callable[[], Awaitable[Any]]) -> bytes | None:
        """The content of this name, which `read` returns, or None if there is none. `busy` if there
        is no room. The caller must `give_back` what is not None."""
        content = self._contents.get(name)
        if content is None:
            content = self._contents[name] = _Content(asyncio.ensure_future(self._read(read)))
        content.users += 1
        try:
            body = await asyncio.shield(content.body)
        except BaseException:
            self.give_back(name)
            raise
        if body is None:
            self.give_back(name)
        return body

    async def _read(self, read: Callable[[], Awaitable[Any]]) -> Any:
        async with self._turn:
            if sum(each.size for each in self._contents.values()) >= self._most_bytes:
                raise Problem("busy", retry_after_seconds=_RETRY_SECONDS)
            return await read()

    def give_back(self, name: str) -> None:
        content = self._contents[name]
        content.users -= 1
        if not content.users:
            del self._contents[name]
