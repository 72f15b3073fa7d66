"""Figures of matplotlib that notebooks show by themselves, with fonts for most scripts."""

from __future__ import annotations

import io
from functools import cache
from typing import Any

from sfumato.errors import SfumatoError

_FONTS = (  # in the order in which they are tried for a character
    "DejaVu Sans",
    "Noto Sans CJK JP",
    "Noto Sans CJK SC",
    "Noto Sans JP",
    "Noto Sans SC",
    "Source Han Sans",
    "WenQuanYi Zen Hei",
    "WenQuanYi Micro Hei",
    "Droid Sans Fallback",
    "Hiragino Sans",
    "Yu Gothic",
    "Microsoft YaHei",
    "Malgun Gothic",
    "Noto Emoji",
    "Symbola",
    "Segoe UI Emoji",
    "Noto Sans Arabic",
    "Noto Sans Devanagari",
)


def figure(width: float, height: float) -> Any:
    """An empty figure of this size in inches; SfumatoError without matplotlib.

    It needs no window and no setting of a notebook: where the last line of a cell is a figure, the
    notebook shows it.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as problem:
        raise SfumatoError("plots need matplotlib", hint='pip install "sfumato[plot]"') from problem

    class Picture(Figure):
        def _repr_png_(self) -> bytes:
            file = io.BytesIO()
            self.savefig(file, dpi=110, format="png")
            return file.getvalue()

    return Picture(figsize=(width, height), layout="constrained")


@cache
def fonts() -> list[str]:
    """The fonts for labels in any script, of those that this computer has."""
    from matplotlib import font_manager

    names = set(font_manager.get_font_names())
    return [name for name in _FONTS if name in names]
