"""The tables of masked rounds: devices that joined, and messages of members.

A round is open to the messages of one phase at a time. Messages are kept until the round is over,
because the answers to members follow from them; of tables, only their sum is kept. No time and no
address of a device is stored: its identity is a key that it made for this one use.
"""

# ruff: noqa: S608 -- only our own names are put into statements; every value is a parameter

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any, Literal, NamedTuple

from sfumato.collector.store import digests
from sfumato.collector.store.driver import DatabaseConnection, Row
from sfumato.errors import StoreError
from sfumato.secagg.round import KEY_BYTES


class Statements:
    """A connection while a transaction is open on it."""

    def __init__(self, connection: DatabaseConnection, *, today: int) -> None:
        self._connection: DatabaseConnection | None = connection
        self._today = today
        self._tasks: dict[str, int] = {}
        self._rounds: dict[str, int] = {}

    def end(self) -> None:
        """Called by the store."""
        self._connection = None

    @property
    def _open(self) -> DatabaseConnection:
        if self._connection is None:
            raise StoreError("this transaction is over", hint="read and write within its block")
        return self._connection

    def _run(self, sql: str, *parameters: Any) -> list[Any]:
        return self._open.execute(sql, parameters)

    def _insert(self, table: str, columns: str, rows: Sequence[Row]) -> None:
        self._open.insert(table, columns.split(", "), rows)

    def _first(self, sql: str, *parameters: Any) -> Any:
        """The first row of the result; None if it has none."""
        return next(iter(self._run(sql, *parameters)), None)

    def _sum(self, sql: str, *parameters: Any) -> int:
        return int(self._run(sql, *parameters)[0][0] or 0)

    def _task(self, task_id: str) -> int:
        """The number of a task in the tables."""
        if task_id not in self._tasks:
            row = self._first("SELECT task FROM task WHERE id = ?", task_id)
            if row is None:
                raise StoreError(f"there is no task {task_id}")
            self._tasks[task_id] = row[0]
        return self._tasks[task_id]

    def _lock_open_task(self, task_id: str) -> int | None:
        """The number of a task, if it is open and accepts any number of reports; nobody can close
        it before this transaction is over."""
        row = self._first(
            "SELECT task FROM task WHERE id = ? AND state = 'open' AND room IS NULL"
            + self._open.share_lock,
            task_id,
        )
        return None if row is None else row[0]


WAITING, ACCEPTED = "", "taken"  # outcomes of messages; any other is the reason for a refusal
_NOT_REFUSED = (WAITING, ACCEPTED)
ENDED = ("done", "aborted")
_TO_DROP = -1  # in place of the deadline of a round that has ended

JoinOutcome = Literal["new", "same", "taken", "closed"]
StoreOutcome = Literal["new", "same", "other", "late"]


@dataclass(frozen=True, slots=True)
class RoundRow:
    """A masked round of a task."""

    id: str  # its nonce
    spec: str  # JSON of a MaskedRound
    phase: str  # see `secagg.coordinator.Phase`
    is_open: int  # whether messages of the phase are accepted
    deadline: int  # of the phase, in seconds since 1970; below 1 when the round is over
    turn: int  # starts at 1, incremented with each new phase and at the end
    charged: int  # whether it is on the ledger
    problem: str = ""  # why it was aborted

    @property
    def was_formed(self) -> bool:
        """Whether enough devices enrolled: if not, it was aborted with only public keys sent."""
        return self.phase != "aborted" or self.turn > 2


@dataclass(frozen=True, slots=True)
class Place:
    """The place in a round, or in the queue for one, that a ticket stands for."""

    task_id: str
    round_id: str | None  # None while it waits
    member: int | None
    phase: str | None  # of the round


class Join(NamedTuple):
    """A device's request to wait for a round of a task: its key, of KEY_BYTES, and the digest of
    its ticket."""

    task_id: str
    campaign: str
    identity: bytes
    ticket: bytes


class Message(NamedTuple):
    """A member's message in a phase, identified by its digest."""

    round_id: str
    phase: str
    member: int
    digest: bytes
    body: bytes


def accepted_members(outcomes: Mapping[int, str]) -> set[int]:
    """The members whose messages were not refused. When a phase is over, all of these that take
    part in it are accepted; a table is marked as accepted when it is added."""
    return {member for member, outcome in outcomes.items() if outcome in _NOT_REFUSED}


_ROUND = ", ".join(f"round.{field.name}" for field in fields(RoundRow))


class RoundTables(Statements):
    """The part of a transaction about masked rounds."""

    def join_all(self, joins: Sequence[Join]) -> list[JoinOutcome]:
        """Let devices wait for rounds of tasks.

        "same" if it has joined already, "taken" if another ticket has this identity in the campaign
        (or another identity this ticket), "closed" if the task is not open. If some in a group
        exclude each other, one of them joins.
        """
        if any(len(join.identity) != KEY_BYTES for join in joins):
            raise StoreError(f"the identity of a device must have {KEY_BYTES} bytes")
        alike: dict[tuple[str, str], set[Join]] = {}
        for join in joins:
            alike.setdefault((join.task_id, join.campaign), set()).add(join)
        fresh: set[Join] = set()
        for (task_id, campaign), some in sorted(alike.items()):  # sorted to avoid deadlocks
            if task := self._lock_open_task(task_id):
                fresh |= self._join_alike(task, campaign, some)
        outcomes: list[JoinOutcome] = []
        for join in joins:
            outcomes.append("new" if join in fresh else self._outcome_of_old(join))
            fresh.discard(join)  # a repetition is not new
        return outcomes

    def _join_alike(self, task: int, campaign: str, joins: Collection[Join]) -> set[Join]:
        """Let devices wait for rounds of this open task; return those that are new."""
        by_value = {join.identity + join.ticket: join for join in joins}
        query, values = self._open.values_query(sorted(by_value))  # sorted for the same reason
        rows = self._run(
            "INSERT INTO joined (task, campaign, identity, ticket)"
            f" SELECT ?, ?, substr(value, 1, {KEY_BYTES}), substr(value, {KEY_BYTES + 1})"
            f" FROM ({query}) AS given WHERE true ON CONFLICT DO NOTHING"
            " RETURNING identity, ticket",
            task,
            campaign,
            *values,
        )
        return {by_value[bytes(identity) + bytes(ticket)] for identity, ticket in rows}

    def _outcome_of_old(self, join: Join) -> JoinOutcome:
        """The outcome of a join that is not new."""
        row = self._first(
            "SELECT task.id FROM joined JOIN task USING (task)"
            " WHERE campaign = ? AND identity = ? AND ticket = ?",
            join.campaign,
            join.identity,
            join.ticket,
        )
        if row is not None:
            return "same" if row[0] == join.task_id else "taken"
        return "closed" if self._lock_open_task(join.task_id) is None else "taken"

    def waiting_count(self, task_id: str) -> int:
        """The number of devices that wait for a round of this task."""
        return self._sum(
            "SELECT COUNT(*) FROM joined WHERE task = ? AND round IS NULL", self._task(task_id)
        )

    def waiting_devices(self, task_id: str) -> list[tuple[int, bytes]]:
        """(number, identity) of the devices that wait for a round of this task."""
        return self._run(
            "SELECT number, identity FROM joined WHERE task = ? AND round IS NULL ORDER BY number",
            self._task(task_id),
        )

    def add_round(
        self, task_id: str, row: RoundRow, invitation: str, numbers: Sequence[int]
    ) -> None:
        """Form a round of these waiting devices, in the order of members."""
        columns = ", ".join(field.name for field in fields(RoundRow))
        values = (self._task(task_id), invitation, *astuple(row))
        self._insert("round", f"task, invitation, {columns}", [values])
        round = self._round(row.id)
        self._open.execute_many(
            "UPDATE joined SET round = ?, member = ? WHERE number = ?",
            [(round, member, number) for member, number in enumerate(numbers)],
        )

    def dissolve(self, round_id: str, remaining: Iterable[int]) -> None:
        """Let these members of a round wait for another one, and delete the others."""
        round = self._round(round_id)
        query, parameters = self._open.values_query(sorted(remaining))
        self._run(
            "UPDATE joined SET round = NULL, member = NULL WHERE round = ?"
            f" AND member IN ({query})",
            round,
            *parameters,
        )
        self._run("DELETE FROM joined WHERE round = ?", round)

    def active_rounds(self) -> dict[str, str]:
        """The ids of all rounds that are not over, with those of their tasks."""
        return dict(
            self._run(
                "SELECT round.id, task.id FROM round JOIN task USING (task)"
                " WHERE phase NOT IN (?, ?)",
                *ENDED,
            )
        )

    def mark_charged(self, round_id: str) -> None:
        """Record that the round is on the ledger."""
        self._run("UPDATE round SET charged = 1 WHERE id = ?", round_id)

    def rounds(self, task_id: str) -> list[RoundRow]:
        """All rounds of a task, the oldest first."""
        rows = self._run(
            f"SELECT {_ROUND} FROM round WHERE task = ? ORDER BY round", self._task(task_id)
        )
        return [RoundRow(*row) for row in rows]

    def round(self, round_id: str) -> RoundRow | None:
        row = self._first(f"SELECT {_ROUND} FROM round WHERE id = ?", round_id)
        return None if row is None else RoundRow(*row)

    def lock_round(self, round_id: str) -> RoundRow | None:
        """The round; nobody else can change it before this transaction is over."""
        row = self._first(
            f"SELECT {_ROUND} FROM round WHERE id = ?{self._open.exclusive_lock}", round_id
        )
        return None if row is None else RoundRow(*row)

    def active_round(self, task_id: str) -> tuple[str, int, dict[str, int]] | None:
        """The phase, the number of members and the number of messages in each phase of a task's
        round that has not ended."""
        row = self._first(
            "SELECT round, phase FROM round WHERE task = ? AND phase NOT IN (?, ?)"
            " ORDER BY round DESC LIMIT 1",
            self._task(task_id),
            *ENDED,
        )
        if row is None:
            return None
        round, phase = row
        members = self._sum("SELECT COUNT(*) FROM joined WHERE round = ?", round)
        counts = self._run(
            "SELECT phase, COUNT(*) FROM round_message WHERE round = ? GROUP BY phase", round
        )
        return str(phase), members, {str(name): int(count) for name, count in counts}

    def invitation(self, round_id: str) -> str:
        """The invitation that members get when their round begins."""
        row = self._first("SELECT invitation FROM round WHERE id = ?", round_id)
        if row is None:
            raise _no_round(round_id)
        return str(row[0])

    def place(self, ticket: bytes) -> Place | None:
        """The place of the ticket with this digest."""
        row = self._first(
            "SELECT task.id, round.id, joined.member, round.phase FROM joined"
            " JOIN task ON task.task = joined.task LEFT JOIN round ON round.round = joined.round"
            " WHERE joined.ticket = ?",
            ticket,
        )
        return None if row is None else Place(*row)

    def members(self, round_id: str) -> list[tuple[bytes, bytes]]:
        """(identity, digest of the ticket) of the members, in their order."""
        return self._run(
            "SELECT identity, ticket FROM joined WHERE round = ? ORDER BY member",
            self._round(round_id),
        )

    def add_messages(self, messages: Sequence[Message]) -> list[StoreOutcome]:
        """Store members' messages, each if its round is open to it.

        "new" if it was stored, "same" if it had been stored before, "other" if the member had sent
        another one, "late" if the round is in another phase. The round stays in its phase until
        the transaction is over.
        """
        alike: dict[tuple[str, str], list[int]] = {}
        for place, message in enumerate(messages):
            alike.setdefault((message.round_id, message.phase), []).append(place)
        outcomes: list[StoreOutcome] = ["late"] * len(messages)
        for (round_id, phase), places in sorted(alike.items()):  # sorted to avoid deadlocks
            some = [messages[place] for place in places]
            for place, one in zip(places, self._add_alike(round_id, phase, some), strict=True):
                outcomes[place] = one
        return outcomes

    def _add_alike(
        self, round_id: str, phase: str, messages: Sequence[Message]
    ) -> Iterator[StoreOutcome]:
        row = self._first(
            f"SELECT round, phase, is_open FROM round WHERE id = ?{self._open.exclusive_lock}",
            round_id,
        )
        round, present, is_open = row or (None, "", False)
        digests = self._digests(round, phase, sorted({message.member for message in messages}))
        new: dict[int, Message] = {}
        if present == phase and is_open:
            for message in messages:
                if message.member not in digests:
                    new.setdefault(message.member, message)
            self._insert(
                "round_message",
                "round, phase, member, outcome, digest, body",
                [
                    (round, phase, member, WAITING, message.digest, message.body)
                    for member, message in new.items()
                ],
            )
        for message in messages:
            if message is new.get(message.member):
                yield "new"
            elif message.member in new or message.member in digests:
                first = new.get(message.member)
                digest = digests[message.member] if first is None else first.digest
                yield "same" if digest == message.digest else "other"
            else:
                yield "late"

    def add_outcomes(
        self, round_id: str, phase: str, outcomes: Mapping[int, tuple[bytes, str]]
    ) -> None:
        """Record messages that were never stored: (digest, outcome) by member."""
        round = self._round(round_id)
        self._insert(
            "round_message",
            "round, phase, member, outcome, digest, body",
            [
                (round, phase, member, outcome, digest, b"")
                for member, (digest, outcome) in outcomes.items()
            ],
        )

    def messages(self, round_id: str, phase: str, members: Sequence[int]) -> dict[int, bytes]:
        """The messages of these members in a phase."""
        if not members:
            return {}
        numbers = ", ".join(str(int(member)) for member in members)
        rows = self._run(
            "SELECT member, body FROM round_message WHERE round = ? AND phase = ?"
            f" AND member IN ({numbers}) ORDER BY member",
            self._round(round_id),
            phase,
        )
        return {member: bytes(body) for member, body in rows}

    def message_digests(
        self, round_id: str, phase: str, members: Sequence[int]
    ) -> dict[int, bytes]:
        """The digests of these members' messages in a phase."""
        return self._digests(self._round(round_id), phase, members)

    def _digests(self, round: int | None, phase: str, members: Sequence[int]) -> dict[int, bytes]:
        query, parameters = self._open.values_query(members)
        rows = self._run(
            "SELECT member, digest FROM round_message WHERE round = ? AND phase = ?"
            f" AND member IN ({query})",
            round,
            phase,
            *parameters,
        )
        return {member: bytes(digest) for member, digest in rows}

    def senders(self, round_id: str, phase: str) -> dict[int, str]:
        """The outcome of every message of a phase, by member."""
        return dict(
            self._run(
                "SELECT member, outcome FROM round_message WHERE round = ? AND phase = ?",
                self._round(round_id),
                phase,
            )
        )

    def set_outcomes(
        self, round_id: str, phase: str, outcomes: Mapping[int, str], *, drop_bodies: bool
    ) -> None:
        """Record the outcomes of messages. Drop the bodies of refused ones, or with `drop_bodies`
        of all.

        Dropped tables are not overwritten: they are masked, so their remains on the disk reveal no
        more than the collector has seen, and overwriting would take as long as storing them.
        """
        self._open.overwrite_deleted(always=not drop_bodies)
        for outcome in sorted(set(outcomes.values())):
            drops = drop_bodies or outcome != ACCEPTED
            assignment = ", body = ?" if drops else ""
            query, parameters = self._open.values_query(
                [member for member, each in outcomes.items() if each == outcome]
            )
            self._run(
                f"UPDATE round_message SET outcome = ?{assignment} WHERE round = ? AND phase = ?"
                f" AND member IN ({query})",
                outcome,
                *([b""] if drops else []),
                self._round(round_id),
                phase,
                *parameters,
            )
        self._open.overwrite_deleted(always=True)

    def set_checkpoint(self, round_id: str, checkpoint: bytes) -> None:
        digest = digests.digest_of("checkpoint", round_id, checkpoint)
        self._run(
            "UPDATE round SET checkpoint = ?, digest = ? WHERE id = ?", checkpoint, digest, round_id
        )

    def checkpoint(self, round_id: str) -> bytes | None:
        row = self.checkpoint_row(round_id)
        return None if row is None else row.check()

    def checkpoint_row(self, round_id: str) -> digests.Row | None:
        """The row of a round's checkpoint, without a check of its digest."""
        row = self._first("SELECT checkpoint, digest FROM round WHERE id = ?", round_id)
        if row is None or row[0] is None:
            return None
        return digests.Row("checkpoint", round_id, bytes(row[0]), 0, row[1])

    def close_phase(self, round_id: str) -> None:
        """Accept no more messages for the phase after the commit."""
        self._run("UPDATE round SET is_open = 0 WHERE id = ?", round_id)

    def set_deadline(self, round_id: str, deadline: int) -> None:
        self._run("UPDATE round SET deadline = ? WHERE id = ?", deadline, round_id)

    def open_phase(self, round_id: str, phase: str, deadline: int, *, charged: bool) -> None:
        """Begin the next phase."""
        self._run(
            "UPDATE round SET phase = ?, is_open = 1, deadline = ?, turn = turn + 1, charged = ?"
            " WHERE id = ?",
            phase,
            deadline,
            int(charged),
            round_id,
        )

    def end_round(
        self, round_id: str, phase: Literal["done", "aborted"], problem: str = ""
    ) -> None:
        """End a round. Its deadline is dropped at once, the rest by `drop_ended_rounds`."""
        self._run(
            "UPDATE round SET phase = ?, is_open = 0, turn = turn + 1, deadline = ?, problem = ?"
            " WHERE id = ?",
            phase,
            _TO_DROP,
            problem,
            round_id,
        )

    def ended_rounds(self) -> list[int]:
        """The numbers of rounds that have ended and whose messages have not been dropped."""
        return [number for (number,) in self._run("SELECT round FROM round WHERE deadline < 0")]

    def drop_ended_rounds(self) -> None:
        """Drop the messages of rounds that have ended, except for digests: a member that got no
        answer to its last message sends it again."""
        for round in self.ended_rounds():
            self._run("UPDATE round_message SET body = ? WHERE round = ?", b"", round)
            self._run(
                "UPDATE round SET deadline = 0, checkpoint = NULL, digest = NULL, invitation = ''"
                " WHERE round = ?",
                round,
            )

    def end_rounds(self, study_id: str, problem: str) -> None:
        """Abort the active rounds of a study, and delete the devices that wait for one."""
        for round_id, phase in self._run(
            "SELECT round.id, round.phase FROM round JOIN task USING (task)"
            " WHERE task.study_id = ? ORDER BY round.id",
            study_id,
        ):
            if phase not in ENDED:
                self.end_round(round_id, "aborted", problem)
        self._run(
            "DELETE FROM joined WHERE round IS NULL"
            " AND task IN (SELECT task FROM task WHERE study_id = ?)",
            study_id,
        )

    def end_waiting(self, task_id: str) -> None:
        """Delete the devices that wait for a round of this task."""
        self._run("DELETE FROM joined WHERE round IS NULL AND task = ?", self._task(task_id))

    def revision(self) -> tuple[int, int]:
        """Changes whenever there is something new for a member of a round."""
        rounds, turns = self._first("SELECT COUNT(*), SUM(turn) FROM round")
        return int(rounds), int(turns or 0)

    def drop_rounds(self, study_id: str) -> None:
        """Delete a study's rounds, and the secret of its noise."""
        tasks = "SELECT task FROM task WHERE study_id = ?"
        self._run(
            "DELETE FROM round_message"
            f" WHERE round IN (SELECT round FROM round WHERE task IN ({tasks}))",
            study_id,
        )
        for table in ("joined", "round"):
            self._run(f"DELETE FROM {table} WHERE task IN ({tasks})", study_id)
        self._run("DELETE FROM secret WHERE study_id = ?", study_id)

    def set_secret(self, study_id: str, seed: bytes) -> None:
        """Store the seed of a study's own noise; it is deleted with the study's data."""
        self._insert("secret", "study_id, seed", [(study_id, seed)])

    def secret(self, study_id: str) -> bytes | None:
        row = self._first("SELECT seed FROM secret WHERE study_id = ?", study_id)
        return None if row is None else bytes(row[0])

    def _round(self, round_id: str) -> int:
        """The number of a round in the tables."""
        if round_id not in self._rounds:
            row = self._first("SELECT round FROM round WHERE id = ?", round_id)
            if row is None:
                raise _no_round(round_id)
            self._rounds[round_id] = int(row[0])
        return self._rounds[round_id]


def _no_round(round_id: str) -> StoreError:
    return StoreError(f"there is no round {round_id}")
