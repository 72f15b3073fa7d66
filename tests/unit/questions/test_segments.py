"""Segments: one study with an answer for each, in which a device's segment is part of its value."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import sfumato
from sfumato import CountRelease
from sfumato.errors import DataError, SpecError, StudyError
from sfumato.flow.segments import is_pair, pair
from sfumato.questions.registry import read_release
from sfumato.spec import digest, from_json, to_json
from sfumato.study import Study

TREES = ["oak", "elm", "fir"]
COUNTS = {("en", "oak"): 40, ("en", "elm"): 20, ("fr", "elm"): 30, ("fr", "fir"): 10}
DATA = {
    "item": [item for _, item in COUNTS],
    "segment": [segment for segment, _ in COUNTS],
    "n": list(COUNTS.values()),
}
STUDY: dict[str, Any] = {
    "question": "frequencies",
    "trust": "central",
    "epsilon": float("inf"),
    "segments": ["en", "fr"],
}
TRUSTS: list[dict[str, Any]] = [
    {"trust": "local", "epsilon": 20.0, "algorithm": "direct"},
    {"trust": "local", "epsilon": 20.0, "algorithm": "hashed"},
    {"trust": "central", "algorithm": "sparse"},
    {"trust": "central", "algorithm": "count_sketch", "bytes_per_device": 4_000},
    {"trust": "secure", "dropout": 0.0, "algorithm": "one_hot"},
]


def simulated(**keys: Any) -> CountRelease:
    planned = sfumato.plan({**STUDY, "devices": 100, **keys}, items=TREES)
    release: CountRelease = sfumato.simulate(planned, DATA, count_column="n", seed=1)
    return release


def counts(release: CountRelease) -> dict[tuple[str, str], int]:
    rows = release.frame().to_pylist()
    return {(row["segment"], row["item"]): round(row["count"]) for row in rows}


@pytest.mark.parametrize("keys", TRUSTS, ids=lambda keys: f"{keys['trust']}-{keys['algorithm']}")
def test_every_segment_has_its_counts(keys: dict[str, Any]) -> None:
    """Without noise, or where a lie has a probability below 1e-7 for each of 100 reports. A sketch
    and hashed reports have collisions, of which these few items have none that matter."""
    answer = counts(simulated(**keys))
    assert answer.keys() == {(segment, item) for segment in ("en", "fr") for item in TREES}
    assert {place: count for place, count in answer.items() if count} == COUNTS


def test_answers_are_one_after_another_and_largest_first() -> None:
    release = simulated()
    assert list(counts(release)) == [
        ("en", "oak"), ("en", "elm"), ("en", "fir"), ("fr", "elm"), ("fr", "fir"), ("fr", "oak"),
    ]  # fmt: skip
    french = release.of_segment("fr")
    assert french.items.to_pylist() == ["elm", "fir", "oak"]
    assert french.counts.tolist() == [30.0, 10.0, 0.0]
    assert "segment" not in french.frame().column_names
    assert len(french.plot().axes) == 1
    with pytest.raises(SpecError, match="axes of its own"):
        release.plot(ax=french.plot().axes[0])
    assert list(release.by_segment()) == ["en", "fr"]
    assert "\nfr\n  elm" in repr(release)
    with pytest.raises(SpecError, match="one of the study's"):
        release.of_segment("de")


def test_a_release_with_segments_is_read_back_as_it_was() -> None:
    release = simulated(threshold=15.0)
    assert list(counts(release)) == [("en", "oak"), ("en", "elm"), ("fr", "elm")]
    again = read_release(json.loads(release.to_json()))
    assert isinstance(again, CountRelease)
    assert again.frame() == release.frame()
    page = release.export("html").decode()
    assert page.index("<th>en</th>") < page.index("<td>oak</td>") < page.index("<th>fr</th>")
    assert release.export("csv").startswith(b'"segment","item","count"')
    assert [axes.get_title("left") for axes in release.plot().axes] == [
        "en: no differential privacy", "fr: no differential privacy",
    ]  # fmt: skip


def test_a_release_without_segments_has_no_column_for_them() -> None:
    release = sfumato.simulate({**STUDY, "segments": []}, {"item": TREES}, seed=1)
    assert release.segments is None
    assert "segment" not in release.frame().column_names
    assert list(release.by_segment()) == [""]


def test_the_budget_of_a_device_does_not_depend_on_segments() -> None:
    """The noise is that of a study of as many items, and the charge is the same."""
    keys = {**STUDY, "epsilon": 1.0, "devices": 1_000}
    with_segments = sfumato.plan(keys, items=TREES)
    pairs = [f"{segment} {item}" for segment in ("en", "fr") for item in TREES]
    alike = sfumato.plan({**keys, "segments": []}, items=pairs)
    assert with_segments.design == alike.design
    assert with_segments.privacy.epsilon == alike.privacy.epsilon
    assert with_segments.privacy.neighbours.endswith("a value is a segment and an item together")


def test_a_plan_says_how_an_error_compares_with_a_segment() -> None:
    keys = {**STUDY, "trust": "local", "epsilon": 2.0, "devices": 10_000}
    assert "standard_error_share_of_segment" not in sfumato.plan(keys, items=TREES).predicted
    predicted = sfumato.plan({**keys, "segment_shares": [0.8, 0.2]}, items=TREES).predicted
    shares = predicted["standard_error_share_of_segment"]
    assert shares["en"] == pytest.approx(predicted["standard_error"] / 8_000)
    assert shares["fr"] == pytest.approx(predicted["standard_error"] / 2_000)


def test_a_segment_errs_by_the_noise_of_all_devices() -> None:
    """With trust "local", 1/√share times as much as in a study of that segment alone; the tables of
    the two plans differ in size, by which their errors differ within 5% (`GOOD_ENOUGH`)."""
    items = [f"word {number}" for number in range(500)]
    keys = {**STUDY, "trust": "local", "epsilon": 4.0, "algorithm": "hashed"}
    everybody = sfumato.plan({**keys, "devices": 400_000}, items=items).predicted
    alone = sfumato.plan({**keys, "segments": [], "devices": 100_000}, items=items).predicted
    ratio = everybody["standard_error"] / alone["standard_error"]
    assert ratio == pytest.approx(2.0, rel=0.05)


def test_a_simulation_lists_every_item_of_its_data_for_every_segment() -> None:
    release = sfumato.simulate(
        STUDY, {"tree": ["oak", "fir"], "place": ["en", "fr"]}, item_column="tree",
        segment_column="place", seed=1,
    )  # fmt: skip
    assert counts(release) == {
        ("en", "oak"): 1, ("en", "fir"): 0, ("fr", "fir"): 1, ("fr", "oak"): 0,
    }  # fmt: skip


def test_a_segment_that_is_not_listed_is_not_counted() -> None:
    release = sfumato.simulate(
        {**STUDY, "devices": 2}, {"item": ["oak", "oak"], "segment": ["de", "en"]}, seed=1
    )
    assert counts(release) == {("en", "oak"): 1, ("fr", "oak"): 0}


@pytest.mark.parametrize("item", ["oak", "a\tb", "\t", ""])
def test_a_pair_is_split_where_it_was_joined(item: str) -> None:
    release = sfumato.simulate(STUDY, {"item": [item], "segment": ["en"]}, seed=1)
    assert counts(release) == {("en", item): 1, ("fr", item): 0}
    assert pair("en", item) == f"en\t{item}"
    assert is_pair(pair("en", item))


@pytest.mark.parametrize("segment", ["", " en", "e\tn", "e\nn", "x" * 101, None])
def test_a_segment_is_a_short_text_on_one_line(segment: Any) -> None:
    with pytest.raises(SpecError, match="a segment must be") as caught:
        pair(segment, "canary-1")
    assert "canary" not in str(caught.value)
    with pytest.raises((DataError, SpecError)):
        sfumato.simulate(STUDY, {"item": ["oak"], "segment": pa.array([segment])})
    with pytest.raises(SpecError):
        Study.from_mapping({**STUDY, "segments": ["en", segment]})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"segments": ["en"]}, "two or more names"),
        ({"segments": ["en", "en"]}, "each once"),
        ({"segment_shares": [0.5]}, "one number above 0 for each"),
        ({"segment_shares": [0.6, 0.6]}, "at most 1 together"),
        ({"segment_shares": [1.0, 0.0]}, "above 0"),
        ({"segments": [], "segment_shares": [0.5, 0.5]}, "for 0 segments"),
    ],
)
def test_segments_are_checked(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(StudyError, match=message):
        Study.from_mapping({**STUDY, **keys})


def test_a_dictionary_of_any_text_is_crossed() -> None:
    items = pa.array(TREES, type=pa.large_string())
    assert len(sfumato.plan({**STUDY, "devices": 10}, items=items).listed) == 6


def test_segments_are_for_frequencies() -> None:
    words = {"question": "new_words", "trust": "local", "epsilon": 4.0, "devices": 1_000}
    with pytest.raises(StudyError, match="segments has no effect on new_words"):
        sfumato.plan({**words, "segments": ["en", "fr"]})
    with pytest.raises(DataError, match="for studies with segments"):
        sfumato.simulate({**STUDY, "segments": []}, DATA, segment_column="segment")


def test_a_study_without_segments_has_the_digest_that_it_always_had() -> None:
    study = Study.from_mapping({**STUDY, "segments": []})
    assert "segment" not in to_json(study)
    with_segments = Study.from_mapping({**STUDY, "segment_shares": [0.5, 0.25]})
    assert digest(with_segments) != digest(study)
    assert from_json(to_json(with_segments)) == with_segments
    assert Study.from_mapping(json.loads(json.dumps(with_segments.to_dict()))) == with_segments


def test_intervals_are_in_the_order_of_their_items() -> None:
    release = simulated(epsilon=1.0)
    assert np.all((release.low <= release.counts) & (release.counts <= release.high))
