"""Limits on clients: rates by a given clock, and bytes in use."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sfumato.collector.http.limits import Bucket, Room, Turnstile
from sfumato.collector.problems import Problem


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def takes(bucket: Bucket, count: int) -> bool:
    try:
        bucket.take(count)
    except Problem:
        return False
    return True


def test_a_burst_passes_and_then_the_rate() -> None:
    clock = Clock()
    bucket = Bucket(10, burst=30, now=clock)
    assert takes(bucket, 30)
    assert not takes(bucket, 1)
    clock.now = 0.5
    assert takes(bucket, 5)
    assert not takes(bucket, 1)
    clock.now = 100.0
    assert takes(bucket, 30)
    assert not takes(bucket, 1)


def test_a_refusal_says_when_to_come_again() -> None:
    clock = Clock()
    bucket = Bucket(10, burst=30, now=clock)
    bucket.take(30)
    with pytest.raises(Problem) as caught:
        bucket.take(25)
    assert caught.value.retry_after_seconds == 3
    clock.now = 3.0
    assert takes(bucket, 25)


def test_what_can_never_pass_is_too_large() -> None:
    bucket = Bucket(10, burst=30, now=Clock())
    with pytest.raises(Problem, match="larger") as caught:
        bucket.take(31)
    assert caught.value.code == "too-large"
    assert "30 reports at once" in str(caught.value.hint)
    assert takes(bucket, 30)


def test_the_first_burst_may_be_smaller() -> None:
    clock = Clock()
    bucket = Bucket(0.5, burst=30, now=clock, first=3)
    assert takes(bucket, 3)
    assert not takes(bucket, 1)
    clock.now = 60.0
    assert takes(bucket, 30)


def test_without_a_rate_everything_passes() -> None:
    bucket = Bucket(None, burst=1)
    assert all(takes(bucket, 10**9) for _ in range(10))


@given(
    st.lists(
        st.tuples(st.floats(0, 5), st.integers(1, 40)),
        max_size=50,
    )
)
def test_no_more_passes_than_the_rate_and_the_burst_allow(
    attempts: list[tuple[float, int]],
) -> None:
    clock, passed = Clock(), 0
    bucket = Bucket(10, burst=30, now=clock)
    for later, count in attempts:
        clock.now += later
        passed += count * takes(bucket, count)
        assert passed <= 30 + 10 * clock.now + 1e-6


def test_a_turnstile_admits_requests_in_order_as_they_fit() -> None:
    async def run() -> None:
        turnstile, order = Turnstile(100), list[int]()
        leave = [asyncio.Event() for _ in range(4)]

        async def enter(number: int, size: int) -> None:
            async with turnstile.enter(size, seconds=20):
                order.append(number)
                await leave[number].wait()

        tasks = [
            asyncio.create_task(enter(number, size)) for number, size in enumerate((60, 40, 50, 10))
        ]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert order == [0, 1]
        leave[1].set()
        await tasks[1]
        await asyncio.sleep(0)
        assert order == [0, 1]  # the last would fit, but comes after the third
        leave[0].set()
        await tasks[0]
        for _ in range(3):
            await asyncio.sleep(0)
        assert order == [0, 1, 2, 3]
        for event in leave:
            event.set()
        await asyncio.gather(*tasks)

    asyncio.run(run())


def test_a_turnstile_does_not_wait_for_ever_and_notices_cancelled_requests() -> None:
    async def run() -> None:
        turnstile = Turnstile(100)
        async with turnstile.enter(1_000, seconds=20):  # one always fits
            async with turnstile.enter(10, seconds=0.01):
                pass  # it was late
            leaving = asyncio.create_task(_stay(turnstile))
            await asyncio.sleep(0.01)
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
        async with asyncio.timeout(20), turnstile.enter(100, seconds=60):
            pass  # the others take nothing any more

    asyncio.run(run())


async def _stay(turnstile: Turnstile) -> None:
    async with turnstile.enter(10, seconds=60):
        await asyncio.sleep(60)


def test_nobody_can_take_all_the_room() -> None:
    room = Room(120)
    for who, share in (("a", 60), ("b", 30), ("c", 15)):
        while room.has_room(who, 1):
            room.take(who, 1)
            share -= 1
        assert share == 0
    room.give_back("a", 60)
    assert room.has_room("d", 30)
