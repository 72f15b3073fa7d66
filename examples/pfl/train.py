"""Ten classes of points, learned in pfl's simulation: as it is, sketched, and with our noise.

.venv-pfl-app/bin/python examples/pfl/train.py
"""

import argparse
import contextlib
import io
import time
import warnings

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics, StringMetricName, get_overall_value
from pfl.model.pytorch import PyTorchModel
from pfl.privacy.gaussian_mechanism import GaussianMechanism
from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism

from sfumato.integrations.pfl import Sketched, SketchedSum
from sfumato.integrations.rounds import UpdateDesign

FEATURES, HIDDEN, CLASSES = 64, 128, 10
CLIP, NOISE, RATE, DELTA = 1.0, 2.0, 10.0, 1e-5


class Network(torch.nn.Sequential):
    """Two layers, with the two methods that pfl calls."""

    def __init__(self):
        super().__init__(
            torch.nn.Linear(FEATURES, HIDDEN),
            torch.nn.ReLU(),
            torch.nn.Linear(HIDDEN, CLASSES),
        )

    def loss(self, inputs, labels):
        return torch.nn.functional.cross_entropy(self(inputs), labels)

    def metrics(self, inputs, labels):
        return {}


class Watch(TrainingProcessCallback):
    """Keeps the metrics of rounds."""

    def __init__(self):
        self.epsilon = None

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        name = StringMetricName("sfumato | epsilon")
        if name in aggregate_metrics:
            self.epsilon = get_overall_value(aggregate_metrics[name])
        return False, Metrics()


def points(user, count=100):
    """A user's own points; those of user -1 are for testing."""
    middles = np.random.default_rng(7).standard_normal((CLASSES, FEATURES))
    chance = np.random.default_rng(100 + user)
    labels = chance.integers(CLASSES, size=count)
    inputs = middles[labels] + 2.5 * chance.standard_normal((count, FEATURES))
    return torch.tensor(inputs, dtype=torch.float32), torch.tensor(labels)


def run(postprocessors, *, users, cohort, rounds):
    """Accuracy, epsilon and the seconds it took."""
    torch.manual_seed(1)
    network = Network()
    model = PyTorchModel(
        model=network,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(network.parameters(), 1.0),
    )
    data = FederatedDataset(
        lambda user: Dataset(points(user), user_id=str(user)),
        get_user_sampler("random", range(users)),
    )
    watch = Watch()
    started = time.perf_counter()
    FederatedAveraging().run(
        backend=SimulatedBackend(training_data=data, val_data=data, postprocessors=postprocessors),
        model=model,
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=rounds + 1,
            train_cohort_size=cohort,
            val_cohort_size=0,
        ),
        model_train_params=NNTrainHyperParams(
            local_num_epochs=2, local_learning_rate=0.05, local_batch_size=20
        ),
        model_eval_params=None,
        callbacks=[watch],
    )
    seconds = time.perf_counter() - started
    inputs, labels = points(-1, 2000)
    right = (network(inputs).argmax(dim=1) == labels).float().mean()
    return float(right), watch.epsilon, seconds


def settings(users, cohort):
    """Lists of postprocessors: what is added to an app is in here."""
    design = UpdateDesign(clip=CLIP, noise_multiplier=NOISE, rate=RATE, sampling="fixed", seed=2026)
    noise = CentrallyAppliedPrivacyMechanism(GaussianMechanism(CLIP, NOISE))
    return {
        "as it is": [],
        "pfl's noise": [noise],
        "sketched": [Sketched(rate=RATE, seed=2026)],
        "sketched, pfl's noise": [Sketched(rate=RATE, seed=2026), noise],
        "sketched, our noise": [SketchedSum(design, cohort=cohort, population=users, delta=DELTA)],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--users", type=int, default=1000)
    parser.add_argument("--cohort", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="To copy construct")  # pfl's own noise
    for name, postprocessors in settings(options.users, options.cohort).items():
        with contextlib.redirect_stdout(io.StringIO()):  # pfl prints every metric of every round
            right, epsilon, seconds = run(
                postprocessors, users=options.users, cohort=options.cohort, rounds=options.rounds
            )
        spent = "" if epsilon is None else f"  epsilon {epsilon:.4g} at delta {DELTA:g}"
        print(f"{name:22} accuracy {right:.3f}{spent}  {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main()
