"""Databases for tests: files, and a PostgreSQL server that lives as long as the run.

`store_url` and `store` come once for each database; `postgres_url` is an empty schema on the run's
server. Without a server, its tests are skipped.
"""

from __future__ import annotations

import os
import pwd
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from disks import quick_disk
from sfumato.collector.store.database import database
from sfumato.collector.store.schema import STEPS
from sfumato.collector.store.store import Store

ROOT = Path(__file__).resolve().parents[1]
PATIENCE_SECONDS = 60.0
_SETTINGS = {
    "shared_buffers": "32MB",
    "max_connections": "60",
    "listen_addresses": "127.0.0.1",
    "timezone": "UTC",
}


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """What tests need to know about a database, beside its URL."""

    server: str | None = None  # the fixture of its server, if it has one
    columns: str  # a query for the names of the columns of the table "upload"
    rewrite: str  # a statement that replaces or empties a {table} without DELETE and UPDATE
    drop_trigger: str  # a statement that drops a {trigger} of a {table}


DIALECTS = {
    "sqlite": Dialect(
        columns="SELECT name FROM pragma_table_info('upload')",
        rewrite="INSERT OR REPLACE INTO {table} SELECT * FROM {table}",
        drop_trigger="DROP TRIGGER {trigger}",
    ),
    "postgresql": Dialect(
        server="postgres",
        columns="SELECT attname FROM pg_attribute WHERE attrelid = 'upload'::regclass"
        " AND attnum > 0",  # others are the server's own
        rewrite="TRUNCATE {table}",
        drop_trigger="DROP TRIGGER {trigger} ON {table}",
    ),
}
ON_SERVERS = [name for name, dialect in DIALECTS.items() if dialect.server is not None]


def dialect_of(url: str) -> Dialect:
    """The dialect of the database at a URL or a path."""
    scheme, separator, _ = url.partition("://")
    return DIALECTS[scheme if separator else "sqlite"]


class Server:
    """A PostgreSQL server in a folder of its own, on a local port. It syncs, as by default."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self._programs = programs
        self._folder = folder
        self._owner = _owner()
        self._password = secrets.token_hex(16)
        self._process: subprocess.Popen[bytes] | None = None
        self.port = _free_port()
        if self._owner:
            os.chown(folder, self._owner.pw_uid, self._owner.pw_gid)
        password_file = folder / "password"
        password_file.write_text(self._password)
        password_file.chmod(0o644)  # its folder is closed to others
        self._run(
            "initdb",
            *("--pgdata", str(folder / "data"), "--username", "tester", "--no-sync"),
            *("--auth", "scram-sha-256", "--pwfile", str(password_file)),
            *("--encoding", "UTF8", "--locale", "C"),
        )

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://tester:{self._password}@127.0.0.1:{self.port}/{database}"

    def start(self) -> None:
        """Start the server, and return when it answers."""
        settings = {**_SETTINGS, "port": self.port, "unix_socket_directories": self._folder}
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        command = [str(self._programs / "postgres"), "-D", str(self._folder / "data"), *options]
        if shutil.which("setpriv"):  # so that it ends with us, however we end
            command = ["setpriv", "--pdeathsig", "INT", *command]
        with (self._folder / "log").open("ab") as log:
            process: subprocess.Popen[bytes] = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=self._folder, **self._identity()
            )
        self._process = process
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self._answers():
            if process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError((self._folder / "log").read_text()[-2_000:])
            time.sleep(0.02)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """Stop the server: SIGINT cuts all connections, SIGQUIT is like a crash."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(PATIENCE_SECONDS)
            self._process = None

    def restart(self) -> None:
        """Crash, and recover on the same port."""
        self.stop(signal.SIGQUIT)
        self.start()

    def execute(self, statement: str) -> list[tuple[Any, ...]]:
        """Run one statement as the superuser, outside of any transaction."""
        import psycopg

        with psycopg.connect(self.url(), autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def empty_database(self) -> str:
        """The URL of a new, empty database."""
        name = f"test_{secrets.token_hex(8)}"
        self.execute(f"CREATE DATABASE {name} TEMPLATE template0")
        return self.url(name)

    def lend(self, folder: Path) -> None:
        """Create a folder that the server may write to."""
        folder.mkdir()
        if self._owner:
            os.chown(folder, self._owner.pw_uid, self._owner.pw_gid)

    def _answers(self) -> bool:
        import psycopg

        try:
            self.execute("SELECT 1")
        except psycopg.OperationalError:
            return False
        return True

    def _run(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [self._programs / program, *arguments],
            check=True,
            capture_output=True,
            cwd=self._folder,
            **self._identity(),
        )

    def _identity(self) -> dict[str, Any]:
        """The user to run as: a server refuses to be root."""
        if self._owner is None:
            return {}
        return {"user": self._owner.pw_uid, "group": self._owner.pw_gid, "extra_groups": []}


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    """The run's server. A test that stops it starts it again."""
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    script = subprocess.run(
        [ROOT / "scripts/postgres"], capture_output=True, text=True, check=False
    )
    if script.returncode != 0:
        pytest.skip(f"scripts/postgres found no server: {script.stderr.strip()[-200:]}")
    # Not in pytest's own folder, which other users cannot enter.
    with tempfile.TemporaryDirectory(prefix="sfumato-", dir=quick_disk()) as folder:
        server = Server(Path(script.stdout.strip()), Path(folder))
        try:
            server.start()
            yield server
        finally:
            server.stop(signal.SIGQUIT)  # nothing in it is needed again


@pytest.fixture
def postgres_url(postgres: Server) -> str:
    """A new, empty schema: a new database would take a second to create and drop."""
    name = f"test_{secrets.token_hex(8)}"
    postgres.execute(f"CREATE SCHEMA {name}")
    return f"{postgres.url()}?options=-csearch_path%3D{name}"


@pytest.fixture(params=DIALECTS)
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty store, on each database in turn."""
    server = DIALECTS[request.param].server
    if server is None:
        return f"sqlite:///{tmp_path}/collector.db"
    url: str = request.getfixturevalue(f"{server}_url")
    return url


@pytest.fixture(params=ON_SERVERS)
def server_url(request: pytest.FixtureRequest) -> str:
    """The URL of an empty store, on each database server in turn."""
    url: str = request.getfixturevalue(f"{DIALECTS[request.param].server}_url")
    return url


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    """A store with its tables, on each database in turn."""
    store = Store.open(store_url)
    store.migrate()
    yield store
    store.close()


def server_of(database: str, request: pytest.FixtureRequest) -> Server | None:
    """The run's server of a database, by its name or by the URL of a store; None for a file."""
    name = DIALECTS[database.partition("://")[0]].server
    server: Server | None = request.getfixturevalue(name) if name else None
    return server


def execute(url: str, sql: str, *parameters: Any) -> list[Any]:
    """Execute one statement on a store's database, past the store's own methods."""
    with closing(database(url).connect()) as connection:
        connection.begin(writing=True)
        rows = connection.execute(sql, parameters)
        connection.commit()
        return list(rows)


def _owner() -> pwd.struct_passwd | None:
    """The user that runs the server when we are root."""
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name: entry for entry in pwd.getpwall()}
    return names.get("postgres") or names["nobody"]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def table_names() -> list[str]:
    """The tables of a store, from the steps that create and drop them."""
    steps = re.findall(r"(CREATE|DROP) TABLE (\w+)", str(STEPS))
    dropped = {name for verb, name in steps if verb == "DROP"}
    return [name for verb, name in steps if verb == "CREATE" and name not in dropped]
