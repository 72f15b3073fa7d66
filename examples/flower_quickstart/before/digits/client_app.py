"""The client."""

from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from digits.task import points, train

app = ClientApp()


@app.train()
def train_locally(message: Message, context: Context) -> Message:
    inputs, labels = points(context.node_config["partition-id"])
    model = {name: array.numpy() for name, array in message.content["arrays"].items()}
    trained = train(model, inputs, labels)
    content = RecordDict(
        {
            "arrays": ArrayRecord({name: Array(array) for name, array in trained.items()}),
            "metrics": MetricRecord({"num-examples": len(labels)}),
        }
    )
    return Message(content, reply_to=message)
