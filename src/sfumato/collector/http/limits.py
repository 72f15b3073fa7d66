"""What one caller may take: bytes of a body, the time to send it, reports a second of a task."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from starlette.requests import Request

from sfumato.collector.problems import Problem


class Bodies:
    """Reads bodies of requests, each within its limits and all together within `most_bytes`."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._held = 0  # bytes of bodies that are being read

    async def read(self, request: Request, *, most_bytes: int, seconds: float) -> bytes:
        """The whole body; one that is too large is refused as soon as that shows."""
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > most_bytes:
            raise _too_large(most_bytes)
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(seconds):
                async for part in request.stream():
                    parts.append(part)
                    size += len(part)
                    self._held += len(part)
                    if size > most_bytes:
                        raise _too_large(most_bytes)
                    if self._held > self._most_bytes:
                        raise Problem("busy", retry_after_seconds=math.ceil(seconds))
        except TimeoutError:
            raise Problem("too-slow") from None
        finally:
            self._held -= size
        return b"".join(parts)


class Bucket:
    """Lets `per_second` through on average, and up to `burst` at once. None lets everything."""

    def __init__(
        self,
        per_second: int | None,
        burst: int,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._per_second = per_second
        self._burst = max(burst, per_second or 0)
        self._now = now
        self._left = float(self._burst)
        self._at = now()

    def take(self, count: int) -> None:
        """Raise `busy` if so many are too many now; then none is taken."""
        if self._per_second is None:
            return
        at = self._now()
        self._left = min(self._left + (at - self._at) * self._per_second, self._burst)
        self._at = at
        if count > self._left:
            seconds = math.ceil((count - self._left) / self._per_second)
            raise Problem("busy", retry_after_seconds=max(seconds, 1))
        self._left -= count


def _too_large(most_bytes: int) -> Problem:
    return Problem("too-large", hint=f"a body here has {most_bytes} bytes at most")
