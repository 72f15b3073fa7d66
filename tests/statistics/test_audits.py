"""Audits: a lower bound on epsilon, from what mechanisms really release, never exceeds the claim.

A pair of neighbouring tables differs by one device. Each is released many times; an event is chosen
on half of the releases (the best threshold of the log-likelihood ratio) and counted on the other
half. With p and q its probabilities with and without the device, p ≤ e^epsilon·q + delta, so
log((p − delta)/q) at the pessimistic ends of exact confidence intervals bounds epsilon from below.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

from checks import SEED
from sfumato.privacy import (
    ListedAbove,
    Mechanism,
    NoiseAtRelease,
    NoiseInShares,
    NoNoise,
    SeededRng,
    epsilon_of,
)
from sfumato.privacy.noise import AT_RELEASE
from sfumato.sketch import CountSketch, OneHot, Sketch
from sfumato.spec import kinds
from unit.privacy import exact

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

RUNS = 400_000  # of each table; half choose the event, half are counted
DELTA = 1e-6
SIGMA = 9.446669  # golden G8: epsilon 1 at delta 1e-6 with five rows
FALSE_ALARM = 1e-6
COUNT = 50  # devices in a release


def released(mechanism: Mechanism, contribution: I64, *, seed: int) -> I64:
    """RUNS releases of a table: the cells that a device moves, (RUNS, cells)."""
    rng = SeededRng(SEED, seed)
    table = np.tile(contribution, (RUNS, 1))
    noised = mechanism.at_device(table, devices=COUNT, rng=rng)
    return mechanism.at_release(noised, count=COUNT, rng=rng)


def likelihood_ratios(tables: I64, contribution: I64, noise: str, scale: float) -> F64:
    """log P(table | with the device) − log P(table | without), from the closed form."""
    reach = int(np.abs(tables).max()) + int(np.abs(contribution).max())
    half = np.array([float(exact.mass(noise, scale, value)) for value in range(reach + 1)])
    logs = np.log(np.maximum(half, 1e-300))
    return np.asarray((logs[np.abs(tables - contribution)] - logs[np.abs(tables)]).sum(axis=1))


def lower_bound(present: F64, absent: F64, delta: float) -> float:
    """An epsilon that the mechanism exceeds, wrong with probability at most FALSE_ALARM."""
    half = present.size // 2
    thresholds = np.unique(np.quantile(absent[:half], 1 - np.geomspace(0.5, 1e-4, 40)))
    best = max(
        thresholds, key=lambda bar: _bound(present[:half] >= bar, absent[:half] >= bar, delta)
    )
    return _bound(present[half:] >= best, absent[half:] >= best, delta)


def _bound(hits: npt.NDArray[np.bool_], misses: npt.NDArray[np.bool_], delta: float) -> float:
    """Clopper and Pearson 1934, half of the false alarm on either probability."""
    hit_count, other, runs = int(hits.sum()), int(misses.sum()), hits.size
    low = stats.beta.ppf(FALSE_ALARM / 2, hit_count, runs - hit_count + 1) if hit_count else 0.0
    high = stats.beta.isf(FALSE_ALARM / 2, other + 1, runs - other) if other < runs else 1.0
    return math.log((low - delta) / high) if low > delta else -math.inf


class Audit(NamedTuple):
    """An honest mechanism, what a device holds, and a scale at which its claim would be false."""

    mechanism: NoiseAtRelease | NoiseInShares
    sketch: Sketch
    values: list[int]
    delta: float
    too_small: float

    def claim(self) -> float:
        loss = self.mechanism.loss(self.sketch.sensitivity(len(self.values)))
        return epsilon_of([loss], self.delta)

    def measure(self, mechanism: NoiseAtRelease | NoiseInShares) -> float:
        """A lower bound on the epsilon of this mechanism."""
        table = self.sketch.encode(np.array(self.values, dtype=np.int64))
        contribution = table[table != 0]
        noise = mechanism.noise if isinstance(mechanism, NoiseAtRelease) else "skellam"
        present = released(mechanism, contribution, seed=1)
        absent = released(mechanism, np.zeros_like(contribution), seed=2)
        return lower_bound(
            likelihood_ratios(present, contribution, noise, mechanism.scale),
            likelihood_ratios(absent, contribution, noise, mechanism.scale),
            self.delta,
        )


ROWS = CountSketch(rows=5, width=64, seed=1)
CATEGORIES = OneHot(categories=4)
CLASSICAL = math.sqrt(2 * math.log(1.25 / DELTA) * 5)
"""11.85: the deviation that theorem 4.1 of paper 000 means, for five rows and epsilon 1."""

AUDITS = {
    "gaussian, five rows": Audit(
        NoiseAtRelease(noise="gaussian", scale=SIGMA), ROWS, [7], DELTA, math.sqrt(CLASSICAL)
    ),
    "gaussian, three items": Audit(
        NoiseAtRelease(noise="gaussian", scale=6.0), CATEGORIES, [2, 2, 2], DELTA, math.sqrt(6.0)
    ),
    "laplace, one cell": Audit(
        NoiseAtRelease(noise="laplace", scale=1.0), CATEGORIES, [2], 0.0, 0.8
    ),
    "laplace, five rows": Audit(NoiseAtRelease(noise="laplace", scale=5.0), ROWS, [7], 0.0, 3.5),
    "laplace, three items": Audit(
        NoiseAtRelease(noise="laplace", scale=3.0), CATEGORIES, [2, 2, 2], 0.0, 2.4
    ),
    "skellam in shares, five rows": Audit(
        NoiseInShares(scale=SIGMA, survivors=COUNT), ROWS, [7], DELTA, math.sqrt(CLASSICAL)
    ),
    "skellam in shares, one cell": Audit(  # too small: the shares of 5 devices out of 50
        NoiseInShares(scale=0.8, survivors=COUNT), CATEGORIES, [2], DELTA, 0.8 * math.sqrt(0.1)
    ),
}


@pytest.mark.parametrize("name", AUDITS)
def test_what_is_released_does_not_betray_more_than_is_claimed(name: str) -> None:
    """False alarm 1e-6 (Clopper-Pearson). Power: see the next test."""
    audit = AUDITS[name]
    assert audit.measure(audit.mechanism) <= audit.claim()


@pytest.mark.parametrize("name", AUDITS)
def test_too_little_noise_betrays_more_than_is_claimed(name: str) -> None:
    """The negative control. Missed with probability below 1e-6: even with both counts five standard
    deviations unlucky, the closed forms give bounds of 1.26 and 2.72 (Gaussian, against claims of
    1.00 and 2.42), 1.19, 1.16 and 1.18 (Laplace, 1.00), 1.2 and 3.3 (Skellam, 1.00 and 2.88)."""
    audit = AUDITS[name]
    assert audit.measure(replace(audit.mechanism, scale=audit.too_small)) > audit.claim()


def test_a_variance_taken_for_a_deviation_costs_three_times_the_epsilon() -> None:
    """Paper 000 writes the deviation where a variance should stand: epsilon 3.0, not 1.0.
    The control above catches just that noise."""
    wrong = NoiseAtRelease(noise="gaussian", scale=math.sqrt(CLASSICAL))
    assert f"{epsilon_of([wrong.loss(ROWS.sensitivity(1))], DELTA):.1f}" == "3.0"
    assert AUDITS["gaussian, five rows"].too_small == wrong.scale


def test_every_mechanism_with_noise_is_audited() -> None:
    """Every registered kind that can cost a finite epsilon has an audit. Lists are enumerated, and
    audited by a canary, in tests/unit/privacy/test_listing.py and test_heavy_hitters.py; a round
    that shows more than its sum is audited in test_training.py."""
    mechanisms = {name: kind for name, kind in kinds().items() if hasattr(kind, "at_release")}
    mechanisms.pop("round_noise", None)  # where PyTorch is
    assert set(mechanisms.values()) - {NoNoise, ListedAbove} == {
        type(audit.mechanism) for audit in AUDITS.values()
    }


def test_every_noise_at_the_release_is_audited() -> None:
    noises = {
        audit.mechanism.noise
        for audit in AUDITS.values()
        if isinstance(audit.mechanism, NoiseAtRelease)
    }
    assert noises == set(AT_RELEASE), "add an audit, and a scale that is too small, to AUDITS"
