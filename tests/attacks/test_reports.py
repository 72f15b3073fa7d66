"""Reports that no device could have made: none is counted, and each has its reason.

What a device may say is bounded by its task; a report beyond that would move an answer further than
the privacy statement and the error bars allow for.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from checks import SEED
from collecting import open_task, request
from serving import ask, settings
from sfumato.collector import studies
from sfumato.collector.serve import running
from sfumato.flow.accumulator import Collector
from sfumato.flow.admission import Rejection
from sfumato.flow.aggregation import Plain, Sparse
from sfumato.flow.contribute import local_report, report
from sfumato.flow.report import HEADER_BYTES, Report, to_frames
from sfumato.flow.task import LocalTask, Task
from sfumato.privacy import DirectResponse, HashedResponse, NoNoise, SeededRng, SystemRng, best_list
from sfumato.sketch import (
    CountSketch,
    InvertibleSketch,
    ItemCounts,
    OneHot,
    TextKeys,
    VectorSketch,
)
from sfumato.spec import from_json, kind_of

I64 = npt.NDArray[np.int64]
REPORTS = 10  # of each kind
RNG = np.random.default_rng(SEED)


def task_with(sketch: Any, bits: int, items: int = 1, mechanism: Any = None) -> Task:
    return Task(
        sketch=sketch,
        mechanism=mechanism or NoNoise(),
        aggregation=Plain(modulus_bits=bits),
        cohort="everybody",
        items_per_device=items,
        max_count=1_000,
    )


ONE_HOT = task_with(OneHot(categories=50), 13, items=2)
COUNT = task_with(CountSketch(rows=5, width=16, seed=SEED), 13, items=2)
KEYS = InvertibleSketch(
    keys=TextKeys(length=8), rows=3, width=16, count_bits=10, check_bits=20, seed=SEED
)
LISTED = task_with(KEYS, KEYS.word_bits, mechanism=best_list(0.5, epsilon=1.0, delta=1e-6))
VECTORS = VectorSketch(length=20, clip=1.0, bound=1.0, scale=1_000.0)
VECTOR = task_with(VECTORS, 24)
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


def encoded(task: Task, items: list[str], times: int = 1) -> bytes:
    return sealed(task, times * task.sketch.encode(items))


def cells(task: Task, **places: int) -> bytes:
    """A message with these values in some cells, by their numbers, and zeros elsewhere."""
    table = np.zeros(task.cells, dtype=np.int64)
    for place, value in places.items():
        table[int(place.removeprefix("at"))] = value
    return sealed(task, table)


def every_cell(task: Task, value: float) -> bytes:
    return sealed(task, np.full(task.cells, int(value)))


def longest(task: Task) -> float:
    """The largest norm of a vector's table."""
    assert isinstance(task.sketch, VectorSketch)
    return task.sketch.rounding.l2


def noise(task: Task) -> bytes:
    """Random bytes of the right length, and with the right end."""
    message = RNG.bytes(task.message_bytes)
    used = task.message_bits % 8
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
    category: Any = [number % 9]
    items = [f"word {number}"]
    if isinstance(task, LocalTask):
        values = category if task.takes_categories() else items
        return local_report(task, values, rng=rng).to_bytes()
    sketch = task.sketch
    if isinstance(sketch, VectorSketch):
        vectors = RNG.normal(size=(1, sketch.length))
        return report(task, sketch.tables(vectors, rng=rng), rng=rng).to_bytes()
    values = category if isinstance(sketch, OneHot) else items
    if isinstance(sketch, CountSketch):
        values = [*items, f"other {number}"]
    return report(task, values, rng=rng).to_bytes()


TASKS: dict[str, Task | LocalTask] = {
    "one-hot": ONE_HOT,
    "sketch": COUNT,
    "list": LISTED,
    "vector": VECTOR,
    "sparse": SPARSE,
    "items": ITEMS,
    "direct": DIRECT,
    "hashed": HASHED,
}
KINDS: dict[str, tuple[str, Callable[[Any], bytes]]] = {
    "a negative count": ("one-hot", lambda task: cells(task, at3=-1)),
    "one item three times": ("one-hot", lambda task: cells(task, at3=3)),
    "three items": ("one-hot", lambda task: cells(task, at3=1, at4=1, at9=1)),
    "two, and minus two": ("one-hot", lambda task: cells(task, at3=2, at4=-2)),
    "every item": ("one-hot", lambda task: every_cell(task, 1)),
    "counts that wrap": (
        "one-hot",
        lambda task: every_cell(task, 1 << task.aggregation.modulus_bits - 1),
    ),
    "random bytes as counts": ("one-hot", noise),
    "a heavy cell": ("sketch", lambda task: cells(task, at3=701)),
    "three items in a sketch": ("sketch", lambda task: encoded(task, ["oak", "elm", "ash"])),
    "one row without the others": ("sketch", lambda task: cells(task, at3=1)),
    "random bytes as a sketch": ("sketch", noise),
    "one key twice": ("list", lambda task: encoded(task, ["oak"], 2)),
    "two keys": ("list", lambda task: encoded(task, ["oak", "elm"])),
    "a key taken away": ("list", lambda task: encoded(task, ["oak"], -1)),
    "a key in one row": ("list", lambda task: cells(task, at0=task.sketch.encode(["oak"]).max())),
    "random bytes as keys": ("list", noise),
    "a place beyond the dictionary": ("sparse", lambda task: entries(task, 0, 51)),
    "places out of order": ("sparse", lambda task: entries(task, 9, 3)),
    "a place before none": ("sparse", lambda task: entries(task, 9, 0)),
    "an item twice": ("items", lambda task: entries(task, key("oak"), key("oak"))),
    "items out of order": ("items", lambda task: entries(task, key("elm"), key("oak"))),
    "an item before none": ("items", lambda task: entries(task, key("oak"), 0)),
    "an item without an end": ("items", lambda task: entries(task, 0, key("oak") | 1 << 63)),
    "an item that is no text": ("items", lambda task: entries(task, 0, 0x01FE)),
    "random bytes as items": ("items", noise),
    "a vector that is too long": ("vector", lambda task: every_cell(task, longest(task) / 2)),
    "a coordinate out of range": ("vector", lambda task: cells(task, at7=-int(2 * longest(task)))),
    "random bytes as a vector": ("vector", noise),
    "no category": ("direct", lambda task: b"\x63"),
    "no code": ("hashed", lambda task: b"\xff" * task.record_bytes),
}


def part(task: Task | LocalTask) -> Any:
    """What a device makes its report with."""
    return task.sketch if isinstance(task, Task) else task.randomizer


def forged(task: Task | LocalTask, kind: str) -> list[bytes]:
    make = KINDS[kind][1]
    return [Report(task.id, RNG.bytes(16), make(task)).to_bytes() for _ in range(REPORTS)]


@pytest.mark.parametrize("kind", KINDS)
def test_what_no_device_could_have_said_is_not_counted(kind: str) -> None:
    task = TASKS[KINDS[kind][0]]
    collector, untouched = Collector(task), Collector(task)
    good = [honest(task, number) for number in range(REPORTS)]
    bad = forged(task, kind)
    collector.add([report for pair in zip(good, bad, strict=True) for report in pair])
    untouched.add(good)
    assert collector.rejected == {Rejection.IMPOSSIBLE: REPORTS}
    assert untouched.rejected == {}
    assert collector.batch.count == untouched.batch.count == REPORTS
    if isinstance(task, Task):
        assert np.array_equal(collector.batch.total, untouched.batch.total)
    else:
        assert collector.batch.records == untouched.batch.records


STUDIES: dict[str, dict[str, Any]] = {
    "one-hot": {"items_per_device": 2, "algorithm": "one_hot"},
    "sparse": {"items_per_device": 2, "items": [*map(str, range(50))]},
    "items": {"question": "heavy_hitters", "items_per_device": 2, "items": None},
    "sketch": {
        "items_per_device": 2,
        "algorithm": "count_sketch",
        "bytes_per_device": 500,
        "items": [*map(str, range(2_000))],
    },
    "list": {"question": "heavy_hitters", "algorithm": "invertible_sketch", "items": None},
    "vector": {"question": "mean", "clip": 1.0, "dimensions": 20, "items": None},
    "direct": {"trust": "local", "epsilon": 2.0, "items": [*map(str, range(9))]},
    "hashed": {"trust": "local", "epsilon": 1.0, "items": [*map(str, range(2_000))]},
}


def test_a_service_refuses_200_impossible_reports_and_says_why(tmp_path: Path) -> None:
    """Over HTTP, between honest reports: of every kind, all are refused with their reason, and the
    collector counts only the honest ones."""
    assert REPORTS * len(KINDS) >= 200
    with running(settings(tmp_path)) as collector:
        rows = {
            name: studies.create(
                collector.store,
                request(name, **keys),
                key=collector.key,
                rng=SystemRng(),
                now=time.time,
            )
            for name, keys in STUDIES.items()
        }
        good = dict.fromkeys(rows, 0)
        for number, (kind, (name, _)) in enumerate(KINDS.items()):
            task: Any = from_json(open_task(collector.store, rows[name]).spec)
            assert kind_of(part(task)) == kind_of(part(TASKS[name]))
            body = to_frames([honest(task, number), *forged(task, kind)])
            answer = ask(collector.address, "POST", f"/v1/tasks/{task.id}/reports", body)
            assert (answer.status, answer.json()) == (200, {"rejected": {"impossible": REPORTS}})
            good[name] += 1
        states = {name: studies.state(collector.store, row.id) for name, row in rows.items()}
        assert {name: state["received"] for name, state in states.items()} == good
        bad = Counter(name for name, _ in KINDS.values())
        assert {name: state["rejected"] for name, state in states.items()} == {
            name: {"impossible": REPORTS * bad[name]} for name in rows
        }


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
