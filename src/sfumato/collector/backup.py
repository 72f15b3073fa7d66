"""Copy a store while it is in use, and restore a copy.

A copy is a snapshot. A restored one lacks everything later: acknowledged reports, releases, and
*charges to the ledger*. The original store may have finished and released studies that were active
in the copy. So `restore` charges and ends those, unless the operator knows that nothing was
released; it cannot know about studies that began after the copy.

A copy has the format of its database: an SQLite file, or one for `pg_restore`, say. An SQLite file
can be restored to PostgreSQL as well, which is how a store moves there.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from sfumato import files
from sfumato.collector import studies
from sfumato.collector.store import schema
from sfumato.collector.store.database import database
from sfumato.collector.store.store import Store, StudyRow, Transaction
from sfumato.errors import StoreError
from sfumato.flow.task import Task
from sfumato.spec import from_json, to_json
from sfumato.study import Study


def backup(url: str | Path, path: Path | str) -> None:
    """Write a copy of the store to a new file at `path`, readable by its owner only."""
    source, copy = database(url), Path(path)
    if source.is_empty():
        raise StoreError(f"{source.name} is empty, so there is nothing to copy")
    with _new_file(copy) as part:
        source.copy_to(part)


def restore(url: str | Path, path: Path | str, *, nothing_released: bool = False) -> list[str]:
    """Restore a copy to the store at `url`; a store that has tables is never overwritten.

    Active studies answered by sums (trust central or secure) are ended, and their open tasks
    charged: the same devices' reports must not be released a second time. Returns their names. With
    `nothing_released` after the copy was made, they continue. Active masked rounds are charged and
    ended in any case.
    """
    target, copy = database(url), Path(path)
    if not copy.is_file():
        raise StoreError(f"there is no copy of a store at {copy}")
    if not target.is_empty():
        raise StoreError(
            f"{target.name} has tables already, and is not overwritten",
            hint="restore to an empty database, or to a file that does not exist",
        )
    target.copy_from(copy)
    schema.migrate(target)  # the copy may be older than this code
    with closing(Store.open(url)) as store, store.transaction() as tx:
        _lose_rounds(tx)
        return [] if nothing_released else _end_studies(tx)


def _lose_rounds(tx: Transaction) -> None:
    """End the active masked rounds as charged: their devices must not assume that nothing was
    opened, nor get another set of survivors than before."""
    for round_id, task_id in tx.active_rounds().items():
        row, task = tx.round(round_id), tx.task(task_id)
        assert row is not None  # since it is active
        assert task is not None  # since it has a round
        spec: Task = from_json(task.spec)  # the only kind with masks
        if not row.charged:
            _charge(tx, studies.get_study(tx, task.study_id), spec)
            tx.mark_charged(round_id)
        tx.end_round(round_id, "aborted", "the store was restored from a copy")


def _end_studies(tx: Transaction) -> list[str]:
    """End the active studies that are answered by sums, and charge their open tasks. Local studies
    continue: their noise is in the reports, and a release adds none."""
    charged, ended = {task_id for _, _, task_id, _ in tx.entries()}, []
    for row in tx.studies():
        if row.state not in studies.ALIVE:
            continue
        study: Study = from_json(row.study)
        if study.is_local:
            continue
        tx.set_study_state(row.id, "failed", studies.RESTORED, expected=studies.ALIVE)
        for task in tx.tasks(row.id):
            if (
                tx.set_task_state(task.id, "done", expected=studies.UNFINISHED)
                and task.id not in charged
            ):
                _charge(tx, row, from_json(task.spec))
        tx.end_rounds(row.id, studies.RESTORED)
        tx.clear_fault(row.id)
        ended.append(row.name)
    return ended


def _charge(tx: Transaction, study: StudyRow, task: Task) -> None:
    """Record what may have been spent, whether the budget allows it or not; if tasks are parts of a
    plan, the cost of the whole plan."""
    cost = to_json(studies.charge_of(study, task))
    tx.add_entry(task.campaign, task.cohort, task.id, cost)


@contextmanager
def _new_file(path: Path) -> Iterator[Path]:
    """A file to write to, which gets its name when it is complete and on disk."""
    try:
        if path.exists():
            raise StoreError(f"{path} exists, and is not overwritten")
        number, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        part = Path(name)
        try:
            yield part
            os.fsync(number)
            part.rename(path)
            files.sync(path.parent)
        finally:
            os.close(number)
            part.unlink(missing_ok=True)
    except OSError as problem:
        raise StoreError(f"a copy cannot be written to {path}: {problem.strerror}") from None
