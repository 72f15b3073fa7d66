"""The database that a URL names."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from databases import DIALECTS, ROOT
from sfumato.collector.store.database import SERVERS, database
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
    "url",
    [
        "sqlite://collector.db",
        "sqlite:///",
        "sqlite:collector.db",
        "mysql://host/name",
        "postgresql:/collector:hunter2@host/name",
        ":memory:",
        "",
    ],
)
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(StoreError) as refused:
        database(url)
    assert "hunter2" not in f"{refused.value} {refused.value.hint}"


def test_tests_know_every_database() -> None:
    names = {"sqlite", *(server.schemes[0] for server in SERVERS)}
    assert set(DIALECTS) == names, (
        "add it to SERVERS (database.py) and DIALECTS (tests/databases.py)"
    )


def test_the_driver_of_a_server_is_an_extra_that_devices_may_not_import() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"]
    contracts = str(project["tool"]["importlinter"]["contracts"])
    versions = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    for server in SERVERS:
        assert f"\n{server.driver}==" in versions, "constraints.txt"
        assert any(server.driver in each for each in extras[server.extra]), "pyproject.toml"
        assert server.extra in str(extras["dev"]), "the extra dev in pyproject.toml"
        assert f"'{server.driver}'" in contracts, "forbidden_modules in pyproject.toml"


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
