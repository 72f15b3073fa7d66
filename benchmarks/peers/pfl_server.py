"""pfl-research's simulated clients in a process of its own: reads a task a line, answers seconds.

Run by the interpreter of `.venv-pfl`; it imports nothing of ours. A round is one call of pfl's
`SimulatedBackend`: its federated averaging trains every client, its clipping bounds each update,
its aggregator adds them. What the server does with the sum is left out. Examples are tensors, cut
into batches before the clock starts. One thread runs, on the first core if the system can pin it.

Seconds are on the wall, of one round. `sum` is the file for the sum, to be compared.
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

held = {}


class Perceptron(torch.nn.Sequential):
    """Two linear layers and a rectifier, with the two methods that pfl calls."""

    def loss(self, inputs, targets):
        return torch.nn.functional.cross_entropy(self(inputs), targets)

    def metrics(self, inputs, targets):
        return {}


def prepare(path):
    """The model and the clients of a file, made once."""
    if path not in held:
        held.clear()
        with np.load(path) as file:
            given = {name: torch.from_numpy(file[name]) for name in file.files}
        hidden, inputs = given["0.weight"].shape
        module = Perceptron(
            torch.nn.Linear(inputs, hidden),
            torch.nn.ReLU(),
            torch.nn.Linear(hidden, len(given["2.bias"])),
        )
        module.load_state_dict({name: given[name] for name in module.state_dict()})
        model = PyTorchModel(
            model=module,
            local_optimizer_create=torch.optim.SGD,
            central_optimizer=torch.optim.SGD(module.parameters(), 1.0),
        )
        batch = given["inputs"].shape[1]
        datasets = [
            Dataset((inputs, targets), user_id=str(client))
            for client, (inputs, targets) in enumerate(
                zip(given["inputs"], given["targets"], strict=True)
            )
        ]
        for dataset in datasets:
            list(dataset.iter(batch))  # it keeps them
        held[path] = (model, datasets, batch)
    return held[path]


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
