"""The fewest neighbours and the lowest threshold: published tables, slow arithmetic, every case."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import cache
from typing import Any

import pytest
from scipy import stats

from sfumato.errors import ImpossibleError, SpecError
from sfumato.secagg.parameters import (
    COMPLETE_BELOW,
    LARGEST_COHORT,
    MOST_NEIGHBOURS,
    MarkedNeighbours,
    Mode,
    Parameters,
    check,
    find,
    requirements_of,
    search,
    threshold_bounds,
)
from sfumato.secagg.round import MaskedRound

MODES: tuple[Mode, Mode] = ("semi_honest", "semi_malicious")
RATES = ((0.05, 0.05), (0.1, 0.05), (0.1, 0.1), (0.2, 0.1), (0.2, 0.2), (0.33, 0.05))
TABLE = {  # for each pair of rates: neighbours,threshold when semi-honest|when semi-malicious
    50: "6,3|8,6 8,6|10,8 12,6|16,11 16,11|22,17 22,11|32,22 20,17|22,20",
    100: "12,6|16,11 16,11|22,17 22,11|32,22 32,21|42,32 40,21|62,42 34,29|42,37",
    200: "20,11|30,21 26,17|40,30 34,19|56,39 46,30|76,57 62,34|118,80 50,40|68,58",
    1000: "30,17|52,37 38,24|66,49 48,27|96,67 68,44|140,104 98,54|302,206 78,60|132,109",
    10000: "34,20|62,44 42,27|80,59 54,31|122,85 80,51|184,136 122,67|482,328 92,70|178,146",
}


def cells() -> Iterator[tuple[int, float, float, Mode, Parameters]]:
    for cohort, row in TABLE.items():
        for (corrupt, dropout), cell in zip(RATES, row.split(), strict=True):
            for mode, pair in zip(MODES, cell.split("|"), strict=True):
                neighbours, threshold = map(int, pair.split(","))
                yield cohort, corrupt, dropout, mode, Parameters(neighbours, threshold)


@pytest.mark.parametrize(("cohort", "corrupt", "dropout", "mode", "expected"), list(cells()))
def test_the_table_of_peers_comes_out(
    cohort: int, corrupt: float, dropout: float, mode: Mode, expected: Parameters
) -> None:
    assert find(cohort, corrupt=corrupt, dropout=dropout, mode=mode) == expected


@pytest.mark.parametrize(
    ("dropout", "mode", "expected"),
    [
        (0.1, "semi_honest", Parameters(64, 41)),
        (0.1, "semi_malicious", Parameters(120, 87)),
        (0.05, "semi_honest", Parameters(52, 37)),
        (0.05, "semi_malicious", Parameters(84, 65)),
    ],
)
def test_eighty_bits_take_more(dropout: float, mode: Mode, expected: Parameters) -> None:
    assert find(1000, corrupt=0.1, dropout=dropout, mode=mode, security_bits=80) == expected


def exceeds(cohort: int, marked: int, draws: int, limit: int) -> Fraction:
    """P[more than `limit` of `draws` devices are marked], from binomial coefficients."""
    ways = sum(
        math.comb(marked, hit) * math.comb(cohort - marked, draws - hit)
        for hit in range(limit + 1, draws + 1)
    )
    return Fraction(ways, math.comb(cohort, draws))


def slow_find(
    cohort: int, corrupt: Fraction, dropout: Fraction, mode: Mode, security: int, correctness: int
) -> Parameters | None:
    """The conditions as they are stated, from scratch for every number of neighbours."""
    adversaries, droppers = math.floor(corrupt * cohort), math.floor(dropout * cohort)
    survivors = math.ceil((1 - dropout) * cohort)
    half_risk = Fraction(1, 2 ** (security + 1))
    even = range(2, cohort, 2) if cohort >= COMPLETE_BELOW else ()
    for neighbours in (*even, cohort - 1):
        cut = Fraction(cohort * (cohort - neighbours - 1), 2) * Fraction(
            math.perm(adversaries + droppers, neighbours), math.perm(cohort, neighbours)
        )
        corrupt_most = next(
            most
            for most in range(neighbours + 1)
            if exceeds(cohort, adversaries, neighbours, most) <= half_risk / cohort
        )
        stay_least = next(
            stay
            for stay in range(neighbours + 1)
            if 1 - exceeds(cohort, survivors, neighbours, stay)
            >= Fraction(1, 2**correctness * cohort)
        )
        if mode == "semi_malicious":
            corrupt_most = math.ceil(Fraction(corrupt_most + neighbours - Fraction(5, 4)) / 2)
        threshold = max(corrupt_most + 1, 2)
        if cut < half_risk and threshold <= stay_least:
            return Parameters(neighbours, threshold)
    return None


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cohort", [*range(3, 26), 31, 40, 57])
def test_a_search_from_scratch_finds_the_same(cohort: int, mode: Mode) -> None:
    for corrupt, dropout in itertools.product(("0", "0.07", "0.3"), ("0", "0.1", "0.35")):
        for security, correctness in ((40, 20), (3, 2)):
            expected = slow_find(
                cohort, Fraction(corrupt), Fraction(dropout), mode, security, correctness
            )
            try:
                parameters = find(
                    cohort,
                    corrupt=float(corrupt),
                    dropout=float(dropout),
                    mode=mode,
                    security_bits=security,
                    correctness_bits=correctness,
                )
            except ImpossibleError:
                assert expected is None
            else:
                assert parameters == expected


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("bits", [1, 3, 6])
def test_the_most_marked_neighbours_are_those_of_all_draws(bits: int, strict: bool) -> None:
    cohort = 9
    for marked in range(cohort + 1):
        most = MarkedNeighbours(cohort, marked, bits=bits, strict=strict)
        for draws in range(1, cohort):
            most.draw()
            hits = [
                sum(device < marked for device in draw)
                for draw in itertools.combinations(range(cohort), draws)
            ]
            bound = Fraction(1, cohort << bits)
            shares = [
                Fraction(sum(hit > limit for hit in hits), len(hits)) for limit in range(draws + 1)
            ]
            rare = [share < bound or (share == bound and not strict) for share in shares]
            assert most.most == rare.index(True)
            assert Fraction(most.above, most.draws) == shares[most.most]


def test_a_probability_at_the_bound_counts_as_rare_only_where_it_may() -> None:
    """Two marked of nine: both are drawn in two draws with probability 1/36 = 2^−2/9."""
    loose, strict = (MarkedNeighbours(9, 2, bits=2, strict=strict) for strict in (False, True))
    for most in (loose, strict):
        most.draw()
        most.draw()
    assert (loose.most, strict.most) == (1, 2)
    # Two of 33 are both drawn with probability 2^−4/33, two of 65 with probability 2^−5/65.
    secret = list(threshold_bounds(requirements_of(33, 2 / 33, 0, "semi_honest", 3, 20)))
    recoverable = list(threshold_bounds(requirements_of(65, 0, 2 / 65, "semi_honest", 40, 5)))
    assert (secret[1].neighbours, secret[1].least) == (2, 2)
    assert (recoverable[1].neighbours, recoverable[1].most) == (2, 0)


def pieces(members: set[int], cohort: int, reach: int) -> int:
    """How many connected pieces these members of an unshuffled ring are."""
    left, count = set(members), 0
    while left:
        count, edge = count + 1, [left.pop()]
        while edge:
            here = edge.pop()
            near = {(here + step) % cohort for step in range(-reach, reach + 1)} & left
            left -= near
            edge.extend(near)
    return count


@pytest.mark.parametrize(("cohort", "neighbours"), [(9, 2), (12, 4), (14, 6)])
def test_the_ring_falls_apart_no_more_often_than_the_bound_says(
    cohort: int, neighbours: int
) -> None:
    tight = False
    for bad in range(cohort - 1):
        outcomes = [
            pieces(set(range(cohort)) - set(missing), cohort, neighbours // 2) > 1
            for missing in itertools.combinations(range(cohort), bad)
        ]
        share = Fraction(sum(outcomes), len(outcomes))
        pairs = Fraction(cohort * (cohort - neighbours - 1), 2)
        bound = pairs * Fraction(math.perm(bad, neighbours), math.perm(cohort, neighbours))
        assert share <= bound
        tight |= share == bound > 0
    assert tight  # when just enough are missing, nothing is counted twice


@pytest.mark.parametrize("mode", MODES)
def test_the_promise_holds_over_every_set_of_devices(mode: Mode) -> None:
    """Twenty devices on a ring, three of them corrupt and two dropping out, at a few bits."""
    cohort, adversaries, droppers, security, correctness = 20, 3, 2, 5, 3
    parameters = find(
        cohort,
        corrupt=adversaries / cohort,
        dropout=droppers / cohort,
        mode=mode,
        security_bits=security,
        correctness_bits=correctness,
    )
    assert parameters.neighbours < cohort - 1
    reach = parameters.neighbours // 2
    near = [
        {(here + step) % cohort for step in range(-reach, reach + 1)} - {here}
        for here in range(cohort)
    ]

    def opened(corrupt: set[int]) -> bool:
        honest = set(range(cohort)) - corrupt
        most = max(len(near[device] & corrupt) for device in honest)
        both_ways = (
            mode == "semi_malicious" and most + parameters.neighbours >= 2 * parameters.threshold
        )
        return most >= parameters.threshold or both_ways

    def lost(dropped: set[int]) -> bool:
        return any(len(others - dropped) < parameters.threshold for others in near)

    def cut(bad: set[int]) -> bool:
        return pieces(set(range(cohort)) - bad, cohort, reach) > 1

    def share(fails: Callable[[set[int]], bool], size: int) -> Fraction:
        sets = list(itertools.combinations(range(cohort), size))
        return Fraction(sum(fails(set(each)) for each in sets), len(sets))

    unsafe = share(opened, adversaries) + share(cut, adversaries + droppers)
    assert unsafe <= Fraction(1, 2**security)
    assert share(lost, droppers) <= Fraction(1, 2**correctness)


@pytest.mark.parametrize("cohort", range(3, COMPLETE_BELOW))
def test_a_small_cohort_is_safe_and_recoverable_for_sure(cohort: int) -> None:
    others = cohort - 1
    for adversaries, droppers, mode in itertools.product(range(cohort), range(cohort), MODES):

        def opens(threshold: int, adversaries: int = adversaries, mode: Mode = mode) -> bool:
            """Whether a device's secrets are opened: by the corrupt, or by two halves of others."""
            honest = others - adversaries
            if mode == "semi_honest":
                return adversaries >= threshold
            halves = ((first, honest - first) for first in range(honest + 1))
            return any(min(half) + adversaries >= threshold for half in halves)

        will_do = [
            threshold
            for threshold in range(2, others + 1)
            if not opens(threshold) and others - droppers >= threshold
        ]
        # A rate in the middle of those that round down to this many devices.
        corrupt, dropout = (adversaries + 0.5) / cohort, (droppers + 0.5) / cohort
        try:
            parameters = find(cohort, corrupt=corrupt, dropout=dropout, mode=mode)
        except ImpossibleError:
            assert not will_do
        else:
            assert parameters == Parameters(others, will_do[0])


def test_everybody_is_a_neighbour_where_an_even_number_is_not_enough() -> None:
    assert find(20, corrupt=0.33, dropout=0.3, mode="semi_malicious") == Parameters(19, 13)


def test_a_threshold_is_at_least_two_and_can_be_met() -> None:
    for cohort in range(3, 60):
        parameters = find(cohort, corrupt=0.0, dropout=0.2, mode="semi_honest")
        assert parameters.threshold == 2
        question = requirements_of(cohort, 0.0, 0.2, "semi_honest", 40, 20)
        bounds = {bounds.neighbours: bounds for bounds in threshold_bounds(question)}
        assert bounds[parameters.neighbours].most >= 2


def test_a_rate_means_the_decimal_that_it_prints_as() -> None:
    assert math.floor(0.29 * 100) == 28  # what a float makes of it
    question = requirements_of(100, 0.29, 0.57, "semi_honest", 40, 20)
    assert (question.adversaries, question.droppers) == (29, 57)
    assert requirements_of(10**6, 1e-05, 0, "semi_honest", 40, 20).adversaries == 10


def test_a_large_cohort_is_quick() -> None:
    search.cache_clear()
    start = time.process_time()
    find(10_000, corrupt=0.2, dropout=0.2, mode="semi_malicious")
    assert time.process_time() - start < 1  # hundredths of a second, in fact


def test_what_cannot_be_says_what_could() -> None:
    with pytest.raises(ImpossibleError, match=r"at least 7 .* only 6 are sure to stay; lower"):
        find(10, corrupt=0.33, dropout=0.3, mode="semi_malicious")
    find(10, corrupt=0.33, dropout=0.2, mode="semi_malicious")
    find(10, corrupt=0.1, dropout=0.3, mode="semi_malicious")
    find(50, corrupt=0.33, dropout=0.3, mode="semi_malicious")
    for cohort in (0, 1, 2):
        with pytest.raises(ImpossibleError, match="ask at least 3 devices"):
            find(cohort, corrupt=0.0, dropout=0.0, mode="semi_honest")
    with pytest.raises(ImpossibleError, match="may not connect them"):
        find(10**6, corrupt=0.0, dropout=0.99, mode="semi_honest")


TENTHS: dict[str, Any] = {"corrupt": 0.1, "dropout": 0.1, "mode": "semi_honest"}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"corrupt": 1.0}, "corrupt must be"),
        ({"corrupt": -0.1}, "corrupt must be"),
        ({"dropout": math.nan}, "dropout must be"),
        ({"mode": "malicious"}, "mode must be"),
        ({"security_bits": 0}, "security_bits must be"),
        ({"correctness_bits": 257}, "correctness_bits must be"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        find(100, **{**TENTHS, **wrong})
    with pytest.raises(SpecError, match=message):
        check(Parameters(22, 11), 100, **{**TENTHS, **wrong})


def test_too_many_devices_are_refused() -> None:
    assert find(LARGEST_COHORT, **TENTHS).neighbours < 100
    with pytest.raises(SpecError, match="cohort must be at most"):
        find(LARGEST_COHORT + 1, **TENTHS)


@pytest.mark.parametrize(
    ("neighbours", "threshold"), [(4, 1), (4, 5), (0, 0), (MOST_NEIGHBOURS + 1, 2)]
)
def test_parameters_check_themselves(neighbours: int, threshold: int) -> None:
    with pytest.raises(SpecError, match="threshold must be"):
        Parameters(neighbours, threshold)


@pytest.mark.parametrize(("cohort", "corrupt", "dropout", "mode", "expected"), list(cells()))
def test_a_device_accepts_what_is_needed_and_nothing_weaker(
    cohort: int, corrupt: float, dropout: float, mode: Mode, expected: Parameters
) -> None:
    rates: dict[str, Any] = {"corrupt": corrupt, "dropout": dropout, "mode": mode}
    check(expected, cohort, **rates)
    check(Parameters(expected.neighbours, expected.threshold + 1), cohort, **rates)
    if expected.threshold > 2:
        with pytest.raises(SpecError, match="threshold must be at least"):
            check(Parameters(expected.neighbours, expected.threshold - 1), cohort, **rates)
    fewer = expected.neighbours - 2
    with pytest.raises(SpecError, match="neighbours must be"):
        check(Parameters(fewer, min(expected.threshold, fewer)), cohort, **rates)


def test_a_device_accepts_what_protects_it_from_more() -> None:
    stronger = find(1000, corrupt=0.1, dropout=0.1, mode="semi_malicious")
    check(stronger, 1000, **TENTHS)
    check(find(1000, **TENTHS, security_bits=80), 1000, **TENTHS)
    with pytest.raises(SpecError, match="threshold must be at least"):
        check(find(1000, **TENTHS), 1000, **{**TENTHS, "mode": "semi_malicious", "dropout": 0.0})


def test_more_neighbours_need_a_higher_threshold() -> None:
    """Of 200 neighbours, 27 may well be corrupt, though of 48 they may not."""
    needed = find(1000, **TENTHS)
    with pytest.raises(SpecError, match="threshold must be at least"):
        check(Parameters(200, needed.threshold), 1000, **TENTHS)


def test_what_no_ring_has_is_refused() -> None:
    check(Parameters(99, 99), 100, **TENTHS)
    for neighbours in (41, 100):
        with pytest.raises(SpecError, match="neighbours must be"):
            check(Parameters(neighbours, neighbours), 100, **TENTHS)
    for neighbours in (10, 16, 18):
        with pytest.raises(SpecError, match="neighbours must be"):
            check(Parameters(neighbours, neighbours), 18, **TENTHS)


def test_with_more_neighbours_the_conditions_on_secrecy_only_tighten_or_hold() -> None:
    """What `check` relies on: connected stays so, and the least threshold never falls."""
    for mode in MODES:
        question = requirements_of(300, 0.1, 0.1, mode, 40, 20)
        bounds = list(threshold_bounds(question))
        assert sorted(bounds, key=lambda each: (each.connected, each.least)) == bounds


# Whoever drops out: `any_dropouts`.


@cache
def least_exceeded(
    cohort: int, marked: int, draws: int, bound: Fraction, *, strict: bool = False
) -> int:
    """The least number that the marked devices exceed with probability at most `bound`."""
    return next(
        most
        for most in range(draws + 1)
        if (tail := exceeds(cohort, marked, draws, most)) < bound or (tail == bound and not strict)
    )


def faults(
    cohort: int,
    adversaries: int,
    droppers: int,
    parameters: Parameters,
    mode: Mode,
    bits: int,
    lost: int,
) -> set[str]:
    """Which of the conditions of the module's docstring these parameters break, from scratch."""
    neighbours, threshold, window = parameters.neighbours, parameters.threshold, parameters.window
    half, risk = neighbours // 2, Fraction(1, 2 ** (bits + 1) * cohort)
    loss = Fraction(1, 2**lost * cohort)
    corrupt = least_exceeded(cohort, adversaries, neighbours, risk)
    dropped = least_exceeded(cohort, droppers, neighbours, loss, strict=True)
    broken = set()
    if threshold <= corrupt or (mode == "semi_malicious" and 2 * threshold <= corrupt + neighbours):
        broken.add("secret")
    if threshold > neighbours - dropped:
        broken.add("recoverable")
    if neighbours < cohort - 1:
        if window <= least_exceeded(cohort, adversaries, half, risk):
            broken.add("held together")
        if half - least_exceeded(cohort, droppers, half, loss, strict=True) < window:
            broken.add("lost by chance")
    return broken


ROUNDS = [
    (100, 10, 10, 80, 20),
    (1000, 100, 100, 80, 20),
    (1000, 50, 200, 40, 20),
    (10_000, 1_000, 1_000, 80, 20),
    (10_000, 500, 500, 40, 30),
    (200, 0, 40, 40, 20),
    (60, 3, 18, 80, 20),
    (50, 5, 0, 80, 20),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("cohort", "adversaries", "droppers", "bits", "lost"), ROUNDS)
def test_whoever_drops_out_the_conditions_hold_and_fewer_neighbours_break_one(
    cohort: int, adversaries: int, droppers: int, bits: int, lost: int, mode: Mode
) -> None:
    parameters = find(
        cohort,
        corrupt=adversaries / cohort,
        dropout=droppers / cohort,
        mode=mode,
        security_bits=bits,
        correctness_bits=lost,
        any_dropouts=True,
    )
    case = (cohort, adversaries, droppers)
    assert parameters.neighbours < cohort - 1
    assert faults(*case, parameters, mode, bits, lost) == set()
    risk = Fraction(1, 2 ** (bits + 1) * cohort)
    half = parameters.neighbours // 2
    assert exceeds(cohort, adversaries, half, parameters.window - 1) <= risk
    if parameters.window > 1:  # and it is the least
        assert exceeds(cohort, adversaries, half, parameters.window - 2) > risk
    fewer = parameters.neighbours - 2
    window = least_exceeded(cohort, adversaries, fewer // 2, risk) + 1
    for threshold in range(2, fewer + 1):
        assert faults(*case, Parameters(fewer, threshold, window), mode, bits, lost)
    if parameters.threshold > 2:
        lower = Parameters(parameters.neighbours, parameters.threshold - 1, parameters.window)
        assert "secret" in faults(*case, lower, mode, bits, lost)


def test_the_exact_tails_are_those_of_scipy() -> None:
    """To nine digits, the precision of its logarithms of factorials."""
    for cohort, marked, draws, limit in (
        (1000, 100, 64, 30),
        (100, 10, 21, 9),
        (10_000, 500, 40, 3),
    ):
        tail = stats.hypergeom.sf(limit, cohort, marked, draws)
        assert float(exceeds(cohort, marked, draws, limit)) == pytest.approx(tail, rel=1e-9)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cohort", [20, 21, 24, 30, 41])
def test_a_search_from_scratch_finds_the_same_whoever_drops_out(cohort: int, mode: Mode) -> None:
    for adversaries, droppers in itertools.product((0, 1, 3), (0, 2, 5)):
        for bits, lost in ((40, 20), (3, 2)):
            parameters = find(
                cohort,
                corrupt=(adversaries + 0.5) / cohort,
                dropout=(droppers + 0.5) / cohort,
                mode=mode,
                security_bits=bits,
                correctness_bits=lost,
                any_dropouts=True,
            )
            risk = Fraction(1, 2 ** (bits + 1) * cohort)
            windows = {
                neighbours: least_exceeded(cohort, adversaries, neighbours // 2, risk) + 1
                for neighbours in range(2, cohort - 1, 2)
            }
            good = (
                Parameters(neighbours, threshold, window)
                for neighbours, window in [*windows.items(), (cohort - 1, 0)]
                for threshold in range(2, neighbours + 1)
                if not faults(
                    cohort,
                    adversaries,
                    droppers,
                    Parameters(neighbours, threshold, window),
                    mode,
                    bits,
                    lost,
                )
            )
            assert parameters == next(good)


def test_where_all_are_neighbours_there_is_no_window() -> None:
    for cohort in range(5, COMPLETE_BELOW):
        parameters = find(cohort, **TENTHS, any_dropouts=True)
        assert parameters == Parameters(cohort - 1, parameters.threshold, 0)
        assert parameters == find(cohort, **TENTHS)
    crowded: dict[str, Any] = {"corrupt": 0.3, "dropout": 0.3, "mode": "semi_malicious"}
    parameters = find(24, **crowded, any_dropouts=True)
    assert (parameters.neighbours, parameters.window) == (23, 0)


@pytest.mark.parametrize(("window", "whole"), [(1, True), (2, True), (3, True), (0, False)])
def test_what_holds_together_is_in_one_piece_whoever_drops_out(window: int, whole: bool) -> None:
    """Ten on a ring, each with the three before and after it. For every set of corrupt devices with
    fewer than `window` in every run of three, and all survivors with `window` in every run, honest
    survivors are one piece. Without a window some are not."""
    cohort, reach = 10, 3
    runs = [frozenset((place + step) % cohort for step in range(reach)) for place in range(cohort)]
    sets = [
        frozenset(place for place in range(cohort) if number >> place & 1)
        for number in range(1 << cohort)
    ]
    fewest = {each: min(len(each & run) for run in runs) for each in sets}
    connected = [each for each in sets if fewest[each] >= window]
    corrupt = [
        each
        for each in sets
        if len(each) <= 3 and max(len(each & run) for run in runs) < max(window, 1)
    ]
    honest = {alive - bad for alive in connected for bad in corrupt}
    assert all(pieces(set(each), cohort, reach) <= 1 for each in honest) == whole


@pytest.mark.parametrize(("cohort", "adversaries", "droppers", "bits", "lost"), ROUNDS)
def test_the_threshold_alone_leaves_a_cut_to_more_corrupt_devices_than_a_neighbourhood_has(
    cohort: int, adversaries: int, droppers: int, bits: int, lost: int
) -> None:
    """Next to a gap of k/2 places stay k/2 neighbours and the corrupt ones in the gap, t in all, if
    its secrets are to be opened. So two gaps hold 2t − k > c corrupt devices on k places: for all
    pairs of gaps together that has probability at most cohort/4 · 2^−bits. The window is there for
    the factor; and where all corrupt devices may be neighbours, c = a, it is not needed at all."""
    parameters = find(
        cohort,
        corrupt=adversaries / cohort,
        dropout=droppers / cohort,
        mode="semi_malicious",
        security_bits=bits,
        correctness_bits=lost,
        any_dropouts=True,
    )
    risk = Fraction(1, 2 ** (bits + 1) * cohort)
    corrupt = least_exceeded(cohort, adversaries, parameters.neighbours, risk)
    needed = 2 * parameters.threshold - parameters.neighbours
    assert needed > corrupt
    pairs = Fraction(cohort * (cohort - parameters.neighbours - 1), 2)
    cut = pairs * exceeds(cohort, adversaries, parameters.neighbours, needed - 1)
    assert cut <= Fraction(cohort, 4 << bits)
    assert cut == 0 or corrupt < adversaries


# The committee of a round, which signs the survivors.


@pytest.mark.parametrize("absent", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("corrupt", "dropout"), [(0.05, 0.1), (0.1, 0.1), (0.1, 0.2), (0.0, 0.3)])
@pytest.mark.parametrize("cohort", [10, 24, 100, 1000, 10_000])
def test_a_committee_has_a_quorum_and_no_two(
    cohort: int, corrupt: float, dropout: float, absent: float
) -> None:
    """Two quorums q of k signers share 2q − k. More than those are corrupt with probability at most
    2^−81/n, and fewer than q stay with probability below 2^−20/n, of n that enrolled; with as many
    absent, of those that may drop out, as `absent` says. Exact, from binomial coefficients."""
    round = MaskedRound(
        task="0" * 64,
        cells=1,
        modulus_bits=8,
        cohort=cohort,
        corrupt=corrupt,
        dropout=dropout,
        mode="semi_malicious",
        nonce="0" * 32,
    )
    adversaries = math.floor(Fraction(str(corrupt)) * cohort)
    enrolled = cohort - math.floor(absent * (cohort - round.least_survivors))
    signers, quorum = round.parameters(enrolled).neighbours, round.quorum(enrolled)
    droppers = enrolled - round.least_survivors

    def two_quorums(quorum: int) -> Fraction:
        """The probability that enough signers are corrupt for two."""
        return exceeds(enrolled, adversaries, signers, 2 * quorum - signers - 1)

    assert two_quorums(quorum) <= Fraction(1, enrolled << 81)
    assert exceeds(enrolled, droppers, signers, signers - quorum) < Fraction(1, enrolled << 20)
    if adversaries > 1:  # a majority would not do, nor a quorum that is one lower
        assert two_quorums(signers // 2 + 1) > Fraction(1, enrolled << 81)
        assert two_quorums(quorum - 1) > Fraction(1, enrolled << 81)
