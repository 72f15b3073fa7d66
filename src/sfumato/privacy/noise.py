"""Additive integer noise on a table: whole at the release, or in shares on the devices.

A mechanism has one method per station: `at_device` for reports, `at_release` for the sum.
Tables are integers and so is the noise, so nothing is rounded and a modular sum stays exact.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

from sfumato.arrays import I64
from sfumato.errors import ImpossibleError, SpecError
from sfumato.privacy import samplers
from sfumato.privacy.accounting import (
    AdditiveLoss,
    Loss,
    NoPrivacy,
    calibrate,
    gaussian_stddev,
)
from sfumato.privacy.intervals import NoiseLaw
from sfumato.privacy.noise_kinds import NOISES, Noise
from sfumato.privacy.samplers import Rng
from sfumato.spec import require, spec

AT_RELEASE: tuple[Noise, ...] = tuple(name for name, kind in NOISES.items() if kind.at_release)
_WRAP_BITS = 40  # a sum wraps with probability at most 2**-40


class Contribution(Protocol):
    """How far one device moves a table; `sketch.Norms` is one."""

    @property
    def l1(self) -> float: ...
    @property
    def l2(self) -> float: ...
    @property
    def unit_cells(self) -> int: ...


@runtime_checkable
class Mechanism(Protocol):
    """How noise is added, on the device and at the release, and what it costs."""

    @property
    def in_shares(self) -> bool:
        """Whether devices add the noise, so that only their sum is protected."""
        ...

    @property
    def least_count(self) -> int:
        """The fewest devices whose sum has enough noise to be released."""
        ...

    def at_device(self, table: I64, *, devices: int, rng: Rng) -> I64:
        """The sum of the reports of `devices` devices, given the sum of their tables."""
        ...

    def at_release(self, total: I64, *, count: int, rng: Rng) -> I64:
        """The release of the sum over `count` devices."""
        ...

    def loss(self, contribution: Contribution) -> Loss:
        """The privacy loss of one release to a device, as data for the ledger."""
        ...

    def stddev(self, count: int) -> float:
        """Standard deviation of the noise on a cell of a release over `count` devices."""
        ...

    def law(self, count: int) -> NoiseLaw:
        """The distribution of the noise on a cell of a release over `count` devices."""
        ...

    def reach(self, count: int, cells: int) -> int:
        """A bound on the devices' noise in any of `cells` cells of a sum over `count` devices,
        which fails with a chance of 2**-40. A sum that wraps is wrong but no less private: reducing
        it is post-processing."""
        ...


class AtRelease:
    """A base of mechanisms that leave the devices' tables as they are."""

    __slots__ = ()
    in_shares: ClassVar[bool] = False
    least_count: ClassVar[int] = 1

    def at_device(self, table: I64, *, devices: int, rng: Rng) -> I64:
        return table

    def reach(self, count: int, cells: int) -> int:
        return 0  # noise is added after the sum is opened


@spec("no_noise")
class NoNoise(AtRelease):
    """The exact sum: for pipelines without a privacy promise, and for measuring the cost of noise.

    Claim: none. The ledger records an infinite loss.
    """

    def at_release(self, total: I64, *, count: int, rng: Rng) -> I64:
        return total

    def loss(self, contribution: Contribution) -> Loss:
        return NoPrivacy()

    def stddev(self, count: int) -> float:
        return 0.0

    def law(self, count: int) -> NoiseLaw:
        return NoiseLaw.none()


@spec("noise_at_release")
class NoiseAtRelease(AtRelease):
    """Discrete noise of one of `NOISES`, added once to the sum by the collector.

    Claim: one release is (epsilon, delta)-DP at the epsilon that `accounting.epsilon_of` gives for
        `loss`; neighbours differ by one device's table becoming zero, the count being public.
    Proof: docs/proofs/noise.md: the loss of a contribution of k cells moved by one is the k-fold
        composition of a shift by one; otherwise zCDP (Gaussian) or pure DP (Laplace) from its norm.
    Assumes: the collector is trusted with the sum (trust "central"); each device contributes
        within the norms; `rng` is cryptographic.
    Utility: unbiased; every cell has variance scale² (Gaussian, at most that, and to within 3e-7 of
        it for scale ≥ 1) or about 2·scale² (Laplace).
    """

    noise: Noise
    scale: float  # standard deviation (gaussian) or exponential scale (laplace)

    def check(self) -> None:
        require(
            NOISES[self.noise].at_release,
            f"noise at the release is {' or '.join(AT_RELEASE)}; got {self.noise}",
        )
        limit = samplers.LARGEST_SCALE[self.noise]
        require(
            0 < self.scale <= limit, f"scale must be above 0, at most {limit}; got {self.scale}"
        )

    def at_release(self, total: I64, *, count: int, rng: Rng) -> I64:
        return total + samplers.sampler_of(self.noise, self.scale).draw(total.shape, rng)

    def loss(self, contribution: Contribution) -> Loss:
        return _additive(self.noise, self.scale, contribution)

    def stddev(self, count: int) -> float:
        return NOISES[self.noise].stddev(self.scale)

    def law(self, count: int) -> NoiseLaw:
        return NoiseLaw.of(self.noise, self.scale)


def least_noise(
    contribution: Contribution,
    *,
    epsilon: float,
    delta: float,
    noises: Sequence[Noise] = AT_RELEASE,
    is_rough: bool = False,
) -> NoiseAtRelease:
    """The noise of the least deviation with which one release costs at most epsilon; within about
    a per cent if `is_rough`, which saves a second."""
    norms: Any = {"l1": float(contribution.l1), "l2": float(contribution.l2)}
    cells, options = contribution.unit_cells, list[NoiseAtRelease]()
    for noise in sorted(noises, key=lambda noise: NOISES[noise].is_pure):
        if NOISES[noise].is_pure:
            if options and norms["l1"] / epsilon > samplers.LARGEST_SCALE[noise]:
                continue  # it would have to be larger than another one
            scale = calibrate(noise, **norms, unit_cells=cells, epsilon=epsilon, delta=0.0)
        elif delta == 0:
            continue
        elif is_rough:
            scale = gaussian_stddev(norms["l2"], epsilon, delta)
        else:
            scale = calibrate(noise, **norms, unit_cells=cells, epsilon=epsilon, delta=delta)
        options.append(NoiseAtRelease(noise=noise, scale=scale))
    return min(options, key=lambda option: option.stddev(1))


@spec("noise_in_shares")
class NoiseInShares:
    """Skellam noise that devices add in equal shares, so that only a secure sum is protected.

    Skellam variables add exactly, so the sum over `survivors` devices, at most `colluders` of which
    reveal their share, carries Skellam noise of at least `scale`; more survivors only add noise.

    Claim, proof: as `NoiseAtRelease`, for the view of the sum by anyone but the colluders.
    Assumes: nobody sees a summand (the task refuses `Plain`); at least `survivors` devices stay,
        or the release is refused; their generators are cryptographic.
    Utility: unbiased; variance scale²·count/(survivors − colluders).
    """

    in_shares: ClassVar[bool] = True
    scale: float  # standard deviation of the noise in the smallest admissible sum
    survivors: int  # the smallest cohort that may be released
    colluders: int = 0  # survivors whose shares the adversary may know

    def check(self) -> None:
        limit = samplers.LARGEST_SCALE["skellam"]
        require(
            0 < self.scale <= limit, f"scale must be above 0, at most {limit}; got {self.scale}"
        )
        require(
            0 <= self.colluders < self.survivors,
            f"colluders must be at least 0 and fewer than the {self.survivors} survivors; "
            f"got {self.colluders}",
        )

    @property
    def least_count(self) -> int:
        return self.survivors

    @property
    def share_stddev(self) -> float:
        return self.scale / math.sqrt(self.survivors - self.colluders)

    def at_device(self, table: I64, *, devices: int, rng: Rng) -> I64:
        if devices < 1:
            raise SpecError(f"devices must be at least 1; got {devices}")
        return table + samplers.skellam(self.share_stddev * math.sqrt(devices), table.shape, rng)

    def at_release(self, total: I64, *, count: int, rng: Rng) -> I64:
        if count < self.survivors:
            raise ImpossibleError(
                f"a release needs at least {self.survivors} devices for its noise; got {count}",
                hint="ask again with a larger cohort; nothing was released",
            )
        return total

    def loss(self, contribution: Contribution) -> Loss:
        return _additive("skellam", self.scale, contribution)

    def stddev(self, count: int) -> float:
        return self.share_stddev * math.sqrt(count)

    def law(self, count: int) -> NoiseLaw:
        return NoiseLaw.of("skellam", self.stddev(count))

    def reach(self, count: int, cells: int) -> int:
        """By Chernoff's bound: Skellam noise of variance v has E[e^(s·X)] = e^(v·(cosh s − 1)), so
        log P[X ≥ t] ≤ √(t² + v²) − v − t·asinh(t/v)."""
        variance = self.stddev(count) ** 2
        target = math.log(2 * cells) + _WRAP_BITS * math.log(2)

        def is_enough(t: int) -> bool:
            log_chance = math.hypot(t, variance) - variance - t * math.asinh(t / variance)
            return -log_chance >= target

        high = 1
        while not is_enough(high):
            high *= 2
        return bisect_left(range(high), True, key=is_enough)


def _additive(noise: Noise, scale: float, contribution: Contribution) -> AdditiveLoss:
    return AdditiveLoss(
        noise=noise,
        scale=scale,
        l1=float(contribution.l1),
        l2=float(contribution.l2),
        unit_cells=contribution.unit_cells,
    )


def noise_parameters(mechanism: Mechanism) -> dict[str, Any]:
    """The noise of a mechanism, as parameters of a plan."""
    if isinstance(mechanism, NoiseAtRelease):
        return {"noise": mechanism.noise, "noise_scale": mechanism.scale}
    if isinstance(mechanism, NoiseInShares):
        return {
            "noise": "skellam, in shares",
            "noise_scale": mechanism.scale,
            "noise_scale_of_a_share": mechanism.share_stddev,
        }
    return {}
