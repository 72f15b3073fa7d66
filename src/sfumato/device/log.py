"""The records in a device's log, as a user may read them: after figure 3 of paper 004."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np

from sfumato.flow.task import LocalTask, Task
from sfumato.flow.word_discovery import WordTask
from sfumato.privacy.randomizers import CountMeanSketch, Randomizer
from sfumato.privacy.randomizers.apple_records import record_text
from sfumato.spec import kind_of


def explain(task: LocalTask | Task | WordTask, data: bytes) -> dict[str, Any]:
    """A record and how it was made: algorithm, epsilon, sizes, row and bytes.

    `record` is "row,hex" if the record belongs to one row of a table, and else its bytes in
    hexadecimal. It has nothing that is not in the record or in the signed offer of its task.
    """
    if isinstance(task, LocalTask):
        return _one_row(task.randomizer, data)
    if isinstance(task, WordTask):
        discoverer: Any = task.discoverer
        return {
            "algorithm": kind_of(discoverer),
            "epsilon": task.epsilon,
            "parts": {
                field.name: _sizes(part)
                for field in fields(discoverer)
                if isinstance(part := getattr(discoverer, field.name), Randomizer)
            },
            "record": data.hex(),
        }
    sketch: Any = task.sketch
    return {
        "algorithm": kind_of(sketch),
        "epsilon": None,  # the collector can read it
        "rows": getattr(sketch, "rows", None),
        "width": getattr(sketch, "width", None),
        "record": data.hex(),
    }


def _one_row(randomizer: Randomizer, data: bytes) -> dict[str, Any]:
    record = np.frombuffer(data, dtype=np.uint8)
    row = int(randomizer.count_rows(record[None], np.zeros(randomizer.rows, dtype=np.int64))[0])
    text = f"{row},{data.hex()}"
    if isinstance(randomizer, CountMeanSketch):
        text = record_text(randomizer, record)
    return {**_sizes(randomizer), "row": row, "record": text}


def _sizes(randomizer: Randomizer) -> dict[str, Any]:
    return {
        "algorithm": kind_of(randomizer),
        "epsilon": randomizer.epsilon,
        "rows": randomizer.rows,
        "width": randomizer.width,
    }
