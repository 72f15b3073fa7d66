"""Answers to members: one read for simultaneous requests, and none older than the last change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from masking import Masking, devices, go, masking, parts
from sfumato.collector.problems import Problem
from sfumato.collector.worker.round_cache import CachedAnswer, RoundCache
from sfumato.device import Http
from sfumato.secagg.coordinator import Phase

COUNT = 12


class CallCounter:
    """Runs calls in a thread, and counts them."""

    def __init__(self) -> None:
        self.calls = 0

    async def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self.calls += 1
        return await asyncio.to_thread(function, *arguments)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Masking]:
    """A round in which all members have enrolled."""
    with masking(tmp_path) as stage:
        stage.create(COUNT)
        with devices(stage, COUNT) as fleet, Http(stage.collector.address) as send:
            members = parts(fleet, stage.clock)
            for _ in range(2):
                for part in members:
                    go(part, send)
                stage.work()
        yield stage


def round_id(stage: Masking) -> str:
    with stage.collector.store.reading() as tx:
        (only,) = tx.active_rounds()
    return only


def test_simultaneous_requests_share_one_read_until_something_changes(stage: Masking) -> None:
    call = CallCounter()

    async def run() -> list[CachedAnswer]:
        rounds = RoundCache(stage.collector.store, call)
        spec = (await rounds.find(round_id(stage))).spec
        call.calls = 0
        requests = [rounds.answer(spec, Phase.SHARE, number=1) for _ in range(50)]
        answers = await asyncio.gather(*requests)
        answers.append(await rounds.answer(spec, Phase.SHARE, number=1))
        assert call.calls == 1
        answers.append(await rounds.answer(spec, Phase.SHARE, number=2))
        assert call.calls == 2
        return answers

    answers = asyncio.run(run())
    assert len({answer.message(0) for answer in answers}) == 1
    with pytest.raises(Problem, match="late"):
        answers[0].message(COUNT)  # not a member


def test_a_phase_that_has_not_begun_is_read_each_time(stage: Masking) -> None:
    call = CallCounter()

    async def run() -> None:
        rounds = RoundCache(stage.collector.store, call)
        spec = (await rounds.find(round_id(stage))).spec
        call.calls = 0
        for _ in range(3):
            answer = await rounds.answer(spec, Phase.MASK, number=1)
            assert answer.message(0) is None
        assert call.calls == 3

    asyncio.run(run())


def test_all_members_learn_that_a_round_is_over(stage: Masking) -> None:
    async def run() -> None:
        rounds = RoundCache(stage.collector.store, CallCounter())
        spec = (await rounds.find(round_id(stage))).spec
        with stage.collector.store.transaction() as tx:
            tx.end_round(spec.nonce, "aborted", "too few")
        for _ in range(2):
            requests = [rounds.answer(spec, Phase.SHARE, number=1) for _ in range(3)]
            for problem in await asyncio.gather(*requests, return_exceptions=True):
                assert isinstance(problem, Problem)
                assert problem.code == "round-aborted"

    asyncio.run(run())
