"""Devices, honest ones and a flood, in a process of its own: `python flooding.py '{…}'`.

Prints JSON: how many reports were acknowledged, the statuses of all answers, and the seconds that
each acknowledged upload took.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import sfumato.flow.task  # noqa: F401  # its kinds of tasks
from sfumato.flow.contribute import local_report
from sfumato.flow.report import to_frames
from sfumato.privacy import SystemRng
from sfumato.spec import from_json

PATIENCE_SECONDS = 60.0  # for an answer
MOST_TRIES = 200
MOST_PAUSE_SECONDS = 1.0  # before a device tries again


@dataclass(frozen=True, slots=True)
class Orders:
    """What to send: `count` reports to a task, `per_second`, each over a connection of its own if
    `connections` is 0, and otherwise over that many. Honest devices try again."""

    host: str
    port: int
    task: str  # JSON
    count: int
    per_second: float
    items: list[str]
    connections: int = 0
    is_honest: bool = True


@dataclass(slots=True)
class Tally:
    acknowledged: int = 0
    seconds: list[float] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)

    def to_dict(self) -> dict[str, Any]:
        return {
            "acknowledged": self.acknowledged,
            "seconds": self.seconds,
            "statuses": self.statuses,
        }


class Uploader:
    """Sends bodies over a connection, and reads the statuses of their answers."""

    def __init__(self, orders: Orders, path: str) -> None:
        self._orders, self._path = orders, path
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, body: bytes) -> str:
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                return await self._send(body)
        except (OSError, EOFError) as problem:  # such as TimeoutError
            self.close()
            return type(problem).__name__

    async def _send(self, body: bytes) -> str:
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._orders.host, self._orders.port)
        reader, writer = self._streams
        head = f"POST {self._path} HTTP/1.1\r\nHost: collector\r\nContent-Length: {len(body)}\r\n"
        writer.write(head.encode() + b"\r\n" + body)
        answer = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        length = answer.partition("content-length: ")[2].partition("\r\n")[0]
        await reader.readexactly(int(length or 0))
        if "connection: close" in answer:
            self.close()
        return answer[9:12]

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


async def send_all(orders: Orders) -> Tally:
    task = from_json(orders.task)
    rng, tally = SystemRng(), Tally()
    values: Any = range(len(orders.items)) if task.takes_categories() else orders.items
    path = f"/v1/tasks/{task.id}/reports"
    begin = time.monotonic()

    async def send(number: int, uploader: Uploader) -> None:
        await asyncio.sleep(begin + number / orders.per_second - time.monotonic())
        report = local_report(task, [values[number % len(values)]], rng=rng)
        body = to_frames([report.to_bytes()])
        for _ in range(MOST_TRIES if orders.is_honest else 1):
            start = time.monotonic()
            status = await uploader.send(body)
            tally.statuses[status] += 1
            if status == "201":
                tally.acknowledged += 1
                tally.seconds.append(time.monotonic() - start)
                return
            await asyncio.sleep(MOST_PAUSE_SECONDS * orders.is_honest)

    async def be_device(number: int) -> None:
        uploader = Uploader(orders, path)
        try:
            await send(number, uploader)
        finally:
            uploader.close()

    async def be_flood(first: int) -> None:
        uploader = Uploader(orders, path)
        for number in range(first, orders.count, orders.connections):
            await send(number, uploader)
        uploader.close()

    if orders.connections:
        await asyncio.gather(*(be_flood(first) for first in range(orders.connections)))
    else:
        await asyncio.gather(*(be_device(number) for number in range(orders.count)))
    return tally


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        result = asyncio.run(send_all(Orders(**json.loads(sys.argv[1]))))
        sys.stdout.write(json.dumps(result.to_dict()))
