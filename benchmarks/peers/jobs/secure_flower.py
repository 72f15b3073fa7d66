import os

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import numpy as np
from flwr.client import ClientApp, NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import LegacyContext, ServerApp, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.simulation import run_simulation


class Client(NumPyClient):
    def __init__(self, vector):
        self.vector = vector

    def fit(self, parameters, config):
        return [self.vector], 1, {}


class Keep(FedAvg):
    result = None

    def aggregate_fit(self, server_round, results, failures):
        if results:
            self.result = parameters_to_ndarrays(results[0][1].parameters)[0]
        return super().aggregate_fit(server_round, results, failures)


def answer(data):
    vectors = data["values"]
    strategy = Keep(
        fraction_evaluate=0.0,
        min_available_clients=len(vectors),
        initial_parameters=ndarrays_to_parameters([np.zeros(vectors.shape[1])]),
    )

    def client(context):
        return Client(vectors[context.node_config["partition-id"]]).to_client()

    server = ServerApp()

    @server.main()
    def main(grid, context):
        context = LegacyContext(context, config=ServerConfig(num_rounds=1), strategy=strategy)
        secure = SecAggPlusWorkflow(
            num_shares=5, reconstruction_threshold=3, max_weight=1, clipping_range=1.0
        )
        DefaultWorkflow(fit_workflow=secure)(grid, context)

    run_simulation(
        server_app=server,
        client_app=ClientApp(client_fn=client, mods=[secaggplus_mod]),
        num_supernodes=len(vectors),
    )
    return strategy.result
