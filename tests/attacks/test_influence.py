"""How far one dishonest device moves an answer: by at most the number in the privacy statement.

One device's report is replaced by every admitted report of a small task, or by the worst one that
its task admits and many random ones. Where the statement has a number, no answer moves further and
some move nearly as far; where it says that there is no bound, a report that moves an answer by more
than an honest device could is shown.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import sfumato
from checks import SEED
from sfumato.flow.accumulator import Collector
from sfumato.flow.aggregation import Plain, Sparse
from sfumato.flow.campaign import run
from sfumato.flow.contribute import local_report, report
from sfumato.flow.release import NoisedSum
from sfumato.flow.report import Report
from sfumato.flow.task import LocalTask, Task
from sfumato.privacy import (
    Budget,
    CountMeanSketch,
    HadamardCountMeanSketch,
    HashedResponse,
    Ledger,
    SeededRng,
)
from sfumato.questions.local_frequencies.design import LocalDesign
from sfumato.questions.mean.design import MeanDesign
from sfumato.questions.question import Participation, Plan
from sfumato.secagg import rehearsal
from sfumato.sketch import CountSketch, InvertibleSketch, VectorSketch

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

WORDS = ("ash", "elm", "fir", "oak")
DEVICES = 40
SCALE = 2.5  # devices asked per device that answers: what a count is multiplied by
ROUNDING = 1e-6  # of numbers near 1 in float32, in which sketches of vectors are decoded


def plan_of(**study: Any) -> Plan:
    items = study.pop("items", None)
    keys = {"epsilon": 1.0, "delta": 1e-6, "devices": DEVICES} | study
    return sfumato.plan(keys, items=items)


def with_design(planned: Plan, design: Any) -> Plan:
    privacy = replace(planned.privacy, influence=design.influence)
    return replace(planned, design=design, privacy=privacy)


def task_of(planned: Plan) -> Any:
    return planned.design.campaign(planned).next_task()


def release_of(planned: Plan, reports: Sequence[bytes]) -> Any:
    """The release of a study with one task, to which these reports were sent."""
    counted = 0

    def gather(task: Any) -> Any:
        nonlocal counted
        collector = Collector(task)
        collector.add(reports)
        counted = collector.batch.count
        return collector.batch

    campaign = planned.design.campaign(planned, secret=bytes(32))
    ledger = Ledger(Budget(epsilon=None, delta=0.0))
    run(campaign, gather, ledger=ledger, rng=SeededRng(SEED))
    assert counted == len(reports), "a report was not admitted"
    participation = Participation(
        devices=round(SCALE * counted),
        respondents=counted,
        rounds=1,
        tasks=[(task_of(planned), counted)],
    )
    return planned.design.answer(campaign, planned, participation)


def numbers_of(release: Any) -> F64:
    """The numbers of a release, in an order that does not depend on them."""
    frame = release.frame().to_pydict()
    if "mean" in frame:
        return np.array(frame["mean"])
    counts = dict(zip(frame["item"], frame["count"], strict=True))
    return np.array([counts[item] for item in sorted(counts)])


def admissible(task: Any, messages: Iterable[bytes]) -> Iterator[bytes]:
    """Reports with these messages that the collector counts."""
    for message in messages:
        data = Report(task.id, bytes(16), message).to_bytes()
        collector = Collector(task)
        collector.add([data])
        if collector.batch.count == 1:
            yield data


def move_of(
    planned: Plan, others: Sequence[bytes], reports: Iterable[bytes]
) -> tuple[float, float]:
    """How far the device's report moves a number at most, and the number that the release prints;
    the statement has both sentences in words."""
    releases = [release_of(planned, [*others, report]) for report in reports]
    assert len(releases) > 1
    printed = releases[0].privacy.influence
    assert f"Not covered: {printed}" in releases[0].privacy.lines
    assert f"by at most {printed.most:,g}" in str(printed)
    answers = np.array([numbers_of(release) for release in releases])
    return float(np.ptp(answers, axis=0).max()), printed.most


def assert_bounded(planned: Plan, others: Sequence[bytes], reports: Iterable[bytes]) -> None:
    """No admitted report moves a number further than the release says, and some move it more than
    97% as far, so that a number smaller by 3% would be exceeded."""
    furthest, most = move_of(planned, others, reports)
    assert 0.97 * most < furthest <= most * (1 + ROUNDING)


def honest(task: Any, count: int = DEVICES - 1) -> list[bytes]:
    rng = SeededRng(SEED)
    values: Any = [[number % len(WORDS)] for number in range(count)]
    if not isinstance(task, LocalTask) and task.categories is None:
        values = [[WORDS[number % len(WORDS)]] for number in range(count)]
    make: Any = local_report if isinstance(task, LocalTask) else report
    if isinstance(task, LocalTask) and task.categories is None:
        values = [[WORDS[each[0]]] for each in values]
    return [make(task, each, rng=rng).to_bytes() for each in values]


def sealed(task: Task, table: I64) -> bytes:
    assert isinstance(task.aggregation, Plain)
    return task.aggregation.seal(table)


# Trust central: counts.


@pytest.mark.parametrize("items_per_device", [1, 2])
def test_no_report_moves_a_count_of_a_one_hot_table_further(items_per_device: int) -> None:
    planned = plan_of(
        question="frequencies",
        trust="central",
        items=WORDS,
        items_per_device=items_per_device,
        algorithm="one_hot",
    )
    assert planned.influence.most == items_per_device
    task = task_of(planned)
    tables = product(range(-1, items_per_device + 2), repeat=len(WORDS))
    messages = [sealed(task, np.array(table)) for table in tables]
    reports = list(admissible(task, messages))
    assert 0 < len(reports) < len(messages)  # most tables are impossible
    assert_bounded(planned, honest(task), reports)


@pytest.mark.parametrize("items_per_device", [1, 2])
def test_no_report_moves_a_count_of_sparse_reports_further(items_per_device: int) -> None:
    planned = plan_of(
        question="frequencies",
        trust="central",
        items=WORDS,
        items_per_device=items_per_device,
    )
    assert planned.influence.most == items_per_device
    task = task_of(planned)
    assert isinstance(task.aggregation, Sparse)
    size = task.message_bytes
    messages = [number.to_bytes(size, "little") for number in range(256**size)]
    reports = list(admissible(task, messages))
    assert 0 < len(reports) < len(messages)
    assert_bounded(planned, honest(task), reports)


def test_no_report_moves_a_count_of_a_list_further() -> None:
    """Everybody else's items are listed with and without the lie, and it moves them by one."""
    planned = plan_of(question="heavy_hitters", trust="central", epsilon=None, word_length=3)
    assert planned.influence.most == 1
    task, rng = task_of(planned), SeededRng(SEED)
    others = [report(task, [WORDS[k % 4]], rng=rng).to_bytes() for k in range(DEVICES - 1)]
    counts = []
    for values in ([], *([word] for word in WORDS), ["new"]):
        release = release_of(planned, [*others, report(task, values, rng=rng).to_bytes()])
        listed = dict(zip(release.items.to_pylist(), release.counts.tolist(), strict=True))
        counts.append([listed[word] for word in WORDS])
    moved = np.ptp(counts, axis=0) / SCALE
    assert np.allclose(moved, planned.influence.most)


def test_no_report_moves_a_count_of_a_sketch_further() -> None:
    """Sketches that are decoded by medians: random tables, and those that are all about one item,
    which an honest device makes only for one sign."""
    planned = plan_of(
        question="frequencies",
        trust="central",
        items=[*WORDS, *(f"word {number}" for number in range(2_000))],
        items_per_device=2,
        bytes_per_device=500,
        paper_mode=True,
    )
    assert planned.influence.most == 4
    task, rng = task_of(planned), np.random.default_rng(SEED)
    sketch = task.sketch
    assert isinstance(sketch, CountSketch)
    worst = [sign * sketch.encode(["oak", "oak"]) for sign in (1, -1)]
    chance = [rng.integers(-1, 2, size=2) @ random_tables(sketch, rng) for _ in range(60)]
    messages = [sealed(task, table) for table in (*worst, *chance)]
    reports = list(admissible(task, messages))
    assert len(reports) > 40
    assert_bounded(planned, honest(task), reports)


def random_tables(sketch: CountSketch, rng: np.random.Generator) -> Any:
    """Two tables with a random cell in each row, flattened to be added and shaped again."""
    tables = np.zeros((2, *sketch.shape), dtype=np.int64)
    rows = np.arange(sketch.rows)
    for table in tables:
        table[rows, rng.integers(sketch.width, size=sketch.rows)] = 1
    return tables.transpose(1, 0, 2)


def test_one_report_can_move_a_refined_count_further_than_a_plain_one() -> None:
    """Why a refined sketch has no number: one honest item instead of another tips the decoder. Of
    ten sketches, at least one is near such a point."""
    words = [f"word {number}" for number in range(40)]
    planned = plan_of(
        question="frequencies",
        trust="central",
        epsilon=None,
        items=words,
        devices=400,
        algorithm="one_hot",
    )
    design: Any = replace(planned.design, mode="shared", rows=5, width=16, decode="refined")  # type: ignore[type-var]  # a dataclass
    law = 1 / np.arange(1, 41) ** 1.1

    def furthest(seed: int) -> float:
        sketched = with_design(planned, replace(design, seed=seed))
        assert sketched.influence.most is None
        assert "without bound" in sketched.privacy.statement
        task, rng = task_of(sketched), SeededRng(seed)
        places = np.random.default_rng(seed).choice(40, size=399, p=law / law.sum())
        reports = [report(task, [word], rng=rng).to_bytes() for word in words]
        others = [report(task, [words[place]], rng=rng).to_bytes() for place in places]
        answers = [numbers_of(release_of(sketched, [*others, each])) for each in reports[:6]]
        return float(np.ptp(answers, axis=0).max())

    plain = replace(design, decode="median").influence.most
    assert any(furthest(seed) > 2 * SCALE * plain for seed in range(10))


@pytest.mark.slow
def test_one_report_can_keep_a_table_from_being_listed() -> None:
    """Why a list has no number: keys that share all cells with another cannot be listed."""
    planned = plan_of(
        question="heavy_hitters", trust="central", epsilon=None, algorithm="invertible_sketch"
    )
    assert planned.influence.most is None
    design: Any = planned.design
    planned = with_design(planned, replace(design, width=8, partial=False))
    task, rng = task_of(planned), SeededRng(SEED)
    sketch = task.sketch
    assert isinstance(sketch, InvertibleSketch)
    others = [report(task, [WORDS[k % 2]], rng=rng).to_bytes() for k in range(DEVICES - 1)]
    elm = sketch.encode(["elm"])[:, :, 0] != 0
    names = (f"x{number}" for number in range(10**4))
    twin = next(n for n in names if ((sketch.encode([n])[:, :, 0] != 0) == elm).all())
    spoiled = release_of(planned, [*others, report(task, [twin], rng=rng).to_bytes()])
    complete = release_of(planned, [*others, report(task, ["oak"], rng=rng).to_bytes()])
    assert sorted(complete.items.to_pylist()) == ["ash", "elm", "oak"]
    assert spoiled.items.to_pylist() == []


# Trust central: means.


@pytest.mark.parametrize("study", [{}, {"compression": "fixed", "bytes_per_device": 150}])
def test_no_report_moves_a_coordinate_of_a_mean_further(study: dict[str, Any]) -> None:
    """Random tables of the largest norm, and those that are all about one coordinate."""
    planned = plan_of(question="mean", trust="central", clip=2.0, dimensions=64, **study)
    assert 2 * 2.0 / DEVICES <= (planned.influence.most or 0.0) <= 1.25 * 2 * 2.0 / DEVICES
    task, rng = task_of(planned), np.random.default_rng(SEED)
    sketch = task.sketch
    assert isinstance(sketch, VectorSketch)
    assert (sketch.dense is None) == (not study)
    longest = sketch.rounding.l2
    unit = np.eye(64)[5] if sketch.dense is None else sketch.dense.encode(np.eye(64)[5])
    directions = [unit, -unit, *rng.normal(size=(50, *sketch.shape))]
    tables = [np.trunc(longest * each / np.linalg.norm(each)) for each in directions]
    reports = list(admissible(task, [sealed(task, table.astype(np.int64)) for table in tables]))
    assert len(reports) == len(tables)
    longer = [sealed(task, np.trunc(1.1 * table).astype(np.int64)) for table in tables]
    assert list(admissible(task, longer)) == []
    vectors = sketch.tables(rng.normal(size=(DEVICES - 1, 64)), rng=SeededRng(SEED))
    others = [report(task, table[None], rng=SeededRng(k)) for k, table in enumerate(vectors)]
    assert_bounded(planned, [each.to_bytes() for each in others], reports)


def test_one_report_to_a_pilot_can_move_a_mean_further() -> None:
    """Why a mean whose size adapts has no number. All devices have one vector; one of them sends
    the opposite to the pilot, and the same as all to the next round. Sums are read without their
    noise. Of ten public seeds, at least one gives a pilot that decides."""
    design = MeanDesign(
        compression="adapt_norm",
        dimensions=5_000,
        devices=DEVICES,
        clip=1.0,
        most_cells=5_000,
        seed=SEED,
        multiplier=1.2,
        relative_error=1.0,
    )
    fixed = replace(design, compression="fixed", most_cells=300)
    assert design.influence.most is None
    assert "size of the sketch" in str(design.influence)
    vector = np.random.default_rng(SEED).normal(size=5_000)

    study_plan = plan_of(question="mean", trust="central", clip=1.0, dimensions=4)

    def mean(sign: int, seed: int) -> F64:
        campaign = replace(design, seed=seed).campaign(study_plan)
        while (task := campaign.next_task()) is not None:
            sketch: Any = task.sketch
            (table,) = sketch.tables(vector[None], rng=SeededRng(SEED))
            liar = sign * table if not campaign.answers else table
            assert sketch.possible(liar[None], 1).all()
            campaign.absorb(NoisedSum(task, (DEVICES - 1) * table + liar, DEVICES))
        assert len(campaign.answers) == 2
        return campaign.estimate().mean

    moves = (np.abs(mean(1, seed) - mean(-1, seed)).max() for seed in range(10))
    assert any(move > 1.5 * (fixed.influence.most or math.inf) for move in moves)


# Trust local.


@pytest.mark.parametrize("daily_reports", [1, 2])
def test_no_report_moves_a_count_of_direct_responses_further(daily_reports: int) -> None:
    planned = plan_of(
        question="frequencies", trust="local", items=WORDS, daily_reports=daily_reports
    )
    assert planned.algorithm == "direct response"
    task = task_of(planned)
    messages = [
        bytes(record)
        for size in range(1, daily_reports + 2)
        for record in product(range(7), repeat=size)
    ]
    reports = list(admissible(task, messages))
    assert len(reports) == sum(5**size for size in range(1, daily_reports + 1))
    assert_bounded(planned, honest(task), reports)


@pytest.mark.parametrize(
    ("randomizer", "codes"),
    [
        (HashedResponse(epsilon=1.5, rows=6, width=4, seed=SEED), 24),
        (HadamardCountMeanSketch(epsilon=1.5, rows=4, width=4, seed=SEED), 32),
        (CountMeanSketch(epsilon=1.5, rows=4, width=6, seed=SEED), 4 << 8),
        (CountMeanSketch(epsilon=1.5, rows=4, width=6, seed=SEED, flips="optimal"), 4 << 8),
    ],
    ids=["hashed", "hadamard", "count mean", "optimal count mean"],
)
def test_no_report_moves_a_plain_count_of_hashed_records_further(
    randomizer: Any, codes: int
) -> None:
    """Every record that a randomizer has, and codes beyond them."""
    design = LocalDesign(randomizer=randomizer, items=len(WORDS), devices=DEVICES, aware=False)
    planned = with_design(plan_of(question="frequencies", trust="local", items=WORDS), design)
    task = task_of(planned)
    size = task.record_bytes
    messages = [
        code.to_bytes(size, "little")
        if size == 1
        else bytes([code & 255, code >> 8])  # a row, and then its bits
        for code in (
            range(256) if size == 1 else (r | b << 8 for r in range(6) for b in range(256))
        )
    ]
    reports = list(admissible(task, messages))
    assert len(reports) == (codes if size == 1 else 4 << 6)
    assert_bounded(planned, honest(task), reports[:: 1 if size == 1 else 5])


def test_one_report_can_move_a_corrected_count_further_than_a_plain_one() -> None:
    """Why a count that is corrected for collisions has no number but that of the plain count. Of
    ten seeds, at least one has a table in which corrections depend on one record."""
    words = [f"w{number}" for number in range(30)]
    planned = plan_of(question="frequencies", trust="local", items=words, devices=300)
    law = 1 / np.arange(1, 31) ** 1.1
    randomizer = HashedResponse(epsilon=2.0, rows=12, width=8, seed=0)
    design = LocalDesign(randomizer=randomizer, items=30, devices=300)
    plain = replace(design, aware=False).influence.most
    assert plain is not None

    def furthest(seed: int) -> float:
        seeded = replace(design, randomizer=replace(randomizer, seed=seed))
        hashed = with_design(planned, seeded)
        assert hashed.influence.most is None
        assert f"at most {plain:g} for each day" in hashed.privacy.statement
        task, rng = task_of(hashed), SeededRng(seed)
        places = np.random.default_rng(seed).choice(30, size=299, p=law / law.sum())
        others = [local_report(task, [words[place]], rng=rng).to_bytes() for place in places]
        reports = admissible(task, [bytes([code]) for code in range(0, 96, 4)])
        answers = [numbers_of(release_of(hashed, [*others, each])) for each in reports]
        return float(np.ptp(answers, axis=0).max())

    assert any(furthest(seed) > 1.05 * SCALE * plain for seed in range(10))


# Trust secure.


def test_one_masked_table_moves_an_answer_to_any_value() -> None:
    planned = plan_of(
        question="frequencies", trust="secure", epsilon=8.0, delta=1e-3, items=WORDS, dropout=0.1
    )
    assert planned.influence.most is None
    assert "to any value, since masked tables cannot be checked" in planned.privacy.statement
    task = task_of(planned)
    largest = (1 << task.aggregation.modulus_bits - 1) - 1
    assert largest > DEVICES  # more than all devices together

    def count_of_oak(lie: int) -> int:
        def table_of(member: int) -> I64:
            table = np.zeros(len(WORDS), dtype=np.int64)
            table[member % len(WORDS)] = 1
            table[3] += lie % (2 * largest + 2) if member == 0 else 0
            return table

        round = task.masked_round(DEVICES, "5f" * 16)
        outcome = rehearsal.run(round, table_of, rng=SeededRng(SEED))
        return int(task.aggregation.open(outcome.total)[3])

    true = DEVICES // len(WORDS)
    assert [count_of_oak(value - true) for value in (-largest, largest)] == [-largest, largest]


@pytest.mark.parametrize(
    "study",
    [
        {"question": "heavy_hitters", "alphabet": "abcd", "word_length": 2, "epsilon": 8.0},
        {"question": "mean", "clip": 1.0, "dimensions": 4},
    ],
)
def test_no_masked_question_has_a_number(study: dict[str, Any]) -> None:
    planned = plan_of(trust="secure", delta=1e-3, **({"epsilon": 4.0} | study))
    assert planned.influence.most is None
    assert "masked tables cannot be checked" in planned.privacy.statement
