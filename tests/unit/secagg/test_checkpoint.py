"""A collector that kept messages and a checkpoint, and no tables, goes on where it was."""

from __future__ import annotations

import numpy as np
import pytest

from sfumato.errors import SpecError
from sfumato.secagg.coordinator import Coordinator, Phase
from unit.secagg.stage import Stage


def rebuilt(stage: Stage, checkpoint: bytes) -> Coordinator:
    """Another collector with all messages from before tables were masked."""
    coordinator = Coordinator(stage.collector.round, stage.collector.roster)
    for phase in (Phase.ENROL, Phase.SHARE):
        for (said_in, member), message in sorted(stage.answers.items()):
            if said_in is phase:
                assert coordinator.add(phase, member, message) is None
        coordinator.close()
    coordinator.restore(checkpoint)
    return coordinator


def test_a_sum_goes_on_from_its_checkpoint() -> None:
    stage = Stage()
    stage.until(Phase.MASK)
    stage.run(Phase.MASK)
    checkpoint = stage.collector.checkpoint()
    again = rebuilt(stage, checkpoint)
    assert again.survivors == stage.collector.survivors
    assert again.checkpoint() == checkpoint
    stage.collector = again
    again.close()
    stage.run(Phase.UNMASK)
    assert np.array_equal(again.finish().astype(np.int64), stage.expected())


def test_a_table_in_the_checkpoint_is_not_added_again() -> None:
    stage = Stage()
    stage.until(Phase.MASK)
    stage.run(Phase.MASK)
    again = rebuilt(stage, stage.collector.checkpoint())
    before = again.checkpoint()
    for (phase, member), message in stage.answers.items():
        if phase is Phase.MASK:
            assert again.add(phase, member, message) is None
    assert again.checkpoint() == before


def test_a_checkpoint_of_something_else_is_refused() -> None:
    stage = Stage()
    stage.until(Phase.MASK)
    stage.run(Phase.MASK)
    checkpoint = stage.collector.checkpoint()
    coordinator = Coordinator(stage.collector.round, stage.collector.roster)
    with pytest.raises(SpecError, match="phase mask"):
        coordinator.restore(checkpoint)
    again = rebuilt(stage, checkpoint)
    with pytest.raises(SpecError, match="phase mask"):
        again.restore(checkpoint[:-1])
    again.boxes.pop(min(again.survivors))
    with pytest.raises(SpecError, match="have shared"):
        again.restore(checkpoint)
