"""The database that a URL names."""

from __future__ import annotations

from pathlib import Path

from sfumato.collector.store.driver import Database
from sfumato.collector.store.sqlite import Sqlite
from sfumato.errors import StoreError


def database(url: str | Path) -> Database:
    """The database at `sqlite:///relative.db`, `sqlite:////absolute.db`, a path or
    `postgresql://user@host/name`. Nothing is opened yet.
    """
    scheme, separator, rest = str(url).partition("://")
    if not separator:
        return Sqlite(Path(url))
    if scheme == "sqlite" and len(rest) > 1 and rest.startswith("/"):
        return Sqlite(Path(rest[1:]))
    if scheme in ("postgresql", "postgres"):
        try:  # psycopg is an extra
            from sfumato.collector.store.postgres import Postgres
        except ImportError:
            raise StoreError(
                "a store on PostgreSQL needs psycopg, which is not installed",
                hint="pip install 'sfumato[postgres]'",
            ) from None
        return Postgres(str(url))
    raise StoreError(
        "a store must be at sqlite:///FILE, at a plain path or at postgresql://…; got "
        f"a URL that starts with {scheme}://",
        hint="sqlite:///collector.db is a file in this folder, sqlite:////srv/collector.db is not",
    )
