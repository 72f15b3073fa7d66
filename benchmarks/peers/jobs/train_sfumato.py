import torch

from sfumato.learn.data import Federated, group_by_client
from sfumato.simulation.train import train


def answer(data):
    inputs, targets, owners = (
        torch.from_numpy(data[name]) for name in ("values", "targets", "owners")
    )
    people = group_by_client(inputs, targets, owners, data["people"])
    study = {
        "question": "train",
        "trust": "central",
        "epsilon": 4.0,
        "delta": 1e-5,
        "rounds": 30,
        "clip": 0.5,
        "compression": "none",
        "training": {
            "model": "softmax",
            "inputs": inputs.shape[1],
            "classes": 10,
            "cohort": 100,
            "batch": 10,
            "learning_rate": 0.5,
            "server": "sgd",
            "server_rate": 1.0,
        },
    }
    data = Federated(
        train=people,
        test_inputs=torch.from_numpy(data["test"]),
        test_targets=torch.from_numpy(data["test_targets"]),
        name="points",
        public_test=True,
    )
    return train(study, data).accuracy
