"""An HTTP server that does nothing: it reads requests and answers with the number of bytes that
they ask for. No collector over HTTP can be faster.

    python -m benchmarks.speed.bare_http    # prints its port
"""

from __future__ import annotations

import socket
from typing import Any

import uvicorn

_ANSWER = memoryview(bytes(1 << 20))


async def application(scope: Any, receive: Any, send: Any) -> None:
    """`GET /?bytes=n` is answered with n bytes, anything else with none."""
    while (await receive()).get("more_body"):
        pass
    length_text = scope["query_string"].rpartition(b"=")[2]
    body = bytes(_ANSWER[: int(length_text)]) if length_text else b""
    status = 200 if length_text else 201
    length = str(len(body)).encode()
    await send(
        {"type": "http.response.start", "status": status, "headers": [(b"content-length", length)]}
    )
    await send({"type": "http.response.body", "body": body})


def main() -> None:
    listening = socket.create_server(("127.0.0.1", 0), backlog=2048)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    print(listening.getsockname()[1], flush=True)
    config = uvicorn.Config(
        application, http="h11", loop="asyncio", ws="none", lifespan="off",
        log_config=None, access_log=False, timeout_keep_alive=600,
    )  # fmt: skip
    uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    main()
