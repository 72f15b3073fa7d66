"""A copy of a store that is used after the original has released: noise never repeats on other
data, and studies that may have been released are charged and ended."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collecting import KEY, Clock, open_task, upload
from sfumato.arrays import U64
from sfumato.collector import studies
from sfumato.collector.backup import backup, restore
from sfumato.collector.store.store import Store, StudyRow
from sfumato.collector.worker.worker import Worker
from sfumato.device.offers import public_key, verify
from sfumato.device.private import privatiser
from sfumato.flow.release import CountRelease
from sfumato.flow.report import Report
from sfumato.privacy import PlannedLoss, SystemRng
from sfumato.privacy.samplers import SecretRng, log_mass
from sfumato.questions.heavy_hitters import design as sketches
from sfumato.questions.item_lists import design as items
from sfumato.spec import from_json

CLOCK = Clock()
WORDS = [f"{letter}oak" for letter in "abcdefghijklmnopqrst"]
DEVICES_PER_WORD = 30  # far above the threshold, 11
LIST: dict[str, Any] = {
    "question": "heavy_hitters",
    "trust": "central",
    "epsilon": 1.0,
    "delta": 1e-4,
    "devices": 800,
    "bytes_per_device": 200_000,
    "word_length": 4,
}
SKETCHES = LIST | {"algorithm": "invertible_sketch"}
FREQUENCIES: dict[str, Any] = {
    "question": "frequencies",
    "trust": "central",
    "epsilon": 1.0,
    "devices": 800,
}


class Unbound(SecretRng):
    """The control: random words that depend on the secret alone, not on the data."""

    def bound(self, purpose: str, *data: bytes) -> SecretRng:
        return self

    def words(self, count: int) -> U64:
        self._calls += 1
        return SecretRng(self._secret).bound("", str(self._calls).encode()).words(count)


@contextmanager
def opened(path: Path) -> Iterator[Store]:
    with closing(Store.open(path)) as store:
        store.migrate()
        yield store


def create(store: Store, name: str = "Trees", items: list[str] | None = None, **keys: Any) -> str:
    request = {"name": name, "purpose": "Which to plant next.", "study": keys, "items": items}
    return studies.create(store, request, key=KEY, rng=SystemRng(), now=CLOCK).id


def row_of(store: Store, study_id: str) -> StudyRow:
    with store.reading() as tx:
        return studies.get_study(tx, study_id)


def answer(store: Store, study_id: str, words: Sequence[str]) -> None:
    """Send one report for each of these words."""
    task, rng = open_task(store, row_of(store, study_id)), SystemRng()
    offer = verify(json.loads(task.envelope), public_key(KEY))
    places = {word: place for place, word in enumerate(WORDS)}
    reports = []
    for word in words:
        privatise = privatiser(offer, word, places)
        assert privatise is not None
        reports.append(Report(task.id, rng.words(2).tobytes(), privatise(rng)).to_bytes())
    assert upload(store, task, reports)


def work(store: Store) -> None:
    for _ in range(200):
        if not Worker(store, key=KEY, now=CLOCK, log=lambda event, **fields: None).step():
            return
    raise AssertionError("the worker finds work forever")


def close_and_release(store: Store, study_id: str) -> dict[str, float]:
    """Close a study, and return its counts."""
    studies.close(store, study_id)
    work(store)
    with store.reading() as tx:
        text = tx.release(study_id)
    assert text is not None, row_of(store, study_id)
    release = CountRelease.from_dict(json.loads(text))
    return dict(zip(release.items.to_pylist(), release.counts.tolist(), strict=True))


def differences(
    folder: Path, more: Sequence[str], keys: dict[str, Any]
) -> tuple[dict[str, float], float]:
    """Release a list, restore an earlier copy, let one more device answer and release again.
    Return the differences of the counts, and the chance of any one such result if the noise of
    both is independent."""
    with opened(folder / "first.db") as store:
        study = create(store, **keys)
        answer(store, study, WORDS * DEVICES_PER_WORD)
        work(store)
        backup(folder / "first.db", folder / "copy.db")
        before = close_and_release(store, study)
        mechanism = from_json(row_of(store, study).design).mechanism
    restore(folder / "second.db", folder / "copy.db", nothing_released=True)
    with opened(folder / "second.db") as store:
        if more:
            answer(store, study, more)
        after = close_and_release(store, study)
    assert before.keys() == after.keys() == set(WORDS)
    assert mechanism.rate == 1  # every device's item is in the sum
    _, logs = log_mass(mechanism.noise, mechanism.scale)
    same = float(np.square(np.exp(logs)).sum())  # the likeliest difference of two draws is 0
    return {word: after[word] - before[word] for word in WORDS}, same ** len(WORDS)


both = pytest.mark.parametrize("keys", [LIST, SKETCHES], ids=["items", "sketches"])


@both
def test_a_copy_that_goes_on_repeats_no_noise_on_other_data(
    tmp_path: Path, keys: dict[str, Any]
) -> None:
    """False alarm below 1e-6: the chance that independent noise differs by exactly the device.
    Power: one, as the control shows."""
    changes, chance = differences(tmp_path, [WORDS[3]], keys)
    assert chance < 1e-6
    assert changes != {word: float(word == WORDS[3]) for word in WORDS}
    assert sum(change == 0 for change in changes.values()) < len(WORDS) - 1


@both
def test_noise_that_depends_on_the_secret_alone_reveals_the_device(
    tmp_path: Path, keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: the audit's attack, on noise that the secret alone repeats."""
    for module in (items, sketches):
        monkeypatch.setattr(module, "SecretRng", Unbound)
    changes, _ = differences(tmp_path, [WORDS[3]], keys)
    assert changes == {word: float(word == WORDS[3]) for word in WORDS}


@both
def test_a_copy_that_goes_on_with_the_same_data_releases_the_same(
    tmp_path: Path, keys: dict[str, Any]
) -> None:
    """So a crash between the answer and the release costs nothing."""
    changes, _ = differences(tmp_path, [], keys)
    assert set(changes.values()) == {0.0}


def test_studies_that_may_have_been_released_are_charged_and_ended(tmp_path: Path) -> None:
    with opened(tmp_path / "first.db") as store:
        list_study = create(store, "List", **LIST)
        count_study = create(store, "Counts", WORDS, **FREQUENCIES)
        local_keys = FREQUENCIES | {"trust": "local", "epsilon": 4.0}
        local = create(store, "Local", WORDS, **local_keys)
        over = create(store, "Over", WORDS, **FREQUENCIES)
        for study in (list_study, count_study, over):
            answer(store, study, WORDS * DEVICES_PER_WORD)
        close_and_release(store, over)
        with store.reading() as tx:
            before = tx.entries()
        backup(tmp_path / "first.db", tmp_path / "copy.db")
        close_and_release(store, list_study)
        close_and_release(store, count_study)
        with store.reading() as tx:
            charged = tx.entries()
    assert restore(tmp_path / "second.db", tmp_path / "copy.db") == ["List", "Counts"]
    with opened(tmp_path / "second.db") as store:
        with store.reading() as tx:
            assert tx.entries()[: len(before)] == before
            assert sorted(tx.entries()) == sorted(charged)  # as in the original
        work(store)
        states = {
            name: row_of(store, name).state for name in (list_study, count_study, local, over)
        }
        assert states == {
            list_study: "failed",
            count_study: "failed",
            local: "collecting",
            over: "released",
        }
        assert "restored from a copy" in row_of(store, list_study).problem
        with store.reading() as tx:
            assert tx.release(list_study) is None


def test_studies_go_on_if_nothing_was_released_after_the_copy(tmp_path: Path) -> None:
    with opened(tmp_path / "first.db") as store:
        study = create(store, **LIST)
        answer(store, study, WORDS * DEVICES_PER_WORD)
        backup(tmp_path / "first.db", tmp_path / "copy.db")
    assert restore(tmp_path / "second.db", tmp_path / "copy.db", nothing_released=True) == []
    with opened(tmp_path / "second.db") as store:
        assert close_and_release(store, study).keys() == set(WORDS)
        with store.reading() as tx:
            assert len(tx.entries()) == 1


def test_a_study_of_several_tasks_is_charged_whole_when_it_may_have_been_released(
    tmp_path: Path,
) -> None:
    """A histogram asks for names, then for counts: after the copy both may have been released."""
    with opened(tmp_path / "first.db") as store:
        create(
            store, "Histogram", **SKETCHES | {"question": "histogram", "bytes_per_device": 100_000}
        )
        backup(tmp_path / "first.db", tmp_path / "copy.db")
    assert restore(tmp_path / "second.db", tmp_path / "copy.db") == ["Histogram"]
    with opened(tmp_path / "second.db") as store, store.reading() as tx:
        (entry,) = tx.entries()
    charge = from_json(entry[-1])
    assert isinstance(charge, PlannedLoss)
    assert len(charge.all_losses) == 2
