"""From a value to its privatised report: the only module of a device that sees values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from sfumato.arrays import I64
from sfumato.device.offers import Offer
from sfumato.errors import SpecError
from sfumato.flow.contribute import contribute, local_report, report
from sfumato.flow.model_terms import ModelTerms, Train
from sfumato.flow.report import Report
from sfumato.flow.segments import is_pair
from sfumato.flow.task import LocalTask, Task
from sfumato.flow.word_discovery import WordTask
from sfumato.privacy import Rng, bound_contributions
from sfumato.privacy.samplers import stream
from sfumato.sketch import (
    CountSketch,
    InvertibleSketch,
    ItemCounts,
    ItemKeys,
    Keys,
    NormBins,
    OneHot,
    RoundSketch,
    SampledTables,
    TextKeys,
    VectorSketch,
    WordKeys,
)
from sfumato.sketch.words import Prefix, codes_of

Value: TypeAlias = "str | Sequence[str] | Sequence[float] | npt.NDArray[np.floating] | Train"
"""A device's data: a text, several texts or a vector; for a model, a function that computes its
update."""


def privatiser(
    offer: Offer, value: Value, places: Mapping[str, int] | None
) -> Callable[[Rng], bytes] | None:
    """A function that makes the message of a report from a value.

    None if the value says nothing to a local study: there is no value, or it is a word that is
    already known or has another alphabet. The device then uses `none_privatiser`.

    `places` is the offer's dictionary, if it has one. If the collector is trusted with the table,
    there may be several values; those that fit into a report are drawn at random.
    """
    task = offer.task
    _check_pairs(offer, value)
    if isinstance(task, Task):
        sealed = table_report(task, offer.keys, value, places)
        return lambda rng: sealed(rng).message
    values = _texts(value)
    if len(values) > 1:
        raise SpecError(
            "a local study must get one value per record; got several",
            hint="record them one by one",
        )
    if isinstance(task, WordTask):
        known_words = places or {}
        values = tuple(word for word in values if word not in known_words)
        if not task.discoverer.codes(values)[1].all():
            return None
    if not values:
        return None
    data: Any = _categories(values, places) if task.takes_categories() else values
    return lambda rng: _record(task, data, rng)


def none_privatiser(task: LocalTask | WordTask) -> Callable[[Rng], bytes]:
    """A function that makes the message of a report that says "none"."""
    return lambda rng: _record(task, (), rng)


def _record(task: LocalTask | WordTask, values: Any, rng: Rng) -> bytes:
    """The message of a single record: a day's records are kept and sent one by one."""
    return local_report(replace(task, records_per_report=1), values, rng=rng).message


def table_report(
    task: Task, keys: ItemKeys | None, value: Value, places: Mapping[str, int] | None
) -> Callable[[Rng], Report]:
    """A function that makes a device's report for a task whose tables the collector may see."""
    select = selector(task, keys, value, places)

    def make(rng: Rng) -> Report:
        own = stream(rng, task.id)  # a table is made once
        return report(task, select(own), rng=own)

    return make


def table(
    task: Task, keys: ItemKeys | None, value: Value, places: Mapping[str, int] | None
) -> Callable[[Rng], I64]:
    """A function that makes a device's share of a masked sum, flat and with its noise."""
    select = selector(task, keys, value, places)

    def make(rng: Rng) -> I64:
        own = stream(rng, task.id)
        return contribute(task, select(own), devices=1, rng=own).reshape(-1)

    return make


def selector(
    task: Task, item_keys: ItemKeys | None, value: Value, places: Mapping[str, int] | None
) -> Callable[[Rng], Any]:
    """A function that selects the values for a device's table.

    It keeps to the task's contribution bound and takes only values that the study counts. Values
    that are left out leave zeros. `item_keys` says which part of an item the table counts, if its
    sketch does not.
    """
    sketch = task.sketch
    if isinstance(sketch, VectorSketch):
        vector = _vector(value, sketch.length)
        return lambda rng: sketch.tables(vector, rng=rng)
    if isinstance(item_keys, NormBins):
        bins, vector = item_keys, _vector(value, item_keys.length)
        return lambda rng: bins.places(vector)
    values = _texts(value)
    if isinstance(item_keys, Prefix):
        prefix = item_keys
        assert isinstance(sketch, OneHot | CountSketch)  # checked by the offer
        codes, fits = codes_of(values, prefix.alphabet, prefix.length)
        words = codes[fits]
        return lambda rng: prefix.values(sketch, words[_sample(len(words), task, rng)])
    keys: Keys | None = item_keys
    if isinstance(sketch, InvertibleSketch | ItemCounts | SampledTables):
        keys = sketch.keys
    if keys is not None:
        items = _items_with_keys(keys, values, getattr(sketch, "copies", False))
        return lambda rng: [items[place] for place in _sample(len(items), task, rng)]

    def select(rng: Rng) -> Any:
        sample = tuple(values[place] for place in _sample(len(values), task, rng))
        if not task.takes_categories():
            return sample
        categories = _categories(sample, places)
        return categories[categories >= 0]

    return select


def masked_table(
    offer: Offer, value: Value, places: Mapping[str, int] | None, parameters: bytes | None = None
) -> Callable[[Rng], I64]:
    """A function that makes a device's share of a masked sum.

    `parameters` are those of the model to train, if there is one.
    """
    task = offer.task
    assert isinstance(task, Task)  # other tasks are not masked
    _check_pairs(offer, value)
    if offer.model is None:
        return table(task, offer.keys, value, places)
    if not callable(value):
        raise SpecError(
            "a value of this study must be a function of terms, parameters and rng; "
            f"got a {type(value).__name__}"
        )
    return update_table(task, offer.model, parameters, value)


def update_table(
    task: Task, terms: ModelTerms, parameters: bytes | None, train: Train
) -> Callable[[Rng], I64]:
    """A function that computes a model's update when it is called, and makes its table."""
    sketch = task.sketch
    assert isinstance(sketch, VectorSketch | RoundSketch)  # checked by the offer

    def make(rng: Rng) -> I64:
        own = stream(rng, task.id)
        if parameters is None:
            raise SpecError("the model of this round is missing; fetch the offers, and join again")
        update = np.asarray(train(terms, terms.read(parameters), own))
        if update.shape != (sketch.length,) or update.dtype.kind != "f":
            raise SpecError(
                f"an update of this model must be an array of {sketch.length} floats; "
                f"got shape {update.shape} of {update.dtype}"
            )
        tables = sketch.tables(terms.bounded_update(update)[None], rng=own)
        return contribute(task, tables, devices=1, rng=own).reshape(-1)

    return make


def _items_with_keys(keys: Keys, values: tuple[str, ...], copies: bool) -> list[str]:
    """The items that have a key, truncated to it; each once unless `copies` count."""
    if not values:
        return []
    numbers, fits = keys.numbers(values)
    assert isinstance(keys, TextKeys | WordKeys)  # studies have no others
    own = numbers[fits] if copies else np.unique(numbers[fits], axis=0)
    texts, _ = keys.texts(own)  # without pyarrow
    return [str(text) for text in texts]


def _sample(count: int, task: Task, rng: Rng) -> npt.NDArray[np.int64]:
    """The places of a random sample of `count` values within the task's contribution bound."""
    return bound_contributions(np.zeros(count, dtype=np.int64), task.items_per_device, rng=rng)


def _categories(
    values: tuple[str, ...], places: Mapping[str, int] | None
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Each value's place in the dictionary; −1 where it is not listed."""
    assert places is not None  # the offer of such a task names a dictionary
    return np.array([places.get(value, -1) for value in values], dtype=np.int64)


def _check_pairs(offer: Offer, value: Value) -> None:
    """Raise SpecError unless every value of a study with segments has one; the error omits it."""
    if offer.segments and not all(map(is_pair, _texts(value))):
        raise SpecError(
            "a value of this study must be a segment and an item; got an item alone",
            hint="make it with sfumato.flow.segments.pair",
        )


def _texts(value: Value) -> tuple[str, ...]:
    values: Any = (value,)
    if isinstance(value, Sequence) and not isinstance(value, str):
        values = tuple(value)
    try:
        is_text = all(isinstance(text, str) and text.encode() is not None for text in values)
    except UnicodeEncodeError:
        is_text = False
    if not is_text:  # neither the message nor a cause may show the value
        raise SpecError(
            "a value must be Unicode text without surrogates, or several; got something else"
        )
    return tuple(values)


def _vector(value: Value, length: int) -> npt.NDArray[np.float64]:
    try:
        vector = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        vector = np.empty(0)
    if vector.shape != (length,) or not np.isfinite(vector).all():
        raise SpecError(
            f"a value of this study must be {length} finite numbers; got something else"
        )
    return vector.reshape(1, length)
