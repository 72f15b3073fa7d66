"""A secure mean through a collector: masked rounds over real HTTP."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from masking import NAME, devices, masking, play
from sfumato.device import RoundClient, RoundOutcome
from sfumato.flow.release import MeanRelease


def test_a_secure_mean_of_vectors(tmp_path: Path) -> None:
    with masking(tmp_path) as stage:
        study = stage.create(
            30, question="mean", epsilon=None, dimensions=20, clip=1.0, compression="none"
        )
        vectors = np.random.default_rng(1).normal(size=(30, 20)) / 10
        with devices(stage, 30) as them:
            joining = []
            for device, vector in zip(them, vectors, strict=True):
                part = device.part(NAME, vector, stage.clock())
                assert isinstance(part, RoundClient)
                joining.append(part)
            play(stage, joining)
            assert {part.outcome for part in joining} == {RoundOutcome.DONE}
        with stage.collector.store.reading() as tx:
            text = tx.release(study.id)
        assert text is not None
        release = MeanRelease.from_dict(json.loads(text))
        # 2**16 whole numbers to the unit, each rounded by less than one.
        assert np.abs(release.mean - vectors.mean(axis=0)).max() < 2.0**-16
