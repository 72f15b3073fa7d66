"""A copy of a store that goes on after the store has released: noise never repeats on other data,
and what may have been released is charged and ended."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collecting import KEY, Clock, open_task, upload
from sfumato.collector import studies
from sfumato.collector.backup import backup, restore
from sfumato.collector.store.store import Store, StudyRow
from sfumato.collector.worker.worker import Worker
from sfumato.device.offers import public_key, verify
from sfumato.device.private import privatiser
from sfumato.flow.release import CountRelease
from sfumato.flow.report import Report
from sfumato.privacy import PlannedLoss, SystemRng
from sfumato.privacy.samplers import U64, SecretRng, log_mass
from sfumato.questions.heavy_hitters import design as lists
from sfumato.spec import from_json

CLOCK = Clock()
WORDS = [f"{letter}oak" for letter in "abcdefghijklmnopqrst"]
HOLDERS = 30  # of each word: far above the threshold, 11
LIST: dict[str, Any] = {
    "question": "heavy_hitters",
    "trust": "central",
    "epsilon": 1.0,
    "delta": 1e-4,
    "devices": 800,
    "bytes_per_device": 200_000,
    "word_length": 4,
}
FREQUENCIES: dict[str, Any] = {
    "question": "frequencies",
    "trust": "central",
    "epsilon": 1.0,
    "devices": 800,
}


class Unbound(SecretRng):
    """The control: words that a secret repeats whatever they are added to, as before."""

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
    asked = {"name": name, "purpose": "Which to plant next.", "study": keys, "items": items}
    return studies.create(store, asked, key=KEY, rng=SystemRng(), now=CLOCK).id


def row_of(store: Store, study_id: str) -> StudyRow:
    with store.reading() as tx:
        return studies.found(tx, study_id)


def answer(store: Store, study_id: str, words: Sequence[str]) -> None:
    """Devices with a word each send a report."""
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
    raise AssertionError("the worker finds work for ever")


def released(store: Store, study_id: str) -> dict[str, float]:
    """The counts of a study that is closed now."""
    studies.close(store, study_id)
    work(store)
    with store.reading() as tx:
        text = tx.release(study_id)
    assert text is not None, row_of(store, study_id)
    release = CountRelease.from_dict(json.loads(text))
    return dict(zip(release.items.to_pylist(), release.counts.tolist(), strict=True))


def differences(folder: Path, more: Sequence[str]) -> tuple[dict[str, float], float]:
    """Release a list, restore a copy from before, let one more device answer and release again.
    What the second counts beyond the first, and the chance of any one such result if the
    noise of both is independent."""
    with opened(folder / "first.db") as store:
        study = create(store, **LIST)
        answer(store, study, WORDS * HOLDERS)
        work(store)
        backup(folder / "first.db", folder / "copy.db")
        before = released(store, study)
        mechanism = from_json(row_of(store, study).design).mechanism
    restore(folder / "second.db", folder / "copy.db", nothing_released=True)
    with opened(folder / "second.db") as store:
        if more:
            answer(store, study, more)
        after = released(store, study)
    assert before.keys() == after.keys() == set(WORDS)
    assert mechanism.rate == 1  # every device's item is in the sum
    _, logs = log_mass(mechanism.noise, mechanism.scale)
    same = float(np.square(np.exp(logs)).sum())  # the likeliest difference of two draws is none
    return {word: after[word] - before[word] for word in WORDS}, same ** len(WORDS)


def test_a_copy_that_goes_on_repeats_no_noise_on_other_data(tmp_path: Path) -> None:
    """False alarm below 1e-6: of independent noise, the chance that the difference is the device.
    Power: one, as the control shows."""
    found, chance = differences(tmp_path, [WORDS[3]])
    assert chance < 1e-6
    assert found != {word: float(word == WORDS[3]) for word in WORDS}
    assert sum(change == 0 for change in found.values()) < len(WORDS) - 1


def test_noise_that_is_bound_to_nothing_gives_the_device_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: the audit's attack, on words that the secret alone repeats."""
    monkeypatch.setattr(lists, "SecretRng", Unbound)
    found, _ = differences(tmp_path, [WORDS[3]])
    assert found == {word: float(word == WORDS[3]) for word in WORDS}


def test_a_copy_that_goes_on_with_the_same_data_releases_the_same(tmp_path: Path) -> None:
    """So a crash between the answer and the release costs nothing."""
    found, _ = differences(tmp_path, [])
    assert set(found.values()) == {0.0}


def test_what_may_have_been_released_is_charged_and_ended(tmp_path: Path) -> None:
    with opened(tmp_path / "first.db") as store:
        listed = create(store, "List", **LIST)
        counted = create(store, "Counts", WORDS, **FREQUENCIES)
        asked = FREQUENCIES | {"trust": "local", "epsilon": 4.0}
        local = create(store, "Local", WORDS, **asked)
        over = create(store, "Over", WORDS, **FREQUENCIES)
        for study in (listed, counted, over):
            answer(store, study, WORDS * HOLDERS)
        released(store, over)
        with store.reading() as tx:
            before = tx.entries()
        backup(tmp_path / "first.db", tmp_path / "copy.db")
        released(store, listed)
        released(store, counted)
        with store.reading() as tx:
            charged = tx.entries()
    assert restore(tmp_path / "second.db", tmp_path / "copy.db") == ["List", "Counts"]
    with opened(tmp_path / "second.db") as store:
        with store.reading() as tx:
            assert tx.entries()[: len(before)] == before
            assert sorted(tx.entries()) == sorted(charged)  # as if it knew what was released
        work(store)
        states = {name: row_of(store, name).state for name in (listed, counted, local, over)}
        assert states == {
            listed: "failed",
            counted: "failed",
            local: "collecting",
            over: "released",
        }
        assert "restored from a copy" in row_of(store, listed).problem
        with store.reading() as tx:
            assert tx.release(listed) is None


def test_studies_go_on_if_nothing_was_released_after_the_copy(tmp_path: Path) -> None:
    with opened(tmp_path / "first.db") as store:
        study = create(store, **LIST)
        answer(store, study, WORDS * HOLDERS)
        backup(tmp_path / "first.db", tmp_path / "copy.db")
    assert restore(tmp_path / "second.db", tmp_path / "copy.db", nothing_released=True) == []
    with opened(tmp_path / "second.db") as store:
        assert released(store, study).keys() == set(WORDS)
        with store.reading() as tx:
            assert len(tx.entries()) == 1


def test_a_study_of_several_tasks_is_charged_whole_when_it_may_have_been_released(
    tmp_path: Path,
) -> None:
    """A histogram asks for names, then for counts: after the copy both may have been released."""
    with opened(tmp_path / "first.db") as store:
        create(store, "Histogram", **LIST | {"question": "histogram", "bytes_per_device": 100_000})
        backup(tmp_path / "first.db", tmp_path / "copy.db")
    assert restore(tmp_path / "second.db", tmp_path / "copy.db") == ["Histogram"]
    with opened(tmp_path / "second.db") as store, store.reading() as tx:
        (entry,) = tx.entries()
    charge = from_json(entry[-1])
    assert isinstance(charge, PlannedLoss)
    assert len(charge.all_losses) == 2
