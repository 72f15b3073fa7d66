"""Reports that no device could have made: none is counted, and each has its reason.

What a device may say is bounded by its task; a report beyond that would move an answer further than
the privacy statement and the error bars allow for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from checks import SEED
from sfumato.flow.accumulator import Collector
from sfumato.flow.admission import Rejection
from sfumato.flow.aggregation import Plain, Sparse
from sfumato.flow.contribute import local_report, report
from sfumato.flow.report import HEADER_BYTES, Report
from sfumato.flow.task import LocalTask, Task
from sfumato.privacy import DirectResponse, HashedResponse, NoNoise, SeededRng, best_list
from sfumato.sketch import (
    CountSketch,
    InvertibleSketch,
    ItemCounts,
    OneHot,
    TextKeys,
    VectorSketch,
)

I64 = npt.NDArray[np.int64]
REPORTS = 10  # of each kind
RNG = np.random.default_rng(SEED)


def make_task(sketch: Any, bits: int, items: int = 1, mechanism: Any = None) -> Task:
    return Task(
        sketch=sketch,
        mechanism=mechanism or NoNoise(),
        aggregation=Plain(modulus_bits=bits),
        cohort="everybody",
        items_per_device=items,
        max_count=1_000,
    )


ONE_HOT = make_task(OneHot(categories=50), 13, items=2)
COUNT = make_task(CountSketch(rows=5, width=16, seed=SEED), 13, items=2)
KEYS = InvertibleSketch(
    keys=TextKeys(length=8), rows=3, width=16, count_bits=10, check_bits=20, seed=SEED
)
LISTED = make_task(KEYS, KEYS.word_bits, mechanism=best_list(0.5, epsilon=1.0, delta=1e-6))
VECTORS = VectorSketch(length=20, clip=1.0, bound=1.0, scale=1_000.0)
VECTOR = make_task(VECTORS, 24)
SPARSE = replace(ONE_HOT, aggregation=Sparse(entries=2, entry_bits=6))
TEXTS = TextKeys(length=8)
ITEMS = replace(
    LISTED,
    sketch=ItemCounts(keys=TEXTS),
    mechanism=best_list(1.0, items_per_device=2, epsilon=1.0, delta=1e-6),
    aggregation=Sparse(entries=2, entry_bits=TEXTS.bits),
    items_per_device=2,
)
DIRECT = LocalTask(randomizer=DirectResponse(epsilon=2.0, categories=9), cohort="everybody")
HASHED = LocalTask(
    randomizer=HashedResponse(epsilon=1.0, rows=3, width=3, seed=2), cohort="everybody"
)


def sealed(task: Task, table: I64) -> bytes:
    assert isinstance(task.aggregation, Plain)
    return task.aggregation.seal(table)


def cells(task: Task, **places: int) -> bytes:
    """A message with these values in some cells, by their numbers, and zeros elsewhere."""
    table = np.zeros(task.cells, dtype=np.int64)
    for place, value in places.items():
        table[int(place.removeprefix("at"))] = value
    return sealed(task, table)


def noise(task: Task | LocalTask) -> bytes:
    """Random bytes of the right length, and with the right end."""
    message = RNG.bytes(task.message_bytes)
    used = task.message_bits % 8 if isinstance(task, Task) else 0
    return message[:-1] + bytes([message[-1] & ((1 << used or 256) - 1)])


def entries(task: Task, *numbers: int) -> bytes:
    """A message with these numbers, in this order."""
    assert isinstance(task.aggregation, Sparse)
    bits = task.aggregation.entry_bits
    whole = sum(number << place * bits for place, number in enumerate(numbers))
    return whole.to_bytes(task.message_bytes, "little")


def key(item: str) -> int:
    return int.from_bytes(item.encode() + b"\1", "little")


def honest(task: Task | LocalTask, number: int) -> bytes:
    rng = SeededRng(number)
    if isinstance(task, LocalTask):
        items: Any = [number % 9] if task is DIRECT else [f"word {number}"]
        return local_report(task, items, rng=rng).to_bytes()
    values: Any = np.array([number % 50])
    if task in (LISTED, ITEMS):
        values = [f"word {number}"]
    if task is COUNT:
        values = [f"word {number}", f"other {number}"]
    if task is VECTOR:
        values = VECTORS.tables(RNG.normal(size=(1, 20)), rng=rng)
    return report(task, values, rng=rng).to_bytes()


Forgery = Callable[[], bytes]
HEAVY = replace(COUNT, items_per_device=3)
TABLES: dict[str, tuple[Task | LocalTask, Forgery]] = {
    "a negative count": (ONE_HOT, lambda: cells(ONE_HOT, at3=-1)),
    "one item three times": (ONE_HOT, lambda: cells(ONE_HOT, at3=3)),
    "three items": (ONE_HOT, lambda: cells(ONE_HOT, at3=1, at4=1, at9=1)),
    "two, and minus two": (ONE_HOT, lambda: cells(ONE_HOT, at3=2, at4=-2)),
    "every item": (ONE_HOT, lambda: sealed(ONE_HOT, np.ones(50, dtype=np.int64))),
    "counts that wrap to one": (ONE_HOT, lambda: sealed(ONE_HOT, np.full(50, 4_096))),
    "random bytes as counts": (ONE_HOT, lambda: noise(ONE_HOT)),
    "a heavy cell": (COUNT, lambda: cells(COUNT, at3=701)),
    "three items in a sketch": (
        COUNT,
        lambda: sealed(COUNT, HEAVY.sketch.encode(["oak", "elm", "ash"])),
    ),
    "one row without the others": (COUNT, lambda: cells(COUNT, at3=1)),
    "random bytes as a sketch": (COUNT, lambda: noise(COUNT)),
    "one key twice": (LISTED, lambda: sealed(LISTED, 2 * KEYS.encode(["oak"]))),
    "two keys": (LISTED, lambda: sealed(LISTED, KEYS.encode(["oak", "elm"]))),
    "a key taken away": (LISTED, lambda: sealed(LISTED, -KEYS.encode(["oak"]))),
    "a key in one row": (LISTED, lambda: cells(LISTED, at0=int(KEYS.encode(["oak"]).max()))),
    "random bytes as keys": (LISTED, lambda: noise(LISTED)),
    "a place beyond the dictionary": (SPARSE, lambda: entries(SPARSE, 0, 51)),
    "places out of order": (SPARSE, lambda: entries(SPARSE, 9, 3)),
    "a place before none": (SPARSE, lambda: entries(SPARSE, 9, 0)),
    "an item twice": (ITEMS, lambda: entries(ITEMS, key("oak"), key("oak"))),
    "items out of order": (ITEMS, lambda: entries(ITEMS, key("elm"), key("oak"))),
    "an item before none": (ITEMS, lambda: entries(ITEMS, key("oak"), 0)),
    "an item without an end": (ITEMS, lambda: entries(ITEMS, 0, key("oak") | 1 << 63)),
    "an item that is no text": (ITEMS, lambda: entries(ITEMS, 0, 0x01FE)),
    "random bytes as items": (ITEMS, lambda: noise(ITEMS)),
    "a vector that is too long": (VECTOR, lambda: sealed(VECTOR, np.full(20, 400))),
    "a coordinate out of range": (VECTOR, lambda: cells(VECTOR, at7=-5_000)),
    "random bytes as a vector": (VECTOR, lambda: noise(VECTOR)),
    "no category": (DIRECT, lambda: b"\x63"),
    "no code": (HASHED, lambda: b"\xff"),
}


def to_report(task: Task | LocalTask, message: bytes) -> bytes:
    return Report(task.id, RNG.bytes(16), message).to_bytes()


@pytest.mark.parametrize("kind", TABLES)
def test_what_no_device_could_have_said_is_not_counted(kind: str) -> None:
    task, forge = TABLES[kind]
    collector, untouched = Collector(task), Collector(task)
    good = [honest(task, number) for number in range(REPORTS)]
    bad = [to_report(task, forge()) for _ in range(REPORTS)]
    collector.add([report for pair in zip(good, bad, strict=True) for report in pair])
    untouched.add(good)
    assert collector.rejected == {Rejection.IMPOSSIBLE: REPORTS}
    assert untouched.rejected == {}
    assert collector.batch.count == untouched.batch.count == REPORTS
    if isinstance(task, Task):
        assert np.array_equal(collector.batch.total, untouched.batch.total)
    else:
        assert collector.batch.records == untouched.batch.records


@pytest.mark.parametrize("task", [ONE_HOT, COUNT, LISTED, VECTOR, SPARSE, ITEMS, DIRECT, HASHED])
def test_what_is_no_report_is_not_counted(task: Task | LocalTask) -> None:
    good = honest(task, 1)
    other = ONE_HOT.id if task is not ONE_HOT else COUNT.id
    bad = {
        b"": Rejection.MALFORMED,
        good[: HEADER_BYTES - 1]: Rejection.MALFORMED,
        good[:HEADER_BYTES]: Rejection.MALFORMED,
        good + b"\0" * 4: Rejection.MALFORMED,
        b"\x09" + good[1:]: Rejection.MALFORMED,
        good[:1] + bytes.fromhex(other) + good[33:]: Rejection.WRONG_TASK,
    }
    for data, reason in bad.items():
        collector = Collector(task)
        collector.add([data])
        assert (collector.rejected, collector.batch.count) == ({reason: 1}, 0)
