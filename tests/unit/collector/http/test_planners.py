"""Plans that take long, or fail, do not disturb others."""

from __future__ import annotations

import asyncio
import threading

import pytest

from sfumato.collector.http.service import Planners
from sfumato.collector.problems import Problem
from sfumato.errors import ImpossibleError, StudyError


def test_a_plan_is_made_and_its_errors_are_raised() -> None:
    def refuse() -> None:
        raise StudyError("there is no such study")

    async def ask() -> None:
        planners = Planners(most=1)
        assert await planners.call(divmod, 7, 2) == (3, 1)
        with pytest.raises(StudyError, match="no such study"):
            await planners.call(refuse)
        assert await planners.call(divmod, 7, 2) == (3, 1)

    asyncio.run(ask())


@pytest.mark.parametrize("error", [OverflowError, ZeroDivisionError, IndexError, MemoryError])
def test_extreme_numbers_make_a_study_impossible(error: type[Exception]) -> None:
    def overflow() -> None:
        raise error

    with pytest.raises(ImpossibleError, match="no plan"):
        asyncio.run(Planners().call(overflow))


def test_a_request_that_comes_while_others_plan_must_come_again() -> None:
    gate = threading.Event()

    async def ask() -> None:
        planners = Planners(most=2)
        waiting = [asyncio.ensure_future(planners.call(gate.wait, 20)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Problem, match="being planned") as raised:
            await planners.call(divmod, 7, 2)
        assert (raised.value.status, raised.value.retry_after_seconds) == (429, 10)
        waiting[0].cancel()  # the client has left; the plan goes on
        gate.set()
        assert await waiting[1]
        while True:
            try:
                assert await planners.call(divmod, 7, 2) == (3, 1)
                break
            except Problem:  # the other thread has not ended yet
                await asyncio.sleep(0.01)

    asyncio.run(ask())
