"""Bearer tokens of people and programs that administer a collector.

A token is 32 random bytes in base64url behind `sfu_`. The store keeps its SHA-256 only, so a copy
of the store opens nothing; it is looked up by that digest, which tells no time about the token.
An admin may do all that an analyst may. Devices have no tokens.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from hashlib import sha256
from typing import Literal, get_args

from sfumato.collector.problems import Problem
from sfumato.collector.store.store import Store, TokenRow
from sfumato.errors import SpecError
from sfumato.spec import require

Role = Literal["analyst", "admin"]  # each may do what those before it may
ROLES: tuple[str, ...] = get_args(Role)
PREFIX = "sfu_"
LONGEST_DAYS = 3_650
_DAY_SECONDS = 86_400
_NOBODY = PREFIX + "0" * 43  # looked up where no token was given, so that both take as long


def create(
    store: Store,
    *,
    role: Role,
    name: str,
    days: int,
    now: Callable[[], float] = time.time,
) -> tuple[TokenRow, str]:
    """A new token and its row. The token is not stored: this is the only time that it is seen."""
    require(
        name.isprintable() and name.strip() != "" and len(name) <= 100,
        "name must be 1 to 100 characters on one line; it says whose token it is",
    )
    require(1 <= days <= LONGEST_DAYS, f"days must be 1 to {LONGEST_DAYS}; got {days}")
    token = PREFIX + secrets.token_urlsafe(32)
    row = TokenRow(
        id=secrets.token_hex(8), name=name, role=role, expires=int(now()) + days * _DAY_SECONDS
    )
    with store.transaction() as tx:
        tx.add_token(row, digest(token))
    return row, token


def revoke(store: Store, token_id: str) -> None:
    """The token is refused from now on."""
    with store.transaction() as tx:
        if not tx.revoke(token_id):
            raise SpecError(
                f"there is no token {token_id}", hint="sfumato token list names those there are"
            )


def authorise(store: Store, given: str | None, role: Role, *, now: float) -> TokenRow:
    """Whose token this is, if it may act in this role.

    No token, a wrong, an expired and a revoked one are answered alike.
    """
    with store.reading() as tx:
        row = tx.token(digest(_NOBODY if given is None else given))
    if given is None or row is None or row.expires <= now:
        raise Problem("unauthorized", hint="set SFUMATO_TOKEN; sfumato token create makes one")
    if row.role not in ROLES[ROLES.index(role) :]:
        raise Problem("forbidden", hint=f"use a token of role {role}")
    return row


def digest(token: str) -> bytes:
    return sha256(token.encode("utf-8", "surrogatepass")).digest()
