"""Copy a store while it works, and bring a copy back.

A copy is what was there at one moment. Brought back, it forgets what came later: reports that were
acknowledged since then, and *charges to the ledger*. Restore the latest copy, and count what was
released after it as spent. Masked rounds that were under way are lost when a copy is brought back:
the store that it was made of may have opened their sums since.

A copy of an SQLite store is an SQLite file, one of a PostgreSQL store a file for `pg_restore`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from sfumato.collector.store import schema
from sfumato.collector.store.database import database
from sfumato.collector.store.store import Store
from sfumato.errors import StoreError
from sfumato.flow.task import Task
from sfumato.spec import from_json, to_json


def backup(url: str | Path, path: Path | str) -> None:
    """Write a copy of the store to a new file at `path`, readable for its owner only."""
    source, copy = database(url), Path(path)
    if source.is_empty():
        raise StoreError(f"{source.name} is empty, so there is nothing to copy")
    with _new_file(copy) as part:
        source.copy_to(part)


def restore(url: str | Path, path: Path | str) -> None:
    """Make the store at `url` from a copy. One that has tables is never overwritten."""
    target, copy = database(url), Path(path)
    if not copy.is_file():
        raise StoreError(f"there is no copy of a store at {copy}")
    if not target.is_empty():
        raise StoreError(
            f"{target.name} has tables already, and is not overwritten",
            hint="restore to an empty database, or to a file that is not there",
        )
    target.copy_from(copy)
    schema.migrate(target)  # the copy may be older than this code
    with closing(Store.open(url)) as store:
        _lose_rounds(store)


def _lose_rounds(store: Store) -> None:
    """End the masked rounds under way, as charged: their devices must not think that nothing was
    opened, nor be told of other survivors than before."""
    with store.transaction() as tx:
        for round_id, task_id in tx.under_way().items():
            row, task = tx.round(round_id), tx.task(task_id)
            assert row is not None  # as it is under way
            assert task is not None  # as it has a round
            spec = from_json(task.spec)
            assert isinstance(spec, Task)  # no other is masked
            if not row.charged:
                tx.add_entry(spec.campaign, spec.cohort, spec.id, to_json(spec.loss))
                tx.set_charged(round_id)
            tx.end_round(round_id, "aborted", "the store was brought back from a copy")


@contextmanager
def _new_file(path: Path) -> Iterator[Path]:
    """A file to write to, which gets its name when it is whole and on disk."""
    try:
        if path.exists():
            raise StoreError(f"there is a file at {path}, which is not overwritten")
        number, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        part = Path(name)
        try:
            yield part
            os.fsync(number)
            part.rename(path)
            _sync_folder(path.parent)
        finally:
            os.close(number)
            part.unlink(missing_ok=True)
    except OSError as problem:
        raise StoreError(f"a copy cannot be written to {path}: {problem.strerror}") from None


def _sync_folder(path: Path) -> None:
    """A new name is on disk when its folder is."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
