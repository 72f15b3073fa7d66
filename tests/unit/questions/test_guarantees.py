"""The bounds behind paper 001's two guarantees: against enumeration, simulation and the paper."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from checks import SEED
from sfumato.privacy.listing import lists, without_promise
from sfumato.questions import guarantees
from sfumato.questions.guarantees import PaperSizes, Rounds, best_cut, list_failure


def test_the_papers_constants_are_its_formulas() -> None:
    """At the setting of figure 2: m·n = 10,000, R = 30, tau = 50."""
    sizes = PaperSizes(items=10_000, rounds=30, threshold=50.0, failure_probability=0.05)
    assert sizes.sampling_threshold == 25.0
    assert sizes.repetitions == math.ceil(10 * math.log(4 * 10_000 * 30 / (50 * 0.05))) == 131
    assert sizes.keys == math.ceil(20 * 200 * math.log(30)) == 13_605
    assert sizes.gamma == math.log(30)
    assert sizes.width == math.ceil(10 * 200 * math.sqrt(30)) == 10_955
    assert sizes.rows == math.ceil(math.log(480_000)) == 14
    assert sizes.words == 131 * 8 * 13_605
    single = PaperSizes(items=10_000, rounds=1, threshold=1.0, failure_probability=0.05)
    assert (single.sampling_threshold, single.gamma) == (1.0, 1.0)  # the paper's ln 1 sizes nothing


def test_an_item_in_exactly_half_of_the_lists_is_kept() -> None:
    assert [guarantees.votes_needed(count) for count in (1, 2, 3, 4, 57)] == [1, 1, 2, 2, 29]


@pytest.mark.parametrize("repetitions", [5, 20, 57])
def test_the_bound_of_a_list_is_the_binomial_tail_of_the_worst_items(repetitions: int) -> None:
    """Heavy items of exactly the threshold and light ones of exactly a tenth, simulated: at most
    the bound, with a false alarm of 1e-6 by the exact binomial test."""
    threshold, sampling, heavy, light = 50, 25.0, 4, 40
    total = heavy * threshold + light * threshold // 10
    bound = list_failure(
        total, threshold, sampling_threshold=sampling, repetitions=repetitions, unread=0.0
    )
    chance = np.random.default_rng([SEED, repetitions])
    runs, needed = 2_000, guarantees.votes_needed(repetitions)
    votes = chance.binomial(threshold, 1 / sampling, (runs, heavy, repetitions)) > 0
    wrong = chance.binomial(threshold // 10, 1 / sampling, (runs, light, repetitions)) > 0
    failed = (votes.sum(2) < needed).any(1) | (wrong.sum(2) >= needed).any(1)
    assert stats.binom.sf(int(failed.sum()) - 1, runs, bound) > 1e-6
    # A threshold sample that keeps half as many would break the bound: the control.
    votes = chance.binomial(threshold, 0.3 / sampling, (runs, heavy, repetitions)) > 0
    failed = (votes.sum(2) < needed).any(1)
    assert bound == 1 or stats.binom.sf(int(failed.sum()) - 1, runs, bound) < 1e-6


def test_light_items_are_worst_with_the_largest_counts() -> None:
    """For every division of a total among light items of equal counts."""
    repetitions, sampling, total = 21, 25.0, 1_000.0
    needed = guarantees.votes_needed(repetitions)
    each = [
        total / count * float(stats.binom.sf(needed - 1, repetitions, count / sampling))
        for count in range(1, 6)
    ]
    assert max(each) == each[-1]
    assert list_failure(
        total, 50, sampling_threshold=sampling, repetitions=repetitions, unread=0.0
    ) >= min(1.0, each[-1])


def exact_tail(trials: int, least: int, chance: Fraction) -> Fraction:
    """P(Bin(trials, chance) ≥ least), in whole numbers."""
    counts = range(least, trials + 1)
    each = (math.comb(trials, k) * chance**k * (1 - chance) ** (trials - k) for k in counts)
    return sum(each, Fraction(0))


def exact_failure(repetitions: int, unread: Fraction) -> Fraction:
    """The claim's bound for 6,000 thresholds of 50 and samples of 1 in 25 (docs/proofs/listing.md),
    with e^-2 to seventeen digits."""
    needed, missed = (repetitions + 1) // 2, Fraction(math.exp(-2)) + unread
    heavy = 6_000 * (1 - exact_tail(repetitions, needed, 1 - missed))
    return heavy + 60_000 * exact_tail(repetitions, needed, Fraction(5, 25))


def test_sizes_are_those_of_exact_binomial_tails() -> None:
    """The examples in the docstrings, by a second computation."""
    bound = list_failure(300_000, 50, sampling_threshold=25, repetitions=131, unread=1 / 32)
    assert math.isclose(bound, exact_failure(131, Fraction(1, 32)), rel_tol=1e-9)
    assert all(exact_failure(odd, Fraction(1, 64)) > 0.05 for odd in range(1, 51, 2))
    assert exact_failure(51, Fraction(1, 64)) <= 0.05
    assert guarantees.repetitions_for_list(300_000, 50, 0.05, sampling_threshold=25.0) == 51
    sizes = []
    for percent in (30, 25, 20, 15, 10, 7, 5, 3):  # a row's chance of an error, 40/width
        error, width = Fraction(percent, 100), -(-4_000 // percent)
        rows = 1
        while 200 * exact_tail(rows, (rows + 1) // 2, error) > Fraction(45, 1_000):
            rows += 2
        sizes.append((rows, width))
    rounds = Rounds(devices=1_000, rounds=1, items_per_device=1, alike=True)
    assert guarantees.sketch_for(rounds, 50, 0.05) == min(sizes, key=math.prod) == (19, 267)


def test_the_papers_repetitions_keep_its_guarantee_and_fewer_do() -> None:
    """0.8^b on either side (Chernoff), for any number of items: its b is enough, if not its
    lemma."""
    for items in (1, 20, 6_000, 10**6):
        for failure in (0.5, 0.05, 1e-4):
            sizes = PaperSizes(
                items=50 * items, rounds=1, threshold=50.0, failure_probability=failure
            )
            keys = {"sampling_threshold": 25.0, "unread": 1 / 32}
            bound = list_failure(50.0 * items, 50, repetitions=sizes.repetitions, **keys)
            assert bound <= failure
            least = guarantees.repetitions_for_list(
                50.0 * items, 50, failure, sampling_threshold=25.0
            )
            assert least is not None
            assert least <= sizes.repetitions
    assert guarantees.repetitions_for_list(1e4, 50, 0.05, sampling_threshold=100.0) is None


@pytest.mark.parametrize("copies", [False, True])
def test_the_cut_of_a_private_list_is_the_best_and_its_bound_is_exact(copies: bool) -> None:
    """Against all cuts, with tails summed from the noise's masses."""
    (mechanism, *_) = lists(1.0, items_per_device=3, epsilon=1.0, delta=1e-6, copies=copies)
    threshold, total = 400, 30_000
    cut = best_cut(mechanism, total, threshold)
    law = mechanism.list_law

    def failure(at: int) -> float:
        missed = total // threshold * float(law.at_least(np.array([threshold - at + 1]))[0])
        one, tenth = (float(p) for p in law.at_least(np.array([at - 1, at - threshold // 10])))
        return missed + total * max(one, tenth / (threshold // 10))

    every = {at: failure(at) for at in range(mechanism.threshold, threshold + 1)}
    best = min(every, key=lambda at: every[at])
    assert abs(cut.count - best) <= 1
    assert math.isclose(cut.failure, every[cut.count], rel_tol=1e-6)
    assert cut.failure <= 1.05 * every[best]
    assert mechanism.threshold <= cut.count <= threshold
    assert best_cut(without_promise(1.0), total, threshold) == guarantees.Cut(threshold, 0.0)


def test_a_row_errs_no_more_often_than_its_bound() -> None:
    """One row of a Hybrid sketch, over hash functions and rounds, on data made for its worst: items
    of about threshold·√R. False alarm 1e-6, exact binomial test."""
    rounds = Rounds(devices=400, rounds=16, items_per_device=1, alike=True)
    threshold, width, runs = 40, 320, 400
    chance = np.random.default_rng(SEED)
    heavy = np.repeat(np.arange(40), 160)  # 6,400 devices: each item as often as threshold·√R
    errs = 0
    for _ in range(runs):
        counts = np.zeros((16, 40), dtype=np.int64)
        order = chance.permutation(heavy).reshape(16, 400)
        for round, part in enumerate(order):
            counts[round] = np.bincount(part, minlength=40)
        collides = chance.random(40) < 1 / width
        signs = chance.choice([-1, 1], (16, 40))
        errs += abs(int((signs * counts * collides).sum())) > threshold
    bound = guarantees.row_error(rounds, threshold, width, 1e-3)
    assert stats.binom.sf(errs - 1, runs, min(bound, 1.0)) > 1e-6
    assert bound < guarantees.row_error(
        Rounds(devices=400, rounds=16, items_per_device=1, alike=False), threshold, width, 1e-3
    )


def test_sketches_for_a_failure_keep_it_by_the_same_bound() -> None:
    for alike in (True, False):
        for count in (1, 4, 30):
            rounds = Rounds(devices=5_000, rounds=count, items_per_device=2, alike=alike)
            rows, width = guarantees.sketch_for(rounds, 100, 0.02)
            bound = guarantees.counts_failure(rounds, 100, rows=rows, width=width, failure=0.002)
            assert bound <= 0.02
            assert guarantees.counts_failure(
                rounds, 100, rows=rows, width=width // 4, failure=0.002
            ) > 0.02  # fmt: skip


def test_costs_follow_table_1() -> None:
    """A list costs mn/tau whatever R is; a histogram √R times that, up to mn."""
    assert guarantees.list_cost(10_000, 50) == 200
    assert guarantees.histogram_cost(10_000, 1, 50) == 200
    assert guarantees.histogram_cost(10_000, 100, 50) == 2_000
    assert guarantees.histogram_cost(10_000, 10_000, 50) == 10_000
