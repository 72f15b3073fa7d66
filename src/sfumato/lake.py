"""The reports of a local study as Parquet files, and their fold: the same tally as the collector's.

A data set is a folder on a disk, or at any address that `fsspec` knows:

    study.json             the study, its plan, its tasks and their partitions; written last
    dictionary.parquet     the items, column `item`, if the study lists them
    task-0/00000.parquet   a partition: column `record`, bytes of one length, in random order

A partition has a JSON object under `sfumato` in the metadata of its schema: `version`, `task` (the
id), `export` (random, the same in all files of a data set) and `partition` (its own name). Its
pages have checksums.

A report has no id here: the collector counts a report once before it seals its records, and keeps
ids and records apart. What must count once is a partition. So `study.json` lists each of them once,
with its number of records, and a file is counted only if it says that it is this one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sfumato import files
from sfumato.engines import Engine, LocalEngine
from sfumato.errors import DataError, SpecError
from sfumato.flow.accumulator import COLUMN, RecordBatch, TallyAccumulator
from sfumato.flow.release import Release
from sfumato.flow.task import LocalTask
from sfumato.flow.word_discovery import WordTask
from sfumato.privacy import Rng
from sfumato.questions.answers import network_participation
from sfumato.questions.promise import TIME
from sfumato.questions.question import Dictionary, Plan
from sfumato.questions.registry import read_plan
from sfumato.spec import to_json

VERSION = 1
LIST = "study.json"
ITEMS = "dictionary.parquet"
_ABOUT = b"sfumato"  # key in the metadata of a file
_MOST_RECORDS, _MOST_BYTES = 1 << 22, 1 << 26  # about the most of a partition
_SHARD_RECORDS, _SHARD_BYTES = 1 << 24, 1 << 29  # about the least that has a tally of its own
_READ_BYTES = 1 << 23  # of records that are read together: they are counted while in the cache
_CHECKS = 8  # partitions that are checked at once, before the fold

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """A file of records, by its name in the data set."""

    name: str
    reports: int
    records: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What the partitions of a task have in common."""

    folder: str
    export: str
    task: Any  # LocalTask or WordTask

    @contextmanager
    def open(self, partition: Partition) -> Iterator[pq.ParquetFile]:
        """The file of a partition; DataError if it is not exactly this one."""
        path = f"{self.folder}/{partition.name}"
        with files.open_parquet(path) as file:
            about = _about(path, file)
            expected = _about_partition(self.task.id, self.export, partition.name)
            for name, value in expected.items():
                if about.get(name) != value:
                    raise DataError(
                        f"{path} must be a partition of {name} {value}; got {about.get(name)}"
                    )
            column = pa.field(COLUMN, pa.binary(self.task.record_bytes))
            if file.schema_arrow.field(0).type != column.type or file.schema_arrow.names != [
                COLUMN
            ]:
                raise DataError(
                    f"{path} must have one column, {COLUMN}, of {self.task.record_bytes} bytes"
                )
            if file.metadata.num_rows != partition.records:
                raise DataError(
                    f"{path} must have {partition.records:,} records; got "
                    f"{file.metadata.num_rows:,}"
                )
            yield file

    def read(self, partition: Partition) -> Iterator[pa.ChunkedArray]:
        """Its records, in parts."""
        with self.open(partition) as file:
            for part in file.iter_batches(max(1, _READ_BYTES // self.task.record_bytes)):
                yield pa.chunked_array([part.column(COLUMN)])

    def check(self, partition: Partition) -> None:
        """Raise DataError if its file is missing, cut, or another one; reads its end only."""
        with self.open(partition):
            pass

    def count(self, shard: tuple[Partition, ...]) -> RecordBatch:
        """The records of these partitions, counted. It needs memory for one tally and some MiB of
        records; it can be pickled, and calling it again gives the same."""
        together = TallyAccumulator(self.task)
        for partition in shard:
            for column in self.read(partition):
                together.add_column(column)
        return together.batch(sum(partition.reports for partition in shard))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Reports:
    """An exported study: its plan, and the partitions of each of its tasks."""

    folder: str
    export: str
    campaign: str
    plan: Plan
    tasks: tuple[tuple[str, tuple[Partition, ...]], ...]  # by the id of the task

    @classmethod
    def read(cls, address: Path | str) -> Reports:
        """The data set at an address. DataError if it is not complete: its list is written last."""
        folder = files.folder(address)
        path = f"{folder}/{LIST}"
        about = _versioned(files.read_bytes(path), path, "the list")
        try:
            return cls(
                folder=folder,
                export=about["export"],
                campaign=about["campaign"],
                plan=read_plan(
                    about["plan"],
                    study=json.dumps(about["study"]),
                    design=json.dumps(about["design"]),
                    dictionary=_read_items(folder, about["export"]) if about["items"] else None,
                ),
                tasks=tuple(
                    (task["id"], tuple(Partition(**each) for each in task["partitions"]))
                    for task in about["tasks"]
                ),
            )
        except (ValueError, KeyError, TypeError, SpecError) as problem:
            raise DataError(f"{path} is damaged: export the study again") from problem

    def count(
        self, *, engine: Engine | None = None, progress: Progress | None = None
    ) -> list[tuple[Any, RecordBatch]]:
        """Each task with its records counted, as the collector counts them.

        Every partition is checked before any is counted. One that turns out to be damaged later
        raises DataError with its name; there is no result then.
        """
        report = progress or (lambda stage, share: None)
        report("checking", 0.0)
        sources = [
            Source(folder=self.folder, export=self.export, task=task) for task in self._ask()
        ]
        pairs = [
            (source, partition)
            for source, (_, partitions) in zip(sources, self.tasks, strict=True)
            for partition in partitions
        ]
        with ThreadPoolExecutor(_CHECKS) as pool:
            list(pool.map(lambda pair: pair[0].check(pair[1]), pairs))
        engine, done, total = engine or LocalEngine(), 0, max(1, len(pairs))

        def shards(source: Source, partitions: Iterable[Partition]) -> Iterator[Any]:
            nonlocal done
            for shard in _shards(source.task, partitions):
                report("counting", done / total)
                yield shard
                done += len(shard)

        counts = []
        for source, (_, partitions) in zip(sources, self.tasks, strict=True):
            batch = engine.sum(source.count, shards(source, partitions))
            counts.append((source.task, source.count(()) if batch is None else batch))
        return counts

    def _ask(self) -> list[Any]:
        """The tasks, as the study's own design makes them."""
        campaign = self.plan.design.campaign(self.plan, name=self.campaign)
        tasks = []
        for task_id, _ in self.tasks:
            task = campaign.next_task()
            if not isinstance(task, LocalTask | WordTask) or task.id != task_id:
                raise DataError(
                    f"{self.folder}/{LIST} is damaged: its design does not ask task {task_id[:8]}"
                )
            tasks.append(task)
            campaign.absorb(TallyAccumulator(task).batch(0))  # local tasks depend on no answer
        return tasks

    def totals(self) -> dict[str, int]:
        """How many reports, records and partitions there are."""
        every = [partition for _, partitions in self.tasks for partition in partitions]
        return {
            "reports": sum(partition.reports for partition in every),
            "records": sum(partition.records for partition in every),
            "partitions": len(every),
        }

    def __repr__(self) -> str:  # never the records
        return f"Reports({self.folder}, {self.totals()['partitions']:,} partitions)"


def fold(
    address: Path | str, *, engine: Engine | None = None, progress: Progress | None = None
) -> Release:
    """The release of an exported study, from its tally: the collector's own, except for the time
    that it took and the day. Nothing is charged, as nothing is when a collector releases a local
    study: devices randomised the records before they sent them."""
    started = time.perf_counter()
    reports = Reports.read(address)
    counts = reports.count(engine=engine, progress=progress)
    campaign = reports.plan.design.campaign(reports.plan, name=reports.campaign)
    for _, batch in counts:
        campaign.absorb(batch)
    participation = network_participation(
        reports.plan, [(task, batch.count) for task, batch in counts]
    )
    release = reports.plan.design.answer(campaign, reports.plan, participation)
    return release.timed(time.perf_counter() - started, TIME)


def write(
    address: Path | str,
    plan: Plan,
    tasks: Iterable[tuple[Any, Iterable[tuple[pa.ChunkedArray, int]]]],
    *,
    campaign: str,
    rng: Rng,
) -> Reports:
    """Write a data set to a new or empty folder: for each task columns of its records, each with
    their number of reports. If it fails, what was written is deleted.

    The records of a partition are put in random order, so that nothing shows which were sealed
    together. It needs memory for a few partitions.
    """
    folder, export = files.folder(address), rng.words(2).tobytes().hex()
    files.create_folder(folder)
    try:
        listed = []
        for number, (task, sealed) in enumerate(tasks):
            source = Source(folder=folder, export=export, task=task)
            listed.append((task.id, tuple(_write_task(source, number, sealed, rng))))
        write_list(folder, plan, listed, export=export, campaign=campaign)
    except BaseException:
        files.delete_folder(folder)
        raise
    return Reports(folder=folder, export=export, campaign=campaign, plan=plan, tasks=tuple(listed))


def write_list(
    folder: str,
    plan: Plan,
    tasks: list[tuple[str, tuple[Partition, ...]]],
    *,
    export: str,
    campaign: str,
) -> None:
    """Make a folder with the partitions of tasks a data set, by the items and the list."""
    if plan.dictionary is not None:
        about = {"version": VERSION, "export": export}
        table = pa.table({"item": plan.dictionary.items})
        _write(f"{folder}/{ITEMS}", table, about, compression="zstd")
    with files.replace(f"{folder}/{LIST}") as file:
        file.write(json.dumps(_list(plan, export, campaign, tasks), indent=1).encode())


def write_partition(
    source: Source, name: str, records: pa.ChunkedArray, reports: int, *, rng: Rng
) -> Partition:
    """Write records in random order, in place of what has this name; they are on disk when this
    returns."""
    files.create_folder(f"{source.folder}/{name.rpartition('/')[0]}", new=False)
    order = np.argsort(rng.words(len(records)))
    table = pa.table({COLUMN: records.combine_chunks().take(pa.array(order))})
    about = _about_partition(source.task.id, source.export, name)
    _write(f"{source.folder}/{name}", table, about, compression="none")  # they are random bits
    return Partition(name=name, reports=reports, records=len(records))


def partition_name(task: int, place: int) -> str:
    """The name of a task's partition, both counted from 0."""
    return f"task-{task}/{place:05}.parquet"


def most_reports(message_bytes: int) -> int:
    """About the most reports of a partition."""
    return max(1, min(_MOST_RECORDS, _MOST_BYTES // message_bytes))


def _list(
    plan: Plan, export: str, campaign: str, tasks: list[tuple[str, tuple[Partition, ...]]]
) -> dict[str, Any]:
    return {
        "version": VERSION,
        "export": export,
        "campaign": campaign,
        "study": json.loads(to_json(plan.study)),
        "design": json.loads(to_json(plan.design)),
        "plan": plan.to_dict(),
        "items": plan.dictionary is not None,
        "tasks": [
            {"id": task_id, "partitions": [asdict(partition) for partition in partitions]}
            for task_id, partitions in tasks
        ],
    }


def _write_task(
    source: Source,
    number: int,
    sealed: Iterable[tuple[pa.ChunkedArray, int]],
    rng: Rng,
) -> Iterator[Partition]:
    """Write the partitions of a task."""
    for place, (records, reports) in enumerate(_groups(sealed)):
        name = partition_name(number, place)
        yield write_partition(source, name, records, reports, rng=rng)


def _groups(sealed: Iterable[tuple[pa.ChunkedArray, int]]) -> Iterator[tuple[pa.ChunkedArray, int]]:
    """Columns of records for a partition each, with their number of reports."""
    parts, reports = list[pa.Array](), 0
    for column, count in sealed:
        parts += column.chunks
        reports += count
        size = sum(len(part) for part in parts)
        if size >= _MOST_RECORDS or size * column.type.byte_width >= _MOST_BYTES:
            yield pa.chunked_array(parts), reports
            parts, reports = [], 0
    if parts:
        yield pa.chunked_array(parts), reports


def _write(path: str, table: pa.Table, about: Mapping[str, Any], compression: str) -> None:
    with files.replace(path) as file:
        pq.write_table(
            table.replace_schema_metadata({_ABOUT: json.dumps(about)}),
            file,
            compression=compression,
            use_dictionary=False,
            write_statistics=False,
            write_page_checksum=True,
        )


def _about_partition(task_id: str, export: str, name: str) -> dict[str, Any]:
    return {"version": VERSION, "task": task_id, "export": export, "partition": name}


def _about(path: str, file: pq.ParquetFile) -> dict[str, Any]:
    """What a file says about itself."""
    return _versioned((file.schema_arrow.metadata or {}).get(_ABOUT, b""), path, "a file")


def _versioned(text: bytes, path: str, what: str) -> dict[str, Any]:
    """JSON that an export has written."""
    try:
        about: dict[str, Any] = json.loads(text)
        version = about["version"]
    except (KeyError, ValueError, TypeError) as problem:
        raise DataError(f"{path} must be {what} of an exported study") from problem
    if version != VERSION:
        raise DataError(
            f"{path} must have version {VERSION}; got {version!r}",
            hint="use the release of sfumato that exported it, or a later one",
        )
    return about


def _read_items(folder: str, export: str) -> Dictionary:
    path = f"{folder}/{ITEMS}"
    with files.open_parquet(path) as file:
        if _about(path, file).get("export") != export:
            raise DataError(f"{path} must be of the export {export}")
        return Dictionary(file.read().column("item").combine_chunks())


def _shards(task: Any, partitions: Iterable[Partition]) -> Iterator[tuple[Partition, ...]]:
    """Partitions that are counted in one tally: many records, since a tally may be large."""
    least = min(_SHARD_RECORDS, _SHARD_BYTES // task.record_bytes)
    shard: list[Partition] = []
    for partition in partitions:
        shard.append(partition)
        if sum(each.records for each in shard) >= least:
            yield tuple(shard)
            shard = []
    if shard:
        yield tuple(shard)
