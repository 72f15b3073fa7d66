"""Values of a study with segments: a device's segment and its item, as one text.

A segment is a part of the population that gets an answer of its own, such as a locale. The pair is
what a device reports, so its segment is protected as its item is.

    >>> pair("fr", "joy")
    'fr\\tjoy'
    >>> is_pair("joy")
    False
"""

from __future__ import annotations

from sfumato.errors import SpecError

SEPARATOR = "\t"  # in no segment, so that the first one of a pair ends its segment
LONGEST = 100  # characters


def pair(segment: str, item: str) -> str:
    """A value of a study with segments."""
    if not is_segment(segment):  # the error omits it: it is a device's own
        raise SpecError(
            f"a segment must be 1 to {LONGEST} printable characters without spaces around them; "
            "got something else"
        )
    return f"{segment}{SEPARATOR}{item}"


def is_segment(text: object) -> bool:
    """Whether a text can name a segment."""
    return (
        isinstance(text, str)
        and text.isprintable()
        and text.strip() == text
        and 1 <= len(text) <= LONGEST
    )


def is_pair(value: str) -> bool:
    """Whether a value has a segment."""
    return is_segment(value.partition(SEPARATOR)[0]) and SEPARATOR in value
