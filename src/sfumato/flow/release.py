"""From a sum to an answer: charge first, then open, then add noise; estimates with bounds."""

from __future__ import annotations

import importlib
import io
import json
import math
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from sfumato.arrays import F64, I64, Bool
from sfumato.errors import ImpossibleError, MismatchError, SfumatoError, SpecError
from sfumato.flow import html, pictures
from sfumato.flow.accumulator import Batch
from sfumato.flow.model_terms import PARAMETER_BYTES, digest_of
from sfumato.flow.task import AnyTask, Task
from sfumato.privacy import Account, Charge, Rng
from sfumato.privacy.accounting import epsilon_text
from sfumato.privacy.intervals import NORMAL_95
from sfumato.spec import require


@dataclass(frozen=True, slots=True, repr=False)
class NoisedSum:
    """A batch's sum with its noise: charged, and safe to show. A campaign sees nothing else.

    The sum of a listed sketch has no noise: only the decoder may use it, and the charge is for the
    list that its campaign makes of it (`ListedAbove`).
    """

    task: Task
    table: Any  # an array, or for an open domain a SparseTable
    count: int

    @classmethod
    def total(cls, sums: Sequence[NoisedSum]) -> NoisedSum:
        """The sum over several cohorts, whose tasks have one sketch; under the first one's task."""
        table = np.sum([part.table for part in sums], axis=0)
        return cls(sums[0].task, table, sum(part.count for part in sums))

    def __repr__(self) -> str:  # without noise the table is the exact sum
        return f"NoisedSum(task={self.task.id[:8]}…, count={self.count})"


def charge(task: AnyTask, *, ledger: Account, loss: Charge | None = None) -> None:
    """Charge a release of this task to the ledger, or raise BudgetError.

    `loss` is the task's own loss by default, or that loss as part of its design's plan.
    """
    cost = task.loss if loss is None else loss
    ledger.charge(campaign=task.campaign, cohort=task.cohort, task=task.id, loss=cost)


def noised_sum(
    task: Task, batch: Batch, *, ledger: Account, rng: Rng, loss: Charge | None = None
) -> NoisedSum:
    """Charge the ledger (`charge`), open the batch and add the noise that is due at the release.

    If the ledger refuses the charge, nothing is opened. A masked sum opens when it is unmasked, so
    its batch may be charged already.
    """
    if batch.task_id != task.id:
        raise MismatchError(f"this batch belongs to task {batch.task_id[:8]}, not {task.id[:8]}")
    if not task.min_count <= batch.count <= task.max_count:
        raise ImpossibleError(
            f"a release of this task needs {task.min_count} to {task.max_count} devices; "
            f"got {batch.count}"
        )
    if not batch.charged:
        charge(task, ledger=ledger, loss=loss)
    total = task.aggregation.open(batch.total)
    table = task.mechanism.at_release(total, count=batch.count, rng=rng)
    return NoisedSum(task, table, batch.count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Influence:
    """How far one dishonest device can move one number of an answer.

    Compared are the answers to two sets of reports of the device, each of as many reports as it may
    send and all of them admitted; the other devices' reports and the noise are the same. It says
    nothing about an item that is listed in only one of the two answers.

    >>> print(Influence(of="a count", most=1.0))
    one dishonest device, which can move a count by at most 1; if it answers as several devices, by
    that much for each
    >>> print(Influence(of="a count", most=None, note="nothing is checked"))
    one dishonest device, which can move a count without bound: nothing is checked
    """

    of: str
    most: float | None  # in the unit of the answer; None: no bound holds
    note: str = ""  # why no bound holds, or how often the device can do so

    def __str__(self) -> str:
        start = f"one dishonest device, which can move {self.of}"
        if self.most is None:
            return f"{start} without bound: {self.note}"
        often = f" {self.note}" if self.note else ""
        return (
            f"{start} by at most {self.most:,g}{often}; if it answers as several devices, by that "
            "much for each"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Privacy:
    """The privacy of a release, as data; its statement is made from these fields only.

    >>> promise = Privacy(epsilon=1.0, delta=0.0, guarantee="1-differential privacy",
    ...     unit="device", neighbours="one device's table becomes zero", mechanism="noise",
    ...     trust="central", sees="the collector sees each table", assumptions=("a",),
    ...     not_covered=("b", "c"))
    >>> print(promise.statement)
    Guarantee: 1-differential privacy
    Unit: device
    Neighbours: one device's table becomes zero
    Mechanism: noise
    Trust: central; the collector sees each table
    Assumes: a
    Not covered: b
    Not covered: c
    """

    epsilon: float | None  # None: no guarantee
    delta: float
    guarantee: str
    unit: str
    neighbours: str
    mechanism: str
    trust: str
    sees: str  # what the collector sees, and with what it is trusted
    second: str = ""  # a stronger guarantee against an observer who sees less
    assumptions: tuple[str, ...] = ()
    not_covered: tuple[str, ...] = ()
    influence: Influence | None = None  # None in releases of older versions

    @property
    def lines(self) -> tuple[str, ...]:
        """The statement: one short line per fact."""
        return (
            f"Guarantee: {self.guarantee}",
            *([f"Second guarantee: {self.second}"] if self.second else []),
            f"Unit: {self.unit}",
            f"Neighbours: {self.neighbours}",
            f"Mechanism: {self.mechanism}",
            f"Trust: {self.trust}; {self.sees}",
            *(f"Assumes: {each}" for each in self.assumptions),
            *(f"Not covered: {each}" for each in self.not_covered),
            *([f"Not covered: {self.influence}"] if self.influence else []),
        )

    @property
    def statement(self) -> str:
        return "\n".join(self.lines)

    def but_for(self, exception: str) -> Privacy:
        """The same guarantee with one more exception; unchanged if there is no guarantee."""
        if self.epsilon is None:
            return self
        return replace(self, not_covered=(*self.not_covered, exception))

    def to_dict(self) -> dict[str, Any]:
        """The fields, and the statement's lines."""
        return {
            **asdict(self),
            "assumptions": list(self.assumptions),
            "not_covered": list(self.not_covered),
            "statement": list(self.lines),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Privacy:
        """The inverse of `to_dict`."""
        values = {each.name: data[each.name] for each in fields(cls) if each.name in data}
        if values.get("influence"):
            values["influence"] = Influence(**values["influence"])
        values["assumptions"] = tuple(values["assumptions"])
        values["not_covered"] = tuple(values["not_covered"])
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of a release."""

    devices: int
    rounds: int
    bytes_per_device: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "seconds": round(self.seconds, 3)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Cost:
        """The inverse of `to_dict`."""
        return cls(**{each.name: data[each.name] for each in fields(cls) if each.name in data})


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Release:
    """The common part of all releases. `head` has these fields, in this order."""

    study: Mapping[str, Any]
    plan: Mapping[str, Any]
    privacy: Privacy
    cost: Cost
    notes: tuple[str, ...] = ()
    released: str | None = None  # the day on which a collector released it

    endings: ClassVar[tuple[str, ...]] = ("json",)  # of the files for `export`

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data."""
        return self.head()

    def head(self) -> dict[str, Any]:
        """Everything but estimates as plain data; common fields that are None are left out."""
        values = {each.name: getattr(self, each.name) for each in fields(Release)}
        return {name: _plain(value) for name, value in values.items() if value is not None}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`."""
        return cls(**cls._common(data), **cls._own(data))

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), ensure_ascii=False)

    def export(self, ending: str) -> bytes:
        """The content of a file with this ending; JSON has everything."""
        if ending not in self.endings:
            raise SpecError(
                f"a file of this release must end in {', '.join(self.endings)}; got {ending}",
                hint=self._hint,
            )
        return (self.to_json() + "\n").encode()

    @property
    def model_bytes(self) -> bytes | None:
        """The parameters of a model, which are not part of its plain data."""
        return None

    def timed(self, seconds: float, exception: str) -> Self:
        """The same release with its running time, which the guarantee does not cover."""
        cost = replace(self.cost, seconds=seconds)
        return replace(self, cost=cost, privacy=self.privacy.but_for(exception))

    _hint: ClassVar[str | None] = None

    @classmethod
    def _own(cls, data: Mapping[str, Any]) -> dict[str, Any]:
        """The fields that only this kind of release has."""
        return {}

    @staticmethod
    def _common(data: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **{each.name: data[each.name] for each in fields(Release) if each.name in data},
            "privacy": Privacy.from_dict(data["privacy"]),
            "cost": Cost.from_dict(data["cost"]),
            "notes": tuple(data["notes"]),
        }

    def _promise(self) -> str:
        if self.privacy.epsilon is None or math.isinf(self.privacy.epsilon):
            return "no differential privacy"
        each = " per report" if self.privacy.unit == "report" else ""
        return f"epsilon {epsilon_text(self.privacy.epsilon)}{each}, delta {self.privacy.delta:g}"


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def size_of_updates(rate: float) -> str:
    """What clients of a training sent, in words."""
    return "whole updates" if rate == 1 else f"{rate:.3g} parameters per cell"


def _cells(text: str) -> int:
    """How many cells of a terminal a text takes: two per ideograph or emoji."""
    return sum(
        0 if unicodedata.combining(each) or unicodedata.category(each) in ("Cf", "Me", "Mn")
        else 2 if unicodedata.east_asian_width(each) in ("F", "W")
        else 1
        for each in text
    )  # fmt: skip


def _plain(value: Any) -> Any:
    if isinstance(value, Privacy | Cost):
        return value.to_dict()
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, tuple) else value


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class EstimateRelease(Release, ABC):
    """A release of estimates with intervals, one row each."""

    endings: ClassVar[tuple[str, ...]] = ("json", "csv", "parquet", "png", "html")

    @abstractmethod
    def frame(self) -> pa.Table:
        """The estimates as an Arrow table; `.to_pandas()` makes it a data frame."""

    @abstractmethod
    def plot(self, *, top: int = 20, path: str | Path | None = None, ax: Any = None) -> Any:
        """Bars with error bars for the `top` largest estimates; needs `sfumato[plot]`.

        Returns the matplotlib figure, which notebooks show, and writes it to `path` (PNG, SVG, PDF)
        if given. With `ax` it draws into these axes of your own figure.
        """

    def to_pandas(self) -> Any:
        """The estimates as a DataFrame of pandas."""
        return self.frame().to_pandas()

    def to_polars(self) -> Any:
        """The estimates as a DataFrame of polars, which must be installed."""
        try:
            polars = importlib.import_module("polars")
        except ImportError as problem:
            raise SfumatoError("to_polars needs polars", hint="pip install polars") from problem
        return polars.DataFrame(self.frame())

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """The estimates for any library that reads Arrow's stream of batches."""
        return self.frame().__arrow_c_stream__(requested_schema)

    def _repr_html_(self) -> str:
        """The largest estimates as bars, the privacy statement and the cost, for notebooks."""
        return self._html(10, is_open=False)

    def _html(self, most: int | None, *, is_open: bool) -> str:
        frames = self._frames()
        tables = {name: html.rows(frame, most) for name, frame in frames.items()}
        left = sum(map(len, frames.values())) - sum(map(len, tables.values()))
        cost = [
            f"{self.cost.devices:,} devices",
            f"{self.cost.rounds:,} {'round' if self.cost.rounds == 1 else 'rounds'}",
            f"{self.cost.bytes_per_device:,} bytes per device",
            f"{self.cost.seconds:,.1f} seconds",
        ]
        return html.block(
            f"{self.study['question']}: {self.cost.devices:,} devices; {self._promise()}",
            tables,
            f"… and {left:,} more; frame() has them all" if left else "",
            [
                html.details("Privacy", self.privacy.lines, is_open=is_open),
                html.details("Cost", cost, is_open=is_open),
                html.details("Notes", self.notes, is_open=is_open),
            ],
        )

    def _frames(self) -> dict[str, pa.Table]:
        """The estimates as tables to show side by side, by name."""
        return {"": self.frame()}

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data; `estimates` lists one record per row of `frame`."""
        return {**self.head(), "estimates": self.frame().to_pylist()}

    def export(self, ending: str) -> bytes:
        """JSON has everything; CSV the estimates; Parquet the estimates, with the rest in its
        metadata; PNG bars with error bars, which need `sfumato[plot]`; HTML a page to read."""
        if ending == "html":
            body = self._html(None, is_open=True)
            return html.page(f"sfumato: {self.study['question']}", body).encode()
        if ending == "json" or ending not in self.endings:
            return Release.export(self, ending)
        file = io.BytesIO()
        if ending == "png":
            self.plot().savefig(file, dpi=150, format="png")
        elif ending == "csv":
            pa.csv.write_csv(self.frame(), file)
        else:
            about = {"sfumato": json.dumps(self.head())}
            pa.parquet.write_table(self.frame().replace_schema_metadata(about), file)
        return file.getvalue()

    def _bars(
        self,
        labels: Sequence[str],
        values: F64,
        errors: Any,
        meaning: str,
        *,
        path: str | Path | None,
        ax: Any,
        title: str = "",
    ) -> Any:
        count = len(labels)
        figure = pictures.figure(7, 0.28 * count + 1.6) if ax is None else ax.figure
        axes = figure.add_subplot() if ax is None else ax
        axes.barh(range(count), values, xerr=errors, color="#8a9bb5", ecolor="#2f3b52", capsize=2)
        axes.set_yticks(  # items may have dollar signs
            range(count), labels, parse_math=False, fontfamily=pictures.fonts()
        )
        axes.invert_yaxis()
        axes.set_xlabel(f"{meaning}, with 95% intervals")
        promise = f"{title}: {self._promise()}" if title else self._promise()
        axes.set_title(promise, fontsize=9, loc="left", parse_math=False)
        axes.spines[["top", "right"]].set_visible(False)
        if path is not None:
            figure.savefig(path, dpi=150)
        return figure


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CountRelease(EstimateRelease):
    """Estimated counts with 95% intervals, largest first, with their cost and privacy.

    A count is over all devices that were asked, of the items that they contribute: a device counts
    for at most `items_per_device` of its items. `low` and `high` cover the count with a probability
    of at least 95%, whatever it is, given that the item is shown; those of sketches and hashed
    reports cover about 95% of (item, run) pairs (docs/concepts/intervals.md). If zero is possible,
    `low` is at most zero. With `segments`, there is one answer after another (`of_segment`).
    """

    items: pa.Array
    counts: F64
    standard_error: F64
    low: F64
    high: F64
    significant: Bool  # held by somebody, at a family-wise level of 5% over all items
    segments: pa.Array | None = None  # of each row, if the study has segments

    columns: ClassVar[Mapping[str, str]] = {"item": "items", "count": "counts"} | {
        name: name for name in ("standard_error", "low", "high", "significant")
    }  # the field of each column

    def frame(self) -> pa.Table:
        """One row per item, largest first; with a column of segments, if the study has them."""
        segments = {} if self.segments is None else {"segment": self.segments}
        columns = {column: getattr(self, name) for column, name in self.columns.items()}
        return pa.table({**segments, **columns})

    def plot(self, *, top: int = 20, path: str | Path | None = None, ax: Any = None) -> Any:
        """Bars with error bars for the `top` items, those of segments side by side; see
        `EstimateRelease.plot`."""
        require.at_least(1, top=top)
        if self.segments is None:
            return self._plot(top, path=path, ax=ax)
        if ax is not None:
            raise SpecError(
                "each segment has axes of its own; got axes for all of them",
                hint="draw one with of_segment(name).plot(ax=…)",
            )
        answers = self.by_segment()
        rows = max(min(top, len(answer)) for answer in answers.values())
        figure = pictures.figure(4.5 * len(answers), 0.28 * rows + 1.6)
        for place, (name, answer) in enumerate(answers.items(), start=1):
            axes = figure.add_subplot(1, len(answers), place)
            answer._plot(top, path=None, ax=axes, title=name)
        if path is not None:
            figure.savefig(path, dpi=150)
        return figure

    def _plot(self, top: int, *, path: str | Path | None, ax: Any, title: str = "") -> Any:
        count = min(top, len(self))
        labels = [str(item) for item in self.items[:count].to_pylist()]
        errors = np.maximum([self.counts - self.low, self.high - self.counts], 0)[:, :count]
        return self._bars(
            labels, self.counts[:count], errors, "devices", path=path, ax=ax, title=title
        )

    def _frames(self) -> dict[str, pa.Table]:
        return {name: answer.frame() for name, answer in self.by_segment().items()}

    def by_segment(self) -> dict[str, CountRelease]:
        """The answer of each segment; without segments, the only one, under an empty name."""
        if self.segments is None:
            return {"": self}
        return {name: self.of_segment(name) for name in self.study["segments"]}

    def of_segment(self, segment: str) -> CountRelease:
        """The answer of one segment, as a release without segments."""
        names = self.study.get("segments", ())
        if self.segments is None or segment not in names:
            raise SpecError(
                f"a segment must be one of the study's ({', '.join(names) or 'it has none'}); "
                f"got {segment}"
            )
        rows = np.flatnonzero(np.array(self.segments.to_pylist(), dtype=object) == segment)
        return replace(
            self,
            items=self.items.take(pa.array(rows, type=pa.int64())),
            segments=None,
            counts=self.counts[rows],
            standard_error=self.standard_error[rows],
            low=self.low[rows],
            high=self.high[rows],
            significant=self.significant[rows],
        )

    @classmethod
    def _own(cls, data: Mapping[str, Any]) -> dict[str, Any]:
        rows = data["estimates"]
        values = {
            name: np.array([row.get(column) for row in rows], dtype=np.float64)
            for column, name in cls.columns.items()
            if name != "items"
        }
        return {
            **values,
            "items": pa.array([row["item"] for row in rows], type=pa.string()),
            "segments": pa.array([row["segment"] for row in rows], type=pa.string())
            if data["study"].get("segments") and (not rows or "segment" in rows[0])
            else None,
            "significant": values["significant"].astype(np.bool_),
        }

    def __len__(self) -> int:
        return len(self.counts)

    def __repr__(self) -> str:
        size = f"{_number(len(self), 'item')}, {_number(self.cost.devices, 'device')}"
        lines = [f"Release: {size}; {self._promise()}"]
        for name, answer in self.by_segment().items():
            lines += [name] if name else []
            lines += answer._lines()
        return "\n".join(lines)

    def _lines(self) -> list[str]:
        """The largest counts, one line each."""
        rows = min(10, len(self))
        names = [str(item)[:32] for item in self.items[:rows].to_pylist()]
        width = max(map(_cells, names), default=0)
        names = [name + " " * (width - _cells(name)) for name in names]
        lines = [
            f"  {name}  {count:>z14,.1f}  ({low:z,.1f} … {high:z,.1f})"
            for name, count, low, high in zip(
                names, self.counts[:rows], self.low[:rows], self.high[:rows], strict=True
            )
        ]
        if len(self) > rows:
            lines.append(f"  … and {len(self) - rows:,} more; frame() has them all")
        return lines


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class MeanRelease(EstimateRelease):
    """An estimated mean and its error, with its cost and privacy.

    `standard_error` is one number for all coordinates: the root mean square of their errors from
    noise, rounding and compression, and (an upper bound) from devices that did not answer. In that
    case the error is larger in coordinates in which devices differ more. It does not include the
    bias of clipping, nor the coordinates that `top` leaves out, which have no interval.
    """

    mean: F64
    standard_error: float
    names: tuple[str, ...] | None = None  # of the coordinates; numbers from 0 on without them

    @property
    def half_width(self) -> float:
        """Half the width of a 95% interval for one coordinate, on average over coordinates."""
        return NORMAL_95 * self.standard_error

    def frame(self) -> pa.Table:
        """One row per coordinate, in order."""
        size = len(self)
        left_out = self.mean == 0 if self.study.get("top") else np.zeros(size, dtype=np.bool_)
        return pa.table(
            {
                "coordinate": np.arange(size) if self.names is None else list(self.names),
                "mean": self.mean,
                "standard_error": np.full(size, self.standard_error),
                "low": pa.array(self.mean - self.half_width, mask=left_out),
                "high": pa.array(self.mean + self.half_width, mask=left_out),
            }
        )

    def plot(self, *, top: int = 20, path: str | Path | None = None, ax: Any = None) -> Any:
        """Bars with error bars for the `top` largest coordinates; see `EstimateRelease.plot`."""
        require.at_least(1, top=top)
        places = self._largest(top)
        labels, meaning = [self._name(place) for place in places], "mean of a coordinate"
        values = self.mean[places]
        return self._bars(labels, values, self.half_width, meaning, path=path, ax=ax)

    @classmethod
    def _own(cls, data: Mapping[str, Any]) -> dict[str, Any]:
        rows = data["estimates"]
        names = tuple(row["coordinate"] for row in rows)
        return {
            "names": names if all(isinstance(name, str) for name in names) and names else None,
            "mean": np.array([row["mean"] for row in rows], dtype=np.float64),
            "standard_error": float(rows[0]["standard_error"]) if rows else 0.0,
        }

    def __len__(self) -> int:
        return self.mean.size

    def __repr__(self) -> str:
        places = self._largest(10)
        lines = [
            f"MeanRelease: {len(self):,} coordinates, {self.cost.devices:,} devices; "
            f"{self._promise()}"
        ]
        lines += [
            f"  {self._name(place):>10}  {self.mean[place]:>12.6g} ± {self.half_width:.3g}"
            for place in places
        ]
        if len(self) > places.size:
            rest = len(self) - places.size
            lines.append(f"  … and {rest:,} smaller ones; frame() has them all")
        return "\n".join(lines)

    def _name(self, place: int) -> str:
        return str(place) if self.names is None else self.names[place]

    def _largest(self, most: int) -> I64:
        return np.argsort(-np.abs(self.mean), kind="stable")[:most]


MODEL_ENDING = "pt"  # of the file of parameters, which are not in a release


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ModelRelease(Release):
    """A model after its last round, without an accuracy: a collector has no test examples."""

    parameters: bytes = field(compare=False)  # float32, little-endian; empty if read from a file
    digest: str  # SHA-256 of the parameters
    count: int  # number of parameters
    rate: float  # model parameters per cell sent
    rounds_held: int  # rounds with enough devices

    _hint: ClassVar[str | None] = "export it as .json, and its parameters as .pt"

    @classmethod
    def of(cls, parameters: bytes, **others: Any) -> ModelRelease:
        count = len(parameters) // PARAMETER_BYTES
        return cls(parameters=parameters, digest=digest_of(parameters), count=count, **others)

    @property
    def model_bytes(self) -> bytes:
        return self.parameters

    def head(self) -> dict[str, Any]:
        """Everything but the parameters as plain data."""
        return {
            **Release.head(self),
            "model": {"parameters": self.count, "sha256": self.digest},
            "rate": self.rate,
            "rounds_held": self.rounds_held,
        }

    @classmethod
    def _own(cls, data: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "parameters": b"",
            "digest": data["model"]["sha256"],
            "count": data["model"]["parameters"],
            "rate": data["rate"],
            "rounds_held": data["rounds_held"],
        }

    def __repr__(self) -> str:
        epsilon = self.privacy.epsilon
        promise = (
            "no differential privacy" if epsilon is None else f"epsilon {epsilon_text(epsilon)}"
        )
        return (
            f"ModelRelease: {self.count:,} parameters after {self.rounds_held:,} rounds, "
            f"{size_of_updates(self.rate)}; {promise}"
        )
