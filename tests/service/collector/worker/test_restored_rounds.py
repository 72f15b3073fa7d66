"""A store that is restored from a copy, in the middle of a masked round."""

from __future__ import annotations

import shutil
from pathlib import Path

from masking import NAME, devices, go, masking, parts
from sfumato.collector.backup import backup, restore
from sfumato.device import Http, Joined
from sfumato.device.outbox import Outcome

COUNT = 12


def test_a_round_under_way_is_lost_when_its_store_is_brought_back(tmp_path: Path) -> None:
    """The copy is of the phase mask; the store that it was made of opened the sum and released it,
    so no device may think that nothing was opened."""
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    after.mkdir()
    with masking(before) as stage:
        study = stage.create(COUNT)
        with devices(stage, COUNT) as them, Http(stage.collector.address) as send:
            made = parts(them, stage.clock)
            for _ in range(3):
                for part in made:
                    go(part, send, until="mask")
                stage.work()
            go(made[0], send)
            backup(before / "collector.db", tmp_path / "copy.db")
            for part in made:
                go(part, send)
            stage.work()
            for part in made[:-1]:
                go(part, send)
            stage.wait_out()
            assert stage.release(study).counts.tolist() == [1.0] * COUNT
    for file in before.iterdir():
        if "db" not in file.name:
            shutil.copy(file, after / file.name)
    restore(after / "collector.db", tmp_path / "copy.db")
    with masking(after) as again, Http(again.collector.address) as send:
        assert again.charges() == 1  # of what may have been opened
        again.work()
        assert go(made[-1], send).outcome is Joined.LOST
        assert them[-1].part(NAME, "tree 11", again.clock()) is Outcome.LIFETIME_SPENT
        (task,) = again.state(study)["tasks"]
        assert "restored" in task["rounds"][0]["problem"]
