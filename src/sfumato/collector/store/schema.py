"""The tables of a store, as steps from one version to the next.

Each step is one transaction, so a store always has a version; a released step is never changed.
Placeholders in braces stand for what databases spell differently (`Database.types`).

No column says which device sent an upload, from where or when.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from sfumato.collector.store.driver import Database, DatabaseConnection
from sfumato.errors import StoreError


@dataclass(frozen=True, slots=True)
class AppendOnly:
    """Make the database refuse to change, delete or replace a row of `table`."""

    table: str
    key: str = "number"


Step = tuple[str | AppendOnly, ...]

# A task has two names: its public id, and `task`, a small number used in the tables. `upload` and
# `seen` have no foreign key to it, because checking one costs as much as inserting the row.
STEPS: tuple[Step, ...] = (
    (
        "CREATE TABLE study (number {number}, id TEXT NOT NULL UNIQUE, name TEXT NOT NULL UNIQUE,"
        " purpose TEXT NOT NULL, state TEXT NOT NULL, study TEXT NOT NULL, design TEXT NOT NULL,"
        " plan TEXT NOT NULL, settings TEXT NOT NULL, problem TEXT NOT NULL,"
        " since {integer} NOT NULL) {table}",
        "CREATE TABLE task (task {number}, id TEXT NOT NULL UNIQUE,"
        " study_id TEXT NOT NULL REFERENCES study (id), number {integer} NOT NULL,"
        " spec TEXT NOT NULL, envelope TEXT NOT NULL, state TEXT NOT NULL, wanted {integer},"
        " UNIQUE (study_id, number)) {table}",
        "CREATE INDEX task_by_state ON task (state)",
        "CREATE TABLE dictionary (digest TEXT PRIMARY KEY, body {bytes} NOT NULL) {table}",
        "CREATE TABLE upload (number {number}, task {integer} NOT NULL,"
        " count {integer} NOT NULL CHECK (count > 0), body {bytes} NOT NULL) {table}",
        "CREATE INDEX upload_by_task ON upload (task, number, count)",
        "CREATE TABLE seen (task {integer} NOT NULL, id {bytes} NOT NULL,"
        " PRIMARY KEY (task, id)) {index_table}",
        "CREATE TABLE sealed (number {number}, task {integer} NOT NULL REFERENCES task (task),"
        " count {integer} NOT NULL CHECK (count >= 0), data {bytes} NOT NULL) {table}",
        "CREATE INDEX sealed_by_task ON sealed (task, number, count)",
        "CREATE TABLE counter (task {integer} NOT NULL REFERENCES task (task),"
        " name TEXT NOT NULL, count {integer} NOT NULL, PRIMARY KEY (task, name)) {index_table}",
        "CREATE TABLE answer (task {integer} PRIMARY KEY REFERENCES task (task),"
        " count {integer} NOT NULL, data {bytes} NOT NULL) {table}",
        "CREATE TABLE budget (number {integer} PRIMARY KEY CHECK (number = 1),"
        " spec TEXT NOT NULL) {table}",
        "CREATE TABLE entry (number {number}, campaign TEXT NOT NULL, cohort TEXT NOT NULL,"
        " task TEXT NOT NULL, loss TEXT NOT NULL) {table}",
        "CREATE TABLE release (study_id TEXT PRIMARY KEY REFERENCES study (id),"
        " data TEXT NOT NULL) {table}",
        AppendOnly("budget"),
        AppendOnly("entry"),
        AppendOnly("release", key="study_id"),
        "CREATE TABLE token (number {number}, id TEXT NOT NULL UNIQUE, name TEXT NOT NULL,"
        " role TEXT NOT NULL, expires {integer} NOT NULL, digest {bytes} NOT NULL UNIQUE) {table}",
    ),
    (
        "CREATE TABLE session (digest {bytes} PRIMARY KEY,"
        " token_id TEXT NOT NULL REFERENCES token (id) ON DELETE CASCADE,"
        " expires {integer} NOT NULL) {index_table}",
    ),
    (  # masked rounds: their members and waiting devices, and the messages both ways
        "CREATE TABLE round (round {number}, id TEXT NOT NULL UNIQUE,"
        " task {integer} NOT NULL REFERENCES task (task), spec TEXT NOT NULL,"
        " invitation TEXT NOT NULL, phase TEXT NOT NULL, is_open {integer} NOT NULL,"
        " deadline {integer} NOT NULL, turn {integer} NOT NULL, charged {integer} NOT NULL,"
        " checkpoint {bytes}, problem TEXT NOT NULL) {table}",
        "CREATE INDEX round_by_task ON round (task)",
        "CREATE TABLE joined (number {number}, task {integer} NOT NULL REFERENCES task (task),"
        " campaign TEXT NOT NULL, identity {bytes} NOT NULL, ticket {bytes} NOT NULL UNIQUE,"
        " round {integer} REFERENCES round (round), member {integer},"
        " UNIQUE (campaign, identity), UNIQUE (round, member)) {table}",
        "CREATE INDEX joined_by_task ON joined (task, round, number)",
        "CREATE TABLE round_message (round {integer} NOT NULL, phase TEXT NOT NULL,"
        " member {integer} NOT NULL, outcome TEXT NOT NULL, digest {bytes} NOT NULL,"
        " body {bytes} NOT NULL, PRIMARY KEY (round, phase, member)) {table}",
        "CREATE TABLE round_told (round {integer} NOT NULL, phase TEXT NOT NULL,"
        " member {integer} NOT NULL, body {bytes} NOT NULL,"
        " PRIMARY KEY (round, phase, member)) {table}",
        "CREATE TABLE secret (study_id TEXT PRIMARY KEY REFERENCES study (id),"
        " seed {bytes} NOT NULL) {table}",
    ),
    ("ALTER TABLE task ADD COLUMN room {integer}",),  # NULL, no limit, for older tasks
    (  # models: the parameters that a task's devices start from, and the released ones
        "CREATE TABLE model (task {integer} PRIMARY KEY REFERENCES task (task),"
        " digest TEXT NOT NULL, body {bytes} NOT NULL) {table}",
        "CREATE INDEX model_by_digest ON model (digest)",
        "CREATE TABLE released_model (study_id TEXT PRIMARY KEY REFERENCES study (id),"
        " body {bytes} NOT NULL) {table}",
        AppendOnly("released_model", key="study_id"),
    ),
    ("DROP TABLE round_told",),  # its contents follow from `round_message`
    ("ALTER TABLE task ADD COLUMN open_until {integer}",),  # NULL: until it is full
    (
        "CREATE TABLE passcode (study_id TEXT PRIMARY KEY REFERENCES study (id),"
        " digest {bytes} NOT NULL) {table}",
    ),
    (  # studies that the worker tries again; digests (`digests`), NULL in rows of earlier versions
        "CREATE TABLE fault (study_id TEXT PRIMARY KEY REFERENCES study (id),"
        " problem TEXT NOT NULL, tries {integer} NOT NULL, next_try {integer} NOT NULL) {table}",
        "ALTER TABLE sealed ADD COLUMN digest {bytes}",
        "ALTER TABLE answer ADD COLUMN digest {bytes}",
        "ALTER TABLE release ADD COLUMN digest {bytes}",
        "ALTER TABLE released_model ADD COLUMN digest {bytes}",
        "ALTER TABLE round ADD COLUMN digest {bytes}",  # of its checkpoint
    ),
    ("ALTER TABLE token ADD COLUMN studies TEXT",),  # NULL, all of them, for older tokens
    (  # files in the lake: the one that gets these records, and how many once it has them
        "ALTER TABLE sealed ADD COLUMN file TEXT",
        "ALTER TABLE sealed ADD COLUMN records {integer}",
    ),
)
VERSION = len(STEPS)


def version(connection: DatabaseConnection) -> int:
    """The version of the store; 0 before its first migration."""
    if "migration" not in connection.tables():
        return 0
    return int(connection.execute("SELECT MAX(version) FROM migration")[0][0])


def migrate(database: Database, steps: Sequence[Step] = STEPS) -> None:
    """Bring the store to the version of `steps`, keeping its contents."""
    connection = database.connect()
    try:
        while _step(database, connection, steps):
            pass
    finally:
        connection.close()


def create(database: Database, connection: DatabaseConnection, version: int) -> None:
    """Create the tables of a version in an empty database, within the caller's transaction."""
    if version > VERSION:
        raise _newer(database, version, VERSION)
    for present in range(version):
        _apply(database, connection, STEPS, present)


def check_version(database: Database, connection: DatabaseConnection) -> None:
    """Raise if the store is not at the version that this code is written for."""
    present = version(connection)
    if present > VERSION:
        raise _newer(database, present, VERSION)
    if present < VERSION:
        raise StoreError(
            f"{database.name} has version {present}; this sfumato needs version {VERSION}",
            hint="start `sfumato serve` on it, or call `Store.migrate`",
        )


def _step(database: Database, connection: DatabaseConnection, steps: Sequence[Step]) -> bool:
    """Go up by one version; return whether there was one to go up to."""
    connection.begin(writing=True)
    try:
        connection.lock_schema()
        present = version(connection)
        if present > len(steps):
            raise _newer(database, present, len(steps))
        _apply(database, connection, steps, present)
        connection.commit()
    except BaseException:
        connection.rollback()
        raise
    return present < len(steps)


def _apply(
    database: Database, connection: DatabaseConnection, steps: Sequence[Step], present: int
) -> None:
    """Execute the step after version `present`, if there is one."""
    for part in chain(*steps[present : present + 1]):
        if isinstance(part, AppendOnly):
            statements = database.append_only(part.table, part.key)
        else:
            statements = [part.format_map(database.types)]
        for statement in statements:
            connection.execute(statement)
    if present == 0:
        connection.execute("CREATE TABLE migration (version INTEGER PRIMARY KEY)")
    if present < len(steps):
        connection.execute("INSERT INTO migration VALUES (?)", (present + 1,))


def _newer(database: Database, present: int, latest: int) -> StoreError:
    return StoreError(
        f"{database.name} has version {present}; this sfumato knows versions up to {latest}",
        hint="use the release of sfumato that wrote it, or a later one",
    )
