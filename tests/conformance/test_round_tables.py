"""The tables of masked rounds, on each database."""

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
    (outcome,) = tx.join_all([Join(*device)])
    return outcome


@pytest.fixture
def open_store(store: Store) -> Store:
    """A store with an open task, and devices that wait for a round of it."""
    with store.transaction() as tx:
        tx.add_study(STUDY)
        tx.add_task(TASK)
        for number in range(COUNT):
            assert join(tx, TASK.id, "campaign", key(number), key(100 + number)) == "new"
    return store


@pytest.fixture
def store_with_round(open_store: Store) -> Store:
    """The same store, with a round of these devices."""
    with open_store.transaction() as tx:
        devices = tx.waiting_devices(TASK.id)
        tx.add_round(TASK.id, ROUND, '{"invitation":"…"}', [number for number, _ in devices])
    return open_store


def test_a_key_joins_a_campaign_once(open_store: Store) -> None:
    with open_store.transaction() as tx:
        assert join(tx, TASK.id, "campaign", key(0), key(100)) == "same"
        assert join(tx, TASK.id, "campaign", key(0), key(99)) == "taken"
        assert join(tx, TASK.id, "campaign", key(99), key(100)) == "taken"
        assert join(tx, TASK.id, "another", key(0), key(99)) == "new"
        assert tx.waiting_count(TASK.id) == COUNT + 1
        tx.set_task_state(TASK.id, "closing", expected=["open"])
        assert join(tx, TASK.id, "campaign", key(50), key(51)) == "closed"
        assert join(tx, TASK.id, "campaign", key(0), key(100)) == "same"


def test_devices_that_join_together_get_the_same_outcomes_as_one_by_one(open_store: Store) -> None:
    """More than fit into one statement, some of them old or repeated."""
    many = [Join(TASK.id, "campaign", key(20 + k), key(120 + k)) for k in range(80)]
    odd = {
        Join(TASK.id, "campaign", key(0), key(100)): "same",  # joined before
        Join(TASK.id, "campaign", key(1), key(99)): "taken",  # its key joined before
        Join(TASK.id, "campaign", key(98), key(102)): "taken",  # its ticket joined before
        Join(TASK.id, "another", key(20), key(97)): "new",  # this key in another campaign
        Join("b2" * 32, "campaign", key(96), key(95)): "closed",  # there is no such task
    }
    with open_store.transaction() as tx:
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
    with open_store.reading() as tx:
        assert tx.place(key(120)) == Place(TASK.id, None, None, None)
        assert tx.place(key(99)) is None


def test_an_identity_of_another_length_is_refused(open_store: Store) -> None:
    def join_all() -> None:
        with open_store.transaction() as tx:
            tx.join_all([Join(TASK.id, "campaign", key(40)[:-1], key(140))])

    with pytest.raises(StoreError, match="must have 32 bytes"):
        join_all()


def test_one_of_two_with_the_same_ticket_or_key_joins(open_store: Store) -> None:
    first = Join(TASK.id, "campaign", key(30), key(130))
    for other in (first._replace(ticket=key(131)), first._replace(identity=key(31))):
        with open_store.transaction() as tx:
            assert sorted(tx.join_all([first, other])) == ["new", "taken"]
            assert sorted(tx.join_all([first, other])) == ["same", "taken"]
            tx.end_waiting(TASK.id)


def test_waiting_devices_become_members_in_their_order(store_with_round: Store) -> None:
    with store_with_round.reading() as tx:
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
    with store_with_round.transaction() as tx:
        join(tx, TASK.id, "campaign", key(60), key(61))
        assert tx.place(key(61)) == Place(TASK.id, None, None, None)
        tx.end_waiting(TASK.id)
        assert tx.place(key(61)) is None
        assert tx.place(key(103)) is not None


def test_a_dissolved_round_lets_some_wait_again_and_deletes_the_others(
    store_with_round: Store,
) -> None:
    with store_with_round.transaction() as tx:
        assert tx.active_rounds() == {ROUND.id: TASK.id}
        tx.dissolve(ROUND.id, [1, 3])
        tx.end_round(ROUND.id, "aborted", "too few")
        tx.drop_ended_rounds()
    with store_with_round.reading() as tx:
        assert [bytes(identity) for _, identity in tx.waiting_devices(TASK.id)] == [key(1), key(3)]
        assert tx.place(key(103)) == Place(TASK.id, None, None, None)
        assert tx.place(key(102)) is None
        assert tx.members(ROUND.id) == []
        assert tx.active_rounds() == {}
        (row,) = tx.rounds(TASK.id)
        assert not row.was_formed
        assert (row.deadline, tx.invitation(ROUND.id)) == (0, "")


def add_message(tx: Transaction, *message: Any) -> StoreOutcome:
    (outcome,) = tx.add_messages([Message(*message)])
    return outcome


def test_a_message_is_kept_once_while_its_phase_is_open(store_with_round: Store) -> None:
    with store_with_round.transaction() as tx:
        assert add_message(tx, ROUND.id, "enrol", 2, b"digest", b"body") == "new"
        assert add_message(tx, ROUND.id, "enrol", 2, b"digest", b"body") == "same"
        assert add_message(tx, ROUND.id, "enrol", 2, b"other", b"body") == "other"
        assert add_message(tx, ROUND.id, "share", 2, b"digest", b"body") == "late"
        assert add_message(tx, "00" * 16, "enrol", 2, b"digest", b"body") == "late"
        assert tx.senders(ROUND.id, "enrol")[2] == WAITING
        assert tx.message_digests(ROUND.id, "enrol", [2]) == {2: b"digest"}
        tx.close_phase(ROUND.id)
        assert add_message(tx, ROUND.id, "enrol", 3, b"digest", b"body") == "late"
        assert add_message(tx, ROUND.id, "enrol", 2, b"digest", b"body") == "same"
        assert tx.messages(ROUND.id, "enrol", range(9)) == {2: b"body"}


def test_messages_of_several_rounds_phases_and_members_are_kept_together(
    store_with_round: Store,
) -> None:
    with store_with_round.transaction() as tx:
        add_message(tx, ROUND.id, "enrol", 0, b"zero", b"body")
        assert tx.add_messages([]) == []
        outcomes = tx.add_messages(
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
    assert outcomes == ["new", "late", "same", "late", "same", "new", "other", "other"]
    with store_with_round.reading() as tx:
        bodies = tx.messages(ROUND.id, "enrol", range(9))
    assert bodies == {0: b"body", 1: b"first", 2: b"third"}


def test_messages_get_outcomes_and_may_be_dropped(store_with_round: Store) -> None:
    with store_with_round.transaction() as tx:
        for member in range(4):
            add_message(tx, ROUND.id, "enrol", member, b"d", bytes([member]) * 9_000)
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
    with store_with_round.reading() as tx:
        assert tx.checkpoint(ROUND.id) == b"sum"


def test_a_new_phase_changes_the_revision(store_with_round: Store) -> None:
    with store_with_round.transaction() as tx:
        before = tx.revision()
        tx.close_phase(ROUND.id)
        assert tx.revision() == before  # nothing new for members
        tx.open_phase(ROUND.id, "share", 200, charged=False)
        assert tx.revision() != before
        tx.open_phase(ROUND.id, "unmask", 300, charged=True)
        tx.set_deadline(ROUND.id, 400)
        assert tx.round(ROUND.id) == replace(
            ROUND, phase="unmask", is_open=1, deadline=400, turn=3, charged=1
        )


def test_a_round_that_is_over_keeps_digests_only(store_with_round: Store) -> None:
    with store_with_round.transaction() as tx:
        add_message(tx, ROUND.id, "enrol", 0, b"digest", b"body")
        tx.open_phase(ROUND.id, "share", 200, charged=False)
        tx.set_checkpoint(ROUND.id, b"sum")
        tx.drop_ended_rounds()  # none has ended
        assert tx.checkpoint(ROUND.id) == b"sum"
        assert tx.ended_rounds() == []
        tx.end_round(ROUND.id, "aborted", "too few")
        assert len(tx.ended_rounds()) == 1
        tx.drop_ended_rounds()
        assert tx.ended_rounds() == []
    with store_with_round.transaction() as tx:
        assert tx.checkpoint(ROUND.id) is None
        assert tx.messages(ROUND.id, "enrol", range(9)) == {0: b""}
        assert add_message(tx, ROUND.id, "enrol", 0, b"digest", b"body") == "same"
        assert add_message(tx, ROUND.id, "enrol", 0, b"other", b"body") == "other"
        row = tx.round(ROUND.id)
        assert row is not None
        assert (row.phase, row.is_open, row.problem) == ("aborted", 0, "too few")


def test_a_study_that_ends_takes_its_rounds_with_it(store_with_round: Store) -> None:
    with store_with_round.transaction() as tx:
        join(tx, TASK.id, "campaign", key(60), key(61))
        add_message(tx, ROUND.id, "enrol", 0, b"digest", b"body")
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


def test_all_messages_accepted_in_time_are_visible_after_the_close(store_with_round: Store) -> None:
    """Threads send while another closes: afterwards, exactly the accepted messages are there."""
    members: list[int] = []
    lock, start = threading.Lock(), threading.Barrier(5)

    def send(first: int) -> None:
        start.wait()
        for member in range(first, 200, 4):
            with store_with_round.transaction() as tx:
                outcome = add_message(tx, ROUND.id, "enrol", member, b"d", b"body")
            if outcome == "new":
                with lock:
                    members.append(member)

    threads = [threading.Thread(target=send, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    start.wait()
    with store_with_round.transaction() as tx:
        tx.close_phase(ROUND.id)
    with store_with_round.reading() as tx:
        senders = set(tx.senders(ROUND.id, "enrol"))
    for thread in threads:
        thread.join()
    with store_with_round.reading() as tx:
        assert set(tx.senders(ROUND.id, "enrol")) == senders == set(members)
