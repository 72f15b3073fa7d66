"""From a value to what may be kept of it: the only file of a device that sees values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from sfumato.device.offers import Offer
from sfumato.errors import SpecError
from sfumato.flow.contribute import contribute, local_report, report
from sfumato.flow.model_terms import ModelTerms, Train
from sfumato.flow.report import Report
from sfumato.flow.task import LocalTask, Task
from sfumato.flow.word_discovery import WordTask
from sfumato.privacy import Rng, bound_contributions
from sfumato.privacy.samplers import stream
from sfumato.sketch import (
    CountSketch,
    InvertibleSketch,
    ItemKeys,
    Keys,
    OneHot,
    VectorSketch,
)
from sfumato.sketch.words import Prefix, codes_of

I64 = npt.NDArray[np.int64]
Value: TypeAlias = "str | Sequence[str] | Sequence[float] | npt.NDArray[np.floating] | Train"
"""What a device holds: a text, several, or a vector; for a model, what computes its update."""


def privatiser(
    offer: Offer, value: Value, places: Mapping[str, int] | None
) -> Callable[[Rng], bytes] | None:
    """What makes the message of a report out of a value; None where the value says nothing to a
    local study: there is none, or it is a word that is known or of another alphabet. The device
    then sends what `says_nothing` makes.

    `places` is the offer's dictionary, if it has one. Where the collector is trusted with the table
    several values may come at once, and those that a report has room for are drawn among them.
    """
    task = offer.task
    if isinstance(task, Task):
        sealed = table_report(task, offer.keys, value, places)
        return lambda rng: sealed(rng).message
    values = _texts(value)
    if len(values) > 1:
        raise SpecError(
            "a value of a local study is a record of its own; got several",
            hint="record them one by one",
        )
    if isinstance(task, WordTask):
        known = places or {}
        values = tuple(word for word in values if word not in known)
        if not task.discoverer.codes(values)[1].all():
            return None
    if not values:
        return None
    said: Any = _categories(values, places) if task.takes_categories() else values
    return lambda rng: _record(task, said, rng)


def says_nothing(task: LocalTask | WordTask) -> Callable[[Rng], bytes]:
    """What makes the message of a report that says "none"."""
    return lambda rng: _record(task, (), rng)


def _record(task: LocalTask | WordTask, values: Any, rng: Rng) -> bytes:
    """One record: those of a day are kept, and leave, one by one."""
    return local_report(replace(task, records_per_report=1), values, rng=rng).message


def table_report(
    task: Task, keys: ItemKeys | None, value: Value, places: Mapping[str, int] | None
) -> Callable[[Rng], Report]:
    """What makes a device's report of a task whose tables the collector may see."""
    send = sendable(task, keys, value, places)

    def made(rng: Rng) -> Report:
        own = stream(rng, task.id)  # a table is made once
        return report(task, send(own), rng=own)

    return made


def table(
    task: Task, keys: ItemKeys | None, value: Value, places: Mapping[str, int] | None
) -> Callable[[Rng], I64]:
    """What makes a device's share of a masked sum, flat, noise included."""
    send = sendable(task, keys, value, places)

    def made(rng: Rng) -> I64:
        own = stream(rng, task.id)
        return contribute(task, send(own), devices=1, rng=own).reshape(-1)

    return made


def sendable(
    task: Task, offered: ItemKeys | None, value: Value, places: Mapping[str, int] | None
) -> Callable[[Rng], Any]:
    """What makes out of a device's values those that its table is made of: within the task's bound,
    and only what the study counts. What is left out leaves zeros.

    `offered` is what of an item the table counts, where its sketch does not say.
    """
    sketch = task.sketch
    if isinstance(sketch, VectorSketch):
        vector = _vector(value, sketch.length)
        return lambda rng: sketch.tables(vector, rng=rng)
    values = _texts(value)
    if isinstance(offered, Prefix):
        prefix = offered
        assert isinstance(sketch, OneHot | CountSketch)  # the offer has seen to it
        codes, fits = codes_of(values, prefix.alphabet, prefix.length)
        words = codes[fits]
        return lambda rng: prefix.values(sketch, words[_chosen(len(words), task, rng)])
    keys = sketch.keys if isinstance(sketch, InvertibleSketch) else offered
    if keys is not None:
        items = _keyed(keys, values)
        return lambda rng: [items[place] for place in _chosen(len(items), task, rng)]

    def listed(rng: Rng) -> Any:
        held = tuple(values[place] for place in _chosen(len(values), task, rng))
        if not task.takes_categories():
            return held
        found = _categories(held, places)
        return found[found >= 0]

    return listed


def masked_table(
    offer: Offer, value: Value, places: Mapping[str, int] | None, parameters: bytes | None = None
) -> Callable[[Rng], I64]:
    """What makes a device's share of a masked sum. `parameters` are those of a model that is
    trained."""
    task = offer.task
    assert isinstance(task, Task)  # no other is masked
    if offer.model is None:
        return table(task, offer.keys, value, places)
    if not callable(value):
        raise SpecError(
            "a value of this study must be a function of terms, parameters and chance; "
            "got no function"
        )
    return update_table(task, offer.model, parameters, value)


def update_table(
    task: Task, terms: ModelTerms, parameters: bytes | None, train: Train
) -> Callable[[Rng], I64]:
    """The same of a model's update, which is computed when the table is made and not before."""
    sketch = task.sketch
    assert isinstance(sketch, VectorSketch)  # the offer has seen to it

    def made(rng: Rng) -> I64:
        own = stream(rng, task.id)
        if parameters is None:
            raise SpecError("the model of this round is not here; fetch the offers, and join again")
        update = np.asarray(train(terms, terms.read(parameters), own))
        if update.shape != (sketch.length,) or update.dtype.kind != "f":
            raise SpecError(f"an update of this model must be {sketch.length} real numbers")
        tables = sketch.tables(terms.bounded_update(update)[None], rng=own)
        return contribute(task, tables, devices=1, rng=own).reshape(-1)

    return made


def _keyed(keys: Keys, values: tuple[str, ...]) -> list[str]:
    """The items that have a key, cut to it, each once."""
    if not values:
        return []
    numbers, fits = keys.numbers(values)
    return [str(item) for item in keys.items(np.unique(numbers[fits], axis=0))[0].to_pylist()]


def _chosen(count: int, task: Task, rng: Rng) -> npt.NDArray[np.int64]:
    """Which of so many values a table has room for, drawn by lot."""
    return bound_contributions(np.zeros(count, dtype=np.int64), task.items_per_device, rng=rng)


def _categories(
    values: tuple[str, ...], places: Mapping[str, int] | None
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Each value's place in the dictionary; −1 where it is not listed."""
    assert places is not None  # an offer of such a task names a dictionary
    return np.array([places.get(value, -1) for value in values], dtype=np.int64)


def _texts(value: Value) -> tuple[str, ...]:
    values: Any = (value,)
    if isinstance(value, Sequence) and not isinstance(value, str):
        values = tuple(value)
    try:
        sound = all(isinstance(text, str) and text.encode() is not None for text in values)
    except UnicodeEncodeError:
        sound = False
    if not sound:  # never say which value it was, nor let a cause say it
        raise SpecError("a value must be a text of Unicode without surrogates")
    return tuple(values)


def _vector(value: Value, length: int) -> npt.NDArray[np.float64]:
    try:
        vector = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        vector = np.empty(0)
    if vector.shape != (length,) or not np.isfinite(vector).all():
        raise SpecError(f"a value of this study must be {length} finite numbers")
    return vector.reshape(1, length)
