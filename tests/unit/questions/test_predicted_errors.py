"""Plans predict the errors of rare, middle and largest items, devices that do not answer included.

benchmarks/accuracy/plans.py measures these predictions for every question and trust.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from scipy import stats

from sfumato import plan, simulate
from sfumato.questions.frequencies.design import FrequencyDesign
from sfumato.questions.frequencies.plan import reference_law

NAMES = ("standard_error", "standard_error_of_middle", "standard_error_of_largest")
LATIN = "abcdefghijklmnopqrstuvwxyz"
RUNS = 100
FALSE_ALARM = 1e-6


def three(study: dict[str, Any], items: int | None = None) -> list[float]:
    """The predicted errors of rare, middle and largest items."""
    listed = None if items is None else pa.array([str(number) for number in range(items)])
    predicted = plan({"epsilon": 1.0, **study}, items=listed).predicted
    return [predicted[name] for name in NAMES]


def squares_over_prediction() -> float:
    """The sum of squared errors of a largest item that half of its devices report, divided by the
    predicted variance."""
    items, devices = pa.array(["oak", "elm"]), 1_000
    study = {"question": "frequencies", "trust": "central", "epsilon": 20.0, "dropout": 0.5}
    planned = plan({**study, "devices": devices}, items=items)
    counts = np.rint(devices * reference_law(2)).astype(np.int64)
    data = {"item": items, "count": counts}
    total = 0.0
    for seed in range(RUNS):
        release = simulate(planned, data, count_column="count", seed=seed)
        place = release.items.to_pylist().index("oak")
        total += float(release.counts[place] - counts[0]) ** 2
    error: float = planned.predicted["standard_error_of_largest"]
    return total / error**2


def is_within(total: float) -> bool:
    """Whether a sum of squares could come from normal errors of variance one."""
    low, high = stats.chi2.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], RUNS)
    return bool(low < total < high)


@pytest.mark.slow
def test_the_error_of_a_common_item_among_dropouts_is_that_of_a_finite_population() -> None:
    """False alarm 1e-6 (chi-squared; the sample of a thousand devices is nearly normal). Power: a
    binomial variance, 1/(1 − 0.68) = 3.1 times as large, is missed with probability < 1e-2."""
    total = squares_over_prediction()
    assert is_within(total)
    assert not is_within(total * (1 - float(reference_law(2)[0])))  # the negative control


def test_a_pilots_devices_are_missing_from_the_counts() -> None:
    study = {"question": "frequencies", "trust": "central", "devices": 50_000}
    study |= {"target_error": 0.01, "algorithm": "count_sketch", "epsilon": 1.0}
    items = pa.array([str(number) for number in range(5_000)])
    planned = plan(study, items=items)
    assert isinstance(planned.design, FrequencyDesign)
    scale = 50_000 / (50_000 - planned.design.pilot_devices)
    assert scale > 1.1
    share = float(reference_law(5_000)[0])
    sampling = math.sqrt(50_000 * share * (1 - share) * (scale - 1))
    rare, middle, largest = (planned.predicted[name] for name in NAMES)
    assert rare == pytest.approx(middle, rel=0.01)
    assert sampling < largest < math.hypot(sampling, 1.5 * rare)


def test_dropouts_of_a_local_study_increase_its_errors() -> None:
    study = {"question": "frequencies", "trust": "local", "epsilon": 4.0}
    fewer = plan({**study, "devices": 8_000}, items=pa.array(list(LATIN))).predicted
    more = plan({**study, "devices": 10_000, "dropout": 0.2}, items=pa.array(list(LATIN)))
    predicted = more.predicted
    assert predicted["standard_error"] == pytest.approx(1.25 * fewer["standard_error"])
    assert predicted["significant_from"] == pytest.approx(1.25 * fewer["significant_from"])
    share = float(reference_law(26)[0])
    sampling = 10_000 * share * (1 - share) * 0.25
    expected = math.sqrt((1.25 * fewer["standard_error_of_largest"]) ** 2 + sampling)
    assert predicted["standard_error_of_largest"] == pytest.approx(expected)


@pytest.mark.parametrize("algorithm", ["direct", "hashed", "hadamard"])
def test_a_local_plan_says_which_share_its_largest_error_is_for(algorithm: str) -> None:
    """Squared errors grow in proportion to the count, so those of other shares follow."""
    study = {"question": "frequencies", "trust": "local", "epsilon": 4.0, "devices": 8_000}
    predicted = plan({**study, "algorithm": algorithm}, items=pa.array(list(LATIN))).predicted
    law = reference_law(26)
    assert predicted["assumes"] == "counts fall like rank^-1.1"
    assert predicted["share_of_largest"] == pytest.approx(law[0])
    rare, middle, largest = (predicted[name] ** 2 for name in NAMES)
    part = law[13] / predicted["share_of_largest"]
    assert middle == pytest.approx(rare + (largest - rare) * part, rel=1e-9)
    assert middle != pytest.approx(rare, rel=1e-9)


def test_a_count_is_detectable_by_the_error_at_that_count() -> None:
    """Direct responses of those who hold an item vary more than those of others."""
    study = {"question": "frequencies", "trust": "local", "epsilon": 4.0, "devices": 10_000}
    items = pa.array([str(number) for number in range(500)])
    predicted = plan({**study, "algorithm": "direct"}, items=items).predicted
    margin = predicted["detectable_count"] - predicted["significant_from"]
    assert margin > 1.5 * stats.norm.isf(0.05) * predicted["standard_error"]


def test_items_that_devices_send_have_one_error_and_samples_larger_ones_for_larger_counts() -> None:
    study = {"question": "heavy_hitters", "trust": "central", "devices": 10_000}
    errors = three(study)
    assert errors[0] == errors[1] == errors[2]
    planned = plan({**study, "epsilon": 1.0, "algorithm": "invertible_sketch"})
    rate, detectable = planned.predicted["sampling_rate"], planned.predicted["detectable_count"]
    counts = 10_000 * reference_law(10_000)
    rare, middle, largest = (planned.predicted[name] for name in NAMES)
    assert largest**2 - rare**2 == pytest.approx((counts[0] - detectable) * (1 / rate - 1))
    assert rare < middle < largest


def test_a_histogram_of_sketches_has_the_error_of_its_counts() -> None:
    study = {"question": "histogram", "trust": "central", "devices": 20_000}
    names = three({**study, "question": "heavy_hitters", "algorithm": "invertible_sketch"})
    counts = three({**study, "algorithm": "invertible_sketch"})
    assert max(counts) < min(names) / 4


def test_a_search_by_prefixes_counts_the_dropouts() -> None:
    study = {"question": "heavy_hitters", "trust": "secure", "devices": 5_000, "epsilon": 4.0}
    rare, middle, largest = three({**study, "alphabet": LATIN, "word_length": 4})
    assert rare < middle < largest
    share = float(reference_law(5_000)[0])
    sampling = math.sqrt(5_000 * share * (1 - share) / 4)  # a fifth of the devices drops out
    assert sampling < largest < math.hypot(sampling, rare)


def test_the_error_of_new_words_grows_with_their_count() -> None:
    study = {"question": "new_words", "trust": "local", "devices": 20_000, "epsilon": 6.0}
    rare, middle, largest = three(study)
    assert rare < middle < largest
    fewer = three({**study, "devices": 10_000})
    dropout = three({**study, "dropout": 0.5})
    assert dropout[0] > 2 * fewer[0]  # twice the counts, and who answers is random


def test_short_words_have_few_candidates_and_are_detectable_from_fewer_devices() -> None:
    study = {"question": "new_words", "trust": "local", "devices": 20_000, "epsilon": 6.0}
    study |= {"alphabet": LATIN}
    short = plan({**study, "word_length": 4}).predicted
    alone = plan({**study, "word_length": 2}).predicted  # one length
    assert "at most 729 candidates" in alone["assumes"]
    assert alone["detectable_count"] < short["detectable_count"]


@pytest.mark.parametrize("compression", ["fixed", "adapt_norm"])
def test_predictions_for_means_assume_the_same_data_whatever_the_compression(
    compression: str,
) -> None:
    """With as many cells, the noise's share of the budget and the compression are all that differ:
    a tenth of the budget and of the bytes is the pilot's."""
    study = {"question": "mean", "trust": "central", "epsilon": 1.0, "devices": 500}
    study |= {"clip": 1.0, "dimensions": 3_000, "bytes_per_device": 2_000}
    fixed = plan({**study, "compression": "fixed"}).predicted
    predicted = plan({**study, "compression": compression}).predicted
    assert 0.99 < predicted["l2_error"] / fixed["l2_error"] < 1.1
    assert predicted["l2_error_if_all_equal"] > 3 * predicted["l2_error"]


def test_a_mean_has_a_pilot_only_if_that_saves_bytes() -> None:
    study = {"question": "mean", "trust": "secure", "epsilon": 1.0, "devices": 500, "clip": 1.0}
    short = plan({**study, "dimensions": 3_000})
    assert short.parameters["compression"] == "none"
    long = plan({**study, "dimensions": 100_000})
    assert long.parameters["compression"] == "adapt_norm"
    whole = plan({**study, "dimensions": 100_000, "compression": "none"}).predicted
    assert 1.1 * long.predicted["bytes_if_mean_is_zero"] < whole["bytes_per_device"]
    named = plan({**study, "dimensions": 3_000, "compression": "adapt_norm"})
    assert named.parameters["compression"] == "adapt_norm"
