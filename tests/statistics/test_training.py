"""Training: the noise on a round's sum is as claimed, and hides a client.

Clients have no examples where noise is measured, so a sum is noise alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy import stats

from checks import SEED
from marks import quick
from sfumato.flow.model_terms import LocalTraining
from sfumato.flow.secure_sum import SecureSum
from sfumato.learn.campaign import RoundNoise, TrainingCampaign
from sfumato.learn.compression import AdaptNorm, FixedRate
from sfumato.learn.data import Clients, Federated
from sfumato.learn.design import AdaptiveClip, ServerOptimizer, TrainingDesign
from sfumato.learn.training import Training
from sfumato.privacy import NoiseAtRelease, SeededRng, epsilon_of
from sfumato.sketch import RoundSketch
from unit.learn.test_training import parts, round_result

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

CLIENTS, INPUTS, CLASSES = 40, 300, 10
LENGTH = (INPUTS + 1) * CLASSES
FALSE_ALARM = 1e-6
DESIGN = TrainingDesign(
    model="softmax",
    inputs=INPUTS,
    classes=CLASSES,
    clients=CLIENTS,
    cohort=20,
    rounds=5,
    local=LocalTraining(learning_rate=0.1, batch=10),
    clip=0.3,
    noise_multiplier=0.8,
    server=ServerOptimizer(method="sgd"),
    seed=3,
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tests run side by side; threads of each would wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def nothing(inputs: int = INPUTS, clients: int = CLIENTS) -> Federated:
    """Clients without examples."""
    train = Clients(
        torch.zeros(0, inputs),
        torch.zeros(0, dtype=torch.int64),
        torch.zeros(clients + 1, dtype=torch.int64),
    )
    return Federated(train, torch.zeros(1, inputs), torch.zeros(1, dtype=torch.int64), "nothing")


def assert_variance(values: F64, deviation: float) -> None:
    """Normal values of mean zero have this deviation: chi-square, two-sided."""
    statistic = float(np.sum((values / deviation) ** 2))
    chance = min(stats.chi2.cdf(statistic, values.size), stats.chi2.sf(statistic, values.size))
    ratio = math.sqrt(statistic / values.size)
    assert chance >= FALSE_ALARM / 2, f"the deviation is {ratio:.4f} times what was claimed"


def moves(design: TrainingDesign, *, exact: bool) -> F64:
    """How far five rounds of noise move the parameters, in the unit of sums."""
    learner = Training(design, nothing(), exact=exact, noise_seed=SEED)
    distances = []
    for _ in range(design.rounds):
        before = learner.campaign.flat.clone()
        learner.round()
        distances.append(
            ((learner.campaign.flat - before) * design.cohort).numpy().astype(np.float64)
        )
    return np.concatenate(distances)


CLAIMED = DESIGN.noise_multiplier * DESIGN.clip
SECURE = SecureSum(corrupt=0.0, dropout=0.0)
DEVIATIONS = {
    "whole": (DESIGN, CLAIMED),
    "beside a norm": (replace(DESIGN, compression=AdaptNorm(error=1e-9)), CLAIMED / 0.9**0.5),
    "beside a count": (
        replace(DESIGN, adaptive_clip=AdaptiveClip(noise=0.8, rate=1e-9)),
        DESIGN.clip / math.sqrt(1 / 0.8**2 - 1 / 1.6**2),
    ),
    # Nineteen survivors have all of it, so twenty have a nineteenth more of its variance.
    "in shares": (
        replace(DESIGN, sampling="fixed", secure=SECURE),
        CLAIMED * math.sqrt(20 / 19),
    ),
}


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", DEVIATIONS)
def test_the_noise_on_a_sum_has_the_claimed_deviation(name: str, exact: bool) -> None:
    """False alarm 1e-6 (chi-square with 15,050 degrees of freedom). A whole-number table may be
    longer than the clip by rounding, here by less than half a per cent, and its noise with it:
    that is divided out. Power: see the next test."""
    design, claimed = DEVIATIONS[name]
    if name == "in shares" and not exact:
        pytest.skip("floats have no shares")
    if exact:
        main, _ = parts(TrainingCampaign.begin(design))
        longer = main.rounding.l2 / (main.scale * design.clip)
        assert 1 <= longer < 1.005
        claimed *= longer
    assert_variance(moves(design, exact=exact), claimed)


@pytest.mark.parametrize("exact", [True, False])
def test_noise_that_is_five_per_cent_off_is_caught(exact: bool) -> None:
    """The negative control: 10% of a variance that is known to 1.2%."""
    less = replace(DESIGN, noise_multiplier=0.95 * DESIGN.noise_multiplier)
    with pytest.raises(AssertionError, match=r"the deviation is 0\.9"):
        assert_variance(moves(less, exact=exact), CLAIMED)


def test_decoding_keeps_the_deviation() -> None:
    """A coordinate is the sum of `rows` cells by √rows. Coordinates share cells, so the mean square
    of a table is tested instead of the decoded vector's. False alarm 1e-6."""
    design = replace(DESIGN, compression=FixedRate(rate=2.0))
    campaign = TrainingCampaign.begin(design)
    dense = campaign.dense
    assert dense is not None
    squares, cells = 0.0, 0
    for number in range(10):
        result = round_result(campaign, torch.zeros(0, LENGTH), exact=True, seed=SEED + number)
        squares += float((result.table**2).sum()) / result.noise**2
        cells += math.prod(result.table.shape)
        assert math.isclose(result.noise, CLAIMED, rel_tol=0.005)
    assert cells == 10 * dense.cells
    chance = min(stats.chi2.cdf(squares, cells), stats.chi2.sf(squares, cells))
    assert chance >= FALSE_ALARM / 2


@pytest.mark.parametrize("exact", quick([True, False], False))
def test_the_norm_that_is_asked_for_and_the_count_are_noised_as_claimed(exact: bool) -> None:
    """False alarm 1e-6 (chi-square with 600 degrees of freedom). Power: noise that is a fifth less,
    36% of the variance where a deviation is 5.8%, is missed with probability below 1e-3; none at
    all is never missed."""
    design = replace(
        DESIGN, inputs=3, classes=2, compression=AdaptNorm(), adaptive_clip=AdaptiveClip(noise=2.0)
    )
    campaign = TrainingCampaign.begin(design)
    norms, counts, spread = [], [], 0.0
    for number in range(600):
        result = round_result(campaign, torch.zeros(0, campaign.length), exact, seed=SEED + number)
        assert result.measurement is not None
        assert result.within_clip is not None
        norms.append(result.measurement)
        counts.append(result.within_clip - design.cohort / 2)
        spread = result.second_noise
    left = design.clip / math.sqrt(1 / 0.8**2 - 1 / 4.0**2)
    assert math.isclose(spread, left / math.sqrt(0.1), rel_tol=0.01)
    assert_variance(np.array(norms), spread)
    assert_variance(np.array(counts), 2.0)
    with pytest.raises(AssertionError, match="times what was claimed"):
        assert_variance(np.array(norms), 1.5 * spread)


# An audit: a client that always sends the same, and is drawn by chance, four times

AUDITED = replace(DESIGN, inputs=2, classes=2, clients=10, cohort=3, rounds=4, noise_multiplier=1.0)
RELEASES, DELTA = 200_000, 1e-5


def ratios(design: TrainingDesign, *, present: bool, smaller: float) -> F64:
    """The log-likelihood ratios of RELEASES trainings, with a client that sends its clip along the
    first coordinate whenever it is drawn, or with one that sends zeros. The table and the scale of
    its noise, divided by `smaller`, are those of a training's own sum; coins are tossed here."""
    main, _ = parts(TrainingCampaign.begin(design))
    task = TrainingCampaign.begin(design).next_task()
    assert task is not None
    rng, coins = SeededRng(SEED, int(present)), np.random.default_rng([SEED, int(present)])
    chance = design.cohort / design.clients
    total = np.zeros(RELEASES)
    for _ in range(design.rounds):
        table = main.tables(np.array([[9.0, 0.0, 0.0, 0.0, 0.0, 0.0]]), rng=rng)[0]
        shift = int(table[0])
        assert np.abs(table[1:]).max() == 0
        scale = task.mechanism.stddev(1) / smaller
        present_in = (coins.random(RELEASES) < chance) & present
        noise = NoiseAtRelease(noise="gaussian", scale=scale)
        cell = noise.at_release(shift * present_in.astype(np.int64), count=1, rng=rng)
        exponent = (2 * cell * shift - shift**2) / (2 * scale**2)
        total += np.logaddexp(math.log1p(-chance), math.log(chance) + exponent)
    return total


def epsilon_exceeded(present: F64, absent: F64) -> float:
    """An epsilon that was exceeded, wrong with probability at most FALSE_ALARM: the event is chosen
    on half of the runs and counted on the rest (Clopper and Pearson)."""
    half = present.size // 2

    def bound(part: slice, bar: float) -> float:
        hits, misses = int((present[part] >= bar).sum()), int((absent[part] >= bar).sum())
        low = stats.beta.ppf(FALSE_ALARM / 2, hits, half - hits + 1) if hits else 0.0
        high = stats.beta.isf(FALSE_ALARM / 2, misses + 1, half - misses)
        return math.log((low - DELTA) / high) if low > DELTA else -math.inf

    bars = np.quantile(absent[:half], 1 - np.geomspace(0.3, 1e-4, 30))
    best = max(bars, key=lambda bar: bound(slice(0, half), float(bar)))
    return bound(slice(half, None), float(best))


def lower_bound(design: TrainingDesign, smaller: float = 1.0) -> float:
    """An epsilon that the design exceeds."""
    return epsilon_exceeded(
        *(ratios(design, present=is_there, smaller=smaller) for is_there in (True, False))
    )


def test_rounds_with_random_cohorts_do_not_betray_more_than_is_claimed() -> None:
    """False alarm 1e-6 (Clopper-Pearson). Power: see the next test."""
    claim = epsilon_of([AUDITED.loss], DELTA)
    bound = lower_bound(AUDITED)
    assert 0.2 * claim < bound <= claim


def test_a_third_of_the_noise_betrays_more() -> None:
    """The negative control."""
    assert lower_bound(AUDITED, smaller=3.0) > epsilon_of([AUDITED.loss], DELTA)


# An audit of a whole release: a sum, a norm and a count

MEASURED = replace(
    DESIGN,
    inputs=2,
    classes=2,
    noise_multiplier=2.0,
    compression=AdaptNorm(),
    adaptive_clip=AdaptiveClip(noise=2.0),
)
ROUNDS = 30_000


def scores(mechanism: RoundNoise, table: I64, model: RoundNoise, *, present: bool) -> F64:
    """The log-likelihood ratios, with the scales of `model`, of ROUNDS releases by `mechanism` with
    one client in the round or with none."""
    second = model.sketch.second
    assert second is not None
    main, other, count = model.sketch.split(table)
    norm = round(float(np.linalg.norm(other)))
    shift = np.concatenate([main.reshape(-1), [norm], count]).astype(np.float64)
    scale = np.full(shift.size, model.scale)
    scale[-2] = model.second_scale * (1 + 1 / second.rounding.l2)
    scale[-1] = model.count_scale
    weights, offset = shift / scale**2, float(np.sum(shift**2 / (2 * scale**2)))
    rng, total = SeededRng(SEED, int(present)), table if present else np.zeros_like(table)
    return np.array(
        [mechanism.at_release(total, count=1, rng=rng) @ weights - offset for _ in range(ROUNDS)]
    )


@pytest.mark.slow
def test_a_round_that_shows_a_norm_and_a_count_does_not_betray_more_than_is_claimed() -> None:
    """False alarm 1e-6 (Clopper-Pearson). The control has a third of the noise."""
    task = TrainingCampaign.begin(MEASURED).next_task()
    assert task is not None
    noise, sketch = task.mechanism, task.sketch
    assert isinstance(noise, RoundNoise)
    assert isinstance(sketch, RoundSketch)
    update = np.zeros((1, sketch.main.length))
    update[0, 0] = MEASURED.clip
    table = sketch.tables(update, rng=SeededRng(SEED))[0]
    less = replace(
        noise,
        scale=noise.scale / 3,
        second_scale=noise.second_scale / 3,
        count_scale=noise.count_scale / 3,
    )
    claim = epsilon_of([task.loss], DELTA)
    for mechanism, holds in ((noise, True), (less, False)):
        present, absent = (
            scores(mechanism, table, noise, present=is_there) for is_there in (True, False)
        )
        bound = epsilon_exceeded(present, absent)
        assert (0.2 * claim < bound <= claim) is holds
