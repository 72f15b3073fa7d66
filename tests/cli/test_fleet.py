"""What `sfumato fleet` says about records that the collector did not take."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sfumato.cli.main import main
from sfumato.simulation import network_fleet
from sfumato.simulation.network_fleet import FleetSummary


@pytest.mark.parametrize(
    ("refused", "says"),
    [({429: 30}, "SFUMATO_REPORTS_PER_SECOND"), ({503: 30}, "is running"), ({}, "is running")],
)
def test_records_that_were_not_sent_say_what_to_do(
    refused: Mapping[int, int], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = FleetSummary(
        devices=3, days=1, outcomes={"kept": 3}, sent=1, rejected=0, forgotten=0, unsent=2,
        uploads=31, repeated=0, lost=0, refused=refused, seconds=1.23456,
    )  # fmt: skip

    class Fleet:
        def __init__(self, *arguments: Any, **options: Any) -> None: ...

        def __enter__(self) -> Fleet:
            return self

        def __exit__(self, *problem: object) -> None: ...

        def ask(self, *arguments: Any, **options: Any) -> FleetSummary:
            return summary

    monkeypatch.setattr(network_fleet, "NetworkFleet", Fleet)
    data = tmp_path / "trees.csv"
    data.write_text("item\noak\n")
    command = ["fleet", "--server", "http://127.0.0.1:1", "--key", "00" * 32]
    done = CliRunner().invoke(main, [*command, "--study", "Trees", "--data", str(data)])
    assert done.exit_code == 1
    assert "2 could not be" in done.output
    assert says in done.output
    assert "seconds    1.2\n" in done.output
