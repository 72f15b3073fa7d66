"""Flower's simulation of clients in its own process: one round per line, answered with seconds.

Run by the interpreter of `.venv-flower`; it imports nothing of ours. The first line says how many
nodes and actors Flower starts with Ray, and keeps. A round is one message to every node and its
answer, an update that the client has clipped; the server app adds them up, which is less than any
of Flower's strategies does.

Seconds are wall time, from the first message to the sum; clients keep the examples that they have
read. `sum` is a file for the sum, to be compared.
"""

import functools
import itertools
import json
import logging
import os
import sys
import time
from importlib import metadata

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"  # before flwr is imported
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
# Actors have the same priority as other processes. Ray reads the name in lower case.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
# Without this, Ray always listens on the machine's own address.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation

NAMES = ("0.weight", "0.bias", "2.weight", "2.bias")
client_app = ClientApp()


@functools.cache
def examples(path):
    torch.set_num_threads(1)
    with np.load(path) as file:
        return torch.from_numpy(file["inputs"]), torch.from_numpy(file["targets"])


@functools.cache
def perceptron(inputs, hidden, classes):
    return torch.nn.Sequential(
        torch.nn.Linear(inputs, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, classes)
    )


@client_app.train()
def train(message, context):
    """A few steps on all examples of the client; the update is clipped."""
    task = message.content["task"]
    inputs, targets = (part[context.node_config["partition-id"]] for part in examples(task["path"]))
    start = message.content["parameters"].to_torch_state_dict()
    hidden, width = start["0.weight"].shape
    model = perceptron(width, hidden, len(start["2.bias"]))
    model.load_state_dict(start)
    optimizer = torch.optim.SGD(model.parameters(), task["learning_rate"])
    for _ in range(task["steps"]):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    update = {name: value.detach() - start[name] for name, value in model.named_parameters()}
    norm = torch.linalg.vector_norm(torch.cat([each.ravel() for each in update.values()]))
    scale = (task["clip"] / norm).clamp(max=1.0)
    clipped = ArrayRecord({name: scale * each for name, each in update.items()})
    return Message(RecordDict({"update": clipped}), reply_to=message)


def run(task, grid):
    while len(nodes := list(grid.get_node_ids())) < task["clients"]:
        time.sleep(0.1)
    with np.load(task["path"]) as file:
        start = {name: torch.from_numpy(file[name]) for name in NAMES}
    started = time.perf_counter()
    parameters = ArrayRecord(start)
    config = ConfigRecord({name: task[name] for name in ("path", "clip", "learning_rate", "steps")})
    messages = [
        Message(RecordDict({"parameters": parameters, "task": config}), node, MessageType.TRAIN)
        for node in nodes
    ]
    total = [np.zeros(start[name].shape, dtype=np.float32) for name in NAMES]
    for answer in grid.send_and_receive(messages):
        update = answer.content["update"]
        for place, name in zip(total, NAMES, strict=True):
            place += update[name].numpy()
    seconds = time.perf_counter() - started
    np.save(task["sum"], np.concatenate([part.ravel() for part in total]))
    return {"seconds": seconds, "version": metadata.version("flwr")}


def serving(first, answers):
    app = ServerApp()

    @app.main()
    def main(grid, context):
        for request in itertools.chain([first], sys.stdin):
            print(json.dumps(run(json.loads(request), grid)), file=answers, flush=True)

    return app


if __name__ == "__main__":
    import flower_clients_server  # actors import it, and so keep the examples

    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # Ray and Flower print as well
    logging.getLogger("flwr").setLevel(logging.ERROR)
    first = sys.stdin.readline()
    if not first:
        sys.exit()
    sizes = json.loads(first)
    run_simulation(
        server_app=serving(first, answers),
        client_app=flower_clients_server.client_app,
        num_supernodes=sizes["clients"],
        backend_config={
            "init_args": {
                "num_cpus": sizes["actors"],
                "_node_ip_address": "127.0.0.1",
                "include_dashboard": False,
                "log_to_driver": False,
            },
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
