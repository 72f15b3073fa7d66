"""The database that a URL names."""

from __future__ import annotations

from pathlib import Path

import pytest

from sfumato.collector.store.database import database
from sfumato.collector.store.postgres import Postgres
from sfumato.collector.store.sqlite import Sqlite
from sfumato.collector.store.store import Store
from sfumato.errors import StoreError


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("sqlite:///collector.db", "collector.db"),
        ("sqlite:////srv/collector.db", "/srv/collector.db"),
        ("data/collector.db", "data/collector.db"),
        (Path("/srv/collector.db"), "/srv/collector.db"),
    ],
)
def test_files_are_named_by_url_or_path(url: str | Path, path: str) -> None:
    place = database(url)
    assert isinstance(place, Sqlite)
    assert place.path == Path(path).absolute()


@pytest.mark.parametrize(
    "url", ["sqlite://collector.db", "sqlite:///", "mysql://host/name", ":memory:", ""]
)
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(StoreError):
        database(url)


@pytest.mark.parametrize("scheme", ["postgresql", "postgres"])
def test_a_server_is_named_without_its_password(scheme: str) -> None:
    url = f"{scheme}://tester:canary7391@db.example:5433/collector"
    assert isinstance(database(url), Postgres)
    assert database(url).name == "the store collector on db.example"
    assert "canary" not in repr(Store.open(url))


def test_an_address_that_cannot_be_read_is_not_repeated() -> None:
    with pytest.raises(StoreError) as raised:
        database("postgresql://tester:canary7391@host:port:port/%zz")
    assert "canary" not in f"{raised.value} {raised.value.hint}"
    assert raised.value.__suppress_context__
