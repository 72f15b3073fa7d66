"""A device that helps to train a model: what it fetches, when it computes, what it sends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from masking import NAME, Masking, agreed, masking, play
from sfumato.cli.device import describe
from sfumato.device import (
    Device,
    Http,
    MemoryBox,
    OfferedStudy,
    Response,
    RoundClient,
    RoundOutcome,
    Send,
    SkipReason,
    SqliteBox,
)
from sfumato.device.device import changes
from sfumato.device.offers import Offer
from sfumato.device.private import masked_table
from sfumato.errors import OfferError, ServiceError, SpecError
from sfumato.flow.model_terms import LocalTraining, ModelTerms, digest_of, to_bytes
from sfumato.flow.secure_sum import SecureSum
from sfumato.privacy import NoNoise, Rng, SeededRng
from sfumato.sketch import VectorSketch

LENGTH, COHORT = 10, 5
KEYS: dict[str, Any] = {
    "question": "train", "epsilon": None, "rounds": 2, "clip": 0.5, "dropout": 0.0,
    "corrupt": 0.05,
    "training": {"model": "softmax", "inputs": 4, "classes": 2, "cohort": COHORT},
}  # fmt: skip
NUMBERS = np.linspace(-1, 1, LENGTH, dtype=np.float32)
BODY = to_bytes(NUMBERS)
TERMS = ModelTerms(
    model="softmax", inputs=4, classes=2, local=LocalTraining(learning_rate=0.1, batch=20), round=1,
    rounds=2, parameters=LENGTH, digest=digest_of(BODY),
)  # fmt: skip


def still(terms: ModelTerms, parameters: Any, rng: Rng) -> Any:
    return np.zeros(terms.parameters, dtype=np.float32)


def offer_with(**changed: Any) -> Offer:
    sketch = VectorSketch(length=LENGTH, clip=0.5, bound=0.5, scale=1000.0)
    task = SecureSum(corrupt=0.05, dropout=0.0).task(
        sketch=sketch, mechanism=NoNoise(), campaign="a pass", cohort="round 0", devices=COHORT,
        items_per_device=1,
    )  # fmt: skip
    terms = {"question": "train", "trust": "secure", "task": task, "model": TERMS, **changed}
    return Offer(study=NAME, purpose="To tell trees apart.", epsilon=None, noise=0.0, **terms)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Masking]:
    with masking(tmp_path) as stage:
        yield stage


@pytest.fixture
def send(stage: Masking) -> Iterator[Http]:
    with Http(stage.collector.address) as send:
        yield send


def a_device(stage: Masking, send: Send, box: Any = None) -> Device:
    key = bytes.fromhex(stage.collector.public_key)
    return agreed(Device(box or MemoryBox(), send, key), stage.clock)


class ChangedModels:
    """A connection to a collector that changes the answers with models, and counts them."""

    def __init__(self, send: Send, change: Callable[[Response], Response]) -> None:
        self._send, self._change = send, change
        self.count = 0

    def __call__(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Response:
        answer = self._send(method, path, body, headers)
        if not path.startswith("/v1/models/"):
            return answer
        self.count += 1
        return self._change(answer)


def test_the_function_is_called_once_and_only_when_the_table_is_masked(
    stage: Masking, send: Http, tmp_path: Path
) -> None:
    stage.create(COHORT, **KEYS)
    phases: list[str] = []
    calls: list[tuple[ModelTerms, Any]] = []
    box = SqliteBox(tmp_path / "device.db")
    models = ChangedModels(send, lambda answer: answer)
    mine = a_device(stage, models, box)

    def train(terms: ModelTerms, parameters: Any, rng: Rng) -> Any:
        calls.append((terms, parameters))
        phases.append(part.phase)
        return np.full(LENGTH, 0.25)

    client = mine.part(NAME, train, stage.clock())
    assert isinstance(client, RoundClient)
    part = client
    others = [a_device(stage, send).part(NAME, still, stage.clock()) for _ in range(COHORT - 1)]
    play(stage, [part, *others])  # type: ignore[list-item]  # all of them are parts
    assert part.outcome is RoundOutcome.DONE
    assert phases == ["mask"]
    ((terms, parameters),) = calls
    assert terms == part.offer.model
    assert digest_of(to_bytes(parameters)) == terms.digest
    assert models.count == 1
    box.close()


def test_a_round_continues_without_fetching_its_model_again(
    stage: Masking, send: Http, tmp_path: Path
) -> None:
    stage.create(COHORT, **KEYS)
    models = ChangedModels(send, lambda answer: answer)
    box = SqliteBox(tmp_path / "device.db")
    assert isinstance(a_device(stage, models, box).part(NAME, still, stage.clock()), RoundClient)
    box.close()
    box = SqliteBox(tmp_path / "device.db")
    key = bytes.fromhex(stage.collector.public_key)
    assert isinstance(Device(box, models, key).part(NAME, still, stage.clock()), RoundClient)
    assert models.count == 1
    box.close()


@pytest.mark.parametrize(
    "change",
    [
        lambda answer: replace(answer, body=answer.body[:-1] + b"\1"),
        lambda answer: replace(answer, body=answer.body + b"\0\0\0\0"),
        lambda answer: replace(answer, body=b""),
    ],
    ids=["other parameters", "too many", "none"],
)
def test_other_parameters_than_the_offers_are_refused(
    stage: Masking, send: Http, change: Callable[[Response], Response]
) -> None:
    stage.create(COHORT, **KEYS)
    device = a_device(stage, ChangedModels(send, change))
    with pytest.raises(OfferError, match="the size and the digest that the offer names"):
        device.part(NAME, still, stage.clock())


def test_parameters_that_are_not_there_can_be_asked_for_later(stage: Masking, send: Http) -> None:
    stage.create(COHORT, **KEYS)
    answers = [Response(404, {}, b'{"code": "unknown-model"}'), Response(503, {}, b"{}")]
    flaky = ChangedModels(send, lambda answer: answers.pop() if answers else answer)
    device = a_device(stage, flaky)
    with pytest.raises(ServiceError):
        device.part(NAME, still, stage.clock())
    assert device.join(NAME, still, stage.clock()) is RoundOutcome.UNREACHABLE
    assert isinstance(device.part(NAME, still, stage.clock()), RoundClient)


def test_only_the_current_parameters_are_kept(tmp_path: Path) -> None:
    for box in (MemoryBox(), SqliteBox(tmp_path / "device.db")):
        assert box.model("one") is None
        box.keep_model("one", "11" * 32, b"old")
        box.keep_model("one", "22" * 32, b"new")
        box.keep_model("two", "33" * 32, b"other")
        assert box.model("one") == ("22" * 32, b"new")
        box.keep_round("two", "{}", b"")
        box.drop_models(set())  # "two" has an unfinished round
        assert (box.model("one"), box.model("two")) == (None, ("33" * 32, b"other"))
        box.drop_round("two")
        box.drop_models({"two"})
        assert box.model("two") is not None
        box.drop_models(set())
        assert box.model("two") is None
        box.close()


def test_simulated_devices_share_their_model() -> None:
    shared: dict[str, tuple[str, bytes]] = {}
    one, other = MemoryBox(None, shared), MemoryBox(None, shared)
    one.keep_model("one", "11" * 32, b"all")
    one.drop_models(set())
    assert other.model("one") == ("11" * 32, b"all")


def test_a_value_that_is_not_a_function_is_refused(stage: Masking, send: Http) -> None:
    stage.create(COHORT, **KEYS)
    device = a_device(stage, send)
    with pytest.raises(SpecError, match="must be a function"):
        device.part(NAME, [0.5] * LENGTH, stage.clock())
    assert device.record(NAME, "oak", stage.clock()) is SkipReason.NOT_ASKED_FOR


@pytest.mark.parametrize("wrong", [np.zeros(3), np.zeros((1, LENGTH)), np.zeros(LENGTH, dtype=int)])
def test_an_update_of_another_shape_is_not_sent(
    stage: Masking, send: Http, wrong: np.ndarray[Any, Any]
) -> None:
    stage.create(COHORT, **KEYS)
    mine = a_device(stage, send).part(NAME, lambda *_: wrong, stage.clock())
    assert isinstance(mine, RoundClient)
    others = [a_device(stage, send).part(NAME, still, stage.clock()) for _ in range(COHORT - 1)]
    play(stage, [mine, *others], leaving={})  # type: ignore[list-item]  # all of them are parts
    assert mine.outcome is RoundOutcome.REFUSED
    assert "must be an array of 10 floats" in mine.problem


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e300])
def test_an_update_that_is_not_finite_is_sent_as_zeros(bad: float) -> None:
    update = np.full(LENGTH, 0.25)
    update[3] = bad
    tables = [
        masked_table(offer_with(), lambda *_, vector=vector: vector, None, BODY)(SeededRng(1))
        for vector in (update, np.full(LENGTH, 0.125))
    ]
    assert not tables[0].any()
    assert tables[1].tolist() == [125] * LENGTH


def test_an_update_longer_than_allowed_is_sent_as_zeros() -> None:
    short = offer_with(model=replace(TERMS, largest_l1=1.0))
    for size, is_sent in ((0.09, True), (0.11, False)):
        make = masked_table(short, lambda *_, size=size: np.full(LENGTH, size), None, BODY)
        assert make(SeededRng(1)).any() == is_sent


def test_missing_parameters_stop_the_round() -> None:
    with pytest.raises(SpecError, match="is missing"):
        masked_table(offer_with(), still, None, None)(SeededRng(1))


def test_consent_is_to_the_model_and_its_training_but_not_to_one_round() -> None:
    agreement = offer_with()
    later = offer_with(model=replace(TERMS, round=2, digest="0" * 64))
    assert changes(agreement, later) == ()
    for worse in (
        replace(TERMS, model="mlp"),
        replace(TERMS, local=LocalTraining(learning_rate=0.1, batch=20, epochs=5)),
        replace(TERMS, rounds=9),
    ):
        assert changes(agreement, offer_with(model=worse)) == ("model",)


def test_consent_is_asked_for_in_words() -> None:
    text = describe(OfferedStudy(offer_with(), "none"))
    assert "an update of a model (softmax, 10 parameters)" in text
    assert "can read only sums over many devices" in text


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": None}, "train without a model"),
        ({"question": "mean"}, "mean with a model"),
        ({"model": replace(TERMS, parameters=11)}, "the length of the model, 11; got 10"),
    ],
)
def test_an_offer_and_its_model_fit(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        offer_with(**changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"round": 3}, "round must be 1 to 2; got 3"),
        ({"parameters": 0}, "must have 1 to 33,554,432 parameters"),
        ({"digest": "X" * 64}, "64 hexadecimal digits"),
        ({"largest_l1": 0.0}, "largest_l1 must be above 0"),
    ],
)
def test_terms_check_themselves(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        replace(TERMS, **changed)
