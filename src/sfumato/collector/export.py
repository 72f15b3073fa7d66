"""Write the sealed reports of a local study to a data set (`sfumato.lake`).

Only what the store keeps is written: randomised records, with no id, no time and no order. With
trust central the store keeps sums without noise, one per sealing: there is nothing to fold, and
outside the store no ledger would guard them. With trust secure it keeps no reports at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from sfumato import lake
from sfumato.collector import studies
from sfumato.collector.store.store import Store, StudyRow, Transaction
from sfumato.errors import StudyError
from sfumato.privacy import Rng, SystemRng


def export(store: Store, study: str, address: Path | str) -> lake.Reports:
    """Write the reports of a study, by its id or name, to a new folder at an address.

    The study must have ended, so that its tally is final. The copy is not deleted with the study's
    data.
    """
    rng = SystemRng()
    with store.reading() as tx:
        row = tx.study_by_name(study) or studies.get_study(tx, study)
        _check(tx, row)
        planned = studies.plan_of(tx, row)
        tasks = [studies.task_of(task) for task in tx.tasks(row.id)]
    return lake.write(
        address,
        planned,
        ((task, _sealed(store, task, rng)) for task in tasks),
        campaign=row.id,
        rng=rng,
    )


def _sealed(store: Store, task: Any, rng: Rng) -> Iterator[tuple[pa.ChunkedArray, int]]:
    """The sealed records of a task in random order, each with its number of reports. A row is one
    transaction: an export may take minutes."""
    with store.reading() as tx:
        numbers = tx.sealed_numbers(task.id)
    for place in np.argsort(rng.words(len(numbers))).tolist():
        with store.reading() as tx:
            row = tx.sealed_row(task.id, numbers[place])
        yield studies.records_in(row, task), row.count


def _check(tx: Transaction, row: StudyRow) -> None:
    """Raise StudyError unless the study's reports can be exported."""
    planned = studies.plan_of(tx, row)
    if not planned.study.is_local:
        raise StudyError(
            'only reports of studies with trust = "local" can be exported; of others the store '
            f"keeps sums, and no reports; got a study with trust = {planned.study.trust!r}",
            hint="sfumato release export writes its release",
        )
    if row.state in studies.ALIVE:
        raise StudyError(
            f"a study must have ended before its reports are exported; {row.name!r} is {row.state}",
            hint="close it with sfumato study close, and wait for its release",
        )
    counted = sum(tx.counts(task.id).get("reports", 0) for task in tx.tasks(row.id))
    left = sum(tx.sealed_count(task.id) for task in tx.tasks(row.id))
    if left != counted or not left:
        raise StudyError(
            f"the store must still have the reports of a study that is exported; it has {left:,} "
            f"of {counted:,}",
            hint="they are deleted with the study, or retention_days after its end",
        )
