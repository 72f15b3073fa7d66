"""Make the data of the studies of papers 002 and 003: vectors and examples, both drawn at random.

python make_data.py
"""

from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
chance = np.random.default_rng(1)

# 300 devices have a vector of 8,000 coordinates each; their mean is short and spread out.
vectors = chance.standard_normal((300, 8_000)) / 100 + 1e-3
np.save(HERE / "vectors.npy", vectors.astype(np.float32))

# In these vectors, the same eight of the coordinates are large for all devices.
sparse = chance.standard_normal((300, 8_000)) / 1_000
sparse[:, ::1_000] += 0.3
np.save(HERE / "sparse_vectors.npy", sparse.astype(np.float32))

# 200 clients have about 20 examples each, some far fewer: 50 features around the centre of a class.
centres = chance.standard_normal((10, 50)) / 2
targets = chance.integers(0, 10, size=5_000)
np.savez_compressed(
    HERE / "clients.npz",
    inputs=(centres[targets] + chance.standard_normal((5_000, 50))).astype(np.float32),
    targets=targets,
    client=(200 * chance.random(5_000) ** 1.2).astype(int),
    split=(np.arange(5_000) >= 4_000).astype(int),  # the last thousand are for tests
)
