"""What every store does for masked rounds, on each database."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from sfumato.collector.store.round_tables import (
    ACCEPTED,
    WAITING,
    Join,
    JoinOutcome,
    Message,
    Place,
    RoundRow,
    StoreOutcome,
    accepted_members,
)
from sfumato.collector.store.store import Store, StudyRow, TaskRow, Transaction
from sfumato.errors import StoreError

STUDY = StudyRow("0a" * 16, "Popular emoji", "Which to offer", "collecting", "{}", "{}", "{}", "{}")
TASK = TaskRow("a1" * 32, STUDY.id, 0, "{}", "{}", "open", None)
ROUND = RoundRow("c1" * 16, "{}", "enrol", 1, deadline=100, turn=1, charged=0)
COUNT = 5


def key(number: int) -> bytes:
    return bytes([number]) * 32


def join(tx: Transaction, *device: Any) -> JoinOutcome:
    (joined,) = tx.join_all([Join(*device)])
    return joined


@pytest.fixture
def asked(store: Store) -> Store:
    """A store with a study whose task is open, for which some devices wait."""
    with store.transaction() as tx:
        tx.add_study(STUDY)
        tx.add_task(TASK)
        for number in range(COUNT):
            assert join(tx, TASK.id, "campaign", key(number), key(100 + number)) == "new"
    return store


@pytest.fixture
def formed(asked: Store) -> Store:
    """The same with a round of them."""
    with asked.transaction() as tx:
        chosen = tx.waiting_devices(TASK.id)
        tx.add_round(TASK.id, ROUND, '{"invitation":"…"}', [number for number, _ in chosen])
    return asked


def test_a_key_joins_a_campaign_once(asked: Store) -> None:
    with asked.transaction() as tx:
        assert join(tx, TASK.id, "campaign", key(0), key(100)) == "same"
        assert join(tx, TASK.id, "campaign", key(0), key(99)) == "taken"
        assert join(tx, TASK.id, "campaign", key(99), key(100)) == "taken"
        assert join(tx, TASK.id, "another", key(0), key(99)) == "new"
        assert tx.waiting_count(TASK.id) == COUNT + 1
        tx.set_task_state(TASK.id, "closing", expected=["open"])
        assert join(tx, TASK.id, "campaign", key(50), key(51)) == "closed"
        assert join(tx, TASK.id, "campaign", key(0), key(100)) == "same"


def test_many_who_join_together_fare_as_if_one_by_one(asked: Store) -> None:
    """More than go into one statement, among them some that are known, or come twice."""
    many = [Join(TASK.id, "campaign", key(20 + k), key(120 + k)) for k in range(80)]
    odd = {
        Join(TASK.id, "campaign", key(0), key(100)): "same",  # joined before
        Join(TASK.id, "campaign", key(1), key(99)): "taken",  # its key did
        Join(TASK.id, "campaign", key(98), key(102)): "taken",  # its ticket did
        Join(TASK.id, "another", key(20), key(97)): "new",  # this key in another campaign
        Join("b2" * 32, "campaign", key(96), key(95)): "closed",  # there is no such task
    }
    with asked.transaction() as tx:
        assert tx.join_all([]) == []
        assert tx.join_all([*many[:60], *odd, *many[50:], many[0]]) == [
            *["new"] * 60,
            *odd.values(),
            *["same"] * 10,
            *["new"] * 20,
            "same",
        ]
        assert tx.waiting_count(TASK.id) == COUNT + 80 + 1
        assert {bytes(identity) for _, identity in tx.waiting_devices(TASK.id)} == {
            *(key(number) for number in range(COUNT)),
            *(join.identity for join in many),
        }
    with asked.reading() as tx:
        assert tx.place(key(120)) == Place(TASK.id, None, None, None)
        assert tx.place(key(99)) is None


def test_an_identity_of_another_length_is_refused(asked: Store) -> None:
    def join_all() -> None:
        with asked.transaction() as tx:
            tx.join_all([Join(TASK.id, "campaign", key(40)[:-1], key(140))])

    with pytest.raises(StoreError, match="must have 32 bytes"):
        join_all()


def test_of_two_in_a_group_with_one_ticket_or_one_key_one_joins(asked: Store) -> None:
    first = Join(TASK.id, "campaign", key(30), key(130))
    for other in (first._replace(ticket=key(131)), first._replace(identity=key(31))):
        with asked.transaction() as tx:
            assert sorted(tx.join_all([first, other])) == ["new", "taken"]
            assert sorted(tx.join_all([first, other])) == ["same", "taken"]
            tx.end_waiting(TASK.id)


def test_those_who_wait_become_members_in_their_order(formed: Store) -> None:
    with formed.reading() as tx:
        assert tx.waiting_count(TASK.id) == 0
        assert tx.rounds(TASK.id) == [ROUND]
        assert tx.round(ROUND.id) == ROUND
        assert tx.round("00" * 16) is None
        assert tx.invitation(ROUND.id) == '{"invitation":"…"}'
        assert [bytes(identity) for identity, _ in tx.members(ROUND.id)] == [
            key(number) for number in range(COUNT)
        ]
        assert tx.place(key(103)) == Place(TASK.id, ROUND.id, 3, "enrol")
        assert tx.place(key(7)) is None
    with formed.transaction() as tx:
        join(tx, TASK.id, "campaign", key(60), key(61))
        assert tx.place(key(61)) == Place(TASK.id, None, None, None)
        tx.end_waiting(TASK.id)
        assert tx.place(key(61)) is None
        assert tx.place(key(103)) is not None


def test_a_round_that_is_given_up_lets_some_wait_again_and_forgets_the_others(
    formed: Store,
) -> None:
    with formed.transaction() as tx:
        assert tx.active_rounds() == {ROUND.id: TASK.id}
        tx.dissolve(ROUND.id, [1, 3])
        tx.end_round(ROUND.id, "aborted", "too few")
        tx.drop_ended_rounds()
    with formed.reading() as tx:
        assert [bytes(identity) for _, identity in tx.waiting_devices(TASK.id)] == [key(1), key(3)]
        assert tx.place(key(103)) == Place(TASK.id, None, None, None)
        assert tx.place(key(102)) is None
        assert tx.members(ROUND.id) == []
        assert tx.active_rounds() == {}
        (row,) = tx.rounds(TASK.id)
        assert not row.was_formed
        assert (row.deadline, tx.invitation(ROUND.id)) == (0, "")


def keep(tx: Transaction, *message: Any) -> StoreOutcome:
    (kept,) = tx.add_messages([Message(*message)])
    return kept


def test_a_message_is_kept_once_while_its_phase_is_open(formed: Store) -> None:
    with formed.transaction() as tx:
        assert keep(tx, ROUND.id, "enrol", 2, b"digest", b"body") == "new"
        assert keep(tx, ROUND.id, "enrol", 2, b"digest", b"body") == "same"
        assert keep(tx, ROUND.id, "enrol", 2, b"other", b"body") == "other"
        assert keep(tx, ROUND.id, "share", 2, b"digest", b"body") == "late"
        assert keep(tx, "00" * 16, "enrol", 2, b"digest", b"body") == "late"
        assert tx.message(ROUND.id, "enrol", 2) == (b"digest", WAITING)
        tx.close_phase(ROUND.id)
        assert keep(tx, ROUND.id, "enrol", 3, b"digest", b"body") == "late"
        assert keep(tx, ROUND.id, "enrol", 2, b"digest", b"body") == "same"
        assert tx.messages(ROUND.id, "enrol", range(9)) == {2: b"body"}


def test_messages_of_several_rounds_phases_and_members_are_kept_together(formed: Store) -> None:
    with formed.transaction() as tx:
        keep(tx, ROUND.id, "enrol", 0, b"zero", b"body")
        assert tx.add_messages([]) == []
        kept = tx.add_messages(
            [
                Message(ROUND.id, "enrol", 1, b"one", b"first"),
                Message("00" * 16, "enrol", 1, b"one", b"first"),
                Message(ROUND.id, "enrol", 0, b"zero", b"body"),
                Message(ROUND.id, "share", 1, b"one", b"first"),
                Message(ROUND.id, "enrol", 1, b"one", b"first"),
                Message(ROUND.id, "enrol", 2, b"two", b"third"),
                Message(ROUND.id, "enrol", 1, b"more", b"other"),
                Message(ROUND.id, "enrol", 0, b"more", b"other"),
            ]
        )
    assert kept == ["new", "late", "same", "late", "same", "new", "other", "other"]
    with formed.reading() as tx:
        came = tx.messages(ROUND.id, "enrol", range(9))
    assert came == {0: b"body", 1: b"first", 2: b"third"}


def test_messages_are_settled_and_may_be_forgotten(formed: Store) -> None:
    with formed.transaction() as tx:
        for member in range(4):
            keep(tx, ROUND.id, "enrol", member, b"d", bytes([member]) * 9_000)
        assert list(tx.messages(ROUND.id, "enrol", [3, 0, 7])) == [0, 3]
        assert tx.messages(ROUND.id, "enrol", []) == {}
        tx.set_outcomes(
            ROUND.id, "enrol", {0: ACCEPTED, 1: ACCEPTED, 2: "malformed"}, drop_bodies=False
        )
        assert tx.messages(ROUND.id, "enrol", [1, 2]) == {1: b"\x01" * 9_000, 2: b""}
        tx.set_outcomes(ROUND.id, "enrol", {1: ACCEPTED}, drop_bodies=True)
        assert tx.messages(ROUND.id, "enrol", [1]) == {1: b""}
        assert accepted_members(tx.senders(ROUND.id, "enrol")) == {0, 1, 3}
        assert tx.senders(ROUND.id, "enrol") == {
            0: ACCEPTED,
            1: ACCEPTED,
            2: "malformed",
            3: WAITING,
        }
        assert tx.checkpoint(ROUND.id) is None
        tx.set_checkpoint(ROUND.id, b"sum")
    with formed.reading() as tx:
        assert tx.checkpoint(ROUND.id) == b"sum"


def test_a_phase_that_begins_is_news(formed: Store) -> None:
    with formed.transaction() as tx:
        before = tx.revision()
        tx.close_phase(ROUND.id)
        assert tx.revision() == before  # nobody is told anything by that
        tx.open_phase(ROUND.id, "share", 200, charged=False)
        assert tx.revision() != before
        tx.open_phase(ROUND.id, "unmask", 300, charged=True)
        tx.set_deadline(ROUND.id, 400)
        assert tx.round(ROUND.id) == replace(
            ROUND, phase="unmask", is_open=1, deadline=400, turn=3, charged=1
        )


def test_a_round_that_is_over_keeps_digests_only(formed: Store) -> None:
    with formed.transaction() as tx:
        keep(tx, ROUND.id, "enrol", 0, b"digest", b"body")
        tx.open_phase(ROUND.id, "share", 200, charged=False)
        tx.set_checkpoint(ROUND.id, b"sum")
        tx.drop_ended_rounds()  # which it has not
        assert tx.checkpoint(ROUND.id) == b"sum"
        assert tx.ended_rounds() == []
        tx.end_round(ROUND.id, "aborted", "too few")
        assert len(tx.ended_rounds()) == 1
        tx.drop_ended_rounds()
        assert tx.ended_rounds() == []
    with formed.transaction() as tx:
        assert tx.checkpoint(ROUND.id) is None
        assert tx.messages(ROUND.id, "enrol", range(9)) == {0: b""}
        assert keep(tx, ROUND.id, "enrol", 0, b"digest", b"body") == "same"
        assert keep(tx, ROUND.id, "enrol", 0, b"other", b"body") == "other"
        row = tx.round(ROUND.id)
        assert row is not None
        assert (row.phase, row.is_open, row.problem) == ("aborted", 0, "too few")


def test_a_study_that_ends_takes_its_rounds_with_it(formed: Store) -> None:
    with formed.transaction() as tx:
        join(tx, TASK.id, "campaign", key(60), key(61))
        keep(tx, ROUND.id, "enrol", 0, b"digest", b"body")
        tx.set_secret(STUDY.id, b"s" * 32)
        tx.end_rounds(STUDY.id, "its study is over")
        row = tx.round(ROUND.id)
        assert row is not None
        assert (row.phase, row.problem) == ("aborted", "its study is over")
        assert tx.place(key(61)) is None
        assert tx.secret(STUDY.id) == b"s" * 32
        tx.drop_data(STUDY.id)
        assert tx.round(ROUND.id) is None
        assert tx.rounds(TASK.id) == []
        assert tx.place(key(103)) is None
        assert tx.secret(STUDY.id) is None
        with pytest.raises(StoreError, match="no round"):
            tx.members("00" * 16)


def test_a_message_that_was_taken_in_time_is_seen_by_who_closed_the_phase(formed: Store) -> None:
    """Threads send while another closes: what was kept is there after the close, and no more is."""
    kept: list[int] = []
    lock, start = threading.Lock(), threading.Barrier(5)

    def send(first: int) -> None:
        start.wait()
        for member in range(first, 200, 4):
            with formed.transaction() as tx:
                outcome = keep(tx, ROUND.id, "enrol", member, b"d", b"body")
            if outcome == "new":
                with lock:
                    kept.append(member)

    threads = [threading.Thread(target=send, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    start.wait()
    with formed.transaction() as tx:
        tx.close_phase(ROUND.id)
    with formed.reading() as tx:
        seen = set(tx.senders(ROUND.id, "enrol"))
    for thread in threads:
        thread.join()
    with formed.reading() as tx:
        assert set(tx.senders(ROUND.id, "enrol")) == seen == set(kept)
