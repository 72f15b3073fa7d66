"""How quickly the dashboard answers while devices report.

The collector is `sfumato serve` on SQLite in its own process. In another, 2,000 devices of
`NetworkFleet` report as fast as they can; in others, two browsers go through the pages, one page
per second, and a bare client does the same over one connection. Times are from a request to the
last byte of its answer; for a browser also to the page's own load event, with cached scripts.
Everything shares the machine's cores, including the browsers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lines import ROOT, Line, Settings, line, markdown

NAME = "pages"
MOST_SECONDS = 0.3  # the requirement, for 95 answers in 100
ITEMS = 600  # of the longest release: more than a page has rows
_SETTINGS: dict[str, Any] = {"worker_seconds": 1, "seal_seconds": 60, "log_level": "warning"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    devices: int
    visits: int  # per visitor
    pause: float  # in seconds, from one page to the next
    browsers: int
    studies: int  # number of studies that are already released

    @property
    def name(self) -> str:
        return f"{self.devices} devices"


def run(settings: Settings) -> Iterator[Line]:
    case = (
        _Case(devices=20, visits=4, pause=0.1, browsers=1, studies=1)
        if settings.quick
        else _Case(devices=2_000, visits=60, pause=1.0, browsers=2, studies=12)
    )
    if not settings.wants(case.name):
        return
    _find_tests()
    runs = [_measure(case) for _ in range(settings.repeats or 1)]
    yield line(
        NAME,
        case.name,
        settings,
        sizes={
            "devices": case.devices,
            "visits": case.visits,
            "pause_seconds": case.pause,
            "studies": case.studies + 2,
            "browsers": len(runs[-1]["browsers"]),
        },
        seeds=[1],
        repetitions=len(runs),
        packages=["uvicorn", "starlette", "jinja2", "playwright"],
        client=summary([each for one in runs for each in one["client"]]),
        browser=summary([each for one in runs for some in one["browsers"] for each in some]),
        reports_per_second=[one["reports_per_second"] for one in runs],
        load_average=[one["load_average"] for one in runs],
    )


def table(lines: Sequence[Line]) -> str:
    """Milliseconds by page: median, 95th percentile and maximum."""
    rows = [
        (who, page, *(f"{1e3 * times[share]:.0f}" for share in ("p50", "p95", "most")))
        for each in lines
        for who, pages in _measurements(each)
        for page, times in pages.items()
    ]
    notes = [
        f"{each['case']}: {each['reports_per_second'][-1]:,.0f} reports/s meanwhile; load average "
        f"{each['load_average'][-1]['before']:.1f} to {each['load_average'][-1]['after']:.1f}"
        for each in lines
    ]
    return "\n".join([markdown(("ms", "page", "p50", "p95", "most"), rows), *notes])


def missed(lines: Sequence[Line]) -> list[str]:
    """The requirements that these lines miss."""
    return [
        f"{NAME}/{each['case']}: {who}: {1e3 * pages['every page']['p95']:.0f} ms, not "
        f"{1e3 * MOST_SECONDS:.0f}"
        for each in lines
        for who, pages in _measurements(each)
        if pages["every page"]["p95"] > MOST_SECONDS
    ]


def _measurements(each: Line) -> list[tuple[str, dict[str, Any]]]:
    """The measurements, by visitor and event."""
    return [
        (f"{who}, {what}", pages)
        for who in ("client", "browser")
        for what, pages in each[who].items()
    ]


def summary(visits: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Seconds to the last byte and to the load event, by page."""
    return {
        what: {
            page: _shares(
                [visit[what] for visit in visits if page in (visit["page"], "every page")]
            )
            for page in (*dict.fromkeys(visit["page"] for visit in visits), "every page")
        }
        for what in ("answer", "load")
        if visits and what in visits[0]
    }


def _shares(seconds: Sequence[float]) -> dict[str, float]:
    p50, p95 = np.quantile(seconds, [0.5, 0.95])
    return {"p50": float(p50), "p95": float(p95), "most": max(seconds), "times": len(seconds)}


def _measure(case: _Case) -> dict[str, Any]:
    from service.processes import collector

    load = os.getloadavg()[0]  # of other processes
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        paths, study = _prepare(folder, case)
        server = stack.enter_context(collector(folder, **_SETTINGS))
        arguments = {
            "address": server.address,
            "key": server.public_key.hex(),
            "study": "Asked trees",
        }
        stack.enter_context(_devices(arguments | {"items": _trees(), "count": case.devices}))
        admin = server.admin()
        while not admin.study(study)["received"]:
            time.sleep(0.1)
        before, start = admin.study(study)["received"], time.monotonic()
        visit: dict[str, Any] = {"address": server.address, "paths": paths}
        visit |= {"pages": case.visits, "pause": case.pause}
        people = [
            _start(kind, visit | {"token": server.token("analyst")})
            for kind in ("client", *["browser"] * (case.browsers if _has_browser() else 0))
        ]
        visits = [_finish(person) for person in people]
        reports = admin.study(study)["received"] - before
        return {
            "client": visits[0],
            "browsers": visits[1:],
            "reports_per_second": reports / (time.monotonic() - start),
            "load_average": {"before": load, "after": os.getloadavg()[0]},
        }


def _prepare(folder: Path, case: _Case) -> tuple[dict[str, str], str]:
    """A store with released studies and one that is collecting; return the paths of the pages."""
    import browsing
    import serving

    settings = {
        "store": f"sqlite:///{folder}/collector.db",
        "signing_key": f"{folder}/collector.key",
    }
    with browsing.open_stage(folder, **settings) as stage:
        released = []
        for number in range(case.studies):
            trust = ("local", "central")[number % 2]
            released.append(
                stage.open(f"Trees {number}", trust=trust, epsilon=2.0, devices=200 + number)
            )
            counts = browsing.falling_counts(200 + number)
            stage.answer(f"Trees {number}", browsing.values_of(counts))
        items = [*_trees(), *(f"shrub {number}" for number in range(ITEMS - len(_trees())))]
        released.append(stage.open("Shrubs", items=items, trust="central", epsilon=2.0, devices=90))
        stage.answer("Shrubs", browsing.values_of(browsing.falling_counts(90)))
        serving.wait_for(
            lambda: {stage.state(study) for study in released} == {"released"}, "the releases"
        )
        asking = stage.open("Asked trees", epsilon=2.0, devices=10**9)
    home = "/dashboard/studies"
    return {
        "studies": home,
        "collecting": f"{home}/{asking}",
        "release": f"{home}/{released[-1]}",
        "ledger": "/dashboard/ledger",
    }, asking


def _start(kind: str, arguments: Mapping[str, Any]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.speed.visiting", kind, json.dumps(arguments)]
    folders = [str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def _finish(process: subprocess.Popen[str]) -> Any:
    output, complaint = process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"a visitor failed: {complaint[-2000:]}")
    return json.loads(output)


@contextmanager
def _devices(arguments: Mapping[str, Any]) -> Iterator[None]:
    process = _start("devices", arguments)
    try:
        yield
        if process.poll() is not None:
            raise RuntimeError(f"the devices ended: {process.communicate()[1][-2000:]}")
    finally:
        process.kill()
        process.communicate()


def _find_tests() -> None:
    """Make the tests importable: they have a collector, its studies and a browser."""
    folder = str(ROOT / "tests")
    if folder not in sys.path:
        sys.path.append(folder)


def _trees() -> list[str]:
    from browsing import TREES

    return list(TREES)


def _has_browser() -> bool:
    """Whether there is a browser; without one, only the client visits."""
    import browsing

    try:
        browsing.program()
    except LookupError as problem:
        print(f"browsers are left out: {problem}", file=sys.stderr)
        return False
    return True
