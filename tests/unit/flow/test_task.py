"""A task refuses parts that do not fit together, and its id covers all of its fields."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from sfumato.errors import SpecError, TaskError
from sfumato.flow.aggregation import Plain
from sfumato.flow.task import Task, bits_for
from sfumato.privacy import NoiseAtRelease, NoiseInShares, NoNoise, NoPrivacy
from sfumato.sketch import CountSketch, OneHot
from sfumato.spec import digest, from_json, to_json

TASK = Task(
    sketch=CountSketch(rows=5, width=64, seed=1),
    mechanism=NoiseAtRelease(noise="gaussian", scale=9.0),
    aggregation=Plain(modulus_bits=12),
    cohort="round 1",
    items_per_device=1,
    min_count=10,
    max_count=1000,
)
OTHERS: dict[str, Any] = {
    "sketch": CountSketch(rows=5, width=64, seed=2),
    "mechanism": NoiseAtRelease(noise="gaussian", scale=9.5),
    "aggregation": Plain(modulus_bits=13),
    "campaign": "emoji",
    "cohort": "round 2",
    "items_per_device": 2,
    "min_count": 11,
    "max_count": 1001,
}


def test_a_task_survives_its_json() -> None:
    assert from_json(to_json(TASK)) == TASK


def test_the_id_is_the_digest_and_covers_every_field() -> None:
    assert {field.name for field in fields(Task)} == OTHERS.keys()
    changed = [replace(TASK, **{name: value}) for name, value in OTHERS.items()]
    ids = {task.id for task in [TASK, *changed]}
    assert len(ids) == 1 + len(OTHERS)
    assert TASK.id == digest(TASK)


def test_noise_in_shares_needs_hidden_summands() -> None:
    with pytest.raises(TaskError, match="summands are hidden"):
        replace(TASK, mechanism=NoiseInShares(scale=9.0, survivors=10))


@pytest.mark.parametrize(
    ("bits", "count", "items", "fits"),
    [
        (2, 1, 1, True),
        (2, 2, 1, False),
        (8, 127, 1, True),
        (8, 128, 1, False),
        (8, 63, 2, True),
        (8, 64, 2, False),
        (12, 2047, 1, True),
        (62, 2**60, 1, True),
    ],
)
def test_the_modulus_must_tell_every_possible_sum_apart(
    bits: int, count: int, items: int, fits: bool
) -> None:
    parts: dict[str, Any] = {
        "sketch": OneHot(categories=3),
        "mechanism": NoNoise(),
        "aggregation": Plain(modulus_bits=bits),
        "cohort": "everybody",
        "items_per_device": items,
        "max_count": count if count < 2**53 else 2**53 - 1,
    }
    if fits:
        Task(**parts)
    else:
        with pytest.raises(TaskError, match=f"at least {bits_for(count * items)}; got {bits}"):
            Task(**parts)


@pytest.mark.parametrize("largest", [1, 2, 3, 127, 128, 1000, 10_000, 150_000, 2**40])
def test_the_least_modulus_is_just_enough(largest: int) -> None:
    bits = bits_for(largest)
    opened = Plain(modulus_bits=bits).open(np.array([largest, -largest]))
    assert opened.tolist() == [largest, -largest]
    if bits > 2:
        assert 2 * largest >= 2 ** (bits - 1)  # one bit less would not do


@pytest.mark.parametrize(
    "wrong",
    [{"items_per_device": 0}, {"min_count": 0}, {"min_count": 1001}, {"max_count": 0}],
)
def test_counts_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(TaskError):
        replace(TASK, **wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"sketch": Plain(modulus_bits=12)},
        {"mechanism": OneHot(categories=3)},
        {"aggregation": NoNoise()},
        {"sketch": "one_hot"},
        {"cohort": 3},
    ],
)
def test_parts_in_one_anothers_places_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        replace(TASK, **wrong)


def test_the_loss_is_the_mechanisms_for_what_one_device_adds() -> None:
    assert TASK.contribution == TASK.sketch.sensitivity(1)
    assert TASK.loss == TASK.mechanism.loss(TASK.sketch.sensitivity(1))
    two = replace(TASK, items_per_device=2)
    assert two.loss == two.mechanism.loss(two.sketch.sensitivity(2))
    assert replace(TASK, mechanism=NoNoise()).loss == NoPrivacy()


def test_message_bytes_are_what_a_sealed_table_weighs() -> None:
    assert isinstance(TASK.aggregation, Plain)
    sealed = TASK.aggregation.seal(np.zeros(TASK.sketch.shape, dtype=np.int64))
    assert TASK.message_bytes == len(sealed) == 5 * 64 * 12 // 8
