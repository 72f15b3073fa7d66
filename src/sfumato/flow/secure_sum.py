"""Sums that nobody can look inside: how many devices must stay, and what noise each of them adds.

A question whose trust is "secure", or whose sums are masked for a trusted collector, has its tasks
made here, whatever it sketches.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

from sfumato.errors import ImpossibleError, SpecError, StudyError
from sfumato.flow.aggregation import Masked
from sfumato.flow.report import report_bytes
from sfumato.flow.task import Task, bits_for, largest_cell
from sfumato.privacy import Mechanism, NoiseInShares
from sfumato.secagg.parameters import Mode
from sfumato.sketch import Sketch
from sfumato.spec import require, spec

GRACE_BITS = 20  # fewer devices stay than the floor with probability at most 2**-20
LEAST_ASKED = 4  # devices in one masked round, of which one may be missing
LARGEST_TESTED = 10_000  # devices in one masked round
ANY_NONCE = "0" * 32  # of a round that is only weighed


@spec("secure_sum")
class SecureSum:
    """What is assumed of the devices and of who adds up their tables.

    Devices add Skellam noise in shares, enough for the fewest survivors with which a round may end,
    not counting those that may be corrupt. The floor lies below the share that is expected to stay
    by what chance takes away once in a million rounds; more survivors only add noise.
    """

    corrupt: float  # share of a cohort that may work with the collector
    dropout: float  # share that is expected to vanish
    mode: Mode = "semi_honest"

    def check(self) -> None:
        for name in ("corrupt", "dropout"):
            value = getattr(self, name)
            require(0 <= value < 1, f"{name} must be at least 0, below 1; got {value}", StudyError)

    def least(self, asked: int, *, grace_bits: int = GRACE_BITS) -> int:
        """Devices that stay of so many, each by its own chance, but for 2**-grace_bits.

        By Chernoff's bound: log P[X ≤ m] ≤ −n·KL(m/n ‖ 1 − dropout).

        >>> SecureSum(corrupt=0.1, dropout=0.05).least(1_000)
        910
        """
        stay = 1 - self.dropout
        if self.dropout == 0:
            return asked

        def is_likely(m: int) -> bool:  # that no more than m stay
            share = m / asked
            if share >= stay - 1e-9:  # a rate means the decimal that it prints as
                return True
            distance = (1 - share) * math.log((1 - share) / (1 - stay))
            distance += share * math.log(share / stay) if m else 0.0
            return asked * distance < grace_bits * math.log(2)

        return bisect_left(range(asked + 1), True, key=is_likely)

    def counts(self, asked: int, *, exact: bool = False) -> tuple[int, int]:
        """The fewest devices with which a round may end, and the most that may be in it.

        With `exact`, a cohort has exactly `asked` devices, and at most the share `dropout` of them
        vanishes; otherwise it has so many, give or take one, and chance may take more.

        >>> SecureSum(corrupt=0.1, dropout=0.05).counts(1_000, exact=True)
        (950, 1000)
        """
        least = LEAST_ASKED - 1 if exact else LEAST_ASKED
        if asked < least:
            raise ImpossibleError(
                f"a secure sum needs at least {least} devices a round; got {asked}",
                hint="ask more devices, or fewer rounds",
            )
        if exact:
            return self.least(asked, grace_bits=0), asked
        return self.least(asked - 1), asked + 1

    def noise(self, scale: float, asked: int, *, exact: bool = False) -> NoiseInShares:
        """Skellam noise of this scale at the least, from a cohort of so many (see `counts`)."""
        survivors, most = self.counts(asked, exact=exact)
        colluders = self._corrupt(most)
        if survivors <= colluders:
            raise ImpossibleError(
                f"of {asked} devices {colluders} may be corrupt and only {survivors} be left, so "
                f"that nobody's noise counts",
                hint="ask more devices a round, or set corrupt and dropout lower",
            )
        return NoiseInShares(scale=scale, survivors=survivors, colluders=colluders)

    def task(
        self,
        *,
        sketch: Sketch,
        mechanism: Mechanism,
        campaign: str,
        cohort: str,
        asked: int,
        items_per_device: int,
        exact: bool = False,
    ) -> Task:
        """A task to one cohort of `asked` devices (see `counts`); what is in shares of the
        mechanism's noise is cut for them."""
        least, most = self.counts(asked, exact=exact)
        if isinstance(mechanism, NoiseInShares):
            mechanism = self.noise(mechanism.scale, asked, exact=exact)
        if least < 1:
            raise ImpossibleError(
                f"of {asked} devices a round, each of which vanishes with probability "
                f"{self.dropout:g}, all may be gone",
                hint="ask more devices a round, or set dropout lower",
            )
        bits = sketch.word_bits  # of words that wrap by design
        if bits is None:
            reach = mechanism.reach(most, math.prod(sketch.shape))
            bits = bits_for(most * largest_cell(sketch, items_per_device) + reach)
        made = Task(
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
            made.masked_round(asked, ANY_NONCE).parameters(asked)  # that there are any
        except SpecError as problem:
            raise ImpossibleError(f"a secure sum cannot be had: {problem}") from problem
        return made

    def _corrupt(self, asked: int) -> int:
        return math.floor(self.corrupt * asked + 1e-9)


def bytes_of(task: Task) -> tuple[int, int]:
    """What a device sends and what it is told, in all messages of its round."""
    asked = task.max_count - 1
    round = task.masked_round(asked, ANY_NONCE)
    return round.bytes_up(asked), round.bytes_down(asked)


def parameters_of(task: Task) -> dict[str, int]:
    """The sizes of a task's masked round, to be shown."""
    asked = task.max_count - 1
    found = task.masked_round(asked, ANY_NONCE).parameters(asked)
    return {
        "cohort": asked,
        "least_survivors": task.min_count,
        "neighbours": found.neighbours,
        "threshold": found.threshold,
        "modulus_bits": task.aggregation.modulus_bits,
    }


def weights(tasks: Sequence[Task]) -> dict[str, int]:
    """Bytes that pass between a collector and a device that answers all these tasks; of masked
    rounds, in both directions."""
    if not any(task.is_masked for task in tasks):
        return {"bytes_per_device": sum(report_bytes(task) for task in tasks)}
    up, down = (sum(part) for part in zip(*map(bytes_of, tasks), strict=True))
    return {"bytes_per_device": up + down, "bytes_up": up, "bytes_down": down}
