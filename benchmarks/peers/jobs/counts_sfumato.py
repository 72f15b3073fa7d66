import sfumato


def answer(data):
    items = [str(item) for item in range(data["categories"])]
    study = {"question": "frequencies", "trust": "central", "epsilon": 1.0, "delta": 1e-6}
    plan = sfumato.plan(study | {"devices": len(data["values"])}, items=items)
    release = sfumato.simulate(plan, [str(value) for value in data["values"]])
    counts = dict(zip(release.items.to_pylist(), release.counts, strict=True))
    return [counts[item] for item in items]
