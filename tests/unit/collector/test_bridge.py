"""What a thread resolves reaches the loop: all of it, and many with one wake-up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from sfumato.collector.bridge import Bridge
from sfumato.errors import StoreFull


def test_every_result_arrives_whichever_thread_it_comes_from() -> None:
    async def run() -> list[int]:
        bridge = Bridge(lambda: None)
        futures: list[Future[int]] = [Future() for _ in range(2_000)]
        waiting = [asyncio.ensure_future(bridge.result(future)) for future in futures]
        await asyncio.sleep(0)  # they wait now

        def resolve(first: int) -> None:
            for number in range(first, len(futures), 4):
                futures[number].set_result(number)

        threads = [threading.Thread(target=resolve, args=(first,)) for first in range(4)]
        for thread in threads:
            thread.start()
        async with asyncio.timeout(20):
            results = await asyncio.gather(*waiting)
        for thread in threads:
            thread.join()
        return results

    assert asyncio.run(run()) == list(range(2_000))


def test_one_that_was_resolved_before_is_there_at_once_and_an_error_is_raised() -> None:
    async def run() -> None:
        bridge = Bridge(lambda: None)
        done, failed = Future[bool](), Future[bool]()
        done.set_result(True)
        failed.set_exception(StoreFull("no room"))
        async with asyncio.timeout(20):
            assert await bridge.result(done)
            with pytest.raises(StoreFull, match="no room"):
                await bridge.result(failed)

    asyncio.run(run())


def test_results_that_come_together_wake_the_loop_once() -> None:
    async def run() -> int:
        loop, bridge = asyncio.get_running_loop(), Bridge(lambda: None)
        futures: list[Future[bool]] = [Future() for _ in range(100)]
        waiting = [asyncio.ensure_future(bridge.result(future)) for future in futures]
        await asyncio.sleep(0)
        woken, wake = [], loop.call_soon_threadsafe

        def counted(*arguments: object) -> object:
            woken.append(arguments)
            return wake(*arguments)  # type: ignore[arg-type]  # as they were given

        loop.call_soon_threadsafe = counted  # type: ignore[assignment,method-assign]
        for future in futures:  # while the loop is here, and looks at nothing
            future.set_result(True)
        assert all(await asyncio.gather(*waiting))
        return len(woken)

    assert asyncio.run(run()) == 1


def test_the_thread_is_woken_once_for_all_that_the_loop_had_to_do() -> None:
    async def run() -> list[int]:
        futures: list[Future[bool]] = [Future() for _ in range(100)]
        asked: list[int] = []
        woken: list[int] = []

        def wake() -> None:
            woken.append(len(asked))
            for future in futures[: len(asked)]:
                if not future.done():
                    future.set_result(True)

        bridge = Bridge(wake)

        async def ask(number: int) -> bool:
            asked.append(number)
            return await bridge.result(futures[number])

        async with asyncio.timeout(20):
            assert all(await asyncio.gather(*(ask(number) for number in range(60))))
            assert all(await asyncio.gather(*(ask(number) for number in range(60, 100))))
        return woken

    assert asyncio.run(run()) == [60, 100]


def test_nobody_waits_for_one_that_was_given_up_and_it_is_cancelled() -> None:
    async def run() -> tuple[bool, bool]:
        bridge = Bridge(lambda: None)
        given_up, kept = Future[bool](), Future[bool]()
        waiting = [asyncio.ensure_future(bridge.result(each)) for each in (given_up, kept)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting[0]
        kept.set_result(True)
        return given_up.cancelled(), await waiting[1]

    assert asyncio.run(run()) == (True, True)


def test_a_loop_that_has_ended_is_told_nothing_and_harms_nobody() -> None:
    told: list[int] = []

    async def begin() -> Callable[[int], None]:
        return Bridge(lambda: None).bring(told.append)

    tell = asyncio.run(begin())
    tell(1)  # in a thread that outlives the loop, as a worker's does
    assert told == []
