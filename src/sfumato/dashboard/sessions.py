"""Sessions: a random name in a cookie, with its SHA-256 in the store.

A session belongs to a token, and has its rights. It ends when the person signs out, after 12 hours,
or when the token expires or is revoked, whichever is first.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass, field
from hashlib import sha256

from sfumato.collector import tokens
from sfumato.collector.store.store import Store, TokenRow
from sfumato.collector.tokens import ROLES, Role

COOKIE = "sfumato_session"
LONGEST_SECONDS = 12 * 3_600


@dataclass(frozen=True, slots=True)
class Session:
    """The session of a person who is signed in."""

    token: TokenRow
    csrf: str = field(repr=False)  # in every form of the session, and unknown to other sites

    @property
    def person(self) -> str:
        return self.token.name

    @property
    def role(self) -> str:
        return self.token.role

    def may(self, role: Role) -> bool:
        return self.role in ROLES[ROLES.index(role) :]

    def has_csrf(self, csrf: str) -> bool:
        """Whether this is the session's CSRF token, in constant time."""
        return hmac.compare_digest(csrf.encode(), self.csrf.encode())


def start(store: Store, token: str, *, now: float) -> tuple[str, int]:
    """Sign in with a token; return the new session's name, and for how many seconds it is valid.

    A wrong, an expired and a revoked token raise the same Problem, after the same work.
    """
    row = tokens.authorise(store, token, "analyst", now=now)
    name = secrets.token_urlsafe(32)
    expires = min(int(now) + LONGEST_SECONDS, row.expires)
    with store.transaction() as tx:
        tx.end_sessions(int(now))
        tx.add_session(_digest(name), row.id, expires)
    return name, expires - int(now)


def find(store: Store, name: str, *, now: float) -> Session | None:
    """The session with this name, if it has not ended."""
    with store.reading() as tx:
        row = tx.session(_digest(name))
    if row is None or min(row[1], row[0].expires) <= now:
        return None
    token, _ = row
    return Session(token, csrf_of(name))


def end(store: Store, name: str) -> None:
    """Sign out."""
    with store.transaction() as tx:
        tx.end_session(_digest(name))


def csrf_of(name: str) -> str:
    """The CSRF token of a session; it reveals nothing about the session's name."""
    return sha256(b"sfumato form\0" + name.encode("utf-8", "surrogatepass")).hexdigest()


def _digest(name: str) -> bytes:
    return sha256(b"sfumato session\0" + name.encode("utf-8", "surrogatepass")).digest()
