"""The ring follows from its seed, every order is equally likely, and neighbours are mutual."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks import SEED, assert_chi_square
from sfumato.errors import SpecError
from sfumato.secagg.agreement import WORD_BITS, Ring, permutation, shuffle, stream_words
from sfumato.secagg.parameters import LARGEST_COHORT

SEEDS = 20_000
GOLDEN = (1, 11, 3, 4, 2, 10, 6, 0, 5, 9, 8, 7)  # of the 32 bytes 0, 1, 2, …


def followed(seed: bytes, cohort: int) -> list[int]:
    """The order as another language would work it out from the description."""
    stream = hashlib.shake_128(b"sfumato/1/secagg/ring/" + seed).digest(40 * cohort + 40)
    order, at = [*range(cohort)], 0
    for place in reversed(range(1, cohort)):
        while True:
            word, at = int.from_bytes(stream[at : at + 4], "little"), at + 4
            if word < 2**32 // (place + 1) * (place + 1):
                break
        other = word % (place + 1)
        order[place], order[other] = order[other], order[place]
    return order


@given(st.binary(max_size=80), st.integers(1, 200))
def test_the_order_follows_from_the_description(seed: bytes, cohort: int) -> None:
    assert list(permutation(seed, cohort)) == followed(seed, cohort)


def test_the_order_is_golden() -> None:
    assert permutation(bytes(range(32)), 12) == GOLDEN
    assert permutation(b"", 1) == (0,)


@pytest.mark.parametrize(("cohort", "bits"), [(2, 1), (3, 2), (4, 2), (4, 3), (5, 3)])
def test_every_order_comes_from_as_many_sequences_of_words(cohort: int, bits: int) -> None:
    """All sequences of words that are taken, one for each place: each order has its equal part."""
    span = 1 << bits
    ranges = [range(span - span % (place + 1)) for place in range(cohort - 1, 0, -1)]
    orders = Counter(shuffle(iter(words), cohort, bits) for words in itertools.product(*ranges))
    assert orders.keys() == set(itertools.permutations(range(cohort)))
    assert len(set(orders.values())) == 1


def test_words_that_would_favour_some_orders_are_skipped() -> None:
    largest = 2**WORD_BITS - 1  # 2**32 is one more than a multiple of 3
    assert shuffle(iter([largest, largest, 1, 0]), 3) == shuffle(iter([1, 0]), 3)
    assert shuffle(iter([largest - 1, 0]), 3) == shuffle(iter([2, 0]), 3)


def test_the_stream_goes_on_where_it_stopped() -> None:
    words = itertools.islice(stream_words(b"seed", 1), 100)
    data = b"".join(word.to_bytes(4, "little") for word in words)
    assert data == hashlib.shake_128(b"sfumato/1/secagg/ring/seed").digest(400)


def counts_of_orders(draws: int, skewed: bool) -> list[int]:
    counts = Counter(
        permutation(f"{SEED}/{draw}".encode(), 4) if not skewed or draw % 10 else (0, 1, 2, 3)
        for draw in range(draws)
    )
    return [counts[order] for order in itertools.permutations(range(4))]


def test_seeds_give_every_order_as_often() -> None:
    """False alarm 1e-6 (chi-square over 24 orders of 20 000)."""
    assert_chi_square(counts_of_orders(SEEDS, skewed=False), [1 / 24] * 24)


def test_one_favoured_order_is_noticed() -> None:
    """Power: one order in a tenth more of the draws is missed with probability below 1e-100."""
    with pytest.raises(AssertionError, match="chi-square"):
        assert_chi_square(counts_of_orders(SEEDS, skewed=True), [1 / 24] * 24)


@st.composite
def rings(draw: st.DrawFn) -> Ring:
    cohort = draw(st.integers(2, 60))
    degrees = [*range(2, cohort, 2), cohort - 1]
    return Ring.draw(draw(st.binary(max_size=32)), cohort, degree=draw(st.sampled_from(degrees)))


@given(rings())
def test_neighbours_are_mutual_equally_many_and_never_oneself(ring: Ring) -> None:
    members = range(len(ring.order))
    neighbours = [ring.neighbours(member) for member in members]
    for member in members:
        assert len(neighbours[member]) == ring.degree
        assert neighbours[member] == sorted(set(neighbours[member]) - {member})
        assert all(member in neighbours[other] for other in neighbours[member])


@given(rings())
def test_neighbours_stand_nearest_on_the_ring(ring: Ring) -> None:
    cohort = len(ring.order)
    for place, member in enumerate(ring.order):
        near = [
            other
            for there, other in enumerate(ring.order)
            if 0 < min((place - there) % cohort, (there - place) % cohort) <= (ring.degree + 1) // 2
        ]
        assert ring.neighbours(member) == sorted(near)


@pytest.mark.parametrize(("cohort", "degree"), [(7, 2), (8, 4), (10, 6), (6, 5)])
def test_fewer_than_degree_missing_devices_do_not_cut_the_ring(cohort: int, degree: int) -> None:
    ring = Ring.draw(b"any", cohort, degree=degree)
    for missing in itertools.combinations(range(cohort), degree - 1):
        left = set(range(cohort)) - set(missing)
        edge = [left.pop()]
        while edge:
            near = set(ring.neighbours(edge.pop())) & left
            left -= near
            edge.extend(near)
        assert not left


def test_the_ring_of_a_seed_has_its_order() -> None:
    assert Ring.draw(b"seed", 30, degree=4) == Ring(permutation(b"seed", 30), 4)


@pytest.mark.parametrize("order", [(0, 1, 1), (1, 2, 3), (0, 1, -1), (0, 2)])
def test_an_order_that_is_none_is_refused(order: tuple[int, ...]) -> None:
    with pytest.raises(SpecError, match="order must hold"):
        Ring(order, 2)


@pytest.mark.parametrize("degree", [-2, 0, 1, 3, 6, 8])
def test_a_degree_that_no_ring_has_is_refused(degree: int) -> None:
    with pytest.raises(SpecError, match="degree must be"):
        Ring(tuple(range(6)), degree)


def test_who_is_no_member_is_refused() -> None:
    for member in (-1, 5):
        with pytest.raises(SpecError, match="member must be"):
            Ring(tuple(range(5)), 2).neighbours(member)
    for cohort in (0, LARGEST_COHORT + 1):
        with pytest.raises(SpecError, match="cohort must be"):
            permutation(b"", cohort)
