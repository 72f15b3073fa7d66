"""Runs one job of `jobs`, by the interpreter of its library: python job.py JOB DATA ANSWER.

DATA is an .npz file, ANSWER the JSON file for what the job's function `answer` returns. The folder
`jobs` must be in PYTHONPATH, where other processes of a job find it, too.
"""

import importlib
import json
import sys
from pathlib import Path

import numpy as np


def plain(answer):
    """An answer as JSON has it; None if there is none."""
    if answer is None:
        return None
    if isinstance(answer, dict):
        return {str(key): float(value) for key, value in answer.items()}
    return np.asarray(answer, dtype=float).tolist()


if __name__ == "__main__":
    job, source, target = sys.argv[1:]
    answer = importlib.import_module(job).answer
    with np.load(source) as file:
        data = {name: file[name][()] for name in file.files}
    Path(target).write_text(json.dumps(plain(answer(data))))
