"""Mechanisms and their cost: exact samplers, noise, accounting, the ledger."""

from sfumato.privacy.accounting import (
    AdditiveLoss,
    ApproximateLoss,
    Charge,
    Loss,
    NoPrivacy,
    PlannedLoss,
    calibrate,
    epsilon_of,
    gaussian_stddev,
)
from sfumato.privacy.ledger import Account, Budget, Entry, Ledger
from sfumato.privacy.listing import ListedAbove, best_list
from sfumato.privacy.noise import Mechanism, NoiseAtRelease, NoiseInShares, NoNoise, least_noise
from sfumato.privacy.noise_kinds import Noise
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
from sfumato.privacy.sampling import bound_contributions, threshold_sample
from sfumato.privacy.tallies import Tally

__all__ = [
    "Account",
    "AdditiveLoss",
    "ApproximateLoss",
    "Budget",
    "Charge",
    "CountMeanSketch",
    "DirectResponse",
    "Entry",
    "HadamardCountMeanSketch",
    "HashedResponse",
    "Ledger",
    "ListedAbove",
    "Loss",
    "Mechanism",
    "NoNoise",
    "NoPrivacy",
    "Noise",
    "NoiseAtRelease",
    "NoiseInShares",
    "PlannedLoss",
    "Randomizer",
    "Rng",
    "Rounding",
    "SeededRng",
    "SystemRng",
    "Tally",
    "best_list",
    "bound_contributions",
    "calibrate",
    "discrete_gaussian",
    "discrete_laplace",
    "epsilon_of",
    "gaussian_stddev",
    "least_noise",
    "skellam",
    "threshold_sample",
]
