"""Common parts of the privacy statements of several questions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from sfumato.flow.release import Influence, Privacy
from sfumato.flow.secure_sum import SecureSum
from sfumato.flow.task import Task
from sfumato.privacy.shuffling import shuffled_epsilon
from sfumato.study import Study

ZERO_OUT = "zero-out: one device's {} zero; the number of devices is public"
ZERO_ITEMS = "zero-out: one device's items become none; the number of devices is public"
DROPOUTS = "devices that drop out do not weaken the guarantee, and their number is public"
TIME = "the running time, which is part of the cost"
SEEDED_NOISE = "the noise of this run comes from a seed; anyone who knows the seed can remove it"
SEES_TABLES = "the collector sees each device's table, adds the noise and is trusted with both"
SEES_ITEMS = "the collector sees each device's items, adds the noise and is trusted with both"
SEES_ALL = "the collector sees each device's table, and everybody sees the exact sums"
SEES_ALL_ITEMS = "the collector sees each device's items, and everybody sees the exact sums"
COUNT = "a count over the devices that answer"


def round_up(number: float) -> float:
    """A number above 0 rounded up to three digits.

    >>> round_up(0.15741), round_up(5.9999), round_up(18.401), round_up(2.0001e-9)
    (0.158, 6.0, 18.5, 2.01e-09)
    """
    digits = 2 - math.floor(math.log10(number))
    unit = 10.0**-digits
    return round(math.ceil(number / unit - 1e-9) * unit, max(digits, 0))


def masked_influence(of: str) -> Influence:
    """The influence of a device whose tables are masked."""
    return Influence(of=of, most=None, note="to any value, since masked tables cannot be checked")


def over_all_devices(privacy: Privacy, scale: float) -> Privacy:
    """The same privacy for counts over all devices asked, of which one in `scale` answered."""
    influence = privacy.influence
    if influence is None or influence.most is None:
        return privacy
    most = round_up(scale * influence.most)
    return replace(
        privacy, influence=replace(influence, of="a count over all devices asked", most=most)
    )


def device_promise(
    study: Study,
    *,
    exact: str = "sums",
    neighbours: str,
    mechanism: str,
    sees: str,
    secure: SecureSum | None = None,
    assumptions: tuple[str, ...] = (),
    influence: Influence,
) -> Privacy:
    """The statement of a study with a guarantee for each device; without an epsilon, exact numbers
    are released, and there is none. `mechanism` and `assumptions` are those of the guarantee."""
    if study.epsilon is None:
        delta, guarantee = 0.0, f"no differential privacy: exact {exact} are released"
        mechanism, assumptions = "none", ()
    else:
        delta, assumptions = study.delta, (*assumptions, DROPOUTS)
        guarantee = f"({study.epsilon:g}, {delta:g})-differential privacy for each device"
    return Privacy(
        epsilon=study.epsilon,
        delta=delta,
        guarantee=guarantee,
        unit="device",
        neighbours=neighbours,
        mechanism=mechanism,
        trust=study.trust,
        sees=sees,
        assumptions=(*collusion_assumptions(secure), *assumptions),
        influence=influence,
    )


def sum_visibility(task: Task) -> str:
    """What the collector sees in a masked round."""
    return (
        f"the collector sees only sums over at least {task.min_count:,} of "
        f"{task.max_count - 1:,} devices, and no device's table"
    )


def collusion_assumptions(secure: SecureSum | None) -> tuple[str, ...]:
    """The assumptions about the collector and the devices of a masked round."""
    if secure is None:
        return ()
    share = f"{100 * secure.corrupt:.3g}% of the devices of each round"
    collusion = (
        f"the collector follows the protocol, and at most {share} collude with it"
        if secure.mode == "semi_honest"
        else f"at most {share} collude with the collector; it and they may send anything"
    )
    return (
        collusion,
        "devices refuse a round with too few survivors, so the honest survivors' shares of the "
        "noise are enough",
    )


def local_promise(algorithm: str, epsilon: float, per_device: int, influence: Influence) -> Privacy:
    """The guarantee of local randomisation; a release adds that of shuffling (`with_shuffling`)."""
    day = (
        f"a device sends at most {per_device} reports per day, with a total epsilon of "
        f"{per_device * epsilon:g}, and the epsilons of its days add up"
        if per_device > 1
        else "a device sends at most one report per day, and the epsilons of its days add up"
    )
    return Privacy(
        epsilon=epsilon,
        delta=0.0,
        guarantee=f"{epsilon:g}-local differential privacy for each report",
        unit="report",
        neighbours='one report\'s value is replaced by any other value, "none" included',
        mechanism=f"{algorithm}: each device randomises its own report",
        trust="local",
        sees="nobody sees a value, and everybody may see the reports",
        assumptions=(day, "the device's random number generator is sound"),
        not_covered=("which devices take part, and on which days",),
        influence=influence,
    )


def with_shuffling(
    privacy: Privacy, reports: Sequence[int], delta: float, per_device: int
) -> Privacy:
    """The same privacy with the guarantee of shuffling, given the number of reports per round.

    Fewer reports hide a device less, so it is computed from the reports that were counted, and the
    round with the fewest decides. It holds for one report per device. A delta above one over their
    number would promise nothing, so a tenth of that takes its place.
    """
    least = min(reports, default=0)
    if privacy.epsilon is None or delta == 0 or per_device > 1 or least < 1:
        return privacy
    delta = delta if delta <= 1 / least else 0.1 / least
    epsilon = round_up(shuffled_epsilon(privacy.epsilon, least, delta))
    if epsilon >= privacy.epsilon:
        return privacy
    second = (
        f"({epsilon:g}, {delta:g})-differential privacy against anyone who sees only the "
        f"{least:,} shuffled reports, if the shuffler is trusted"
    )
    return replace(privacy, second=second)
