"""Outcomes of tiny figures, each made once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sfumato.reproduce import Outcome
from sfumato.reproduce.runner import conduct
from tiny_figures import EXPERIMENTS

Make = Callable[[str], tuple[Outcome, list[tuple[str, float]]]]


@pytest.fixture(scope="session")
def no_files(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder without data files, as on a machine that has only the project."""
    return str(tmp_path_factory.mktemp("empty"))


@pytest.fixture(scope="session")
def make_figure(no_files: str) -> Make:
    """A tiny figure by name, and the reports of its progress."""
    outcomes: dict[str, tuple[Outcome, list[tuple[str, float]]]] = {}

    def make(name: str) -> tuple[Outcome, list[tuple[str, float]]]:
        if name not in outcomes:
            stages: list[tuple[str, float]] = []
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("SFUMATO_DATA", no_files)
                experiment = EXPERIMENTS[name]()
                outcome = conduct(
                    name, experiment, lambda stage, share: stages.append((stage, share))
                )
            outcomes[name] = outcome, stages
        return outcomes[name]

    return make


@pytest.fixture(scope="session")
def outcome_of(make_figure: Make) -> Callable[[str], Outcome]:
    """A tiny figure by name."""
    return lambda name: make_figure(name)[0]
