"""What paper 002 says about its tables and figures, held against the numbers.

A claim's text says how it is checked, and its detail has every number behind it: accuracies with
their standard errors over seeds, rates, and epsilon beside each noise multiplier z. Claims marked
(ours) are about what sfumato does beyond the paper. Epsilon here is of Poisson cohorts by Rényi
bounds (`accounting.epsilon_of`); that of the paper's own setting is by privacy loss distributions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sfumato.reproduce import Claim
from sfumato.reproduce.learning.data import Printed
from sfumato.reproduce.learning.runs import NONE, Found, Method, Runs, paper_epsilon, shown

ERRORS = (0.25, 0.1, 0.05, 0.01)  # c of Adapt Norm
HEURISTIC = 0.1  # the c that the paper takes everywhere else
VIABLE = tuple(error for error in ERRORS if error <= HEURISTIC)
OURS = Method("ours", 0.1)
PAPERS = Method("adapt_norm", HEURISTIC)
STAGED = Method("two_stage", HEURISTIC)
FAR = 1.2  # times the accuracy of guessing
TIMES = 2.0  # rate of ours by that of Adapt Norm
ORDERS = 10.0  # "orders of magnitude" is at least this factor
ROUGHLY = 2.0  # a factor that "roughly" allows


@dataclass(frozen=True, slots=True, kw_only=True)
class Slack:
    """How much accuracy a method may lose and still count as equally accurate."""

    share: float  # of the other's accuracy
    errors: float  # or so many standard errors of the difference, if that is more

    def allows(self, found: Found, other: Found) -> bool:
        chance = self.errors * math.hypot(found.stderr, other.stderr)
        return other.accuracy - found.accuracy <= max(self.share * other.accuracy, chance)

    def __str__(self) -> str:
        chance = f" or {self.errors:g} standard errors" if self.errors else ""
        return f"{self.share:.0%}{chance}"


def table(number: int, runs: Runs, printed: Printed, slack: Slack) -> list[Claim]:
    """The claims about one of tables 1 to 3."""
    name = f"table {number}, {runs.workload.name}"
    claims = [
        _learns(name, runs),
        _rises_with_noise(name, runs),
        _rises_with_error(name, runs),
        _as_accurate(name, runs, slack),
        _above_two_stage(name, runs, HEURISTIC, slack),
        _two_stage_bound(name, runs),
        _below_genie(name, runs),
        _ours(name, runs, slack),
    ]
    if printed.said_epsilon is not None:
        claims.append(_epsilon_as_said(number, printed))
    if runs.parameters == printed.parameters:
        claims.append(_near_printed(name, runs, printed))
    return claims


def figure_1(every: Sequence[Runs]) -> list[Claim]:
    """Best fixed rates by task and noise."""
    shared = [z for z in every[0].multipliers if all(z in runs.multipliers for runs in every)]
    claims = []
    for z in shared:
        best = [max(runs.genie(z).value, 1.0) for runs in every]
        claims.append(
            Claim(
                text=f"figure 1, z = {z:g}: the best fixed rate differs by a factor of "
                f"{ORDERS:g} or more between tasks",
                holds=max(best) >= ORDERS * min(best),
                detail="; ".join(
                    f"{runs.workload.name} ({_epsilon(runs, z)}): {_genie(runs, z)}"
                    for runs in every
                ),
            )
        )
    return claims + [_never_falls(runs) for runs in every]


def _never_falls(runs: Runs) -> Claim:
    best = [max(runs.genie(z).value, 1.0) for z in runs.multipliers]
    return Claim(
        text=f"figure 1, {runs.workload.name}: the best fixed rate does not fall as noise grows",
        holds=best == sorted(best),
        detail=_by_noise(runs, lambda z: _genie(runs, z)),
    )


def figure_2(every: Sequence[Runs], slack: Slack) -> list[Claim]:
    """Accuracy and rate of the adaptive methods over c."""
    claims: list[Claim] = []
    for runs in every:
        name = f"figure 2, {runs.workload.name}"
        claims += [_above_two_stage(name, runs, c, slack) for c in ERRORS]
        claims += [_two_stage_bound(name, runs), _below_genie(name, runs)]
        claims.append(_ours(name, runs, slack))
    return claims


def _learns(name: str, runs: Runs) -> Claim:
    """Without it, what is said of accuracies says nothing."""
    return Claim(
        text=f"{name}: without compression the model is far better than guessing (by a fifth)",
        holds=all(runs.found[z, NONE].accuracy >= FAR * runs.guessing for z in runs.multipliers),
        detail=f"guessing {runs.guessing:.4f}; "
        + _by_noise(runs, lambda z: f"{runs.found[z, NONE].accuracy:.4f}"),
    )


def _rises_with_noise(name: str, runs: Runs) -> Claim:
    rates = {c: [runs.found[z, _norm(c)].rate for z in runs.multipliers] for c in ERRORS}
    return Claim(
        text=f"{name}: Adapt Norm's rate rises with the noise at every c",
        holds=all(values == sorted(values) and values[-1] > values[0] for values in rates.values()),
        detail="; ".join(
            f"c = {c:g}: "
            + ", ".join(
                f"{rate:.3g} at z = {z:g} ({_epsilon(runs, z)})"
                for z, rate in zip(runs.multipliers, values, strict=True)
            )
            for c, values in rates.items()
        ),
    )


def _rises_with_error(name: str, runs: Runs) -> Claim:
    upwards = sorted(ERRORS)
    rates = {z: [runs.found[z, _norm(c)].rate for c in upwards] for z in runs.multipliers}
    return Claim(
        text=f"{name}: Adapt Norm's rate rises with c at every z",
        holds=all(values == sorted(values) and values[-1] > values[0] for values in rates.values()),
        detail=_by_noise(
            runs,
            lambda z: ", ".join(
                f"{rate:.3g} at c = {c:g}" for c, rate in zip(upwards, rates[z], strict=True)
            ),
        ),
    )


def _as_accurate(name: str, runs: Runs, slack: Slack) -> Claim:
    tried = [(z, _norm(c)) for z in runs.multipliers for c in VIABLE]
    return Claim(
        text=f"{name}: Adapt Norm at c of {HEURISTIC:g} or less is within {slack} of the accuracy "
        "without compression",
        holds=all(slack.allows(runs.found[key], runs.found[key[0], NONE]) for key in tried),
        detail=_by_noise(
            runs,
            lambda z: (
                f"none {_accuracy(runs.found[z, NONE])}, "
                + ", ".join(f"c = {c:g}: {_accuracy(runs.found[z, _norm(c)])}" for c in ERRORS)
            ),
        ),
    )


def _above_two_stage(name: str, runs: Runs, error: float, slack: Slack) -> Claim:
    norm = {z: runs.found[z, _norm(error)] for z in runs.multipliers}
    staged = {z: runs.found[z, Method("two_stage", error)] for z in runs.multipliers}
    return Claim(
        text=f"{name}: Adapt Norm's rate is above Two Stage's at c = {error:g}, and its accuracy "
        f"is within {slack}",
        holds=all(
            norm[z].rate > staged[z].rate and slack.allows(norm[z], staged[z])
            for z in runs.multipliers
        ),
        detail=_by_noise(
            runs, lambda z: f"Adapt Norm {_both(norm[z])}, Two Stage {_both(staged[z])}"
        ),
    )


def _two_stage_bound(name: str, runs: Runs) -> Claim:
    task = runs.workload
    most = task.rounds / task.warm_up
    staged = {key: found for key, found in runs.found.items() if key[1].kind == "two_stage"}
    return Claim(
        text=f"{name}: Two Stage's rate is at most rounds by warm-up rounds, {task.rounds}/"
        f"{task.warm_up} = {most:g}",
        holds=all(found.rate <= most for found in staged.values()),
        detail="; ".join(f"z = {z:g}, {method}: {f.rate:.3g}" for (z, method), f in staged.items()),
    )


def _below_genie(name: str, runs: Runs) -> Claim:
    return Claim(
        text=f"{name}: the best fixed rate within 1%, found by trying all, is above Adapt Norm's "
        f"at c = {HEURISTIC:g}",
        holds=all(
            runs.found[z, runs.genie(z)].rate > runs.found[z, PAPERS].rate for z in runs.multipliers
        ),
        detail=_by_noise(
            runs, lambda z: f"Genie {_genie(runs, z)}, Adapt Norm {_both(runs.found[z, PAPERS])}"
        ),
    )


def _ours(name: str, runs: Runs, slack: Slack) -> Claim:
    return Claim(
        text=f"(ours) {name}: at least {TIMES:g} times the rate of Adapt Norm at c = "
        f"{HEURISTIC:g}, and within {slack} of the accuracy without compression",
        holds=all(
            runs.found[z, OURS].rate >= TIMES * runs.found[z, PAPERS].rate
            and slack.allows(runs.found[z, OURS], runs.found[z, NONE])
            for z in runs.multipliers
        ),
        detail=_by_noise(
            runs,
            lambda z: (
                f"ours {_both(runs.found[z, OURS])}, Adapt Norm "
                f"{_both(runs.found[z, PAPERS])}: "
                f"{runs.found[z, OURS].rate / runs.found[z, PAPERS].rate:.2g} times; none "
                f"{_accuracy(runs.found[z, NONE])}"
            ),
        ),
    )


def _epsilon_as_said(number: int, printed: Printed) -> Claim:
    assert printed.said_epsilon is not None  # as the caller saw
    epsilons = {z: paper_epsilon(printed, z) for z in printed.multipliers}
    last = epsilons[printed.multipliers[-1]]
    return Claim(
        text=f"table {number}: the paper's highest noise multiplier is roughly epsilon "
        f"{printed.said_epsilon:g}, to a factor of {ROUGHLY:g}, at delta = 1/{printed.clients:,}",
        holds=printed.said_epsilon / ROUGHLY <= last <= printed.said_epsilon * ROUGHLY,
        detail="with Poisson cohorts "
        + ", ".join(f"z = {z:g} is epsilon {shown(epsilon)}" for z, epsilon in epsilons.items())
        + f"; {printed.cohort:,} of {printed.clients:,} clients, {printed.rounds:,} rounds",
    )


def _near_printed(name: str, runs: Runs, printed: Printed) -> Claim:
    """Only for the paper's own model."""
    shared = [z for z in runs.multipliers if z in printed.multipliers]
    rates = {
        z: (
            runs.found[z, PAPERS].rate,
            printed.rate[f"{HEURISTIC:g}"][printed.multipliers.index(z)],
        )
        for z in shared
    }
    return Claim(
        text=f"{name}: Adapt Norm's rate at c = {HEURISTIC:g} is the paper's, to a factor of "
        f"{ROUGHLY:g}",
        holds=bool(shared)
        and all(paper / ROUGHLY <= here <= paper * ROUGHLY for here, paper in rates.values()),
        detail=", ".join(
            f"z = {z:g}: {here:.3g}, the paper's {paper:g}" for z, (here, paper) in rates.items()
        ),
    )


def _norm(error: float) -> Method:
    return Method("adapt_norm", error)


def _by_noise(runs: Runs, say: Callable[[float], str]) -> str:
    return "; ".join(f"z = {z:g} ({_epsilon(runs, z)}): {say(z)}" for z in runs.multipliers)


def _epsilon(runs: Runs, multiplier: float) -> str:
    return f"epsilon {shown(runs.epsilons[multiplier])}"


def _accuracy(found: Found) -> str:
    return f"{found.accuracy:.4f} ± {found.stderr:.4f}"


def _both(found: Found) -> str:
    return f"{_accuracy(found)} / {found.rate:.3g}"


def _genie(runs: Runs, multiplier: float) -> str:
    return _both(runs.found[multiplier, runs.genie(multiplier)])
