"""A store that is restored from a copy, in the middle of a masked round."""

from __future__ import annotations

import shutil
from pathlib import Path

from masking import NAME, devices, go, masking, parts
from sfumato.collector.backup import backup, restore
from sfumato.device import Http, RoundOutcome
from sfumato.device.outbox import Outcome

COUNT = 12


def test_an_active_round_is_lost_when_its_store_is_restored(tmp_path: Path) -> None:
    """The copy is from the phase mask; the original store opened the sum and released it, so no
    device may assume that nothing was opened."""
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    after.mkdir()
    with masking(before) as stage:
        study = stage.create(COUNT)
        with devices(stage, COUNT) as fleet, Http(stage.collector.address) as send:
            members = parts(fleet, stage.clock)
            for _ in range(3):
                for part in members:
                    go(part, send, until="mask")
                stage.work()
            go(members[0], send)
            backup(before / "collector.db", tmp_path / "copy.db")
            for part in members:
                go(part, send)
            stage.work()
            for part in members[:-1]:
                go(part, send)
            stage.wait_out()
            assert stage.release(study).counts.tolist() == [1.0] * COUNT
    for file in before.iterdir():
        if "db" not in file.name:
            shutil.copy(file, after / file.name)
    restore(after / "collector.db", tmp_path / "copy.db")
    with masking(after) as again, Http(again.collector.address) as send:
        assert again.charges() == 1  # for a sum that may have been opened
        again.work()
        assert go(members[-1], send).outcome is RoundOutcome.LOST
        assert fleet[-1].part(NAME, "tree 11", again.clock()) is Outcome.LIFETIME_SPENT
        (task,) = again.state(study)["tasks"]
        assert "restored" in task["rounds"][0]["problem"]
