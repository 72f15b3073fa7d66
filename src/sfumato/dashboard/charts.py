"""Pictures of a release: what Vega-Lite draws in a browser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TOP = 20


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number of a release with its 95% interval."""

    label: str
    value: float
    low: float
    high: float
    is_sure: bool  # held by somebody, as far as can be told

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


def estimates(rows: Sequence[Mapping[str, Any]]) -> list[Estimate]:
    """The estimates of a release's JSON: counts of items, the coordinates of a mean, or what a
    question's rows have first: a number under its own name."""
    return [
        Estimate(
            label=str(row.get("item", row.get("coordinate", next(iter(row))))),
            value=row.get("count", row.get("mean", row[next(iter(row))])),
            low=row["low"],
            high=row["high"],
            is_sure=row.get("significant", True),
        )
        for row in rows
        if row["low"] is not None  # a mean's `top` left it out
    ]


def largest(found: Sequence[Estimate], *, is_mean: bool) -> list[Estimate]:
    """Those to draw: the largest counts, or the coordinates that are farthest from 0."""
    return sorted(found, key=lambda each: -abs(each.value) if is_mean else -each.value)[:TOP]


def bars(shown: Sequence[Estimate], *, axis: str) -> dict[str, Any]:
    """Bars with error bars, from top to bottom as given; paler where nobody may hold the item.

    Colours are the page's, which it gives as the configuration.
    """
    values = [
        {
            "label": each.label,
            "value": each.value,
            "low": each.low,
            "high": each.high,
            "sure": each.is_sure,
        }
        for each in shown
    ]
    end = {"type": "tick", "thickness": 1.5, "size": 7}
    return {
        "width": "container",
        "height": {"step": 24},
        "autosize": {"type": "fit-x", "contains": "padding"},
        "data": {"values": values},
        "encoding": {
            "y": {
                "field": "label",
                "type": "nominal",
                "sort": None,
                "axis": {"title": None, "domain": False, "ticks": False, "labelPadding": 8},
            }
        },
        "layer": [
            {
                "mark": {"type": "bar", "height": {"band": 0.62}},
                "encoding": {
                    "x": {"field": "value", "type": "quantitative", "title": axis},
                    "opacity": {"condition": {"test": "datum.sure", "value": 1}, "value": 0.45},
                },
            },
            {
                "mark": {"type": "rule", "strokeWidth": 1.5},
                "encoding": {
                    "x": {"field": "low", "type": "quantitative"},
                    "x2": {"field": "high"},
                },
            },
            {"mark": end, "encoding": {"x": {"field": "low", "type": "quantitative"}}},
            {"mark": end, "encoding": {"x": {"field": "high", "type": "quantitative"}}},
        ],
    }
