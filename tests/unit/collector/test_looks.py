"""Many questions to the store share a thread and a transaction, and not their problems."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sfumato.collector.looks import Looks
from sfumato.collector.problems import Problem
from sfumato.collector.store.store import Store, Transaction
from sfumato.errors import StoreError


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store.open(tmp_path / "collector.db")
    store.migrate()
    yield store
    store.close()


class Counted:
    """Runs calls in a thread, and counts them."""

    def __init__(self) -> None:
        self.calls = 0

    async def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self.calls += 1
        return await asyncio.to_thread(function, *arguments)


def test_who_asks_meanwhile_shares_the_next_transaction(store: Store) -> None:
    call, seen = Counted(), set[int]()

    def ask(number: int) -> Callable[[Transaction], int]:
        def question(tx: Transaction) -> int:
            seen.add(id(tx))
            return number + len(tx.studies())

        return question

    async def run() -> list[int]:
        looks = Looks(store, call)
        return await asyncio.gather(*(looks.look(ask(number)) for number in range(100)))

    assert asyncio.run(run()) == list(range(100))
    assert call.calls <= 2


def test_a_problem_is_that_of_who_asked(store: Store) -> None:
    def wrong(tx: Transaction) -> int:
        raise Problem("unknown-round")

    async def run() -> list[Any]:
        looks = Looks(store, Counted())
        asked = [looks.look(wrong), looks.look(lambda tx: len(tx.studies()))]
        return await asyncio.gather(*asked, return_exceptions=True)

    problem, found = asyncio.run(run())
    assert isinstance(problem, Problem)
    assert found == 0


def test_a_store_that_fails_is_told_to_everybody_and_asked_again(store: Store) -> None:
    async def run() -> None:
        looks = Looks(store, Counted())
        closed = [
            looks.look(lambda tx: tx.set_task_state("0" * 64, "done", expected=["open"]))
            for _ in range(3)
        ]
        failed = await asyncio.gather(*closed, return_exceptions=True)
        assert all(isinstance(each, StoreError) for each in failed)
        assert await looks.look(lambda tx: len(tx.studies())) == 0

    asyncio.run(run())


def test_who_leaves_is_no_trouble_to_others(store: Store) -> None:
    begun, go = threading.Event(), threading.Event()

    def slow(tx: Transaction) -> int:
        begun.set()
        assert go.wait(10)
        return 1

    async def run() -> int:
        looks = Looks(store, Counted())
        leaving = asyncio.create_task(looks.look(slow))
        await asyncio.to_thread(begun.wait, 10)
        staying = asyncio.create_task(looks.look(lambda tx: 2))
        leaving.cancel()
        await asyncio.sleep(0)
        go.set()
        return await staying

    assert asyncio.run(run()) == 2
