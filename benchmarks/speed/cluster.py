"""Two collectors on PostgreSQL behind a proxy, the worker of which is killed under load.

The work is done by `tests/service/cluster.py`, which counts exactly: every device has a cell of its
own. Devices upload over TLS, from one address and within the limits of `examples/proxies`; so this
shows that nothing is lost or doubled, and how large the database gets; the most reports per
second are measured by `ingest`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from benchmarks.lines import ROOT, Line, Settings, line, markdown
from benchmarks.speed.ingest import _find_tests

NAME = "cluster"
DEVICES, REPORTS_PER_UPLOAD = 1_000_000, 1_000


def run(settings: Settings) -> Iterator[Line]:
    _find_tests()
    from proxies import PROXIES
    from service.cluster import trial

    devices, per_upload = (2_000, 50) if settings.quick else (DEVICES, REPORTS_PER_UPLOAD)
    for name in [name for name in PROXIES if settings.wants(name)]:
        with _server() as store, tempfile.TemporaryDirectory() as folder:
            before = os.getloadavg()[0]
            outcome = trial(
                Path(folder),
                store,
                proxy_name=name,
                devices=devices,
                reports_per_upload=per_upload,
            )
            yield line(
                NAME,
                name,
                settings,
                sizes={"devices": devices, "reports_per_upload": per_upload, "collectors": 2},
                seeds=[],
                repetitions=1,
                packages=("uvicorn", "h11", "psycopg"),
                sound=outcome.is_sound,
                load_average={"before": before, "after": os.getloadavg()[0]},
                **asdict(outcome),
            )
        if settings.quick:
            return


def table(lines: list[Line]) -> str:
    header = (
        *("proxy", "devices", "lost", "doubled", "repeated", "release, fold, export equal"),
        *("replaced after", "uploads", "reports/s", "bytes per report"),
    )
    rows = [
        (
            each["case"],
            f"{each['devices']:,}",
            f"{each['lost']:,}",
            f"{each['doubled']:,}",
            f"{each['repeated']:,}",
            "yes" if each["is_fold_equal"] and each["is_release_equal"] else "NO",
            f"{each['replaced_seconds']:.1f} s",
            f"{each['upload_seconds']:.0f} s",
            f"{each['devices'] / each['upload_seconds']:,.0f}",
            f"{sum(each['table_bytes'].values()) / each['devices']:.0f}",
        )
        for each in lines
    ]
    return markdown(header, rows)


def missed(lines: list[Line]) -> list[str]:
    """The requirements that these lines miss."""
    return [
        f"cluster/{each['case']}: a report was lost or doubled"
        for each in lines
        if not each["sound"]
    ]


@contextmanager
def _server() -> Iterator[str]:
    """The URL of an empty database on a server of our own."""
    from databases import Server

    program = subprocess.run([ROOT / "scripts/postgres"], capture_output=True, text=True)
    if program.returncode != 0:
        sys.exit(f"scripts/postgres found no server: {program.stderr}")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        server = Server(Path(program.stdout.strip()), Path(folder))
        server.start()
        try:
            yield server.empty_database()
        finally:
            server.stop()
