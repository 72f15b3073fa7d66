"""The model and the data: two layers, and random points of ten classes."""

import numpy as np

FEATURES, HIDDEN, CLASSES = 64, 128, 10
SPREAD = 2.5  # deviation of points from the middle of their class


def new_model():
    chance = np.random.default_rng(1)
    return {
        "first": (chance.standard_normal((FEATURES, HIDDEN)) / 8).astype(np.float32),
        "first_bias": np.zeros(HIDDEN, dtype=np.float32),
        "second": (chance.standard_normal((HIDDEN, CLASSES)) / 12).astype(np.float32),
        "second_bias": np.zeros(CLASSES, dtype=np.float32),
    }


def points(client, count=400):
    """A client's own points; those of client -1 are for testing."""
    middles = np.random.default_rng(7).standard_normal((CLASSES, FEATURES))
    chance = np.random.default_rng(100 + client)
    labels = chance.integers(CLASSES, size=count)
    inputs = middles[labels] + SPREAD * chance.standard_normal((count, FEATURES))
    return inputs.astype(np.float32), labels


def forward(model, inputs):
    hidden = np.maximum(inputs @ model["first"] + model["first_bias"], 0)
    return hidden, hidden @ model["second"] + model["second_bias"]


def train(model, inputs, labels, rate=0.05, epochs=2, batch=20):
    """Plain gradient steps on the cross entropy."""
    model = {name: array.copy() for name, array in model.items()}
    for _ in range(epochs):
        for start in range(0, len(labels), batch):
            part, targets = inputs[start : start + batch], labels[start : start + batch]
            hidden, scores = forward(model, part)
            scores = np.exp(scores - scores.max(axis=1, keepdims=True))
            slope = scores / scores.sum(axis=1, keepdims=True)
            slope[np.arange(len(targets)), targets] -= 1
            slope /= len(targets)
            back = (slope @ model["second"].T) * (hidden > 0)
            model["second"] -= rate * hidden.T @ slope
            model["second_bias"] -= rate * slope.sum(axis=0)
            model["first"] -= rate * part.T @ back
            model["first_bias"] -= rate * back.sum(axis=0)
    return model


def accuracy(model, inputs, labels):
    return float((forward(model, inputs)[1].argmax(axis=1) == labels).mean())
