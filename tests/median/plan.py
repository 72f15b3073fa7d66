"""Size a median."""

from __future__ import annotations

import pyarrow as pa

from median.design import NUMBERS, MedianDesign
from sfumato.errors import StudyError
from sfumato.flow.secure_sum import traffic
from sfumato.questions.frequencies.plan import noise_for
from sfumato.questions.promise import SEES_TABLES, ZERO_OUT, device_promise
from sfumato.questions.question import Dictionary, Plan
from sfumato.sketch import OneHot
from sfumato.study import Study


def plan(study: Study, dictionary: Dictionary | None) -> Plan:
    assert study.devices is not None
    if study.epsilon is None:
        raise StudyError("a median is released with noise; give a finite epsilon")
    noise = noise_for(study, OneHot(categories=NUMBERS).sensitivity(1))
    design = MedianDesign(devices=study.devices, mechanism=noise)
    return Plan(
        study=study,
        design=design,
        dictionary=Dictionary(pa.array([str(number) for number in range(NUMBERS)])),
        algorithm="one-hot numbers",
        predicted={**traffic([design.task()]), "rounds": 1, "assumes": "nothing about the data"},
        privacy=device_promise(
            study,
            neighbours=ZERO_OUT.format("table becomes"),
            mechanism="noise on every cell",
            sees=SEES_TABLES,
            influence=design.influence,
        ),
        warnings=(),
    )
