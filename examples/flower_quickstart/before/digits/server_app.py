"""The server."""

import json
from pathlib import Path

from flwr.app import Array, ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from digits.task import accuracy, new_model, points

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    settings = context.run_config
    test = points(-1, 2000)

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model = {name: array.numpy() for name, array in arrays.items()}
        return MetricRecord({"accuracy": accuracy(model, *test)})

    start = ArrayRecord({name: Array(array) for name, array in new_model().items()})
    strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=settings["nodes"])
    result = strategy.start(
        grid=grid,
        initial_arrays=start,
        num_rounds=settings["rounds"],
        evaluate_fn=evaluate,
    )
    results = {
        "accuracy": {n: m["accuracy"] for n, m in result.evaluate_metrics_serverapp.items()},
        "rounds": {n: dict(m) for n, m in result.train_metrics_clientapp.items()},
    }
    Path(settings["out"]).write_text(json.dumps(results), encoding="utf-8")
