"""Bearer tokens of people and programs that administer a collector.

A token is `sfu_` and 32 random bytes in base64url. The store keeps only its SHA-256, so a copy of
the store contains no token; a lookup by this digest has no timing that depends on the token. An
admin may do everything that an analyst may. An analyst's token may be for some studies only: for
its owner there are no others. Devices have no tokens.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Literal, get_args

from sfumato.collector.problems import Problem
from sfumato.collector.store.store import Store, TokenRow, Transaction
from sfumato.device.outbox import DAY_SECONDS
from sfumato.errors import SpecError
from sfumato.spec import require

Role = Literal["analyst", "admin"]  # each includes those before it
ROLES: tuple[str, ...] = get_args(Role)
PREFIX = "sfu_"
LONGEST_DAYS = 3_650
_NO_TOKEN = PREFIX + "0" * 43  # looked up if a request has no token, for equal timing


def create(
    store: Store,
    *,
    role: Role,
    name: str,
    days: int,
    studies: Sequence[str] = (),
    now: Callable[[], float] = time.time,
) -> tuple[TokenRow, str]:
    """Create a token; return its row and the token, which is not stored and never shown again.

    `studies` are the names or ids of those that an analyst may see; without any, all of them.
    """
    require(
        name.isprintable() and name.strip() != "" and len(name) <= 100,
        "name must be 1 to 100 characters on one line; it says whose token it is",
    )
    require.within(1, LONGEST_DAYS, days=days)
    require(
        not studies or role == "analyst",
        f"only an analyst's token can be for some studies; got the role {role}",
    )
    token = PREFIX + secrets.token_urlsafe(32)
    with store.transaction() as tx:
        row = TokenRow(
            id=secrets.token_hex(8),
            name=name,
            role=role,
            expires=int(now()) + days * DAY_SECONDS,
            studies=",".join(_study_id(tx, study) for study in studies) or None,
        )
        tx.add_token(row, digest(token))
    return row, token


def rotate(
    store: Store, token_id: str, *, days: int, now: Callable[[], float] = time.time
) -> tuple[TokenRow, str]:
    """Replace a token by a new one of the same name, role and studies; the old one is refused from
    now on, and its sessions end."""
    require.within(1, LONGEST_DAYS, days=days)
    token = PREFIX + secrets.token_urlsafe(32)
    expires = int(now()) + days * DAY_SECONDS
    with store.transaction() as tx:
        old = next((row for row in tx.tokens() if row.id == token_id), None)
        if old is None or not tx.revoke(token_id):
            raise _no_token(token_id)
        row = replace(old, id=secrets.token_hex(8), expires=expires)
        tx.add_token(row, digest(token))
    return row, token


def revoke(store: Store, token_id: str) -> None:
    """Refuse the token from now on."""
    with store.transaction() as tx:
        if not tx.revoke(token_id):
            raise _no_token(token_id)


def authorise(store: Store, token: str | None, role: Role, *, now: float) -> TokenRow:
    """The token's row, if it may act in this role.

    A missing, wrong, expired or revoked token gets the same answer.
    """
    with store.reading() as tx:
        row = tx.token(digest(_NO_TOKEN if token is None else token))
    if token is None or row is None or row.expires <= now:
        raise Problem("unauthorized", hint="set SFUMATO_TOKEN; sfumato token create makes one")
    if row.role not in ROLES[ROLES.index(role) :]:
        raise Problem("forbidden", hint=f"use a token with the role {role}")
    return row


def require_all_studies(studies: str | None) -> None:
    """Raise Problem unless a token with these studies may see what is about all of them."""
    if studies is not None:
        raise Problem(
            "forbidden",
            "this token is limited to some studies, and this is about all of them",
            hint="use a token without such a limit",
        )


def _study_id(tx: Transaction, study: str) -> str:
    row = tx.study(study) or tx.study_by_name(study)
    if row is None:
        raise SpecError(f"there is no study {study!r}", hint="give its name or its id")
    return row.id


def _no_token(token_id: str) -> SpecError:
    return SpecError(f"there is no token {token_id}", hint="sfumato token list shows all tokens")


def digest(token: str) -> bytes:
    return sha256(token.encode("utf-8", "surrogatepass")).digest()
