"""TensorFlow Federated's IBLT in a process of its own: reads a task a line, answers with seconds.

Run by the interpreter of `.venv-tff`; it imports nothing of ours. The three files of TFF are
unmodified, in `.peers/tff_iblt` (`scripts/peers` says where they come from); what they import but
the default chunker never calls is left empty here.

Seconds are on the wall. Every repeat has strings of its own, a table that the peer sizes for
them, and `listed`: whether what came out is what went in. TensorFlow traces before the clock
starts, once for a number of keys, and runs on one thread.
"""

import importlib
import json
import os
import sys
import time
from pathlib import Path
from types import ModuleType

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"  # before tensorflow is imported

import numpy as np
import tensorflow as tf

for name in (
    "tensorflow_federated.python.common_libs",
    "tensorflow_model_optimization.python.core.internal",
):
    sys.modules[name] = ModuleType(name)
sys.modules["tensorflow_federated.python.common_libs"].py_typecheck = None
sys.modules["tensorflow_model_optimization.python.core.internal"].tensor_encoding = None
sys.path.insert(0, str(Path(__file__).parents[2] / ".peers" / "tff_iblt"))

iblt_lib = importlib.import_module(
    "tensorflow_federated.python.analytics.heavy_hitters.iblt.iblt_lib"
)

LENGTH = 10
held = {}


def draw(keys, chance):
    letters = chance.integers(ord("a"), ord("z") + 1, (keys, LENGTH), dtype=np.uint8)
    return [row.tobytes().decode() for row in letters]


def prepare(keys):
    """An encoder, a decoder and the table between them, traced once."""
    if keys not in held:
        encoder = iblt_lib.IbltEncoder(keys, LENGTH)
        table = tf.Variable(
            encoder.compute_iblt(tf.constant(draw(keys, np.random.default_rng(keys))))
        )
        decoder = iblt_lib.IbltDecoder(table, keys, LENGTH)
        decoder.get_freq_estimates()
        held[keys] = (encoder, table, decoder)
    return held[keys]


def run(task):
    encoder, table, decoder = prepare(task["keys"])
    chance = np.random.default_rng(task.get("seed", 0))
    answer = {"insert_seconds": [], "list_seconds": [], "listed": []}
    for _ in range(task["repeats"]):
        strings = draw(task["keys"], chance)
        column = tf.constant(strings)
        started = time.perf_counter()
        inserted = encoder.compute_iblt(column).numpy()
        answer["insert_seconds"].append(time.perf_counter() - started)
        table.assign(inserted)
        started = time.perf_counter()
        found = decoder.get_freq_estimates()
        answer["list_seconds"].append(time.perf_counter() - started)
        answer["listed"].append(found == dict.fromkeys(strings, 1))
    return answer


tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(1)
for request in sys.stdin:
    print(json.dumps(run(json.loads(request))), flush=True)
