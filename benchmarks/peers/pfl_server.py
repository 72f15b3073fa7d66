"""pfl-research's simulated clients in their own process: one task per line, answered with seconds.

Run by the interpreter of `.venv-pfl`; it imports nothing of ours. A round is one call of pfl's
`SimulatedBackend`: its federated averaging trains every client, its clipping bounds each update,
its aggregator adds them. The server's step is left out. Examples are tensors, cut into batches
before the clock starts. One thread runs, on the first core if the system can pin it.

Seconds are the wall time of one round. `sum` is a file for the sum, to be compared.
"""

import asyncio
import json
import os
import sys
import time
from importlib import metadata

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.common_types import Population
from pfl.context import CentralContext
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.model.pytorch import PyTorchModel
from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism, NormClippingOnly

prepared = {}


class Perceptron(torch.nn.Sequential):
    """Two linear layers and a rectifier, with the two methods that pfl calls."""

    def loss(self, inputs, targets):
        return torch.nn.functional.cross_entropy(self(inputs), targets)

    def metrics(self, inputs, targets):
        return {}


def prepare(path):
    """The model and the clients of a file, which are cached."""
    if path not in prepared:
        prepared.clear()
        with np.load(path) as file:
            arrays = {name: torch.from_numpy(file[name]) for name in file.files}
        hidden, inputs = arrays["0.weight"].shape
        module = Perceptron(
            torch.nn.Linear(inputs, hidden),
            torch.nn.ReLU(),
            torch.nn.Linear(hidden, len(arrays["2.bias"])),
        )
        module.load_state_dict({name: arrays[name] for name in module.state_dict()})
        model = PyTorchModel(
            model=module,
            local_optimizer_create=torch.optim.SGD,
            central_optimizer=torch.optim.SGD(module.parameters(), 1.0),
        )
        batch = arrays["inputs"].shape[1]
        datasets = [
            Dataset((inputs, targets), user_id=str(client))
            for client, (inputs, targets) in enumerate(
                zip(arrays["inputs"], arrays["targets"], strict=True)
            )
        ]
        for dataset in datasets:
            list(dataset.iter(batch))  # the dataset caches its batches
        prepared[path] = (model, datasets, batch)
    return prepared[path]


def run(task):
    model, datasets, batch = prepare(task["path"])
    clients = range(len(datasets))
    data = FederatedDataset(datasets.__getitem__, get_user_sampler("minimize_reuse", clients))
    backend = SimulatedBackend(
        training_data=data,
        val_data=data,
        postprocessors=[CentrallyAppliedPrivacyMechanism(NormClippingOnly(2, task["clip"]))],
    )
    context = CentralContext(
        current_central_iteration=0,
        do_evaluation=False,
        cohort_size=len(datasets),
        population=Population.TRAIN,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=task["steps"],  # every epoch is one batch
            local_learning_rate=task["learning_rate"],
            local_batch_size=batch,
        ),
        model_eval_params=None,
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=1,
            evaluation_frequency=0,
            train_cohort_size=len(datasets),
            val_cohort_size=0,
        ),
        seed=1,
    )
    algorithm = FederatedAveraging()
    started = time.perf_counter()
    for _ in range(task["rounds"]):
        total, _ = asyncio.run(
            backend.async_gather_results(model, algorithm, central_context=context)
        )
    seconds = (time.perf_counter() - started) / task["rounds"]
    parts = [total[name].numpy().ravel() for name in model.variable_map]
    np.save(task["sum"], np.concatenate(parts))
    return {"seconds": seconds, "version": metadata.version("pfl")}


if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
torch.set_num_threads(1)
for request in sys.stdin:
    print(json.dumps(run(json.loads(request))), flush=True)
