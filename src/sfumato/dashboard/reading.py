"""What the pages show, read from the store: counts, charges and releases."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from sfumato.collector import studies
from sfumato.collector.ledger import StoreLedger
from sfumato.collector.problems import Problem
from sfumato.collector.store import Store, StudyRow, Transaction
from sfumato.collector.studies import terms_of
from sfumato.dashboard.charts import Estimate, estimates
from sfumato.privacy import Loss
from sfumato.privacy.accounting import epsilon_of
from sfumato.privacy.ledger import spent

ALIVE = ("collecting", "closing")
_STUDY_ID = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Line:
    """A study in a list."""

    row: StudyRow
    study: Mapping[str, Any]
    plan: Mapping[str, Any]
    received: int
    wanted: int

    @property
    def is_alive(self) -> bool:
        return self.row.state in ALIVE


def lines(store: Store) -> list[Line]:
    """Every study, those that collect first, each kind the newest first."""
    with store.reading() as tx:
        found = [_line(tx, row) for row in reversed(tx.studies())]
    return sorted(found, key=lambda line: not line.is_alive)


def _line(tx: Transaction, row: StudyRow) -> Line:
    tasks, told = tx.tasks(row.id), json.loads(row.plan)
    # What was sealed may have been dropped, and of masked rounds nothing is: the counts stay.
    received = sum(tx.counts(task.id).get("reports", 0) for task in tasks)
    if row.state in ALIVE:
        received = max(received, sum(tx.received(task.id) for task in tasks))
    return Line(
        row, told["study"], told, received, wanted_of([task.wanted for task in tasks], told)
    )


def wanted_of(wanted: Sequence[int | None], plan: Mapping[str, Any]) -> int:
    """Reports that a study is to have in the end: those of tasks still to come are guessed."""
    if (training := plan["study"].get("training")) is not None:
        return int(training["cohort"]) * int(plan["study"]["rounds"])
    devices, dropout = int(plan["study"]["devices"]), float(plan["study"]["dropout"])
    return max(1, sum(most or 0 for most in wanted), math.floor(devices * (1 - dropout) + 0.5))


@dataclass(frozen=True, slots=True)
class Known:
    """A study, and its release if there is one."""

    state: Mapping[str, Any]
    released: Mapping[str, Any] | None
    estimates: Sequence[Estimate]

    @property
    def release(self) -> Mapping[str, Any]:
        if self.released is None:
            raise Problem("not-ready", hint="close the study, or wait until it has its reports")
        return self.released


def known(store: Store, study_id: str) -> Known:
    """All there is to know about a study."""
    if not _STUDY_ID.fullmatch(study_id):
        raise Problem("unknown-study")
    state = studies.state(store, study_id)
    with store.reading() as tx:
        text = tx.release(study_id)
    released = None if text is None else json.loads(text)
    return Known(state, released, estimates((released or {}).get("estimates", ())))


@dataclass(frozen=True, slots=True)
class Compared:
    """A number that was predicted, and what became of it."""

    label: str
    predicted: float | None
    found: float | None
    unit: str = ""


def compared(state: Mapping[str, Any], released: Mapping[str, Any] | None) -> list[Compared]:
    """The plan's prediction beside the outcome, where either has something to say."""
    predicted = state["plan"]["predicted"]
    found: dict[str, Any] = {}
    if released is not None:
        rows = released.get("estimates", ())  # a model has none
        errors = np.array([row["standard_error"] for row in rows])
        halves = np.array([(row["high"] - row["low"]) / 2 for row in rows])
        found = {
            "standard_error": float(np.median(errors)) if errors.size else None,
            "half_width_95": float(np.median(halves)) if halves.size else None,
            "significant_from": released["plan"]["parameters"].get("significant_from"),
            "bytes_per_device": released["cost"]["bytes_per_device"],
            "rounds": released["cost"]["rounds"],
            "rate": released.get("rate"),
        }
    pairs = [
        Compared(label, predicted.get(key), found.get(key), unit)
        for key, label, unit in (
            ("standard_error", "Standard error", ""),
            ("half_width_95", "95% interval, ±", ""),
            ("detectable_count", "Found from a count of", ""),
            ("significant_from", "Surely there from a count of", ""),
            ("bytes_per_device", "Sent by one device", "bytes"),
            ("rounds", "Rounds", ""),
            ("rate", "Parameters to a cell sent", ""),
        )
    ]
    is_model = state["study"]["question"] == "train"
    asked = wanted_of([], state) if is_model else state["study"]["devices"]
    reports = Compared("Reports", asked, state["counted"])
    return [reports, *(pair for pair in pairs if (pair.predicted, pair.found) != (None, None))]


@dataclass(frozen=True, slots=True)
class Charges:
    """What one cohort of a study was charged."""

    study: str
    study_id: str | None
    cohort: str
    releases: int
    noise: str
    epsilon: float


@dataclass(frozen=True, slots=True)
class LocalCost:
    """What a study with trust "local" may cost a device that takes part."""

    row: StudyRow
    epsilon: float | None  # of a report
    daily_reports: int
    lifetime_epsilon: float | None

    @property
    def daily(self) -> float | None:
        return None if self.epsilon is None else self.epsilon * self.daily_reports


@dataclass(frozen=True, slots=True)
class Books:
    """The ledger, and what is not on it because devices spend it themselves."""

    allowed: float | None
    delta: float
    spent: float
    charges: tuple[Charges, ...]
    local: tuple[LocalCost, ...]

    @property
    def left(self) -> float | None:
        return None if self.allowed is None else max(0.0, self.allowed - self.spent)

    @property
    def daily(self) -> float:
        """Of a device that takes part in everything that is open."""
        costs = [cost.daily for cost in self.local if cost.row.state == "collecting"]
        return sum(math.inf if cost is None else cost for cost in costs)


def books(store: Store) -> Books:
    """The ledger's page."""
    with store.reading() as tx:
        ledger = StoreLedger(tx)
        budget, entries, rows = ledger.budget, ledger.entries(), tx.studies()
        owners = {entry.task: tx.task(entry.task) for entry in entries}
    names = {row.id: row.name for row in rows}
    cohorts: dict[tuple[str | None, str, str], list[Loss]] = {}
    for entry in entries:
        owner = owners[entry.task]
        key = (None if owner is None else owner.study_id, entry.campaign, entry.cohort)
        cohorts.setdefault(key, []).append(entry.loss)
    return Books(
        allowed=budget.epsilon,
        delta=budget.delta,
        spent=_spent(tuple(entries), budget.delta) if entries else 0.0,
        charges=tuple(
            Charges(
                study=campaign[:12] if study_id is None else names[study_id],
                study_id=study_id,
                cohort=cohort,
                releases=len(losses),
                noise=_noise(losses[-1]),
                epsilon=_epsilon(tuple(losses), budget.delta),
            )
            for (study_id, campaign, cohort), losses in cohorts.items()
        ),
        local=tuple(_local_cost(row) for row in rows if _trust(row) == "local"),
    )


def _trust(row: StudyRow) -> str:
    return str(json.loads(row.plan)["privacy"]["trust"])


def _local_cost(row: StudyRow) -> LocalCost:
    terms, told = terms_of(row), json.loads(row.plan)
    return LocalCost(row, told["privacy"]["epsilon"], terms.daily_reports, terms.lifetime_epsilon)


def _noise(loss: Any) -> str:
    inner = getattr(loss, "loss", loss)  # a sampled loss has another within
    kind = getattr(inner, "noise", None)
    if kind is None:
        return "none" if not hasattr(inner, "epsilon") else "stated"
    return f"{kind}, scale {inner.scale:.4g}"


@lru_cache(maxsize=512)  # composing takes a while, and what was charged does not change
def _epsilon(losses: tuple[Loss, ...], delta: float) -> float:
    return epsilon_of(losses, delta)


@lru_cache(maxsize=8)
def _spent(entries: tuple[Any, ...], delta: float) -> float:
    return spent(entries, delta)


@dataclass(frozen=True, slots=True)
class Bill:
    """What a study costs devices in bytes, as planned; its release says what it came to."""

    line: Line
    bytes_per_device: int
    rounds: int
    bytes_per_report: int

    @property
    def so_far(self) -> int:
        """Of all reports that came."""
        return self.bytes_per_report * self.line.received


def bills(store: Store) -> list[Bill]:
    """The costs' page."""
    found = []
    for line in lines(store):
        predicted = line.plan["plan"]["predicted"]
        each = predicted["bytes_per_device"]
        a_round = predicted.get("bytes_per_round", each)  # of a model, which has many reports
        found.append(Bill(line, each, predicted["rounds"], a_round))
    return found
