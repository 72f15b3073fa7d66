"""Figures of matplotlib that notebooks show by themselves, with fonts for most scripts."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from sfumato.errors import SfumatoError

ENDINGS = (".png", ".svg", ".pdf")
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
        def savefig(self, fname: Any, **options: Any) -> None:
            if isinstance(fname, str | Path):
                check_file(fname)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                super().savefig(fname, **options)
            _warn(caught)

        def _repr_png_(self) -> bytes:
            file = io.BytesIO()
            self.savefig(file, dpi=110, format="png")
            return file.getvalue()

    return Picture(figsize=(width, height), layout="constrained")


def check_file(path: str | Path) -> None:
    """Raise SfumatoError unless a picture can have this path, before there is work to lose."""
    figure(1, 1)  # refused without matplotlib
    if Path(path).suffix.lower() not in ENDINGS:
        raise SfumatoError(f"the file of a picture must end in .png, .svg or .pdf; got {path}")
    if not Path(path).parent.is_dir():
        raise SfumatoError(f"there is no folder {Path(path).parent}")


def _warn(caught: Sequence[warnings.WarningMessage]) -> None:
    """Warn again; once, with what to do, for all characters that no font has."""
    missing = set()
    for each in caught:
        glyph = re.match(r"Glyph (\d+) .* missing from font", str(each.message))
        if glyph is None:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        else:
            missing.add(chr(int(glyph[1])))
    if missing:
        warnings.warn(
            f"no font of this computer has {' '.join(sorted(missing)[:5])}, so the picture has "
            "boxes for them; install one that has them, such as Noto Sans CJK or Noto Emoji",
            stacklevel=4,
        )


@cache
def fonts() -> list[str]:
    """The fonts for labels in any script, of those that this computer has."""
    from matplotlib import font_manager

    names = set(font_manager.get_font_names())
    return [name for name in _FONTS if name in names]
