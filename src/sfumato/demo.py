"""Made-up devices for the demo: words of a long-tailed law, one a device."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from sfumato.study import Study

VOCABULARY = 50_000
EXPONENT = 1.05  # words of a natural language fall off about like this
_ONSETS = ["b", "br", "d", "f", "g", "gr", "k", "l", "m", "n", "p", "pl", "r", "s", "st", "t", "v"]
_VOWELS = ["a", "e", "i", "o", "u", "ai", "ea", "ou"]


def words(devices: int, seed: int) -> tuple[pa.Array, pa.Array]:
    """A vocabulary, most common first, and the word that each device holds."""
    chance = np.random.default_rng(seed)
    syllables = [onset + vowel for onset in _ONSETS for vowel in _VOWELS]
    made: dict[str, None] = {}
    while len(made) < VOCABULARY:  # common words are short
        length = 1 + int(np.log10(len(made) + 3)) // 2 + int(chance.integers(2))
        made["".join(chance.choice(syllables, size=length))] = None
    vocabulary = pa.array(list(made))
    shares = np.arange(1, VOCABULARY + 1, dtype=np.float64) ** -EXPONENT
    held = chance.choice(VOCABULARY, size=devices, p=shares / shares.sum())
    return vocabulary, vocabulary.take(pa.array(held))


def word_study(devices: int) -> Study:
    """The question: how common is each word, within half a per cent, at epsilon 1?"""
    return Study(
        question="frequencies",
        trust="central",
        epsilon=1.0,
        delta=1e-7,
        devices=devices,
        target_error=0.005,
    )
