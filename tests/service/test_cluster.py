"""Two collectors behind each proxy of `examples/proxies`: one is killed, and nothing is lost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from proxies import PROXIES
from service.cluster import compare, trial

DEVICES = 20_000


@pytest.mark.slow
@pytest.mark.parametrize("name", PROXIES)
def test_nothing_is_lost_or_doubled_when_the_worker_is_killed_behind_a_proxy(
    tmp_path: Path, postgres_url: str, name: str
) -> None:
    """Release, export and fold are equal, and every device is counted once. A wrong count of any
    device would show: each has a cell of its own."""
    outcome = trial(
        tmp_path, postgres_url, proxy_name=name, devices=DEVICES, reports_per_upload=100
    )
    assert outcome.is_sound, outcome
    assert outcome.repeated > 0  # or nothing could have been doubled
    assert outcome.replaced_seconds < 10


@pytest.mark.parametrize(
    ("cells", "fault"),
    [
        ([1, 1, 0], None),
        ([1, 0, 0], "lost"),
        ([1, 2, 0], "doubled"),
        ([1, 1, 1], "invented"),
        ([1, 1, -1], "invented"),
    ],
)
def test_a_wrong_count_is_noticed(cells: list[int], fault: str | None) -> None:
    """Two devices have sent reports."""
    wrong = {name: count for name, count in compare(np.array(cells), 2).items() if count}
    assert wrong == ({} if fault is None else {fault: 1})
