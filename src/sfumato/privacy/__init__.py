"""Mechanisms, and what they cost: exact samplers, noise, accounting, the ledger."""

from sfumato.privacy.accounting import (
    AdditiveLoss,
    Loss,
    Noise,
    NoPrivacy,
    calibrate,
    epsilon_of,
    gaussian_stddev,
)
from sfumato.privacy.ledger import Budget, Entry, Ledger
from sfumato.privacy.noise import Mechanism, NoiseAtRelease, NoiseInShares, NoNoise
from sfumato.privacy.randomizers import (
    CountMeanSketch,
    DirectResponse,
    HadamardCountMeanSketch,
    HashedResponse,
    Randomizer,
)
from sfumato.privacy.rounding import Rounding
from sfumato.privacy.samplers import (
    Rng,
    SeededRng,
    SystemRng,
    discrete_gaussian,
    discrete_laplace,
    skellam,
)
from sfumato.privacy.sampling import bound_contributions
from sfumato.privacy.tallies import Tally

__all__ = [
    "AdditiveLoss",
    "Budget",
    "CountMeanSketch",
    "DirectResponse",
    "Entry",
    "HadamardCountMeanSketch",
    "HashedResponse",
    "Ledger",
    "Loss",
    "Mechanism",
    "NoNoise",
    "NoPrivacy",
    "Noise",
    "NoiseAtRelease",
    "NoiseInShares",
    "Randomizer",
    "Rng",
    "Rounding",
    "SeededRng",
    "SystemRng",
    "Tally",
    "bound_contributions",
    "calibrate",
    "discrete_gaussian",
    "discrete_laplace",
    "epsilon_of",
    "gaussian_stddev",
    "skellam",
]
