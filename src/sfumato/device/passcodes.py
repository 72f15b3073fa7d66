"""The passcode of a study: one secret that all of its devices share, so it identifies none.

A passcode is `sfp_` and 32 random bytes in base64url. A collector keeps only its SHA-256, and takes
nothing else for a passcode: a short one that somebody made up does not work.

    >>> passcode = create()
    >>> matches(passcode, digest(passcode)), matches("sesame", digest("sesame"))
    (True, False)
"""

from __future__ import annotations

import hmac
import re
import secrets
from hashlib import sha256

from sfumato.errors import SpecError

HEADER = "Sfumato-Passcode"  # not Authorization, which has the ticket of a masked round
PATTERN = "sfp_[A-Za-z0-9_-]{43}"
_FORM = re.compile(PATTERN)


def create() -> str:
    return "sfp_" + secrets.token_urlsafe(32)


def check(text: str) -> str:
    """The passcode, if the text has its form; the error does not show it."""
    if not _FORM.fullmatch(text):
        raise SpecError(
            "a passcode must be sfp_ and 43 characters, as sfumato study create makes it; "
            "got something else"
        )
    return text


def digest(passcode: str) -> bytes:
    return sha256(passcode.encode("utf-8", "surrogatepass")).digest()


def matches(text: str, expected: bytes) -> bool:
    """Whether the text is the passcode with this digest. The time does not depend on how much of it
    is right."""
    return hmac.compare_digest(digest(text), expected) and _FORM.fullmatch(text) is not None
