"""The request that starts a study, and the dictionary in the format that devices get."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import pyarrow as pa

from sfumato.device.outbox import DAY_SECONDS
from sfumato.errors import DataError, StudyError
from sfumato.planning import Plan, plan
from sfumato.questions.question import Dictionary
from sfumato.sketch.words import LONGEST_WORD
from sfumato.spec import canonical
from sfumato.study import QUESTIONS, Study, TrainingStudy

LIMITS = {  # of sensible studies; plans far beyond them would take hours
    "epsilon": (1e-9, 100.0),
    "delta": (1e-20, 1.0),
    "devices": (1, 10**10),
    "rounds": (1, 1_000),
    "items_per_device": (1, 1_000),
    "target_error": (1e-9, 1.0),
    "threshold": (1e-9, 1e12),
    "dropout": (1e-6, 1.0),
    "rows": (1, 65_536),
    "width": (2, 1 << 20),
    "failure_probability": (1e-12, 1.0),
    "fragments": (1, 65_536),
    "fragment_length": (1, 16),
}
_WHOLE = ("daily_reports", "delay_seconds", "closes", "open_seconds", "minimum")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The request that starts a study: the keys of a study file, and the terms for devices."""

    name: str  # shown to users, who consent to it
    purpose: str  # one sentence, shown beside it
    study: Mapping[str, Any]
    items: Sequence[str] | None = None  # the dictionary
    daily_reports: int | None = None  # per device; None: as in the study, or one
    delay_seconds: int = DAY_SECONDS
    lifetime_epsilon: float | None = None
    closes: int | None = None  # the last day for reports, in days since 1970-01-01 UTC
    open_seconds: int | None = None  # how long each task takes reports, even if it is full
    minimum: int | None = None  # of reports that suffice after that time; None: as planned
    passcode_digest: str | None = None  # SHA-256, in hexadecimal; None: any device may report

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Request:
        """A request from its keys; unknown and missing ones, and terms that are no numbers, raise
        StudyError."""
        keys = [field.name for field in fields(cls)]
        if unknown := sorted(set(values) - set(keys)):
            raise StudyError(
                f"unknown key{'s' if len(unknown) > 1 else ''} {', '.join(unknown)} in the request",
                hint=f"the keys are {', '.join(keys)}",
            )
        if missing := [name for name in ("name", "purpose", "study") if name not in values]:
            raise StudyError(f"a request must have {', '.join(missing)}")
        for name in _WHOLE:
            if values.get(name) is not None and type(values[name]) is not int:
                raise StudyError(f"{name} must be a whole number; got {values[name]!r}")
        return cls(**values)

    def parse_study(self) -> Study:
        """The study; StudyError if a collector cannot answer it."""
        if not isinstance(self.study, Mapping):
            raise StudyError("study must be the keys of a study file")
        for key in ("dictionary", "dictionary_column"):
            if self.study.get(key) is not None:
                raise StudyError(f"{key} is for files; send the items themselves as items")
        study = Study.from_mapping(self.study)
        if study.trust not in (trusts := study.facts.collected):
            raise StudyError(
                f"a collector does not answer {study.question} with trust {study.trust}; use "
                f"{' or '.join(trusts)}"
            )
        if study.training is not None:
            if study.training.model is None:
                raise StudyError(
                    "a collector cannot train a module of your own: devices have no code for it",
                    hint="name a model (training.model), or train in one process (sfumato.train)",
                )
            study = replace(study, training=_in_passes(study.training))
        for key, (least, most) in LIMITS.items():
            value = getattr(study, key)
            if value and not least <= value <= most:
                raise StudyError(
                    f"{key} must be {least:g} to {most:g} for a study that a collector runs; "
                    f"got {value}"
                )
        if study.facts.dictionary == "none" and self.items is not None:
            raise StudyError(f"{study.question} have no dictionary; leave out the items")
        if study.facts.dictionary == "listed" and self.items is None:
            raise StudyError(f"{study.question} need a list of items; send it as items")
        return study

    def dictionary(self) -> Dictionary | None:
        if self.items is None:
            return None
        if isinstance(self.items, str) or not all(isinstance(item, str) for item in self.items):
            raise DataError("items must be a list of texts")
        try:
            return Dictionary(pa.array(self.items, type=pa.string()))
        except UnicodeEncodeError:
            raise DataError("items must be Unicode without surrogates") from None

    def plan(self) -> Plan:
        """The plan of the study, which is not created."""
        study, dictionary = self.parse_study(), self.dictionary()
        return plan(study, items=None if dictionary is None else dictionary.items)

    def digest(self, study: Study, dictionary: str | None) -> str:
        """Equal for equal requests; a dictionary is represented by its own digest."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        # For older versions, rounds and dropout were numbers if a study had none.
        resolved = {"rounds": study.round_count, "dropout": study.expected_dropout}
        values |= {"study": study.to_dict() | resolved, "items": dictionary}
        for name in ("open_seconds", "minimum", "passcode_digest"):
            if values[name] is None:  # requests of older versions do not have it
                del values[name]
        facts = QUESTIONS[study.question]
        is_open = facts.data == "items" and facts.dictionary == "none"
        if study.word_length is None and not is_open:  # for older versions it was a number
            values["study"]["word_length"] = LONGEST_WORD
        return hashlib.sha256(canonical(values).encode()).hexdigest()


def _in_passes(keys: TrainingStudy) -> TrainingStudy:
    """Over a network the collector knows which devices are in a cohort: nothing is sampled."""
    if keys.sampling not in (None, "passes"):
        raise StudyError(
            "a collector trains in passes, since it knows which devices are in a cohort; "
            f"got training.sampling = {keys.sampling!r}",
            hint='set training.sampling = "passes", or leave it out',
        )
    return replace(keys, sampling="passes")


def to_lines(dictionary: Dictionary) -> bytes:
    """A dictionary in the format that devices get: one item per line, each a JSON string."""
    return "".join(
        json.dumps(item, ensure_ascii=False) + "\n" for item in dictionary.items.to_pylist()
    ).encode()


def from_lines(body: bytes) -> Dictionary:
    return Dictionary(pa.array([json.loads(line) for line in body.split(b"\n")[:-1]], pa.string()))
