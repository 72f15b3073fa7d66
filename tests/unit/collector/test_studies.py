"""The life of a study: refusals, offers, the ledger and the store."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checks import SEED
from collecting import (
    ITEMS,
    KEY,
    TODAY,
    Clock,
    create,
    entries_of,
    open_task,
    report,
    request,
    upload,
    work,
)
from planning_checks import sums_of
from sfumato.collector import studies
from sfumato.collector.problems import Problem
from sfumato.collector.requests import Request
from sfumato.collector.store.ledger import NO_LIMIT, StoreLedger, set_budget
from sfumato.collector.store.store import Store
from sfumato.collector.worker.worker import Worker
from sfumato.device.offers import public_key, verify
from sfumato.errors import BudgetError, DataError, ImpossibleError, SfumatoError, StudyError
from sfumato.privacy import AdditiveLoss, Budget, Ledger, NoPrivacy, SeededRng
from sfumato.spec import from_json

TRAINING = {"model": "softmax", "cohort": 9}
LOCAL: dict[str, Any] = {"trust": "local", "epsilon": 4.0}
NOISED: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-6}
LOSS = AdditiveLoss(noise="skellam", scale=9.446669, l1=5.0, l2=math.sqrt(5), unit_cells=5)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[Store]:
    store = Store.open(tmp_path / "collector.db", now=clock)
    store.migrate()
    yield store
    store.close()


def names(store: Store) -> list[str]:
    with store.reading() as tx:
        return [row.name for row in tx.studies()]


# Creation


def test_a_local_task_closes_when_every_device_has_sent_its_day(store: Store, clock: Clock) -> None:
    """Every device sends the same number of reports, whatever its values, and all of them count."""
    twice = create(store, clock, daily_reports=2, **LOCAL)
    assert open_task(store, twice).target == 2 * 40


@pytest.mark.parametrize("keys", [{}, NOISED, LOCAL, {"question": "new_words", **LOCAL}])
def test_a_study_opens_one_task_with_an_offer(
    store: Store, clock: Clock, keys: dict[str, Any]
) -> None:
    row = create(store, clock, terms={"delay_seconds": 60, "closes": TODAY + 9}, **keys)
    task = open_task(store, row)
    offer = verify(json.loads(task.envelope), public_key(KEY))
    assert offer.task == from_json(task.spec)
    assert offer.task.id == task.id
    assert (offer.study, offer.purpose) == (row.name, row.purpose)
    trust = keys.get("trust", "central")
    assert (offer.trust, offer.epsilon) == (trust, 4.0 if trust == "local" else None)
    assert (offer.delay_seconds, offer.closes, offer.daily_reports) == (60, TODAY + 9, 1)
    assert task.target == 40
    with store.reading() as tx:
        assert offer.dictionary is not None
        body = tx.dictionary(offer.dictionary)
    assert body is not None
    assert hashlib.sha256(body).hexdigest() == offer.dictionary


def test_the_same_request_makes_one_study_and_another_of_its_name_is_refused(
    store: Store, clock: Clock
) -> None:
    first = create(store, clock, rng=SeededRng(1))
    assert create(store, clock, rng=SeededRng(2)) == first
    for other in ({"devices": 41}, {"items": ITEMS[1:]}, {"terms": {"delay_seconds": 9}}):
        with pytest.raises(Problem) as caught:
            create(store, clock, **other)
        assert caught.value.code == "name-taken"
    assert names(store) == ["Street trees"]


def test_terms_that_are_not_used_leave_the_request_as_it_was() -> None:
    """A request that an older version answered is still the same request."""
    values = Request.from_mapping(request())
    assert values.digest(values.parse_study(), None) == (
        "d4f42b1456b45ca9b98d88796b2954cda2a0ed606dc2cb92aff9d56cb06c4b88"
    )
    lists = {"question": "heavy_hitters", "trust": "central", "epsilon": 1.0, "devices": 30}
    short, default = (
        Request.from_mapping(request() | {"study": lists | more, "items": None})
        for more in ({"word_length": 10}, {})
    )  # its default was 10, and is larger now
    assert short.digest(short.parse_study(), None) != default.digest(default.parse_study(), None)
    for changed in (replace(values, open_seconds=9), replace(values, passcode_digest="ab" * 32)):
        assert changed.digest(changed.parse_study(), None) != values.digest(
            values.parse_study(), None
        )


@pytest.mark.parametrize("keys", [{}, LOCAL, {"trust": "local", "epsilon": 4.0, "rounds": 2}])
def test_two_studies_alike_share_neither_tasks_nor_a_place_in_the_ledger(
    store: Store, clock: Clock, keys: dict[str, Any]
) -> None:
    """A direct response has no seed, so its tasks differ by the id of their study."""
    rng = SeededRng(SEED)
    rows = [create(store, clock, f"study {k}", rng=rng, **keys) for k in range(2)]
    tasks = [open_task(store, row) for row in rows]
    assert tasks[0].id != tasks[1].id
    assert from_json(tasks[0].spec).campaign != from_json(tasks[1].spec).campaign


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        ({"question": "train", "clip": 1.0, "training": TRAINING}, StudyError, "does not answer"),
        ({"question": "mean", "clip": 1.0, "dimensions": 9}, StudyError, "leave out the items"),
        ({"dictionary": "words.csv"}, StudyError, "send the items"),
        ({"items": None}, StudyError, "list of items"),
        ({"items": []}, DataError, "at least one item"),
        ({"items": ["oak", 7]}, DataError, "list of texts"),
        ({"items": "oak"}, DataError, "list of texts"),
        ({"items": ["\ud800"]}, DataError, "surrogates"),
        ({"devices": None}, StudyError, "set devices"),
        ({"colour": "green"}, StudyError, "unknown key colour"),
        ({"terms": {"colour": "green"}}, StudyError, "unknown key colour in the request"),
        ({"terms": {"closes": TODAY - 1}}, StudyError, "must not be in the past"),
        ({"terms": {"daily_reports": 2}}, StudyError, "planned for 1 reports"),
        ({"terms": {"minimum": 5}}, StudyError, "set open_seconds"),
        ({"terms": {"passcode_digest": 5}}, StudyError, "must be the SHA-256 of a passcode"),
        ({"terms": {"open_seconds": 9, "minimum": 0}}, StudyError, "minimum must be at least 1"),
        ({"terms": {"open_seconds": 9, "minimum": 41}}, StudyError, "at most the 40 reports"),
        ({"terms": {"open_seconds": 0}}, StudyError, "open_seconds must be 1 to"),
        ({"terms": {"open_seconds": 86_400, "closes": TODAY}}, StudyError, "before the last day"),
        (
            {"trust": "secure", **NOISED, "devices": 1_000, "terms": {"open_seconds": 9}},
            StudyError,
            "masked round",
        ),
        ({"terms": {"delay_seconds": 0}}, SfumatoError, "delay_seconds"),
        ({"terms": {"name": "two\nlines"}}, SfumatoError, "study"),
        ({"terms": {"purpose": ""}}, SfumatoError, "purpose"),
        ({**LOCAL, "target_error": 1e-6}, ImpossibleError, "target_error"),
    ],
)
def test_an_impossible_study_is_refused_and_leaves_nothing(
    store: Store, clock: Clock, wrong: dict[str, Any], error: type[SfumatoError], says: str
) -> None:
    with pytest.raises(error, match=says):
        create(store, clock, **wrong)
    assert names(store) == []


@pytest.mark.parametrize("missing", ["name", "purpose", "study"])
def test_a_request_must_be_whole(store: Store, clock: Clock, missing: str) -> None:
    values = request()
    del values[missing]
    with pytest.raises(StudyError, match=f"must have {missing}"):
        studies.create(store, values, key=KEY, rng=SeededRng(1), now=clock)


def test_a_dictionary_may_hold_any_text_and_lists_an_item_once(store: Store, clock: Clock) -> None:
    items = ["oak", "two\nlines", 'a "quote"', "чинар", "", "oak"]
    row = create(store, clock, items=items)
    with store.reading() as tx:
        planned = studies.plan_of(tx, row)
        body = tx.dictionary(studies.terms_of(row).dictionary or "")
    assert planned.listed.items.to_pylist() == items[:-1]
    assert body is not None
    assert [json.loads(line) for line in body.decode().split("\n")[:-1]] == items[:-1]
    assert any("repeats" in warning for warning in planned.warnings)


def test_a_plan_comes_back_from_the_store_as_it_was_made(store: Store, clock: Clock) -> None:
    row = create(store, clock, **NOISED, rounds=2, threshold=3.0)
    with store.reading() as tx:
        planned = studies.plan_of(tx, row)
    assert json.dumps(planned.to_dict()) == row.plan
    assert sums_of(planned).seed != 0  # it was drawn


@pytest.mark.parametrize(
    ("keys", "target"),
    [
        ({"devices": 100}, 100),
        ({"devices": 100, "dropout": 0.25}, 75),
        ({"devices": 100, "rounds": 3, **LOCAL}, 33),
        ({"devices": 100, "rounds": 3, "publish": "rounds"}, 33),
        ({"devices": 1}, 1),
    ],
)
def test_a_task_has_the_target_of_its_plan(
    store: Store, clock: Clock, keys: dict[str, Any], target: int
) -> None:
    assert open_task(store, create(store, clock, **keys)).target == target


# Closing and deleting


def test_a_closed_study_takes_no_more_reports_and_closing_twice_is_harmless(
    store: Store, clock: Clock
) -> None:
    row, rng = create(store, clock), SeededRng(SEED)
    task = open_task(store, row)
    assert upload(store, task, [report(task, 0, rng=rng)])
    assert studies.close(store, row.id).state == "closing"
    assert studies.close(store, row.id).state == "closing"
    assert not upload(store, task, [report(task, 1, rng=rng)])
    work(Worker(store, key=KEY, now=clock))
    assert studies.close(store, row.id).state == "released"


def test_deleting_drops_what_devices_sent_and_keeps_what_was_released_and_charged(
    store: Store, clock: Clock
) -> None:
    row, rng = create(store, clock, **NOISED), SeededRng(SEED)
    task = open_task(store, row)
    upload(store, task, [report(task, 0, rng=rng)])
    studies.close(store, row.id)
    work(Worker(store, key=KEY, now=clock))
    assert studies.delete(store, row.id).state == "deleted"
    with store.reading() as tx:
        assert tx.release(row.id) is not None
        assert len(tx.entries()) == 1
        assert list(tx.sealed_records(task.id)) == []
        assert tx.answer_rows(row.id) == []
    with pytest.raises(Problem) as caught:
        studies.close(store, row.id)
    assert caught.value.code == "wrong-state"
    assert studies.delete(store, row.id).state == "deleted"


def test_a_study_deleted_while_it_collects_takes_no_more_reports(
    store: Store, clock: Clock
) -> None:
    row, rng = create(store, clock), SeededRng(SEED)
    task = open_task(store, row)
    upload(store, task, [report(task, 0, rng=rng)])
    studies.delete(store, row.id)
    assert not upload(store, task, [report(task, 1, rng=rng)])
    with store.reading() as tx:
        assert tx.pending_uploads(task.id, 1) == []


def test_an_unknown_study_is_a_problem_of_its_own(store: Store) -> None:
    for ask in (studies.close, studies.delete, studies.state):
        with pytest.raises(Problem) as caught:
            ask(store, "5f" * 16)
        assert caught.value.code == "unknown-study"


def test_the_state_of_a_study_is_plain_data_and_counts_reports(store: Store, clock: Clock) -> None:
    row, rng = create(store, clock, **LOCAL), SeededRng(SEED)
    task = open_task(store, row)
    reports = [report(task, category, rng=rng) for category in range(5)]
    upload(store, task, [*reports, reports[0]])
    with store.transaction() as tx:
        tx.count(task.id, "rejected:malformed", 2)
    assert studies.state(store, row.id)["received"] == 6
    studies.close(store, row.id)
    work(Worker(store, key=KEY, now=clock))
    state = studies.state(store, row.id)
    json.dumps(state, allow_nan=False)
    assert (state["state"], state["problem"]) == ("released", "")
    assert (state["received"], state["counted"], state["repeated"]) == (6, 5, 1)
    assert state["rejected"] == {"malformed": 2}
    assert state["plan"]["algorithm"] == "direct response"
    assert state["tasks"][0]["cohort"] == "round 0"


# The ledger


def test_a_store_charges_as_a_ledger_does(store: Store) -> None:
    budget = Budget(epsilon=1.7, delta=1e-6)
    set_budget(store, budget)
    ledger = Ledger(budget)
    for campaign, cohort, loss in [
        ("words", "a", LOSS), ("words", "b", LOSS), ("words", "a", LOSS), ("emoji", "a", LOSS),
        ("emoji", "a", NoPrivacy()),
    ]:  # fmt: skip
        charge: dict[str, Any] = {"campaign": campaign, "cohort": cohort, "task": "t", "loss": loss}
        outcomes = []
        for charges in (ledger.charge, lambda **charge: _charge(store, charge)):
            try:
                charges(**charge)
                outcomes.append("")
            except BudgetError as problem:
                outcomes.append(str(problem))
        assert outcomes[0] == outcomes[1]
    with store.reading() as tx:
        stored = StoreLedger(tx)
        assert len(stored.entries()) == len(ledger.entries()) == 3
        assert stored.budget == budget
        assert stored.spent() == ledger.spent()


def _charge(store: Store, charge: dict[str, Any]) -> None:
    with store.transaction() as tx:
        StoreLedger(tx).charge(**charge)


def test_a_charge_is_undone_with_its_transaction(store: Store) -> None:
    def charge_and_fail() -> None:
        with store.transaction() as tx:
            StoreLedger(tx).charge(campaign="words", cohort="a", task="t", loss=LOSS)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        charge_and_fail()
    assert entries_of(store) == []


def test_without_a_budget_everything_is_recorded(store: Store) -> None:
    _charge(store, {"campaign": "words", "cohort": "a", "task": "t", "loss": NoPrivacy()})
    with store.reading() as tx:
        ledger = StoreLedger(tx)
        assert (ledger.budget.epsilon, ledger.spent(), len(ledger.entries())) == (None, math.inf, 1)


def test_a_budget_is_set_once_and_before_anything_was_charged(store: Store) -> None:
    set_budget(store, Budget(epsilon=1.0, delta=1e-6))
    set_budget(store, Budget(epsilon=1.0, delta=1e-6))
    both = "cannot be changed.* has epsilon 1 at delta 1e-06, the settings have epsilon 2 at delta"
    with pytest.raises(BudgetError, match=both):
        set_budget(store, Budget(epsilon=2.0, delta=1e-6))


def test_a_store_that_has_charged_without_a_limit_gets_none(store: Store) -> None:
    _charge(store, {"campaign": "words", "cohort": "a", "task": "t", "loss": NoPrivacy()})
    with pytest.raises(BudgetError, match="charged without one"):
        set_budget(store, Budget(epsilon=1.0, delta=1e-6))
    set_budget(store, NO_LIMIT)
    with store.reading() as tx:
        assert StoreLedger(tx).budget.epsilon is None


def test_a_study_that_the_budget_would_refuse_is_not_opened(store: Store, clock: Clock) -> None:
    set_budget(store, Budget(epsilon=1.0, delta=1e-6))
    with pytest.raises(BudgetError, match="refused"):
        create(store, clock, "exact")
    create(store, clock, "noised", **NOISED)
    create(store, clock, "local", **LOCAL)
    assert names(store) == ["noised", "local"]
