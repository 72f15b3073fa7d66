"""Simulated devices: their data, and which task asks which of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sfumato import files
from sfumato.arrays import F64, I64
from sfumato.errors import DataError, SimulationWarning
from sfumato.flow.segments import LONGEST, SEPARATOR, is_segment
from sfumato.privacy import Rng, bound_contributions
from sfumato.questions.question import Question
from sfumato.sketch.vector import is_finite
from sfumato.study import Study

Reals = npt.NDArray[np.floating[Any]]
Data: TypeAlias = "Path | str | pa.Table | Mapping[str, Any] | Sequence[Any] | _Stream"

MOST_VALUES = 500_000_000  # limit for devices that hold several
_CHUNK_ROWS = 1 << 18
_SHARD_DEVICES = 1 << 20  # devices of a shard, if rows stand for several
_LARGEST_DRAW = 1_000_000_000 - 1  # devices that numpy divides exactly
_GROUPS = (list, tuple, set, frozenset)  # the items of one device
_ROW = "row of the data"  # a column that tells devices apart
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
        list, or a column of lists, with the items of each device; or a mapping from items to
        numbers of devices, such as a Counter or pandas' `value_counts()`. With a segment column,
        the items are pairs (`flow.segments`).
        """
        others = (device_column, count_column, segment_column)
        if item_column is None and not any(others):
            _refuse_lists_of_counts(data)
        is_file, is_frame = isinstance(data, Path | str), _is_frame(data)
        roles: Mapping[str, str] = {}
        if not is_file and not is_frame:
            data, roles = _table(data)
        count_column = count_column or roles.get("count")
        columns = _columns_of(data)
        is_warned = item_column is None and "count" in columns
        if item_column is None:
            item_column = _item_among(columns, (device_column, count_column, segment_column))
        if is_frame:
            data = files.table(_columns_read(data, item_column, others))
        if not is_file and _has_lists(data, item_column):
            data, device_column = _one_item_per_row(data, item_column, device_column)
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
            if not is_warned:
                _warn_of_counts(columns, (item_column, segment_column), items)
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

    def row_devices(self) -> I64:
        """The number of devices of each row; of each chunk, if a row is one device or one value."""
        if self.weights is not None:
            return np.concatenate(self.weights)
        counts = [self.devices] if self.owners is not None else [len(part) for part in self.chunks]
        return np.array(counts, dtype=np.int64)

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
            SimulationWarning.warn(
                f"the simulated devices hold {self.owners.size:,} values and report {rows.size:,} "
                f"of them ({1 - rows.size / self.owners.size:.1%} are left out); set a larger "
                'items_per_device (daily_reports with trust "local") to report more'
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

    def pieces(self) -> Iterator[Shard]:
        """The answering devices in shards of bounded size, without their numbers."""
        if self.owners is not None:
            order = np.argsort(self.owners, kind="stable")
            for first in range(0, self.answering, _CHUNK_ROWS):
                last = min(first + _CHUNK_ROWS, self.answering)
                rows = order[slice(*np.searchsorted(self.owners[order], [first, last]))]
                items = self.items.take(pa.array(rows))
                yield Shard(items, None, 0, last - first, self.owners[rows] - first)
        elif self.weights is not None:
            ends = np.cumsum(self.weights)
            for first in range(0, self.answering, _SHARD_DEVICES):
                last = min(first + _SHARD_DEVICES, self.answering)
                least, most = np.searchsorted(ends, [first, last - 1], side="right")
                rows = np.arange(least, most + 1)
                weights = np.minimum(ends[rows], last) - np.maximum(
                    (ends - self.weights)[rows], first
                )
                yield Shard(self.items.take(pa.array(rows)), weights, 0, last - first)
        elif self.answering:
            yield Shard(self.items, None, 0, self.answering)

    def __repr__(self) -> str:  # never the data
        return f"Shard({self.answering:,} of {self.devices:,} devices)"


@dataclass(frozen=True, slots=True)
class Cohorts:
    """Which task asks which devices. A device is in at most one cohort.

    Devices are assigned to cohorts at random, or `in_order` of the data. The random numbers are
    drawn again from their seed when they are needed, so nothing is stored per device. If sizes must
    be `exact`, as for masked rounds, the devices of every row are divided by hypergeometric draws:
    first between two halves of the cohorts, then between the halves of a half.
    """

    shares: Mapping[str, float]  # of the population, by cohort; at most one together
    in_order: bool
    dropout: float
    seed: int
    exact: bool = False
    _path: list[_Node] = field(default_factory=list, init=False, repr=False, compare=False)

    @classmethod
    def of(
        cls, study: Study, question: Question, seed: int, devices: int, *, exact: bool = False
    ) -> Cohorts:
        """The cohorts of a question in a population of `devices` devices.

        Masked rounds need cohorts of the planned size, and so do tasks that close at a number.
        """
        exact = exact or study.is_masked
        if exact and devices > _LARGEST_DRAW:
            raise DataError(
                f"masked rounds can be simulated with at most {_LARGEST_DRAW:,} devices; got "
                f"{devices:,}"
            )
        share = min(1.0, question.devices / devices)
        return cls(
            shares={name: share * part for name, part in question.cohorts().items()},
            in_order=study.cohorts == "different",
            dropout=study.expected_dropout,
            seed=seed,
            exact=exact,
        )

    def shards(self, population: Population, cohort: str) -> Iterator[Shard]:
        """The devices of one cohort, in shards."""
        index = list(self.shares).index(cohort)
        start = 0
        for number, items in enumerate(population.chunks):
            if population.weights is not None:
                yield self._weighted(population, number, index)
                continue
            devices = len(items) if population.owners is None else population.devices
            if self.exact and not self.in_order:
                before, inside = (int(each[number]) for each in self._divide(population, index))
                chance = np.random.default_rng([self.seed, number, 0, 1])
                is_asked = np.zeros(devices, dtype=np.bool_)
                is_asked[chance.permutation(devices)[before : before + inside]] = True
            else:
                chance = np.random.default_rng([self.seed, number])
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

    def _weighted(self, population: Population, number: int, index: int) -> Shard:
        """The devices of one cohort in a chunk whose rows stand for several."""
        start = sum(len(items) for items in population.chunks[:number])
        items = population.chunks[number]
        counts = self._divide(population, index)[1][start : start + len(items)]
        chance = np.random.default_rng([self.seed, number, index, 2])  # cohorts are independent
        answering = chance.binomial(counts, 1 - self.dropout)
        rows = np.flatnonzero(answering)
        return Shard(
            items.take(pa.array(rows)), answering[rows], int(counts.sum()), int(answering.sum())
        )

    def _place(self, start: int, count: int, devices: int, chance: np.random.Generator) -> I64:
        """The index of the cohort of each of `count` devices; for others, the number of cohorts."""
        place = chance.random(count)
        if self.in_order:
            place = (np.arange(start, start + count) + 0.5) / devices
        return np.searchsorted(self._cuts()[1:], place, side="right")

    def _divide(self, population: Population, index: int) -> tuple[I64, I64]:
        """How many devices of each row, or of each chunk if a row is one device, are in earlier
        cohorts, and how many in this one."""
        if self._path and self._path[0].population is not population:
            self._path.clear()
        if not self._path:
            total = population.row_devices()
            root = _Node(population, 0, len(self.shares) + 1, np.zeros_like(total), total)
            self._path.append(root)
        if self.in_order:
            ends = np.cumsum(self._path[0].inside)
            begins = ends - self._path[0].inside
            first, last = self._ends(population.devices)[index : index + 2]
            before, upto = np.clip(first, begins, ends), np.clip(last, begins, ends)
            return before - begins, upto - before
        while not self._path[-1].low <= index < self._path[-1].high:
            self._path.pop()
        while (node := self._path[-1]).high - node.low > 1:
            middle = (node.low + node.high) // 2
            left = self._left(node, middle)
            if index < middle:
                node = _Node(population, node.low, middle, node.before, left)
            else:
                before, inside = node.before + left, node.inside - left
                node = _Node(population, middle, node.high, before, inside)
            self._path.append(node)
        return node.before, node.inside

    def _left(self, node: _Node, middle: int) -> I64:
        """How many devices of each row of a node are in its cohorts before `middle`."""
        chance = np.random.default_rng([self.seed, node.low, node.high, 3])
        if self.exact:
            first, between, last = (
                int(end)
                for end in self._ends(node.population.devices)[[node.low, middle, node.high]]
            )
            if between in (first, last):
                return node.inside * int(between == last)
            rows = np.flatnonzero(node.inside)
            if 2 * rows.size > node.inside.size:
                return np.asarray(chance.multivariate_hypergeometric(node.inside, between - first))
            left = np.zeros_like(node.inside)  # small cohorts have devices of few rows
            left[rows] = chance.multivariate_hypergeometric(node.inside[rows], between - first)
            return left
        first, between, last = np.r_[self._cuts(), 1.0][[node.low, middle, node.high]]
        if first == last:
            return np.zeros_like(node.inside)
        return np.asarray(chance.binomial(node.inside, (between - first) / (last - first)))

    def _ends(self, devices: int) -> I64:
        """How many of the devices are in the first cohorts: none, one, two, … and all."""
        return np.asarray(
            np.r_[np.rint(self._cuts() * devices).astype(np.int64), devices], dtype=np.int64
        )

    def _cuts(self) -> F64:
        cuts = np.cumsum([0.0, *self.shares.values()])
        return np.where(cuts > 1 - 1e-9, 1.0, cuts)


@dataclass(frozen=True, slots=True, repr=False)
class _Node:
    """Some cohorts next to each other: how many devices of each row they and earlier ones have."""

    population: Population
    low: int
    high: int
    before: I64
    inside: I64


def _batches(
    data: Data,
    item_column: str,
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
        names = [item_column, *(name for _, name, _ in extra)]
        source = files.read_columns(data, names, [pa.string(), *(kind for *_, kind in extra)])
    else:
        source = _from_memory(data, item_column, extra)
    for batch in source:
        named = batch.rename_columns(["item", *(role for role, *_ in extra)])
        for start in range(0, len(named), _CHUNK_ROWS):
            yield named.slice(start, _CHUNK_ROWS)


def _from_memory(
    data: pa.Table, item: str, extra: list[tuple[str, str, pa.DataType]]
) -> Iterator[pa.RecordBatch]:
    schema = {item: pa.string(), **{name: kind for _, name, kind in extra}}
    _require_columns(schema, data.column_names)
    columns = []
    for name, kind in schema.items():
        column = data.column(name)
        try:
            columns.append(column.cast(kind))
        except pa.ArrowException as problem:
            what = "items" if name == item else "numbers" if kind == pa.float64() else "texts"
            raise DataError(
                f"column {name!r} of the data cannot be read as {what}: {problem}"
            ) from problem
    yield from pa.table(columns, names=list(schema)).to_batches()


def _require_columns(columns: Iterable[str], names: Sequence[str]) -> None:
    for name in columns:
        if name not in names:
            raise DataError(f"the data has no column {name!r}; its columns are {', '.join(names)}")


def _is_frame(data: Any) -> bool:
    """Whether data is a data frame of pandas, whose columns may have values that Arrow refuses."""
    return hasattr(data, "iloc") and files.is_table(data)


def _columns_read(data: Any, item: str, others: tuple[str | None, ...]) -> Any:
    """A data frame of pandas with only the columns that are read."""
    names = [*map(str, data.columns)]
    columns = [name for name in (item, *others) if name]
    _require_columns(columns, names)
    return data.loc[:, [name in columns for name in names]]


def _columns_of(data: Any) -> dict[str, str]:
    """What the columns of a file or table hold: "items" (texts and lists), "whole" or "other"
    numbers."""
    if _is_frame(data):
        kinds = zip(map(str, data.columns), (kind.kind for kind in data.dtypes), strict=True)
        return {
            name: "whole" if kind in "iu" else "other" if kind in "bfcmM" else "items"
            for name, kind in kinds
        }
    schema = files.schema(data) if isinstance(data, Path | str) else data.schema
    return {
        each.name: "whole"
        if pa.types.is_integer(each.type)
        else "other"
        if pa.types.is_primitive(each.type)
        else "items"
        for each in schema
    }


def _has_lists(data: pa.Table, name: str) -> bool:
    if name not in data.column_names:
        return False
    kind = data.schema.field(name).type
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _one_item_per_row(data: pa.Table, item: str, device_column: str | None) -> tuple[pa.Table, str]:
    """A table whose rows have lists of items as one with an item per row, and the name of its
    column of devices: a row was a device."""
    lists = _present(data.column(item).combine_chunks(), "items")
    lengths = pc.list_value_length(lists).to_numpy(zero_copy_only=False)
    if 0 in lengths:
        raise DataError(
            "every device must hold at least one item; "
            f"device {np.argmin(lengths)} (counted from 0) holds none",
            hint="leave out devices without items",
        )
    rows = np.repeat(np.arange(len(lengths)), lengths)
    columns = {}
    for name, values in zip(data.column_names, data.columns, strict=True):
        if name != item:  # views, which polars has, cannot be taken from
            is_view = pa.types.is_string_view(values.type)
            columns[name] = (values.cast(pa.string()) if is_view else values).take(pa.array(rows))
    columns |= {item: pc.list_flatten(lists), _ROW: pa.array(rows)}
    return pa.table(columns), device_column or _ROW


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


def _item_among(columns: Mapping[str, str], others: tuple[str | None, ...]) -> str:
    """The column of items: the one of that name, or the first."""
    _, count_column, _ = others
    item = "item" if "item" in columns else next(iter(columns), "item")
    rest = [name for name in columns if name not in (item, "count", *others)]
    is_only = columns.get(item) == "items" and all(columns[name] != "items" for name in rest)
    if item != "item" and rest and not is_only:
        SimulationWarning.warn(
            f"the items are those of the column {item!r}, the first one; with item_column "
            f"(--item-column) they are those of another, such as {rest[0]!r}"
        )
    if count_column is None and "count" in columns and item != "count":
        _warn_of_count("count", "the data has")
    return item


def _warn_of_counts(
    columns: Mapping[str, str], used: tuple[str | None, ...], items: Sequence[pa.Array]
) -> None:
    """Warn if every item occurs once and a column that is not used may count devices."""
    whole = [name for name, kind in columns.items() if kind == "whole" and name not in used]
    if not whole or len(items[0]) > len(items[0].unique()):
        return
    if sum(map(len, items)) == len(pa.chunked_array(items).unique()):
        _warn_of_count(whole[0], "every item occurs once, and the data has")


def _warn_of_count(column: str, why: str) -> None:
    SimulationWarning.warn(
        f"{why} a column {column!r}, which is not used: every row is one device; with "
        f"count_column={column!r} (--count-column {column}) a row is that many devices"
    )


def _refuse_lists_of_counts(data: Any) -> None:
    """Refuse {"oak": [600], "elm": [300]}: counts of items, written as columns."""
    if not isinstance(data, Mapping) or "item" in data or not data:
        return
    if all(
        isinstance(each, list | tuple) and len(each) == 1 and _is_count(each[0])
        for each in data.values()
    ):
        raise DataError(
            "a mapping from items to counts must have numbers; got lists of one number",
            hint="give the numbers without lists, or name the column of items with item_column "
            "if the lists are columns",
        )


def _table(data: Any) -> tuple[pa.Table, dict[str, str]]:
    """Data in memory as a table, and the columns of devices or counts that its kind implies."""
    if isinstance(data, Mapping) and data and all(map(_is_count, data.values())):
        return files.table({"item": list(data), "count": list(data.values())}), {"count": "count"}
    if hasattr(data, "iloc") and not files.is_table(data):  # a Series of pandas
        if data.name == "count":  # of value_counts()
            return files.table(_counts(data)), {"count": "count"}
        if data.dtype.kind == "f" and (data.name == "proportion" or data.index.dtype.kind in "OU"):
            raise DataError(
                "counts of items must be whole numbers of devices; got a Series of real numbers "
                "whose index has the items",
                hint="leave out normalize=True of value_counts(), or give list(series) if the "
                "numbers are values of devices",
            )
        if data.name is None and not hasattr(data.index, "step") and data.dtype.kind in "iu":
            raise DataError(
                "a Series of whole numbers without a name, but with an index, may have counts of "
                "items or values of devices",
                hint="give series.to_dict() if it has counts, and list(series) if it has values",
            )
    if isinstance(data, list | tuple) and data and all(isinstance(each, _GROUPS) for each in data):
        return files.table({"item": [list(each) for each in data]}), {}
    return files.table(data if files.is_table(data) else {"item": data}), {}


def _counts(series: Any) -> dict[str, list[Any]]:
    items = [
        None if missing else item
        for item, missing in zip(series.index, series.index.isna(), strict=True)
    ]
    return {"item": items, "count": list(series)}


def _is_count(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _present(column: pa.Array, what: str) -> pa.Array:
    if column.null_count:
        values = "value" if column.null_count == 1 else "values"
        raise DataError(
            f"{what} must not be missing; got {column.null_count:,} missing {values}",
            hint="leave out rows without a value (dropna() of a data frame), or give them one",
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
