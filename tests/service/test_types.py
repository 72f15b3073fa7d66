"""The types that a user's script sees: those of the functions, and none is Any by accident."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """\
from collections import Counter
from pathlib import Path
from typing import Any, Protocol, assert_type

import numpy as np

import sfumato

study = {"question": "frequencies", "trust": "central", "epsilon": 1.0, "devices": 3}
plan = sfumato.plan(study, items=["oak", "elm"])
assert_type(plan, sfumato.Plan)
release = sfumato.simulate(plan, ["oak", "oak", "elm"], seed=1)
assert_type(release, sfumato.CountRelease)
assert_type(release.privacy.epsilon, float | None)
print(release.counts.sum(), release.cost.bytes_per_device)
mean = {"question": "mean", "trust": "central", "epsilon": 1.0, "clip": 1.0}
assert_type(sfumato.simulate(mean, np.zeros((9, 2))), sfumato.MeanRelease)
assert_type(sfumato.simulate(study, Counter(["oak"])), sfumato.CountRelease)
assert_type(sfumato.simulate(study, {"tree": ["oak"]}), sfumato.CountRelease)
assert_type(sfumato.simulate(study, [["oak", "elm"], ["oak"]]), sfumato.CountRelease)


class Frame(Protocol):
    def __arrow_c_stream__(self, requested_schema: Any = None, /) -> Any: ...


def means(array: np.ndarray[Any, Any], frame: Frame) -> None:
    print(sfumato.simulate(mean, array).mean, sfumato.simulate(mean, array / 2).mean)
    print(sfumato.simulate(mean, frame).mean, sfumato.simulate(mean, [[1.0, 2.0]]).mean)
    print(sfumato.simulate(mean, "vectors.npy").mean, sfumato.simulate(mean, Path("v.csv")).mean)
    print(sfumato.simulate(mean, {"steps": [1.0, 2.0]}).mean)


try:
    sfumato.Study.from_mapping({"question": "frequencies"})
except sfumato.SfumatoError as problem:
    print(problem)
"""
WRONG = "import sfumato\nsfumato.simulate({}, [], seeds=1)\n"
CHECKERS = {
    "mypy": [sys.executable, "-m", "mypy", "--strict", "--config-file", "/dev/null"],
    "pyright": ["pyright", "--pythonpath", sys.executable],
}


@pytest.mark.slow
@pytest.mark.parametrize("checker", CHECKERS)
def test_a_script_of_a_user_passes_the_checker_and_a_wrong_one_does_not(
    checker: str, tmp_path: Path
) -> None:
    command = CHECKERS[checker]
    if shutil.which(command[0]) is None:
        pytest.skip(f"no {checker}; pip install {checker}")
    for name, text, passes in (("right", SCRIPT, True), ("wrong", WRONG, False)):
        script = tmp_path / f"{name}.py"
        script.write_text(text, encoding="utf-8")
        done = subprocess.run(
            [*command, script.name], cwd=tmp_path, capture_output=True, text=True, timeout=280
        )
        assert (done.returncode == 0) == passes, done.stdout
