"""The server's side of a training in masked rounds, its passes, and one client's update."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from sfumato.device.private import update_table
from sfumato.errors import MismatchError, SpecError
from sfumato.flow.accumulator import Batch
from sfumato.flow.campaign import step
from sfumato.flow.model_terms import LocalTraining, ModelTerms, digest_of, to_bytes
from sfumato.flow.release import NoisedSum
from sfumato.flow.secure_sum import SecureSum
from sfumato.flow.task import Task
from sfumato.learn import models
from sfumato.learn.campaign import RoundResult, TrainingCampaign
from sfumato.learn.clients import updates
from sfumato.learn.compression import AdaptNorm, AdaptTail, FixedRate, FreeNorm, TwoStage
from sfumato.learn.data import Clients
from sfumato.learn.local_update import trainer, trainers, update
from sfumato.learn.training import FloatSum, Training
from sfumato.privacy import (
    AdditiveLoss,
    Budget,
    Ledger,
    NoiseInShares,
    NoPrivacy,
    Rng,
    SeededRng,
    epsilon_of,
)
from sfumato.privacy.accounting import SampledLoss, loss_of_task, renyi_divergences
from sfumato.privacy.rounding import COARSEST
from sfumato.privacy.samplers import stream
from sfumato.sketch import RoundSketch, VectorSketch
from unit.learn.test_training import (
    ALL_AT_ONCE,
    DESIGN,
    LENGTH,
    finished,
    off,
    population,
    training,
)

DELTA = 1e-5
PASSES = replace(
    DESIGN,
    sampling="passes",
    secure=SecureSum(corrupt=0.1, dropout=0.0),
    cohort=8,
    rounds=7,
    noise_multiplier=1.0,
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# Passes


def test_the_cohorts_of_a_pass_are_disjoint_and_whole() -> None:
    assert (PASSES.rounds_per_pass, PASSES.passes) == (3, 3)  # 30 clients, 8 at a time, 7 rounds
    cohorts = [PASSES.members(number).tolist() for number in range(7)]
    assert {len(cohort) for cohort in cohorts} == {8}
    for start in (0, 3):
        members = [client for cohort in cohorts[start : start + 3] for client in cohort]
        assert len(set(members)) == len(members) == 24
        assert set(members) <= set(range(30))
    assert sorted(cohorts[0]) == cohorts[0]
    assert cohorts[0] != cohorts[3]  # another order
    assert PASSES.members(0).tolist() != replace(PASSES, seed=12).members(0).tolist()


def test_a_pass_costs_what_one_unsampled_round_does() -> None:
    loss = PASSES.loss
    assert isinstance(loss, SampledLoss)
    assert (loss.probability, loss.times) == (1.0, 3)
    assert epsilon_of([loss], DELTA) == epsilon_of([replace(loss, times=1)] * 3, DELTA)
    silent = replace(PASSES, noise_multiplier=0.0, compression=FixedRate(rate=2.0))
    assert isinstance(silent.loss, NoPrivacy)


@pytest.mark.parametrize("secure", [True, False])
def test_a_training_in_one_process_goes_through_passes(secure: bool) -> None:
    design = PASSES if secure else replace(PASSES, secure=None)
    learner = training(design)
    assert [learner.cohort(k).tolist() for k in range(7)] == [
        design.members(k).tolist() for k in range(7)
    ]
    assert len(finished(learner)) == 7


def ledger_of(design: Any, cohorts: list[str] | None = None) -> Ledger:
    """The charges of a whole training; `cohorts` replaces its cohorts."""
    books = Ledger(Budget(epsilon=None, delta=DELTA))
    campaign = TrainingCampaign.begin(design)
    while (task := campaign.next_task()) is not None:
        cohort = task.cohort if cohorts is None else cohorts[campaign.done]
        books.charge(campaign=task.campaign, cohort=cohort, task=task.id, loss=task.loss)
        chance = np.random.default_rng(campaign.done)
        noise = chance.normal(0, 1e4 * (1 + campaign.done), task.sketch.shape)
        table = noise.astype(np.int64)
        campaign.absorb(NoisedSum(task, table, design.cohort))
    return books


@pytest.mark.parametrize("rounds", [7, 30])
def test_the_ledger_holds_what_was_planned(rounds: int) -> None:
    """Every round's table has another size: after thirty rounds there are 3^10 ways to take part.
    Coarser tables cost more, and the plan is for the coarsest: it is at most 0.1% above."""
    design = replace(PASSES, rounds=rounds, compression=FreeNorm(error=20.0))
    books, expected = ledger_of(design), epsilon_of([design.loss], DELTA)
    assert len({entry.loss for entry in books.entries()}) > 3
    assert 0.999 * expected <= books.spent() <= expected


def test_a_ledger_for_one_training_allows_all_of_its_rounds() -> None:
    """They are one plan, so they cost no more than a list that was fixed in advance."""
    epsilon = epsilon_of([PASSES.loss], DELTA)
    books = Ledger(Budget(epsilon=epsilon, delta=DELTA))
    campaign = TrainingCampaign.begin(PASSES)
    while (task := campaign.next_task()) is not None:
        loss = PASSES.charge_of(task)
        books.charge(campaign=task.campaign, cohort=task.cohort, task=task.id, loss=loss)
        bound, own = np.array(
            [renyi_divergences([each]) for each in (loss_of_task(loss), task.loss)]
        )
        assert np.all(own <= bound)
        assert 0.999 * epsilon < books.spent() <= epsilon
        campaign.absorb(NoisedSum(task, np.zeros(task.sketch.shape, np.int64), PASSES.cohort))
    assert len(books.entries()) == PASSES.rounds


# What rounds measure

RULES = [AdaptNorm(error=20.0), TwoStage(error=20.0, warm_up=2), AdaptTail()]
DRAWS = 400


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_what_a_secure_round_measures_is_part_of_its_sum_and_of_its_cost(rule: Any) -> None:
    """A tenth of 1/z² is the second table's, and all of it is within the plan at every order."""
    design = replace(PASSES, compression=rule)
    campaign = TrainingCampaign.begin(design)
    measures = []
    while (task := campaign.next_task()) is not None:
        sketch, bound = task.sketch, loss_of_task(design.charge_of(task))
        assert isinstance(bound, AdditiveLoss)
        assert isinstance(task.loss, AdditiveLoss)
        assert isinstance(task.mechanism, NoiseInShares)
        assert task.loss.l2 >= COARSEST
        assert math.isclose(task.mechanism.scale, design.multiplier * task.loss.l2)
        assert np.all(renyi_divergences([task.loss]) <= renyi_divergences([bound]))
        if isinstance(sketch, RoundSketch):
            assert sketch.second is not None
            share = (sketch.second.rounding.l2 / sketch.sensitivity(1).l2) ** 2
            assert math.isclose(share, 0.1, rel_tol=1e-6)
        measures.append(isinstance(sketch, RoundSketch))
        campaign.absorb(NoisedSum(task, np.zeros(task.sketch.shape, np.int64), design.cohort))
    warm_up = getattr(rule, "warm_up", design.rounds)
    assert measures == [number < warm_up for number in range(design.rounds)]


def measured_round(rule: Any) -> tuple[TrainingCampaign, Task, RoundSketch, Any]:
    """A round, and the sum of eight updates, without noise."""
    campaign = TrainingCampaign.begin(replace(PASSES, compression=rule, noise_multiplier=0.1))
    task = campaign.next_task()
    assert task is not None
    assert isinstance(task.sketch, RoundSketch)
    deltas = np.random.default_rng(1).normal(size=(8, LENGTH)) + 0.5
    total = task.sketch.encode(task.sketch.tables(deltas, rng=SeededRng(1)))
    return campaign, task, task.sketch, total


def test_a_measured_norm_is_that_of_the_sum() -> None:
    """The mean of the squared norms of 400 releases of one sum, whose deviation is known: false
    alarm 1e-6. The control: leaving the noise's own part in would be missed as rarely."""
    campaign, task, sketch, total = measured_round(AdaptNorm())
    second = sketch.second
    assert second is not None
    squares = []
    for draw in range(DRAWS):
        table = task.mechanism.at_device(total, devices=8, rng=SeededRng(2, draw))
        squares.append((campaign.read(NoisedSum(task, table, 8)).measurement or 0.0) ** 2)
    noise = task.mechanism.stddev(8) / second.scale
    truth = float(np.sum((sketch.split(total)[1] / second.scale) ** 2))
    deviation = math.sqrt((4 * truth + 2 * second.cells * noise**2) * noise**2 / DRAWS)
    assert abs(float(np.mean(squares)) - truth) < 4.9 * deviation
    assert second.cells * noise**2 > 2 * 4.9 * deviation


def test_a_measured_error_is_the_distance_from_the_decoded_sum() -> None:
    """Without noise in the release, the noise that is taken off remains."""
    campaign, task, sketch, total = measured_round(AdaptTail())
    second = sketch.second
    assert second is not None
    assert second.dense is not None
    main, table, _ = sketch.split(total)
    gap = table / second.scale - second.dense.encode(sketch.main.decode(main, 1))
    noise = task.mechanism.stddev(8) / second.scale
    squared = float(np.sum(gap**2)) - second.cells * noise**2
    measured = campaign.read(NoisedSum(task, total, 8)).measurement
    assert measured is not None
    assert squared > 0
    assert math.isclose(measured**2, squared, rel_tol=1e-6)


def test_a_client_that_is_in_every_round_is_not_what_was_planned() -> None:
    """The negative control: the ledger would notice."""
    books = ledger_of(PASSES, cohorts=["everybody"] * PASSES.rounds)
    assert books.spent() > 1.5 * epsilon_of([PASSES.loss], DELTA)


# Several blocks

BLOCKS = 5
LARGE = replace(
    DESIGN, inputs=400, hidden=20, rows=3, compression=FixedRate(rate=2.0), blocks=BLOCKS
)


def empty(task: Task) -> NoisedSum:
    return NoisedSum(task, np.zeros(task.sketch.shape, np.int64), PASSES.cohort)


@pytest.mark.parametrize("secure", [None, PASSES.secure], ids=["central", "secure"])
@pytest.mark.parametrize(
    "rule", [FixedRate(rate=2.0), *RULES], ids=lambda rule: type(rule).__name__
)
def test_noise_covers_the_tables_of_all_blocks(rule: Any, secure: SecureSum | None) -> None:
    """Each block is a sketch of the whole update, so that tables are √5 times as long. An update
    with few large coordinates is longer than its clip in some blocks, and is cut."""
    design = replace(PASSES, compression=rule, secure=secure, rows=1, blocks=BLOCKS)
    campaign = TrainingCampaign.begin(design)
    deltas = np.zeros((40, LENGTH))
    deltas[:, :3] = np.random.default_rng(1).normal(size=(40, 3))
    sketched = 0
    while (task := campaign.next_task()) is not None:
        bound = loss_of_task(design.charge_of(task))
        assert epsilon_of([task.loss], DELTA) <= epsilon_of([bound], DELTA) * (1 + 1e-9)
        assert isinstance(task.sketch, VectorSketch | RoundSketch)
        tables = task.sketch.tables(deltas, rng=SeededRng(1)).reshape(len(deltas), -1)
        longest = np.linalg.norm(tables.astype(np.float64), axis=1).max()
        assert longest <= task.sketch.sensitivity(1).l2
        main = task.sketch.main if isinstance(task.sketch, RoundSketch) else task.sketch
        if main.dense is not None:
            sketched += 1
            assert main.dense.blocks == BLOCKS
            assert math.isclose(main.bound, math.sqrt(BLOCKS) * design.clip)
            noise = campaign.read(empty(task)).noise  # of each cell, in the unit of updates
            share = campaign.multipliers[0] if secure is None else design.multiplier
            assert noise >= 0.999 * share * math.sqrt(BLOCKS) * design.clip
        campaign.absorb(empty(task))
    assert sketched > 0


def test_the_median_of_five_blocks_has_1_43_times_the_noise() -> None:
    """Of 20 tables of noise alone, a coordinate's variance, over 8,000 of them, is known to half a
    per cent. The control: one block has 1.00 times."""
    for blocks, expected in ((BLOCKS, 5 * 0.28683), (1, 1.0)):
        design = replace(LARGE, blocks=blocks)
        campaign = TrainingCampaign.begin(design)
        assert campaign.dense is not None
        cell = math.sqrt(blocks) * design.multiplier * design.clip
        squares = []
        for draw in range(20):
            before, campaign.done = campaign.flat.clone(), 0
            table = cell * np.random.default_rng(draw).normal(size=campaign.dense.shape)
            campaign.take(RoundResult(table, cell))
            step = (campaign.flat - before).double().numpy() * design.cohort
            squares.append(np.mean((step / design.multiplier / design.clip) ** 2))
        assert abs(np.mean(squares) / expected - 1) < 0.03


@pytest.mark.parametrize("rule", [FreeNorm(error=0.1, early=1.0, memory=0.0), AdaptNorm(error=0.1)])
def test_sizes_do_not_depend_on_how_many_blocks_measure_a_norm(rule: Any) -> None:
    """Cells are |m|²/(c·σ²), σ being the noise of one block, for a sum of 10 deviations."""
    design = replace(LARGE, compression=rule, noise_multiplier=0.5)
    campaign = TrainingCampaign.begin(design)
    campaign.sizing = replace(campaign.sizing, cells=1_000)  # it changes twofold at most
    assert campaign.dense is not None
    share = 1.0 if campaign.second is None else math.sqrt(0.9)
    sigma = design.multiplier * design.clip  # with the whole budget
    vector = np.random.default_rng(1).normal(size=campaign.length)
    vector *= 10 * sigma / np.linalg.norm(vector)
    cell = math.sqrt(BLOCKS) * sigma / share
    noise = np.random.default_rng(2).normal(size=campaign.dense.shape)
    noise *= cell * math.sqrt(noise.size) / np.linalg.norm(noise)  # of just the expected norm
    table = campaign.dense.encode(vector.astype(np.float32)).astype(np.float64) + noise
    campaign.take(RoundResult(table, cell, measurement=10 * sigma, second_noise=0.0))
    norm = 10.0 if campaign.design.compression.asks == "nothing" else 10 + math.sqrt(20)
    assert 0.5 < campaign.sizing.cells / (norm**2 / 0.1) < 2


def test_floats_have_the_noise_of_whole_numbers_for_all_blocks() -> None:
    campaign = TrainingCampaign.begin(LARGE)
    task = campaign.next_task()
    assert task is not None
    exact = campaign.read(empty(task)).noise
    floats = FloatSum(campaign).noised(1)
    assert math.isclose(floats.noise, exact, rel_tol=0.01)
    assert math.isclose(float(torch.as_tensor(floats.table).std()), exact, rel_tol=0.05)


def test_blocks_are_odd() -> None:
    with pytest.raises(SpecError, match="blocks must be odd"):
        replace(LARGE, blocks=4)


# The campaign


def test_tasks_name_their_pass_and_their_round() -> None:
    campaign = TrainingCampaign.begin(PASSES)
    names = []
    while (task := campaign.next_task()) is not None:
        assert campaign.next_task() == task  # the same when called twice
        names.append((task.campaign.split(" ", 1)[1], task.cohort))
        assert task.max_count == PASSES.cohort + 1
        campaign.skip()
    assert names == [(f"pass {k // 3}", f"round {k}") for k in range(7)]
    campaign.skip()
    assert (campaign.done, campaign.rounds_held) == (7, 0)


def test_a_round_that_was_skipped_leaves_the_model_as_it_was() -> None:
    campaign = TrainingCampaign.begin(PASSES)
    before = campaign.parameters()
    campaign.skip()
    assert campaign.parameters() == before == to_bytes(models.flatten(PASSES.make()).numpy())


def test_another_rounds_sum_is_refused() -> None:
    campaign = TrainingCampaign.begin(PASSES)
    task = campaign.next_task()
    assert task is not None
    answer = NoisedSum(task, np.zeros(task.sketch.shape, dtype=np.int64), 8)
    campaign.absorb(answer)
    with pytest.raises(MismatchError, match="waits for round 1"):
        campaign.absorb(answer)


def test_clients_compute_by_themselves_for_exact_secure_sums_only() -> None:
    with pytest.raises(SpecError, match='set trust to "secure"'):
        training(replace(PASSES, secure=None), protocol=True)
    with pytest.raises(SpecError, match="exact"):
        training(PASSES, protocol=True, exact=False)


@pytest.mark.parametrize("compression", [FixedRate(rate=3.0), FreeNorm(error=20.0)])
def test_the_same_answers_make_the_same_model(compression: Any) -> None:
    """Devices that answer the campaign's tasks one by one, and a training of the same clients."""
    design = replace(PASSES, compression=compression)
    learner = training(design, protocol=True)
    again = TrainingCampaign.begin(design)
    clients = trainers(population().train)

    def gather(task: Task) -> Batch:
        parameters = again.parameters()
        terms = design.model_terms(parameters, again.done)
        total = np.zeros(task.sketch.shape, dtype=np.int64)
        for client in design.members(again.done).tolist():
            table = update_table(task, terms, parameters, clients[client])(SeededRng(5, client))
            total += table.reshape(total.shape)
        return Batch(task.id, total, design.cohort)

    books = Ledger(Budget(epsilon=None, delta=DELTA))
    rng, charge_of, answers = SeededRng(0), design.charge_of, []
    while (task := again.next_task()) is not None:
        batch = gather(task)
        answers.append(step(again, task, batch, ledger=books, rng=rng, charge_of=charge_of))
    finished(learner)
    assert again.parameters() == learner.campaign.parameters()
    assert again.rate == learner.campaign.rate > 1
    assert again.sizing == learner.campaign.sizing
    third = TrainingCampaign.begin(design)
    for answer in answers:
        third.absorb(answer)
    assert third.parameters() == again.parameters()


def test_too_few_devices_show_nothing_and_cost_nothing() -> None:
    for protocol in (True, False):
        books = Ledger(Budget(epsilon=None, delta=DELTA))
        learner = training(replace(PASSES, dropout=0.9), protocol=protocol, ledger=books)
        before = learner.campaign.flat.clone()
        learner.round()
        assert torch.equal(learner.campaign.flat, before)
        assert (learner.campaign.done, learner.campaign.rounds_held) == (1, 0)
        assert books.entries() == []


def test_clients_alone_and_all_at_once_are_one_model_but_for_rounding() -> None:
    """Without noise and with whole batches they differ only by floats and by rounding to 1,000
    whole numbers per clip, for eight clients in seven rounds. A coordinate of a mean update moves
    by at most clip/1000, with a deviation of ½·clip/1000/√8; seven such steps of independent
    rounding stay within eight of their deviations, a false alarm of 1e-12."""
    design = replace(
        PASSES, noise_multiplier=0.0, compression=FixedRate(rate=1.0), local=ALL_AT_ONCE
    )
    alone, together = training(design, protocol=True), training(design, noise_seed=9)
    start = alone.campaign.flat.clone()
    finished(alone)
    finished(together)
    deviation = math.sqrt(2 * 7 / 8) * design.clip / 1000 / 2
    assert off(alone, together) < 8 * deviation * math.exp(7 * 0.3 * 0.1)
    assert float((alone.campaign.flat - start).abs().max()) > 0.05


def test_the_noise_of_clients_alone_is_that_of_the_training() -> None:
    """Nobody has examples: only noise moves the model. The ratio of two sums of n squares is within
    1 ± 8·√(4/n) except with probability 1e-12; with a third more noise it is not."""
    nobody = Clients(torch.zeros(0, 8), torch.zeros(0, dtype=torch.int64), torch.zeros(31).long())
    data = replace(population(), train=nobody)
    design = replace(PASSES, rounds=30, compression=FixedRate(rate=1.0))
    distances = []
    for protocol, multiplier in ((True, 1.0), (False, 1.0), (True, 4 / 3)):
        noisier = replace(design, noise_multiplier=multiplier)
        learner = Training(noisier, data, noise_seed=5, protocol=protocol)
        squares = 0.0
        for _ in range(design.rounds):
            before = learner.campaign.flat.clone()
            learner.round()
            squares += float((learner.campaign.flat - before).double().square().sum())
        distances.append(squares)
    limit = 8 * math.sqrt(4 / (design.rounds * LENGTH))
    assert abs(distances[0] / distances[1] - 1) < limit
    assert abs(distances[2] / distances[1] - 1) > limit  # the negative control


# One client


def terms(flat: torch.Tensor, **changes: Any) -> ModelTerms:
    design = replace(PASSES, local=LocalTraining(learning_rate=0.3, batch=2, epochs=2), **changes)
    return design.model_terms(to_bytes(flat.numpy()), 0)


def test_a_client_alone_computes_what_it_does_among_others() -> None:
    data, model = population().train, PASSES.make()
    flat = models.flatten(model)
    for client in (0, 7, 29):
        inputs, targets = data.examples(client)
        chance = torch.Generator().manual_seed(int(SeededRng(4).words(1)[0]))
        (part,) = updates(model, flat, data, [client], terms(flat).local, generator=chance, chunk=1)
        delta = update(terms(flat), flat.numpy(), inputs, targets, SeededRng(4))
        assert delta.tolist() == part.deltas[0].tolist()
        assert np.abs(delta).max() > 0


def test_an_update_that_is_not_finite_or_too_long_is_zeros() -> None:
    data = population().train
    flat = models.flatten(PASSES.make())
    inputs, targets = data.examples(3)
    spoiled = inputs.clone()
    spoiled[0, 2] = math.inf
    assert not update(terms(flat), flat.numpy(), spoiled, targets, SeededRng(4)).any()
    long = float(np.abs(update(terms(flat), flat.numpy(), inputs, targets, SeededRng(4))).sum())
    for limit, fits in ((0.99 * long, False), (1.01 * long, True)):
        limited = terms(flat, largest_l1=limit)
        assert update(limited, flat.numpy(), inputs, targets, SeededRng(4)).any() == fits


def test_a_client_without_examples_sends_zeros() -> None:
    flat = models.flatten(PASSES.make())
    none = torch.zeros(0, 8), torch.zeros(0, dtype=torch.int64)
    assert not update(terms(flat), flat.numpy(), *none, SeededRng(4)).any()


def test_examples_that_the_model_does_not_take_are_refused() -> None:
    flat = models.flatten(PASSES.make())
    with pytest.raises(SpecError, match="does not take inputs"):
        update(terms(flat), flat.numpy(), torch.zeros(2, 5), torch.zeros(2).long(), SeededRng(4))


def test_parameters_are_read_by_their_digest_and_written_by_nobody() -> None:
    flat = models.flatten(PASSES.make())
    body = to_bytes(flat.numpy())
    offer = terms(flat)
    assert offer.digest == digest_of(body)
    assert offer.read(body).tolist() == flat.tolist()
    assert not offer.read(body).flags.writeable
    for wrong in (body[:-4], body + b"\0" * 4, bytes(len(body))):
        with pytest.raises(SpecError, match="the digest in its offer"):
            offer.read(wrong)


def test_a_table_is_drawn_from_the_tasks_own_stream() -> None:
    """Examples first, then rounding, then the share of the noise, whatever was drawn before."""
    campaign = TrainingCampaign.begin(PASSES)
    task = campaign.next_task()
    assert task is not None
    parameters = campaign.parameters()
    model_terms = PASSES.model_terms(parameters, 0)
    train = trainer(*population().train.examples(2))
    draws: list[int] = []

    def watch(terms: ModelTerms, numbers: Any, rng: Rng) -> Any:
        draws.append(int(stream(SeededRng(8, 2), task.id).words(1)[0]))
        return train(terms, numbers, rng)

    fresh, used = SeededRng(8, 2), SeededRng(8, 2)
    used.words(100)
    tables = [
        update_table(task, model_terms, parameters, each)(rng)
        for each, rng in ((train, fresh), (watch, used))
    ]
    assert tables[0].tolist() == tables[1].tolist()
    assert len(draws) == 1
