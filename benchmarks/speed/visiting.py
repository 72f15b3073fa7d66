"""Who visits a collector while its pages are measured: devices, a browser, a bare client.

`python -m benchmarks.speed.visiting KIND ARGUMENTS` is one of them in a process of its own, as JSON
says it in ARGUMENTS; it prints JSON.
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
_DAYS = 1_000  # of which a fleet lives as many as it has time for
_TIMES = """() => {
  const page = performance.getEntriesByType("navigation")[0];
  return {answer: page.responseEnd - page.requestStart, load: page.loadEventEnd - page.startTime};
}"""


def devices(address: str, key: str, study: str, items: list[str], count: int) -> None:
    """Devices that send a report a day, one simulated day after another, until they are ended."""
    import numpy as np  # which those who look at pages need not wait for

    from sfumato.simulation.network_fleet import NetworkFleet

    chosen = np.random.default_rng(1).integers(0, len(items), (count, _DAYS))
    held = [[items[number] for number in row] for row in chosen.tolist()]
    with NetworkFleet(address, bytes.fromhex(key), held, seed=1, allow_plain=True) as fleet:
        fleet.ask(study, days=_DAYS)


def client(address: str, token: str, paths: Paths, pages: int, pause: float) -> list[Any]:
    """Asks for pages over one connection, and does nothing with them."""
    place = urlsplit(address).netloc
    with closing(http.client.HTTPConnection(place, timeout=60)) as connection:

        def asked(method: str, path: str, body: str = "", **headers: str) -> tuple[int, Any]:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            answer.read()
            return answer.status, answer.headers

        form = {"Content-Type": "application/x-www-form-urlencoded", "Origin": address}
        _, told = asked("POST", "/dashboard/sign-in", urlencode({"token": token}), **form)
        cookie = SimpleCookie(told["Set-Cookie"]).output(attrs=[], header="", sep=";").strip()

        def visit(path: str) -> dict[str, float]:
            begun = time.perf_counter()
            status, _ = asked("GET", path, Cookie=cookie)
            taken = time.perf_counter() - begun
            _check(status, path)
            return {"answer": taken}

        return list(_tour(visit, paths, pages, pause))


def browser(address: str, token: str, paths: Paths, pages: int, pause: float) -> list[Any]:
    """Somebody who goes from page to page, scripts, styles, charts and all."""
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
            return {name: taken / 1e3 for name, taken in page.evaluate(_TIMES).items()}

        return list(_tour(visit, paths, pages, pause))


def _tour(
    visit: Callable[[str], dict[str, float]], paths: Paths, pages: int, pause: float
) -> Iterator[dict[str, Any]]:
    """From page to page, `pause` seconds from one to the next, or when that has come."""
    begun = time.monotonic()
    for number in range(pages):
        time.sleep(max(0.0, begun + number * pause - time.monotonic()))
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
