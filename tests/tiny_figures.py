"""Every figure of the papers, small enough to take seconds, and without data files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial

import torch

from sfumato.learn.data import Clients, Federated
from sfumato.reproduce import Claim, figures
from sfumato.reproduce.diffsketch import figures as diffsketch
from sfumato.reproduce.diffsketch.data import TABLE_1 as COINS
from sfumato.reproduce.diffsketch.data import Size, Task
from sfumato.reproduce.diffsketch.figures import Extent
from sfumato.reproduce.frequencies import figures as frequencies
from sfumato.reproduce.heavy_hitters import figures as heavy_hitters
from sfumato.reproduce.learning import figures as learning
from sfumato.reproduce.learning.data import TABLE_1, Workload
from sfumato.reproduce.learning.figures import Slack
from sfumato.reproduce.runner import Experiment

EXAMPLES, WIDTH = 6, 9


def made_up_clients(clients: int) -> Federated:
    """Three classes of numbers around three centres."""
    generator = torch.Generator().manual_seed(1)
    count = clients * EXAMPLES
    targets = torch.arange(2 * count) % 3
    inputs = torch.randn(2 * count, WIDTH, generator=generator) + 3 * torch.eye(WIDTH)[targets]
    offsets = torch.arange(clients + 1) * EXAMPLES
    train = Clients(inputs=inputs[:count], targets=targets[:count], offsets=offsets)
    return Federated(
        train=train, test_inputs=inputs[count:], test_targets=targets[count:], name="made up"
    )


CLIENTS = 20  # of paper 002
WORKLOAD = Workload(
    name="three centres",
    stands_for="nothing",
    load=partial(made_up_clients, CLIENTS),
    model="softmax",
    inputs=WIDTH,
    classes=3,
    cohort=10,
    rounds=3,
    learning_rate=0.5,
    batch=3,
    clip=1.0,
    server_learning_rate=0.5,
    first=10,
)
TRAININGS = learning.Size(
    workloads=(WORKLOAD,),
    multipliers=((1.0, 3.0),),
    rates=(2.0, 8.0),
    repeats=2,
    slack=Slack(share=0.02, errors=2.0),
)
PRINTED = replace(  # without the multipliers whose epsilon takes longest
    TABLE_1,
    multipliers=TABLE_1.multipliers[2:],
    accuracy={row: values[2:] for row, values in TABLE_1.accuracy.items()},
    rate={row: values[2:] for row, values in TABLE_1.rate.items()},
)
TASK = Task(
    name="three centres",
    load=partial(made_up_clients, 10),
    model="softmax",
    parameters=30,
    inputs=WIDTH,
    classes=3,
    clients=10,
    cohort=10,
    rounds=12,
    learning_rate=0.5,
    steps=1,
    clip=0.5,
)
SOME = replace(TASK, name="some of three centres", cohort=2)
SKETCH = Size(3, 4)
EXTENT = Extent(tasks=(TASK,), sizes=((SKETCH,),), repeats=2)
Frequencies, HeavyHitters = frequencies.Size, heavy_hitters.Size

EXPERIMENTS: Mapping[str, Callable[[], Experiment]] = {
    "000-fig1": lambda: frequencies.figure_1(
        Frequencies(repeats=1, widths=(100,), targets=(0.0012, 0.02))
    ),
    "000-fig2": lambda: frequencies.figure_2(Frequencies(repeats=2, widths=(50, 1000))),
    # Three seeds, for which the bands of its claims were computed.
    "000-fig3": lambda: frequencies.figure_3(Frequencies(repeats=3, widths=(200, 600, 1200))),
    "001-fig1": lambda: heavy_hitters.figure_2(HeavyHitters(repeats=1, along=(5_000,), rows=(5,))),
    "001-fig2": lambda: heavy_hitters.figure_2(
        HeavyHitters(repeats=2, along=(2_000, 5_000), rows=(5,))
    ),
    "001-fig3": lambda: heavy_hitters.figure_3(HeavyHitters(repeats=1, along=(4, 10), rows=(5,))),
    "001-table1": lambda: heavy_hitters.table_1(HeavyHitters(repeats=1, along=(1, 4))),
    "001-fig4": lambda: heavy_hitters.figure_4(HeavyHitters(repeats=1, along=(1, 20), rows=(5,))),
    "002-fig1": lambda: learning.figure_1(
        replace(
            TRAININGS,
            workloads=(WORKLOAD, replace(WORKLOAD, name="three centres again")),
            multipliers=((1.0, 3.0),) * 2,
        )
    ),
    "002-fig2": lambda: learning.figure_2(TRAININGS),
    "002-table1": lambda: learning.table(1, PRINTED, TRAININGS),
    "002-table2": lambda: learning.table(2, PRINTED, replace(TRAININGS, repeats=1)),
    "002-table3": lambda: learning.table(3, PRINTED, replace(TRAININGS, repeats=1)),
    "003-fig2": lambda: diffsketch.figure_2(
        replace(EXTENT, tasks=(SOME,), sizes=(), rows=COINS[:1])
    ),
    "003-fig3": lambda: diffsketch.against_noise(3, EXTENT),
    "003-fig4": lambda: diffsketch.against_noise(4, replace(EXTENT, tasks=(SOME,), repeats=1)),
    "003-fig5": lambda: diffsketch.figure_5(
        Extent(tasks=(TASK, SOME), sizes=((Size(3, 5), SKETCH), (SKETCH, Size(3, 3))), repeats=1)
    ),
    "003-fig6": lambda: diffsketch.figure_6(
        Extent(tasks=(TASK,), sizes=((SKETCH, Size(3, 2)),), repeats=1)
    ),
    "003-fig9": lambda: diffsketch.figure_9(
        replace(EXTENT, sizes=((Size(3, 2),),), targets=(1.0, 0.5), repeats=1)
    ),
    **{  # at small scale
        name: partial(figure.experiment, figure.small)
        for name, figure in figures().items()
        if name.startswith("004")
    },
}


def only(claims: Iterable[Claim], *words: str) -> Claim:
    """The one claim with all these words."""
    (claim,) = [claim for claim in claims if all(word in claim.text for word in words)]
    return claim
