"""Where a device keeps its state between calls: one SQLite file, or memory for made-up devices."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from sfumato.device.offers import Offer, offer_from_text
from sfumato.device.outbox import Outbox
from sfumato.errors import (
    OfferError,
    SpecError,
    StoreError,
    StoreFull,
    StoreReadOnly,
    StoreUnavailable,
)
from sfumato.flow.task import Task
from sfumato.spec import canonical, to_json

WAIT_SECONDS = 30.0  # for another process that has the box open
_TABLES = (
    "CREATE TABLE IF NOT EXISTS state (only INTEGER PRIMARY KEY CHECK (only = 1), text TEXT)",
    "CREATE TABLE IF NOT EXISTS dictionary (digest TEXT PRIMARY KEY, body BLOB NOT NULL)",
    "CREATE TABLE IF NOT EXISTS round (study TEXT PRIMARY KEY, state TEXT NOT NULL,"
    " message BLOB NOT NULL)",
    "CREATE TABLE IF NOT EXISTS model (study TEXT PRIMARY KEY, digest TEXT NOT NULL,"
    " body BLOB NOT NULL)",
)
_KINDS = {
    "SQLITE_FULL": StoreFull,
    "SQLITE_READONLY": StoreReadOnly,
    "SQLITE_BUSY": StoreUnavailable,
    "SQLITE_LOCKED": StoreUnavailable,
}


class Box(Protocol):
    """What every box does. Inside `transaction` a state is read, changed and written as one."""

    def transaction(self) -> AbstractContextManager[None]: ...

    def read(self) -> str | None:
        """The state that was written last."""
        ...

    def write(self, state: str) -> None: ...

    def dictionary(self, digest: str) -> bytes | None: ...

    def keep_dictionary(self, digest: str, body: bytes) -> None: ...

    def drop_dictionaries(self, wanted: set[str]) -> None:
        """Drop all but these."""
        ...

    def round(self, study: str) -> tuple[str, bytes] | None:
        """Where the device is in a masked round of a study, and its last message."""
        ...

    def keep_round(self, study: str, state: str, message: bytes) -> None: ...

    def drop_round(self, study: str) -> None: ...

    def model(self, study: str) -> tuple[str, bytes] | None:
        """The parameters that a study's model had last, behind their digest."""
        ...

    def keep_model(self, study: str, digest: str, body: bytes) -> None:
        """Keep these, and no others of the study."""
        ...

    def drop_models(self, wanted: set[str]) -> None:
        """Drop those of all studies but these, and but those that a round is begun of."""
        ...

    def drop_rounds(self, wanted: set[str]) -> None:
        """Drop the rounds of all studies but these."""
        ...

    def close(self) -> None: ...


class SqliteBox:
    """A box in a file that its user alone may read. What was written is on disk on return.

    Several processes may use one: a transaction waits for another's. Deleted bytes are overwritten.
    """

    def __init__(self, path: Path | str) -> None:
        self._path = str(path)
        with self._as_store_errors():
            with suppress(FileExistsError):  # to open and close one would let go of its locks
                os.close(os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
            self._connection = sqlite3.connect(
                self._path, isolation_level=None, timeout=WAIT_SECONDS
            )
        try:
            with self._as_store_errors():
                self._connection.execute("PRAGMA synchronous = FULL")
                self._connection.execute("PRAGMA secure_delete = ON")
                for table in _TABLES:
                    self._connection.execute(table)
        except StoreError:
            self._connection.close()
            raise

    @contextmanager
    def transaction(self) -> Iterator[None]:
        with self._as_store_errors():
            self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            with self._as_store_errors():
                self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:  # a full disk may have ended it
                self._connection.execute("ROLLBACK")
            raise

    def read(self) -> str | None:
        with self._as_store_errors():
            row = self._connection.execute("SELECT text FROM state").fetchone()
        return None if row is None else str(row[0])

    def write(self, state: str) -> None:
        with self._as_store_errors():
            self._connection.execute("REPLACE INTO state VALUES (1, ?)", (state,))

    def dictionary(self, digest: str) -> bytes | None:
        with self._as_store_errors():
            found = self._connection.execute(
                "SELECT body FROM dictionary WHERE digest = ?", (digest,)
            ).fetchone()
        return None if found is None else bytes(found[0])

    def keep_dictionary(self, digest: str, body: bytes) -> None:
        with self._as_store_errors():
            self._connection.execute("REPLACE INTO dictionary VALUES (?, ?)", (digest, body))

    def drop_dictionaries(self, wanted: set[str]) -> None:
        with self._as_store_errors():
            with closing(self._connection.execute("SELECT digest FROM dictionary")) as kept:
                gone = [(digest,) for (digest,) in kept if digest not in wanted]
            self._connection.executemany("DELETE FROM dictionary WHERE digest = ?", gone)

    def round(self, study: str) -> tuple[str, bytes] | None:
        with self._as_store_errors():
            found = self._connection.execute(
                "SELECT state, message FROM round WHERE study = ?", (study,)
            ).fetchone()
        return None if found is None else (str(found[0]), bytes(found[1]))

    def keep_round(self, study: str, state: str, message: bytes) -> None:
        with self._as_store_errors():
            self._connection.execute("REPLACE INTO round VALUES (?, ?, ?)", (study, state, message))

    def drop_round(self, study: str) -> None:
        with self._as_store_errors():
            self._connection.execute("DELETE FROM round WHERE study = ?", (study,))

    def model(self, study: str) -> tuple[str, bytes] | None:
        with self._as_store_errors():
            found = self._connection.execute(
                "SELECT digest, body FROM model WHERE study = ?", (study,)
            ).fetchone()
        return None if found is None else (str(found[0]), bytes(found[1]))

    def keep_model(self, study: str, digest: str, body: bytes) -> None:
        with self._as_store_errors():
            self._connection.execute("REPLACE INTO model VALUES (?, ?, ?)", (study, digest, body))

    def drop_models(self, wanted: set[str]) -> None:
        with self._as_store_errors():
            with closing(
                self._connection.execute(
                    "SELECT study FROM model WHERE study NOT IN (SELECT study FROM round)"
                )
            ) as kept:
                gone = [(study,) for (study,) in kept if study not in wanted]
            self._connection.executemany("DELETE FROM model WHERE study = ?", gone)

    def drop_rounds(self, wanted: set[str]) -> None:
        with self._as_store_errors():
            with closing(self._connection.execute("SELECT study FROM round")) as kept:
                gone = [(study,) for (study,) in kept if study not in wanted]
            self._connection.executemany("DELETE FROM round WHERE study = ?", gone)

    def close(self) -> None:
        self._connection.close()

    @contextmanager
    def _as_store_errors(self) -> Iterator[None]:
        """What SQLite and the system say, as our errors; never with what was being written."""
        try:
            yield
        except OSError as problem:
            raise StoreError(
                f"the device's box at {self._path} cannot be opened: {problem.strerror}"
            ) from None
        except sqlite3.Error as problem:
            name = getattr(problem, "sqlite_errorname", "") or ""
            family = "_".join(name.split("_")[:2])
            raise _KINDS.get(family, StoreError)(
                f"the device's box at {self._path} cannot be used: {family or 'not a database'}",
                hint="free some space, or see who holds the file; nothing was changed",
            ) from None


class MemoryBox:
    """A box that is gone with the program: for many made-up devices, who may share what they
    fetched, dictionaries and models."""

    def __init__(
        self,
        dictionaries: dict[str, bytes] | None = None,
        models: dict[str, tuple[str, bytes]] | None = None,
    ) -> None:
        self._state: str | None = None
        self._models = {} if models is None else models
        self._shares_models = models is not None
        self._dictionaries = {} if dictionaries is None else dictionaries
        self._shared = dictionaries is not None
        self._rounds: dict[str, tuple[str, bytes]] = {}

    @contextmanager
    def transaction(self) -> Iterator[None]:
        before, rounds = self._state, dict(self._rounds)
        try:
            yield
        except BaseException:
            self._state, self._rounds = before, rounds
            raise

    def read(self) -> str | None:
        return self._state

    def write(self, state: str) -> None:
        self._state = state

    def dictionary(self, digest: str) -> bytes | None:
        return self._dictionaries.get(digest)

    def keep_dictionary(self, digest: str, body: bytes) -> None:
        self._dictionaries[digest] = body

    def drop_dictionaries(self, wanted: set[str]) -> None:
        if not self._shared:
            for digest in self._dictionaries.keys() - wanted:
                del self._dictionaries[digest]

    def round(self, study: str) -> tuple[str, bytes] | None:
        return self._rounds.get(study)

    def keep_round(self, study: str, state: str, message: bytes) -> None:
        self._rounds[study] = state, message

    def drop_round(self, study: str) -> None:
        self._rounds.pop(study, None)

    def model(self, study: str) -> tuple[str, bytes] | None:
        return self._models.get(study)

    def keep_model(self, study: str, digest: str, body: bytes) -> None:
        self._models[study] = digest, body

    def drop_models(self, wanted: set[str]) -> None:
        if not self._shares_models:
            for study in self._models.keys() - wanted - self._rounds.keys():
                del self._models[study]

    def drop_rounds(self, wanted: set[str]) -> None:
        for study in self._rounds.keys() - wanted:
            del self._rounds[study]

    def close(self) -> None:
        pass


VERSION = 1
_UNREADABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class Retry:
    """When a task that could not be answered is tried again."""

    failures: int
    at: float


@dataclass(slots=True)
class Contribution:
    """What this device did for a campaign: its cohort, and the tasks whose sum has its table."""

    study: str
    cohort: str
    tasks: set[str] = field(default_factory=set)  # of masked rounds; an outbox counts the others


@dataclass(slots=True, repr=False)
class State:
    """Changed in place by `Device`, which writes it to its box before it acts on anything."""

    outbox: Outbox = field(default_factory=Outbox)
    offered: dict[str, Offer] = field(default_factory=dict)  # by study, as does the next one
    agreed: dict[str, Offer] = field(default_factory=dict)
    report_ids: dict[str, str] = field(default_factory=dict)  # of records that are on the way
    retries: dict[str, Retry] = field(default_factory=dict)  # by task
    contributed: dict[str, Contribution] = field(default_factory=dict)  # by campaign

    def may_contribute(self, offer: Offer, task: Task) -> bool:
        """Whether a table for this task keeps the device within what the study's promise counts
        with: one cohort of a campaign, a task once, and no more tasks than the offer says. A
        campaign is one study's: another's that names it is not answered."""
        known = self.contributed.get(_campaign(offer, task))
        if known is not None and (
            known.study != offer.study or known.cohort != task.cohort or task.id in known.tasks
        ):
            return False
        every = [part for part in self.contributed.values() if part.study == offer.study]
        return sum(len(part.tasks) for part in every) < offer.contributions

    def contribute(self, offer: Offer, task: Task) -> Contribution:
        """Write down that this device is in the task's cohort."""
        return self.contributed.setdefault(
            _campaign(offer, task), Contribution(offer.study, task.cohort)
        )

    def take_back(self, offer: Offer, task: Task) -> None:
        """The table that was sent for this task is in no sum."""
        part = self.contributed.get(_campaign(offer, task))
        if part is not None and part.study == offer.study:
            part.tasks.discard(task.id)
            if not part.tasks:
                del self.contributed[_campaign(offer, task)]

    def to_json(self) -> str:
        return canonical(
            {
                "version": VERSION,
                "outbox": self.outbox.to_json(),
                "offered": [_text(offer) for offer in self.offered.values()],
                "agreed": [_text(offer) for offer in self.agreed.values()],
                "report_ids": self.report_ids,
                "retries": {
                    task: [retry.failures, retry.at] for task, retry in self.retries.items()
                },
                "contributed": {
                    campaign: [part.study, part.cohort, sorted(part.tasks)]
                    for campaign, part in self.contributed.items()
                },
            }
        )

    @classmethod
    def from_json(cls, text: str) -> State:
        try:
            data = json.loads(text)
            if data["version"] != VERSION:
                raise SpecError("another version")
            return cls(
                outbox=Outbox.from_json(data["outbox"]),
                offered=_by_study(data["offered"]),
                agreed=_by_study(data["agreed"]),
                report_ids=dict(data["report_ids"]),
                retries={
                    task: Retry(int(n), float(at)) for task, (n, at) in data["retries"].items()
                },
                contributed={
                    campaign: Contribution(study, cohort, set(tasks))
                    for campaign, (study, cohort, tasks) in data["contributed"].items()
                },
            )
        except (*_UNREADABLE, SpecError, OfferError):  # whatever it is: it might show a record
            raise SpecError(
                f"a device's state must be what version {VERSION} wrote; got another text",
                hint="use the release of sfumato that wrote it; a state is not to be edited",
            ) from None


@lru_cache(maxsize=64)
def _text(offer: Offer) -> str:
    return to_json(offer)


def _by_study(texts: list[str]) -> dict[str, Offer]:
    offers = [offer_from_text(text) for text in texts]
    return {offer.study: offer for offer in offers}


def _campaign(offer: Offer, task: Task) -> str:
    return task.campaign or offer.study
