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
from sfumato.collector.problems import Problem
from sfumato.collector.store.ledger import StoreLedger, entries_by_cohort, price, spent_by
from sfumato.collector.store.store import Store, StudyRow, TaskRow, Transaction
from sfumato.collector.studies import terms_of
from sfumato.dashboard import charts
from sfumato.dashboard.charts import Estimate, estimates
from sfumato.privacy import Entry
from sfumato.secagg.coordinator import Phase
from sfumato.study import QUESTIONS, TRUSTS

ALIVE = ("collecting", "closing")
_PHASES = tuple(str(phase) for phase in Phase)
_MOST_KEPT = 1 << 20  # characters of a release that is kept in memory
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
    if row.state in ALIVE:
        received = sum(studies.report_count(tx, task.id) for task in tasks)
    else:  # what was sealed may have been dropped; the counts stay
        received = sum(tx.counts(task.id).get("reports", 0) for task in tasks)
    return Line(
        row, told["study"], told, received, wanted_of([task.target for task in tasks], told)
    )


def wanted_of(wanted: Sequence[int | None], plan: Mapping[str, Any]) -> int:
    """Reports that a study is to have in the end: those of tasks still to come are guessed."""
    if (training := plan["study"].get("training")) is not None:
        return int(training["cohort"]) * int(plan["study"]["rounds"])
    devices, dropout = int(plan["study"]["devices"]), float(plan["study"]["dropout"])
    return max(1, sum(most or 0 for most in wanted), math.floor(devices * (1 - dropout) + 0.5))


@dataclass(frozen=True, slots=True)
class Answering:
    """A masked round that is under way: how many of those it asks have answered."""

    phase: str
    answered: int
    asked: int


@dataclass(frozen=True, slots=True)
class Known:
    """A study, its masked rounds that are under way, and its release if there is one."""

    state: Mapping[str, Any]
    answering: Mapping[str, Answering]  # by task
    released: Mapping[str, Any] | None
    estimates: Sequence[Estimate]

    @property
    def is_mean(self) -> bool:
        return QUESTIONS[self.state["study"]["question"]].data == "vectors"

    @property
    def shown(self) -> list[Estimate]:
        """The estimates that are drawn."""
        return charts.largest(self.estimates, is_mean=self.is_mean)

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
        under_way = {
            task["id"]: _answering(*found)
            for task in state["tasks"]
            if task["rounds"] and (found := tx.active_round(task["id"])) is not None
        }
    released, listed = (None, ()) if text is None else _read(text)
    return Known(state, under_way, released, listed)


def _answering(phase: str, members: int, came: Mapping[str, int]) -> Answering:
    """Asked in a phase are those who answered in the one before."""
    before = [came[each] for each in _PHASES[: _PHASES.index(phase)] if each in came]
    return Answering(phase, came.get(phase, 0), before[-1] if before else members)


def _read(text: str) -> tuple[Mapping[str, Any], Sequence[Estimate]]:
    """A release and its estimates, kept for the next page if they are not long."""
    return _kept(text) if len(text) <= _MOST_KEPT else _parsed(text)


def _parsed(text: str) -> tuple[Mapping[str, Any], Sequence[Estimate]]:
    released = json.loads(text)
    return released, estimates(released.get("estimates", ()))  # a model has none


_kept = lru_cache(maxsize=16)(_parsed)


@dataclass(frozen=True, slots=True)
class Compared:
    """A number that was predicted, and what became of it."""

    label: str
    predicted: float | None
    found: float | None
    unit: str = ""


def compared(state: Mapping[str, Any], released: Mapping[str, Any] | None) -> list[Compared]:
    """The plan's prediction beside the outcome, where either has something to say.

    With trust local an error is predicted for an item that few hold, and compared with the least
    that is listed; else with the middle one.
    """
    predicted, is_local = state["plan"]["predicted"], TRUSTS[state["privacy"]["trust"]].is_local
    found: dict[str, Any] = {}
    if released is not None:
        rows = released.get("estimates", ())  # a model has none
        parameters = released["plan"]["parameters"]
        typical = np.min if is_local else np.median
        halves = [(row["high"] - row["low"]) / 2 for row in rows if row["low"] is not None]
        found = {
            "standard_error": float(typical([row["standard_error"] for row in rows]))
            if rows and "standard_error" in rows[0]
            else None,
            "half_width_95": float(typical(halves)) if rows else None,
            "detectable_count": parameters.get("detectable_count"),
            "significant_from": parameters.get("significant_from"),
            "bytes_per_device": released["cost"]["bytes_per_device"],
            "rounds": released["cost"]["rounds"],
            "rate": released.get("rate"),
        }
    rare = " of a rare item" if is_local else ""
    pairs = [
        Compared(label, predicted.get(key), found.get(key), unit)
        for key, label, unit in (
            ("standard_error", f"Standard error{rare}", ""),
            ("half_width_95", f"95% interval{rare}, ±", ""),
            ("l2_error", "Error of the whole mean, as a length", ""),
            ("detectable_count", "Found from a count of", ""),
            ("standard_error_there", "Standard error at that count", ""),
            ("significant_from", "Surely there from a count of", ""),
            ("bytes_per_device", "Sent by one device", "bytes"),
            ("rounds", "Rounds", ""),
            ("rate", "Parameters to a cell sent", ""),
        )
    ]
    is_model = QUESTIONS[state["study"]["question"]].data == "examples"
    wanted = wanted_of([] if is_model else [task["wanted"] for task in state["tasks"]], state)
    reports = Compared("Reports", wanted, state["counted"])
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
    return Books(
        allowed=budget.epsilon,
        delta=budget.delta,
        spent=spent_by(entries, budget) if entries else 0.0,
        charges=tuple(
            _charges(charges, owners[charges[0].task], names, budget.delta)
            for charges in entries_by_cohort(entries).values()
        ),
        local=tuple(_local_cost(row) for row in rows if _trust(row) == "local"),
    )


def _charges(
    charges: Sequence[Entry], owner: TaskRow | None, names: Mapping[str, str], delta: float
) -> Charges:
    first, study_id = charges[0], None if owner is None else owner.study_id
    return Charges(
        study=first.campaign[:12] if study_id is None else names[study_id],
        study_id=study_id,
        cohort=first.cohort,
        releases=len(charges),
        noise=_noise(charges[-1].loss),
        epsilon=price(charges, delta),
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
        return "none" if not hasattr(inner, "epsilon") else "as its proof says"
    return f"{kind}, scale {inner.scale:,.4g}"


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
