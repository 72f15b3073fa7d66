"""Simulated devices: their data, and which task asks which of them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sfumato import files
from sfumato.errors import DataError, SimulationWarning
from sfumato.flow.segments import LONGEST, SEPARATOR, is_segment
from sfumato.privacy import Rng, bound_contributions
from sfumato.questions.question import Question
from sfumato.sketch.vector import is_finite
from sfumato.study import Study

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
Reals = npt.NDArray[np.floating[Any]]
Data: TypeAlias = "Path | str | pa.Table | Mapping[str, Any] | Sequence[Any] | _Stream"

MOST_VALUES = 500_000_000  # limit for devices that hold several
_CHUNK_ROWS = 1 << 18
_GROUPS = (list, tuple, set, frozenset)  # the items of one device
_PIECE = 1 << 22  # how many numbers of vectors are clipped and sketched together


class _Stream(Protocol):
    """A data frame, or anything else that gives Arrow a stream of batches."""

    def __arrow_c_stream__(self, requested_schema: Any = None, /) -> Any: ...


@dataclass(frozen=True, slots=True, repr=False)
class Population:
    """Devices and their items, in chunks.

    A row is one device's item, or `weights` devices with that item. With `owners` (one chunk only)
    a row is one of several values of the device with that number, 0 .. devices − 1. If devices hold
    `vectors`, a row is the place of one of them.
    """

    chunks: tuple[pa.Array, ...]
    weights: tuple[I64, ...] | None
    owners: I64 | None
    devices: int
    vectors: Reals | None = None
    coordinates: tuple[str, ...] | None = None  # their names

    @classmethod
    def of_vectors(cls, vectors: Reals, coordinates: tuple[str, ...] | None = None) -> Population:
        """The devices with finite vectors, by their place in the data; others abstain."""
        step = max(1, _PIECE // vectors.shape[1])
        starts = range(0, len(vectors), step)
        places = [
            start + np.flatnonzero(is_finite(vectors[start : start + step])) for start in starts
        ]
        chunks = tuple(pa.array(part) for part in places if part.size)
        if not chunks:
            raise DataError("no vector in the data is finite, so there is no device to ask")
        return cls(chunks, None, None, sum(map(len, chunks)), vectors, coordinates)

    @classmethod
    def load(
        cls,
        data: Data,
        *,
        item_column: str | None = None,
        device_column: str | None = None,
        count_column: str | None = None,
        segment_column: str | None = None,
    ) -> Population:
        """Read the devices' items.

        `data` is the address of files (`sfumato.files`); a data frame of pandas, polars or DuckDB,
        or anything else with Arrow's stream of batches; a mapping of columns; a list of items; a
        list with the items of each device; or a mapping from items to numbers of devices, such as a
        Counter or pandas' `value_counts()`. With a segment column, the items are pairs
        (`flow.segments`).
        """
        if not isinstance(data, Path | str):
            data, roles = _table(data)
            device_column = device_column or roles.get("device")
            count_column = count_column or roles.get("count")
        items: list[pa.Array] = []
        counts: list[I64] = []
        names: list[pa.Array] = []
        for batch in _batches(data, item_column, device_column, count_column, segment_column):
            values = _present(batch.column("item"), "items")
            items.append(_pairs(batch.column("segment"), values) if segment_column else values)
            if count_column:
                counts.append(_whole(batch.column("count"), count_column))
            if device_column:
                names.append(_present(batch.column("device"), "devices"))
        if not items:
            raise DataError("the data has no rows; a simulation needs at least one device")
        if device_column:
            return cls._grouped(items, counts, names)
        if not counts:
            return cls(tuple(items), None, None, sum(map(len, items)))
        devices = sum(int(part.sum()) for part in counts)
        if devices == 0:
            raise DataError(f"the counts in {count_column!r} must not all be zero")
        return cls(tuple(items), tuple(counts), None, devices)

    @classmethod
    def _grouped(
        cls, items: list[pa.Array], counts: list[I64], names: list[pa.Array]
    ) -> Population:
        named = pa.concat_arrays(names).dictionary_encode()
        owners = named.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        values = pa.concat_arrays(items)
        if counts:  # three of an item are three values to choose from
            count = np.concatenate(counts)
            if count.sum() > MOST_VALUES:
                raise DataError(
                    f"the devices must hold at most {MOST_VALUES:,} values; got {count.sum():,}"
                )
            rows = np.repeat(np.arange(count.size), count)
            values, owners = values.take(pa.array(rows)), owners[rows]
        return cls((values,), None, owners, len(named.dictionary))

    def expanded(self) -> Population:
        """The same population with one row per device, so that devices have numbers: their places,
        0 .. devices − 1."""
        if self.weights is None:
            return self
        chunks = [
            items.take(pa.array(np.repeat(np.arange(len(items)), count)))
            for items, count in zip(self.chunks, self.weights, strict=True)
        ]
        return replace(self, chunks=tuple(chunks), weights=None)

    def bounded(self, limit: int, *, rng: Rng) -> Population:
        """At most `limit` values per device, chosen at random from its own.

        The number of values left out depends on the data, so a simulation may warn about it, but a
        release must not reveal it.
        """
        if self.owners is None:
            return self
        rows = bound_contributions(self.owners, limit, rng=rng)
        if rows.size < self.owners.size:
            warnings.warn(
                f"the simulated devices hold {self.owners.size:,} values and report {rows.size:,} "
                f"of them ({1 - rows.size / self.owners.size:.1%} are left out); set a larger "
                'items_per_device (daily_reports with trust "local") to report more',
                SimulationWarning,
                stacklevel=2,
            )
        return replace(
            self, chunks=(self.chunks[0].take(pa.array(rows)),), owners=self.owners[rows]
        )

    def distinct(self) -> Population:
        """Each item of a device once."""
        if self.owners is None:
            return self
        codes = self.chunks[0].dictionary_encode().indices.to_numpy(zero_copy_only=False)
        pairs = np.stack([self.owners, codes.astype(np.int64)], axis=1)
        rows = np.sort(np.unique(pairs, axis=0, return_index=True)[1])
        return self.only(rows, self.chunks[0].take(pa.array(rows)))

    def only(self, rows: I64, items: pa.Array) -> Population:
        """Only these rows, with `items` as their values; the number of devices stays the same."""
        assert self.owners is not None  # otherwise a row is a device
        return replace(self, chunks=(items,), owners=self.owners[rows])

    def __repr__(self) -> str:  # never the data
        return f"Population({self.devices:,} devices)"


@dataclass(frozen=True, slots=True, repr=False)
class Shard:
    """Some devices of one cohort, with the items of those that answer."""

    items: pa.Array
    weights: I64 | None
    devices: int  # number asked
    answering: int
    owners: I64 | None = None  # the answering device of each item; None: one item per device
    numbers: I64 | None = None
    """The places of the answering devices in the population; None if rows stand for several."""

    def each_device(self) -> Iterator[pa.Array]:
        """The items of one answering device after another."""
        if self.owners is not None:
            order = np.argsort(self.owners, kind="stable")
            counts = np.bincount(self.owners, minlength=self.answering)
            ends = np.cumsum(counts)
            items = self.items.take(pa.array(order))
            for count, end in zip(counts.tolist(), ends.tolist(), strict=True):
                yield items.slice(end - count, count)
            return
        repeats = [1] * len(self.items) if self.weights is None else self.weights.tolist()
        for row, count in enumerate(repeats):
            for _ in range(count):
                yield self.items.slice(row, 1)

    def __repr__(self) -> str:  # never the data
        return f"Shard({self.answering:,} of {self.devices:,} devices)"


@dataclass(frozen=True, slots=True)
class Cohorts:
    """Which task asks which devices. A device is in at most one cohort.

    Devices are assigned to cohorts at random, or `in_order` of the data. The random numbers are
    drawn again from their seed when they are needed, so nothing is stored per device. If sizes must
    be `exact`, as for masked rounds, devices are shuffled and divided.
    """

    shares: Mapping[str, float]  # of the population, by cohort; at most one together
    in_order: bool
    dropout: float
    seed: int
    exact: bool = False

    @classmethod
    def of(
        cls, study: Study, question: Question, seed: int, devices: int, *, exact: bool = False
    ) -> Cohorts:
        """The cohorts of a question in a population of `devices` devices.

        Masked rounds need cohorts of the planned size, and so do tasks that close at a number.
        """
        share = min(1.0, question.devices / devices)
        return cls(
            shares={name: share * part for name, part in question.cohorts().items()},
            in_order=study.cohorts == "different",
            dropout=study.expected_dropout,
            seed=seed,
            exact=exact or study.is_masked,
        )

    def shards(self, population: Population, cohort: str) -> Iterator[Shard]:
        """The devices of one cohort, in shards."""
        index = list(self.shares).index(cohort)
        start = 0
        for number, items in enumerate(population.chunks):
            chance = np.random.default_rng([self.seed, number])
            if population.weights is not None:
                weights = population.weights[number]
                yield from self._weighted(items, weights, index, start, population.devices, chance)
                start += int(weights.sum())
                continue
            devices = len(items) if population.owners is None else population.devices
            is_asked = self._place(start, devices, population.devices, chance) == index
            is_answering = is_asked & (chance.random(devices) >= self.dropout)
            owners, rows = population.owners, is_answering
            if owners is not None:
                rows = is_answering[owners]
                owners = (np.cumsum(is_answering) - 1)[owners[rows]]
            numbers = start + np.flatnonzero(is_answering)
            start += devices
            values = items.filter(pa.array(rows))
            yield Shard(values, None, int(is_asked.sum()), numbers.size, owners, numbers)

    def numbers(self, population: Population, cohort: str) -> I64:
        """The places of the answering devices of a cohort, in a population with one row per device
        (`Population.expanded`)."""
        if population.weights is not None:
            raise DataError("devices that share a row have no numbers; call expanded() first")
        parts = [shard.numbers for shard in self.shards(population, cohort)]
        return np.concatenate([part for part in parts if part is not None])

    def _weighted(
        self,
        items: pa.Array,
        weights: I64,
        index: int,
        start: int,
        devices: int,
        chance: np.random.Generator,
    ) -> Iterator[Shard]:
        if self.in_order:
            ends = start + np.cumsum(weights)
            first, last = np.rint(self._cuts()[index : index + 2] * devices).astype(np.int64)
            begins = ends - weights
            counts = np.clip(last, begins, ends) - np.clip(first, begins, ends)
        elif self.exact:
            order = _shuffled(self.seed, devices)[start : start + int(weights.sum())]
            inside = np.searchsorted(self._cuts()[1:], (order + 0.5) / devices, "right") == index
            counted = np.r_[0, np.cumsum(inside)]
            ends = np.cumsum(weights)
            counts = counted[ends] - counted[ends - weights]
        else:
            chances = np.r_[list(self.shares.values()), 0.0]
            chances[-1] = max(0.0, 1 - chances.sum())
            counts = chance.multinomial(weights, chances)[:, index]
        own = np.random.default_rng([self.seed, start, index])  # cohorts drop out independently
        answering = own.binomial(counts, 1 - self.dropout)
        rows = np.flatnonzero(answering)
        yield Shard(
            items.take(pa.array(rows)), answering[rows], int(counts.sum()), int(answering.sum())
        )

    def _place(self, start: int, count: int, devices: int, chance: np.random.Generator) -> I64:
        """The index of the cohort of each of `count` devices; for others, the number of cohorts."""
        place = chance.random(count)
        if self.in_order:
            place = (np.arange(start, start + count) + 0.5) / devices
        elif self.exact:
            place = (_shuffled(self.seed, devices)[start : start + count] + 0.5) / devices
        return np.searchsorted(self._cuts()[1:], place, side="right")

    def _cuts(self) -> F64:
        cuts = np.cumsum([0.0, *self.shares.values()])
        return np.where(cuts > 1 - 1e-9, 1.0, cuts)


@lru_cache(maxsize=1)
def _shuffled(seed: int, devices: int) -> I64:
    return np.random.default_rng([seed, devices]).permutation(devices)


def _batches(
    data: Data,
    item_column: str | None,
    device_column: str | None,
    count_column: str | None,
    segment_column: str | None,
) -> Iterator[pa.RecordBatch]:
    """Rows as columns "item" (string) and, if named, "device" (string), "count" (number) and
    "segment" (string)."""
    roles = [
        ("device", device_column, pa.string()),
        ("count", count_column, pa.float64()),
        ("segment", segment_column, pa.string()),
    ]
    extra = [(role, name, kind) for role, name, kind in roles if name]
    if isinstance(data, Path | str):
        columns = files.column_names(data)
        item = item_column or _item_among(columns, count_column)
        source = files.read_columns(
            data, [item, *(name for _, name, _ in extra)], [pa.string(), *(k for *_, k in extra)]
        )
    else:
        source = _from_memory(data, item_column, extra)
    for batch in source:
        named = batch.rename_columns(["item", *(role for role, *_ in extra)])
        for start in range(0, len(named), _CHUNK_ROWS):
            yield named.slice(start, _CHUNK_ROWS)


def _from_memory(
    data: pa.Table, item_column: str | None, extra: list[tuple[str, str, pa.DataType]]
) -> Iterator[pa.RecordBatch]:
    names = data.column_names
    item = item_column or _item_among(names, next((n for r, n, _ in extra if r == "count"), None))
    schema = {item: pa.string(), **{name: kind for _, name, kind in extra}}
    for name in schema:
        if name not in names:
            raise DataError(f"the data has no column {name!r}; its columns are {', '.join(names)}")
    try:
        columns = [data.column(name).cast(kind) for name, kind in schema.items()]
    except pa.ArrowException as problem:
        raise DataError(f"the data cannot be read as items: {problem}") from problem
    yield from pa.table(columns, names=list(schema)).to_batches()


def _pairs(segments: pa.Array, items: pa.Array) -> pa.Array:
    """The items with their segments, as devices report them."""
    if wrong := [
        name for name in _present(segments, "segments").unique().to_pylist() if not is_segment(name)
    ]:
        raise DataError(
            f"a segment must be 1 to {LONGEST} printable characters without spaces around them; "
            f"got {wrong[0]!r}"
        )
    return pc.binary_join_element_wise(segments, items, SEPARATOR)


def _item_among(columns: Sequence[str], count_column: str | None) -> str:
    """The column of items: the one of that name, or the first."""
    item = "item" if "item" in columns else columns[0]
    if count_column is None and "count" in columns and item != "count":
        warnings.warn(
            "the data has a column 'count', which is not used: every row is one device; with "
            "count_column='count' (--count-column count) a row is that many devices",
            SimulationWarning,
            stacklevel=2,
        )
    return item


def _table(data: Any) -> tuple[pa.Table, dict[str, str]]:
    """Data in memory as a table, and the columns of devices or counts that its kind implies."""
    if isinstance(data, Mapping) and data and all(map(_is_count, data.values())):
        return files.table({"item": list(data), "count": list(data.values())}), {"count": "count"}
    if getattr(data, "name", None) == "count" and hasattr(data, "index"):  # value_counts of pandas
        return files.table({"item": list(data.index), "count": list(data)}), {"count": "count"}
    if isinstance(data, list | tuple) and data and all(isinstance(each, _GROUPS) for each in data):
        if [] in (groups := [list(each) for each in data]):
            raise DataError(
                f"every device must hold at least one item; device {groups.index([])} holds none",
                hint="leave out devices without items",
            )
        devices = [str(place) for place, items in enumerate(groups) for _ in items]
        items = [item for group in groups for item in group]
        return files.table({"item": items, "device": devices}), {"device": "device"}
    return files.table(data if files.is_table(data) else {"item": data}), {}


def _is_count(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _present(column: pa.Array, what: str) -> pa.Array:
    if column.null_count:
        values = "value" if column.null_count == 1 else "values"
        raise DataError(
            f"{what} must not be missing; got {column.null_count:,} missing {values}",
            hint="leave out rows without a value",
        )
    return column


def _whole(column: pa.Array, name: str) -> I64:
    """Counts as whole numbers; missing, negative and fractional ones raise DataError."""
    values = _present(column, f"counts in {name!r}").to_numpy(zero_copy_only=False)
    wrong = ~((values >= 0) & (values < 2**53) & (values == np.floor(values)))
    if wrong.any():
        raise DataError(
            f"counts in {name!r} must be whole numbers of at least 0; got {values[wrong][0]:g} "
            f"(wrong values: {int(wrong.sum()):,})"
        )
    whole: I64 = values.astype(np.int64)
    return whole
