import math

import sfumato


def answer(data):
    study = {
        "question": "mean",
        "trust": "secure",
        "epsilon": math.inf,
        "clip": 1.0,
        "compression": "none",
        "dropout": 0.0,
    }
    return sfumato.simulate(study, data["values"], protocol=True).mean
