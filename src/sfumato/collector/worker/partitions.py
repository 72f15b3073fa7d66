"""Move the sealed records of local studies from the store to files in the lake (`sfumato.lake`).

The store decides first which records go to which file; then the file is written, and read again;
then one transaction deletes the records and names the file in their place. A worker that is killed
writes the same records to the same file once more. So every record is counted once, from its row
or from its file, and a file that the store does not name is not counted at all.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from sfumato import files, lake
from sfumato.collector import studies
from sfumato.collector.store.store import Store, StudyRow, TaskRow
from sfumato.errors import DataError
from sfumato.privacy import Rng


def move(
    store: Store, row: StudyRow, task_row: TaskRow, task: Any, *, to: str, rest: bool, rng: Rng
) -> bool:
    """Move what fills a file, or with `rest` any records that are left; return whether there were
    such records."""
    folder = folder_of(to, row.id)
    with store.transaction() as tx:
        planned = tx.planned_file(task.id)
        if planned is None:
            waiting, place = tx.unplanned_rows(task.id)
            numbers = _next_rows(waiting, lake.most_reports(task.message_bytes), rest=rest)
            if not numbers:
                return False
            name = lake.partition_name(task_row.number, place)
            planned = f"{folder}/{name}", numbers
            tx.plan_file(*planned)
    file, numbers = planned
    chunks, reports = list[pa.Array](), 0
    for number in numbers:
        with store.reading() as tx:
            sealed = tx.sealed_row(task.id, number)
        chunks += studies.records_in(sealed, task).chunks
        reports += sealed.count
    source = lake.Source(folder=folder, export=row.id, task=task)
    partition = lake.write_partition(
        source, file.removeprefix(f"{folder}/"), pa.chunked_array(chunks), reports, rng=rng
    )
    del chunks
    if sum(len(column) for column in source.read(partition)) != partition.records:
        raise DataError(f"{file} must have the {partition.records:,} records written to it")
    with store.transaction() as tx:
        tx.move_to_file(task.id, file, partition.records)
    return True


def finish(store: Store, row: StudyRow, *, at: str) -> None:
    """Make the files of a study whose tasks are done a data set, which `sfumato fold` counts."""
    with store.reading() as tx:
        plan = studies.plan_of(tx, row)
        if not plan.study.is_local:
            return
        tasks = [
            (task.id, tuple(studies.partition_of(sealed) for sealed in tx.sealed_rows(task.id)))
            for task in tx.tasks(row.id)
        ]
    folder = folder_of(at, row.id)
    lake.write_list(folder, plan, tasks, export=row.id, campaign=row.id)


def folder_of(address: str, study_id: str) -> str:
    """The folder of a study."""
    return f"{files.folder(address)}/{study_id}"


def _next_rows(waiting: list[tuple[int, int]], most: int, *, rest: bool) -> list[int]:
    """The rows for the next file, the oldest first; none if they do not fill it yet."""
    numbers, reports = list[int](), 0
    for number, count in waiting:
        numbers.append(number)
        reports += count
        if reports >= most:
            return numbers
    return numbers if rest else []
