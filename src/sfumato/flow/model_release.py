"""The release of a model that devices trained through a collector: all but its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from sfumato.flow.model_terms import PARAMETER_BYTES, digest_of
from sfumato.flow.release import Cost, Privacy


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ModelRelease:
    """A model after its last round. How well it does is for who has examples to test it on: a
    collector has none."""

    parameters: bytes = field(compare=False)  # float32, little-endian; none where only told about
    digest: str  # SHA-256 of the parameters
    count: int  # how many there are
    rate: float  # parameters by cells sent
    rounds_held: int  # of those asked: others had too few devices
    privacy: Privacy
    cost: Cost
    study: Mapping[str, Any]
    plan: Mapping[str, Any]
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, parameters: bytes, **told: Any) -> ModelRelease:
        count = len(parameters) // PARAMETER_BYTES
        return cls(parameters=parameters, digest=digest_of(parameters), count=count, **told)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the parameters as plain data."""
        return {
            "study": dict(self.study),
            "plan": dict(self.plan),
            "privacy": self.privacy.to_dict(),
            "cost": self.cost.to_dict(),
            "model": {"parameters": self.count, "sha256": self.digest},
            "rate": self.rate,
            "rounds_held": self.rounds_held,
            "notes": list(self.notes),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelRelease:
        """The release that `to_dict` described, without the parameters."""
        cost = {each.name: data["cost"][each.name] for each in fields(Cost)}
        return cls(
            parameters=b"",
            digest=data["model"]["sha256"],
            count=data["model"]["parameters"],
            rate=data["rate"],
            rounds_held=data["rounds_held"],
            privacy=Privacy(**data["privacy"]),
            cost=Cost(**cost),
            study=data["study"],
            plan=data["plan"],
            notes=tuple(data["notes"]),
        )

    def __repr__(self) -> str:
        epsilon = self.privacy.epsilon
        promise = "no differential privacy" if epsilon is None else f"epsilon {epsilon:.4g}"
        return (
            f"ModelRelease: {self.count:,} parameters after {self.rounds_held:,} rounds, "
            f"{self.rate:.3g} parameters to a cell; {promise}"
        )
