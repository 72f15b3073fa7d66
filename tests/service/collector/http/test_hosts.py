"""Which hosts a request may be for, and whether it came over TLS."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from serving import KEY, ask, served, settings
from sfumato.collector.http.service import Service
from sfumato.collector.store.store import Store

OVER_TLS = {"X-Forwarded-Proto": "https", "X-Forwarded-For": "192.0.2.7"}


@contextmanager
def collector(folder: Path, **options: Any) -> Iterator[str]:
    with closing(Store.open(f"sqlite:///{folder}/collector.db")) as store:
        store.migrate()
        with served(Service(store, settings(folder, **options), key=KEY)) as address:
            yield address


def test_every_host_is_served_by_default(tmp_path: Path) -> None:
    with collector(tmp_path) as address:
        assert ask(address, "GET", "/health", headers={"Host": "evil.example"}).status == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("collector.example", 200),
        ("COLLECTOR.example:8420", 200),
        ("eu.devices.example", 200),
        ("evil.example", 400),
        ("collector.example.evil.example", 400),
        ("devices.example", 400),
        ("", 400),
    ],
)
def test_other_hosts_are_refused(tmp_path: Path, host: str, status: int) -> None:
    with collector(tmp_path, hosts=("collector.example", "*.devices.example")) as address:
        for path in ("/health", "/v1/offers"):
            assert ask(address, "GET", path, headers={"Host": host}).status == status


@pytest.mark.parametrize(
    ("proxies", "header"),
    [
        ((), None),
        (("192.0.2.1",), None),
        (("127.0.0.1",), "max-age=31536000"),
        (("127.0.0.0/8",), "max-age=31536000"),
    ],
)
def test_only_a_proxy_of_ours_says_that_a_request_came_over_tls(
    tmp_path: Path, proxies: tuple[str, ...], header: str | None
) -> None:
    with collector(tmp_path, proxies=proxies) as address:
        for path in ("/health", "/v1/offers"):
            answer = ask(address, "GET", path, headers=OVER_TLS)
            assert answer.status == 200
            assert answer.headers.get("strict-transport-security") == header
        plain = ask(address, "GET", "/health")
        assert "strict-transport-security" not in plain.headers
