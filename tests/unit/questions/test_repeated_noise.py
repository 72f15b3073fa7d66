"""The randomness of a list's campaign repeats if all its answers do, and only then."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

import sfumato
from sfumato.arrays import U64
from sfumato.flow.release import NoisedSum
from sfumato.privacy.samplers import Rng, SecretRng, discrete_laplace, log_mass
from sfumato.questions.heavy_hitters import design as heavy
from sfumato.questions.heavy_hitters import plan as heavy_plan
from sfumato.questions.heavy_hitters.design import HeavyHitterCampaign, HeavyHitterDesign
from sfumato.sketch import InvertibleSketch

I64 = npt.NDArray[np.int64]
SECRETS = 60
WORDS = ["cab", "bead", "face", "aged", "badge"]
COUNTS = np.array([40, 30, 30, 20, 0])


class Unbound(SecretRng):
    """The control: a secret that gives the same words whatever they are added to."""

    def bound(self, purpose: str, *data: bytes) -> SecretRng:
        return self

    def words(self, count: int) -> U64:
        self._calls += 1
        return SecretRng(self._secret).bound("", str(self._calls).encode()).words(count)


@pytest.fixture
def draws(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records the noise on the number of keys of each table."""
    draws: list[int] = []

    def recording(scale: float, size: Any, rng: Rng) -> I64:
        noise = discrete_laplace(scale, size, rng)
        draws.append(int(noise[0]))
        return noise

    monkeypatch.setattr(heavy, "discrete_laplace", recording)
    return draws


@pytest.fixture(scope="module")
def design() -> HeavyHitterDesign:
    study = sfumato.Study(
        question="heavy_hitters", trust="central", epsilon=2.0, delta=1e-4, devices=450, rounds=3,
        adaptive=True, bytes_per_device=20_000, alphabet="abcdefgh", word_length=6,
    )  # fmt: skip
    result = heavy_plan.plan(study).design
    assert isinstance(result, HeavyHitterDesign)
    return result


def campaign_of(
    design: HeavyHitterDesign, rng: SecretRng, rounds: list[tuple[I64, int]]
) -> HeavyHitterCampaign:
    """A campaign after these rounds, each with the holders of each word and its devices."""
    campaign = HeavyHitterCampaign(design, rng)
    numbers, _ = design.keys.numbers(WORDS)
    for counts, count in rounds:
        task = campaign.next_task()
        assert task is not None
        assert isinstance(task.sketch, InvertibleSketch)
        table = task.sketch.encode_keys(numbers[counts > 0], counts[counts > 0])
        campaign.absorb(NoisedSum(task, table, count))
    return campaign


def equal_draws(
    design: HeavyHitterDesign, draws: list[int], kind: type[SecretRng], other: tuple[I64, int]
) -> int:
    """In how many of `SECRETS` campaigns another first round gets the same noise."""
    draws.clear()
    for number in range(SECRETS):
        for first in ((COUNTS, 150), other):
            campaign_of(design, kind(number.to_bytes(32, "little")), [first])
    assert len(draws) == 2 * SECRETS
    return sum(here == there for here, there in zip(draws[::2], draws[1::2], strict=True))


OTHERS = {
    "one more item": (np.array([40, 30, 30, 20, 1]), 150),
    "one more device, without items": (COUNTS, 151),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS.keys())
def test_the_number_of_keys_gets_other_noise_if_the_table_is_another(
    design: HeavyHitterDesign, draws: list[int], other: tuple[I64, int]
) -> None:
    """False alarm 1e-6 for this many equal draws of independent noise (exact binomial). Power: one,
    as the control shows. Secrets are fixed, so the test is deterministic."""
    _, logs = log_mass("laplace", design.items_per_device / design.mechanism.statistic)
    same = float(np.square(np.exp(logs)).sum())
    most = stats.binom.isf(1e-6, SECRETS, same)
    assert most < SECRETS
    assert equal_draws(design, draws, SecretRng, other) <= most


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS.keys())
def test_noise_that_is_bound_to_nothing_is_the_same_on_any_table(
    design: HeavyHitterDesign, draws: list[int], other: tuple[I64, int]
) -> None:
    """The control."""
    assert equal_draws(design, draws, Unbound, other) == SECRETS


def test_the_same_answers_give_the_same_rates_and_the_same_list(design: HeavyHitterDesign) -> None:
    rounds = [(COUNTS, 150), (COUNTS[::-1].copy(), 150), (COUNTS, 150)]
    campaigns = [campaign_of(design, SecretRng(bytes(32)), rounds) for _ in range(2)]
    rates = [[part.rate for part in campaign.rounds] for campaign in campaigns]
    assert rates[0] == rates[1]
    assert len(set(rates[0])) > 1  # the rate adapted to the tables
    lists = [campaign.heavy_hitters() for campaign in campaigns]
    assert lists[0].counts.size
    assert lists[0].counts.tolist() == lists[1].counts.tolist()
    other = campaign_of(design, SecretRng(b"1" * 32), rounds)
    assert [part.rate for part in other.rounds] != rates[0]
