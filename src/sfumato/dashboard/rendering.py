"""Templates, the formats of numbers, and the headers of every page."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.responses import HTMLResponse, Response

from sfumato import __version__
from sfumato.dashboard import assets
from sfumato.dashboard.charts import Estimate
from sfumato.privacy.accounting import epsilon_text
from sfumato.study import QUESTIONS, TRUSTS

_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    # Not no-referrer: browsers would then send "null" as the origin of our own forms.
    "Referrer-Policy": "same-origin",
}
_DAY_ZERO = datetime(1970, 1, 1, tzinfo=UTC)


def add_headers(response: Response) -> Response:
    """Add the headers of a page to a response; by default it is not cached."""
    for name, value in _HEADERS.items():
        response.headers.setdefault(name, value)
    response.headers.setdefault("Cache-Control", "no-store")
    return response


def page(template: str, *, status: int = 200, **values: Any) -> Response:
    return HTMLResponse(_TEMPLATES.get_template(template).render(**values), status_code=status)


@lru_cache(maxsize=32)  # long tables take long to render, and a release does not change
def rows(estimates: tuple[Estimate, ...], *, has_significance: bool) -> str:
    """Estimates as rows of an HTML table."""
    return _TEMPLATES.get_template("values.html").render(
        estimates=estimates, has_significance=has_significance
    )


def count(value: float) -> str:
    """A whole number with commas between thousands.

    >>> count(1234567)
    '1,234,567'
    """
    return f"{value:,.0f}"


def rough(value: Any) -> str:
    """A number with four significant digits; other values unchanged.

    >>> rough(19.885468), rough(104923.6), rough(0.00198854), rough("laplace"), rough(None)
    ('19.89', '104,924', '0.001989', 'laplace', '—')
    """
    if value is None:
        return "—"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or not math.isfinite(value):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.4g}"


def epsilon(value: float | None) -> str:
    """An epsilon that was or may be spent; rounded up.

    >>> epsilon(0.99951), epsilon(math.inf), epsilon(None)
    ('0.9996', 'without bound', '—')
    """
    if value is None:
        return "—"
    return "without bound" if value == math.inf else epsilon_text(value)


def within(value: float, half_width: float) -> str:
    """An estimate with as many digits as its interval makes meaningful.

    >>> within(1234.5678, 38.97), within(12.345, 3.0), within(0.1234567, 0.0123), within(7.0, 0.0)
    ('1,235', '12.3', '0.123', '7')
    """
    if half_width <= 0:
        return f"{value:,.10g}"
    return f"{value:z,.{max(0, 1 - math.floor(math.log10(half_width)))}f}"


def in_bytes(value: float | None) -> str:
    """A size in a suitable unit.

    >>> in_bytes(162), in_bytes(16987), in_bytes(3_200_000), in_bytes(1)
    ('162 bytes', '17.0 kB', '3.2 MB', '1 byte')
    """
    if value is None:
        return "—"
    if value < 1_000:
        return f"{value:,.0f} byte{'' if value == 1 else 's'}"
    for unit in ("kB", "MB", "GB", "TB"):
        value /= 1_000
        if value < 1_000 or unit == "TB":
            break
    return f"{value:,.1f} {unit}"


def words(name: str) -> str:
    """A key as a label.

    >>> words("items_per_device"), words("half_width_95")
    ('Items per device', 'Half width 95')
    """
    return name.replace("_", " ").capitalize()


def sentence(text: str, *, capital: bool = True) -> str:
    """A message as a sentence, or the end of one.

    >>> sentence("no device answered"), sentence("one-hot", capital=False)
    ('No device answered.', 'one-hot.')
    """
    return (
        (text[:1].upper() if capital else text[:1])
        + text[1:]
        + ("" if text.endswith((".", "?", "!")) else ".")
    )


def duration(seconds: int) -> str:
    """A time in the largest unit that divides it.

    >>> duration(86_400), duration(5_400), duration(1)
    ('24 hours', '90 minutes', '1 second')
    """
    units = (("hour", 3_600), ("minute", 60), ("second", 1))
    unit, size = next((unit, size) for unit, size in units if seconds % size == 0)
    return f"{seconds // size:,} {unit}{'' if seconds == size else 's'}"


def day(number: int) -> str:
    """The date of a day since 1970.

    >>> day(20_000)
    '2024-10-04'
    """
    return (_DAY_ZERO + timedelta(days=number)).date().isoformat()


def moment(seconds: int) -> str:
    """A time since 1970, to the minute.

    >>> moment(1_728_000_000)
    '2024-10-04 00:00 UTC'
    """
    return f"{_DAY_ZERO + timedelta(seconds=seconds):%Y-%m-%d %H:%M} UTC"


_TEMPLATES = Environment(
    loader=PackageLoader("sfumato.dashboard"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters |= {
    "count": count,
    "rough": rough,
    "epsilon": epsilon,
    "in_bytes": in_bytes,
    "words": words,
    "sentence": sentence,
    "duration": duration,
    "day": day,
    "moment": moment,
}
_TEMPLATES.globals |= {
    "asset": assets.address,
    "within": within,
    "version": __version__,
    "facts": QUESTIONS,
    "trust_facts": TRUSTS,
}
