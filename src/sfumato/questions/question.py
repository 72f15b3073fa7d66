"""A planned question."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sfumato.flow.release import Privacy
from sfumato.questions.frequencies.design import Dictionary, FrequencyDesign
from sfumato.questions.heavy_hitters.design import HeavyHitterDesign, HistogramDesign
from sfumato.questions.local_frequencies.design import LocalDesign
from sfumato.questions.mean.design import MeanDesign
from sfumato.questions.new_words.design import WordDesign
from sfumato.questions.prefix_search.design import PrefixDesign
from sfumato.study import Study

if TYPE_CHECKING:
    from sfumato.learn.design import TrainingDesign


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Plan:
    """What will be asked, what it should give, what it costs and what it promises."""

    study: Study
    design: (
        FrequencyDesign
        | LocalDesign
        | WordDesign
        | HeavyHitterDesign
        | HistogramDesign
        | PrefixDesign
        | MeanDesign
        | TrainingDesign
    )
    dictionary: Dictionary | None  # of items asked about; for new words, of those already known
    algorithm: str
    predicted: Mapping[str, Any]
    privacy: Privacy
    warnings: tuple[str, ...]

    @property
    def parameters(self) -> dict[str, Any]:
        return self.design.parameters()

    @property
    def sums(self) -> FrequencyDesign:
        """The design of a question that is answered by sums."""
        assert isinstance(self.design, FrequencyDesign)  # as its trust says
        return self.design

    @property
    def asked_about(self) -> Dictionary:
        """The items of a question that lists them."""
        assert self.dictionary is not None  # only an open domain, a mean and a model have none
        return self.dictionary

    @property
    def contributions(self) -> int | None:
        """How many of its items a device reports, at most; None where it does not hold items."""
        parameters = self.parameters
        return parameters.get("items_per_device", parameters.get("records_per_device"))

    def to_dict(self) -> dict[str, Any]:
        return {
            "study": self.study.to_dict(),
            "plan": self.summary(),
            "privacy": self.privacy.to_dict(),
            "warnings": list(self.warnings),
        }

    def summary(self) -> dict[str, Any]:
        return {
            "algorithm": self.algorithm,
            "parameters": self.parameters,
            "predicted": dict(self.predicted),
        }

    def __repr__(self) -> str:
        lines = [f"Plan: {self.algorithm}"]
        lines += [f"  {name:<26} {value}" for name, value in self.parameters.items()]
        lines += ["predicted"]
        lines += [f"  {name:<26} {_short(value)}" for name, value in self.predicted.items()]
        lines += ["promise", *(f"  {line}" for line in self.privacy.lines)]
        lines += [f"warning: {warning}" for warning in self.warnings]
        return "\n".join(lines)


def _short(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
