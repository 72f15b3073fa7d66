"""What the promises of several questions have in common: their sentences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from sfumato.flow.release import Privacy
from sfumato.flow.secure_sum import SecureSum
from sfumato.flow.task import Task
from sfumato.privacy.shuffling import shuffled_epsilon

ZERO_OUT = "zero-out: one device's {} zero; the number of devices is public"
NO_PROMISE = "no differential privacy: exact sums are released"
DROPOUTS = "devices that drop out do not weaken the guarantee, and their number is public"
TIME = "how long the computation took, which the bill says"
SEES_TABLES = "the collector sees each device's table, adds the noise and is trusted with both"
SEES_ALL = "the collector sees each device's table, and everybody the exact sums"


def rounded_up(epsilon: float) -> float:
    """An epsilon to three digits, never less than it is.

    >>> rounded_up(0.15741), rounded_up(5.9999), rounded_up(18.401)
    (0.158, 6.0, 18.5)
    """
    unit = 10.0 ** (math.floor(math.log10(epsilon)) - 2)
    return round(math.ceil(epsilon / unit - 1e-9) * unit, 12)


def in_words(epsilon: float, delta: float) -> str:
    """An (epsilon, delta) for each device, as statements say it."""
    return f"({epsilon:g}, {delta:g})-differential privacy for each device"


def who_sees_sums(task: Task) -> str:
    """What the collector sees of a masked round."""
    return (
        f"the collector sees sums over at least {task.min_count:,} of {task.max_count - 1:,} "
        "devices and no device's table"
    )


def who_colludes(secure: SecureSum | None) -> tuple[str, ...]:
    """What is assumed about the collector and the devices of a masked round."""
    if secure is None:
        return ()
    share = f"{100 * secure.corrupt:.3g}% of the devices of each round"
    trusted = (
        f"the collector follows the protocol and at most {share} tell it what they see"
        if secure.mode == "semi_honest"
        else f"at most {share} work with the collector, whatever it and they send"
    )
    return (
        trusted,
        "devices refuse a round that leaves too few of them, and honest devices' shares of the "
        "noise are enough",
    )


def local_promise(algorithm: str, epsilon: float, per_device: int) -> Privacy:
    """What a device is promised by its own coins; what shuffling adds is said of a release."""
    day = (
        f"a device sends at most {per_device} reports per day, epsilon {per_device * epsilon:g} "
        "together, and days add up"
        if per_device > 1
        else "a device sends at most one report per day, and days add up"
    )
    return Privacy(
        epsilon=epsilon,
        delta=0.0,
        guarantee=f"{epsilon:g}-local differential privacy for each report",
        unit="report",
        neighbours='any two values, "none" among them: one report\'s value is replaced by another',
        mechanism=f"{algorithm}: each device randomises its own report",
        trust="local",
        sees="nobody sees a value; everybody may see the reports",
        assumptions=(day, "the device's own random generator is sound"),
        not_covered=("which devices take part, and on which days",),
    )


def shuffled(privacy: Privacy, reports: Sequence[int], delta: float, per_device: int) -> Privacy:
    """The promise of a release of so many reports per round, with what shuffling them adds.

    It is computed from the reports that were counted: fewer reports hide a device less. It is for
    one report per device; the round with the fewest reports decides.
    """
    least = min(reports, default=0)
    if privacy.epsilon is None or delta == 0 or per_device > 1 or least < 1:
        return privacy
    epsilon = rounded_up(shuffled_epsilon(privacy.epsilon, least, delta))
    if epsilon >= privacy.epsilon:
        return privacy
    second = (
        f"({epsilon:g}, {delta:g})-differential privacy against anybody who sees only the "
        f"{least:,} shuffled reports, if the shuffler is trusted"
    )
    return replace(privacy, second=second)
