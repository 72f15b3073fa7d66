import sfumato


def answer(data):
    study = {"question": "mean", "trust": "central", "epsilon": 1.0, "delta": 1e-6, "clip": 1.0}
    return sfumato.simulate(study, data["values"]).mean
