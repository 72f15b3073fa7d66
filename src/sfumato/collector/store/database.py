"""The database that a URL names."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path

from sfumato.collector.store.driver import Database
from sfumato.collector.store.sqlite import Sqlite
from sfumato.errors import StoreError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """A kind of database server that a store can be on."""

    name: str
    database: str  # "module:class", made from a URL; imported when needed
    driver: str  # the package that it needs
    extra: str  # of ours, which installs the package
    schemes: tuple[str, ...]  # of its URLs; the first is the usual one


SERVERS = (
    ServerFacts(
        name="PostgreSQL",
        database="sfumato.collector.store.postgres:Postgres",
        driver="psycopg",
        extra="postgres",
        schemes=("postgresql", "postgres"),
    ),
)


def database(url: str | Path) -> Database:
    """The database at `sqlite:///relative.db`, `sqlite:////absolute.db`, a path or
    `postgresql://user@host/name`. Nothing is opened yet.
    """
    scheme, _, rest = str(url).partition(":")
    by_scheme = {scheme: server for server in SERVERS for scheme in server.schemes}
    is_url = rest.startswith("//")
    if not is_url and scheme not in ("sqlite", *by_scheme):
        return Sqlite(Path(url))
    if scheme == "sqlite" and rest.startswith("///") and len(rest) > 3:
        return Sqlite(Path(rest[3:]))
    if is_url and scheme in by_scheme:
        return _on_server(by_scheme[scheme], str(url))
    servers = " or ".join(f"at {server.schemes[0]}://…" for server in SERVERS)
    raise StoreError(
        f"a store must be at sqlite:///FILE, at a plain path or {servers}; got a URL that starts "
        f"with {scheme}:{'//' if is_url else ''}",
        hint="sqlite:///collector.db is a file in this folder, sqlite:////srv/collector.db is not",
    )


def _on_server(server: ServerFacts, url: str) -> Database:
    module, _, name = server.database.partition(":")
    try:
        kind = getattr(importlib.import_module(module), name)
    except ImportError:
        raise StoreError(
            f"a store on {server.name} needs {server.driver}, which is not installed",
            hint=f"pip install 'sfumato[{server.extra}]'",
        ) from None
    place: Database = kind(url)
    return place
