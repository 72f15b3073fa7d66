"""Secure sums: how many devices must stay in a round, and how much noise each of them adds.

All masked tasks are made here: those of questions with trust "secure", and those whose sums are
masked for a trusted collector.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from sfumato.errors import ImpossibleError, SpecError, StudyError
from sfumato.flow.aggregation import Aggregation, Masked, Plain, Sparse
from sfumato.flow.report import report_bytes
from sfumato.flow.task import Task, bits_for, largest_cell, most_devices
from sfumato.privacy import Mechanism, NoiseInShares
from sfumato.secagg.parameters import Mode
from sfumato.sketch import ItemCounts, OneHot, Sketch
from sfumato.spec import Requirement, spec

require = Requirement(StudyError)

GRACE_BITS = 20  # fewer devices than the minimum stay with probability at most 2**-20
LEAST_DEVICES = 4  # in one masked round; one of them may be missing
PLACEHOLDER_NONCE = "0" * 32  # for rounds that are sized and never run


@spec("secure_sum")
class SecureSum:
    """The assumptions about devices and the collector in a secure sum.

    Devices add Skellam noise in shares, enough for the fewest survivors with which a round may end,
    not counting those that may be corrupt. That minimum is so far below the expected number of
    survivors that chance misses it once in a million rounds; more survivors only add noise.
    """

    corrupt: float  # share of a cohort that may collude with the collector
    dropout: float  # share that is expected to drop out
    mode: Mode = "semi_honest"

    def check(self) -> None:
        for name in ("corrupt", "dropout"):
            value = getattr(self, name)
            require(0 <= value < 1, f"{name} must be at least 0 and below 1; got {value}")

    def least(self, devices: int, *, grace_bits: int = GRACE_BITS) -> int:
        """The number of devices that stay, except with probability 2**-grace_bits, if each of
        `devices` drops out independently.

        By Chernoff's bound: log P[X ≤ m] ≤ −n·KL(m/n ‖ 1 − dropout).

        >>> SecureSum(corrupt=0.1, dropout=0.05).least(1_000)
        910
        """
        stay = 1 - self.dropout
        if self.dropout == 0:
            return devices

        def is_likely(m: int) -> bool:
            """Whether the bound allows that at most m stay."""
            share = m / devices
            if share >= stay - 1e-9:  # tolerance: a rate stands for its decimal
                return True
            distance = (1 - share) * math.log((1 - share) / (1 - stay))
            distance += share * math.log(share / stay) if m else 0.0
            return devices * distance < grace_bits * math.log(2)

        return bisect_left(range(devices + 1), True, key=is_likely)

    def counts(self, devices: int, *, exact: bool = False) -> tuple[int, int]:
        """The fewest devices with which a round may end, and the most that may be in it.

        With `exact`, a cohort has exactly `devices` devices, and at most the share `dropout` of
        them drops out; otherwise the cohort may differ by one, and more may drop out by chance.

        >>> SecureSum(corrupt=0.1, dropout=0.05).counts(1_000, exact=True)
        (950, 1000)
        """
        least = LEAST_DEVICES - 1 if exact else LEAST_DEVICES
        if devices < least:
            raise ImpossibleError(
                f"a secure sum needs at least {least} devices per round; got {devices}",
                hint="ask more devices, or fewer rounds",
            )
        if exact:
            return self.least(devices, grace_bits=0), devices
        return self.least(devices - 1), devices + 1

    def noise(self, scale: float, devices: int, *, exact: bool = False) -> NoiseInShares:
        """Skellam noise of at least this scale from a cohort of `devices` (see `counts`)."""
        survivors, most = self.counts(devices, exact=exact)
        colluders = self._corrupt(most)
        if survivors <= colluders:
            raise ImpossibleError(
                f"of {devices} devices, {colluders} may be corrupt and only {survivors} may stay, "
                "so perhaps no honest device is left to add noise",
                hint="ask more devices per round, or set corrupt and dropout lower",
            )
        return NoiseInShares(scale=scale, survivors=survivors, colluders=colluders)

    def task(
        self,
        *,
        sketch: Sketch,
        mechanism: Mechanism,
        campaign: str,
        cohort: str,
        devices: int,
        items_per_device: int,
        exact: bool = False,
    ) -> Task:
        """A task for one cohort of `devices` devices (see `counts`); noise in shares is divided
        among them."""
        least, most = self.counts(devices, exact=exact)
        if isinstance(mechanism, NoiseInShares):
            mechanism = self.noise(mechanism.scale, devices, exact=exact)
        if least < 1:
            raise ImpossibleError(
                f"all {devices} devices of a round may drop out, each with probability "
                f"{self.dropout:g}",
                hint="ask more devices per round, or set dropout lower",
            )
        bits = sketch.word_bits  # these words wrap by design
        if bits is None:
            reach = mechanism.reach(most, math.prod(sketch.shape))
            bits = bits_for(most * largest_cell(sketch, items_per_device) + reach)
        task = Task(
            sketch=sketch,
            mechanism=mechanism,
            aggregation=Masked(
                modulus_bits=bits,
                corrupt=self.corrupt,
                mode=self.mode,
            ),
            campaign=campaign,
            cohort=cohort,
            items_per_device=items_per_device,
            min_count=least,
            max_count=most,
        )
        try:
            task.masked_round(devices, PLACEHOLDER_NONCE).parameters(devices)
        except SpecError as problem:
            raise ImpossibleError(f"a secure sum is not possible: {problem}") from problem
        return task

    def _corrupt(self, devices: int) -> int:
        return math.floor(self.corrupt * devices + 1e-9)


def sum_task(
    secure: SecureSum | None,
    *,
    sketch: Sketch,
    mechanism: Mechanism,
    campaign: str,
    cohort: str,
    devices: int,
    most: int | None = None,
    items_per_device: int = 1,
    sparse: bool = False,
) -> Task:
    """A task for one cohort of about `devices` devices: masked by `secure`, or else for a collector
    that may see each table or, if `sparse`, each list of entries.

    The collector takes at most `most` tables, by default more than a random cohort has by chance.
    """
    parts: dict[str, Any] = {"sketch": sketch, "campaign": campaign, "cohort": cohort}
    parts |= {"mechanism": mechanism, "items_per_device": items_per_device}
    if secure is not None:
        return secure.task(**parts, devices=devices)
    most = most_devices(devices) if most is None else most
    aggregation: Aggregation
    if sparse:
        assert isinstance(sketch, OneHot | ItemCounts)  # other sketches have no entries
        aggregation = Sparse(entries=items_per_device, entry_bits=sketch.entry_bits)
    elif sketch.word_bits is not None:  # these words wrap by design
        aggregation = Plain(modulus_bits=sketch.word_bits)
    else:
        bits = bits_for(most * largest_cell(sketch, items_per_device))
        aggregation = Plain(modulus_bits=bits)
    return Task(**parts, aggregation=aggregation, max_count=most)


def bytes_of(task: Task) -> tuple[int, int]:
    """The bytes that a device sends and receives in all messages of its round."""
    devices = task.max_count - 1
    round = task.masked_round(devices, PLACEHOLDER_NONCE)
    return round.bytes_up(devices), round.bytes_down(devices)


def parameters_of(task: Task) -> dict[str, int]:
    """The sizes of a task's masked round, for people to read."""
    devices = task.max_count - 1
    parameters = task.masked_round(devices, PLACEHOLDER_NONCE).parameters(devices)
    return {
        "cohort": devices,
        "least_survivors": task.min_count,
        "neighbours": parameters.neighbours,
        "threshold": parameters.threshold,
        "modulus_bits": task.aggregation.modulus_bits,
    }


def traffic(tasks: Sequence[Task]) -> dict[str, int]:
    """The bytes that a device sends to answer all these tasks, and those that it receives in their
    masked rounds."""
    if not any(task.is_masked for task in tasks):
        return {"bytes_per_device": sum(report_bytes(task) for task in tasks)}
    up, down = (sum(part) for part in zip(*map(bytes_of, tasks), strict=True))
    return {"bytes_per_device": up, "bytes_down": down}
