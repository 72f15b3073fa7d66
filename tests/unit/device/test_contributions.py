"""The contributions to sums that a device's own ledger allows."""

from __future__ import annotations

from dataclasses import replace

from sfumato.device.box import State
from sfumato.device.offers import Offer
from sfumato.flow.aggregation import Plain
from sfumato.flow.task import Task
from sfumato.privacy import NoNoise
from sfumato.sketch import CountSketch

TASK = Task(
    sketch=CountSketch(rows=3, width=8, seed=1),
    mechanism=NoNoise(),
    aggregation=Plain(modulus_bits=12),
    campaign="names",
    cohort="round 0",
    max_count=100,
)
OFFER = Offer(
    study="Street trees",
    purpose="Which trees to plant next.",
    question="frequencies",
    trust="central",
    task=TASK,
    epsilon=None,
    contributions=3,
)
AGAIN = replace(TASK, sketch=CountSketch(rows=3, width=8, seed=2))  # of the same cohort


def state_with(*tasks: Task) -> State:
    state = State()
    for task in tasks:
        state.contribute(OFFER, task).tasks.add(task.id)
    return State.from_json(state.to_json())


def test_a_task_is_answered_once() -> None:
    assert state_with().may_contribute(OFFER, TASK)
    assert not state_with(TASK).may_contribute(OFFER, TASK)
    assert state_with(TASK).may_contribute(OFFER, AGAIN)


def test_a_device_is_in_one_cohort_of_a_campaign() -> None:
    other = replace(TASK, cohort="round 1")
    assert not state_with(TASK).may_contribute(OFFER, other)
    assert state_with(TASK).may_contribute(OFFER, replace(other, campaign="counts"))


def test_a_study_gets_no_more_than_its_offer_says() -> None:
    third, fourth = (replace(TASK, sketch=CountSketch(rows=3, width=8, seed=k)) for k in (3, 4))
    assert state_with(TASK, AGAIN).may_contribute(OFFER, third)
    assert not state_with(TASK, AGAIN, third).may_contribute(OFFER, fourth)
    assert not state_with(TASK, AGAIN, third).may_contribute(
        OFFER, replace(fourth, campaign="another")
    )
    elsewhere = replace(OFFER, study="Park trees")
    assert state_with(TASK, AGAIN, third).may_contribute(
        elsewhere, replace(fourth, campaign="park")
    )


def test_a_table_that_is_in_no_sum_is_taken_back() -> None:
    state = state_with(TASK)
    state.take_back(OFFER, TASK)
    assert state.may_contribute(OFFER, TASK)
    assert state.may_contribute(OFFER, replace(TASK, cohort="round 1"))
    state = state_with(TASK, AGAIN)
    state.take_back(OFFER, AGAIN)
    assert not state.may_contribute(OFFER, TASK)
    assert not state.may_contribute(OFFER, replace(TASK, cohort="round 1"))
