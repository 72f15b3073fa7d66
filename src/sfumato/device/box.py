"""Where a device keeps its state between calls: an SQLite file, or memory for simulated devices."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

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

BOX_KEY_BYTES = 32
_NONCE_BYTES = 12
_SEAL_CONTEXT = b"sfumato box v1\0"  # so that the key opens nothing else
WAIT_SECONDS = 30.0  # how long to wait for another process that has the box open
TABLES = (
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
    """The interface of a box. Inside `transaction`, reading, changing and writing are atomic."""

    def transaction(self) -> AbstractContextManager[None]: ...

    def read(self) -> str | None:
        """Return the state that was last written."""

    def write(self, state: str) -> None: ...

    def dictionary(self, digest: str) -> bytes | None: ...

    def keep_dictionary(self, digest: str, body: bytes) -> None: ...

    def drop_dictionaries(self, except_for: set[str]) -> None:
        """Drop all dictionaries except those with these digests."""

    def round(self, study: str) -> tuple[str, bytes] | None:
        """Return the device's progress in a masked round of a study, and its last message."""

    def keep_round(self, study: str, state: str, message: bytes) -> None: ...

    def drop_round(self, study: str) -> None: ...

    def model(self, study: str) -> tuple[str, bytes] | None:
        """Return the digest and the bytes of the latest parameters of a study's model."""

    def keep_model(self, study: str, digest: str, body: bytes) -> None:
        """Keep these parameters in place of earlier ones of the study."""

    def drop_models(self, except_for: set[str]) -> None:
        """Drop the models of all studies except these and those with an unfinished round."""

    def drop_rounds(self, except_for: set[str]) -> None:
        """Drop the rounds of all studies except these."""

    def close(self) -> None: ...


class _Seal:
    """Seals parts of a box with a key, each for its place: ChaCha20-Poly1305 with a random nonce.

    Two of the nonces of a key are equal with a probability below 2**-32 after 2**32 writes, one per
    second for 136 years.
    """

    def __init__(self, key: bytes) -> None:
        if not isinstance(key, bytes) or len(key) != BOX_KEY_BYTES:
            raise SpecError(f"a box's key must be {BOX_KEY_BYTES} bytes; got something else")
        self._cipher = ChaCha20Poly1305(key)

    def close(self, place: str, data: bytes) -> bytes:
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, data, _SEAL_CONTEXT + place.encode())

    def open(self, place: str, sealed: bytes) -> bytes:
        """The data that was sealed for this place; InvalidTag if it is another, or has changed."""
        nonce, data = sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:]
        return self._cipher.decrypt(nonce, data, _SEAL_CONTEXT + place.encode())


class SqliteBox:
    """A box in a file that only its owner may read. Data is on disk when a transaction returns.

    Several processes may share one; their transactions wait for each other. Deleted bytes are
    overwritten.

    With a `key` of 32 bytes, such as one from the platform's keystore, the state and unfinished
    rounds are sealed: nobody can read or change them without it. `seal` seals a box that was
    written without a key. Not sealed are what everybody can download (dictionaries, models) and the
    names of studies with an unfinished round; and an older copy of the file is a valid box, as
    before.
    """

    def __init__(self, path: Path | str, key: bytes | None = None) -> None:
        self._path = str(path)
        self._seal = None if key is None else _Seal(key)
        with self._as_store_errors():
            with suppress(FileExistsError):  # opening and closing it would release its locks
                os.close(os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
            self._connection = sqlite3.connect(
                self._path, isolation_level=None, timeout=WAIT_SECONDS
            )
        try:
            for statement in ("PRAGMA synchronous = FULL", "PRAGMA secure_delete = ON", *TABLES):
                self._run(statement)
            self.read()  # raises if the key is another
        except StoreError:
            self._connection.close()
            raise

    @classmethod
    def seal(cls, path: Path | str, key: bytes) -> None:
        """Seal a box that was written without a key: once, when an app starts to use one."""
        seal, box = _Seal(key), cls(path)
        try:
            with box.transaction():
                state = box.read()
                studies = box._run("SELECT study FROM round")
                rounds = {study: box.round(study) for (study,) in studies}
                box._seal = seal
                if state is not None:
                    box.write(state)
                for study, progress in rounds.items():
                    assert progress is not None  # just listed, in this transaction
                    box.keep_round(study, *progress)
        finally:
            box.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        self._run("BEGIN IMMEDIATE")
        try:
            yield
            self._run("COMMIT")
        except BaseException:
            if self._connection.in_transaction:  # a full disk may have ended it
                self._connection.execute("ROLLBACK")
            raise

    def read(self) -> str | None:
        rows = self._run("SELECT text FROM state")
        return self._opened("state", rows[0][0]).decode() if rows else None

    def write(self, state: str) -> None:
        self._run("REPLACE INTO state VALUES (1, ?)", self._sealed("state", state))

    def dictionary(self, digest: str) -> bytes | None:
        rows = self._run("SELECT body FROM dictionary WHERE digest = ?", digest)
        return bytes(rows[0][0]) if rows else None

    def keep_dictionary(self, digest: str, body: bytes) -> None:
        self._run("REPLACE INTO dictionary VALUES (?, ?)", digest, body)

    def drop_dictionaries(self, except_for: set[str]) -> None:
        for (digest,) in self._run("SELECT digest FROM dictionary"):
            if digest not in except_for:
                self._run("DELETE FROM dictionary WHERE digest = ?", digest)

    def round(self, study: str) -> tuple[str, bytes] | None:
        rows = self._run("SELECT state, message FROM round WHERE study = ?", study)
        if not rows:
            return None
        state, message = rows[0]
        text = self._opened(f"round of {study}", state).decode()
        if self._seal is not None:
            message = self._opened(f"message of {study}", message)
        return text, bytes(message)

    def keep_round(self, study: str, state: str, message: bytes) -> None:
        self._run(
            "REPLACE INTO round VALUES (?, ?, ?)",
            study,
            self._sealed(f"round of {study}", state),
            self._sealed(f"message of {study}", message),
        )

    def drop_round(self, study: str) -> None:
        self._run("DELETE FROM round WHERE study = ?", study)

    def model(self, study: str) -> tuple[str, bytes] | None:
        rows = self._run("SELECT digest, body FROM model WHERE study = ?", study)
        return (str(rows[0][0]), bytes(rows[0][1])) if rows else None

    def keep_model(self, study: str, digest: str, body: bytes) -> None:
        self._run("REPLACE INTO model VALUES (?, ?, ?)", study, digest, body)

    def drop_models(self, except_for: set[str]) -> None:
        for (study,) in self._run(
            "SELECT study FROM model WHERE study NOT IN (SELECT study FROM round)"
        ):
            if study not in except_for:
                self._run("DELETE FROM model WHERE study = ?", study)

    def drop_rounds(self, except_for: set[str]) -> None:
        for (study,) in self._run("SELECT study FROM round"):
            if study not in except_for:
                self.drop_round(study)

    def close(self) -> None:
        self._connection.close()

    def _run(self, sql: str, *parameters: object) -> list[Any]:
        with self._as_store_errors():
            return self._connection.execute(sql, parameters).fetchall()

    def _sealed(self, place: str, value: str | bytes) -> str | bytes:
        """The value as the file has it."""
        if self._seal is None:
            return value
        return self._seal.close(place, value.encode() if isinstance(value, str) else value)

    def _opened(self, place: str, value: str | bytes) -> bytes:
        """The value in the file: text, or bytes if it is sealed."""
        if self._seal is None and isinstance(value, str):
            return value.encode()
        try:
            if self._seal is not None and isinstance(value, bytes):
                return self._seal.open(place, value)
        except (InvalidTag, ValueError):  # ValueError: it is too short
            pass
        raise StoreError(
            f"the device's box at {self._path} must be "
            + ("opened with its key" if self._seal is None else "sealed with this key")
            + f"; it is {'sealed' if isinstance(value, bytes) else 'not sealed'}",
            hint="if it was always open, SqliteBox.seal seals it; if it was sealed, somebody may "
            "have changed it",
        )

    @contextmanager
    def _as_store_errors(self) -> Iterator[None]:
        """Raise errors of SQLite and the system as ours, without the data being written."""
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
                hint="free some space, or see which process uses the file; nothing was changed",
            ) from None


class MemoryBox:
    """A box in memory, for simulated devices; they may share dictionaries and models."""

    def __init__(
        self,
        dictionaries: dict[str, bytes] | None = None,
        models: dict[str, tuple[str, bytes]] | None = None,
    ) -> None:
        self._state: str | None = None
        self._models = {} if models is None else models
        self._shares_models = models is not None
        self._dictionaries = {} if dictionaries is None else dictionaries
        self._shares_dictionaries = dictionaries is not None
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

    def drop_dictionaries(self, except_for: set[str]) -> None:
        if not self._shares_dictionaries:
            for digest in self._dictionaries.keys() - except_for:
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

    def drop_models(self, except_for: set[str]) -> None:
        if not self._shares_models:
            for study in self._models.keys() - except_for - self._rounds.keys():
                del self._models[study]

    def drop_rounds(self, except_for: set[str]) -> None:
        for study in self._rounds.keys() - except_for:
            del self._rounds[study]

    def close(self) -> None:
        pass


VERSION = 1
_UNREADABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class Retry:
    """When to try a task's upload again, and how often it has failed."""

    failures: int
    at: float


@dataclass(slots=True)
class Contribution:
    """This device's part in a campaign: its cohort, and the tasks whose sums include its table."""

    study: str
    cohort: str
    tasks: set[str] = field(default_factory=set)  # masked rounds only; the outbox counts the others


@dataclass(slots=True, repr=False)
class State:
    """A device's state. `Device` changes it in place and writes it to its box before acting."""

    outbox: Outbox = field(default_factory=Outbox)
    offers: dict[str, Offer] = field(default_factory=dict)  # by study, as of the last fetch
    agreements: dict[str, Offer] = field(default_factory=dict)  # by study: the terms agreed to
    report_ids: dict[str, str] = field(default_factory=dict)  # by record that is on the way
    retries: dict[str, Retry] = field(default_factory=dict)  # by task
    contributions: dict[str, Contribution] = field(default_factory=dict)  # by campaign
    passcodes: dict[str, str] = field(default_factory=dict)  # by study
    tasks: dict[str, str] = field(default_factory=dict)  # by id, in JSON: those of records

    def may_contribute(self, offer: Offer, task: Task) -> bool:
        """Whether a table for this task keeps the device within the study's contribution bound.

        The bound is one cohort per campaign, one table per task, and no more tasks than the offer
        says. A campaign belongs to one study; another study that names it gets no answer.
        """
        earlier = self.contributions.get(_campaign(offer, task))
        if earlier is not None and (
            earlier.study != offer.study
            or earlier.cohort != task.cohort
            or task.id in earlier.tasks
        ):
            return False
        of_study = [each for each in self.contributions.values() if each.study == offer.study]
        return sum(len(each.tasks) for each in of_study) < offer.contributions

    def contribute(self, offer: Offer, task: Task) -> Contribution:
        """Note that this device is in the task's cohort."""
        return self.contributions.setdefault(
            _campaign(offer, task), Contribution(offer.study, task.cohort)
        )

    def take_back(self, offer: Offer, task: Task) -> None:
        """Note that the table sent for this task is not in any sum."""
        contribution = self.contributions.get(_campaign(offer, task))
        if contribution is not None and contribution.study == offer.study:
            contribution.tasks.discard(task.id)
            if not contribution.tasks:
                del self.contributions[_campaign(offer, task)]

    def to_json(self) -> str:
        present = self.outbox.task_ids()
        tasks = {task_id: text for task_id, text in self.tasks.items() if task_id in present}
        # States of older versions do not have them:
        later = {"passcodes": self.passcodes, "tasks": tasks}
        return canonical(
            {
                "version": VERSION,
                "outbox": self.outbox.to_json(),
                "offered": [_text(offer) for offer in self.offers.values()],
                "agreed": [_text(offer) for offer in self.agreements.values()],
                "report_ids": self.report_ids,
                "retries": {
                    task: [retry.failures, retry.at] for task, retry in self.retries.items()
                },
                "contributed": {
                    campaign: [each.study, each.cohort, sorted(each.tasks)]
                    for campaign, each in self.contributions.items()
                },
                **{name: values for name, values in later.items() if values},
            }
        )

    @classmethod
    def from_json(cls, text: str) -> State:
        try:
            data = json.loads(text)
            if data["version"] != VERSION:
                raise ValueError
            return cls(
                outbox=Outbox.from_json(data["outbox"]),
                offers=_by_study(data["offered"]),
                agreements=_by_study(data["agreed"]),
                report_ids=dict(data["report_ids"]),
                retries={
                    task: Retry(int(n), float(at)) for task, (n, at) in data["retries"].items()
                },
                contributions={
                    campaign: Contribution(study, cohort, set(tasks))
                    for campaign, (study, cohort, tasks) in data["contributed"].items()
                },
                passcodes=dict(data.get("passcodes", {})),
                tasks=dict(data.get("tasks", {})),
            )
        except (*_UNREADABLE, SpecError, OfferError):  # the cause is hidden: it might show a record
            raise SpecError(
                f"a device's state must be as version {VERSION} wrote it; got other text",
                hint="use the release of sfumato that wrote it; do not edit the state",
            ) from None


@lru_cache(maxsize=64)
def _text(offer: Offer) -> str:
    return to_json(offer)


def _by_study(texts: list[str]) -> dict[str, Offer]:
    offers = [offer_from_text(text) for text in texts]
    return {offer.study: offer for offer in offers}


def _campaign(offer: Offer, task: Task) -> str:
    return task.campaign or offer.study
