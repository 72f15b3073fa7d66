import math
from collections import Counter

import opendp.prelude as dp

dp.enable_features("contrib")


def answer(data):
    size, devices = data["categories"], len(data["values"])
    truth = math.exp(2.0) / (math.exp(2.0) + size - 1)
    response = dp.m.make_randomized_response(categories=list(range(size)), prob=truth)
    assert response.map(d_in=1) <= 2.0 + 1e-9
    tally = Counter(response(value) for value in data["values"].tolist())
    lie = (1 - truth) / (size - 1)
    return [(tally[item] - devices * lie) / (truth - lie) for item in range(size)]
