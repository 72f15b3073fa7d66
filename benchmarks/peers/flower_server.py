"""Flower's SecAgg+ in its own process: reads one round per line, answers with its cost.

The workflow of the server and the mod of the clients are Flower's; a loop between them replaces the
network. Run by the interpreter of `.venv-flower`; it imports nothing of ours.

Seconds are wall time, from the bytes of a message to the bytes of its answer, including Flower's
quantizing, which its SecAgg+ requires. Training and the strategy's average are left out.
"""

import importlib
import json
import logging
import os
import sys
import time
from importlib import metadata
from types import SimpleNamespace

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"  # before flwr is imported

import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.common import (
    Code,
    FitIns,
    FitRes,
    Parameters,
    Status,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.compat.common import recorddict_compat as compat
from flwr.server.compat.legacy_context import LegacyContext
from flwr.server.strategy import FedAvg
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD, Key
from flwr.supercore.task_identity import TaskIdentity

device_side = importlib.import_module("flwr.client.mod.secure_aggregation.secaggplus_mod")
server_side = importlib.import_module("flwr.server.workflow.secure_aggregation.secaggplus_workflow")

EXAMPLES = 1000  # Flower's largest weight, so that tables are added unscaled
STAGES = 4
NOTHING = Parameters([], "numpy.ndarray")


class Watch:
    """Seconds, without those of functions that are left out."""

    def __init__(self):
        self.aside = 0.0

    def now(self):
        return time.perf_counter() - self.aside

    def leave_out(self, function):
        def timed(*args, **kwargs):
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.aside += time.perf_counter() - started

        return timed


class Fleet:
    """All devices of a round, in the place of Flower's grid; the last ones send no table."""

    def __init__(self, task, watch):
        """`watch` runs on the devices' side."""
        chance = np.random.default_rng(task["seed"])
        self.nodes = [int(node) for node in chance.integers(1, 2**63, task["devices"])]
        self.gone = set(self.nodes[task["devices"] - task["dropped"] :])
        self.tables = chance.uniform(-1, 1, (task["devices"], task["cells"]))
        self.contexts = {
            node: Context(1, node, {}, RecordDict(), {}, series_id=0) for node in self.nodes
        }
        self.seconds = dict.fromkeys(self.nodes, 0.0)
        self.bytes_up = dict.fromkeys(self.nodes, 0)
        self.stage, self.watch, self.server_seconds = 0, watch, 0.0
        self.train = watch.leave_out(self._train)

    def expected(self):
        stay = [node not in self.gone for node in self.nodes]
        return self.tables[stay].mean(axis=0)

    def send_and_receive(self, messages, timeout=None):
        self.stage += 1
        there = [m for m in messages if self.stage < STAGES - 1 or not self._is_gone(m)]
        return [self._answer(message) for message in there]

    def _is_gone(self, message):
        return message.metadata.dst_node_id in self.gone

    def _answer(self, message):
        node = message.metadata.dst_node_id
        arrival = self.watch.now()
        request = to_bytes(message.content)
        started = self.watch.now()
        received = Message(from_bytes(request), node, message.metadata.message_type, group_id="1")
        answer = device_side.secaggplus_mod(received, self.contexts[node], self.train)
        response = to_bytes(answer.content)
        finish = self.watch.now()
        answer.content = from_bytes(response)
        self.server_seconds += self.watch.now() - finish + started - arrival
        self.seconds[node] += finish - started
        self.bytes_up[node] += len(response)
        return answer

    def _train(self, message, context):
        table = self.tables[self.nodes.index(message.metadata.dst_node_id)]
        result = FitRes(Status(Code.OK, ""), ndarrays_to_parameters([table]), EXAMPLES, {})
        return Message(compat.fitres_to_recorddict(result, True), reply_to=message)


class Once(FedAvg):
    """Asks all nodes, and returns the sum unchanged."""

    def __init__(self, nodes):
        super().__init__()
        self.nodes, self.result = nodes, None

    def configure_fit(self, server_round, parameters, client_manager):
        return [(SimpleNamespace(node_id=node), FitIns(NOTHING, {})) for node in self.nodes]

    def aggregate_fit(self, server_round, results, failures):
        self.result = results[0][1].parameters
        return None, {}


def to_bytes(content):
    return recorddict_to_proto(content).SerializeToString()


def from_bytes(data):
    return recorddict_from_proto(type(recorddict_to_proto(RecordDict())).FromString(data))


def run(task):
    fleet, watch = Fleet(task, Watch()), Watch()
    strategy = Once(fleet.nodes)
    context = LegacyContext(Context(1, 0, {}, RecordDict(), {}, series_id=0), strategy=strategy)
    context.state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({Key.CURRENT_ROUND: 1})
    context.state.array_records[MAIN_PARAMS_RECORD] = compat.parameters_to_arrayrecord(
        NOTHING, True
    )
    grid = SimpleNamespace(send_and_receive=watch.leave_out(fleet.send_and_receive))
    workflow = SecAggPlusWorkflow(task["shares"], task["threshold"])
    started = watch.now()
    workflow(grid, context)
    server_seconds = watch.now() - started + fleet.server_seconds
    mean = parameters_to_ndarrays(strategy.result)[0]
    assert np.allclose(mean, fleet.expected(), atol=1e-4), "Flower's sum is not the sum"
    stayed = [node for node in fleet.nodes if node not in fleet.gone]
    return {
        "version": metadata.version("flwr"),
        "client_seconds": sum(fleet.seconds[node] for node in stayed) / len(stayed),
        "server_seconds": server_seconds,
        "bytes_up": sum(fleet.bytes_up[node] for node in stayed) / len(stayed),
    }


TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # the sender of every message
logging.getLogger("flwr").setLevel(logging.ERROR)
for request in sys.stdin:
    print(json.dumps(run(json.loads(request))), flush=True)
