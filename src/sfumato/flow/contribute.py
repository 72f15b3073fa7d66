"""On the device: values to a report. Clear values exist here and nowhere else."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sfumato.errors import MismatchError, SpecError, TaskError
from sfumato.flow.aggregation import Plain
from sfumato.flow.report import Report
from sfumato.flow.task import LocalTask, Task
from sfumato.flow.word_discovery import WordTask
from sfumato.privacy import ListedAbove, Rng
from sfumato.secagg.participant import Participant
from sfumato.secagg.round import MaskedRound
from sfumato.sketch import InvertibleSketch

I64 = npt.NDArray[np.int64]


def contribute(
    task: Task, values: Any, *, devices: int, weights: I64 | None = None, rng: Rng
) -> I64:
    """What `devices` devices that together hold `values` add to the sum. A real device is one.

    `values` are within the contribution bound already (`privacy.bound_contributions`); `weights`
    says how many devices hold each. The sum of contributions is the contribution of the sum.
    """
    if isinstance(task.mechanism, ListedAbove):
        values, weights = task.mechanism.sample(values, weights, rng=rng)
    table = task.sketch.encode(values, weights)
    return task.mechanism.at_device(table, devices=devices, rng=rng)


def report(task: Task, values: Any, *, rng: Rng) -> Report:
    """One device's report. It holds at most `task.items_per_device` values, chosen by the caller.

    >>> from sfumato.privacy import NoNoise, SeededRng
    >>> from sfumato.sketch import OneHot
    >>> task = Task(sketch=OneHot(categories=3), mechanism=NoNoise(), cohort="everybody",
    ...             aggregation=Plain(modulus_bits=8), max_count=100)
    >>> report(task, [2], rng=SeededRng(1)).message.hex()
    '000001'
    """
    if isinstance(task.sketch, InvertibleSketch):  # a device counts once for an item
        values = task.sketch.distinct(values)
    if len(values) > task.items_per_device:
        raise SpecError(
            f"this task takes at most {task.items_per_device} values of a device; "
            f"got {len(values)}: choose among them with bound_contributions"
        )
    if not isinstance(task.aggregation, Plain):
        raise TaskError(
            "a table of a masked task is sent in a masked round, not in a report",
            hint="join_round, and give what `contribute` returns to the participant's `mask`",
        )
    table = contribute(task, values, devices=1, rng=rng)
    return Report(task.id, rng.words(2).tobytes(), task.aggregation.seal(table))


def join_round(
    task: Task,
    round: MaskedRound,
    member: int,
    identity: bytes,
    roster: tuple[bytes, ...],
    *,
    rng: Rng,
) -> Participant:
    """Take part in a masked round, if it is this task's: its floor, its modulus and what it assumes
    are then those that the task's noise was made for.

    `identity` is the device's Ed25519 key, and `roster` the public ones of all members. What
    `contribute` gives for one device goes, flat, to the participant's `mask`.
    """
    if round != task.masked_round(round.cohort, round.nonce):
        raise MismatchError("this round is not what its task asks for; it is not joined")
    return Participant.join(round, member, identity, roster, rng=rng)


def local_report(task: LocalTask | WordTask, items: Any, *, rng: Rng) -> Report:
    """One device's report to a local task, privatised here and now: as many records as
    `records_per_report`, always.

    A record says "none" where there is no item for it, or a word with characters that a search has
    no code for: neither what a device has to say nor how much can be told from a report. Leave out
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
            f"this task takes at most {task.records_per_report} items of a device at a time; "
            f"got {len(items)}: choose among them with bound_contributions"
        )
    values = task.none(task.records_per_report)
    values[: len(items)] = task.values(items)
    records = task.randomize(values, rng=rng)
    return Report(task.id, rng.words(2).tobytes(), records.tobytes())
