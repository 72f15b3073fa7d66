"""A collector with its dashboard for the tests of a module, and people who visit it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import browsing
from browsing import Stage
from service.dashboard.visiting import Visitor, sign_in_as


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with browsing.open_stage(tmp_path_factory.mktemp("collector"), budget_epsilon=8.0) as stage:
        yield stage


@pytest.fixture
def stranger(stage: Stage) -> Iterator[Visitor]:
    visitor = Visitor(stage)
    yield visitor
    visitor.close()


@pytest.fixture
def analyst(stage: Stage) -> Iterator[Visitor]:
    visitor = sign_in_as(stage, "analyst")
    yield visitor
    visitor.close()


@pytest.fixture
def admin(stage: Stage) -> Iterator[Visitor]:
    visitor = sign_in_as(stage)
    yield visitor
    visitor.close()
