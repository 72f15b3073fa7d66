"""Exact discrete Gaussian noise from the system's generator: against OpenDP and a rounded float."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import opendp.prelude as dp

from benchmarks import race
from benchmarks.lines import Line, Settings
from sfumato.privacy import SystemRng, discrete_gaussian

NAME = "samplers"
STDDEV = 10.0
CASE = "discrete gaussian"
table = race.table


def run(settings: Settings) -> Iterator[Line]:
    if not settings.wants(CASE):
        return
    draws = 10_000 if settings.quick else 1_000_000
    sampled = min(draws, 1_000 if settings.quick else 20_000)
    dp.enable_features("contrib")
    space = dp.vector_domain(dp.atom_domain(T=int)), dp.l2_distance(T=int)
    opendp = dp.m.make_gaussian(*space, scale=STDDEV)
    zeros = [0] * sampled
    floats = np.random.default_rng(1)
    yield race.run(
        race.Race(
            name=NAME,
            case=CASE,
            sizes={"draws": draws, "stddev": STDDEV},
            seeds=[],
            ours=race.Contender(lambda: discrete_gaussian(STDDEV, draws, SystemRng())),
            peers={"opendp": race.Contender(lambda: opendp(zeros), draws / sampled)},
            floors={
                "rounded float": race.Contender(lambda: np.rint(floats.normal(0, STDDEV, draws)))
            },
            packages=["opendp"],
            note=f"opendp drew a vector of {sampled:,} and was scaled to {draws:,}; the floor is "
            "numpy's normal from a generator that is not cryptographic, rounded: not exact",
        ),
        settings,
    )
