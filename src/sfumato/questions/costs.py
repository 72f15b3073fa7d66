"""Predict the collector's own work on a study: seconds on one core, and memory.

The work is to admit and add the reports, or the collector's part of masked rounds, to add the noise
and to compute the release. HTTP and the store are not included: they depend on how many reports
come in one upload, not on the algorithm (`python -m benchmarks ingest`).

Rates are of one core of an AMD EPYC, measured by `python -m benchmarks server`, which also
compares whole studies with their predictions. They are meant to be right within a factor of three.
A simulation of items does less, since it adds up tables of many devices at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from sfumato.flow.aggregation import Sparse
from sfumato.flow.secure_sum import PLACEHOLDER_NONCE
from sfumato.flow.task import Task
from sfumato.privacy import NoiseAtRelease

# Seconds
START = 5e-3  # of any release
REPORT = 4e-6  # to admit a report
RECORD_BIT = 1e-10  # of a local record, to count it
ENTRY = 4e-7  # of a sparse report, to sort and count it
TABLE_BIT = 1.3e-9  # of a table, to check and add it
MEMBER = 5e-4  # of a masked round
NEIGHBOUR = 3e-6  # of a member
MASK_BYTE = 1e-10  # of a mask, or of a masked table, to add it
DRAW = 1e-7  # of noise
LOOKUP = 3e-9  # of a cell, to decode an item
ITEM = 3e-7  # of the release, with its interval

# Bytes
_CELL = 24  # of a table: the sum, a copy and the noise
_UNPACKED = 2  # of a bit of the tables that are added together
_PIECE_BITS = 1 << 26  # of these tables
_ITEM = 100  # of the release
_TALLY = 8  # of a count of records
_ENTRY = 50  # of a sparse sum, besides its bits, for which arrays of bytes are made
_BOX = 150  # what a member of a masked round sends to a neighbour


def server_cost(
    tasks: Iterable[tuple[Any, int]], *, lookups: float, items: float
) -> dict[str, float | int]:
    """The predicted `server_seconds` and `server_bytes` of tasks, each with the number of its
    devices in all cohorts, whose answer needs this many look-ups of cells and has this many items
    or coordinates.

    Rounds come one after another, so memory is that of the largest.
    """
    costs = [_task_cost(task, devices) for task, devices in tasks]
    seconds = START + sum(cost for cost, _ in costs) + LOOKUP * lookups + ITEM * items
    size = max((size for _, size in costs), default=0.0) + _ITEM * items
    return {"server_seconds": float(f"{seconds:.3g}"), "server_bytes": int(float(f"{size:.3g}"))}


def _task_cost(task: Any, devices: int) -> tuple[float, float]:
    """Seconds and bytes to receive the answers to a task, and to add the noise."""
    if not isinstance(task, Task):
        bits = devices * task.records_per_report * 8 * task.record_bytes
        cells = sum(math.prod(tally.cells.shape) for tally in task.tallies())
        return devices * REPORT + bits * RECORD_BIT, _TALLY * cells
    if isinstance(task.aggregation, Sparse):
        entries = devices * task.aggregation.entries
        size = entries * (_ENTRY + task.aggregation.entry_bits)
        return devices * REPORT + entries * ENTRY, size
    noise = DRAW * task.cells if isinstance(task.mechanism, NoiseAtRelease) else 0.0
    memory = _CELL * task.cells
    if not task.is_masked:
        arriving = _UNPACKED * min(devices * task.message_bits, _PIECE_BITS)
        return devices * (REPORT + task.message_bits * TABLE_BIT) + noise, memory + arriving
    cohort = task.max_count - 1
    round = task.masked_round(cohort, PLACEHOLDER_NONCE)
    neighbours = round.parameters(cohort).neighbours
    dropouts = cohort - task.min_count
    masks = task.min_count + dropouts * neighbours
    seconds = cohort * (MEMBER + neighbours * NEIGHBOUR)
    seconds += (cohort + masks) * task.cells * np.dtype(round.lane).itemsize * MASK_BYTE
    return (seconds + noise) * devices / cohort, memory + cohort * neighbours * _BOX
