"""Each figure and table of the papers as a command.

A figure is declared as data, an `Experiment`, and `runner` turns it into an `Outcome`: the numbers,
the picture, and for each claim of the paper whether it holds here. `sfumato reproduce NAME` runs
one and writes all three. There is one package per paper: `data` has the devices' data, `runs` a
single run, and `figures` the experiments, their claims and a table `FIGURES`. To add a figure, add
an experiment and a line in that table.
"""

from __future__ import annotations

from collections.abc import Mapping

from sfumato.reproduce.runner import Claim, Figure, Outcome, Progress, Scale

__all__ = ["Claim", "Figure", "Outcome", "Progress", "Scale", "figures"]


def figures() -> Mapping[str, Figure]:
    """Every figure by name."""
    from sfumato.reproduce.diffsketch import figures as diffsketch
    from sfumato.reproduce.frequencies import figures as frequencies
    from sfumato.reproduce.heavy_hitters import figures as heavy_hitters
    from sfumato.reproduce.learning import figures as learning
    from sfumato.reproduce.local import figures as local

    papers = (frequencies, heavy_hitters, learning, diffsketch, local)
    return {figure.name: figure for paper in papers for figure in paper.FIGURES}
