"""The bound on a collector's memory follows from its settings."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sfumato.collector.memory import memory_bound
from sfumato.collector.settings import MEBIBYTE, Settings


def test_a_collector_with_default_settings_fits_into_3_gib() -> None:
    assert sum(memory_bound(Settings()).values()) < 3 * 1024 * MEBIBYTE


@pytest.mark.parametrize(
    ("setting", "parts"),
    [
        ("connections", {"connections"}),
        ("upload_bytes", {"uploads", "worker"}),
        ("queue_bytes", {"uploads", "queue"}),
        ("queue_uploads", {"queue"}),
        ("commit_bytes", {"queue"}),
        ("study_bytes", {"studies", "contents"}),
    ],
)
def test_each_limit_is_in_its_parts(setting: str, parts: set[str]) -> None:
    settings = Settings()
    larger = replace(settings, **{setting: 2 * getattr(settings, setting)})
    before, after = memory_bound(settings), memory_bound(larger)
    assert {name for name in before if after[name] > before[name]} == parts
    assert {name for name in before if after[name] != before[name]} == parts


def test_tls_takes_more() -> None:
    plain, encrypted = Settings(), Settings(tls_cert="cert.pem", tls_key="key.pem")
    assert memory_bound(encrypted)["connections"] > memory_bound(plain)["connections"]
