"""Forms as browsers send them: texts and files by their names, parsed by python-multipart within
limits."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from urllib.parse import unquote_plus

import python_multipart
from python_multipart import multipart

from sfumato.collector.problems import Problem

FORM_BYTES = 64 << 10  # of a form, or of each field that is not declared to be large
MOST_FIELDS = 64

# Its warnings quote the body.
logging.getLogger(python_multipart.__name__).setLevel(logging.CRITICAL + 1)


@dataclass(frozen=True, slots=True)
class File:
    """A file that was uploaded."""

    name: str
    content: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Form:
    """The fields of a form. If a name occurs twice, its last field counts."""

    texts: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), repr=False)
    files: Mapping[str, File] = field(default_factory=lambda: MappingProxyType({}))

    def text(self, name: str) -> str:
        """The text of a field, without spaces around it; empty if there is no such field."""
        return self.texts.get(name, "").strip()

    @classmethod
    def parse(cls, content_type: str, body: bytes, *, large_fields: Collection[str] = ()) -> Form:
        """A form from a request's body. Raise Problem if it is not a form, or exceeds a limit."""
        fields = _Fields(large_fields)
        try:
            kind, options = multipart.parse_options_header(content_type)
            fields.is_encoded = kind == b"application/x-www-form-urlencoded"
            parser = python_multipart.FormParser(
                kind.decode(),
                fields.add_text,
                fields.add_file,
                fields.end,
                boundary=options.get(b"boundary"),
                config={
                    "MAX_MEMORY_FILE_SIZE": len(body),  # no file is written to disk
                    "UPLOAD_ERROR_ON_BAD_CTE": True,
                },
            )
            parser.write(body)
            parser.finalize()
        except ValueError:  # those of python-multipart and UnicodeError are such
            raise _malformed() from None
        if not fields.is_complete:
            raise _malformed()
        return cls(fields.texts, fields.files)


class _Fields:
    """Collects what a parser finds."""

    def __init__(self, large_fields: Collection[str]) -> None:
        self._large_fields = large_fields
        self._count = 0
        self.texts: dict[str, str] = {}
        self.files: dict[str, File] = {}
        self.is_encoded = False  # as in the query of an address
        self.is_complete = False

    def add_text(self, part: multipart.Field) -> None:
        name = self._name(part)
        self._check(name, len(part.value or b""))
        self.texts[name] = self._decode(part.value or b"")

    def add_file(self, part: multipart.File) -> None:
        name = self._name(part)
        self._check(name, part.size)
        part.file_object.seek(0)
        if part.file_name:  # the field has no file name if no file was picked
            self.files[name] = File(part.file_name.decode(), part.file_object.read())

    def end(self) -> None:
        self.is_complete = True

    def _name(self, part: multipart.Field | multipart.File) -> str:
        if part.field_name is None:
            raise _malformed()
        return self._decode(part.field_name)

    def _decode(self, text: bytes) -> str:
        if self.is_encoded:
            return unquote_plus(text.decode("ascii"), errors="strict")
        return text.decode()

    def _check(self, name: str, size: int) -> None:
        self._count += 1
        if self._count > MOST_FIELDS:
            raise _malformed()
        if size > FORM_BYTES and name not in self._large_fields:
            raise Problem("too-large", hint=f"a field here has {FORM_BYTES} bytes at most")


def _malformed() -> Problem:
    return Problem("malformed-request", "the body is not a form as browsers send it")
