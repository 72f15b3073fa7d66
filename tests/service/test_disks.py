"""A store that is full or read-only: devices get errors, and acknowledged reports stay."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from databases import Server
from service.restarting import Admin, KillableCollector, report_maker, running_collectors
from serving import Answer, ask, wait_for
from sfumato.collector.store.postgres import Postgres
from sfumato.flow.release import CountRelease
from sfumato.flow.report import from_frames, to_frames

DISK_BYTES = 40 << 20
BALLAST_BYTES = 32 << 20  # other data: sealed records need more space than uploads
FREE_BYTES = 2 << 20  # on a disk with only uploads
REPORTS = 5_000  # per upload
STUDY = {
    "name": "Street trees",
    "purpose": "Which to plant next.",
    "items": ["oak", "elm"],
    "study": {"question": "frequencies", "trust": "central", "epsilon": None, "devices": 1_000_000},
}


class Trees:
    """A study, and uploads to it that are repeated until they are acknowledged."""

    def __init__(self, collector: KillableCollector) -> None:
        self._collector, self.admin = collector, Admin([collector])
        self._study_id, task = self.admin.open(STUDY)
        self._path, self._report = f"/v1/tasks/{task.id}/reports", report_maker(task)
        self.acknowledged = 0  # reports
        self.refused: list[bytes] = []  # uploads

    def upload(self, reports: bytes | None = None) -> Answer:
        data = reports or to_frames(self._report(number) for number in range(REPORTS))
        answer = ask(self.address, "POST", self._path, data)
        if answer.status == 201:
            self.acknowledged += len(from_frames(data))
        else:
            self.refused.append(data)
        return answer

    def upload_again(self) -> None:
        """Repeat the refused uploads, byte for byte, until all are acknowledged."""

        def is_accepted() -> bool:
            return self.upload(self.refused.pop()).status == 201

        while self.refused:
            wait_for(is_accepted, "the store to take uploads again")

    def released(self) -> int:
        """Close the study; return how many reports it counted, without noise."""
        self.admin.ask(lambda client: client.close_study(self._study_id))
        release = CountRelease.from_dict(self.admin.wait_for_release(self._study_id))
        return int(release.counts.sum())

    @property
    def address(self) -> str:
        assert self._collector.address is not None
        return self._collector.address


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of a few megabytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    with mounted(folder):
        yield folder


@contextmanager
def mounted(folder: Path) -> Iterator[Path]:
    """Mount such a disk on the folder."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=0755", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount here")
    if done.returncode != 0:
        pytest.skip("a small disk cannot be mounted here: that takes root and its capabilities")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def fill_disk(trees: Trees, disk: Path, ballast_bytes: int = BALLAST_BYTES) -> Answer:
    """Fill a disk that is mostly occupied; return the first answer other than 201."""
    (disk / "ballast").write_bytes(bytes(ballast_bytes))
    while (answer := trees.upload()).status == 201:
        assert trees.acknowledged * 50 < 10 * DISK_BYTES, "it never filled up"
    assert trees.acknowledged > 0
    return answer


def test_a_full_disk_is_reported_and_loses_nothing(tmp_path: Path, disk: Path) -> None:
    collector = KillableCollector(
        tmp_path / "one", f"sqlite:///{disk}/collector.db", seal_seconds=3_600
    )
    with running_collectors(collector):
        trees = Trees(collector)
        answer = fill_disk(trees, disk)
        assert (answer.status, answer.code) == (507, "store-full")
        assert answer.json()["title"] == "the store has no room left"
        for _ in range(5):
            assert trees.upload().status in (201, 507)  # a little space may become free
        assert ask(trees.address, "GET", "/health").status == 200
        assert "no room left" in collector.log()
        (disk / "ballast").unlink()
        trees.upload_again()
        assert trees.upload().status == 201
        assert trees.released() == trees.acknowledged


@pytest.mark.slow
def test_a_collector_that_dies_on_a_full_disk_has_what_it_acknowledged(
    tmp_path: Path, disk: Path
) -> None:
    collector = KillableCollector(
        tmp_path / "one", f"sqlite:///{disk}/collector.db", seal_seconds=3_600
    )
    with running_collectors(collector):
        trees = Trees(collector)
        fill_disk(trees, disk)
        collector.kill()
        collector.start()
        (disk / "ballast").unlink()
        trees.upload_again()
        assert trees.released() == trees.acknowledged


@pytest.mark.slow
def test_a_full_disk_of_a_server_is_reported_and_loses_nothing(
    tmp_path: Path, postgres: Server, postgres_url: str
) -> None:
    """The disk has the table of uploads; the acknowledged ones are counted from there."""
    collector = KillableCollector(tmp_path / "one", postgres_url, seal_seconds=3_600)
    with (
        tempfile.TemporaryDirectory(prefix="sfumato-") as name,
        mounted(Path(name)) as disk,
        running_collectors(collector),
    ):
        trees = Trees(collector)
        postgres.lend(disk / "tables")
        postgres.execute(f"CREATE TABLESPACE small LOCATION '{disk}/tables'")
        move_uploads(postgres_url, "small")
        try:
            answer = fill_disk(trees, disk, DISK_BYTES - FREE_BYTES)
            assert (answer.status, answer.code) == (507, "store-full")
            assert ask(trees.address, "GET", "/health").status == 200
            assert "no room left" in collector.log()
            (disk / "ballast").unlink()
            trees.upload_again()
            assert trees.upload().status == 201
            assert trees.released() == trees.acknowledged
        finally:
            move_uploads(postgres_url, "pg_default")
            postgres.execute("DROP TABLESPACE small")


def move_uploads(url: str, disk: str) -> None:
    with closing(Postgres(url).connect()) as connection:
        connection.execute(f"ALTER TABLE upload SET TABLESPACE {disk}")


@pytest.mark.slow
def test_a_read_only_disk_is_reported(tmp_path: Path, disk: Path) -> None:
    collector = KillableCollector(tmp_path / "one", f"sqlite:///{disk}/collector.db")
    with running_collectors(collector):
        trees = Trees(collector)
        assert trees.upload().status == 201
        collector.kill()
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        collector.start()
        answer = trees.upload()
        assert (answer.status, answer.code) == (503, "store-read-only")
        assert int(answer.headers["retry-after"]) > 0
        wait_for(lambda: ask(trees.address, "GET", "/ready").status == 503, "it not to be ready")
        assert "is read-only" in collector.log()
        collector.kill()
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        collector.start()
        trees.upload_again()
        assert trees.released() == trees.acknowledged == 2 * REPORTS


@pytest.mark.slow
def test_a_read_only_server_is_reported_and_then_used_again(
    tmp_path: Path, postgres: Server, postgres_url: str
) -> None:
    collector = KillableCollector(tmp_path / "one", postgres_url)
    with running_collectors(collector):
        trees = Trees(collector)
        assert trees.upload().status == 201
        try:
            read_only(postgres, "on")
            wait_for(lambda: trees.upload().status != 201, "the server to refuse")
            answer = trees.upload()
            assert (answer.status, answer.code) == (503, "store-read-only")
            assert int(answer.headers["retry-after"]) > 0
            assert ask(trees.address, "GET", "/ready").status == 503
            collector.kill()
            code, log = collector.attempt()
            assert (code, "is read-only" in log) == (1, True), log
        finally:
            read_only(postgres, "off")
        collector.start()
        trees.upload_again()
        assert trees.released() == trees.acknowledged


def read_only(postgres: Server, setting: str) -> None:
    postgres.execute(f"ALTER SYSTEM SET default_transaction_read_only = {setting}")
    postgres.execute("SELECT pg_reload_conf()")
