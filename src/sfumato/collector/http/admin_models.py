"""The JSON of administration: what a request must hold, and what an answer does."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class PlanRequest(_Request):
    """A study to size: the keys of a study file, and the items in place of its dictionary."""

    study: dict[str, Any] = Field(
        description='keys of a study file; epsilon null, or "inf": no promise'
    )
    items: list[str] | None = None

    @field_validator("study")
    @classmethod
    def _is_said(cls, study: dict[str, Any]) -> dict[str, Any]:
        """What is too large for a number, such as 1e400, does not say that nothing is promised."""
        for key, value in study.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{key} must be a finite number; epsilon null says: no promise")
        return study | {"epsilon": None} if study.get("epsilon") == "inf" else study


class StudyRequest(PlanRequest):
    """A study to open, and the terms on which devices take part."""

    name: str = Field(description="what users are shown, and what consent goes by")
    purpose: str = Field(description="one sentence, shown to users")
    daily_reports: int | None = Field(None, description="null: what the study says, or one")
    delay_seconds: int = 86_400
    lifetime_epsilon: float | None = None
    closes: int | None = Field(None, description="last day, in days since 1970-01-01")


class Me(BaseModel):
    """Whose token this is."""

    id: str
    name: str
    role: str = Field(description="admin or analyst")
    expires: int = Field(description="in seconds since 1970")


class Study(BaseModel):
    """A study and how far it is."""

    model_config = ConfigDict(extra="allow")

    id: str
    name: str
    purpose: str
    state: Literal["collecting", "closing", "released", "failed", "deleted"]
    problem: str = Field("", description="why it failed")


class Studies(BaseModel):
    studies: list[Study]


class Entry(BaseModel):
    """One charge: which devices, for which task, what it cost."""

    campaign: str
    cohort: str
    task: str
    loss: dict[str, Any]


class Ledger(BaseModel):
    """What was spent of the budget that all studies share."""

    epsilon: float | None = Field(description="that may be spent; null: no limit")
    delta: float
    spent: float | None = Field(description="by the device asked most; null: without bound")
    entries: list[Entry]
