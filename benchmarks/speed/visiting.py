"""Visitors of a collector while its pages are measured: devices, a browser, a bare client.

`python -m benchmarks.speed.visiting KIND ARGUMENTS` is one of them in its own process, with JSON in
ARGUMENTS; it prints JSON.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from http.cookies import SimpleCookie
from typing import Any
from urllib.parse import urlencode, urlsplit

Paths = Mapping[str, str]  # of pages, by their names
_DAYS = 1_000  # more simulated days than a fleet has time for
_TIMES = """() => {
  const page = performance.getEntriesByType("navigation")[0];
  return {answer: page.responseEnd - page.requestStart, load: page.loadEventEnd - page.startTime};
}"""


def devices(address: str, key: str, study: str, items: list[str], count: int) -> None:
    """Devices that send one report per simulated day, until the process is ended."""
    import numpy as np  # not needed by other visitors

    from sfumato.simulation.network_fleet import NetworkFleet

    numbers = np.random.default_rng(1).integers(0, len(items), (count, _DAYS))
    holdings = [[items[number] for number in row] for row in numbers.tolist()]
    with NetworkFleet(address, bytes.fromhex(key), holdings, seed=1, allow_plain=True) as fleet:
        fleet.ask(study, days=_DAYS)


def client(address: str, token: str, paths: Paths, pages: int, pause: float) -> list[Any]:
    """Fetch pages over one connection, and do nothing with them."""
    place = urlsplit(address).netloc
    with closing(http.client.HTTPConnection(place, timeout=60)) as connection:

        def send(method: str, path: str, body: str = "", **headers: str) -> tuple[int, Any]:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            answer.read()
            return answer.status, answer.headers

        form = {"Content-Type": "application/x-www-form-urlencoded", "Origin": address}
        _, response = send("POST", "/dashboard/sign-in", urlencode({"token": token}), **form)
        cookie = SimpleCookie(response["Set-Cookie"]).output(attrs=[], header="", sep=";").strip()

        def visit(path: str) -> dict[str, float]:
            start = time.perf_counter()
            status, _ = send("GET", path, Cookie=cookie)
            seconds = time.perf_counter() - start
            _check(status, path)
            return {"answer": seconds}

        return list(_tour(visit, paths, pages, pause))


def browser(address: str, token: str, paths: Paths, pages: int, pause: float) -> list[Any]:
    """Go from page to page with a browser, including scripts, styles and charts."""
    import browsing

    with browsing.browser() as opened:
        page = opened.new_page()
        page.set_default_timeout(60_000)
        page.goto(f"{address}/dashboard/sign-in")
        page.get_by_label("Token").fill(token)
        page.get_by_role("button", name="Sign in").click()
        page.get_by_role("heading", name="Studies", level=1).wait_for()

        def visit(path: str) -> dict[str, float]:
            answer = page.goto(f"{address}{path}", wait_until="load")
            _check(0 if answer is None else answer.status, path)
            page.wait_for_function("() => performance.timing.loadEventEnd > 0")
            return {name: ms / 1e3 for name, ms in page.evaluate(_TIMES).items()}

        return list(_tour(visit, paths, pages, pause))


def _tour(
    visit: Callable[[str], dict[str, float]], paths: Paths, pages: int, pause: float
) -> Iterator[dict[str, Any]]:
    """Visit one page after another, at least `pause` seconds apart."""
    start = time.monotonic()
    for number in range(pages):
        time.sleep(max(0.0, start + number * pause - time.monotonic()))
        name = list(paths)[number % len(paths)]
        yield {"page": name, **visit(paths[name])}


def _check(status: int, path: str) -> None:
    if status != 200:
        raise RuntimeError(f"{path} was answered with {status}")


if __name__ == "__main__":
    kinds: dict[str, Callable[..., Any]] = {
        "devices": devices,
        "client": client,
        "browser": browser,
    }
    print(json.dumps(kinds[sys.argv[1]](**json.loads(sys.argv[2]))))
