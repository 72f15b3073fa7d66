"""`simulate` on whole studies: processor seconds and memory beside the plan's predictions.

Each study is planned and simulated in a fresh process, whose largest memory is measured. The
process simulates once before it is timed, so that loops are compiled. Rates of simulations in
`sfumato.questions.costs` come from here, and were chosen on other sizes of the same questions.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.lines import ROOT, Line, Settings, line, markdown
from benchmarks.speed.server import TINY, WITHIN, Case, label_of, training, values
from benchmarks.speed.simulate import peak_bytes
from sfumato import Plan, simulate, train
from sfumato.learn import models
from sfumato.learn.data import Federated
from sfumato.planning import compare, plan
from sfumato.study import Study

NAME = "studies"
LENGTH = 80  # symbols of an example, as plans assume for char_lstm
NUMBERS = ("simulate_seconds", "simulate_bytes")
SKETCHED = training("mlp", devices=200, cohort=40, rounds=5, algorithm="diffsketch")
SKETCHED |= {"clip": None, "epsilon": float("inf"), "rows": 5, "width": 2_000}
SKETCHED["training"] |= {"mode": "none"}
CASES = (
    Case("frequencies/central", {"devices": 5_000}, items=200),
    Case("frequencies/central", {"devices": 300_000}, items=20_000),
    Case("frequencies/secure", {"devices": 5_000}, items=200),
    Case("frequencies/secure", {"devices": 50_000}, items=5_000),
    Case("frequencies/local", {"devices": 5_000, "epsilon": 4.0}, items=200),
    Case("frequencies/local", {"devices": 300_000, "epsilon": 4.0}, items=5_000),
    Case("heavy_hitters/central", {"devices": 5_000}),
    Case("heavy_hitters/central", {"devices": 200_000}),
    Case("heavy_hitters/secure", {"devices": 5_000, "epsilon": 8.0, "word_length": 5}),
    Case("heavy_hitters/secure", {"devices": 100_000, "epsilon": 4.0, "word_length": 8}),
    Case("histogram/central", {"devices": 5_000}),
    Case("histogram/central", {"devices": 200_000}),
    Case("new_words/local", {"devices": 5_000, "epsilon": 6.0, "word_length": 4}),
    Case("new_words/local", {"devices": 100_000, "epsilon": 4.0, "word_length": 8}),
    Case("mean/central", {"devices": 1_000, "dimensions": 5_000, "clip": 1.0}),
    Case("mean/central", {"devices": 50_000, "dimensions": 200, "clip": 1.0}),
    Case("mean/secure", {"devices": 1_000, "dimensions": 5_000, "clip": 1.0}),
    Case("mean/secure", {"devices": 50_000, "dimensions": 200, "clip": 1.0}),
    Case("train/central", training("softmax", devices=3_000, cohort=300, rounds=10)),
    Case("train/central", training("mlp", devices=200, cohort=40, rounds=5)),
    Case("train/central", training("cnn", devices=60, cohort=20, rounds=2, compression="none")),
    Case("train/central", training("char_lstm", devices=40, cohort=10, rounds=1)),
    Case("train/central", SKETCHED),
    Case("train/secure", training("softmax", devices=400, cohort=200, rounds=4)),
    Case("train/secure", training("mlp", devices=80, cohort=40, rounds=2)),
)


def run(settings: Settings) -> Iterator[Line]:
    cases = TINY if settings.quick else CASES
    repetitions = settings.repeats or (1 if settings.quick else 3)
    for case in cases:
        name = f"{case.name}/{case.keys['devices']:,} devices"
        if not fnmatch(name, "/".join(settings.only.split("/")[:3])):
            continue
        for each in compare(_study(case), items=_names(case)).possible:
            algorithm = each.algorithm
            label = f"{name}/{label_of(case, algorithm)}"
            if settings.wants(name) or settings.wants(label):
                place = cases.index(case)
                result = _in_process(settings.quick, place, algorithm, repetitions)
                yield line(
                    NAME,
                    label,
                    settings,
                    sizes={
                        name: value
                        for name, value in {**case.keys, "items": case.items}.items()
                        if value != float("inf")  # JSON has no such number
                    },
                    seeds=[0, repetitions],
                    repetitions=repetitions,
                    **result,
                )


def _study(case: Case) -> Study:
    question, trust = case.name.split("/")
    return Study.from_mapping({"question": question, "trust": trust, "epsilon": 1.0, **case.keys})


def _names(case: Case) -> list[str] | None:
    return [f"item {number:05d}" for number in range(case.items)] or None


def _in_process(quick: bool, place: int, algorithm: str, repetitions: int) -> dict[str, Any]:
    arguments = [json.dumps(each) for each in (quick, place, algorithm, repetitions)]
    command = [sys.executable, "-m", __name__, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{__name__} failed: {done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _measure(quick: bool, place: int, algorithm: str, repetitions: int) -> dict[str, Any]:
    case = (TINY if quick else CASES)[place]
    study = _study(case)
    change: Any = {study.facts.algorithm_key: algorithm} if algorithm else {}
    planned = plan(replace(study, **change), items=_names(case))
    data: Any = _examples(planned) if study.training is not None else values(planned, 0)
    if isinstance(data, np.ndarray) and data.ndim == 1:
        data = data.tolist()
    answer: Any = simulate if study.training is None else train
    torch.set_num_threads(1)  # threads that wait for each other take processor time
    seconds = []
    for number in range(repetitions + 1):
        started = time.process_time()
        answer(planned, data, seed=number)
        seconds.append(time.process_time() - started)
    return {
        "predicted": {name: planned.predicted[name] for name in NUMBERS},
        "measured": dict(zip(NUMBERS, (median(seconds[1:]), peak_bytes()), strict=True)),
        "interval": [min(seconds[1:]), max(seconds[1:])],
        "first": seconds[0],
    }


def _examples(planned: Plan) -> Federated:
    """Random examples of the model: a batch for each client, and none to test on."""
    keys, draw = planned.study.training, np.random.default_rng(0)
    assert keys is not None  # the study is one of training
    assert planned.study.devices is not None  # cases set it
    module = models.make(keys.model, seed=0)
    shape: tuple[int, ...] = (planned.study.devices, keys.batch)
    if isinstance(module, models.Recurrent):
        inputs: npt.NDArray[Any] = draw.integers(4, module.embedding.shape[0], (*shape, LENGTH))
        targets = np.roll(inputs, -1, axis=2)
    else:
        inputs = draw.standard_normal((*shape, 784), dtype=np.float32)
        targets = draw.integers(0, 10, shape)
    return Federated.of(list(zip(inputs, targets, strict=True)))


def missed(lines: Sequence[Line]) -> list[str]:
    """The predictions that are wrong by more than a factor of three."""
    return [
        f"{NAME}/{result['case']}: {name} is {ratio:.2f} times the prediction"
        for result in lines
        for name in NUMBERS
        if not 1 / WITHIN <= (ratio := _ratio(result, name)) <= WITHIN
    ]


def table(lines: Sequence[Line]) -> str:
    header = ["study", "seconds predicted", "measured", "ratio"]
    header += ["MB predicted", "measured", "ratio"]
    rows = []
    for result in lines:
        predicted, measured = result["predicted"], result["measured"]
        rows.append(
            [
                result["case"],
                f"{predicted['simulate_seconds']:.3g}",
                f"{measured['simulate_seconds']:.3g}",
                f"{_ratio(result, 'simulate_seconds'):.2f}",
                f"{predicted['simulate_bytes'] / 1e6:.0f}",
                f"{measured['simulate_bytes'] / 1e6:.0f}",
                f"{_ratio(result, 'simulate_bytes'):.2f}",
            ]
        )
    return markdown(header, rows)


def _ratio(result: Line, name: str) -> float:
    return float(result["measured"][name] / result["predicted"][name])


if __name__ == "__main__":
    print(json.dumps(_measure(*map(json.loads, sys.argv[1:]))))
