"""Sessions end when they should, and the store cannot be used to take one over."""

from __future__ import annotations

import pytest

from collecting import Clock
from sfumato.collector import tokens
from sfumato.collector.problems import Problem
from sfumato.collector.store.store import Store
from sfumato.dashboard import sessions

HOUR = 3_600


def test_a_session_is_of_a_token_and_has_its_role(store: Store) -> None:
    clock = Clock()
    _, token = tokens.create(store, role="analyst", name="Ada", days=1, now=clock)
    name, seconds = sessions.start(store, token, now=clock())
    session = sessions.find(store, name, now=clock())
    assert seconds == 12 * HOUR
    assert session is not None
    assert (session.person, session.role) == ("Ada", "analyst")
    assert session.may("analyst")
    assert not session.may("admin")
    assert sessions.find(store, name + "x", now=clock()) is None


def test_a_session_ends_after_twelve_hours(store: Store) -> None:
    clock = Clock()
    _, token = tokens.create(store, role="admin", name="Ada", days=30, now=clock)
    name, _ = sessions.start(store, token, now=clock())
    clock.advance(12 * HOUR - 2)
    assert sessions.find(store, name, now=clock()) is not None
    clock.advance(2)
    assert sessions.find(store, name, now=clock()) is None


def test_a_session_ends_with_its_token(store: Store) -> None:
    clock = Clock()
    row, token = tokens.create(store, role="admin", name="Ada", days=1, now=clock)
    clock.advance(20 * HOUR)
    name, seconds = sessions.start(store, token, now=clock())
    assert seconds == 4 * HOUR
    tokens.revoke(store, row.id)
    assert sessions.find(store, name, now=clock()) is None


def test_signing_out_ends_one_session_only(store: Store) -> None:
    clock = Clock()
    _, token = tokens.create(store, role="admin", name="Ada", days=1, now=clock)
    names = [sessions.start(store, token, now=clock())[0] for _ in range(2)]
    sessions.end(store, names[0])
    assert [sessions.find(store, name, now=clock()) is None for name in names] == [True, False]


def test_sessions_that_have_ended_are_dropped_when_another_starts(store: Store) -> None:
    clock = Clock()
    _, token = tokens.create(store, role="admin", name="Ada", days=30, now=clock)
    name, _ = sessions.start(store, token, now=clock())
    clock.advance(13 * HOUR)
    sessions.start(store, token, now=clock())
    assert sessions.find(store, name, now=0) is None  # by any clock


@pytest.mark.parametrize("wrong", ["", "sfu_wrong", "expired", "\udcff"])
def test_wrong_and_expired_tokens_are_refused_alike(store: Store, wrong: str) -> None:
    clock = Clock()
    _, token = tokens.create(store, role="admin", name="Ada", days=1, now=clock)
    clock.advance(25 * HOUR)
    with pytest.raises(Problem) as refused:
        sessions.start(store, token if wrong == "expired" else wrong, now=clock())
    assert refused.value.code == "unauthorized"


def test_neither_the_store_nor_a_form_tells_a_session_s_name(store: Store) -> None:
    clock = Clock()
    _, token = tokens.create(store, role="admin", name="Ada", days=1, now=clock)
    name, _ = sessions.start(store, token, now=clock())
    session = sessions.find(store, name, now=clock())
    assert session is not None
    with store.reading() as tx:
        assert tx.session(bytes.fromhex(session.csrf)) is None  # not the digest in the store
    assert session.csrf not in repr(session)
    assert sessions.find(store, session.csrf, now=clock()) is None
    assert session.has_csrf(session.csrf)
    assert not session.has_csrf("")
    assert not session.has_csrf("é")
