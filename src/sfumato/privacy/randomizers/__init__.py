"""Local differential privacy: devices randomize their items, so that nobody need be trusted.

A randomizer turns items into records, a few bytes each, and folds records into a tally: an integer
table that adds. Four of them, all over the same rows of hash functions (paper 004, and beyond):

    CountMeanSketch          a whole row of noisy bits: CMS, or with better flips ("optimal")
    HadamardCountMeanSketch  one noisy bit of the row's Walsh–Hadamard transform: HCMS
    HashedResponse           one noisy cell of the row: the least variance, in three bytes
    DirectResponse           one noisy category of a short list, without hashing

Records have a fixed length, so their size says nothing. Privacy comes from the coins alone: it
holds for any hash functions, whoever chose them. `debias` reads tallies.
"""

from sfumato.privacy.randomizers.count_mean import CountMeanSketch, HadamardCountMeanSketch
from sfumato.privacy.randomizers.randomizer import (
    LARGEST_EPSILON,
    Hashed,
    Moments,
    Randomizer,
    in_epoch,
    no_item,
)
from sfumato.privacy.randomizers.responses import DirectResponse, HashedResponse

__all__ = [
    "LARGEST_EPSILON",
    "CountMeanSketch",
    "DirectResponse",
    "HadamardCountMeanSketch",
    "Hashed",
    "HashedResponse",
    "Moments",
    "Randomizer",
    "in_epoch",
    "no_item",
]
