"""TensorFlow Federated's IBLT in its own process: one task per line, answered with seconds.

Run by the interpreter of `.venv-tff`; it imports nothing of ours. The three files of TFF are
unmodified, in `.peers/tff_iblt` (`scripts/peers` says where they come from); imports that the
default chunker never calls are replaced by empty modules.

Seconds are wall time. Every repeat has its own strings, a table that the peer sizes for them, and
`listed`: whether exactly these strings were listed. TensorFlow traces before the clock starts, once
per number of keys, and runs on one thread.
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
prepared = {}


def draw(keys, chance):
    letters = chance.integers(ord("a"), ord("z") + 1, (keys, LENGTH), dtype=np.uint8)
    return [row.tobytes().decode() for row in letters]


def prepare(keys):
    """An encoder, a decoder and the table between them, traced and cached."""
    if keys not in prepared:
        encoder = iblt_lib.IbltEncoder(keys, LENGTH)
        table = tf.Variable(
            encoder.compute_iblt(tf.constant(draw(keys, np.random.default_rng(keys))))
        )
        decoder = iblt_lib.IbltDecoder(table, keys, LENGTH)
        decoder.get_freq_estimates()
        prepared[keys] = (encoder, table, decoder)
    return prepared[keys]


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
        counts = decoder.get_freq_estimates()
        answer["list_seconds"].append(time.perf_counter() - started)
        answer["listed"].append(counts == dict.fromkeys(strings, 1))
    return answer


tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(1)
for request in sys.stdin:
    print(json.dumps(run(json.loads(request))), flush=True)
