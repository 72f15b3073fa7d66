"""Training resumes where it stopped, is not misled by bad clients, and clips hold."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sfumato.errors import DataError, ImpossibleError, SpecError
from sfumato.flow.accumulator import Batch
from sfumato.flow.model_terms import LocalTraining
from sfumato.flow.release import noised_sum
from sfumato.flow.secure_sum import SecureSum
from sfumato.learn.campaign import RoundNoise, RoundResult, TrainingCampaign
from sfumato.learn.clients import updates
from sfumato.learn.compression import (
    AdaptNorm,
    AdaptTail,
    Compression,
    FixedRate,
    FreeNorm,
    NoCompression,
    TwoStage,
)
from sfumato.learn.data import Clients, Federated
from sfumato.learn.design import (
    AdaptiveClip,
    ServerOptimizer,
    TrainingDesign,
    whole_numbers,
)
from sfumato.learn.training import FloatSum, RoundFigures, Training
from sfumato.privacy import AdditiveLoss, Budget, Ledger, NoPrivacy, SeededRng, epsilon_of
from sfumato.privacy.accounting import SMOOTHING, SampledLoss
from sfumato.privacy.rounding import COARSEST
from sfumato.sketch.vector import RoundSketch, VectorSketch
from sfumato.spec import from_json, to_json

CLIENTS, INPUTS, CLASSES = 30, 8, 3
SIZES = tuple(3 + client % 5 for client in range(CLIENTS))
RULES: dict[str, Compression] = {
    "none": NoCompression(),
    "fixed": FixedRate(rate=3.0),
    "adapt_norm": AdaptNorm(error=500.0),
    "two_stage": TwoStage(error=500.0, warm_up=2),
    "adapt_tail": AdaptTail(error=0.5, first=40),
    "free_norm": FreeNorm(error=300.0),
}
DESIGN = TrainingDesign(
    model="mlp",
    inputs=INPUTS,
    classes=CLASSES,
    hidden=6,
    clients=CLIENTS,
    cohort=10,
    rounds=6,
    local=LocalTraining(learning_rate=0.3, batch=2, epochs=2),
    clip=0.5,
    noise_multiplier=0.1,
    rows=3,
    server=ServerOptimizer(method="sgd"),
    seed=11,
)
LENGTH = INPUTS * 6 + 6 + 6 * CLASSES + CLASSES
QUIET = 1e-6  # a noise multiplier whose noise is below the tolerances
ALL_AT_ONCE = LocalTraining(learning_rate=0.3, batch=100)  # order only matters for rounding


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tests run side by side; threads of each would wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def population(sizes: tuple[int, ...] = SIZES, inputs: int = INPUTS) -> Federated:
    """Examples of three classes around three places; a client has some of each."""
    draw = torch.Generator().manual_seed(3)
    places = torch.randn(CLASSES, inputs, generator=draw)
    targets = torch.randint(0, CLASSES, (len(sizes), 8), generator=draw)
    examples = places[targets] + 0.3 * torch.randn(len(sizes), 8, inputs, generator=draw)
    indices = torch.cat([torch.arange(size) + 8 * client for client, size in enumerate(sizes)])
    train = Clients(
        examples.reshape(-1, inputs)[indices],
        targets.reshape(-1)[indices],
        torch.tensor([0, *sizes]).cumsum(0),
    )
    tests = torch.arange(60) % CLASSES
    noise = 0.3 * torch.randn(60, inputs, generator=draw)
    return Federated(train, places[tests] + noise, tests, "synthetic")


def spoiled(clients: tuple[int, ...], value: float) -> Federated:
    """The population with a value in these clients' examples that no model can learn from."""
    data = population()
    inputs = data.train.inputs.clone()
    for client in clients:
        inputs[int(data.train.offsets[client]), 2] = value
    return replace(data, train=replace(data.train, inputs=inputs))


def without(clients: tuple[int, ...]) -> Federated:
    """The population without these clients' examples."""
    data = population()
    owner = torch.repeat_interleave(torch.arange(CLIENTS), torch.tensor(SIZES))
    mask = ~torch.isin(owner, torch.tensor(clients))
    sizes = [0 if client in clients else size for client, size in enumerate(SIZES)]
    train = Clients(
        data.train.inputs[mask], data.train.targets[mask], torch.tensor([0, *sizes]).cumsum(0)
    )
    return replace(data, train=train)


def training(
    design: TrainingDesign = DESIGN, data: Federated | None = None, **options: Any
) -> Training:
    return Training(design, data or population(), **{"noise_seed": 5, **options})


def finished(learner: Training, **options: Any) -> list[RoundFigures]:
    return list(learner.run(**options))


def off(one: Training, other: Training) -> float:
    return float((one.campaign.flat - other.campaign.flat).abs().max())


def state(learner: Training) -> dict[str, Any]:
    """Everything that the next round depends on."""
    return {
        "flat": learner.campaign.flat.tolist(),
        "memory": {name: value.tolist() for name, value in learner.campaign.memory.items()},
        "sizing": asdict(learner.campaign.sizing),
        "clip": learner.campaign.clip,
        "done": learner.campaign.done,
        "cells": learner.campaign.cells_sent,
        "history": [replace(figures, seconds=0.0) for figures in learner.history],
    }


# Learning


def test_a_model_learns() -> None:
    learner = training(replace(DESIGN, rounds=12))
    before, _ = learner.evaluate()
    figures = finished(learner)
    assert before is not None
    assert figures[-1].accuracy is not None
    assert figures[-1].accuracy > max(before, 0.8)
    assert learner.campaign.flat.numel() == LENGTH


@pytest.mark.parametrize("compression", [NoCompression(), FixedRate(rate=3.0)])
def test_whole_numbers_and_floats_give_one_model_but_for_rounding(
    compression: Compression,
) -> None:
    """With next to no noise. 1e-5 is a hundred roundings of numbers of about one."""
    design = replace(DESIGN, noise_multiplier=QUIET, compression=compression)
    exact, floats = training(design), training(design, exact=False)
    start = exact.campaign.flat.clone()
    finished(exact)
    finished(floats)
    assert off(exact, floats) < 1e-5
    assert float((exact.campaign.flat - start).abs().max()) > 0.05


@pytest.mark.parametrize("exact", [True, False])
def test_a_run_with_a_seed_repeats_and_another_seed_does_not(exact: bool) -> None:
    runs = [training(exact=exact, noise_seed=seed) for seed in (1, 1, 2)]
    for learner in runs:
        finished(learner, until=2)
    assert torch.equal(runs[0].campaign.flat, runs[1].campaign.flat)
    assert not torch.equal(runs[0].campaign.flat, runs[2].campaign.flat)


def test_without_a_seed_cohorts_orders_and_noise_are_unpredictable() -> None:
    """False alarm below 1e-6: two cohorts of thirty coins at a third are equal with probability
    (5/9)^30 = 2e-8, and two seeds of 64 bits far more rarely."""
    one, other = training(noise_seed=None), training(noise_seed=None)
    assert one.cohort(0).tolist() != other.cohort(0).tolist()
    seeds = [learner.generator(0).initial_seed() for learner in (one, one, other)]
    assert len(set(seeds)) == 3
    finished(one, until=1)
    finished(other, until=1)
    assert not torch.equal(one.campaign.flat, other.campaign.flat)


def test_fixed_cohorts_have_their_size_and_coins_do_not() -> None:
    """False alarm below 1e-6: twenty cohorts of thirty coins are all of ten with 0.153^20."""
    fixed = training(replace(DESIGN, sampling="fixed"))
    coins = training()
    sizes = [len(fixed.cohort(round)) for round in range(20)]
    assert sizes == [10] * 20
    assert {len(coins.cohort(round)) for round in range(20)} != {10}
    for learner in (fixed, coins):
        for round in range(20):
            members = learner.cohort(round).tolist()
            assert sorted(set(members)) == members
            assert set(members) <= set(range(CLIENTS))


def test_an_empty_cohort_is_noise_alone() -> None:
    design = replace(DESIGN, cohort=1, rounds=40, noise_multiplier=QUIET)
    learner = training(design)
    figures = []
    for _ in range(40):  # a cohort is empty with probability 0.36
        before = learner.campaign.flat.clone()
        figures.append(learner.round())
        if figures[-1].asked == 0:
            assert float((learner.campaign.flat - before).abs().max()) < 1e-4
    assert 0 in {each.asked for each in figures}


# Checkpoints


@pytest.mark.parametrize("stopped", [1, 3])
@pytest.mark.parametrize("rule", RULES)
def test_a_training_that_was_stopped_ends_bit_for_bit_as_one_that_was_not(
    rule: str, stopped: int, tmp_path: Path
) -> None:
    design = replace(
        DESIGN,
        compression=RULES[rule],
        adaptive_clip=AdaptiveClip(noise=2.0),
        server=ServerOptimizer(method="adam", learning_rate=0.1),
        dropout=0.2,
    )
    whole = training(design)
    finished(whole, evaluate_every=1)
    file = tmp_path / "checkpoint"
    finished(training(design), evaluate_every=1, checkpoint=file, until=stopped)
    rest = training(design)
    rest.load(file)
    assert rest.campaign.done == stopped
    finished(rest, evaluate_every=1)
    assert state(rest) == state(whole)
    assert rest.campaign.done == design.rounds
    assert rest.campaign.clip != design.clip


def test_a_checkpoint_is_there_after_every_round_and_whole(tmp_path: Path) -> None:
    file, learner = tmp_path / "checkpoint", training()
    for figures in learner.run(evaluate_every=100, checkpoint=file):
        copy = training()
        copy.load(file)
        assert copy.campaign.done == figures.round
        assert torch.equal(copy.campaign.flat, learner.campaign.flat)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_other_checkpoints_are_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "of another"
    training(replace(DESIGN, clip=0.6)).save(file)
    learner = training()
    before = state(learner)
    with pytest.raises(DataError, match=r"of another is of another training \(design [0-9a-f]{12}"):
        learner.load(file)
    assert state(learner) == before


def broken(kind: str, file: Path) -> None:
    training().save(file)
    content = file.read_bytes()
    checkpoint = torch.load(file, weights_only=True)
    if kind == "cut short":
        file.write_bytes(content[: len(content) // 2])
    elif kind == "empty":
        file.write_bytes(b"")
    elif kind == "text":
        file.write_text("no tensors here")
    elif kind == "a list":
        torch.save([1, 2], file)
    elif kind == "nothing of the design":
        torch.save({"flat": checkpoint["flat"]}, file)
    elif kind == "a field less":
        del checkpoint["clip"]
        torch.save(checkpoint, file)
    elif kind == "another length":
        torch.save({**checkpoint, "flat": checkpoint["flat"][1:]}, file)
    else:
        file.unlink()


@pytest.mark.parametrize(
    "kind",
    [
        "cut short", "empty", "text", "a list", "nothing of the design", "a field less",
        "another length", "missing",
    ],
)  # fmt: skip
def test_broken_checkpoints_are_refused_by_name_and_change_nothing(
    kind: str, tmp_path: Path
) -> None:
    file = tmp_path / "checkpoint 7"
    broken(kind, file)
    learner = training()
    before = state(learner)
    with pytest.raises(DataError, match="checkpoint 7"):
        learner.load(file)
    assert state(learner) == before


def test_no_round_is_run_beyond_those_that_are_accounted_for() -> None:
    learner = training(replace(DESIGN, rounds=2))
    finished(learner)
    assert finished(learner) == []
    with pytest.raises(SpecError, match="all 2 rounds are done"):
        learner.round()
    assert learner.campaign.done == 2


def test_until_stops_and_none_at_all_is_none() -> None:
    learner = training()
    assert finished(learner, until=0) == []
    assert [each.round for each in finished(learner, until=2)] == [1, 2]
    assert finished(learner, until=1) == []
    with pytest.raises(SpecError, match="evaluate_every must be at least 1; got 0"):
        finished(learner, evaluate_every=0)


# Files


def test_metrics_have_one_line_per_round_and_no_count_of_clients(tmp_path: Path) -> None:
    file, progress = tmp_path / "metrics.jsonl", []
    figures = finished(
        training(data=spoiled((1,), math.nan)),
        metrics=file,
        evaluate_every=4,
        tell=lambda stage, done: progress.append((stage, done)),
    )
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert [line["round"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["accuracy"] is not None for line in lines] == [False] * 3 + [True, False, True]
    for line, each in zip(lines, figures, strict=True):
        assert line == asdict(each.public)
        assert {line[name] for name in ("asked", "answered", "left_out", "empty")} == {None}
        assert each.asked is not None
    assert progress[-1] == ("round 6", 1.0)


def test_checkpoints_keep_no_count_of_clients(tmp_path: Path) -> None:
    learner = training()
    finished(learner, evaluate_every=1, checkpoint=tmp_path / "file")
    copy = training()
    copy.load(tmp_path / "file")
    for each in (*learner.history, *copy.history):
        assert (each.asked, each.answered, each.left_out, each.empty) == (None,) * 4


@pytest.mark.parametrize("rule", RULES)
def test_the_rate_is_parameters_by_cells_over_all_rounds(rule: str) -> None:
    learner = training(replace(DESIGN, compression=RULES[rule]))
    assert learner.campaign.rate == 1.0
    figures = finished(learner, evaluate_every=1)
    cells = [each.cells for each in figures]
    assert learner.campaign.rate == LENGTH * 6 / sum(cells)
    assert [each.rate for each in figures] == [
        LENGTH * rounds / sum(cells[:rounds]) for rounds in range(1, 7)
    ]
    # The harmonic mean of the rounds' rates, which is below their mean unless all are one.
    assert math.isclose(learner.campaign.rate, 6 / sum(count / LENGTH for count in cells))
    if rule == "none":
        assert cells == [LENGTH] * 6
    elif rule == "fixed":
        assert cells == [24] * 6  # three rows of eight


def test_a_second_sketch_is_counted_and_two_stage_stops_sending_it() -> None:
    second = DESIGN.second_sketch(LENGTH, 0)
    assert second.shape == (5, 10)  # ⌈ln 75⌉ rows
    figures = finished(training(replace(DESIGN, compression=RULES["two_stage"])))
    assert [each.cells for each in figures[:2]] == [LENGTH + second.cells] * 2
    assert all(each.cells < LENGTH for each in figures[2:])
    assert len({each.cells for each in figures[2:]}) == 1


# Clients that cannot be used


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_clients_that_are_not_finite_are_left_out_and_leave_no_trace(
    value: float, exact: bool
) -> None:
    """The same model as without their examples, but for the order in which floats are added."""
    bad = (0, 7, 29)
    design = replace(DESIGN, cohort=CLIENTS, noise_multiplier=QUIET, local=ALL_AT_ONCE)
    spoilt = training(design, spoiled(bad, value), exact=exact)
    clean = training(design, without(bad), exact=exact)
    history, expected = finished(spoilt), finished(clean)
    assert [(figures.left_out, figures.empty) for figures in history] == [(3, 0)] * 6
    assert [(figures.left_out, figures.empty) for figures in expected] == [(0, 3)] * 6
    assert bool(torch.isfinite(spoilt.campaign.flat).all())
    assert off(spoilt, clean) < 1e-5


def test_updates_that_are_too_long_in_l1_are_left_out() -> None:
    design = replace(DESIGN, cohort=CLIENTS, noise_multiplier=QUIET)
    assert {each.left_out for each in finished(training(replace(design, largest_l1=1e9)))} == {0}
    learner = training(replace(design, largest_l1=1e-9))
    start = learner.campaign.flat.clone()
    assert {each.left_out for each in finished(learner)} == {CLIENTS}
    assert float((learner.campaign.flat - start).abs().max()) < 1e-4


def test_clients_without_examples_add_nothing() -> None:
    learner = training(
        replace(DESIGN, cohort=CLIENTS, noise_multiplier=QUIET), without(tuple(range(CLIENTS)))
    )
    start = learner.campaign.flat.clone()
    assert {each.empty for each in finished(learner)} == {CLIENTS}
    assert float((learner.campaign.flat - start).abs().max()) < 1e-4


def test_clients_that_vanish_are_counted() -> None:
    """False alarm below 1e-6: thirty coins are not all equal, six times."""
    design = replace(DESIGN, cohort=CLIENTS, dropout=0.5)
    for each in finished(training(design)):
        assert each.asked == CLIENTS
        assert each.answered is not None
        assert 0 < each.answered < CLIENTS


def test_data_that_does_not_fit_is_refused() -> None:
    with pytest.raises(SpecError, match="the design is for 30 clients; the data has 29"):
        training(data=population(SIZES[:-1]))
    with pytest.raises(SpecError, match="does not take inputs of shape"):
        training(data=population(inputs=INPUTS + 1))
    with pytest.raises(SpecError, match="2 classes; a target is 2"):
        training(replace(DESIGN, classes=2))


# Clips


def campaign_of(compression: Compression, **changes: Any) -> TrainingCampaign:
    return TrainingCampaign.begin(replace(DESIGN, compression=compression, **changes))


def parts(campaign: TrainingCampaign) -> tuple[VectorSketch, VectorSketch | None]:
    """The two sketches of the next round, in whole numbers."""
    task = campaign.next_task()
    assert task is not None
    if isinstance(task.mechanism, RoundNoise):
        return task.mechanism.sketch.main, task.mechanism.sketch.second
    assert isinstance(task.sketch, VectorSketch)
    return task.sketch, None


def lengths(campaign: TrainingCampaign, update: Tensor, exact: bool) -> list[float]:
    """The norms of one client's two tables, in the updates' unit."""
    if not exact:
        total = FloatSum(campaign)
        total.add(update[None].clone())
        return [float(torch.linalg.vector_norm(table)) for table in total.totals]
    main, second = parts(campaign)
    return [
        float(np.linalg.norm(sketch.tables(update[None].numpy(), rng=SeededRng(1)))) / sketch.scale
        for sketch in (main, second)
        if sketch is not None
    ]


def round_result(
    campaign: TrainingCampaign, deltas: Tensor, exact: bool, seed: int = 1, count: int | None = None
) -> RoundResult:
    """The result of a round with these updates."""
    if not exact:
        total = FloatSum(campaign)
        total.add(deltas.clone())
        return total.noised(seed)
    task, rng = campaign.next_task(), SeededRng(seed)
    assert task is not None
    sketch = task.sketch
    assert isinstance(sketch, VectorSketch | RoundSketch)
    table = sketch.encode(sketch.tables(deltas.numpy(), rng=rng))
    devices = task.max_count if count is None else count
    batch = Batch(task.id, task.mechanism.at_device(table, devices=devices, rng=rng), devices)
    books = Ledger(Budget(epsilon=None, delta=1e-3))
    return campaign.read(noised_sum(task, batch, ledger=books, rng=rng))


NOBODY = torch.zeros(0, LENGTH)


@pytest.mark.parametrize("size", [1e-3, 0.5, 3.0, 1e10, 1e30])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("rule", ["none", "fixed", "adapt_norm", "adapt_tail"])
def test_no_client_adds_more_than_the_clip(rule: str, exact: bool, size: float) -> None:
    """Whole numbers may be longer by rounding, which the noise allows for; floats by 1e-6."""
    campaign = campaign_of(RULES[rule])
    slack = [1 + 1e-6] * 2
    if exact:
        sketches = [sketch for sketch in parts(campaign) if sketch is not None]
        slack = [sketch.rounding.l2 / (sketch.scale * campaign.clip) for sketch in sketches]
        assert max(slack) < 1.01
    generator = torch.Generator().manual_seed(1)
    for direction in (torch.ones(LENGTH), torch.randn(LENGTH, generator=generator)):
        update = size * direction / torch.linalg.vector_norm(direction)
        for length, more in zip(lengths(campaign, update, exact), slack, strict=False):
            assert length <= campaign.clip * more


def test_a_short_update_is_not_touched() -> None:
    for exact in (True, False):
        campaign = campaign_of(NoCompression(), noise_multiplier=QUIET)
        update = torch.linspace(-1, 1, LENGTH) / 20
        assert float(torch.linalg.vector_norm(update)) < campaign.clip
        table = round_result(campaign, torch.stack([update, -3 * update, 3 * update]), exact).table
        assert float((torch.as_tensor(table) - update).abs().max()) < 1e-5


# Steps of the server


def minimised(server: ServerOptimizer, optimiser: Any) -> None:
    """The server's update is the negative of torch's gradient."""
    flat = torch.linspace(-1, 1, 20, dtype=torch.float64)
    theirs = nn.Parameter(flat.clone())
    theirs_optimiser, memory = optimiser([theirs]), dict[str, Tensor]()
    draw = torch.Generator().manual_seed(4)
    for step in range(1, 8):
        update = torch.randn(20, dtype=torch.float64, generator=draw)
        server.step(flat, update, memory)
        theirs.grad = -update
        if server.method == "adam":  # torch corrects for the start, FedAdam does not
            first, second = 1 - server.momentum**step, 1 - server.second**step
            theirs_optimiser.param_groups[0]["lr"] = (
                server.learning_rate * first / math.sqrt(second)
            )
            theirs_optimiser.param_groups[0]["eps"] = server.floor / math.sqrt(second)
        theirs_optimiser.step()
        torch.testing.assert_close(flat, theirs.detach(), rtol=1e-12, atol=1e-13)


def test_steps_are_those_of_torch() -> None:
    minimised(
        ServerOptimizer(method="sgd", learning_rate=0.3),
        lambda parameters: torch.optim.SGD(parameters, lr=0.3),
    )
    minimised(
        ServerOptimizer(method="momentum", learning_rate=0.3, momentum=0.8),
        lambda parameters: torch.optim.SGD(parameters, lr=0.3, momentum=0.8),
    )
    minimised(
        ServerOptimizer(method="adam", learning_rate=0.3, momentum=0.8, second=0.95),
        lambda parameters: torch.optim.Adam(parameters, lr=0.3, betas=(0.8, 0.95)),
    )


def test_the_mean_is_over_the_cohort_that_was_expected() -> None:
    """Not over the clients that took part, whose number is secret."""
    design = replace(DESIGN, cohort=10, noise_multiplier=QUIET, rounds=1)
    learner = training(design)
    start = learner.campaign.flat.clone()
    figures = learner.round()
    assert figures.asked not in (None, 10)  # the seed's cohort is of another size
    again = training(design)
    parts = updates(
        again.model, again.campaign.flat, again.data.train, again.cohort(0), design.local,
        generator=again.generator(0),
    )  # fmt: skip
    deltas = torch.cat([part.deltas for part in parts])
    table = torch.as_tensor(round_result(again.campaign, deltas, exact=True).table)
    assert float((learner.campaign.flat - start - table / 10).abs().max()) < 1e-6


# The clip that adapts


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("start", [0.05, 20.0])
@pytest.mark.parametrize("quantile", [0.5, 0.8])
def test_an_adaptive_clip_goes_to_the_quantile_from_either_side(
    quantile: float, start: float, exact: bool
) -> None:
    """Norms are e^x with x uniform on −1 .. 1, so a share of 0.1 is 0.2 in x. At the quantile, the
    noise of a step moves x by 0.2·0.05 = 0.01, and the step corrects a tenth of the error: a
    deviation of 0.023, and seven of these are allowed. (An inverted rule diverges.)"""
    design = replace(
        DESIGN, cohort=CLIENTS, clip=start, adaptive_clip=AdaptiveClip(quantile=quantile),
        noise_multiplier=0.5, rounds=1000,
    )  # fmt: skip
    campaign = TrainingCampaign.begin(design)
    norms = torch.linspace(-1, 1, CLIENTS).exp()
    directions = torch.randn(CLIENTS, LENGTH, generator=torch.Generator().manual_seed(9))
    deltas = directions * (norms / torch.linalg.vector_norm(directions, dim=1))[:, None]
    for number in range(90):
        campaign.take(round_result(campaign, deltas, exact, seed=number))
    assert abs(math.log(campaign.clip) - (2 * quantile - 1)) < 0.16


def test_too_many_within_the_clip_lower_it_and_too_few_raise_it() -> None:
    rule = AdaptiveClip(quantile=0.5, rate=0.2)
    assert rule.after(1.0, 0.9) < 1.0 < rule.after(1.0, 0.1)
    assert rule.after(1.0, 0.5) == 1.0
    assert rule.after(1.0, 7.0) == rule.after(1.0, 1.0)  # noise may say more than all
    assert rule.after(1.0, -7.0) == rule.after(1.0, 0.0)


# What it costs


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("adaptive", [None, AdaptiveClip(), AdaptiveClip(noise=30.0)])
@pytest.mark.parametrize("rule", RULES)
def test_all_parts_of_a_round_cost_the_noise_multiplier_together(
    rule: str, adaptive: AdaptiveClip | None, exact: bool
) -> None:
    """1/z² is the sum of (sensitivity/deviation)²: of the table, of the norm that is measured
    beside it, and of the count of updates within the clip, to which a client adds a half."""
    campaign = campaign_of(RULES[rule], adaptive_clip=adaptive, noise_multiplier=0.4, cohort=20)
    result = round_result(campaign, NOBODY, exact)
    longest = [campaign.clip] * 2
    if exact:
        longest = [sketch.rounding.l2 / sketch.scale for sketch in parts(campaign) if sketch]
    spent = (longest[0] / result.noise) ** 2
    if result.measurement is not None:
        spent += (longest[1] / result.second_noise) ** 2
    assert (result.measurement is None) == (campaign.design.compression.asks == "nothing")
    if adaptive is not None:
        spent += (0.5 / adaptive.deviation(20)) ** 2
    assert math.isclose(1 / math.sqrt(spent), 0.4, rel_tol=1e-9)
    task = campaign.next_task()
    assert task is not None
    assert isinstance(task.loss, AdditiveLoss)
    noise = task.mechanism
    if not isinstance(noise, RoundNoise):
        assert math.isclose(task.loss.scale / task.loss.l2, 0.4, rel_tol=1e-9)
        return
    scales = [noise.scale, *([noise.second_scale] * (noise.sketch.second is not None))]
    norms = [sketch.rounding.l2 for sketch in parts(campaign) if sketch]
    cost = sum(l2**2 / (scale**2 - SMOOTHING) for l2, scale in zip(norms, scales, strict=True))
    if noise.sketch.counts:
        cost += 1 / (noise.count_scale**2 - SMOOTHING)
    assert math.isclose(task.loss.l2**2 / (task.loss.scale**2 - SMOOTHING), cost, rel_tol=1e-9)


def test_two_stage_has_all_of_the_budget_after_its_warm_up() -> None:
    learner = training(replace(DESIGN, compression=RULES["two_stage"]), exact=False)
    full = learner.design.noise_multiplier * learner.campaign.clip
    assert math.isclose(round_result(learner.campaign, NOBODY, False).noise, full / math.sqrt(0.9))
    finished(learner, until=2)
    later = round_result(learner.campaign, NOBODY, False)
    assert math.isclose(later.noise, full)
    assert later.measurement is None


def test_a_count_that_costs_more_than_the_round_is_refused() -> None:
    with pytest.raises(ImpossibleError, match="costs more than a noise multiplier of 4"):
        replace(DESIGN, adaptive_clip=AdaptiveClip(noise=1.0), noise_multiplier=4.0)


def test_the_loss_is_that_of_all_rounds_with_random_cohorts() -> None:
    coins, fixed = DESIGN, replace(DESIGN, sampling="fixed")
    for design in (coins, fixed):
        assert isinstance(design.loss, SampledLoss)
        assert (design.loss.probability, design.loss.times) == (10 / 30, 6)
        assert design.loss.scheme == design.sampling
        assert math.isclose(design.loss.loss.scale, 0.1 * design.loss.loss.l2)
    others = [
        replace(DESIGN, adaptive_clip=AdaptiveClip()),
        replace(DESIGN, compression=AdaptNorm()),
    ]
    assert {design.loss for design in others} == {coins.loss}  # paid for out of the same multiplier
    assert epsilon_of([coins.loss], 1e-3) < epsilon_of([fixed.loss], 1e-3)
    assert [design.neighbours for design in (coins, fixed)] == ["zero-out", "replace"]
    more = replace(coins, rounds=7)
    assert epsilon_of([more.loss], 1e-3) > epsilon_of([coins.loss], 1e-3)
    assert replace(coins, noise_multiplier=0.0).loss == NoPrivacy()


def test_the_loss_of_a_secure_sum_does_not_count_on_secret_cohorts() -> None:
    """Its server knows them: a client may be in every cohort, or in one of each pass."""
    half = replace(SECURE, cohort=CLIENTS // 2)
    for design, rounds in ((half, 6), (replace(half, sampling="passes"), 3)):
        assert isinstance(design.loss, SampledLoss)
        assert (design.loss.probability, design.loss.times) == (1.0, rounds)
        assert design.neighbours == "zero-out"
    assert replace(half, secure=None).neighbours == "replace"  # where cohorts are secret


def test_rounds_one_by_one_cost_what_they_cost_together() -> None:
    for design in (DESIGN, replace(DESIGN, sampling="fixed"), SECURE):
        each = [design.round_loss] * design.rounds
        assert math.isclose(epsilon_of(each, 1e-3), epsilon_of([design.loss], 1e-3), rel_tol=1e-9)
    assert replace(DESIGN, noise_multiplier=0.0).round_loss == NoPrivacy()


def test_without_noise_nothing_is_noised() -> None:
    design = replace(DESIGN, noise_multiplier=0.0)
    silent, quiet = training(design), training(replace(DESIGN, noise_multiplier=QUIET))
    finished(silent)
    finished(quiet)
    assert off(silent, quiet) < 1e-2  # steps of a thousandth of the clip


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["none", "fixed", "adapt_norm", "adapt_tail"])
def test_noise_that_is_too_large_to_draw_is_drawn_on_coarser_tables(rule: str) -> None:
    """Sixty times a table of a thousand whole numbers is the most that the sampler can draw."""
    campaign = campaign_of(RULES[rule], noise_multiplier=500.0)
    main, second = parts(campaign)
    assert main.rounding.l2 < 65536 / 500
    share = 1.0 if second is None else 0.9
    result = round_result(campaign, NOBODY, exact=True)
    assert math.isclose(result.noise, 500 * main.rounding.l2 / main.scale / math.sqrt(share))


def test_noise_that_cannot_be_drawn_at_all_is_refused() -> None:
    with pytest.raises(ImpossibleError, match="more than can be drawn"):
        campaign_of(NoCompression(), noise_multiplier=1e5).next_task()
    with pytest.raises(ImpossibleError, match="more than can be drawn"):
        whole_numbers(replace(SECURE, noise_multiplier=70.0), LENGTH, None, 0.5)
    exact = whole_numbers(replace(SECURE, noise_multiplier=20.0), LENGTH, None, 0.5)
    assert exact.rounding.l2 >= COARSEST  # as the loss says


# Secure sums

SECURE = replace(
    DESIGN,
    sampling="fixed",
    cohort=20,
    secure=SecureSum(corrupt=0.1, dropout=0.1),
    compression=FreeNorm(error=100.0),
)


def test_a_secure_sum_with_too_few_survivors_takes_no_step_and_the_round_counts() -> None:
    """False alarm below 1e-6: eight of twenty are needed, and one in a hundred stays."""
    learner = training(replace(SECURE, dropout=0.99))
    assert SECURE.secure is not None
    assert SECURE.secure.noise(1.0, 20).survivors == 8
    start, sizing = learner.campaign.flat.clone(), learner.campaign.sizing
    figures = finished(learner)
    assert torch.equal(learner.campaign.flat, start)
    assert learner.campaign.sizing == sizing
    assert learner.campaign.done == 6
    assert learner.campaign.cells_sent == sum(each.cells for each in figures) > 0


def test_a_secure_sum_of_enough_clients_takes_steps() -> None:
    learner = training(SECURE)
    start = learner.campaign.flat.clone()
    finished(learner, until=1)
    assert not torch.equal(learner.campaign.flat, start)


def test_noise_in_shares_grows_with_the_number_of_survivors() -> None:
    """Six of the eight that must stay are honest, so twenty have 20/6 of the variance."""
    campaign = TrainingCampaign.begin(SECURE)
    main, _ = parts(campaign)
    needed = SECURE.multiplier * main.rounding.l2 / main.scale
    result = round_result(campaign, NOBODY, exact=True, count=20)
    assert math.isclose(result.noise, needed * math.sqrt(20 / 6))


def test_clients_that_are_left_out_still_send_their_noise() -> None:
    """They send zeros: whether a sum may be opened does not depend on anybody's data."""
    design = replace(SECURE, secure=SecureSum(corrupt=0.0, dropout=0.0), cohort=CLIENTS)
    learner = training(design, spoiled((0, 1, 2, 3), math.nan))
    start = learner.campaign.flat.clone()
    figures = learner.round()
    assert (figures.left_out, figures.answered) == (4, CLIENTS)
    assert not torch.equal(learner.campaign.flat, start)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sampling": "poisson"}, 'a cohort of a known size; set sampling to "passes"'),
        ({"adaptive_clip": AdaptiveClip()}, "a secure sum has a fixed clip"),
        ({"cohort": 3}, "at least 4 devices"),
        ({"secure": SecureSum(corrupt=0.9, dropout=0.5)}, "no honest device is left"),
    ],
)
def test_what_a_secure_sum_cannot_do_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises((SpecError, ImpossibleError), match=message):
        replace(SECURE, **fields)


# Specs


@pytest.mark.parametrize("rule", RULES)
def test_designs_are_specs(rule: str) -> None:
    design = replace(DESIGN, compression=RULES[rule], adaptive_clip=AdaptiveClip())
    assert from_json(to_json(design)) == design


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"clients": 0, "cohort": 0}, "clients must be at least 1"),
        ({"cohort": 31}, "a cohort must not exceed the 30 clients; got 31"),
        ({"rounds": 0}, "rounds must be at least 1"),
        ({"rows": 0}, "rows must be at least 1"),
        ({"clip": 0.0}, "clip must be above 0; got 0"),
        ({"largest_l1": 0.0}, "largest_l1 must be above 0; got 0"),
        ({"noise_multiplier": -1.0}, "noise_multiplier must be at least 0; got -1"),
        ({"dropout": 1.0}, "dropout must be at least 0, below 1; got 1"),
        ({"seed": -1}, "seed must be 0 to"),
        ({"seed": 2**53 - 1}, "seed must be 0 to"),
        ({"noise_multiplier": 0.0, "compression": FreeNorm()}, "sizes sketches by the noise"),
    ],
)
def test_designs_that_cannot_be_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        replace(DESIGN, **fields)


@pytest.mark.parametrize(
    ("make", "fields", "message"),
    [
        (ServerOptimizer, {"learning_rate": 0.0}, "learning_rate must be above 0; got 0"),
        (ServerOptimizer, {"momentum": 1.0}, "momentum must be at least 0, below 1; got 1"),
        (ServerOptimizer, {"second": -0.1}, "second must be at least 0, below 1; got -0.1"),
        (ServerOptimizer, {"floor": 0.0}, "floor must be above 0; got 0"),
        (AdaptiveClip, {"quantile": 1.0}, "quantile must be above 0, below 1; got 1"),
        (AdaptiveClip, {"rate": 0.0}, "rate must be above 0; got 0"),
        (AdaptiveClip, {"noise": 0.0}, "noise must be above 0; got 0"),
    ],
)
def test_rules_that_cannot_be_are_refused(
    make: type, fields: dict[str, float], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        make(**fields)
