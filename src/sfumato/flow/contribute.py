"""On the device: from values to a report. Clear values exist here and nowhere else."""

from __future__ import annotations

from typing import Any

import numpy as np

from sfumato.arrays import I64
from sfumato.errors import MismatchError, SpecError, TaskError
from sfumato.flow.aggregation import Plain, Sparse
from sfumato.flow.report import Report
from sfumato.flow.task import LocalTask, Task
from sfumato.flow.word_discovery import WordTask
from sfumato.privacy import ListedAbove, Rng
from sfumato.secagg.participant import Participant
from sfumato.secagg.round import MaskedRound
from sfumato.sketch import InvertibleSketch, ItemCounts, SampledTables, SparseSketch


def contribute(
    task: Task,
    values: Any,
    *,
    devices: int,
    weights: I64 | None = None,
    owners: I64 | None = None,
    rng: Rng,
) -> I64:
    """The contribution of `devices` devices that together hold `values`. A real device is one.

    `values` are within the contribution bound already (`privacy.bound_contributions`); `weights`
    is the number of devices that hold each, and `owners` the device of each, if one may have
    several. The sum of contributions is the contribution of the sum.
    """
    values, weights = _sampled(task, values, weights, rng)
    if isinstance(task.sketch, SampledTables):
        if owners is None and devices == 1:
            owners = np.zeros(len(values), dtype=np.int64)
        table = task.sketch.draw(values, weights, owners, rng=rng)
    else:
        table = task.sketch.encode(values, weights)
    return task.mechanism.at_device(table, devices=devices, rng=rng)


def _sampled(task: Task, values: Any, weights: I64 | None, rng: Rng) -> tuple[Any, I64 | None]:
    """The values that take part, if the task's list is of a sample."""
    if not isinstance(task.mechanism, ListedAbove):
        return values, weights
    return task.mechanism.sample(values, weights, rng=rng)


def report(task: Task, values: Any, *, rng: Rng) -> Report:
    """One device's report of at most `task.items_per_device` values, chosen by the caller.

    >>> from sfumato.privacy import NoNoise, SeededRng
    >>> from sfumato.sketch import OneHot
    >>> task = Task(sketch=OneHot(categories=3), mechanism=NoNoise(), cohort="everybody",
    ...             aggregation=Plain(modulus_bits=8), max_count=100)
    >>> report(task, [2], rng=SeededRng(1)).message.hex()
    '000001'
    """
    if isinstance(task.aggregation, Sparse) and isinstance(task.sketch, SparseSketch):
        numbers = task.sketch.numbers(values)
        if isinstance(task.sketch, ItemCounts) and not task.sketch.copies:
            numbers = np.unique(numbers, axis=0)
        _check_bound(task, len(numbers))
        numbers, _ = _sampled(task, numbers, None, rng)
        return Report(task.id, rng.words(2).tobytes(), task.aggregation.seal(numbers))
    if isinstance(task.sketch, InvertibleSketch) and not task.sketch.copies:
        values = task.sketch.distinct(values)
    _check_bound(task, len(values))
    if not isinstance(task.aggregation, Plain):
        raise TaskError(
            "a masked task takes tables in a masked round, not in reports",
            hint="call join_round, and pass the result of `contribute` to the participant's `mask`",
        )
    table = contribute(task, values, devices=1, rng=rng)
    return Report(task.id, rng.words(2).tobytes(), task.aggregation.seal(table))


def _check_bound(task: Task, count: int) -> None:
    if count > task.items_per_device:
        raise SpecError(
            f"this task takes at most {task.items_per_device} values per device; "
            f"got {count}: choose some with bound_contributions"
        )


def join_round(
    task: Task,
    round: MaskedRound,
    member: int,
    identity: bytes,
    roster: bytes,
    *,
    rng: Rng,
) -> Participant:
    """Take part in a masked round, if it is this task's. Its minimum count, modulus and assumptions
    are then those that the task's noise was made for.

    `identity` is the device's Ed25519 key, and `roster` the Merkle root of all members' public
    keys. Pass the flattened result of `contribute` for one device to the participant's `mask`.
    """
    if round != task.masked_round(round.cohort, round.nonce):
        raise MismatchError("this round does not match its task, so the device does not join it")
    return Participant.join(round, member, identity, roster, rng=rng)


def local_report(task: LocalTask | WordTask, items: Any, *, rng: Rng) -> Report:
    """One device's randomised report to a local task, always of `records_per_report` records.

    A record stands for "none" if there is no item for it, or only a word with characters outside
    the alphabet, so a report reveals neither the items of a device nor their number. Leave out
    words that are known already.

    >>> from sfumato.privacy import HashedResponse, SeededRng
    >>> task = LocalTask(randomizer=HashedResponse(epsilon=4.0, rows=1024, width=56, seed=1),
    ...                  cohort="everybody")
    >>> local_report(task, ["oak"], rng=SeededRng(1)).message.hex()
    'd27c'
    >>> len(local_report(task, [], rng=SeededRng(1)).message)
    2
    """
    if len(items) > task.records_per_report:
        raise SpecError(
            f"this task takes at most {task.records_per_report} items per report; "
            f"got {len(items)}: choose some with bound_contributions"
        )
    values = task.none(task.records_per_report)
    values[: len(items)] = task.values(items)
    records = task.randomize(values, rng=rng)
    return Report(task.id, rng.words(2).tobytes(), records.tobytes())
