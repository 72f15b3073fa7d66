"""What must stay hidden does not print: canaries go in, and no repr, str or error shows them."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from sfumato.errors import SfumatoError
from sfumato.flow.accumulator import Batch, Collector
from sfumato.flow.aggregation import Plain
from sfumato.flow.contribute import contribute, report
from sfumato.flow.release import NoisedSum, noised_sum
from sfumato.flow.report import Report
from sfumato.flow.task import Task
from sfumato.privacy import Budget, Ledger, NoNoise, SeededRng, SystemRng, bound_contributions
from sfumato.questions.frequencies.design import FrequencyCampaign, FrequencyDesign
from sfumato.simulation.population import Cohorts, Population
from sfumato.sketch import CountSketch, OneHot

WORD = "canary-0f1e2d"
NUMBER = 271_828
SPELLINGS = (WORD, str(NUMBER), f"{NUMBER:,}", f"{NUMBER:_}", hex(NUMBER)[2:], WORD.encode().hex())

PLAIN = Plain(modulus_bits=40)
TASK = Task(
    sketch=OneHot(categories=3),
    mechanism=NoNoise(),
    aggregation=PLAIN,
    cohort="everybody",
    max_count=1_000_000,
)
DESIGN = FrequencyDesign(
    mode="one_hot",
    items=3,
    devices=1000,
    rounds=1,
    rows=1,
    width=0,
    seed=1,
    items_per_device=1,
    mechanism=NoNoise(),
    decode="median",
    every_round=False,
)


def assert_hidden(text: str) -> None:
    assert not [spelling for spelling in SPELLINGS if spelling in text], "a canary was printed"


def filled_batch() -> Batch:
    return Batch(TASK.id, np.full(3, NUMBER), 5)


def filled_report() -> Report:
    return Report(TASK.id, WORD.encode().ljust(16)[:16], PLAIN.seal(np.full(3, NUMBER)))


def filled_collector() -> Collector:
    collector = Collector(TASK)
    collector.add([filled_report().to_bytes(), b"\1" + WORD.encode()])
    return collector


def filled_population() -> Population:
    return Population.load({"item": [WORD, WORD], "n": [NUMBER, 1]}, count_column="n")


def filled_cohorts() -> Cohorts:
    return Cohorts(shares={"a": 1.0}, in_order=False, dropout=0.0, seed=3)


def used(rng: SeededRng) -> SeededRng:
    rng.words(3)
    return rng


def filled_campaign() -> FrequencyCampaign:
    campaign = FrequencyCampaign(DESIGN, pa.array(["a", "b", "c"]))
    task = campaign.next_task()
    assert task is not None
    campaign.absorb(NoisedSum(task, np.full(3, NUMBER), 5))
    return campaign


HOLDERS: dict[str, Callable[[], object]] = {
    "a report": filled_report,
    "a batch": filled_batch,
    "a collector": filled_collector,
    "a population": filled_population,
    "a shard": lambda: next(filled_cohorts().shards(filled_population(), "a")),
    "a noised sum": lambda: NoisedSum(TASK, np.full(3, NUMBER), 5),
    "a campaign": filled_campaign,
    "a seeded generator": lambda: used(SeededRng(NUMBER)),
    "the system's generator": SystemRng,
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_what_holds_a_secret_does_not_print_it(holder: str) -> None:
    value = HOLDERS[holder]()
    for text in (repr(value), str(value), f"{value}", f"{[value]}"):
        assert_hidden(text)


def too_many_values() -> object:
    return report(TASK, [NUMBER] * 2, rng=SeededRng(1))


def a_category_that_is_not_there() -> object:
    return report(TASK, [NUMBER], rng=SeededRng(1))


def a_word_where_a_category_belongs() -> object:
    return report(TASK, [WORD], rng=SeededRng(1))


def values_of_no_kind() -> object:
    sketched = Task(
        sketch=CountSketch(rows=1, width=8, seed=1),
        mechanism=NoNoise(),
        aggregation=Plain(modulus_bits=40),
        cohort="everybody",
        items_per_device=2,
        max_count=10,
    )
    return contribute(sketched, [WORD, 1.5], devices=1, rng=SeededRng(1))


def a_message_of_another_length() -> object:
    return PLAIN.unpack(WORD.encode(), (3,))


def no_report_at_all() -> object:
    return Report.from_bytes(WORD.encode())


def batches_of_two_tasks() -> object:
    return filled_batch() + Batch("00" * 32, np.full(3, NUMBER), 5)


def another_tasks_batch() -> object:
    other = Batch("00" * 32, np.full(3, NUMBER), 5)
    return noised_sum(
        TASK, other, ledger=Ledger(Budget(epsilon=None, delta=0.0)), rng=SeededRng(NUMBER)
    )


def a_refused_charge() -> object:
    return noised_sum(
        TASK,
        filled_batch(),
        ledger=Ledger(Budget(epsilon=1.0, delta=0.0)),
        rng=SeededRng(NUMBER),
    )


def an_impossible_bound() -> object:
    return bound_contributions(np.full(3, NUMBER), 0, rng=SeededRng(1))


def an_answer_to_another_task() -> object:
    campaign = filled_campaign()
    campaign.absorb(NoisedSum(TASK, np.full(3, NUMBER), 5))
    return campaign


def a_missing_item() -> object:
    return Population.load({"item": [WORD, None]})


MISTAKES: list[Callable[[], Any]] = [
    too_many_values,
    a_category_that_is_not_there,
    a_word_where_a_category_belongs,
    values_of_no_kind,
    a_message_of_another_length,
    no_report_at_all,
    batches_of_two_tasks,
    another_tasks_batch,
    a_refused_charge,
    an_impossible_bound,
    an_answer_to_another_task,
    a_missing_item,
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_is_told_without_the_secret(mistake: Callable[[], Any]) -> None:
    """The message, the hint and every error that it came from."""
    with pytest.raises(SfumatoError) as caught:
        mistake()
    problem: BaseException | None = caught.value
    assert_hidden(str(caught.value.hint))
    while problem is not None:
        assert_hidden("".join(traceback.format_exception_only(problem)) + repr(problem))
        problem = problem.__cause__ or problem.__context__


def test_a_ledger_prints_its_budget_and_nothing_that_was_asked() -> None:
    ledger = Ledger(Budget(epsilon=None, delta=0.0))
    ledger.charge(campaign=WORD, cohort=WORD, task=WORD, loss=TASK.loss)
    assert_hidden(repr(ledger))


def test_a_canary_that_is_printed_is_caught() -> None:
    """The negative control."""
    for text in (WORD, f"array([{NUMBER}])", f"{NUMBER:,} devices", WORD.encode().hex()):
        with pytest.raises(AssertionError):
            assert_hidden(text)
