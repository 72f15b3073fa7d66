"""Turn a study into a sized campaign whose error, cost and privacy are known in advance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from sfumato import files
from sfumato.errors import DataError, ImpossibleError, SfumatoError, StudyError
from sfumato.flow import pictures
from sfumato.questions.question import Dictionary, Plan
from sfumato.questions.registry import planner_of
from sfumato.study import Study

WEAK_EPSILON = 10.0  # above this, a plan warns
POOR_SHARE = 0.1  # of the devices: a plan warns if rarer items are not found

__all__ = ["Alternative", "Comparison", "Plan", "compare", "plan"]


def plan(
    study: Study | Mapping[str, Any] | Path | str,
    *,
    items: pa.Array | pa.ChunkedArray | Sequence[str] | None = None,
) -> Plan:
    """Choose and size the campaign that answers a study, and predict its error and cost.

    `study` is a Study, its keys, or the path of a TOML file; `items` is the dictionary, if it is
    not in a file. A study whose limits cannot be met raises ImpossibleError, which says what would
    make it possible.
    """
    study = Study.read(study)
    if study.devices is None:
        raise StudyError("a plan needs the number of devices that will be asked; set devices")
    study.check_keys()
    dictionary = _dictionary(study, items)
    if study.segments and dictionary is not None:
        dictionary = dictionary.crossed(study.segments)
    planned = _with_segments(planner_of(study)(study, dictionary))
    more = (*_weak_promises(study), *_poor_answers(study, planned.predicted))
    return replace(planned, warnings=(*planned.warnings, *more))


def _with_segments(planned: Plan) -> Plan:
    """The same plan, with what it says about a study's segments.

    The error of a count is that of any pair of segment and item. As a share of a segment's devices,
    it depends on how many they are.
    """
    study, predicted = planned.study, dict(planned.predicted)
    if not study.segments:
        return planned
    if study.segment_shares:
        predicted["standard_error_share_of_segment"] = {
            name: predicted["standard_error_share"] / share
            for name, share in zip(study.segments, study.segment_shares, strict=True)
        }
    privacy = planned.privacy
    neighbours = f"{privacy.neighbours}; a value is a segment and an item together"
    return replace(planned, predicted=predicted, privacy=replace(privacy, neighbours=neighbours))


def _weak_promises(study: Study) -> list[str]:
    """Warnings about a guarantee that means little."""
    if study.epsilon is None or study.epsilon <= WEAK_EPSILON:
        return []
    return [
        f"epsilon {study.epsilon:g} is a weak guarantee: the answer may change the odds of a guess "
        f"about one {'report' if study.is_local else 'device'} by a factor of up to "
        f"e^{study.epsilon:g}; most releases use 1 to 8"
    ]


def _poor_answers(study: Study, predicted: Mapping[str, Any]) -> list[str]:
    """Warnings about an answer that tells little."""
    detectable, width = predicted.get("detectable_count"), predicted.get("half_width_95")
    advice = "ask more devices, raise epsilon, or use another trust"
    most, largest, share = study.device_count, "that all devices hold", "of the devices hold it"
    if study.count == "copies":
        most *= study.items_per_device
        largest = "of which every device reports as many copies as it may"
        share = "of all copies that the devices may report are of it"
    if detectable is not None and detectable > most:
        return [f"not even an item {largest} is found with a probability of 95%; {advice}"]
    if detectable is not None and detectable > POOR_SHARE * most:
        return [
            "an item is found with a probability of 95% only if "
            f"{detectable / most:.0%} {share}; {advice}"
        ]
    if detectable is None and width is not None and width > POOR_SHARE * most:
        return [f"counts are known to ±{width / most:.0%} of the devices; {advice}"]
    return []


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Alternative:
    """One algorithm that could answer a study, with its plan; or why it could not."""

    algorithm: str
    plan: Plan | None
    problem: str = ""  # why it is not possible
    is_chosen: bool = False

    @property
    def error(self) -> float:
        """The number by which alternatives are compared: for lists the detectable count, otherwise
        the standard error of a rare item or coordinate; NaN if a plan predicts neither."""
        assert self.plan is not None  # only possible ones are compared
        predicted = self.plan.predicted
        return float(predicted.get("detectable_count", predicted.get("standard_error", math.nan)))

    @property
    def bytes_per_device(self) -> int:
        """The bytes that a device sends: the fewest, if a pilot decides."""
        assert self.plan is not None  # as above
        predicted = self.plan.predicted
        return int(predicted.get("bytes_if_mean_is_zero", predicted["bytes_per_device"]))

    def __repr__(self) -> str:
        return f"Alternative({self.algorithm}, {'possible' if self.plan else self.problem})"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Comparison:
    """All algorithms that could answer a study, and the reason for the planner's choice."""

    study: Study
    alternatives: tuple[Alternative, ...]

    @property
    def possible(self) -> list[Alternative]:
        return [each for each in self.alternatives if each.plan is not None]

    @property
    def choice(self) -> Alternative:
        """The one that `plan` takes."""
        return next(each for each in self.alternatives if each.is_chosen)

    @property
    def reason(self) -> str:
        """Why the planner chose this one, in one line."""
        choice, others = self.choice, [each for each in self.possible if not each.is_chosen]
        key = self.study.facts.algorithm_key
        if getattr(self.study, key) is not None:
            return f"the study asks for it ({key})"
        if not others:
            return "it is the only possible one"
        least = min(each.error for each in others)
        fewest = min(each.bytes_per_device for each in others)
        parts = []
        if choice.error <= 1.1 * least:
            parts.append("no other has a clearly smaller error")
        if choice.bytes_per_device <= fewest:
            parts.append("no other sends fewer bytes")
        if not parts:
            parts.append("it balances error and bytes: none of the others is better in both")
        return ", and ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        return {
            "study": self.study.to_dict(),
            "reason": self.reason,
            "alternatives": [
                {
                    "algorithm": each.algorithm,
                    "chosen": each.is_chosen,
                    "problem": each.problem or None,
                    "plan": None if each.plan is None else each.plan.summary(),
                }
                for each in self.alternatives
            ],
        }

    def __repr__(self) -> str:
        names = {
            "standard_error": "error (rare)",
            "standard_error_of_middle": "(middle)",
            "standard_error_of_largest": "(largest)",
            "detectable_count": "detectable",
            "bytes_if_mean_is_zero": "bytes up, at least",
            "bytes_per_device": "bytes up",
            "bytes_down": "bytes down",
            "rounds": "rounds",
            "server_seconds": "server s",
            "server_bytes": "server MB",
        }
        columns = [
            name
            for name in names
            if any(name in each.plan.predicted for each in self.possible if each.plan)
        ]
        rows = [["", "algorithm", *(names[name] for name in columns)]]
        for each in self.possible:
            assert each.plan is not None  # it is possible
            numbers = [
                _rough(each.plan.predicted.get(name), mega=name == "server_bytes")
                for name in columns
            ]
            rows.append(["*" if each.is_chosen else "", each.algorithm, *numbers])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) if place < 2 else cell.rjust(width)
                for place, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        lines += [
            f"   {each.algorithm}: {each.problem}" for each in self.alternatives if each.problem
        ]
        return "\n".join([*lines, f"* chosen: {self.reason}"])

    def plot(self) -> Any:
        """A picture of error against bytes; returns the matplotlib figure."""
        if any(math.isnan(each.error) for each in self.possible):
            raise SfumatoError(f"plans of {self.study.question} predict no error to draw")
        figure = pictures.figure(7.5, 4.5)
        axes = figure.add_subplot()
        for each in self.possible:
            look: dict[str, Any] = {"color": "#5f81ad", "markersize": 8, "marker": "o"}
            if each.is_chosen:
                look = {"color": "#b5502b", "markersize": 16, "marker": "*"}
            axes.plot([each.bytes_per_device], [each.error], linestyle="", **look)
            axes.annotate(
                each.algorithm, (each.bytes_per_device, each.error), xytext=(8, 6),
                textcoords="offset points", fontsize=9,
            )  # fmt: skip
        is_list = any(
            "detectable_count" in each.plan.predicted for each in self.possible if each.plan
        )
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.margins(x=0.15, y=0.15)
        axes.set_xlabel("bytes that a device sends")
        axes.set_ylabel("detectable count" if is_list else "standard error of a rare item")
        axes.set_title(
            f"{self.study.question}, trust {self.study.trust}: the star is the plan", loc="left"
        )
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        return figure


def compare(
    study: Study | Mapping[str, Any] | Path | str,
    *,
    items: pa.Array | pa.ChunkedArray | Sequence[str] | None = None,
) -> Comparison:
    """Plan a study with every algorithm that could answer it, and mark the one that `plan` takes.

    The arguments are those of `plan`.
    """
    study = Study.read(study)
    own_plan = plan(study, items=items)
    facts = study.facts
    own = own_plan.design.algorithm  # one of the names, if there are several: tests check it
    alternatives = []
    for name in facts.algorithms.get(study.trust, (own,)):
        if name == own:
            alternatives.append(Alternative(algorithm=name, plan=own_plan, is_chosen=True))
            continue
        change: Any = {facts.algorithm_key: name}
        try:
            other = plan(replace(study, **change), items=items)
        except (ImpossibleError, StudyError) as problem:
            alternatives.append(Alternative(algorithm=name, plan=None, problem=str(problem)))
        else:
            alternatives.append(Alternative(algorithm=name, plan=other))
    return Comparison(study=study, alternatives=tuple(alternatives))


def _rough(value: Any, *, mega: bool = False) -> str:
    if value is None:
        return ""
    value = value / 1e6 if mega else value
    return f"{value:,.3g}" if isinstance(value, float) else f"{value:,}"


def _texts(items: Any) -> pa.Array:
    """Items in memory as an array of texts."""
    if isinstance(items, pa.ChunkedArray):
        return items.combine_chunks()
    if isinstance(items, pa.Array):
        return items
    hint = "give a list of texts; a file of items is the study's dictionary"
    if isinstance(items, str | bytes):
        raise DataError("items must be a list of texts; got one text", hint=hint)
    try:
        return pa.array(items, type=pa.string())
    except (pa.ArrowException, TypeError) as problem:
        raise DataError(f"items must be a list of texts: {problem}", hint=hint) from problem


def _dictionary(
    study: Study, items: pa.Array | pa.ChunkedArray | Sequence[str] | None
) -> Dictionary | None:
    """The items that a study lists, if any."""
    if study.facts.dictionary == "none":
        return None
    if items is not None:
        return Dictionary(_texts(items))
    if study.dictionary is not None:
        column = study.dictionary_column or files.column_names(study.dictionary)[0]
        batches = files.read_columns(study.dictionary, [column], [pa.string()])
        parts = [batch.column(0) for batch in batches]
        return Dictionary(pa.concat_arrays(parts) if parts else pa.array([], type=pa.string()))
    if study.facts.dictionary == "listed":
        raise StudyError(
            f"{study.question} are of listed items; give items, or the study a dictionary (a CSV "
            "or Parquet file)"
        )
    return None
