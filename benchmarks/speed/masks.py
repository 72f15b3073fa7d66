"""Masks of secure aggregation on one core, against their floors.

The floors add arrays that are in the cache, and compute the key streams without adding them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from benchmarks import race
from benchmarks.lines import Line, Settings
from benchmarks.race import Contender
from sfumato.kernels import masks

NAME = "masks"
SEED = 1
IN_CACHE = 1 << 12  # 32-bit words
table = race.table

Pairs = list[tuple[bytes, bytes]]


def run(settings: Settings) -> Iterator[Line]:
    words = 1 << (12 if settings.quick else 20)
    for count in (1, 48):
        case = "one mask" if count == 1 else f"{count} masks"
        if settings.wants(case):
            yield _race(settings, case, words, count)


def _race(settings: Settings, case: str, words: int, count: int) -> Line:
    rng = np.random.default_rng(SEED)
    pairs = [(rng.bytes(16), rng.bytes(12) + bytes(4)) for _ in range(count)]
    signs = [1, -1] * (count // 2) or [1]
    total = rng.integers(0, 1 << 32, words, dtype=np.uint32)
    return race.run(
        race.Race(
            name=NAME,
            case=case,
            sizes={"words": words, "bits": 32, "masks": count},
            seeds=[SEED],
            ours=Contender(partial(masks.add_streams, total, pairs, signs)),
            peers={},
            floors={
                "add in cache": Contender(partial(_add_in_cache, words * count)),
                "cryptography's stream": Contender(partial(_streams, pairs, words * 4)),
            },
            packages=["cryptography"],
            cores=1,
            note="floors: as many words added to others, 16 KiB at a time; the streams, not added",
        ),
        settings,
    )


def _add_in_cache(words: int) -> None:
    one, other = np.zeros(IN_CACHE, np.uint32), np.ones(IN_CACHE, np.uint32)
    for _ in range(words // IN_CACHE):
        np.add(one, other, out=one)


def _streams(pairs: Pairs, size: int) -> None:
    zeros = bytes(min(size, masks.CHUNK))
    buffer = bytearray(len(zeros) + 16)
    for key, start in pairs:
        stream = Cipher(algorithms.AES(key), modes.CTR(start)).encryptor()
        for _ in range(size // len(zeros)):
            stream.update_into(zeros, buffer)
