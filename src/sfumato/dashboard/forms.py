"""What a browser sends of a form: texts by their names, and files that were chosen."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from urllib.parse import parse_qsl

from sfumato.collector.problems import Problem

_BOUNDARY = re.compile(r'multipart/form-data;.*boundary="?([^";,]{1,70})"?', re.IGNORECASE)
_NAME = re.compile(rb'[; ]name="([^"]*)"')
_FILE_NAME = re.compile(rb'[; ]filename="([^"]*)"')
_MOST_FIELDS = 200


@dataclass(frozen=True, slots=True)
class File:
    """A file that was chosen."""

    name: str
    content: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Form:
    """The fields of a form; of a name that comes twice, the last."""

    texts: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), repr=False)
    files: Mapping[str, File] = field(default_factory=lambda: MappingProxyType({}))

    def text(self, name: str) -> str:
        """What was written, without spaces around it; nothing if there is no such field."""
        return self.texts.get(name, "").strip()

    @classmethod
    def parse(cls, content_type: str, body: bytes) -> Form:
        """A form from a request's body; what no browser sends raises Problem."""
        try:
            if match := _BOUNDARY.match(content_type):
                return cls._from_parts(match[1].encode("ascii"), body)
            if content_type.partition(";")[0].strip() == "application/x-www-form-urlencoded":
                pairs = parse_qsl(
                    body.decode("ascii"),
                    keep_blank_values=True,
                    errors="strict",
                    max_num_fields=_MOST_FIELDS,
                )
                return cls(dict(pairs))
        except ValueError:  # UnicodeError is one, and so are too many fields
            raise _malformed() from None
        raise _malformed()

    @classmethod
    def _from_parts(cls, boundary: bytes, body: bytes) -> Form:
        """RFC 7578: a line with the boundary before each part, and one with two dashes at last."""
        before, *parts, end = (b"\r\n" + body).split(b"\r\n--" + boundary, _MOST_FIELDS)
        if before or not end.startswith(b"--"):
            raise _malformed()
        texts: dict[str, str] = {}
        files: dict[str, File] = {}
        for part in parts:
            head, blank, content = part.partition(b"\r\n\r\n")
            name, file_name = _NAME.search(head), _FILE_NAME.search(head)
            if not blank or name is None:
                raise _malformed()
            if file_name is None:
                texts[name[1].decode()] = content.decode()
            elif file_name[1]:  # a file field in which nothing was chosen has no name
                files[name[1].decode()] = File(file_name[1].decode(), content)
        return cls(texts, files)


def _malformed() -> Problem:
    return Problem("malformed-request", "the body is not a form as browsers send it")
