"""Makes docstrings into Markdown for the reference pages.

Ours are plain text with examples. Markdown would read `>>>` as a quotation of a quotation, `**` as
bold type, and would run the lines "Error: …" and "Sensitivity: …" together. So examples are fenced
here, powers are escaped and promises become paragraphs. The comment behind a field is its text.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^( *)>>> .*(?:\n(?! *\n|$).*)*", re.MULTILINE)
_PROMISES = (
    "Assumes|Claim|Claim, proof|Composition|Error|Hybrid, one row|Proof|Sensitivity|Utility"
    "|Who sees what"
)
_PROMISE = re.compile(rf"^({_PROMISES}): (?=\S)", re.MULTILINE)
_CODE = re.compile(r"(^```pycon\n.*?^```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r".*?\s# (?!type: )(.*)")


def to_markdown(text: str) -> str:
    r"""A docstring with its examples fenced, its powers escaped and its promises set apart.

    >>> to_markdown("Error: below 2**-9.")
    '\n**Error:** below 2\\*\\*-9.'
    >>> to_markdown(">>> 1 + 1\n2").splitlines()
    ['```pycon', '>>> 1 + 1', '2', '```']
    """

    def fenced(match: re.Match[str]) -> str:
        lines = [line.removeprefix(match[1]) for line in match[0].split("\n")]
        return "\n".join(["```pycon", *lines, "```"])

    parts = _CODE.split(_EXAMPLE.sub(fenced, text))
    parts[::2] = [part.replace("**", r"\*\*") for part in parts[::2]]  # the others are code
    return _PROMISE.sub(r"\n**\1:** ", "".join(parts))


def comment_of(line: str) -> str | None:
    """What the comment at the end of a line says.

    >>> comment_of("rows: int  # odd, so that the median is one row's reading")
    "odd, so that the median is one row's reading"
    """
    match = _COMMENT.match(line)
    return match[1] if match else None


class MarkdownDocstrings(griffe.Extension):
    """Rewrites every docstring as it is read."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)

    def on_attribute_instance(self, *, attr: griffe.Attribute, **kwargs: Any) -> None:
        text = comment_of(attr.source.split("\n")[0]) if attr.docstring is None else None
        if text is not None:
            attr.docstring = griffe.Docstring(to_markdown(text), parent=attr)
