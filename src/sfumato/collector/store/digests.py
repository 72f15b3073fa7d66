"""Digests of what the store keeps, so that damage is noticed when it is read.

A digest is the SHA-256 of a row's content together with what the content is, whose it is and how
many reports it counts: so a row whose count was changed, or that took the place of another one, is
noticed as well. It guards against a failing disk and a slip of the hand, not against somebody who
may write to the store, who can write a digest, too.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Literal

from sfumato.errors import StoreDamaged

Kind = Literal["sealed", "answer", "release", "released_model", "checkpoint"]


def digest_of(kind: Kind, owner: str, content: bytes, count: int = 0) -> bytes:
    """The digest of the content of a row: `owner` is the id of its task, study or round."""
    digest = hashlib.sha256(f"{kind} {owner} {count} ".encode())  # no part has a space
    digest.update(content)
    return digest.digest()


@dataclass(frozen=True, slots=True)
class Row:
    """A row with a digest, which is None if it was stored by a version without digests."""

    kind: Kind
    owner: str
    content: bytes = field(repr=False)
    count: int
    digest: bytes | None
    number: int | None = None  # tells apart rows of one owner
    file: str | None = None  # in the lake: has the records, or will get them
    records: int | None = None  # in that file; None: they are still here

    @property
    def name(self) -> str:
        """Its name in messages."""
        owners = {"sealed": "task", "answer": "task", "checkpoint": "round"}
        number = "" if self.number is None else f" {self.number}"
        kind = self.kind.replace("_", " ")
        return f"{kind}{number} of {owners.get(self.kind, 'study')} {self.owner}"

    @property
    def is_damaged(self) -> bool:
        if self.digest is None:
            return False
        return digest_of(self.kind, self.owner, self.content, self.count) != bytes(self.digest)

    def check(self) -> bytes:
        """The content; StoreDamaged if it is not what was stored."""
        if self.is_damaged:
            raise StoreDamaged(
                f"{self.name} is damaged: it is not what was stored",
                hint="sfumato check lists all that is damaged",
            )
        return self.content
