"""The collector's own work on whole studies: measured seconds and memory beside the plan's.

Every device answers by itself, in reports or in a masked round. What the collector does with the
answers is timed: admitting and adding reports, or its part of a masked round, the noise and the
release. HTTP and the store are left out; `ingest` and `rounds` measure them. The rates of
`sfumato.questions.costs` come from here.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from benchmarks.lines import Line, Settings, line, markdown
from sfumato import Plan
from sfumato.device import private
from sfumato.flow.accumulator import Batch, Collector
from sfumato.flow.campaign import run as run_campaign
from sfumato.flow.contribute import local_report
from sfumato.flow.report import Report
from sfumato.flow.task import Task
from sfumato.planning import compare
from sfumato.privacy import Budget, Ledger, SeededRng
from sfumato.questions.question import Participation
from sfumato.secagg import rehearsal
from sfumato.study import Study

NAME = "server"
WITHIN = 3.0  # factor by which a prediction may be wrong
EXPONENT = 1.1  # of the law that plans assume
PIECE = 256  # reports that arrive together
POOL, LONG_BYTES = 500, 1_000  # different reports, or PIECE if their messages are this long


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    keys: Mapping[str, Any]
    items: int = 0  # listed by the study; 0 for an open domain


def training(model: str, *, devices: int, cohort: int, rounds: int, **keys: Any) -> dict[str, Any]:
    """The keys of a study of training, whose clients have one batch of examples each."""
    study = {"devices": devices, "rounds": rounds, "clip": 1.0, "epsilon": 8.0, **keys}
    return study | {"training": {"model": model, "cohort": cohort}}


CASES = (
    Case("frequencies/central", {"devices": 2_000}, items=10_000),
    Case("frequencies/local", {"devices": 20_000, "epsilon": 4.0}, items=1_000),
    Case("frequencies/secure", {"devices": 100}, items=4_000),
    Case("heavy_hitters/central", {"devices": 2_000}),
    Case("heavy_hitters/secure", {"devices": 60, "epsilon": 8.0, "word_length": 3}),
    Case("histogram/central", {"devices": 2_000}),
    Case("new_words/local", {"devices": 10_000, "epsilon": 6.0, "word_length": 5}),
    Case("mean/central", {"devices": 300, "dimensions": 20_000, "clip": 1.0}),
    Case("mean/secure", {"devices": 60, "dimensions": 20_000, "clip": 1.0}),
    Case("train/secure", training("softmax", devices=120, cohort=60, rounds=2)),
    Case("train/secure", training("mlp", devices=60, cohort=30, rounds=2, compression="none")),
)
TINY = (
    Case("frequencies/central", {"devices": 60}, items=50),
    Case("frequencies/secure", {"devices": 30}, items=50),
    Case("frequencies/local", {"devices": 60, "epsilon": 4.0}, items=50),
)


def run(settings: Settings) -> Iterator[Line]:
    for case in TINY if settings.quick else CASES:
        if not fnmatch(case.name, "/".join(settings.only.split("/")[:2])):
            continue
        question, trust = case.name.split("/")
        study = Study.from_mapping(
            {"question": question, "trust": trust, "epsilon": 1.0, **case.keys}
        )
        names = [f"item {number:05d}" for number in range(case.items)]
        comparison = compare(study, items=names or None)
        for each in comparison.possible:
            assert each.plan is not None  # it is possible
            label = f"{case.name}/{label_of(case, each.algorithm)}"
            if settings.wants(case.name) or settings.wants(label):
                yield _measure(case, label, each.plan, settings)


def label_of(case: Case, algorithm: str) -> str:
    model = case.keys.get("training", {}).get("model", "")
    return f"{algorithm or 'only'} {model}".rstrip()


def _measure(case: Case, label: str, planned: Plan, settings: Settings) -> Line:
    repetitions = settings.repeats or (1 if settings.quick else 3)
    _work(planned, seed=0)  # imports and compiles
    tracemalloc.start()
    try:
        _, memory = _work(planned, seed=0)
    finally:
        tracemalloc.stop()
    seconds = [_work(planned, seed=number)[0] for number in range(repetitions)]
    predicted = {name: planned.predicted[name] for name in ("server_seconds", "server_bytes")}
    if planned.study.training is not None:
        memory = 0  # not measured: it is PyTorch's, which tracemalloc does not see
    measured = {"server_seconds": median(seconds), "server_bytes": memory}
    return line(
        NAME,
        label,
        settings,
        sizes={**case.keys, "items": case.items},
        seeds=[0, repetitions - 1],
        repetitions=repetitions,
        predicted=predicted,
        measured=measured,
        interval=[min(seconds), max(seconds)],
    )


@dataclass
class Watch:
    """Seconds of processor time that the collector works, and the most memory that it takes."""

    seconds: float = 0.0
    memory: int = 0
    _start: float = field(default=0.0, repr=False)
    _before: int = field(default=0, repr=False)

    def __enter__(self) -> Watch:
        if tracemalloc.is_tracing():
            tracemalloc.reset_peak()
        self._start = time.process_time()
        return self

    def __exit__(self, *problem: object) -> None:
        self.seconds += time.process_time() - self._start
        if tracemalloc.is_tracing():
            self.memory = max(self.memory, tracemalloc.get_traced_memory()[1] - self._before)

    def aside(self, size: int) -> None:
        """Leave out memory that is not the collector's."""
        self._before += size


def _work(planned: Plan, *, seed: int) -> tuple[float, int]:
    """The collector's seconds and memory for one run of the study."""
    rng, watch = SeededRng(seed), Watch()
    seeded = planned.design.with_seed(rng)
    question = seeded.question
    holdings = values(planned, seed)
    campaign = question.campaign(planned, secret=seeded.secret)
    ledger = Ledger(Budget(epsilon=None, delta=planned.study.delta))
    rounds, spent_aside = 0, 0.0
    listed = None if planned.dictionary is None else planned.dictionary.items.to_pylist()
    places = listed and {item: place for place, item in enumerate(listed)}
    tasks: list[tuple[Any, int]] = []
    if tracemalloc.is_tracing():
        watch.aside(tracemalloc.get_traced_memory()[0])

    def gather(task: Any) -> Any:
        nonlocal rounds, spent_aside
        rounds += 1
        started, before = time.process_time(), watch.seconds
        share = round(question.cohort_size(task))  # type: ignore[attr-defined]  # all designs have it
        if planned.study.training is not None:
            share = task.max_count - 1
        cohort = np.resize(
            np.roll(holdings, -len(tasks) * share, axis=0), (share, *holdings.shape[1:])
        )
        batch = (
            _masked(task, question, cohort, places, watch)
            if task.is_masked
            else _reports(task, question, cohort, places, watch)
        )
        tasks.append((task, batch.count))
        # What is not the collector's work is not counted in the time of the whole campaign.
        spent_aside += time.process_time() - started
        assert watch.seconds >= before
        return batch

    started = time.process_time()
    if tracemalloc.is_tracing():
        tracemalloc.reset_peak()
    run_campaign(campaign, gather, ledger=ledger, rng=rng, charge_of=question.charge_of)
    watch.seconds += time.process_time() - started - spent_aside
    with watch:
        participation = Participation(
            devices=question.devices, respondents=question.devices, rounds=rounds, tasks=tasks
        )
        question.answer(campaign, planned, participation)
    return watch.seconds, watch.memory


def _reports(task: Any, question: Any, values: npt.NDArray[Any], places: Any, watch: Watch) -> Any:
    """The batch of reports. They are repeated, since it takes long to make them."""
    collector, keys, rng = Collector(task), question.item_keys(task), SeededRng(1)
    pool = values[: PIECE if task.message_bytes > LONG_BYTES else POOL]
    messages = [
        private.table_report(task, keys, _value(value), places)(rng).message
        if isinstance(task, Task)
        else _local(task, value, places, rng)
        for value in pool
    ]
    task_id = task.id  # a digest, which takes longer than a report
    for start in range(0, len(values), PIECE):
        numbers = range(start, min(start + PIECE, len(values)))
        reports = [
            Report(task_id, number.to_bytes(16, "little"), messages[number % len(pool)]).to_bytes()
            for number in numbers
        ]
        with watch:
            collector.add(reports)
    with watch:
        return collector.batch


def _local(task: Any, value: Any, places: Any, rng: SeededRng) -> bytes:
    item = _value(value)
    has_places = places is not None and getattr(task, "categories", None) is not None
    return local_report(task, [places[item[0]]] if has_places else item, rng=rng).message


def _masked(
    task: Task, question: Any, values: npt.NDArray[Any], places: Any, watch: Watch
) -> Batch:
    keys, rng = question.item_keys(task), SeededRng(2)
    round = task.masked_round(len(values), rng.words(2).tobytes().hex())
    outcome = rehearsal.run(
        round,
        lambda member: private.table(task, keys, _value(values[member]), places)(rng),
        rng=rng,
    )
    watch.seconds += outcome.collector_seconds
    return Batch(task.id, outcome.total.reshape(task.sketch.shape), outcome.survivors, charged=True)


def _value(value: Any) -> Any:
    return [str(value)] if np.ndim(value) == 0 else value


def values(planned: Plan, seed: int) -> npt.NDArray[Any]:
    """What each device holds: an item of the law that plans assume, or a vector."""
    study, chance = planned.study, np.random.default_rng(seed)
    assert study.devices is not None  # cases set it
    dimensions = study.dimensions or planned.predicted.get("model_parameters")
    if dimensions is not None:
        vectors = chance.standard_normal((study.devices, dimensions))
        return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))
    count = len(planned.dictionary) if planned.dictionary is not None else study.devices
    law = np.arange(1, count + 1, dtype=np.float64) ** -EXPONENT
    ranks = chance.choice(count, study.devices, p=law / law.sum())
    if planned.dictionary is not None:
        return np.asarray(planned.dictionary.items.take(pa.array(ranks)).to_pylist())
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    codes = (ranks * 1_000_003 + 12_345) % 26**4
    return np.array(["".join(letters[[c // 26**k % 26 for k in range(4)]]) for c in codes])


def missed(lines: Sequence[Line]) -> list[str]:
    """The predictions that are wrong by more than a factor of three."""
    return [
        f"server/{result['case']}: {name} is {ratio:.2f} times the prediction"
        for result in lines
        for name in ("server_seconds", "server_bytes")
        if (ratio := _ratio(result, name)) is not None and not 1 / WITHIN <= ratio <= WITHIN
    ]


def table(lines: Sequence[Line]) -> str:
    header = [
        "study",
        "seconds predicted",
        "measured",
        "ratio",
        "MB predicted",
        "measured",
        "ratio",
    ]
    return markdown(
        header,
        [
            [
                result["case"],
                f"{result['predicted']['server_seconds']:.3g}",
                f"{result['measured']['server_seconds']:.3g}",
                _text(_ratio(result, "server_seconds")),
                f"{result['predicted']['server_bytes'] / 1e6:.3g}",
                f"{result['measured']['server_bytes'] / 1e6:.3g}",
                _text(_ratio(result, "server_bytes")),
            ]
            for result in lines
        ],
    )


def _ratio(result: Line, name: str) -> float | None:
    measured = result["measured"][name]
    return measured / result["predicted"][name] if measured else None


def _text(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"
