"""A release as HTML, for notebooks and as a page of its own: bars with intervals, promise, cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
import pyarrow as pa

_STYLE = (
    "<style>.sfumato{font:14px/1.45 system-ui,sans-serif;max-width:56rem}"
    ".sfumato table{border-collapse:collapse}"
    ".sfumato td,.sfumato th{padding:.15rem .6rem;text-align:left;white-space:nowrap}"
    ".sfumato td.number,.sfumato th.number{text-align:right;font-variant-numeric:tabular-nums}"
    ".sfumato svg{display:block}.sfumato .bar{fill:#8a9bb5}"
    ".sfumato .interval{stroke:currentColor;stroke-width:1.5}"
    ".sfumato ul{margin:.3rem 0;padding-left:1.2rem}"
    ".sfumato .tables{display:flex;flex-wrap:wrap;gap:1rem 2rem}</style>"
)
_BAR = 240  # pixels of the longest bar


@dataclass(frozen=True, slots=True)
class Row:
    """One estimate, with its interval if it has one."""

    name: str
    value: float
    low: float | None
    high: float | None

    @property
    def text(self) -> str:
        form = ",.1f" if abs(self.value) >= 100 else ".4g"
        if self.low is None or self.high is None:
            return format(self.value, form)
        return f"{self.value:{form}} ({self.low:{form}} … {self.high:{form}})"


def rows(frame: pa.Table, most: int | None) -> list[Row]:
    """The largest estimates of a frame, which has its number in the first column, or in the second
    beside a name, and `low` and `high`."""
    first, *others = frame.column_names
    has_names = others[0] not in ("low", "high")
    value = others[0] if has_names else first
    sizes = -np.abs(frame.column(value).to_numpy())
    largest = np.argsort(sizes, kind="stable")[:most]
    return [
        Row(str(row[first]) if has_names else first, row[value], row["low"], row["high"])
        for row in frame.take(pa.array(largest)).to_pylist()
    ]


def block(
    title: str, tables: Mapping[str, Sequence[Row]], rest: str, sections: Sequence[str]
) -> str:
    """A part of a page: tables of bars side by side, each under its name, a line about the `rest`,
    and sections below."""
    lines = [f'{_STYLE}<div class="sfumato"><p><strong>{escape(title)}</strong></p>']
    lines += ['<div class="tables">', *(_table(*table) for table in tables.items()), "</div>"]
    if rest:
        lines.append(f"<p>{escape(rest)}</p>")
    return "".join([*lines, *sections, "</div>"])


def _table(name: str, rows: Sequence[Row]) -> str:
    """A table of bars, with a scale of its own."""
    ends = [end for row in rows for end in (row.value, row.low, row.high, 0.0) if end is not None]
    left, right = min(ends, default=0.0), max(ends, default=0.0)
    scale = _BAR / (right - left) if right > left else 0.0
    lines = [f"<table><tr><th>{escape(name)}</th>"]
    lines.append('<th class="number">estimate (95% interval)</th><th></th></tr>')
    for row in rows:
        start, end = sorted((scale * (0.0 - left), scale * (row.value - left)))
        whisker = ""
        if row.low is not None and row.high is not None:
            first, last = scale * (row.low - left), scale * (row.high - left)
            whisker = f'<path class="interval" d="M{first:.1f} 4v8m0-4H{last:.1f}m0-4v8"/>'
        lines.append(
            f'<tr><td>{escape(row.name)}</td><td class="number">{escape(row.text)}</td><td>'
            f'<svg width="{_BAR + 4}" height="16" viewBox="-2 0 {_BAR + 4} 16" role="img" '
            f'aria-label="{escape(row.text)}"><rect class="bar" x="{start:.1f}" y="3" '
            f'width="{end - start:.1f}" height="10"/>{whisker}</svg></td></tr>'
        )
    return "".join([*lines, "</table>"])


def details(title: str, lines: Sequence[str], *, is_open: bool = False) -> str:
    """A list that opens at a click."""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    start = "<details open>" if is_open else "<details>"
    return f"{start}<summary>{escape(title)}</summary><ul>{items}</ul></details>" if lines else ""


def page(title: str, body: str) -> str:
    """A whole document in one file, without scripts and without anything to fetch."""
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><body>{body}</body></html>\n"
    )
