"""The tables of masked rounds: who joined, and what members sent.

A round is open to the messages of one phase at a time. What came is kept until the round is over,
for what members are told follows from it; but of a table only the sum that it is in. No time and no
address is kept of a device: its identity is a key that it made for this once.
"""

# ruff: noqa: S608 -- only names of our own are put into statements; every value is a parameter

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

from sfumato.collector.store.driver import Connection, Row
from sfumato.errors import StoreError
from sfumato.secagg.round import KEY_BYTES


class Statements:
    """A connection while a transaction is open on it."""

    def __init__(self, connection: Connection, *, today: int) -> None:
        self._connection: Connection | None = connection
        self._today = today
        self._tasks: dict[str, int] = {}
        self._rounds: dict[str, int] = {}

    def end(self) -> None:
        """Called by the store."""
        self._connection = None

    @property
    def _open(self) -> Connection:
        if self._connection is None:
            raise StoreError("this transaction is over", hint="read and write within its block")
        return self._connection

    def _run(self, sql: str, *parameters: Any) -> list[Any]:
        return self._open.execute(sql, parameters)

    def _insert(self, table: str, columns: str, rows: Sequence[Row]) -> None:
        self._open.insert(table, columns.split(", "), rows)

    def _sum(self, sql: str, *parameters: Any) -> int:
        return int(self._run(sql, *parameters)[0][0] or 0)

    def _task(self, task_id: str) -> int:
        """The number that stands for a task in the tables."""
        if task_id not in self._tasks:
            rows = self._run("SELECT task FROM task WHERE id = ?", task_id)
            if not rows:
                raise no_task(task_id)
            self._tasks[task_id] = rows[0][0]
        return self._tasks[task_id]

    def _held_open(self, task_id: str) -> int | None:
        """The number of a task, if it is open and takes any number of reports; nobody can close it
        before this is over."""
        rows = self._run(
            "SELECT task FROM task WHERE id = ? AND state = 'open' AND room IS NULL"
            + self._open.sharing,
            task_id,
        )
        return rows[0][0] if rows else None


def no_task(task_id: str) -> StoreError:
    return StoreError(f"there is no task {task_id}")


WAITING, TAKEN = "", "taken"  # outcomes of messages; any other is why one was refused
_STANDING = (WAITING, TAKEN)
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
    is_open: int  # whether messages of the phase are taken
    deadline: int  # of the phase, in seconds since 1970; below 1 when it is over
    turn: int  # 1 at first; one more with every phase that follows, and at the end
    charged: int  # whether it is on the ledger
    problem: str = ""  # why it was aborted

    @property
    def came_together(self) -> bool:
        """Whether enough enrolled: it was not aborted before anything but public keys was sent."""
        return self.phase != "aborted" or self.turn > 2


@dataclass(frozen=True, slots=True)
class Place:
    """What a ticket is for."""

    task_id: str
    round_id: str | None  # None: it waits
    member: int | None
    phase: str | None  # of the round


class Join(NamedTuple):
    """A device that would wait for a round of a task: its key, of KEY_BYTES, and the digest of its
    ticket."""

    task_id: str
    campaign: str
    identity: bytes
    ticket: bytes


class Message(NamedTuple):
    """What a member said in a phase; the digest tells it from another."""

    round_id: str
    phase: str
    member: int
    digest: bytes
    body: bytes


def accepted_members(outcomes: Mapping[int, str]) -> set[int]:
    """Whose messages were not refused. When a phase is over, those who were asked in it and are
    among them have been taken; of tables it is said when they are."""
    return {member for member, outcome in outcomes.items() if outcome in _STANDING}


_ROUND = ", ".join(f"round.{field.name}" for field in fields(RoundRow))


class RoundTables(Statements):
    """What a transaction can do about masked rounds."""

    def join_all(self, joins: Sequence[Join]) -> list[JoinOutcome]:
        """Let devices wait for rounds of tasks.

        "same" if it did so before, "taken" if another ticket has this identity in the campaign (or
        another identity this ticket), "closed" if the task is not open. Of some in a group that
        exclude each other, one joins.
        """
        if any(len(join.identity) != KEY_BYTES for join in joins):
            raise StoreError(f"the identity of a device must have {KEY_BYTES} bytes")
        alike: dict[tuple[str, str], set[Join]] = {}
        for join in joins:
            alike.setdefault((join.task_id, join.campaign), set()).add(join)
        fresh: set[Join] = set()
        for (task_id, campaign), some in sorted(alike.items()):  # so that no two wait in a ring
            if task := self._held_open(task_id):
                fresh |= self._join_alike(task, campaign, some)
        outcomes: list[JoinOutcome] = []
        for join in joins:
            outcomes.append("new" if join in fresh else self._joined_before(join))
            fresh.discard(join)  # the same once more is no new one
        return outcomes

    def _join_alike(self, task: int, campaign: str, joins: Collection[Join]) -> set[Join]:
        """Those that were not known, which wait for rounds of this open task from now on."""
        given = {join.identity + join.ticket: join for join in joins}
        listed, values = self._open.listed(sorted(given))  # sorted for the same reason
        rows = self._run(
            "INSERT INTO joined (task, campaign, identity, ticket)"
            f" SELECT ?, ?, substr(value, 1, {KEY_BYTES}), substr(value, {KEY_BYTES + 1})"
            f" FROM ({listed}) AS given WHERE true ON CONFLICT DO NOTHING"
            " RETURNING identity, ticket",
            task,
            campaign,
            *values,
        )
        return {given[bytes(identity) + bytes(ticket)] for identity, ticket in rows}

    def _joined_before(self, join: Join) -> JoinOutcome:
        """What a join is that was not taken."""
        known = self._run(
            "SELECT task.id FROM joined JOIN task USING (task)"
            " WHERE campaign = ? AND identity = ? AND ticket = ?",
            join.campaign,
            join.identity,
            join.ticket,
        )
        if known:
            return "same" if known[0][0] == join.task_id else "taken"
        return "closed" if self._held_open(join.task_id) is None else "taken"

    def waiting(self, task_id: str) -> int:
        """How many devices wait for a round of this task."""
        return self._sum(
            "SELECT COUNT(*) FROM joined WHERE task = ? AND round IS NULL", self._task(task_id)
        )

    def who_waits(self, task_id: str) -> list[tuple[int, bytes]]:
        """(number, identity) of those that wait for a round of this task."""
        return self._run(
            "SELECT number, identity FROM joined WHERE task = ? AND round IS NULL ORDER BY number",
            self._task(task_id),
        )

    def add_round(
        self, task_id: str, row: RoundRow, invitation: str, numbers: Sequence[int]
    ) -> None:
        """Make a round of these who waited, in the order of members."""
        columns = ", ".join(field.name for field in fields(RoundRow))
        values = tuple(getattr(row, field.name) for field in fields(RoundRow))
        self._insert(
            "round",
            f"task, invitation, {columns}",
            [(self._task(task_id), invitation, *values)],
        )
        round = self._round(row.id)
        self._open.execute_many(
            "UPDATE joined SET round = ?, member = ? WHERE number = ?",
            [(round, member, number) for member, number in enumerate(numbers)],
        )

    def dissolve(self, round_id: str, staying: Iterable[int]) -> None:
        """Let these members of a round wait for another one, and forget the rest of them."""
        round = self._round(round_id)
        listed, given = self._open.listed(sorted(staying))
        self._run(
            "UPDATE joined SET round = NULL, member = NULL WHERE round = ?"
            f" AND member IN ({listed})",
            round,
            *given,
        )
        self._run("DELETE FROM joined WHERE round = ?", round)

    def under_way(self) -> dict[str, str]:
        """The ids of all rounds that are not over, and those of their tasks."""
        ended = ", ".join("?" for _ in ENDED)
        return dict(
            self._run(
                "SELECT round.id, task.id FROM round JOIN task USING (task)"
                f" WHERE phase NOT IN ({ended})",
                *ENDED,
            )
        )

    def set_charged(self, round_id: str) -> None:
        """It is on the ledger."""
        self._run("UPDATE round SET charged = 1 WHERE id = ?", round_id)

    def rounds(self, task_id: str) -> list[RoundRow]:
        """All rounds of a task, the first first."""
        rows = self._run(
            f"SELECT {_ROUND} FROM round WHERE task = ? ORDER BY round", self._task(task_id)
        )
        return [RoundRow(*row) for row in rows]

    def round(self, round_id: str) -> RoundRow | None:
        rows = self._run(f"SELECT {_ROUND} FROM round WHERE id = ?", round_id)
        return RoundRow(*rows[0]) if rows else None

    def held_round(self, round_id: str) -> RoundRow | None:
        """The round, which nobody changes before this transaction is over."""
        rows = self._run(f"SELECT {_ROUND} FROM round WHERE id = ?{self._open.holding}", round_id)
        return RoundRow(*rows[0]) if rows else None

    def round_under_way(self, task_id: str) -> tuple[str, int, dict[str, int]] | None:
        """Of the round of a task that has not ended: its phase, how many members it has, and how
        many messages came in each phase."""
        rows = self._run(
            "SELECT round, phase FROM round WHERE task = ? AND phase NOT IN (?, ?)"
            " ORDER BY round DESC LIMIT 1",
            self._task(task_id),
            *ENDED,
        )
        if not rows:
            return None
        round, phase = rows[0]
        members = self._sum("SELECT COUNT(*) FROM joined WHERE round = ?", round)
        came = self._run(
            "SELECT phase, COUNT(*) FROM round_message WHERE round = ? GROUP BY phase", round
        )
        return str(phase), members, {str(name): int(count) for name, count in came}

    def invitation(self, round_id: str) -> str:
        """What members are told when their round begins."""
        rows = self._run("SELECT invitation FROM round WHERE id = ?", round_id)
        if not rows:
            raise _no_round(round_id)
        return str(rows[0][0])

    def place(self, ticket: bytes) -> Place | None:
        """What a ticket is for, by its digest."""
        rows = self._run(
            "SELECT task.id, round.id, joined.member, round.phase FROM joined"
            " JOIN task ON task.task = joined.task LEFT JOIN round ON round.round = joined.round"
            " WHERE joined.ticket = ?",
            ticket,
        )
        return Place(*rows[0]) if rows else None

    def members(self, round_id: str) -> list[tuple[bytes, bytes]]:
        """(identity, digest of the ticket) of the members, in their order."""
        return self._run(
            "SELECT identity, ticket FROM joined WHERE round = ? ORDER BY member",
            self._round(round_id),
        )

    def add_messages(self, messages: Sequence[Message]) -> list[StoreOutcome]:
        """Keep members' messages, each if its round is open to it.

        A message is kept once: "same" if it came before, "other" if another one did. "late" if the
        round is in another phase, and it stays in this one until the transaction is over.
        """
        alike: dict[tuple[str, str], list[int]] = {}
        for place, message in enumerate(messages):
            alike.setdefault((message.round_id, message.phase), []).append(place)
        kept: list[StoreOutcome] = ["late"] * len(messages)
        for (round_id, phase), places in sorted(alike.items()):  # so that no two wait in a ring
            some = [messages[place] for place in places]
            for place, one in zip(places, self._add_alike(round_id, phase, some), strict=True):
                kept[place] = one
        return kept

    def _add_alike(
        self, round_id: str, phase: str, messages: Sequence[Message]
    ) -> Iterator[StoreOutcome]:
        rows = self._run(
            f"SELECT round, phase, is_open FROM round WHERE id = ?{self._open.holding}", round_id
        )
        round, present, is_open = rows[0] if rows else (None, "", False)
        listed, given = self._open.listed(sorted({message.member for message in messages}))
        known = dict(
            self._run(
                "SELECT member, digest FROM round_message WHERE round = ? AND phase = ?"
                f" AND member IN ({listed})",
                round,
                phase,
                *given,
            )
        )
        new: dict[int, Message] = {}
        if present == phase and is_open:
            for message in messages:
                if message.member not in known:
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
            elif message.member in new or message.member in known:
                first = new[message.member].digest if message.member in new else None
                digest = first or bytes(known[message.member])
                yield "same" if digest == message.digest else "other"
            else:
                yield "late"

    def add_settled(
        self, round_id: str, phase: str, outcomes: Mapping[int, tuple[bytes, str]]
    ) -> None:
        """Write down messages that were never stored: (digest, outcome) by member."""
        round = self._round(round_id)
        self._insert(
            "round_message",
            "round, phase, member, outcome, digest, body",
            [
                (round, phase, member, outcome, digest, b"")
                for member, (digest, outcome) in outcomes.items()
            ],
        )

    def message(self, round_id: str, phase: str, member: int) -> tuple[bytes, str] | None:
        """(digest, outcome) of what a member sent in a phase."""
        rows = self._run(
            "SELECT digest, outcome FROM round_message WHERE round = ? AND phase = ?"
            " AND member = ?",
            self._round(round_id),
            phase,
            member,
        )
        return (bytes(rows[0][0]), rows[0][1]) if rows else None

    def messages(self, round_id: str, phase: str, members: Sequence[int]) -> dict[int, bytes]:
        """What these members sent in a phase."""
        if not members:
            return {}
        named = ", ".join(str(int(member)) for member in members)
        rows = self._run(
            "SELECT member, body FROM round_message WHERE round = ? AND phase = ?"
            f" AND member IN ({named}) ORDER BY member",
            self._round(round_id),
            phase,
        )
        return {member: bytes(body) for member, body in rows}

    def senders(self, round_id: str, phase: str) -> dict[int, str]:
        """The outcome of every message of a phase, by member."""
        return dict(
            self._run(
                "SELECT member, outcome FROM round_message WHERE round = ? AND phase = ?",
                self._round(round_id),
                phase,
            )
        )

    def settle(
        self, round_id: str, phase: str, outcomes: Mapping[int, str], *, forget: bool
    ) -> None:
        """Write down what became of messages. What was refused is dropped; `forget` drops all.

        Tables are masked, and whoever reads them off the disk knows no more than the collector did;
        to overwrite them would take as long as it took to store them.
        """
        self._open.overwrite_deleted(always=not forget)
        for outcome in sorted(set(outcomes.values())):
            empties = forget or outcome != TAKEN
            emptied = ", body = ?" if empties else ""
            listed, given = self._open.listed(
                [m for m, said in outcomes.items() if said == outcome]
            )
            self._run(
                f"UPDATE round_message SET outcome = ?{emptied} WHERE round = ? AND phase = ?"
                f" AND member IN ({listed})",
                outcome,
                *([b""] if empties else []),
                self._round(round_id),
                phase,
                *given,
            )
        self._open.overwrite_deleted(always=True)

    def set_checkpoint(self, round_id: str, checkpoint: bytes) -> None:
        self._run("UPDATE round SET checkpoint = ? WHERE id = ?", checkpoint, round_id)

    def checkpoint(self, round_id: str) -> bytes | None:
        rows = self._run("SELECT checkpoint FROM round WHERE id = ?", round_id)
        return bytes(rows[0][0]) if rows and rows[0][0] is not None else None

    def close_phase(self, round_id: str) -> None:
        """Once this is committed, no more messages are taken for the phase."""
        self._run("UPDATE round SET is_open = 0 WHERE id = ?", round_id)

    def set_deadline(self, round_id: str, deadline: int) -> None:
        self._run("UPDATE round SET deadline = ? WHERE id = ?", deadline, round_id)

    def open_phase(self, round_id: str, phase: str, deadline: int, *, charged: bool) -> None:
        """Go on to the next phase."""
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
        """Nothing more is sent or told. When that was is dropped; `drop_ended` drops the rest."""
        self._run(
            "UPDATE round SET phase = ?, is_open = 0, turn = turn + 1, deadline = ?, problem = ?"
            " WHERE id = ?",
            phase,
            _TO_DROP,
            problem,
            round_id,
        )

    def ended(self) -> list[int]:
        """The numbers of rounds that have ended and were not dropped."""
        return [number for (number,) in self._run("SELECT round FROM round WHERE deadline < 0")]

    def drop_ended(self) -> None:
        """Drop what was sent in rounds that have ended, but for digests: who heard no
        answer to a last message asks again."""
        for round in self.ended():
            self._run("UPDATE round_message SET body = ? WHERE round = ?", b"", round)
            self._run(
                "UPDATE round SET deadline = 0, checkpoint = NULL, invitation = '' WHERE round = ?",
                round,
            )

    def end_rounds(self, study_id: str, problem: str) -> None:
        """Abort what is under way of a study, and let nobody wait for more."""
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
        """Let nobody wait for a round of this task."""
        self._run("DELETE FROM joined WHERE round IS NULL AND task = ?", self._task(task_id))

    def news(self) -> tuple[int, int]:
        """Differs from before when there is something new to tell somebody."""
        rows = self._run("SELECT COUNT(*), SUM(turn) FROM round")
        return int(rows[0][0]), int(rows[0][1] or 0)

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
        """What a study's own noise is drawn from; it goes with the study's data."""
        self._insert("secret", "study_id, seed", [(study_id, seed)])

    def secret(self, study_id: str) -> bytes | None:
        rows = self._run("SELECT seed FROM secret WHERE study_id = ?", study_id)
        return bytes(rows[0][0]) if rows else None

    def _round(self, round_id: str) -> int:
        """The number that stands for a round in the tables."""
        if round_id not in self._rounds:
            rows = self._run("SELECT round FROM round WHERE id = ?", round_id)
            if not rows:
                raise _no_round(round_id)
            self._rounds[round_id] = int(rows[0][0])
        return self._rounds[round_id]


def _no_round(round_id: str) -> StoreError:
    return StoreError(f"there is no round {round_id}")
