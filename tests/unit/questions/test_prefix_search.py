"""The search by prefixes: its tasks, its words, its cost, and what it refuses."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import cache
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from checks import SEED, assert_binomial
from sfumato import simulate
from sfumato.errors import BudgetError, ImpossibleError, SpecError, StudyError
from sfumato.flow import secure_sum
from sfumato.flow.accumulator import Batch
from sfumato.flow.campaign import run
from sfumato.flow.release import NoisedSum
from sfumato.flow.report import report_bytes
from sfumato.flow.secure_sum import SecureSum
from sfumato.flow.task import Task
from sfumato.kernels import Decode
from sfumato.privacy import (
    Budget,
    Ledger,
    NoiseAtRelease,
    NoiseInShares,
    NoNoise,
    SeededRng,
    epsilon_of,
)
from sfumato.questions.prefix_search import plan as prefix_plan
from sfumato.questions.prefix_search.design import (
    FoundWords,
    PrefixCampaign,
    PrefixDesign,
)
from sfumato.questions.prefix_search.plan import predict
from sfumato.questions.prefix_search.plan import sized as planned
from sfumato.questions.question import EVERYBODY
from sfumato.sketch import CountSketch, DecodedRounds, OneHot
from sfumato.sketch.absent import absent_limit
from sfumato.sketch.words import BYTES, Codes, codes_of, endings, extend
from sfumato.spec import from_json, to_json
from sfumato.study import Study

I64 = npt.NDArray[np.int64]

LETTERS, LENGTH, LONGER = "abcdefgh", 6, 8
DEVICES, EPSILON, DELTA = 20_000, 1.0, 1e-6
SECURE = SecureSum(corrupt=0.1, dropout=0.05)


def exact(**fields: Any) -> PrefixDesign:
    standard: dict[str, Any] = {
        "alphabet": LETTERS,
        "lengths": (2, 4, LENGTH),
        "devices": DEVICES,
        "rows": 5,
        "width": 1 << 12,
        "seed": SEED,
        "mechanism": NoNoise(),
        "secure": None,
    }
    return PrefixDesign(**{**standard, **fields})


@cache
def sized(secure: SecureSum | None) -> PrefixDesign:
    return planned(
        devices=DEVICES,
        length=LONGER,
        bytes_per_round=16_384,
        epsilon=EPSILON,
        delta=DELTA,
        secure=secure,
        alphabet=LETTERS,
        seed=SEED,
        most_candidates=100_000,
    )


def words_and_counts(counts: dict[str, int], length: int) -> tuple[Codes, I64]:
    codes, fits = codes_of(pa.array(list(counts)), LETTERS, length)
    return codes[fits], np.array(list(counts.values()), dtype=np.int64)[fits]


def answer(design: PrefixDesign, task: Task, counts: dict[str, int], devices: int) -> NoisedSum:
    """The answer of `devices` devices to a task, with `counts` holders of each word."""
    codes, weights = words_and_counts(counts, design.length)
    level = design.tasks().index(task)
    table = task.sketch.encode(design.prefixes(level, codes), weights)
    rng = SeededRng(SEED, level)
    total = task.mechanism.at_device(table, devices=devices, rng=rng)
    return NoisedSum(task, task.mechanism.at_release(total, count=devices, rng=rng), devices)


def test_bytes_that_are_no_text_are_never_listed() -> None:
    """Whatever the noise is: a table in which every cell is full lists every character of a byte,
    and none of the 128 bytes that no text of one byte has."""
    design = exact(alphabet=BYTES, lengths=(1,), width=1 << 16)
    campaign = PrefixCampaign(design)
    task = campaign.next_task()
    assert task is not None
    assert isinstance(task.sketch, CountSketch | OneHot)  # `design` has no other
    every = design.prefixes(0, extend(np.empty((1, 0), dtype=np.uint16), 1, design.radix))
    full = task.sketch.encode(every, np.full(every.size, 1_000))
    campaign.absorb(NoisedSum(task, full, 255_000))
    items = campaign.heavy_hitters().items.to_pylist()
    assert sorted(items) == [chr(code) for code in range(1, 128)]


def search(design: PrefixDesign, counts: dict[str, int], devices: int = DEVICES) -> FoundWords:
    campaign = PrefixCampaign(design)
    while (task := campaign.next_task()) is not None:
        campaign.absorb(answer(design, task, counts, devices))
    return campaign.heavy_hitters()


@cache
def synthetic_words(devices: int) -> dict[str, int]:
    """Random words of 1 to 8 letters: 120 with shares of rank^-0.5, 40 that about 25 devices hold,
    and 4,000 rare ones, for a fifth of the devices."""
    rng = np.random.default_rng(SEED)
    lengths = rng.integers(1, LONGER + 1, size=8000)
    letters = rng.choice(list(LETTERS), size=(8000, LONGER))
    strings = ["".join(row[:length]) for row, length in zip(letters, lengths, strict=True)]
    words = list(dict.fromkeys(strings))[:4160]
    common = np.arange(1, 121) ** -0.5
    shares = np.r_[0.75 * common / common.sum(), np.full(40, 0.05 / 40), np.full(4000, 0.2 / 4000)]
    return dict(zip(words, rng.multinomial(devices, shares).tolist(), strict=True))


# --- candidates


def test_extensions_are_all_endings_with_padding_at_the_end_only() -> None:
    everything = {
        row for row in itertools.product(range(4), repeat=3) if row[0] and (row[1] or not row[2])
    }
    whole = extend(np.empty((1, 0), dtype=np.uint16), 3, 4)
    assert set(map(tuple, whole.tolist())) == everything
    assert len(whole) == len(everything) == endings(3, 4) - 1  # without the empty word
    in_steps = extend(extend(np.empty((1, 0), dtype=np.uint16), 1, 4), 2, 4)
    assert np.array_equal(in_steps, whole)


def test_a_word_that_has_ended_stays_as_it_is() -> None:
    rows = np.array([[1, 0], [3, 2]], dtype=np.uint16)
    longer = extend(rows, 2, 4)
    assert longer[0].tolist() == [1, 0, 0, 0]
    assert len(longer) == 1 + endings(2, 4)
    assert rows.tolist() == [[1, 0], [3, 2]]


# --- tasks


def test_levels_ask_the_same_devices_for_other_tables() -> None:
    design = exact()
    tasks = design.tasks()
    assert [type(task.sketch) for task in tasks] == [OneHot, OneHot, CountSketch]
    assert tasks[0].sketch == OneHot(categories=81)
    assert len({task.id for task in tasks}) == 3
    assert {(task.campaign, task.cohort) for task in tasks} == {(tasks[0].campaign, EVERYBODY)}
    narrow = exact(width=16).tasks()
    rounds = [(task.sketch.bucket_round, task.sketch.sign_round) for task in narrow]  # type: ignore[attr-defined]  # count sketches, since nothing fits 80 cells
    assert rounds == [(0, 0), (1, 1), (2, 2)]
    assert len({task.id for task in narrow}) == 3


def test_values_are_the_prefix_and_nothing_else() -> None:
    design = exact()
    codes, fits = codes_of(pa.array(["abcdef", "abcdgh", "ab", "b"]), LETTERS, LENGTH)
    assert fits.all()
    assert design.prefixes(0, codes).tolist() == [11, 11, 11, 18]  # in base nine
    assert design.prefixes(1, codes).tolist() == [922, 922, 891, 1458]
    whole = design.prefixes(2, codes)
    assert np.unique(whole).size == 4
    sketch = design.sketch(2)
    assert sketch.estimate(sketch.encode(whole, np.array([5, 6, 7, 8])), whole).tolist() == [
        *(5, 6, 7, 8)
    ]


def test_a_design_survives_json() -> None:
    for design in (exact(), sized(None), sized(SECURE)):
        assert from_json(to_json(design)) == design


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"lengths": ()}, "must not be empty"),
        ({"lengths": (2, 2)}, "increase"),
        ({"lengths": (0, 2)}, "increase"),
        ({"alphabet": "aa"}, "once"),
        ({"devices": 0}, "devices"),
        ({"width": 1}, "width"),
        ({"false_prefixes": 0.0}, "false_prefixes"),
        ({"most_candidates": 50}, "most_candidates"),
        ({"mechanism": NoiseInShares(scale=3.0, survivors=9)}, "secure"),
        ({"mechanism": NoiseAtRelease(noise="gaussian", scale=3.0), "secure": SECURE}, "shares"),
    ],
    ids=str,
)
def test_a_design_that_cannot_be_is_refused(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(SpecError, match=why):
        exact(**wrong)


# --- without noise


@pytest.mark.parametrize("width", [400, 1 << 12], ids=["two sketches", "one sketch"])
def test_without_noise_every_word_is_found_with_its_count(width: int) -> None:
    """With so few words, any of a thousand candidates collides with them in eight of its fifteen
    rows with probability 1e-7: counts are exact."""
    counts = {"a": 900, "ab": 5, "abc": 70, "abcdef": 31, "abcdeg": 1, "h": 3, "hhhhhh": 400}
    words = search(exact(rows=15, width=width), counts)
    assert words.items.to_pylist() == sorted(counts, key=lambda word: -counts[word])
    assert words.counts.tolist() == sorted(counts.values(), reverse=True)
    assert (words.detectable(DEVICES), words.left_out, words.respondents) == (1.0, 0, DEVICES)


def test_words_are_cut_and_those_with_other_characters_are_not_sent() -> None:
    counts = {"abcdefgh": 40, "abcdefaa": 2, "bad": 9, "zoo": 500, "naïve": 300, "": 20}
    words = search(exact(), counts)
    assert dict(zip(words.items.to_pylist(), words.counts.tolist(), strict=True)) == {
        "abcdef": 42,
        "bad": 9,
    }


def test_too_many_prefixes_are_cut_to_the_most_common_and_counted() -> None:
    """Three of eight prefixes can be extended: each by 73 endings, with room for 219."""
    counts = {f"{letter}abc": 10 * (rank + 1) for rank, letter in enumerate(LETTERS)}
    design = exact(lengths=(2, 4), most_candidates=3 * endings(2, len(LETTERS) + 1))
    words = search(design, counts)
    assert words.items.to_pylist() == ["habc", "gabc", "fabc"]
    assert words.left_out == 5
    assert words.candidates == design.most_candidates
    assert (
        words.detectable(DEVICES) > 60
    )  # a word as common as the rarest of the three may be left out


def test_a_search_ends_when_nothing_is_left() -> None:
    design = exact()
    campaign = PrefixCampaign(design)
    with pytest.raises(SpecError, match="all 3 levels"):
        campaign.heavy_hitters()
    campaign.absorb(answer(design, design.task(0), {}, 50))
    assert campaign.next_task() is None
    words = campaign.heavy_hitters()
    assert (len(words), words.respondents, words.candidates) == (0, 50, 72)
    assert words.items.type == pa.string()


def test_a_campaign_refuses_an_answer_it_did_not_ask_for() -> None:
    design, counts = exact(), {"abcdef": 10}
    campaign = PrefixCampaign(design)
    answers = [answer(design, task, counts, 10) for task in design.tasks()]
    other = replace(answers[0].task, cohort="somebody else")
    for wrong in (answers[1], NoisedSum(other, answers[0].table, 10)):
        with pytest.raises(SpecError, match="the answer to its last task"):
            campaign.absorb(wrong)
    for right in answers:
        assert campaign.next_task() == right.task
        campaign.absorb(right)
        with pytest.raises(SpecError, match="the answer to its last task"):
            campaign.absorb(right)
    assert campaign.heavy_hitters().items.to_pylist() == ["abcdef"]


# --- with noise


@pytest.mark.parametrize("secure", [None, SECURE], ids=["central", "secure"])
def test_common_words_are_found_and_others_are_not_made_up(secure: SecureSum | None) -> None:
    """False alarm below 1e-6. Found: each word above the detectable count is missed with
    probability 5% at most, so more than a fifth of 80 with 4e-7. Not made up: some false word is
    listed with probability 5%, so four of them with 0.05⁴/4!. Counts: ten normal errors of more
    than six deviations. The negative control is in it: of words at half the detectable count fewer
    are found, so a count stated too low would be caught; that of false words is below.
    """
    design = sized(secure)
    answering = DEVICES if secure is None else round(0.95 * DEVICES)
    counts = synthetic_words(answering)
    words = search(design, counts, answering)
    listed = dict(zip(words.items.to_pylist(), words.counts.tolist(), strict=True))
    above = [word for word, count in counts.items() if count >= words.detectable(answering)]
    below = [
        w for w, count in counts.items() if 1 / 3 <= count / words.detectable(answering) <= 1 / 2
    ]
    assert len(above) >= 80
    assert len(below) >= 10
    assert sum(word in listed for word in above) >= 0.8 * len(above)
    assert sum(word in listed for word in below) < 0.8 * len(below)
    assert sum(counts.get(word, 0) == 0 for word in listed) <= 3
    assert words.respondents == answering
    assert words.candidates <= design.most_candidates
    for rank in range(10):
        word, error = words.items[rank].as_py(), words.standard_error[rank]
        assert abs(words.counts[rank] - counts[word]) <= 6 * error
    assert (np.diff(words.counts) <= 0).all()


@pytest.mark.parametrize("secure", [None, SECURE], ids=["central", "secure"])
def test_all_levels_together_cost_epsilon(secure: SecureSum | None) -> None:
    design = sized(secure)
    spent = epsilon_of([task.loss for task in design.tasks()], DELTA)
    assert 0.95 * EPSILON <= spent <= EPSILON
    assert isinstance(design.mechanism, NoiseAtRelease | NoiseInShares)
    quieter = replace(design, mechanism=replace(design.mechanism, scale=design.mechanism.scale / 2))
    assert epsilon_of([task.loss for task in quieter.tasks()], DELTA) > EPSILON


def test_the_ledger_lets_one_search_through_and_no_second_one() -> None:
    design, counts = sized(None), synthetic_words(DEVICES)
    ledger = Ledger(Budget(epsilon=EPSILON, delta=DELTA))

    def gather(task: Task) -> Batch:
        codes, weights = words_and_counts(counts, LONGER)
        level = design.tasks().index(task)
        table = task.sketch.encode(design.prefixes(level, codes), weights)
        return Batch(task.id, table, DEVICES)

    def search(campaign: PrefixCampaign) -> None:
        rng, charge_of = SeededRng(SEED), design.charge_of
        run(campaign, gather, ledger=ledger, rng=rng, charge_of=charge_of)

    campaign = PrefixCampaign(design)
    search(campaign)
    assert len(ledger.entries()) == design.rounds
    assert len(campaign.heavy_hitters()) > 0
    with pytest.raises(BudgetError):
        search(PrefixCampaign(design))


# --- absent items


def crowded() -> tuple[DecodedRounds, float]:
    """A table with noise and a few items, and the error of an absent one."""
    sketch = CountSketch(rows=5, width=512, seed=SEED)
    noise = np.random.default_rng(SEED).normal(0, 10, size=sketch.shape)
    table = sketch.encode(np.arange(40), np.full(40, 120)) + np.rint(noise).astype(np.int64)
    rounds = DecodedRounds.of([(sketch, table)])
    return rounds, float(np.sqrt(np.mean(rounds.estimate(rounds.placebos(), decode="mean") ** 2)))


DRAWS, RATE = 1 << 20, 1e-3


@pytest.mark.parametrize("decode", ["mean", "median"])
def test_absent_items_are_read_above_the_limit_at_the_stated_rate(decode: Decode) -> None:
    """False alarm 1e-6 (exact binomial). Cells are whole, and so are medians: what is read as the
    limit itself may make up the rate. Power: half as many again are missed with 1e-6 at most."""
    rounds, _ = crowded()
    limit = absent_limit(rounds.tables[0], decode, RATE)
    read = rounds.estimate(rounds.placebos(DRAWS), decode=decode)
    if decode == "mean":
        assert_binomial(int((read > limit).sum()), DRAWS, RATE)
    else:
        assert_binomial(max(int((read > limit).sum()), round(RATE * DRAWS)), DRAWS, RATE)
        assert_binomial(min(int((read >= limit).sum()), round(RATE * DRAWS)), DRAWS, RATE)


def test_a_normal_limit_lets_more_pass() -> None:  # the negative control
    rounds, error = crowded()
    limit = -NormalDist().inv_cdf(RATE) * error
    read = rounds.estimate(rounds.placebos(DRAWS), decode="mean")
    with pytest.raises(AssertionError, match="successes"):
        assert_binomial(int((read > limit).sum()), DRAWS, RATE)


def test_an_empty_table_and_an_even_chance_have_no_limit() -> None:
    rounds, _ = crowded()
    assert absent_limit(np.zeros((5, 16)), "mean", 1e-3) == 0
    assert absent_limit(rounds.tables[0], "median", 0.5) == 0


# --- sizing


@pytest.mark.parametrize("secure", [None, SECURE], ids=["central", "secure"])
def test_a_sized_search_keeps_to_its_bytes_and_reaches_the_whole_word(
    secure: SecureSum | None,
) -> None:
    design = sized(secure)
    assert design.length == LONGER
    assert endings(design.lengths[0], design.radix) <= design.most_candidates / 8
    assert all(task.message_bytes <= 16_384 for task in design.tasks())
    wider = replace(design, width=design.width + design.width // 100)
    assert max(task.message_bytes for task in wider.tasks()) > 16_384
    parameters = design.parameters()
    assert parameters["lengths"] == list(design.lengths)
    assert parameters["rounds"] == design.rounds == len(design.tasks())
    assert ("neighbours" in parameters) == (secure is not None)


def test_what_is_predicted_is_weighed_task_by_task() -> None:
    central, secure = predict(sized(None)), predict(sized(SECURE))
    assert central["bytes_per_device"] == sum(map(report_bytes, sized(None).tasks()))
    up, down = zip(*map(secure_sum.bytes_of, sized(SECURE).tasks()), strict=True)
    assert (secure["bytes_per_device"], secure["bytes_down"]) == (sum(up), sum(down))
    assert central["rounds"] == sized(None).rounds


def test_without_collisions_the_prediction_is_what_a_run_states() -> None:
    """One cell per word: the only error is the noise, and both use its law."""
    design = exact(lengths=(2,), mechanism=NoiseAtRelease(noise="gaussian", scale=9.0))
    words = search(design, {"ab": 500, "h": 300})
    prediction = predict(design, answering=DEVICES)
    assert prediction["detectable"] == words.detectable(DEVICES)
    assert prediction["standard_error"] == words.standard_error[0] == 9.0
    assert prediction["assumes"] == "words of the alphabet, cut to 2 characters"
    fewer = predict(design, answering=DEVICES * 4 // 5)  # holders drop out by chance
    assert fewer["detectable"] > 1.25 * prediction["detectable"]


def test_collisions_make_the_predicted_error_larger() -> None:
    noise = NoiseAtRelease(noise="gaussian", scale=9.0)
    errors = [
        predict(exact(width=width, mechanism=noise))["standard_error"]
        for width in (1 << 7, 1 << 9, 1 << 12)
    ]
    assert errors[0] > errors[1] > errors[2] > 9.0 / math.sqrt(5)


def test_the_smaller_noise_is_chosen() -> None:
    few = {"devices": 1000, "length": 2, "alphabet": "ab", "bytes_per_round": 4096, "secure": None}
    short = planned(epsilon=1.0, delta=1e-6, **few)  # type: ignore[arg-type]  # a dict of keywords
    assert isinstance(short.mechanism, NoiseAtRelease)
    assert (short.rounds, short.mechanism.noise) == (1, "laplace")
    assert planned(epsilon=None, delta=0.0, **few).mechanism == NoNoise()  # type: ignore[arg-type]  # as above
    assert sized(None).mechanism.noise == "gaussian"  # type: ignore[attr-defined]  # a guarantee needs noise


@pytest.mark.parametrize(
    ("wrong", "error", "why"),
    [
        ({"items_per_device": 2}, StudyError, "one word per device.*got items_per_device = 2"),
        ({"epsilon": 0.0}, StudyError, "epsilon"),
        ({"epsilon": -1.0, "secure": SECURE}, StudyError, "epsilon"),
        ({"delta": 1.0}, StudyError, "delta"),
        ({"delta": 0.0, "secure": SECURE}, ImpossibleError, "delta above 0"),
        ({"devices": 0}, StudyError, "devices"),
        ({"bytes_per_round": 90}, ImpossibleError, "at least 1"),
        ({"length": 0}, SpecError, "length"),
    ],
    ids=str,
)
def test_a_search_that_cannot_be_sized_is_refused(
    wrong: dict[str, Any], error: type[Exception], why: str
) -> None:
    options: dict[str, Any] = {
        "devices": DEVICES,
        "length": LENGTH,
        "bytes_per_round": 16_384,
        "epsilon": EPSILON,
        "delta": DELTA,
        "secure": None,
        "alphabet": LETTERS,
    }
    with pytest.raises(error, match=why):
        planned(**{**options, **wrong})


def test_results_do_not_print_words() -> None:
    design, counts = exact(), {"hagbad": 77}
    campaign = PrefixCampaign(design)
    campaign.absorb(answer(design, design.task(0), counts, 80))
    assert "hag" not in repr(search(design, counts)) + repr(campaign)


def test_too_few_bytes_say_how_many_would_do() -> None:
    study = Study(
        question="heavy_hitters", trust="secure", epsilon=1.0, delta=1e-6, devices=2_000,
        dropout=0.05, word_length=4, bytes_per_device=3_000,
    )  # fmt: skip
    with pytest.raises(ImpossibleError, match="3,000 bytes per device") as caught:
        prefix_plan.plan(study, None)
    assert caught.value.hint is not None
    enough = int(caught.value.hint.split("bytes_per_device to ")[1].split()[0])
    predicted = prefix_plan.plan(replace(study, bytes_per_device=enough), None).predicted
    assert predicted["bytes_per_device"] <= enough


def test_a_search_among_all_texts_says_that_long_ones_are_cut() -> None:
    study = {"question": "heavy_hitters", "trust": "secure", "epsilon": 4.0, "devices": 2_000}
    release = simulate(
        {**study, "word_length": 3, "cohorts": "similar"},
        {"item": ["international"] * 1_500 + ["oak"] * 500},
        seed=SEED,
    )
    assert "int" in release.items.to_pylist()
    assert "items of more than 3 bytes are cut to their first 3" in release.notes
    assert release.plan["predicted"]["assumes"].startswith("any text, cut to 3 bytes")
    assert not any("not sent" in note for note in release.notes)
