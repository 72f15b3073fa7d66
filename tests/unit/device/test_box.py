"""The promises of a box: atomic transactions on disk, readable by its owner only."""

from __future__ import annotations

import sqlite3
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sfumato.device import Box, MemoryBox, SqliteBox
from sfumato.device.box import State
from sfumato.errors import SpecError, StoreError, StoreFull, StoreReadOnly

KEY = bytes(range(32))


@pytest.fixture(params=["file", "sealed file", "memory"])
def box(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Box]:
    key = KEY if request.param == "sealed file" else None
    box: Box = MemoryBox() if request.param == "memory" else SqliteBox(tmp_path / "box.db", key)
    yield box
    box.close()


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[sqlite3.Connection]:
    """The connections that boxes open."""
    opened: list[sqlite3.Connection] = []
    connect = sqlite3.connect

    def recording(*arguments: Any, **options: Any) -> sqlite3.Connection:
        opened.append(connect(*arguments, **options))
        return opened[-1]

    monkeypatch.setattr(sqlite3, "connect", recording)
    return opened


def test_a_new_box_is_empty(box: Box) -> None:
    assert box.read() is None
    assert box.dictionary("ab" * 32) is None


def test_what_was_written_is_read(box: Box) -> None:
    for text in ("one", "two"):
        with box.transaction():
            box.write(text)
        assert box.read() == text


def test_a_transaction_that_fails_leaves_no_trace(box: Box) -> None:
    with box.transaction():
        box.write("one")

    def interrupted() -> None:
        with box.transaction():
            box.write("two")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert box.read() == "one"


def test_dictionaries_are_dropped_except_for_some(box: Box) -> None:
    with box.transaction():
        for name in ("one", "two"):
            box.keep_dictionary(name, name.encode())
        box.drop_dictionaries({"two"})
    assert (box.dictionary("one"), box.dictionary("two")) == (None, b"two")


def test_shared_dictionaries_are_not_dropped_by_one_of_many() -> None:
    shared: dict[str, bytes] = {}
    one, two = MemoryBox(shared), MemoryBox(shared)
    one.keep_dictionary("one", b"one")
    two.drop_dictionaries(set())
    assert one.dictionary("one") == b"one"


def test_a_state_has_passcodes_only_if_there_are_any() -> None:
    """So a state of an older version is read, and stays as it is."""
    assert "passcode" not in State().to_json()
    assert State.from_json(State().to_json()).passcodes == {}
    state = State(passcodes={"Trees": "sfp_" + "a" * 43})
    assert State.from_json(state.to_json()).passcodes == state.passcodes
    assert "sfp_" not in repr(state)


def test_only_its_owner_can_read_a_box(tmp_path: Path) -> None:
    box = SqliteBox(tmp_path / "box.db")
    with box.transaction():
        box.write("state")
        during = [path.stat().st_mode for path in tmp_path.iterdir()]
    box.close()
    assert {stat.S_IMODE(mode) for mode in during} == {0o600}


def test_what_was_deleted_is_not_on_disk(tmp_path: Path) -> None:
    box = SqliteBox(tmp_path / "box.db")
    with box.transaction():
        box.write("a privatised record" * 500)
    with box.transaction():
        box.write("nothing")
    box.close()
    assert b"privatised" not in (tmp_path / "box.db").read_bytes()


def test_a_full_disk_keeps_the_last_state(
    tmp_path: Path, connections: list[sqlite3.Connection]
) -> None:
    box = SqliteBox(tmp_path / "box.db")
    with box.transaction():
        box.write("one")
    connections[0].execute("PRAGMA max_page_count = 6")
    with pytest.raises(StoreFull) as caught, box.transaction():
        box.write("canary" * 10_000)
    assert "canary" not in str(caught.value)
    assert box.read() == "one"
    with box.transaction():
        box.write("two")
    box.close()
    again = SqliteBox(tmp_path / "box.db")
    assert again.read() == "two"
    again.close()


def test_a_box_that_cannot_be_written_says_so(
    tmp_path: Path, connections: list[sqlite3.Connection]
) -> None:
    box = SqliteBox(tmp_path / "box.db")
    connections[0].execute("PRAGMA query_only = ON")
    with pytest.raises(StoreReadOnly), box.transaction():
        box.write("one")
    box.close()


def no_folder(path: Path) -> Path:
    return path / "none" / "box.db"


def no_database(path: Path) -> Path:
    (path / "box.db").write_bytes(b"not a database, by any measure" * 100)
    return path / "box.db"


@pytest.mark.parametrize("spoil", [no_folder, no_database])
def test_a_file_that_is_not_a_box_is_refused(tmp_path: Path, spoil: Callable[[Path], Path]) -> None:
    with pytest.raises(StoreError, match="device's box"):
        SqliteBox(spoil(tmp_path))


def test_transactions_of_two_connections_take_turns(tmp_path: Path) -> None:
    """The second begins when the first has ended; without waiting, it would begin at once."""
    path = tmp_path / "box.db"
    first, began = SqliteBox(path), threading.Event()

    def later() -> None:
        second = SqliteBox(path)
        with second.transaction():
            began.set()
            second.write(f"{second.read()} two")
        second.close()

    thread = threading.Thread(target=later)
    with first.transaction():
        thread.start()
        assert not began.wait(0.2)
        first.write("one")
    thread.join()
    assert first.read() == "one two"
    first.close()


def written(path: Path, key: bytes | None) -> None:
    box = SqliteBox(path, key)
    with box.transaction():
        box.write("a privatised record")
        box.keep_round("Trees", "a secret of a round", b"a message of a round")
    box.close()


def contents(path: Path, key: bytes | None) -> list[Any]:
    box = SqliteBox(path, key)
    try:
        return [box.read(), box.round("Trees")]
    finally:
        box.close()


WRITTEN = ["a privatised record", ("a secret of a round", b"a message of a round")]


@pytest.mark.parametrize("is_later", [False, True], ids=["from the start", "later"])
def test_nothing_in_a_sealed_file_can_be_read_without_its_key(
    tmp_path: Path, is_later: bool
) -> None:
    path = tmp_path / "box.db"
    written(path, None if is_later else KEY)
    if is_later:
        SqliteBox.seal(path, KEY)
    assert contents(path, KEY) == WRITTEN
    data = path.read_bytes()
    assert not [word for word in (b"privatised", b"secret", b"message of") if word in data]
    for key in (None, bytes(32)):
        with pytest.raises(StoreError, match="it is sealed"):
            contents(path, key)
    with pytest.raises(StoreError, match="it is sealed"):
        SqliteBox.seal(path, bytes(32))
    assert contents(path, KEY) == WRITTEN


def test_an_open_file_can_be_read_without_a_key_and_not_with_one(tmp_path: Path) -> None:
    """The control; and nobody can put an open state in place of a sealed one."""
    written(tmp_path / "box.db", None)
    assert contents(tmp_path / "box.db", None) == WRITTEN
    assert b"privatised" in (tmp_path / "box.db").read_bytes()
    with pytest.raises(StoreError, match="it is not sealed"):
        contents(tmp_path / "box.db", KEY)


def flipped(sealed: bytes) -> bytes:
    return sealed[:20] + bytes([sealed[20] ^ 1]) + sealed[21:]


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE state SET text = flipped(text)",
        "UPDATE round SET state = flipped(state)",
        "UPDATE round SET message = flipped(message)",
        "UPDATE state SET text = x'00'",
        "UPDATE round SET study = 'Elms'",
        "UPDATE round SET state = message",
        "UPDATE round SET message = state",
        "UPDATE state SET text = (SELECT state FROM round)",
        "UPDATE state SET text = 'an open state'",
        "UPDATE round SET state = 'an open state'",
    ],
)
def test_a_sealed_file_that_somebody_changed_is_refused(tmp_path: Path, change: str) -> None:
    path = tmp_path / "box.db"
    written(path, KEY)
    connection = sqlite3.connect(path)
    connection.create_function("flipped", 1, flipped)
    connection.execute(change)
    connection.commit()
    connection.close()

    def read() -> None:
        box = SqliteBox(path, KEY)
        try:
            box.round("Elms" if "Elms" in change else "Trees")
        finally:
            box.close()

    with pytest.raises(StoreError, match="must be sealed with this key"):
        read()


def test_two_writes_of_one_state_differ(tmp_path: Path) -> None:
    path, files = tmp_path / "box.db", set()
    box = SqliteBox(path, KEY)
    for _ in range(3):
        with box.transaction():
            box.write("the same")
        files.add(path.read_bytes())
    box.close()
    assert len(files) == 3


@pytest.mark.parametrize("key", [b"", bytes(16), bytes(33), "0" * 32])
def test_a_key_of_a_box_has_32_bytes(tmp_path: Path, key: Any) -> None:
    with pytest.raises(SpecError, match="32 bytes"):
        SqliteBox(tmp_path / "box.db", key)
    assert not list(tmp_path.iterdir())
