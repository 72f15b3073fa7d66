"""A sum over shards does not depend on the workers; few shards are in memory at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sfumato.engines import LocalEngine

I64 = npt.NDArray[np.int64]


@pytest.mark.parametrize("workers", [1, 2, 7])
@settings(deadline=None, max_examples=25)
@given(shards=st.lists(st.integers(0, 9), max_size=30))
def test_the_sum_does_not_depend_on_the_workers(workers: int, shards: list[int]) -> None:
    def one_hot(shard: int) -> I64:
        row: I64 = np.eye(10, dtype=np.int64)[shard]
        return row

    total = LocalEngine(workers).sum(one_hot, shards)
    if not shards:
        assert total is None
    else:
        assert total is not None
        assert np.array_equal(total, np.bincount(shards, minlength=10))


def test_few_shards_are_held_at_a_time() -> None:
    """At most one per worker and one more."""
    lock, active, most = threading.Lock(), 0, 0

    def shards() -> Iterator[int]:
        nonlocal active, most
        for number in range(50):
            with lock:
                active += 1
                most = max(most, active)
            yield number

    def function(shard: int) -> I64:
        nonlocal active
        with lock:
            active -= 1
        return np.array([shard])

    total = LocalEngine(2).sum(function, shards())
    assert total is not None
    assert total.tolist() == [sum(range(50))]
    assert most <= 4


def test_the_parts_are_not_changed() -> None:
    parts = [np.array([1, 2]), np.array([3, 4])]
    total = LocalEngine(1).sum(lambda part: part, parts)
    assert total is not None
    assert total.tolist() == [4, 6]
    assert [part.tolist() for part in parts] == [[1, 2], [3, 4]]


@pytest.mark.parametrize("workers", [1, 3])
def test_an_error_in_a_shard_is_raised(workers: int) -> None:
    def function(shard: int) -> I64:
        if shard == 5:
            raise ValueError("shard five")
        return np.array([shard])

    with pytest.raises(ValueError, match="shard five"):
        LocalEngine(workers).sum(function, range(10))


def test_an_error_in_the_source_of_shards_is_raised() -> None:
    def shards() -> Iterator[int]:
        yield 1
        raise OSError("the file ended")

    with pytest.raises(OSError, match="the file ended"):
        LocalEngine(2).sum(lambda shard: np.array([shard]), shards())


def test_there_is_a_worker_for_every_core_unless_said_otherwise() -> None:
    assert LocalEngine().workers >= 1
    assert LocalEngine(3).workers == 3
