"""Specs: canonical JSON, digests, and refused values."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import math
import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sfumato.simulation.simulate  # registers every kind
from sfumato import spec
from sfumato.device.offers import Offer
from sfumato.device.outbox import SendingRule
from sfumato.errors import SpecError, StudyError
from sfumato.flow.aggregation import Masked, Plain, Sparse
from sfumato.flow.model_terms import LocalTraining, ModelTerms
from sfumato.flow.secure_sum import SecureSum
from sfumato.flow.task import LocalTask, Task
from sfumato.flow.word_discovery import FragmentPuzzle, PrefixExtension, WordTask
from sfumato.learn.campaign import RoundNoise
from sfumato.learn.compression import (
    AdaptNorm,
    AdaptTail,
    FixedRate,
    FreeNorm,
    NoCompression,
    TwoStage,
)
from sfumato.learn.design import AdaptiveClip, ServerOptimizer, TrainingDesign
from sfumato.learn.diffsketch import (
    BinomialVector,
    DiffSketch,
    DiffSketchDesign,
    NoisyVector,
)
from sfumato.privacy import (
    AdditiveLoss,
    ApproximateLoss,
    Budget,
    CountMeanSketch,
    DirectResponse,
    HadamardCountMeanSketch,
    HashedResponse,
    NoiseAtRelease,
    NoiseInShares,
    NoNoise,
    NoPrivacy,
    PlannedLoss,
    Rounding,
    best_list,
)
from sfumato.privacy.accounting import SampledLoss
from sfumato.privacy.listing import without_promise
from sfumato.questions.frequencies.design import FrequencyDesign
from sfumato.questions.heavy_hitters.design import HeavyHitterDesign, HistogramDesign
from sfumato.questions.item_lists.design import ItemListDesign
from sfumato.questions.local_frequencies.design import LocalDesign
from sfumato.questions.mean.clipping import ClippedMeanDesign
from sfumato.questions.mean.design import MeanDesign
from sfumato.questions.new_words.design import WordDesign
from sfumato.questions.prefix_search.design import PrefixDesign
from sfumato.questions.threshold_sampling.design import ThresholdSamplingDesign
from sfumato.secagg.round import MaskedRound
from sfumato.sketch import (
    CountSketch,
    IntegerKeys,
    ItemCounts,
    NormBins,
    OneHot,
    RoundSketch,
    TextKeys,
    VectorSketch,
    WordKeys,
)
from sfumato.sketch.dense import DenseSketch
from sfumato.sketch.words import Prefix
from sfumato.spec import canonical, digest, from_json, kind_of, kinds, to_json
from sfumato.study import QUESTIONS, Study, TrainingStudy

# RFC 8785, appendix B: the bits of a double, and how it is printed.
NUMBERS = {
    "0000000000000000": "0",
    "8000000000000000": "0",
    "0000000000000001": "5e-324",
    "8000000000000001": "-5e-324",
    "7fefffffffffffff": "1.7976931348623157e+308",
    "ffefffffffffffff": "-1.7976931348623157e+308",
    "4340000000000000": "9007199254740992",
    "c340000000000000": "-9007199254740992",
    "4430000000000000": "295147905179352830000",
    "44b52d02c7e14af5": "9.999999999999997e+22",
    "44b52d02c7e14af6": "1e+23",
    "44b52d02c7e14af7": "1.0000000000000001e+23",
    "444b1ae4d6e2ef4e": "999999999999999700000",
    "444b1ae4d6e2ef4f": "999999999999999900000",
    "444b1ae4d6e2ef50": "1e+21",
    "3eb0c6f7a0b5ed8c": "9.999999999999997e-7",
    "3eb0c6f7a0b5ed8d": "0.000001",
    "41b3de4355555553": "333333333.3333332",
    "41b3de4355555554": "333333333.33333325",
    "41b3de4355555555": "333333333.3333333",
    "41b3de4355555556": "333333333.3333334",
    "41b3de4355555557": "333333333.33333343",
    "becbf647612f3696": "-0.0000033333333333333333",
    "43143ff3c1cb0959": "1424953923781206.2",
}
LITERALS = {1e21: "1e+21", 1e-7: "1e-7", 1.0: "1", 4.5: "4.5", 2e-3: "0.002", 1e20: "1" + "0" * 20}

COUNTS = FrequencyDesign(
    mode="hybrid",
    items=100,
    devices=5000,
    rounds=4,
    rows=5,
    width=50,
    seed=1,
    items_per_device=2,
    mechanism=NoiseAtRelease(noise="laplace", scale=3.0),
    decode="refined",
    every_round=True,
    pilot_devices=500,
    target_error=0.01,
)
NAMES = HeavyHitterDesign(
    keys=TextKeys(length=16),
    devices=5000,
    rounds=4,
    rows=3,
    width=50,
    cell_bits=177,
    seed=1,
    items_per_device=1,
    mechanism=without_promise(0.1),
    target=100.0,
    partial=True,
)
MAJORITY = ThresholdSamplingDesign(
    keys=TextKeys(length=16),
    devices=5000,
    rounds=4,
    rows=3,
    width=50,
    count_bits=9,
    value_bits=12,
    check_bits=20,
    seed=1,
    items_per_device=2,
    copies=True,
    repetitions=5,
    sampling_threshold=2.5,
    unread=0.01,
    counts=dataclasses.replace(COUNTS, mechanism=NoNoise(), pilot_devices=0, target_error=None),
)
ROUND_SKETCH = RoundSketch(
    main=VectorSketch(length=9, clip=1.0, bound=1.0, scale=100.0),
    second=VectorSketch(
        length=9, clip=1.0, bound=1.0, scale=100.0,
        dense=DenseSketch(length=9, rows=2, width=3, seed=1),
    ),
    counts=True,
)  # fmt: skip
EXAMPLES: dict[str, Any] = {
    "sampled_loss": SampledLoss(
        loss=AdditiveLoss(noise="gaussian", scale=9.0, l1=25.0, l2=5.0, unit_cells=0),
        probability=0.25,
        scheme="poisson",
        times=100,
    ),
    "diffsketch": DiffSketch(rows=7, width=22, seed=1),
    "noisy_vector": NoisyVector(clip=1.0, noise_multiplier=0.5),
    "binomial_vector": BinomialVector(clip=1.0, largest=0.1, levels=16, coins=64, seed=1),
    "diffsketch_design": DiffSketchDesign(
        clients=10,
        cohort=10,
        rounds=5,
        local=LocalTraining(learning_rate=0.01, batch=10, steps=1),
        exchange=DiffSketch(rows=7, width=22, seed=1),
        seed=1,
    ),
    "training": TrainingStudy(model="softmax", cohort=10),
    "local_training": LocalTraining(learning_rate=0.1, batch=20),
    "model_terms": ModelTerms(
        model="softmax",
        local=LocalTraining(learning_rate=0.1, batch=20),
        round=1,
        rounds=5,
        parameters=7850,
        digest="5f" * 32,
    ),
    "server_optimizer": ServerOptimizer(method="adam", learning_rate=0.5),
    "adaptive_clip": AdaptiveClip(),
    "no_compression": NoCompression(),
    "fixed_rate": FixedRate(rate=20.0),
    "adapt_norm": AdaptNorm(error=0.25),
    "two_stage": TwoStage(),
    "adapt_tail": AdaptTail(),
    "free_norm": FreeNorm(),
    "training_design": TrainingDesign(
        model="softmax",
        clients=100,
        cohort=10,
        rounds=5,
        local=LocalTraining(learning_rate=0.1, batch=20, steps=3),
        clip=0.5,
        noise_multiplier=1.5,
        compression=FreeNorm(),
        seed=1,
    ),
    "additive_loss": AdditiveLoss(noise="skellam", scale=9.5, l1=4.0, l2=2.0, unit_cells=4),
    "approximate_loss": ApproximateLoss(epsilon=0.5, delta=1e-7),
    "planned_loss": PlannedLoss(
        loss=NoPrivacy(),
        plan="search",
        losses=(ApproximateLoss(epsilon=0.5, delta=1e-7), NoPrivacy()),
        times=2,
    ),
    "budget": Budget(epsilon=None, delta=1e-6),
    "count_sketch": CountSketch(rows=5, width=64, seed=2**53 - 1, bucket_round=3, sign_round=70),
    "frequency_design": COUNTS,
    "count_mean_sketch": CountMeanSketch(epsilon=4.0, rows=16, width=64, seed=1, flips="optimal"),
    "heavy_hitter_design": NAMES,
    "item_counts": ItemCounts(keys=TextKeys(length=8), round=2),
    "item_list_design": ItemListDesign(
        keys=WordKeys(alphabet="abc", length=5),
        devices=1_000,
        rounds=2,
        items_per_device=3,
        mechanism=best_list(1.0, items_per_device=3, epsilon=1.0, delta=1e-6),
        seed=7,
    ),
    "sampled_tables": MAJORITY.sketch(1),
    "threshold_sampling_design": MAJORITY,
    "sparse": Sparse(entries=3, entry_bits=65),
    "histogram_design": HistogramDesign(names=NAMES, counts=COUNTS),
    "integer_keys": IntegerKeys(bits=40),
    "invertible_sketch": NAMES.sketch(2, 0.1),
    "listed_above": best_list(0.1, items_per_device=3, epsilon=1.0, delta=1e-6),
    "text_keys": TextKeys(length=16),
    "word_keys": WordKeys(alphabet="añ森", length=30),
    "dense_sketch": DenseSketch(length=50, rows=3, width=4, blocks=2, seed=1, round=2),
    "device_rule": SendingRule(
        study="emoji", task_id="ab" * 32, epsilon=4.0, daily_reports=1, delay_seconds=3600
    ),
    "direct_response": DirectResponse(epsilon=1.0, categories=3),
    "fragment_puzzle": FragmentPuzzle(
        word=DirectResponse(epsilon=1.0, categories=3),
        fragment=HashedResponse(epsilon=4.0, rows=16, width=56, seed=1),
        seed=2,
        alphabet="añ森",
    ),
    "hadamard_count_mean_sketch": HadamardCountMeanSketch(epsilon=4.0, rows=16, width=64, seed=1),
    "hashed_response": HashedResponse(epsilon=4.0, rows=16, width=56, seed=1, epoch=2),
    "local_design": LocalDesign(
        randomizer=DirectResponse(epsilon=1.0, categories=3), items=3, devices=10
    ),
    "local_task": LocalTask(
        randomizer=HashedResponse(epsilon=4.0, rows=16, width=56, seed=1), cohort="everybody"
    ),
    "offer": Offer(
        study="Street trees",
        purpose="Which trees to plant next.",
        question="frequencies",
        trust="local",
        task=LocalTask(randomizer=DirectResponse(epsilon=1.0, categories=3), cohort="everybody"),
        epsilon=1.0,
        dictionary="ab" * 32,
        closes=20_000,
    ),
    "mean_design": MeanDesign(
        compression="adapt_norm",
        dimensions=1_000,
        devices=50,
        clip=0.5,
        most_cells=900,
        seed=1,
        multiplier=2.5,
        top=7,
        secure=SecureSum(corrupt=0.1, dropout=0.05),
    ),
    "clipped_mean_design": ClippedMeanDesign(
        mean=MeanDesign(
            compression="none",
            dimensions=10,
            devices=50,
            clip=1.0,
            most_cells=10,
            seed=1,
            multiplier=2.5,
            secure=SecureSum(corrupt=0.1, dropout=0.05),
            cohort_count=2,
        ),
        bins=NormBins(length=10, per_octave=2),
        mechanism=NoiseInShares(scale=8.0, survivors=20, colluders=2),
    ),
    "norm_bins": NormBins(length=10, per_octave=2),
    "vector_sketch": VectorSketch(
        length=50,
        clip=1.0,
        bound=1.25,
        scale=900.5,
        dense=DenseSketch(length=50, rows=3, width=4, seed=1),
    ),
    "masked": Masked(modulus_bits=20, corrupt=0.1),
    "rounding": Rounding(clip=1.0, scale=64.0, cells=100),
    "secure_sum": SecureSum(corrupt=0.1, dropout=0.05),
    "masked_round": MaskedRound(
        task="ab" * 32,
        cells=50,
        modulus_bits=20,
        cohort=24,
        corrupt=0.1,
        dropout=0.25,
        mode="semi_malicious",
        nonce="cd" * 16,
    ),
    "no_noise": NoNoise(),
    "no_privacy": NoPrivacy(),
    "noise_at_release": NoiseAtRelease(noise="gaussian", scale=9.446669),
    "noise_in_shares": NoiseInShares(scale=1e-7, survivors=100, colluders=5),
    "one_hot": OneHot(categories=3),
    "plain": Plain(modulus_bits=12),
    "round_noise": RoundNoise(
        noise="gaussian",
        scale=40.0,
        sketch=ROUND_SKETCH,
        asks="norm",
        second_scale=90.0,
        count_scale=4.0,
    ),
    "round_sketch": ROUND_SKETCH,
    "prefix": Prefix(alphabet="añ森", length=4, size=2),
    "prefix_extension": PrefixExtension(
        prefix=HashedResponse(epsilon=4.0, rows=16, width=56, seed=1), lengths=(1, 3)
    ),
    "prefix_design": PrefixDesign(
        alphabet="añ森",
        lengths=(1, 3),
        devices=100,
        rows=5,
        width=50,
        seed=1,
        mechanism=NoiseInShares(scale=3.0, survivors=90, colluders=10),
        secure=SecureSum(corrupt=0.1, dropout=0.05),
    ),
    "study": sfumato.Study(question="frequencies", trust="central", epsilon=1.0, devices=10**6),
    "task": Task(
        sketch=CountSketch(rows=3, width=8, seed=7),
        mechanism=NoNoise(),
        aggregation=Plain(modulus_bits=8),
        cohort="forêt, 森",
        max_count=100,
    ),
    "word_task": WordTask(
        discoverer=PrefixExtension(
            prefix=HashedResponse(epsilon=4.0, rows=16, width=56, seed=1), lengths=(2, 4)
        ),
        cohort="everybody",
    ),
    "word_design": WordDesign(
        discoverer=PrefixExtension(
            prefix=HashedResponse(epsilon=4.0, rows=16, width=56, seed=1), lengths=(1, 3)
        ),
        devices=10,
    ),
}


def double(bits: str) -> float:
    (value,) = struct.unpack(">d", bytes.fromhex(bits))
    return float(value)


@pytest.mark.parametrize(("bits", "text"), NUMBERS.items())
def test_numbers_print_as_rfc_8785_lists_them(bits: str, text: str) -> None:
    assert canonical(double(bits)) == text


@pytest.mark.parametrize(("value", "text"), LITERALS.items())
def test_numbers_print_as_ecmascript_prints_them(value: float, text: str) -> None:
    assert canonical(value) == text


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_printed_number_reads_back_exactly(value: float) -> None:
    assert float(canonical(value)) == value


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_has_not_are_refused(value: float) -> None:
    with pytest.raises(SpecError, match="finite"):
        canonical(value)


@pytest.mark.parametrize("value", [2**53, -(2**53), 10**30])
def test_integers_that_json_readers_round_are_refused(value: int) -> None:
    assert canonical(value // abs(value) * (2**53 - 1)) in ("9007199254740991", "-9007199254740991")
    with pytest.raises(SpecError, match=r"2\*\*53"):
        canonical(value)


@pytest.mark.parametrize("value", [10**400, -(10**400)])
def test_an_integer_beyond_every_float_is_refused_where_a_number_is_wanted(value: int) -> None:
    with pytest.raises(SpecError, match="epsilon of Budget must be a finite number"):
        Budget(epsilon=value, delta=1e-6)
    text = spec.to_json(Budget(epsilon=7.0, delta=1e-6)).replace(":7,", f":{value},")
    with pytest.raises(SpecError, match="epsilon of Budget must be a finite number"):
        spec.from_json(text)


def test_keys_are_sorted_and_nothing_is_spaced() -> None:
    data = {"b": [1, 2.5, None], "a": {"z": True, "y": "é\n\u000f€"}}
    assert canonical(data) == '{"a":{"y":"é\\n\\u000f€","z":true},"b":[1,2.5,null]}'


def our_kinds() -> dict[str, type]:
    """Every kind, those of the questions included."""
    for facts in QUESTIONS.values():
        for planner in facts.planners.values():
            importlib.import_module(planner.partition(":")[0])
    return {kind: cls for kind, cls in kinds().items() if cls.__module__.startswith("sfumato.")}


def test_every_registered_kind_has_an_example() -> None:
    """A new kind enters the list of examples, and with it every check below."""
    assert EXAMPLES.keys() == our_kinds().keys(), "add it to EXAMPLES (tests/unit/test_spec.py)"
    for kind, example in EXAMPLES.items():
        assert kind_of(example) == kind


@pytest.mark.parametrize("kind", sorted(EXAMPLES))
def test_every_kind_survives_the_way_to_json_and_back(kind: str) -> None:
    example = EXAMPLES[kind]
    again = from_json(to_json(example))
    assert type(again) is kinds()[kind]
    assert again == example
    assert to_json(again) == to_json(example)
    assert digest(again) == digest(example)


@pytest.mark.parametrize("kind", sorted(EXAMPLES))
def test_every_kind_is_canonical_json_in_this_format(kind: str) -> None:
    text = to_json(EXAMPLES[kind])
    data = json.loads(text)
    assert (data["kind"], data["sfumato"]) == (kind, 1)
    assert canonical(data) == text
    assert digest(EXAMPLES[kind]) == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("kind", sorted(EXAMPLES))
def test_every_kind_is_frozen_and_hashable(kind: str) -> None:
    example = EXAMPLES[kind]
    assert hash(example) == hash(from_json(to_json(example)))
    for field in dataclasses.fields(example):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(example, field.name, getattr(example, field.name))
    with pytest.raises((AttributeError, TypeError)):
        example.something_else = 1


@pytest.mark.parametrize("kind", sorted(EXAMPLES))
def test_every_kind_refuses_an_unknown_field_and_a_missing_one(kind: str) -> None:
    data = json.loads(to_json(EXAMPLES[kind]))
    with pytest.raises(SpecError, match="colour"):
        from_json(json.dumps({**data, "colour": 1}))
    for name in data.keys() - {"kind", "sfumato"}:
        with pytest.raises(SpecError, match=name):
            from_json(json.dumps({key: item for key, item in data.items() if key != name}))


@pytest.mark.parametrize("kind", sorted(EXAMPLES))
@pytest.mark.parametrize("wrong", [[None], {}], ids=["list", "object"])
def test_every_field_of_every_kind_refuses_a_wrong_type(kind: str, wrong: object) -> None:
    data = json.loads(to_json(EXAMPLES[kind]))
    for name in data.keys() - {"kind", "sfumato"}:
        with pytest.raises(SpecError):
            from_json(json.dumps({**data, name: wrong}))


@pytest.mark.parametrize("kind", sorted(EXAMPLES))
def test_a_whole_number_field_refuses_booleans_fractions_and_strings(kind: str) -> None:
    example = EXAMPLES[kind]
    for field in dataclasses.fields(example):
        if type(getattr(example, field.name)) is not int:
            continue
        for wrong in (True, 2.5, 2.0, "2"):
            with pytest.raises(SpecError, match=field.name):
                dataclasses.replace(example, **{field.name: wrong})


def test_a_real_field_refuses_booleans_and_strings_but_takes_whole_numbers() -> None:
    assert NoiseAtRelease(noise="gaussian", scale=2) == NoiseAtRelease(noise="gaussian", scale=2.0)
    assert to_json(NoiseAtRelease(noise="gaussian", scale=2)) == to_json(
        NoiseAtRelease(noise="gaussian", scale=2.0)
    )
    for wrong in (True, "2", None):
        with pytest.raises(SpecError, match="scale"):
            dataclasses.replace(EXAMPLES["noise_at_release"], scale=wrong)


def test_a_choice_refuses_what_is_not_listed() -> None:
    with pytest.raises(SpecError, match="noise"):
        dataclasses.replace(EXAMPLES["additive_loss"], noise="cauchy")


def test_a_part_must_be_a_spec() -> None:
    for wrong in (None, 1, "no_noise", object()):
        with pytest.raises(SpecError, match="mechanism"):
            dataclasses.replace(EXAMPLES["task"], mechanism=wrong)


@pytest.mark.parametrize("kind", ["", "count", "Task", None, 1, ["task"]])
def test_an_unknown_kind_is_refused_with_the_kinds_there_are(kind: object) -> None:
    with pytest.raises(SpecError, match="count_sketch"):
        from_json(json.dumps({"sfumato": 1, "kind": kind}))


@pytest.mark.parametrize("part", ["sketch", "mechanism", "aggregation"])
def test_a_part_of_another_kind_than_its_place_asks_for_is_refused(part: str) -> None:
    """Only the part's own kinds fit: a sketch is not a mechanism, and a budget is neither."""
    fitting = {"sketch": "one_hot", "mechanism": "no_noise", "aggregation": "plain"}
    for kind in {*fitting.values(), "budget", "task"} - {fitting[part]}:
        with pytest.raises(SpecError, match=part):
            dataclasses.replace(EXAMPLES["task"], **{part: EXAMPLES[kind]})


def test_an_unknown_kind_inside_a_spec_is_refused() -> None:
    data = json.loads(to_json(EXAMPLES["task"]))
    with pytest.raises(SpecError, match="count_min"):
        from_json(json.dumps({**data, "sketch": {"kind": "count_min"}}))


@pytest.mark.parametrize("number", [0, 2, "1", None])
def test_another_format_is_refused(number: object) -> None:
    data = json.loads(to_json(EXAMPLES["one_hot"]))
    with pytest.raises(SpecError, match="sfumato"):
        from_json(json.dumps({**data, "sfumato": number}))


@pytest.mark.parametrize("text", ["", "{", "[]", "1", "null", '"one_hot"', "{}"])
def test_what_is_not_a_spec_is_refused(text: str) -> None:
    with pytest.raises(SpecError):
        from_json(text)


def test_what_is_not_registered_is_not_a_spec() -> None:
    with pytest.raises(SpecError, match="not a registered kind"):
        kind_of(object())


def test_a_kind_has_one_meaning() -> None:
    with pytest.raises(SpecError, match="one meaning"):

        @spec.spec("one_hot")
        class Another:
            size: int

    assert kinds()["one_hot"] is OneHot


def test_the_registry_cannot_be_written_to() -> None:
    with pytest.raises(TypeError):
        kinds()["mine"] = OneHot  # type: ignore[index]  # that is the point


def test_digests_stay_what_they_are() -> None:
    """A digest that changes is another task: old reports would be refused. See `spec.FORMAT`."""
    assert digest(CountSketch(rows=5, width=64, seed=1)) == (
        hashlib.sha256(
            b'{"bucket_round":0,"kind":"count_sketch","rows":5,"seed":1,"sfumato":1,'
            b'"sign_round":0,"width":64}'
        ).hexdigest()
    )
    assert digest(NoiseAtRelease(noise="gaussian", scale=2.0)) == (
        hashlib.sha256(
            b'{"kind":"noise_at_release","noise":"gaussian","scale":2,"sfumato":1}'
        ).hexdigest()
    )


@given(
    rows=st.integers(1, 2**53 - 1),
    width=st.integers(2, 2**31),
    seed=st.integers(0, 2**53 - 1),
    rounds=st.tuples(st.integers(0, 2**53 - 1), st.integers(0, 2**53 - 1)),
)
def test_any_count_sketch_survives_the_way_to_json_and_back(
    rows: int, width: int, seed: int, rounds: tuple[int, int]
) -> None:
    sketch = CountSketch(
        rows=rows, width=width, seed=seed, bucket_round=rounds[0], sign_round=rounds[1]
    )
    assert from_json(to_json(sketch)) == sketch


@given(st.floats(1e-300, 1e300), st.text(st.characters(codec="utf-8")))
def test_any_number_and_any_text_survive_the_way_to_json_and_back(number: float, text: str) -> None:
    loss = AdditiveLoss(noise="laplace", scale=number, l1=number, l2=number, unit_cells=0)
    assert from_json(to_json(loss)) == loss
    task = dataclasses.replace(EXAMPLES["task"], cohort=text)
    assert from_json(to_json(task)) == task


def test_a_new_key_does_not_change_the_digest_of_a_stored_study() -> None:
    study = Study(question="heavy_hitters", trust="central", epsilon=None)
    stored = "62ebcbf40ca84d908a0d7a9d62f879564aef18fbab4a81637d6b238cf24861bf"
    assert digest(study) == stored, "make the field with `later` (study.py)"


def test_a_field_that_came_later_is_silent_at_its_default() -> None:
    """So that digests of specs from before stay; and one spec has one text."""
    study = Study(question="heavy_hitters", trust="central", epsilon=None)
    text = spec.to_json(study)
    assert not any(
        name in text
        for name in ("masked", "count", "failure_probability", "repetitions", "sampling_threshold")
    )
    assert spec.from_json(text) == study
    assert '"masked":true' in spec.to_json(dataclasses.replace(study, masked=True))
    assert spec.from_json(spec.to_json(dataclasses.replace(study, masked=True))).masked
    with pytest.raises(SpecError, match=r"differs in \['masked'\]"):
        spec.from_json(text.replace('"kind"', '"masked":false,"kind"'))


@pytest.mark.parametrize(
    ("name", "value"), [("rows", 5), ("width", 64), ("failure_probability", 0.01)]
)
def test_sizes_of_a_study_are_silent_unless_given(name: str, value: float) -> None:
    study = Study(question="frequencies", trust="central", epsilon=None)
    text = spec.to_json(study)
    assert name not in text
    change: Any = {name: value}
    other = dataclasses.replace(study, **change)
    assert spec.from_json(spec.to_json(other)) == other != study
    assert other.to_dict() == {**study.to_dict(), name: value}


def test_a_wrong_type_is_named_in_words_and_a_similar_value_suggested() -> None:
    keys: Any = {"question": "frequencies", "trust": "Central", "epsilon": 1.0}
    with pytest.raises(SpecError, match="trust of Study must be local, secure or central") as one:
        Study.from_mapping(keys)
    assert one.value.hint == "did you mean central?"
    with pytest.raises(SpecError, match="devices of Study must be a whole number; got 'many'"):
        Study.from_mapping(keys | {"trust": "central", "devices": "many"})
    with pytest.raises(SpecError, match="unknown key devics") as other:
        Study.from_mapping(keys | {"devics": 3})
    assert other.value.hint == "did you mean devices?"
    with pytest.raises(SpecError, match="unknown key zebra") as neither:
        Study.from_mapping(keys | {"zebra": "red"})
    assert "the keys are question, trust" in str(neither.value.hint)


def test_bounds_pass_what_is_within_and_what_is_not_set() -> None:
    spec.require.at_least(1, rows=1, width=None)
    spec.require.above(0, clip=1e-300, error=None)
    spec.require.within(0, spec.LARGEST_INTEGER, seed=0, round=spec.LARGEST_INTEGER, other=None)


@pytest.mark.parametrize(
    ("check", "sentence"),
    [
        (lambda: spec.require.at_least(1, rows=1, width=0), "width must be at least 1; got 0"),
        (lambda: spec.require.at_least(0, noise=math.nan), "noise must be at least 0; got nan"),
        (lambda: spec.require.above(0, clip=0.0), "clip must be above 0; got 0.0"),
        (lambda: spec.require.within(2, 62, bits=63), "bits must be 2 to 62; got 63"),
        (lambda: spec.require.within(1, 1 << 31, width=0), r"width must be 1 to 2\*\*31; got 0"),
        (
            lambda: spec.require.within(0, spec.LARGEST_INTEGER, seed=-1),
            r"seed must be 0 to 2\*\*53 - 1; got -1",
        ),
        (lambda: spec.require.within(0, 1, share=math.nan), "share must be 0 to 1; got nan"),
    ],
)
def test_a_value_out_of_bounds_is_named(check: Callable[[], None], sentence: str) -> None:
    with pytest.raises(SpecError, match=f"^{sentence}$"):
        check()


def test_bounds_raise_the_error_that_they_are_given() -> None:
    with pytest.raises(StudyError, match=r"training\.cohort must be at least 1; got 0"):
        spec.Requirement(StudyError).at_least(1, **{"training.cohort": 0})
