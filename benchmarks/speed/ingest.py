"""Reports that a collector acknowledges, each on disk by then, against its store without HTTP.

Ours is `sfumato serve` in its own process; another process (`uploading`) sends to it over 32
persistent connections. The floor is the bare store: uploads of the same length go to the same group
commit (`collector.http.commit_queue`), over a store of the same kind, from 32 tasks, each of which
waits until its upload is committed; `python -m benchmarks.speed.ingest STORE FILE SECONDS` is that
process. The worker is idle in both. `--only memory` keeps a collector with an active worker under
load for ten minutes, and measures its memory. `postgresql/seal` is the worker's part, in processor
time of the worker and of the server: ids are compared and stored, records shuffled.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks import race
from benchmarks.lines import ROOT, Line, Settings, line
from benchmarks.speed import uploading
from sfumato.collector import studies
from sfumato.collector.http.commit_queue import CommitQueue
from sfumato.collector.store.store import Store
from sfumato.collector.worker.worker import MOST_REPORTS, Worker
from sfumato.flow.report import to_frames
from sfumato.flow.task import LocalTask
from sfumato.privacy import SystemRng
from sfumato.spec import from_json

NAME = "ingest"
REPETITIONS = 5
CONNECTIONS = 32
SECONDS = 5.0  # of each contender in a repetition
MINUTES = (1, 5, 10)  # when memory is measured
MOST_GROWTH = 1.1  # the requirement: the last memory size over the first
KEY = bytes(range(32))  # signs the offer, which nobody uses
STUDY = {
    "name": "Street trees",
    "purpose": "Which to plant next.",
    "items": [f"tree {number}" for number in range(20)],
    "study": {"question": "frequencies", "trust": "local", "epsilon": 4.0, "devices": 10**9},
}
SEALINGS = 5
_RESTING = {"worker_seconds": 3_600, "seal_seconds": 3_600}
_BODIES = 64  # uploads that the bare store gets in turn


def run(settings: Settings) -> Iterator[Line]:
    _find_tests()
    timed = Settings(
        quick=settings.quick, repeats=settings.repeats or (1 if settings.quick else REPETITIONS)
    )
    for kind in ("sqlite", "postgresql")[: 1 if settings.quick else None]:
        cases = {f"{kind}/{reports} an upload": reports for reports in (1, 100)}
        selection = [case for case in cases if settings.wants(case)][
            : 1 if settings.quick else None
        ]
        for case in selection:
            # Separate stores: a worker is not idle if another case left something to be sealed.
            with _stores(kind) as stores:
                if stores:
                    yield _race(timed, case, stores, cases[case])
    if not settings.quick and settings.wants("postgresql/seal"):
        with _stores("postgresql") as stores:
            if stores:
                yield _sealing(settings, stores[0])
    if settings.only == "memory":
        yield _memory(settings)


def table(lines: list[Line]) -> str:
    """The race in reports per second, or the memory."""
    raced = [each for each in lines if "bare" in each]
    texts = [
        f"{each['case']}: {each['reports_per_second']:,.0f} reports/s acknowledged (bare store "
        f"{each['bare']['reports_per_second']:,.0f}); answered within "
        f"{1e3 * each['p50_seconds']:.1f} ms (p50), {1e3 * each['p99_seconds']:.1f} ms (p99); "
        f"{each['cpu_seconds_a_report'] / each['bare']['cpu_seconds_a_report']:.2f} times its CPU; "
        f"load {each['load_average']['before']:.1f} to {each['load_average']['after']:.1f}"
        for each in raced
    ]
    texts += [
        f"{each['case']}: {each['reports_per_second']:,.0f} reports/s, one per upload; "
        f"{1e6 * each['cpu_seconds_a_report']:.1f} µs of worker and server per report; "
        f"load {each['load_average']:.1f}"
        for each in lines
        if each["case"].endswith("/seal")
    ]
    for each in lines:
        if "bytes" in each:
            sizes = [f"{size / 1e6:,.0f} MB after {when}" for when, size in each["bytes"].items()]
            texts.append(f"memory: {', '.join(sizes)}; {each['reports_per_second']:,.0f} reports/s")
    return "\n".join([race.table(raced), *texts] if raced else texts)


def missed(lines: list[Line]) -> list[str]:
    """The requirements that these lines miss."""
    complaints = []
    for each in lines:
        sizes = list(each.get("bytes", {"": 0}).values())
        if sizes[-1] > MOST_GROWTH * sizes[0]:
            complaints.append(f"ingest/memory: from {sizes[0]:,} to {sizes[-1]:,} bytes")
    return complaints


def _race(settings: Settings, case: str, stores: Sequence[str], reports: int) -> Line:
    seconds = 0.3 if settings.quick else SECONDS
    bare: list[Any] = []
    load = os.getloadavg()[0]  # of other processes; ours has three, the bare store one
    with _collector(stores[0], **_RESTING) as (collector, folder):
        file = _write_upload(folder, stores[0], reports)

        def run_bare() -> object:
            module = "benchmarks.speed.ingest"
            bare.append(_in_process(module, stores[1], str(file), str(seconds)))
            return bare[-1]

        return race.run(
            race.Race(
                name=NAME,
                case=case,
                sizes={
                    "reports": reports,
                    "upload_bytes": file.stat().st_size,
                    "connections": CONNECTIONS,
                    "seconds": seconds,
                },
                seeds=[],
                ours=race.Contender(
                    lambda: _upload(collector, file, seconds), seconds=_seconds_per_report
                ),
                peers={},
                floors={"bare store": race.Contender(run_bare, seconds=_seconds_per_report)},
                packages=("uvicorn", "h11", "psycopg"),
                note="seconds are those of one report; the bare store is CommitQueue, with as "
                "many tasks as there are connections",
                more=lambda results: {
                    **_speed(results),
                    "bare": _speed(bare),
                    "load_average": {"before": load, "after": os.getloadavg()[0]},
                },
                warm_up=False,
            ),
            settings,
        )


def _sealing(settings: Settings, store_url: str) -> Line:
    """How fast the worker counts each report once and shuffles: one report per upload, as many as
    it seals together per round."""
    task, seconds, spent = _task(store_url), list[float](), list[float]()
    with closing(Store.open(store_url)) as store:
        worker = Worker(store, key=KEY, seal_seconds=0, log=lambda event, **fields: None)
        for _ in range(SEALINGS):
            rows = [(task.id, 1, to_frames([report])) for report in _reports(task, MOST_REPORTS)]
            with store.transaction() as tx:
                assert set(tx.insert_uploads(rows)) == {"stored"}
            start, cpu = time.perf_counter(), time.process_time() + _server_seconds(store_url)
            while worker.step():
                pass
            seconds.append(time.perf_counter() - start)
            spent.append(time.process_time() + _server_seconds(store_url) - cpu)
    return line(
        NAME,
        "postgresql/seal",
        settings,
        sizes={"reports": MOST_REPORTS},
        seeds=[],
        repetitions=SEALINGS,
        unit="seconds",
        seconds=seconds,
        reports_per_second=MOST_REPORTS / statistics.median(seconds),
        cpu_seconds_a_report=statistics.median(spent) / MOST_REPORTS,
        load_average=os.getloadavg()[0],
    )


def _reports(task: LocalTask, count: int) -> Iterator[bytes]:
    from service.restarting import report_maker

    return map(report_maker(task), range(count))


def _memory(settings: Settings) -> Line:
    """A collector's resident memory after minutes of load, with one report per upload."""
    seconds = 60.0 * MINUTES[-1]
    sizes: dict[str, int] = {}
    results: list[Any] = []
    with _stores("sqlite") as stores, _collector(stores[0]) as (collector, folder):
        file = _write_upload(folder, stores[0], 1)
        load = threading.Thread(target=lambda: results.append(_upload(collector, file, seconds)))
        start = time.monotonic()
        load.start()
        for minute in MINUTES:
            load.join(start + 60 * minute - time.monotonic())
            sizes[f"{minute} min"] = _resident_bytes(collector.pid)
        load.join()
    return line(
        NAME,
        "memory",
        settings,
        sizes={"reports": 1, "connections": CONNECTIONS, "seconds": seconds},
        seeds=[],
        repetitions=1,
        bytes=sizes,
        **_speed(results),
    )


def _find_tests() -> None:
    """Make the tests importable: they have a study, a collector and a database server."""
    folder = str(ROOT / "tests")
    if folder not in sys.path:
        sys.path.append(folder)


@contextmanager
def _stores(kind: str) -> Iterator[list[str]]:
    """Two stores of a kind, with an open study; none where there is no server."""
    from databases import Server

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        server = None
        if kind == "sqlite":
            urls = [f"sqlite:///{folder}/{name}.db" for name in ("ours", "bare")]
        else:
            program = subprocess.run([ROOT / "scripts/postgres"], capture_output=True, text=True)
            if program.returncode != 0:
                print(f"postgresql is left out: {program.stderr}", file=sys.stderr)
                yield []
                return
            server = Server(Path(program.stdout.strip()), Path(folder))
            server.start()
            urls = [server.empty_database() for _ in range(2)]
        try:
            for url in urls:
                with closing(Store.open(url)) as store:
                    store.migrate()
                    studies.create(store, STUDY, key=KEY, rng=SystemRng(), now=time.time)
            yield urls
        finally:
            if server is not None:
                server.stop()


@contextmanager
def _collector(store: str, **settings: Any) -> Iterator[tuple[Any, Path]]:
    """`sfumato serve` over a store, and a folder to write to."""
    from service.restarting import KillableCollector, running_collectors

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        key = folder / "collector.key"
        key.write_text(KEY.hex())
        key.chmod(0o600)
        collector = KillableCollector(
            folder, store, **{"worker_seconds": 1, "seal_seconds": 60, **settings}
        )
        with running_collectors(collector):
            yield collector, folder


def _task(store_url: str) -> LocalTask:
    """The open task."""
    with closing(Store.open(store_url)) as store, store.reading() as tx:
        (row,) = tx.open_tasks()
    task = from_json(row.spec)
    assert isinstance(task, LocalTask)
    return task


def _write_upload(folder: Path, store_url: str, reports: int) -> Path:
    """Write a file with an upload of `reports` reports."""
    file = folder / "upload"
    file.write_bytes(to_frames(_reports(_task(store_url), reports)))
    return file


def _upload(collector: Any, file: Path, seconds: float) -> Any:
    """Upload over HTTP and return statistics; all uploads must be stored."""
    task_id = _task(collector.store).id
    arguments = [collector.address, task_id, str(file), str(CONNECTIONS), str(seconds)]
    before = cpu_seconds(collector.pid)
    result = _in_process("benchmarks.speed.uploading", *arguments)
    result["cpu_seconds"] = cpu_seconds(collector.pid) - before
    if result["statuses"].keys() != {"201"}:
        raise RuntimeError(f"not every upload was stored: {result['statuses']}")
    return result


def _in_process(module: str, *arguments: str) -> Any:
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{module} failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout)


def _bare(store_url: str, file: Path, seconds: float) -> dict[str, Any]:
    """Give uploads to the group commit from many tasks, each of which waits for its own."""
    uploads = uploading.Uploads(b"", file.read_bytes())
    bodies = [uploads.next() for _ in range(_BODIES)]
    seconds_by_task: list[list[float]] = [[] for _ in range(CONNECTIONS)]
    task_id, store = _task(store_url).id, Store.open(store_url)
    queue = CommitQueue(store)
    queue.start()
    start, cpu = time.perf_counter(), time.process_time()

    async def submit(task: int) -> None:
        at = time.perf_counter()
        while at < start + seconds:
            body = bodies[(task + len(seconds_by_task[task])) % _BODIES]
            assert await queue.add_upload(task_id, uploads.reports, body, {})
            done = time.perf_counter()
            seconds_by_task[task].append(done - at)
            at = done

    async def submit_all() -> None:
        await asyncio.gather(*(submit(task) for task in range(CONNECTIONS)))

    asyncio.run(submit_all())
    elapsed, cpu = time.perf_counter() - start, time.process_time() - cpu
    queue.stop()
    store.close()
    every = [each for task in seconds_by_task for each in task]
    return {
        "reports": len(every) * uploads.reports,
        "seconds": elapsed,
        "cpu_seconds": cpu,
        "latency_seconds": uploading.latencies(every),
    }


def _seconds_per_report(result: Any) -> float:
    return float(result["seconds"] / result["reports"])


def _speed(results: Sequence[Any]) -> dict[str, Any]:
    """Medians over repetitions."""
    return {
        "reports_per_second": statistics.median(1 / _seconds_per_report(each) for each in results),
        "cpu_seconds_a_report": statistics.median(
            each["cpu_seconds"] / each["reports"] for each in results
        ),
        **{
            f"{name}_seconds": statistics.median(each["latency_seconds"][name] for each in results)
            for name in ("p50", "p99")
        },
    }


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far, of all its threads; on Linux."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _server_seconds(store_url: str) -> float:
    """CPU time of a PostgreSQL server on this machine so far: of all its processes."""
    from databases import execute

    ((backend,),) = execute(store_url, "SELECT pg_backend_pid()")
    server = _parent(backend)
    processes = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    total = cpu_seconds(server)
    for process in processes:
        with suppress(OSError):  # it has ended
            total += cpu_seconds(process) if _parent(process) == server else 0.0
    return total


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])


def _resident_bytes(pid: int) -> int:
    """Resident memory of a process; on Linux."""
    for text in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if text.startswith("VmRSS:"):
            return int(text.split()[1]) * 1024
    raise RuntimeError(f"there is no process {pid}")


if __name__ == "__main__":
    print(json.dumps(_bare(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]))))
