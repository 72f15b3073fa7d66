"""Tokens open what their role may, until they expire or are revoked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sfumato.collector import tokens
from sfumato.collector.problems import Problem
from sfumato.collector.store.store import Store, TokenRow
from sfumato.collector.tokens import Role
from sfumato.errors import SpecError

NOW = 1_000_000.0
DAY_SECONDS = 86_400


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store.open(tmp_path / "collector.db")
    store.migrate()
    yield store
    store.close()


def new_token(store: Store, role: Role = "admin") -> str:
    return tokens.create(store, role=role, name="ops", days=2, now=lambda: NOW)[1]


def refusal(store: Store, token: str | None, role: Role = "analyst", now: float = NOW) -> Problem:
    with pytest.raises(Problem) as caught:
        tokens.authorise(store, token, role, now=now)
    return caught.value


@pytest.mark.parametrize(
    ("role_of_token", "needed", "allowed"),
    [
        ("admin", "admin", True),
        ("admin", "analyst", True),
        ("analyst", "analyst", True),
        ("analyst", "admin", False),
    ],
)
def test_an_admin_may_do_everything_that_an_analyst_may(
    store: Store, role_of_token: Role, needed: Role, allowed: bool
) -> None:
    token = new_token(store, role_of_token)
    if allowed:
        assert tokens.authorise(store, token, needed, now=NOW).name == "ops"
    else:
        assert refusal(store, token, needed).code == "forbidden"


def test_a_token_expires(store: Store) -> None:
    token = new_token(store)
    assert tokens.authorise(store, token, "admin", now=NOW + 2 * DAY_SECONDS - 1)
    assert refusal(store, token, now=NOW + 2 * DAY_SECONDS).code == "unauthorized"


def test_a_revoked_token_is_refused_and_others_are_not(store: Store) -> None:
    row, token = tokens.create(store, role="admin", name="ops", days=2, now=lambda: NOW)
    other = new_token(store)
    tokens.revoke(store, row.id)
    assert refusal(store, token).code == "unauthorized"
    assert tokens.authorise(store, other, "admin", now=NOW)


def test_all_wrong_tokens_get_the_same_answer(store: Store) -> None:
    token = new_token(store)
    row, revoked = tokens.create(store, role="admin", name="ops", days=2, now=lambda: NOW)
    tokens.revoke(store, row.id)
    bodies = [
        refusal(store, candidate).body()
        for candidate in (
            None,
            "",
            "sfu_wrong",
            token + "x",
            token[:-1],
            token.lower(),
            revoked,
            "\0é",
        )
    ]
    assert all(body == bodies[0] for body in bodies)


def test_the_store_does_not_hold_a_token(store: Store, tmp_path: Path) -> None:
    token = new_token(store)
    store.close()
    files = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert b"ops" in files  # the search works
    assert token.encode() not in files
    assert token.removeprefix("sfu_").encode() not in files


def test_tokens_differ(store: Store) -> None:
    assert len({new_token(store) for _ in range(10)}) == 10


@pytest.mark.parametrize(
    ("name", "days"), [("", 1), (" ", 1), ("two\nlines", 1), ("x" * 101, 1), ("ops", 0)]
)
def test_an_invalid_token_is_not_created(store: Store, name: str, days: int) -> None:
    with pytest.raises(SpecError):
        tokens.create(store, role="admin", name=name, days=days)


def test_revoking_a_token_that_is_not_there_is_a_mistake(store: Store) -> None:
    with pytest.raises(SpecError, match="no token"):
        tokens.revoke(store, "00")


def test_a_rotated_token_is_replaced_by_one_of_the_same_owner_and_role(store: Store) -> None:
    old, token = tokens.create(store, role="analyst", name="ops", days=2, now=lambda: NOW)
    row, successor = tokens.rotate(store, old.id, days=3, now=lambda: NOW)
    assert (row.name, row.role) == ("ops", "analyst")
    assert row.expires == NOW + 3 * DAY_SECONDS
    assert refusal(store, token).code == "unauthorized"
    assert tokens.authorise(store, successor, "analyst", now=NOW) == row
    assert refusal(store, successor, "admin").code == "forbidden"


def test_only_a_token_that_is_there_is_rotated(store: Store) -> None:
    with pytest.raises(SpecError, match="no token"):
        tokens.rotate(store, "00", days=1)
    with store.reading() as tx:
        assert not tx.tokens()


def test_a_rotation_that_is_refused_leaves_the_token_valid(store: Store) -> None:
    old, token = tokens.create(store, role="admin", name="ops", days=2, now=lambda: NOW)
    with pytest.raises(SpecError, match="days"):
        tokens.rotate(store, old.id, days=0)
    assert tokens.authorise(store, token, "admin", now=NOW) == old


def test_a_token_for_some_studies_names_studies_that_exist(store: Store) -> None:
    with pytest.raises(SpecError, match="there is no study 'Trees'"):
        tokens.create(store, role="analyst", name="Ann", days=1, studies=["Trees"])
    with pytest.raises(SpecError, match="only an analyst's token"):
        tokens.create(store, role="admin", name="ops", days=1, studies=["Trees"])
    with store.reading() as tx:
        assert tx.tokens() == []


def test_a_token_without_studies_sees_all_of_them(store: Store) -> None:
    row, token = tokens.create(store, role="analyst", name="Ann", days=1, now=lambda: NOW)
    assert row.studies is None
    assert tokens.authorise(store, token, "analyst", now=NOW).may_see("0" * 32)
    some = TokenRow("id", "Ann", "analyst", 0, studies=f"{'a' * 32},{'b' * 32}")
    assert [some.may_see(letter * 32) for letter in "abc"] == [True, True, False]
    assert not some.may_see("a")
    assert not some.may_see("")
