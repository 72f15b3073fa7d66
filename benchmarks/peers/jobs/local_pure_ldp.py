from pure_ldp.frequency_oracles.local_hashing import LHClient, LHServer


def answer(data):
    client = LHClient(epsilon=2.0, d=data["categories"], use_olh=True)
    server = LHServer(epsilon=2.0, d=data["categories"], use_olh=True)
    for value in data["values"].tolist():
        server.aggregate(client.privatise(value + 1))  # items are counted from one
    return [server.estimate(item + 1) for item in range(data["categories"])]
