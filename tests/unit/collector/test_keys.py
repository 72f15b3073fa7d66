"""The signing key is made once, kept from others, and replaced only on request."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from collecting import KEY, Stage, open_task
from serving import opened
from sfumato.collector.keys import load_or_make, rotate
from sfumato.collector.store.store import Store
from sfumato.device.offers import public_key, verify
from sfumato.errors import OfferError, SpecError


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store.open(tmp_path / "collector.db")
    store.migrate()
    yield store
    store.close()


def test_a_key_is_made_once_for_its_owner_alone(store: Store, tmp_path: Path) -> None:
    file = tmp_path / "key"
    before = os.umask(0)
    try:
        key = load_or_make(file, store)
    finally:
        os.umask(before)
    assert file.stat().st_mode & 0o777 == 0o600
    assert len(key) == 32
    assert load_or_make(file, store) == key
    assert sorted(path.name for path in tmp_path.iterdir() if "key" in path.name) == ["key"]


def test_keys_differ(store: Store, tmp_path: Path) -> None:
    assert load_or_make(tmp_path / "a", store) != load_or_make(tmp_path / "b", store)


def test_a_key_that_others_can_read_is_refused(store: Store, tmp_path: Path) -> None:
    file = tmp_path / "key"
    load_or_make(file, store)
    file.chmod(0o640)
    with pytest.raises(SpecError, match="read by others"):
        load_or_make(file, store)


@pytest.mark.parametrize("text", ["", "canary", "5f" * 31, "5f" * 33, "é"])
def test_a_file_that_is_no_key_is_refused_and_not_shown(
    store: Store, tmp_path: Path, text: str
) -> None:
    file = tmp_path / "key"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(SpecError, match="not a signing key") as caught:
        load_or_make(file, store)
    assert "canary" not in str(caught.value)


def test_a_lost_key_is_not_replaced_while_devices_know_it(store: Store, tmp_path: Path) -> None:
    file = tmp_path / "key"
    opened(store, key=load_or_make(file, store))
    load_or_make(file, store)
    file.unlink()
    with pytest.raises(SpecError, match="no signing key"):
        load_or_make(file, store)
    assert not file.exists()


def test_another_key_than_that_of_the_offers_is_refused(store: Store, tmp_path: Path) -> None:
    opened(store, key=load_or_make(tmp_path / "key", store))
    other = Store.open(tmp_path / "other.db")
    other.migrate()
    load_or_make(tmp_path / "other", other)
    other.close()
    with pytest.raises(SpecError, match="not the one"):
        load_or_make(tmp_path / "other", store)


def test_a_key_that_cannot_be_made_says_why(store: Store, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="No such file"):
        load_or_make(tmp_path / "nowhere" / "key", store)


def test_a_key_that_could_not_be_stored_leaves_no_file(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    folder = tmp_path / "keys"
    folder.mkdir()
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(SpecError, match="No space left"):
        load_or_make(folder / "sfumato.key", store)
    assert not list(folder.iterdir())


def test_a_key_is_replaced_and_open_offers_are_signed_with_the_new_one(tmp_path: Path) -> None:
    file, stage = tmp_path / "key", Stage(tmp_path / "stage.db")
    file.write_text(KEY.hex())
    file.chmod(0o600)
    study = stage.create(devices=4)
    before = json.loads(open_task(stage.store, study).envelope)
    key = rotate(file, stage.store)
    assert load_or_make(file, stage.store) == key != KEY
    assert bytes.fromhex((tmp_path / "key.old").read_text()) == KEY
    assert file.stat().st_mode & 0o777 == 0o600
    envelope = json.loads(open_task(stage.store, study).envelope)
    assert envelope["offer"] == before["offer"]
    assert verify(envelope, public_key(key)) == verify(before, public_key(KEY))
    with pytest.raises(OfferError, match="signature"):
        verify(envelope, public_key(KEY))
    stage.store.close()


def test_a_rotation_that_was_killed_before_the_files_were_renamed_is_finished(
    store: Store, tmp_path: Path
) -> None:
    file, coming = tmp_path / "key", tmp_path / "key.next"
    old = load_or_make(file, store)
    coming.write_text("5f" * 32)
    coming.chmod(0o600)
    assert rotate(file, store) == bytes.fromhex("5f" * 32) != old
    assert not coming.exists()


def test_the_key_of_a_running_collector_is_not_replaced(store: Store, tmp_path: Path) -> None:
    file = tmp_path / "key"
    key = load_or_make(file, store)
    with store.worker_lock() as alone:
        assert alone
        with (
            closing(Store.open(tmp_path / "collector.db")) as other,
            pytest.raises(SpecError, match="stop it first"),
        ):
            rotate(file, other)
    assert load_or_make(file, store) == key
