"""Charts of a release, as Vega-Lite specifications for the browser."""

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
    is_significant: bool  # whether some device has the item, at the release's level
    segment: str = ""  # if the study has segments

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


def estimates(rows: Sequence[Mapping[str, Any]]) -> list[Estimate]:
    """The estimates in a release's JSON: counts of items, coordinates of a mean, or the first value
    of each row, under its own name."""
    return [
        Estimate(
            label=str(row.get("item", row.get("coordinate", next(iter(row))))),
            value=row.get("count", row.get("mean", row[next(iter(row))])),
            low=row["low"],
            high=row["high"],
            is_significant=row.get("significant", True),
            segment=row.get("segment", ""),
        )
        for row in rows
        if row["low"] is not None  # not in the `top` of a mean
    ]


def largest(values: Sequence[Estimate], *, are_counts: bool) -> list[Estimate]:
    """The estimates to draw: the largest counts, or the numbers farthest from 0."""
    return sorted(values, key=lambda each: -each.value if are_counts else -abs(each.value))[:TOP]


def bars(values: Sequence[Estimate], *, axis: str) -> dict[str, Any]:
    """Bars with error bars, in this order from top to bottom; paler if not significant.

    The page sets the colours, in the configuration.
    """
    data = [
        {
            "label": each.label,
            "value": each.value,
            "low": each.low,
            "high": each.high,
            "sure": each.is_significant,
        }
        for each in values
    ]
    end = {"type": "tick", "thickness": 1.5, "size": 7}
    return {
        "width": "container",
        "height": {"step": 24},
        "autosize": {"type": "fit-x", "contains": "padding"},
        "data": {"values": data},
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
