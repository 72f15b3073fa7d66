"""Who is signed in: a random name in a cookie, of which the store keeps the SHA-256.

A session is of a token. It ends when its person signs out, after 12 hours, when the token expires
and when it is revoked, whichever is first; what it may do is what the token may.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass, field
from hashlib import sha256

from sfumato.collector import tokens
from sfumato.collector.store.store import Store
from sfumato.collector.tokens import ROLES, Role

COOKIE = "sfumato_session"
LONGEST_SECONDS = 12 * 3_600


@dataclass(frozen=True, slots=True)
class Session:
    """Somebody who is signed in."""

    person: str  # the name of the token
    role: str
    csrf: str = field(repr=False)  # every form of theirs has it, and no other page can know it

    def may(self, role: Role) -> bool:
        return self.role in ROLES[ROLES.index(role) :]

    def sent(self, csrf: str) -> bool:
        """Whether a form with this was made by a page of this session."""
        return hmac.compare_digest(csrf.encode(), self.csrf.encode())


def start(store: Store, token: str, *, now: float) -> tuple[str, int]:
    """Sign in with a token: the new session's name, and for how many seconds it is good.

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
    """The session of this name, if it has not ended."""
    with store.reading() as tx:
        known = tx.session(_digest(name))
    if known is None or min(known[1], known[0].expires) <= now:
        return None
    token, _ = known
    return Session(token.name, token.role, csrf_of(name))


def end(store: Store, name: str) -> None:
    """Sign out."""
    with store.transaction() as tx:
        tx.end_session(_digest(name))


def csrf_of(name: str) -> str:
    """What forms of a session carry; it tells nothing about the session's name."""
    return sha256(b"sfumato form\0" + name.encode("utf-8", "surrogatepass")).hexdigest()


def _digest(name: str) -> bytes:
    return sha256(b"sfumato session\0" + name.encode("utf-8", "surrogatepass")).digest()
