"""Predict the work on a study: of the collector, and of a simulation.

The collector's work is to admit and add the reports, or its part of masked rounds, to add the noise
and to compute the release. HTTP and the store are not included: they depend on how many reports
come in one upload, not on the algorithm (`python -m benchmarks ingest`).

A simulation does less, since it makes and adds the tables of many devices at once. It is predicted
for data in memory with one row per value; rows that count several times take less. Planning and the
reading of files are not included in its seconds, nor are imports and the compilation of loops,
which happen once per process.

Rates are seconds of one core. Those of the collector were measured by `python -m benchmarks
server`, those of simulations by `python -m benchmarks studies`; both compare whole studies with
their predictions, which are meant to be right within a factor of three.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from sfumato.flow.aggregation import Sparse
from sfumato.flow.secure_sum import PLACEHOLDER_NONCE
from sfumato.flow.task import Task
from sfumato.privacy import NoiseAtRelease
from sfumato.sketch import CountSketch, OneHot
from sfumato.sketch.vector import NormBins, VectorSketch

# Seconds of the collector
START = 5e-3  # of any release
REPORT = 4e-6  # to admit a report
RECORD_BIT = 1e-10  # of a local record, to count it
COUNT = 1e-8  # of a count of records, to add those that arrive together
ENTRY = 4e-7  # of a sparse report, to sort and count it
TABLE_BIT = 1.3e-9  # of a table, to check and add it
MEMBER = 5e-4  # of a masked round
NEIGHBOUR = 3e-6  # of a member
MASK_BYTE = 1e-10  # of a mask, or of a masked table, to add it
DRAW = 1e-7  # of noise
LOOKUP = 3e-9  # of a cell, to decode an item
LOCAL_LOOKUP = 5e-10  # of a count of records
ITEM = 3e-7  # of the release, with its interval

# Seconds of a simulation
SIMULATION = 7e-3
LISTED = 5e-8  # of a value that is a place in a list
HASH = 7e-9  # of a value, to hash it into a row of a sketch
OPEN = 2e-6  # of a text that nobody listed
LISTING = 1.5e-2  # to read such texts out of a table
SHARE_DRAW = 1.5e-6  # of noise that is drawn in shares
LOCAL = 1e-2  # of any local study
RECORD = 7e-7  # to randomise a value
RECORD_BITS = 5e-10  # of a record, to randomise it
LOCAL_ITEM = 1.2e-5  # of the release of a local study, with its interval
COORDINATE = 4e-8  # of a vector, to clip and scale it
SKETCHED_COORDINATE = 1.2e-9  # of a vector, to add it to a row of a sketch

# Seconds of a simulated training
ROUND = 1e-2
PRODUCT = 1.2e-10  # of a product of two numbers in a model, with its part of the gradient
UPDATE = 1.2e-8  # of a parameter of a client, to compute its update and to sketch it
LONG_UPDATE = 5e-8  # the same if the updates of clients that train at a time are not in a cache

# Bytes
PROCESS = 300_000_000  # Python with our packages
TRAINING_PROCESS = 600_000_000  # the same with PyTorch
TOGETHER = 16  # clients that train at a time
_PARAMETER = 60  # of a model: its copies, the sums and the steps
VALUE = 100  # of a simulated device: its text, its fingerprint and its place
_COORDINATE = 60  # of the vectors that are clipped and sketched together
_PIECE_COORDINATES = 1 << 22  # of these vectors
_CELL = 24  # of a table: the sum, a copy and the noise
_UNPACKED = 2  # of a bit of the tables that are added together
_PIECE_BITS = 1 << 26  # of these tables
_ITEM = 100  # of the release
_REPORT = 150  # of a record: it, and the id of its report
_TALLY = 4  # of a count of records
_ENTRY = 50  # of a sparse sum, besides its bits, for which arrays of bytes are made
_BOX = 150  # what a member of a masked round sends to a neighbour


def costs(
    tasks: Iterable[tuple[Any, int]], *, lookups: float, items: float
) -> dict[str, float | int]:
    """The predicted seconds and bytes of the collector (`server_…`) and of a simulation
    (`simulate_…`) for tasks, each with the number of its devices in all cohorts, whose answer needs
    this many look-ups of cells and has this many items or coordinates.

    Rounds come one after another, so memory is that of the largest.
    """
    tasks = list(tasks)
    server = [_task_cost(task, devices) for task, devices in tasks]
    simulated = [_simulation_cost(task, devices) for task, devices in tasks]
    is_local = tasks[0][0].is_local
    lookup = LOCAL_LOOKUP if is_local else LOOKUP
    return {
        **_rounded(
            "server",
            START + sum(cost for cost, _ in server) + lookup * lookups + ITEM * items,
            max(size for _, size in server) + _ITEM * items,
        ),
        **_rounded(
            "simulate",
            SIMULATION
            + sum(cost for cost, _ in simulated)
            + lookup * lookups
            + (LOCAL_ITEM if is_local else ITEM) * items,
            PROCESS + max(size for _, size in simulated) + _ITEM * items,
        ),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingWork:
    """The size of a training: what its work depends on. Testing the model is not included."""

    rounds: int
    cohort: int
    parameters: int  # of the model
    rows: int  # of the sketches of updates; 0 if these are sent whole
    products: int  # of two numbers, which the model computes for an example
    examples: int  # per client and round

    def costs(self, task: Any) -> dict[str, float | int]:
        """The predictions for a training whose rounds are tasks like this one; for a collector if
        the rounds are masked, since it has no others."""
        server: dict[str, float | int] = {}
        if task.is_masked:
            seconds, size = _task_cost(task, self.cohort)
            seconds = START + self.rounds * (seconds + self._decoding)
            server = _rounded("server", seconds, size + _PARAMETER * self.parameters)
        draw = SHARE_DRAW if task.mechanism.in_shares else DRAW
        fits = self._together < _PIECE_COORDINATES
        piece = _COORDINATE * min(self._together, _PIECE_COORDINATES)
        return {
            **server,
            **self.simulated(
                UPDATE if fits else LONG_UPDATE,
                seconds=self.rounds * draw * task.cells,
                size=piece + _CELL * task.cells,
            ),
        }

    def simulated(
        self, update: float = UPDATE, *, seconds: float = 0.0, size: float = 0.0
    ) -> dict[str, float | int]:
        """The predictions for a simulation, which takes `update` seconds per parameter of a client,
        and these seconds and bytes besides."""
        of_client = self.parameters * update + self.examples * self.products * PRODUCT
        of_round = ROUND + self._decoding + self.cohort * of_client
        size += TRAINING_PROCESS + 8 * self._together + _PARAMETER * self.parameters
        return _rounded("simulate", SIMULATION + self.rounds * of_round + seconds, size)

    @property
    def _decoding(self) -> float:
        """Seconds to decode the sum of a round."""
        return LOOKUP * self.parameters * max(self.rows, 1)

    @property
    def _together(self) -> int:
        """The parameters of the clients that train at a time."""
        return min(self.cohort, TOGETHER) * self.parameters


def _rounded(name: str, seconds: float, size: float) -> dict[str, float | int]:
    return {
        f"{name}_seconds": float(f"{seconds:.3g}"),
        f"{name}_bytes": int(float(f"{size:.3g}")),
    }


def _task_cost(task: Any, devices: int) -> tuple[float, float]:
    """Seconds and bytes to receive the answers to a task, and to add the noise."""
    if not isinstance(task, Task):
        bits = devices * task.records_per_report * 8 * task.record_bytes
        cells = sum(math.prod(tally.cells.shape) for tally in task.tallies())
        seconds = devices * REPORT + bits * RECORD_BIT + COUNT * cells
        return seconds, _TALLY * cells + _REPORT * devices
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


def _simulation_cost(task: Any, devices: int) -> tuple[float, float]:
    """Seconds and bytes to make and add the answers of devices in memory, and the noise."""
    if not isinstance(task, Task):
        records = devices * task.records_per_report
        seconds = LOCAL + records * (RECORD + 8 * task.record_bytes * RECORD_BITS)
        cells = sum(math.prod(tally.cells.shape) for tally in task.tallies())
        return seconds, records * VALUE + _TALLY * cells
    sketch, rounds = task.sketch, 1.0
    if task.is_masked:
        rounds = devices / (task.max_count - 1)
    draw = SHARE_DRAW if task.mechanism.in_shares else DRAW
    noise, memory = draw * task.cells * rounds, float(_CELL * task.cells)
    if isinstance(sketch, VectorSketch | NormBins):
        dense = getattr(sketch, "dense", None)
        rows = 0 if dense is None else dense.rows
        coordinates = devices * sketch.length
        seconds = coordinates * (COORDINATE + rows * SKETCHED_COORDINATE)
        memory += 8 * coordinates + _COORDINATE * min(coordinates, _PIECE_COORDINATES)
        return seconds + noise, memory
    values = devices * task.items_per_device
    if isinstance(sketch, OneHot | CountSketch):
        rows = sketch.rows if isinstance(sketch, CountSketch) else 0
        return values * (LISTED + rows * HASH) + noise, memory + values * VALUE
    listing = 0.0 if isinstance(task.aggregation, Sparse) else LISTING
    return listing + values * OPEN + noise, memory + values * VALUE
