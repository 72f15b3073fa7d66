"""The ledger refuses before anything is spent, and its entries are permanent."""

from __future__ import annotations

import itertools
import math
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest

from marks import quick
from sfumato.errors import BudgetError, SpecError
from sfumato.privacy import (
    AdditiveLoss,
    Budget,
    Charge,
    Ledger,
    Loss,
    NoPrivacy,
    PlannedLoss,
    calibrate,
    epsilon_of,
)
from sfumato.privacy.accounting import ApproximateLoss, filter_epsilon
from sfumato.privacy.samplers import log_mass
from sfumato.spec import from_json, to_json

F64 = npt.NDArray[np.float64]

DELTA = 1e-6
ONE = Budget(epsilon=1.0, delta=DELTA)
LOSS = AdditiveLoss(noise="skellam", scale=9.446669, l1=5.0, l2=math.sqrt(5), unit_cells=5)
"""Costs 0.9953 of a budget of one."""


def half() -> AdditiveLoss:
    """Two of these fit into a budget of one, three do not."""
    return AdditiveLoss(noise="skellam", scale=15.0, l1=5.0, l2=math.sqrt(5), unit_cells=5)


def laplace(cost: float) -> AdditiveLoss:
    return AdditiveLoss(noise="laplace", scale=1 / cost, l1=1.0, l2=1.0, unit_cells=1)


def filtered(*losses: Loss, epsilon: float = 1.0) -> float:
    """What a filter counts of losses to one cohort each, of campaigns that may share devices."""
    return filter_epsilon([[[loss]] for loss in losses], DELTA, epsilon)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


# Composition


def test_charges_to_one_cohort_compose() -> None:
    ledger = Ledger(ONE)
    ledger.charge(campaign="words", cohort="a", task="1", loss=half())
    ledger.charge(campaign="words", cohort="a", task="2", loss=half())
    assert ledger.spent() == filtered(half(), half())
    with pytest.raises(BudgetError):
        ledger.charge(campaign="words", cohort="a", task="3", loss=half())


def test_charges_to_disjoint_cohorts_do_not_add_up() -> None:
    ledger = Ledger(ONE)
    for cohort in ("a", "b", "c"):
        ledger.charge(campaign="words", cohort=cohort, task="1", loss=LOSS)
    assert ledger.spent() == epsilon_of([LOSS], DELTA)


def test_what_is_spent_is_the_most_that_any_cohort_has_spent() -> None:
    ledger = Ledger(Budget(epsilon=10.0, delta=DELTA))
    ledger.charge(campaign="words", cohort="a", task="1", loss=half())
    ledger.charge(campaign="words", cohort="b", task="1", loss=LOSS)
    ledger.charge(campaign="words", cohort="b", task="2", loss=LOSS)
    assert ledger.spent() == filtered(LOSS, LOSS, epsilon=10.0)


def test_campaigns_may_have_asked_the_same_devices_whatever_their_cohorts_are_called() -> None:
    ledger = Ledger(ONE)
    ledger.charge(campaign="words", cohort="every round", task="1", loss=half())
    ledger.charge(campaign="emoji", cohort="round 1", task="2", loss=half())
    assert ledger.spent() == filtered(half(), half())
    ledger.charge(campaign="emoji", cohort="round 2", task="3", loss=half())  # not those of round 1
    assert ledger.spent() == filtered(half(), half())
    with pytest.raises(BudgetError):
        ledger.charge(campaign="health", cohort="round 1", task="4", loss=half())


def test_a_device_is_taken_to_have_been_in_the_costliest_cohort_of_each_campaign() -> None:
    ledger = Ledger(Budget(epsilon=10.0, delta=DELTA))
    for campaign in ("words", "emoji"):
        ledger.charge(campaign=campaign, cohort="pilot", task="1", loss=half())
        ledger.charge(campaign=campaign, cohort="rest", task="2", loss=LOSS)
    assert ledger.spent() == filtered(LOSS, LOSS, epsilon=10.0)


def test_one_task_charged_twice_is_paid_twice() -> None:
    ledger = Ledger(ONE)
    ledger.charge(campaign="words", cohort="a", task="1", loss=LOSS)
    with pytest.raises(BudgetError):
        ledger.charge(campaign="words", cohort="a", task="1", loss=LOSS)


def test_losses_of_different_scales_are_charged_to_one_cohort() -> None:
    ledger = Ledger(Budget(epsilon=2.0, delta=DELTA))
    wide = AdditiveLoss(noise="gaussian", scale=100.0, l1=5.0, l2=math.sqrt(5), unit_cells=5)
    ledger.charge(campaign="words", cohort="a", task="1", loss=LOSS)
    ledger.charge(campaign="words", cohort="a", task="2", loss=wide)
    assert len(ledger.entries()) == 2


# Refusals


def test_a_refused_charge_leaves_nothing(path: Path) -> None:
    ledger = Ledger(ONE, path)
    ledger.charge(campaign="words", cohort="a", task="1", loss=LOSS)
    before = ledger.entries()
    with pytest.raises(BudgetError, match=r"allows epsilon 1 at delta 1e-06 and has spent 0\.9953"):
        ledger.charge(campaign="words", cohort="a", task="2", loss=LOSS)
    assert ledger.entries() == before
    assert Ledger(path=path).entries() == before
    ledger.charge(campaign="words", cohort="b", task="2", loss=LOSS)  # and the ledger still works


def test_a_refusal_says_what_would_have_been_spent_and_what_to_do() -> None:
    ledger = Ledger(Budget(epsilon=0.5, delta=DELTA))
    with pytest.raises(
        BudgetError, match=r"needs a budget of epsilon 0\.9953 is refused"
    ) as caught:
        ledger.charge(campaign="words", cohort="a", task="1", loss=LOSS)
    assert caught.value.hint is not None


def test_no_privacy_is_refused_by_every_finite_budget() -> None:
    with pytest.raises(BudgetError, match="promises nothing at a delta of 1e-06 is refused"):
        Ledger(Budget(epsilon=1e6, delta=DELTA)).charge(
            campaign="words", cohort="a", task="1", loss=NoPrivacy()
        )


def test_without_a_limit_everything_is_recorded_and_nothing_refused() -> None:
    ledger = Ledger(Budget(epsilon=None, delta=DELTA))
    ledger.charge(campaign="words", cohort="a", task="1", loss=LOSS)
    ledger.charge(campaign="words", cohort="a", task="2", loss=NoPrivacy())
    assert [entry.loss for entry in ledger.entries()] == [LOSS, NoPrivacy()]
    assert ledger.spent() == math.inf


def test_a_budget_met_exactly_is_met() -> None:
    laplace = AdditiveLoss(noise="laplace", scale=5.0, l1=5.0, l2=math.sqrt(5), unit_cells=5)
    ledger = Ledger(Budget(epsilon=1.0, delta=0.0))
    ledger.charge(campaign="words", cohort="a", task="1", loss=laplace)
    assert ledger.spent() == 1.0


@pytest.mark.parametrize("wrong", [{"epsilon": 0.0}, {"epsilon": -1.0}, {"delta": 1.0}])
def test_impossible_budgets_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(SpecError):
        Budget(**{"epsilon": 1.0, "delta": DELTA, **wrong})


def test_a_budget_is_a_spec() -> None:
    for budget in (ONE, Budget(epsilon=None, delta=0.0)):
        assert from_json(to_json(budget)) == budget


# The file


def test_a_ledger_is_read_back_from_its_file(path: Path) -> None:
    ledger = Ledger(ONE, path)
    ledger.charge(campaign="words", cohort="a", task="1", loss=LOSS)
    ledger.close()
    again = Ledger(path=path)
    assert again.budget == ONE
    assert [(entry.cohort, entry.task, entry.loss) for entry in again.entries()] == [
        ("a", "1", LOSS)
    ]
    assert again.spent() == epsilon_of([LOSS], DELTA)


def test_another_budget_is_refused(path: Path) -> None:
    Ledger(ONE, path)
    with pytest.raises(BudgetError, match="was made for epsilon 1 at delta 1e-06; got epsilon 2"):
        Ledger(Budget(epsilon=2.0, delta=DELTA), path)
    assert Ledger(path=path).budget == ONE


def test_there_is_no_ledger_without_a_budget(path: Path) -> None:
    with pytest.raises(BudgetError, match="there is no ledger"):
        Ledger(path=path)
    assert not path.exists()
    Ledger(ONE, path)  # and one can still be made there


def test_a_ledger_that_could_not_be_made_leaves_no_file(path: Path) -> None:
    with pytest.raises(SpecError):
        Ledger(Budget(epsilon=math.inf, delta=DELTA), path)
    assert not path.exists()


def test_a_path_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    for wrong in (tmp_path / "missing" / "ledger.db", tmp_path):
        with pytest.raises(BudgetError):
            Ledger(ONE, wrong)


@pytest.mark.parametrize("content", [b"", b"hello " * 1000, b"SQLite format 3\0" + bytes(4096)])
def test_a_file_that_is_no_ledger_is_refused_and_left_alone(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(BudgetError, match="cannot be used"):
        Ledger(path=path)
    assert path.read_bytes() == content


def test_a_cut_file_is_refused(path: Path) -> None:
    ledger = Ledger(ONE, path)
    for number in range(40):
        ledger.charge(campaign="words", cohort=f"{number}", task="1", loss=LOSS)
    ledger.close()
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BudgetError):
        Ledger(path=path).charge(campaign="words", cohort="a", task="1", loss=LOSS)


def test_an_entry_that_cannot_be_read_is_refused(path: Path) -> None:
    """A row that another program has added must not make an error that looks like a caller's."""
    Ledger(ONE, path).close()
    with sqlite3.connect(path) as other:
        other.execute(
            "INSERT INTO entry (campaign, cohort, task, loss) VALUES ('w', 'a', '1', '{}')"
        )
    with pytest.raises(BudgetError):
        Ledger(path=path).charge(campaign="words", cohort="a", task="2", loss=LOSS)


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE entry SET cohort = 'nobody'",
        "DELETE FROM entry",
        "UPDATE budget SET spec = ''",
        "DELETE FROM budget",
        "INSERT OR REPLACE INTO entry SELECT number, campaign, 'nobody', task, loss FROM entry",
        "INSERT OR REPLACE INTO budget SELECT number, '' FROM budget",
    ],
)
def test_entries_and_the_budget_cannot_be_changed_from_outside(path: Path, change: str) -> None:
    ledger = Ledger(ONE, path)
    ledger.charge(campaign="words", cohort="a", task="1", loss=LOSS)
    other = sqlite3.connect(path)
    with pytest.raises(sqlite3.IntegrityError), other:
        other.execute(change)
    other.close()
    assert [entry.cohort for entry in ledger.entries()] == ["a"]
    assert Ledger(path=path).budget == ONE


def test_a_charge_waits_for_the_disk_and_its_directory(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deleting the journal commits: the directory must be synced, too (EXTRA is 3), unless the
    journal stays (a write-ahead log with FULL, 2)."""
    connect, connections = sqlite3.connect, list[sqlite3.Connection]()

    def recording_connect(*args: Any, **options: Any) -> sqlite3.Connection:
        connections.append(connect(*args, **options))
        return connections[-1]

    monkeypatch.setattr(sqlite3, "connect", recording_connect)
    ledger = Ledger(ONE, path)
    (connection,) = connections
    (level,) = connection.execute("PRAGMA synchronous").fetchone()
    (journal,) = connection.execute("PRAGMA journal_mode").fetchone()
    assert level == 3 or (level == 2 and journal == "wal")
    ledger.close()


# Crashes and races


def test_a_ledger_that_another_process_has_just_made_is_used(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes start at once; both look, and neither sees a file."""
    Ledger(ONE, path).charge(campaign="words", cohort="a", task="1", loss=LOSS)
    monkeypatch.setattr(Path, "exists", lambda _: False)
    assert len(Ledger(ONE, path).entries()) == 1


def test_two_openings_of_one_file_see_each_other(path: Path) -> None:
    first, second = Ledger(ONE, path), Ledger(path=path)
    first.charge(campaign="words", cohort="a", task="1", loss=LOSS)
    with pytest.raises(BudgetError):
        second.charge(campaign="words", cohort="a", task="2", loss=LOSS)


def table_loss(length: float) -> AdditiveLoss:
    """The loss of a table of real numbers, finely rounded."""
    return AdditiveLoss(noise="skellam", scale=length, l1=10 * length, l2=length, unit_cells=0)


def test_many_campaigns_of_nearly_equal_cohorts_cost_little_more_than_the_costliest_of_each() -> (
    None
):
    """Ten campaigns of three unlike cohorts, as a training has: 3^10 ways to have been asked."""
    ledger = Ledger(Budget(epsilon=None, delta=DELTA))
    losses = [table_loss(1000.0 + 100 * number) for number in range(30)]
    for number, loss in enumerate(losses):
        campaign = f"pass {number // 3}"
        ledger.charge(campaign=campaign, cohort=f"round {number}", task=str(number), loss=loss)
    costliest = epsilon_of(losses[::3], DELTA)  # the coarsest of each
    assert costliest <= ledger.spent() <= 1.001 * costliest
    assert epsilon_of(losses, DELTA) > 1.5 * costliest  # what all of them together would be


@pytest.mark.parametrize("limit", [None, 1.0, 20.0])
@pytest.mark.parametrize(
    "choices",
    [
        [[[table_loss(100.0)], [table_loss(50.0)]], [[half()], [LOSS, half()]]],
        [[[ApproximateLoss(epsilon=0.5, delta=2e-7)], [half()]], [[table_loss(1e4)]]],
        [[[half()], [table_loss(1000.0)]], [[laplace(1 / 9)], []]],
    ],
)  # fmt: skip
def test_no_cohort_costs_more_than_the_costliest_of_each_campaign(
    choices: list[list[list[Loss]]], limit: float | None
) -> None:
    bound = filter_epsilon(choices, DELTA, limit)
    for one, other in itertools.product(*choices):
        assert bound >= filter_epsilon([[one], [other]], DELTA, limit)


def test_what_has_no_bound_is_known() -> None:
    assert filter_epsilon([[[LOSS], [NoPrivacy()]]], DELTA, 1.0) == math.inf
    spent = ApproximateLoss(epsilon=0.1, delta=6e-7)
    for limit in (None, 1.0):
        assert filter_epsilon([[[spent]], [[spent], [LOSS]]], DELTA, limit) == math.inf


# Studies that earlier releases choose


FIRST = AdditiveLoss(noise="gaussian", scale=6.0, l1=1.0, l2=1.0, unit_cells=1)


def gaussian(cost: float) -> AdditiveLoss:
    return AdditiveLoss(noise="gaussian", scale=1 / cost, l1=1.0, l2=1.0, unit_cells=1)


def a_list(delta: float) -> Callable[[float], ApproximateLoss]:
    return lambda cost: ApproximateLoss(epsilon=cost, delta=delta)


def law(loss: Loss) -> tuple[F64, F64]:
    """The probabilities of all outcomes, and the privacy loss of each: exact, except that the mass
    beyond the table, below 1e-15, is assumed to reveal everything."""
    if isinstance(loss, ApproximateLoss):  # the worst mechanism that is (epsilon, delta)-DP
        truth, lost = 1 / (1 + math.exp(-loss.epsilon)), loss.delta
        chances = np.array([lost, (1 - lost) * truth, (1 - lost) * (1 - truth)])
        return chances, np.array([math.inf, loss.epsilon, -loss.epsilon])
    assert isinstance(loss, AdditiveLoss)
    _, logs = log_mass(loss.noise, loss.scale)
    return np.exp(logs), np.append(math.inf, logs[1:] - logs[:-1])


def deltas(loss: Loss, epsilons: F64) -> F64:
    """The exact delta of one release at each epsilon."""
    chances, losses = law(loss)
    excess = np.maximum(0.0, -np.expm1(np.minimum(epsilons[:, None] - losses, 0.0)))
    return np.asarray(excess @ chances)


def adaptive_delta(first: Loss, seconds: Sequence[Loss], epsilon: float) -> float:
    """The exact delta of a release after which an analyst takes, for whatever it showed, the second
    study that is worst for the device, or none."""
    chances, losses = law(first)
    left = epsilon - losses
    worst = np.maximum(0.0, -np.expm1(np.minimum(left, 0.0)))
    for second in seconds:
        worst = np.maximum(worst, deltas(second, left))
    return float(worst @ chances)


def costliest(make: Callable[[float], Loss], is_allowed: Callable[[Loss], bool]) -> Loss:
    """The costliest second study of a kind that is allowed."""
    low, high = 1e-3, 1.0
    assert is_allowed(make(low))
    assert not is_allowed(make(high))
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if is_allowed(make(middle)) else (low, middle)
    return make(low)


def allowed_after(first: Loss) -> Callable[[Loss], bool]:
    """Whether a ledger with a budget of one allows a second study after this one."""

    def is_allowed(second: Loss) -> bool:
        ledger = Ledger(ONE)
        ledger.charge(campaign="first", cohort="all", task="1", loss=first)
        try:
            ledger.charge(campaign="second", cohort="all", task="2", loss=second)
        except BudgetError:
            return False
        return True

    return is_allowed


@pytest.mark.parametrize("scale", quick([5.0, 6.0, 10.0], 6.0))
def test_a_first_release_that_chooses_the_second_study_stays_within_delta(scale: float) -> None:
    """The audit's example, with every kind of study that may come second: exact numbers."""
    first = replace(FIRST, scale=scale)
    kinds = (gaussian, laplace, a_list(1e-7), a_list(2.5e-7))
    seconds = [costliest(kind, allowed_after(first)) for kind in kinds]
    assert adaptive_delta(first, seconds, 1.0) <= DELTA
    assert not allowed_after(first)(ApproximateLoss(epsilon=1e-3, delta=3e-7))


@pytest.mark.slow
def test_a_list_fixed_in_advance_would_not_have_stayed_within_it() -> None:
    """The negative control: each second study fits when it was fixed in advance, and choosing
    among them by the first release does not. This was the ledger's rule."""

    def fits(second: Loss) -> bool:
        return epsilon_of([FIRST, second], DELTA) <= 1.0

    seconds = [costliest(kind, fits) for kind in (gaussian, laplace, a_list(9e-7))]
    for second in seconds:
        assert adaptive_delta(FIRST, [second], 1.0) < 1.3 * DELTA  # with the choice to stop
        assert not allowed_after(FIRST)(second)
    assert adaptive_delta(FIRST, seconds, 1.0) > 2.5 * DELTA


@pytest.mark.parametrize("noise", ["gaussian", "skellam"])
def test_a_release_that_takes_the_whole_budget_is_allowed_and_is_the_last(
    noise: Literal["gaussian", "skellam"],
) -> None:
    norms = {"l1": 5.0, "l2": math.sqrt(5), "unit_cells": 5}
    scale = calibrate(noise, **norms, epsilon=1.0, delta=DELTA)
    loss = AdditiveLoss(noise=noise, scale=scale, **norms)  # type: ignore[arg-type]  # as named
    ledger = Ledger(ONE)
    ledger.charge(campaign="words", cohort="a", task="1", loss=loss)
    ledger.charge(campaign="words", cohort="b", task="2", loss=loss)  # other devices
    assert ledger.spent() == epsilon_of([loss], DELTA) > 0.99
    for campaign in ("words", "emoji"):
        with pytest.raises(BudgetError):
            ledger.charge(campaign=campaign, cohort="a", task="3", loss=laplace(1e-3))


def test_pure_losses_add_up_whatever_delta_is() -> None:
    ledger = Ledger(ONE)
    for number in range(5):
        ledger.charge(campaign=str(number), cohort="a", task="1", loss=laplace(0.2))
    assert ledger.spent() == pytest.approx(1.0)
    with pytest.raises(BudgetError):
        ledger.charge(campaign="one more", cohort="a", task="1", loss=laplace(0.01))


def test_lists_share_a_quarter_of_delta() -> None:
    ledger = Ledger(ONE)
    for number in range(2):
        ledger.charge(campaign=str(number), cohort="a", task="1", loss=a_list(1e-7)(0.1))
    with pytest.raises(BudgetError, match=r"would bring the delta of lists to 3e-07") as caught:
        ledger.charge(campaign="one more", cohort="a", task="1", loss=a_list(1e-7)(0.1))
    assert caught.value.hint == (
        "besides other studies, lists may take 2.5e-07 of this budget's delta in all"
    )


# Plans


def planned(loss: Loss, *losses: Loss, plan: str = "search", times: int = 1) -> PlannedLoss:
    return PlannedLoss(loss=loss, plan=plan, losses=losses, times=times)


def levels(count: int) -> AdditiveLoss:
    """This many losses, fixed in advance, take a whole budget of one and fit exactly."""
    scale = calibrate(
        "gaussian", l1=float(count), l2=math.sqrt(count), unit_cells=count, epsilon=1.0, delta=DELTA
    )
    return gaussian(1 / scale)


def charged(ledger: Ledger, *charges: tuple[str, str, Charge]) -> None:
    for number, (campaign, cohort, loss) in enumerate(charges):
        ledger.charge(campaign=campaign, cohort=cohort, task=str(number), loss=loss)


def test_a_plan_is_priced_exactly_and_covers_its_tasks() -> None:
    level = levels(4)
    part = planned(level, level, level, level, level)
    ledger = Ledger(ONE)
    for _ in range(4):
        ledger.charge(campaign="search", cohort="all", task="1", loss=part)
        assert ledger.spent() == epsilon_of([level] * 4, DELTA) > 0.99
    with pytest.raises(BudgetError):  # a fifth that was not planned
        ledger.charge(campaign="search", cohort="all", task="1", loss=part)
    assert len(ledger.entries()) == 4


def test_the_same_losses_charged_one_by_one_are_refused() -> None:
    """The negative control: they were not fixed in advance."""
    level = levels(4)
    with pytest.raises(BudgetError):
        charged(Ledger(ONE), *[("search", "all", level)] * 4)


def test_nothing_is_allowed_while_a_plan_that_takes_the_whole_budget_goes_on() -> None:
    level = levels(4)
    ledger = Ledger(ONE)
    charged(ledger, ("search", "all", planned(level, level, times=4)))
    with pytest.raises(BudgetError):  # though one level alone would leave space for it
        ledger.charge(campaign="emoji", cohort="all", task="1", loss=laplace(0.01))
    charged(Ledger(ONE), ("search", "all", level), ("emoji", "all", laplace(0.01)))


def test_a_plan_of_passes_covers_one_cohort_of_each() -> None:
    one = gaussian(0.1)
    part = planned(one, one, times=2)
    covered = [(f"pass {number}", f"round {round}", part) for number in (0, 1) for round in (0, 1)]
    ledger = Ledger(Budget(epsilon=2.0, delta=DELTA))
    charged(ledger, *covered)
    assert ledger.spent() == epsilon_of([one, one], DELTA)
    charged(ledger, ("pass 1", "round 0", part))  # a round that was lost, and held again
    assert ledger.spent() == filter_epsilon([[[one, one]], [[one]]], DELTA, 2.0)


def test_plans_of_other_names_or_sizes_are_charged_besides() -> None:
    one = gaussian(0.05)
    ledger = Ledger(Budget(epsilon=5.0, delta=DELTA))
    charged(ledger, *[("a", "all", planned(one, one, plan=name, times=2)) for name in "xxy"])
    charged(ledger, ("a", "all", planned(one, one, plan="x", times=3)))
    assert ledger.spent() == pytest.approx(filter_epsilon([[[one] * 7]], DELTA, 5.0))


def test_a_plan_covers_its_own_losses_only() -> None:
    with pytest.raises(SpecError, match="covers its own losses only"):
        planned(half(), LOSS)
    with pytest.raises(SpecError, match="times must be at least 1"):
        planned(LOSS, LOSS, times=0)


def test_a_planned_loss_is_read_back_from_its_file(path: Path) -> None:
    part = planned(half(), half(), LOSS, times=3)
    Ledger(Budget(epsilon=None, delta=DELTA), path).charge(
        campaign="search", cohort="all", task="1", loss=part
    )
    assert [entry.loss for entry in Ledger(path=path).entries()] == [part]


# Never more than basic composition

COMPOSED = list(itertools.product([1, 2, 5], [1.0, 4.0, 8.0]))
"""Cells of one device, and what one charge costs."""


@pytest.mark.parametrize("noise", ["gaussian", "skellam", "laplace"])
@pytest.mark.parametrize("cells_and_epsilon", quick(COMPOSED, (1, 4.0), (5, 1.0)), ids=str)
def test_without_a_limit_nothing_costs_more_than_basic_composition(
    noise: Literal["gaussian", "skellam", "laplace"], cells_and_epsilon: tuple[int, float]
) -> None:
    """Of studies that may share devices, with half of delta for each of two. Rényi bounds from the
    norms alone gave 47 for two charges of 4 in one cell. It is not too little either: the exact
    composition is rounded up by at most 5e-4 (docs/proofs/noise.md)."""
    cells, epsilon = cells_and_epsilon
    scale = calibrate(
        noise, l1=cells, l2=math.sqrt(cells), unit_cells=cells, epsilon=epsilon, delta=DELTA
    )
    loss = AdditiveLoss(
        noise=noise, scale=scale, l1=float(cells), l2=math.sqrt(cells), unit_cells=cells
    )
    basic = 2 * epsilon_of([loss], DELTA / 2)
    together = filter_epsilon([[[loss]], [[loss]]], DELTA, None)
    assert epsilon_of([loss], DELTA) < together <= basic * (1 + 1e-9)
    assert together >= epsilon_of([loss, loss], DELTA) - 5e-4


def test_without_a_limit_many_different_charges_cost_a_little_too_much() -> None:
    """Nine losses, which are one more than are composed exactly: by Rényi divergences."""
    losses = [
        AdditiveLoss(noise="gaussian", scale=4 + place / 10, l1=1.0, l2=1.0, unit_cells=1)
        for place in range(9)
    ]
    exact = epsilon_of(losses, DELTA)
    few = filter_epsilon([[[loss]] for loss in losses[:8]], DELTA, None)
    assert few == pytest.approx(epsilon_of(losses[:8], DELTA))
    assert exact < filter_epsilon([[[loss]] for loss in losses], DELTA, None) < 1.15 * exact


def test_without_a_limit_cohorts_of_different_costs_add_up_to_the_costliest() -> None:
    """Two campaigns, each with a cohort of little noise and one of much: basic composition."""
    little = AdditiveLoss(noise="skellam", scale=0.4, l1=1.0, l2=1.0, unit_cells=1)
    much = AdditiveLoss(noise="skellam", scale=4.0, l1=1.0, l2=1.0, unit_cells=1)
    campaign = [[much], [little]]
    spent = filter_epsilon([campaign, campaign], DELTA, None)
    assert epsilon_of([little, little], DELTA) <= spent
    assert spent <= 2 * epsilon_of([little], DELTA / 2) * (1 + 1e-9)


def test_a_filter_counts_coarse_noise_at_its_exact_divergences() -> None:
    """Three studies of epsilon 4 fit into 16, with noise of scale 1.2 in shares; by norms alone
    two of them were counted as more than 14."""
    scale = calibrate("skellam", l1=2, l2=math.sqrt(2), unit_cells=2, epsilon=4.0, delta=DELTA)
    loss = AdditiveLoss(noise="skellam", scale=scale, l1=2.0, l2=math.sqrt(2), unit_cells=2)
    assert filtered(loss, loss, loss, epsilon=16.0) < 16


def test_a_refusal_names_a_budget_that_would_be_enough_and_hardly_more() -> None:
    """Two studies of epsilon 2: basic composition is below 4.13. A filter for 2 counts more."""
    scale = calibrate("skellam", l1=5, l2=math.sqrt(5), unit_cells=5, epsilon=2.0, delta=DELTA)
    loss = AdditiveLoss(noise="skellam", scale=scale, l1=5.0, l2=math.sqrt(5), unit_cells=5)
    ledger = Ledger(Budget(epsilon=2.0, delta=DELTA))
    ledger.charge(campaign="one", cohort="all", task="1", loss=loss)
    with pytest.raises(BudgetError) as refused:
        ledger.charge(campaign="two", cohort="all", task="2", loss=loss)
    named = float(str(refused.value).split("a budget of epsilon ")[1].split()[0])
    assert named < 2 * epsilon_of([loss], DELTA / 2)
    for factor, is_enough in ((1.0, True), (0.998, False)):
        larger = filtered(loss, loss, epsilon=factor * named)
        assert (larger <= factor * named) is is_enough
