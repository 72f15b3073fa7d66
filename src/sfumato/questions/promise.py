"""What the promises of several questions have in common: their sentences."""

from __future__ import annotations

import math

from sfumato.flow.secure_sum import SecureSum
from sfumato.flow.task import Task

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
