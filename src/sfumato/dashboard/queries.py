"""The contents of the pages, read from the store: counts, charges and releases."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from decimal import Decimal
from functools import lru_cache
from typing import Any

import numpy as np

from sfumato.collector import studies
from sfumato.collector.problems import Problem
from sfumato.collector.store.ledger import StoreLedger, entries_by_cohort, price, spent_by
from sfumato.collector.store.store import (
    FaultRow,
    Store,
    StudyRow,
    TaskRow,
    TokenRow,
    Transaction,
)
from sfumato.collector.studies import terms_of
from sfumato.dashboard import charts
from sfumato.dashboard.charts import Estimate, estimates
from sfumato.flow.release import Release
from sfumato.privacy import Entry
from sfumato.privacy.accounting import epsilon_text
from sfumato.secagg.coordinator import Phase
from sfumato.study import QUESTIONS, TRUSTS, Study

_PHASES = tuple(str(phase) for phase in Phase)
_MOST_CACHED = 1 << 20  # characters of the longest release to cache
_STUDY_ID = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class StudySummary:
    """A study in the list of studies."""

    row: StudyRow
    study: Mapping[str, Any]
    plan: Mapping[str, Any]
    reports: int  # without duplicates
    target: int
    fault: FaultRow | None = None

    @property
    def is_alive(self) -> bool:
        return self.row.state in studies.ALIVE


def study_summaries(store: Store, token: TokenRow) -> list[StudySummary]:
    """Every study that the token may see: active ones first, and the newest first among each."""
    with store.reading() as tx:
        rows, faults = reversed(tx.studies()), tx.faults()
        summaries = [_summary(tx, row, faults.get(row.id)) for row in rows if token.may_see(row.id)]
    return sorted(summaries, key=lambda summary: not summary.is_alive)


def _summary(tx: Transaction, row: StudyRow, fault: FaultRow | None) -> StudySummary:
    tasks, plan = tx.tasks(row.id), json.loads(row.plan)
    if row.state in studies.ALIVE:
        reports = sum(
            studies.report_count(tx, task.id) - tx.counts(task.id).get("repeated", 0)
            for task in tasks
        )
    else:  # sealed records may have been dropped; the counts stay
        reports = sum(tx.counts(task.id).get("reports", 0) for task in tasks)
    target = target_of([task.target for task in tasks], plan)
    return StudySummary(row, plan["study"], plan, reports, target, fault)


def target_of(targets: Sequence[int | None], plan: Mapping[str, Any]) -> int:
    """The number of reports that a study needs, from its tasks' targets; an estimate while tasks
    are still to come."""
    study = Study.from_mapping(plan["study"])
    if study.training is not None:
        return study.training.cohort * study.round_count
    devices, dropout = study.devices or 0, study.expected_dropout
    return max(1, sum(each or 0 for each in targets), math.floor(devices * (1 - dropout) + 0.5))


@dataclass(frozen=True, slots=True)
class RoundProgress:
    """How many of the expected members of an active masked round have answered in its phase."""

    phase: str
    answers: int
    expected: int


@dataclass(frozen=True, slots=True)
class StudyView:
    """A study, its active masked rounds, and its release if there is one."""

    state: Mapping[str, Any]
    active_rounds: Mapping[str, RoundProgress]  # by task
    release: Mapping[str, Any] | None
    estimates: Sequence[Estimate]

    @property
    def columns(self) -> Sequence[str]:
        """The names of the columns of the estimates."""
        rows = self.release.get("estimates") if self.release else None  # a model has none
        return list(rows[0]) if rows else []

    @property
    def segments(self) -> Sequence[str]:
        """The names of the charts: the study's segments, or an empty name."""
        return tuple(self.state["study"].get("segments", ("",)))

    def chart_estimates(self, segment: str) -> list[Estimate]:
        """The estimates in the chart of a segment."""
        own = [each for each in self.estimates if each.segment == segment]
        return charts.largest(own, are_counts="count" in self.columns)

    def require_release(self) -> Mapping[str, Any]:
        """The release; Problem if there is none."""
        if self.release is None:
            raise Problem("not-ready", hint="close the study, or wait until it has its reports")
        return self.release


def study_view(store: Store, study_id: str) -> StudyView:
    """Everything that the page of a study shows."""
    if not _STUDY_ID.fullmatch(study_id):
        raise Problem("unknown-study")
    state = studies.state(store, study_id)
    with store.reading() as tx:
        text = tx.release(study_id)
        active_rounds = {
            task["id"]: _round_progress(*round)
            for task in state["tasks"]
            if task["rounds"] and (round := tx.active_round(task["id"])) is not None
        }
    release, values = (None, ()) if text is None else _read(text)
    return StudyView(state, active_rounds, release, values)


def _round_progress(phase: str, members: int, counts: Mapping[str, int]) -> RoundProgress:
    """A phase expects the members that answered in the one before."""
    before = [counts[each] for each in _PHASES[: _PHASES.index(phase)] if each in counts]
    return RoundProgress(phase, counts.get(phase, 0), before[-1] if before else members)


def _read(text: str) -> tuple[Mapping[str, Any], Sequence[Estimate]]:
    """A release and its estimates, cached for the next page if they are not long."""
    return _parse_cached(text) if len(text) <= _MOST_CACHED else _parse(text)


def _parse(text: str) -> tuple[Mapping[str, Any], Sequence[Estimate]]:
    """Common fields that a release lacks, such as an older one, are None."""
    release = dict.fromkeys(each.name for each in fields(Release)) | json.loads(text)
    return release, estimates(release.get("estimates", ()))  # a model has none


_parse_cached = lru_cache(maxsize=16)(_parse)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A predicted number beside the actual one."""

    label: str
    predicted: float | None
    actual: float | None
    unit: str = ""


def comparisons(state: Mapping[str, Any], release: Mapping[str, Any] | None) -> list[Comparison]:
    """The plan's predictions beside the outcome, where there is either.

    With trust local, the error is predicted for a rare item, and compared with the smallest in the
    release; otherwise with the median.
    """
    predicted, is_local = state["plan"]["predicted"], TRUSTS[state["privacy"]["trust"]].is_local
    actual: dict[str, Any] = {}
    if release is not None:
        rows = release.get("estimates", ())  # a model has none
        parameters = release["plan"]["parameters"]
        typical = np.min if is_local else np.median
        halves = [(row["high"] - row["low"]) / 2 for row in rows if row["low"] is not None]
        actual = {
            "standard_error": float(typical([row["standard_error"] for row in rows]))
            if rows and "standard_error" in rows[0]
            else None,
            "half_width_95": float(typical(halves)) if rows else None,
            "detectable_count": parameters.get("detectable_count"),
            "significant_from": parameters.get("significant_from"),
            "bytes_per_device": release["cost"]["bytes_per_device"],
            "rounds": release["cost"]["rounds"],
            "rate": release.get("rate"),
        }
    rare = " of a rare item" if is_local else ""
    pairs = [
        Comparison(label, predicted.get(key), actual.get(key), unit)
        for key, label, unit in (
            ("standard_error", f"Standard error{rare}", ""),
            ("half_width_95", f"95% interval{rare}, ±", ""),
            ("l2_error", "L2 error of the mean", ""),
            ("detectable_count", "Detectable from a count of", ""),
            ("significant_from", "Significant from a count of", ""),
            ("bytes_per_device", "Bytes per device", "bytes"),
            ("rounds", "Rounds", ""),
            ("rate", "Compression (parameters per cell)", ""),
        )
    ]
    is_model = QUESTIONS[state["study"]["question"]].data == "examples"
    target = target_of([] if is_model else [task["wanted"] for task in state["tasks"]], state)
    reports = Comparison("Reports", target, state["counted"])
    return [reports, *(pair for pair in pairs if (pair.predicted, pair.actual) != (None, None))]


@dataclass(frozen=True, slots=True)
class CohortCharges:
    """The charges for one cohort of a study."""

    study: str
    study_id: str | None
    cohort: str
    releases: int
    noise: str
    epsilon: float


@dataclass(frozen=True, slots=True)
class LocalCost:
    """The most that a study with trust "local" costs a device that takes part."""

    row: StudyRow
    epsilon: float | None  # per report
    daily_reports: int
    lifetime_epsilon: float | None

    @property
    def daily(self) -> float | None:
        return None if self.epsilon is None else self.epsilon * self.daily_reports


@dataclass(frozen=True, slots=True)
class LedgerView:
    """The ledger, and the costs of local studies, which devices account for themselves."""

    limit: float | None
    delta: float
    spent: float
    charges: tuple[CohortCharges, ...]
    local: tuple[LocalCost, ...]

    @property
    def left(self) -> Decimal | None:
        """What is left of the limit by the spent epsilon as it is shown, which is rounded up."""
        if self.limit is None:
            return None
        return max(Decimal(0), Decimal(str(self.limit)) - Decimal(epsilon_text(self.spent)))

    @property
    def daily(self) -> float:
        """The daily epsilon of a device that takes part in every open local study."""
        costs = [cost.daily for cost in self.local if cost.row.state == "collecting"]
        return sum(math.inf if cost is None else cost for cost in costs)


def ledger_view(store: Store) -> LedgerView:
    """Everything that the page of the ledger shows."""
    with store.reading() as tx:
        ledger = StoreLedger(tx)
        budget, entries, rows = ledger.budget, ledger.entries(), tx.studies()
        owners = {entry.task: tx.task(entry.task) for entry in entries}
    names = {row.id: row.name for row in rows}
    return LedgerView(
        limit=budget.epsilon,
        delta=budget.delta,
        spent=spent_by(entries, budget) if entries else 0.0,
        charges=tuple(
            _charges(charges, owners[charges[0].task], names, budget.delta)
            for charges in entries_by_cohort(entries).values()
        ),
        local=tuple(_local_costs(rows)),
    )


def _charges(
    charges: Sequence[Entry], owner: TaskRow | None, names: Mapping[str, str], delta: float
) -> CohortCharges:
    first, study_id = charges[0], None if owner is None else owner.study_id
    return CohortCharges(
        study=first.campaign[:12] if study_id is None else names[study_id],
        study_id=study_id,
        cohort=first.cohort,
        releases=len(charges),
        noise=_noise(charges[-1].loss),
        epsilon=price(charges, delta),
    )


def _local_costs(rows: Sequence[StudyRow]) -> Iterator[LocalCost]:
    for row in rows:
        privacy, terms = json.loads(row.plan)["privacy"], terms_of(row)
        if privacy["trust"] == "local":
            epsilon = privacy["epsilon"]
            yield LocalCost(row, epsilon, terms.daily_reports, terms.lifetime_epsilon)


def _noise(loss: Any) -> str:
    inner = getattr(loss, "loss", loss)  # a sampled loss contains another one
    kind = getattr(inner, "noise", None)
    if kind is None:
        return "none" if not hasattr(inner, "epsilon") else "as in its proof"
    return f"{kind}, scale {inner.scale:,.4g}"


@dataclass(frozen=True, slots=True)
class Bill:
    """The planned cost of a study in bytes; its release has the actual cost."""

    summary: StudySummary
    bytes_per_device: int
    rounds: int
    bytes_per_report: int

    @property
    def so_far(self) -> int:
        """The bytes of all reports received, without duplicates."""
        return self.bytes_per_report * self.summary.reports


def bills(store: Store, token: TokenRow) -> list[Bill]:
    """Everything that the page of costs shows."""
    rows = []
    for summary in study_summaries(store, token):
        predicted = summary.plan["plan"]["predicted"]
        per_device = predicted["bytes_per_device"]
        per_report = predicted.get("bytes_per_round", per_device)  # training has many rounds
        rows.append(Bill(summary, per_device, predicted["rounds"], per_report))
    return rows
