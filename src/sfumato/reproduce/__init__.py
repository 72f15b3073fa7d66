"""Each figure and table of the papers as a command.

A figure's module makes an `Outcome`: the numbers, the picture, and for each claim of the paper
whether it holds here. `sfumato reproduce NAME` runs one and writes all three.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Scale = Literal["small", "paper"]
Progress = Callable[[str, float], None]  # what is being done, and which part of the whole is


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A statement of the paper, and whether it holds here."""

    text: str
    holds: bool
    detail: str  # the numbers behind it


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a figure gave."""

    numbers: Sequence[Mapping[str, Any]]  # one JSON line each
    claims: Sequence[Claim]
    draw: Callable[[], Any]  # makes the matplotlib figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure or table of a paper that can be made again."""

    name: str
    title: str
    run: Callable[[Scale, Progress], Outcome]


def figures() -> Mapping[str, Figure]:
    """Every figure by name."""
    from sfumato.reproduce.diffsketch import figures as diffsketch_figures
    from sfumato.reproduce.frequencies import figures as frequency_figures
    from sfumato.reproduce.heavy_hitters import figures as heavy_figures
    from sfumato.reproduce.learning import figures as learning_figures
    from sfumato.reproduce.local import figures as local_figures

    every = (
        *frequency_figures.FIGURES,
        *heavy_figures.FIGURES,
        *learning_figures.FIGURES,
        *diffsketch_figures.FIGURES,
        *local_figures.FIGURES,
    )
    return {figure.name: figure for figure in every}
