import sfumato


def answer(data):
    study = {"question": "heavy_hitters", "trust": "central", "epsilon": 1.0, "delta": 1e-6}
    release = sfumato.simulate(study, data["values"].tolist())
    return dict(zip(release.items.to_pylist(), release.counts, strict=True))
