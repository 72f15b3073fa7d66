"""Plans against measurements: every algorithm that could answer a study, on the same devices.

Items follow the law that plans assume, rank^-1.1, and vectors are independent, unless a case says
otherwise; then the error of the most common item is predicted for the share that it has. Emoji
counts from Twitter, where available, are in `shared/data` beside the repository.
Training is left out: it has one algorithm, and its plans predict no error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatch
from multiprocessing import get_context
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from benchmarks.lines import ROOT, Line, Settings, line, markdown
from sfumato import Plan, simulate
from sfumato.flow.release import CountRelease
from sfumato.planning import compare
from sfumato.simulation.population import Population
from sfumato.study import Study

NAME = "plans"
EXPONENT = 1.1  # of the law that plans assume
TOLERANCE = 1.1  # factor by which a prediction may be wrong, and a choice be beaten
SURE = 0.95  # chance of being listed at the detectable count
RUNGS = 9  # counts of planted items, from 0.6 to 1.4 times the detectable count
PLANTED = 0.5  # largest share of the devices that hold planted items
DETECTIONS = 6_000  # trials per rung, if there are enough runs
FEWER = {  # runs of slow algorithms are divided by this
    "count_sketch": 4,
    "invertible_sketch": 3,
    "count_mean": 4,
    "hadamard": 4,
    "adapt_tail": 4,
}
EMOJI = "emoji_counts_twitter.csv.gz"
NORMAL_95 = NormalDist().inv_cdf(0.975)
GROUPS = ("rare", "middle", "largest")
KEYS = dict(
    zip(
        GROUPS,
        ("standard_error", "standard_error_of_middle", "standard_error_of_largest"),
        strict=True,
    )
)

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A study and its devices."""

    name: str
    keys: Mapping[str, Any]
    items: int = 0  # listed by the study; 0 for an open domain
    length: float = 0.0  # of the part that all vectors have in common, in clips
    file: str | None = None  # counts that are not those of the law
    runs: int = 400

    @property
    def study(self) -> Study:
        question, trust = self.name.split("/")[:2]
        return Study.from_mapping({"question": question, "trust": trust, **self.keys})

    @property
    def devices(self) -> int:
        return int(self.keys["devices"])


def _case(name: str, **keys: Any) -> Case:
    own = {key: keys.pop(key) for key in ("items", "length", "file", "runs") if key in keys}
    return Case(name=name, keys={"epsilon": 1.0, **keys}, **own)


LATIN = "abcdefghijklmnopqrstuvwxyz"
CASES = (
    _case("frequencies/central/small", items=100, devices=2_000),
    _case("frequencies/central/large", items=10_000, devices=1_000_000, runs=240),
    _case("frequencies/central/bytes", items=5_000, devices=100_000, bytes_per_device=4_096),
    _case("frequencies/central/target", items=5_000, devices=50_000, target_error=0.01),
    _case(
        "frequencies/central/rounds",
        items=500, devices=20_000, rounds=5, publish="rounds", runs=200,
    ),
    _case("frequencies/central/dropout", items=500, devices=20_000, dropout=0.2),
    _case("frequencies/secure/small", items=200, devices=2_000),
    _case("frequencies/secure/large", items=3_000, devices=30_000, runs=200),
    _case("frequencies/secure/bytes", items=20_000, devices=5_000, bytes_per_device=20_000),
    _case("frequencies/local/small", items=50, devices=20_000, epsilon=2.0, runs=200),
    _case("frequencies/local/large", items=2_000, devices=30_000, epsilon=4.0, runs=100),
    _case(
        "frequencies/local/dropout",
        items=500, devices=10_000, epsilon=4.0, bytes_per_device=60, dropout=0.2, runs=120,
    ),
    _case("heavy_hitters/central/small", devices=10_000),
    _case("heavy_hitters/central/large", devices=200_000, runs=120),
    _case(
        "heavy_hitters/central/bytes",
        devices=30_000, bytes_per_device=20_000, alphabet=LATIN, word_length=6,
    ),
    _case(
        "heavy_hitters/central/masked", devices=5_000, masked=True, alphabet=LATIN, word_length=6
    ),
    _case(
        "heavy_hitters/secure/words",
        devices=9_000, epsilon=2.0, alphabet=LATIN, word_length=6, runs=120,
    ),
    _case("heavy_hitters/secure/text", devices=5_000, epsilon=4.0, word_length=4, runs=120),
    _case("histogram/central/small", devices=20_000, alphabet=LATIN, word_length=6),
    _case("new_words/local/small", devices=20_000, epsilon=6.0, word_length=4, runs=8),
    _case("mean/central/short", devices=1_000, dimensions=200, clip=1.0, runs=100),
    _case("mean/central/long", devices=500, dimensions=3_000, clip=1.0, runs=24),
    _case("mean/central/common", devices=500, dimensions=3_000, clip=1.0, length=0.5, runs=24),
    _case(
        "mean/central/bytes",
        devices=500, dimensions=3_000, clip=1.0, bytes_per_device=2_000, runs=24,
    ),
    _case("mean/secure/long", devices=500, dimensions=3_000, clip=1.0, runs=24),
)  # fmt: skip
REAL = (
    _case("frequencies/central/emoji", file=EMOJI, devices=100_000),
    _case("frequencies/local/emoji", file=EMOJI, devices=30_000, epsilon=4.0, runs=100),
)


@dataclass(slots=True)
class Errors:
    """Sums of squared errors of a group of items, and their number, one pair per run."""

    sums: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    def add(self, errors: F64) -> None:
        errors = errors[np.isfinite(errors)]  # items that are not listed have no estimate
        self.sums.append(float(np.sum(errors**2)))
        self.weights.append(float(errors.size))

    def add_upper_half(self, errors: F64) -> None:
        """Only overestimates, which are half of all errors in a symmetric law; those of items that
        are not listed are underestimates. Of samples of a few devices, which are skewed, this is 5%
        too much."""
        self.sums.append(float(np.sum(errors[errors > 0] ** 2)))
        self.weights.append(errors.size / 2)

    def summary(self) -> dict[str, Any] | None:
        """The root mean square error, with a 95% interval over runs."""
        sums, weights = np.array(self.sums), np.array(self.weights)
        if np.count_nonzero(weights) < 2:
            return None
        mean = sums.sum() / weights.sum()
        spread = NORMAL_95 * math.sqrt(np.sum((sums - mean * weights) ** 2)) / weights.sum()
        interval = [math.sqrt(max(0.0, mean - spread)), math.sqrt(mean + spread)]
        return {"error": math.sqrt(mean), "interval": interval}


def run(settings: Settings) -> Iterator[Line]:
    selection = [case for case in cases(settings.quick) if _may_want(case, settings)]
    jobs = [(case, settings) for case in selection]
    with ProcessPoolExecutor(settings.processes, mp_context=get_context("spawn")) as pool:
        results = map(_job, jobs) if settings.processes == 1 else pool.map(_job, jobs)
        for lines in results:
            yield from lines


def _may_want(case: Case, settings: Settings) -> bool:
    """Whether the pattern is for the study, or for one of its algorithms."""
    study = settings.only.split("/")[:3]
    return fnmatch(case.name, "/".join(study))


def cases(quick: bool = False) -> list[Case]:
    """Every study; missing data has none."""
    if quick:
        return [
            _case("frequencies/central/small", items=40, devices=500, runs=3),
            _case("heavy_hitters/central/small", devices=500, runs=3),
            _case("mean/central/short", devices=50, dimensions=20, clip=1.0, runs=3),
        ]
    return [*CASES, *(case for case in REAL if case.file and _path(case.file).exists())]


def _path(name: str) -> Any:
    return ROOT.parent / "shared" / "data" / name


def _job(job: tuple[Case, Settings]) -> list[Line]:
    return list(measure(*job))


def measure(case: Case, settings: Settings) -> Iterator[Line]:
    """One line for each algorithm that could answer the study, the impossible ones included."""
    comparison = compare(case.study, items=_listed(case))
    place = [each.name for each in (*CASES, *REAL)].index(case.name)
    first = 10_000 * place  # studies do not share their noise
    for each in comparison.alternatives:
        label = f"{case.name}/{each.algorithm}" if each.algorithm else case.name
        if not settings.wants(case.name) and not settings.wants(label):
            continue
        about: dict[str, Any] = {
            "study": case.study.to_dict(),
            "algorithm": each.algorithm or (each.plan.algorithm if each.plan else ""),
            "chosen": each.is_chosen,
            "problem": each.problem,
        }
        sizes = {"devices": case.devices, "items": case.items or None}
        if each.plan is None:
            yield line(NAME, label, settings, sizes=sizes, seeds=[], repetitions=0, **about)
            continue
        runs = settings.repeats or max(2, case.runs // FEWER.get(each.algorithm, 1))
        measured = _measure(case, each.plan, range(first, first + runs))
        yield line(
            NAME,
            label,
            settings,
            sizes=sizes,
            seeds=[first, first + runs - 1],
            repetitions=runs,
            **about,
            reason=comparison.reason if each.is_chosen else "",
            predicted=_predicted(case, each.plan),
            measured=measured,
        )


def _predicted(case: Case, planned: Plan) -> dict[str, float | None]:
    """The numbers of a plan that are measured. Coordinates of a mean have one error for all."""
    numbers = planned.predicted
    is_mean = planned.study.question == "mean"
    predicted = {
        **{
            group: numbers.get(key, numbers["standard_error"] if is_mean else None)
            for group, key in KEYS.items()
        },
        "detectable": numbers.get("detectable_count"),
        "bytes": numbers.get("bytes_if_mean_is_zero", numbers["bytes_per_device"]),
        "most_bytes": numbers["bytes_per_device"],
    }
    assumed = numbers.get("share_of_largest")
    if case.file is None or case.study.trust != "local":  # otherwise all items have one error
        return predicted
    counts = _law(case)[1]
    share = float(counts[0] / counts.sum())
    rare, largest = predicted["rare"] ** 2, predicted["largest"] ** 2
    return predicted | {
        "share_of_largest": share,
        "largest": math.sqrt(rare + (largest - rare) * share / assumed),
        "largest_as_assumed": predicted["largest"],
    }


def _measure(case: Case, planned: Plan, seeds: range) -> dict[str, Any]:
    if case.study.question == "mean":
        return _measure_mean(case, planned, seeds)
    items, counts = _law(case)
    groups = _groups(case, planned, counts)
    errors = {group: Errors() for group in GROUPS}
    population, uploads, significant_from = _population(items, counts), list[int](), math.nan
    for seed in seeds:
        release = simulate(planned, population, seed=seed)
        estimates = _estimates(release, items)
        for group, ranks in groups.items():
            errors[group].add(estimates[ranks] - counts[ranks])
        uploads.append(release.cost.bytes_per_device)
        significant_from = release.plan["parameters"].get("significant_from") or math.nan
    detectable = _detect(case, planned, seeds, significant_from, errors)
    return {
        **{group: errors[group].summary() for group in GROUPS},
        "detectable": detectable,
        "bytes": float(np.mean(uploads)),
    }


def _groups(case: Case, planned: Plan, counts: I64) -> dict[str, I64]:
    """Ranks of similar items: of the whole list, or of the part that a list can find. Rare items of
    a list are planted, since only they have the detectable count."""
    ranks = np.arange(counts.size)
    if case.study.facts.dictionary == "listed":
        rare = ranks[-max(counts.size // 10, 5) :]
        size = counts.size
    else:
        rare = ranks[:0]
        size = int(np.sum(counts >= planned.predicted["detectable_count"]))
    middle = ranks[max(1, round(0.4 * size)) : max(2, round(0.6 * size))]
    return {"rare": rare, "middle": middle, "largest": ranks[:1]}


def _detect(
    case: Case, planned: Plan, seeds: range, significant_from: float, errors: dict[str, Errors]
) -> float | None:
    """The smallest count that is found with a probability of 95%, from planted items; None if too
    few devices could hold them. Errors of planted items of a list are those of rare ones."""
    predicted = planned.predicted
    spread = NormalDist().inv_cdf(SURE) * predicted.get("standard_error", 0.0)
    guess = predicted.get("detectable_count", significant_from + spread)
    if not math.isfinite(guess):
        return None
    rungs = np.unique(np.rint(guess * np.linspace(0.6, 1.4, RUNGS)).astype(np.int64))
    if rungs.sum() > PLANTED * case.devices:
        rungs = rungs[rungs.size // 2 - 1 : rungs.size // 2 + 2]
    copies = int(min(PLANTED * case.devices // rungs.sum(), 20))
    if copies == 0:
        return None
    items, counts = _law(case, planted=np.repeat(rungs, copies))
    places = np.arange(counts.size)[-rungs.size * copies :].reshape(rungs.size, copies)
    population, is_list = _population(items, counts), case.study.facts.dictionary != "listed"
    trials = min(len(seeds), max(2, math.ceil(DETECTIONS / copies)))
    shares = np.zeros(rungs.size)
    rung = int(np.argmin(np.abs(rungs - guess)))
    for seed in seeds[:trials]:
        release = simulate(planned, population, seed=seed)
        estimates = _estimates(release, items, significant=True)
        shares += np.isfinite(estimates[places]).mean(axis=1) / trials
        if is_list:  # the threshold cuts off underestimates only
            errors["rare"].add_upper_half(estimates[places[rung]] - rungs[rung])
    return _crossing(rungs, shares)


def _crossing(rungs: I64, shares: F64) -> float | None:
    """The count at which the share that is found reaches 95%, by monotone interpolation."""
    from scipy.optimize import isotonic_regression

    smooth = isotonic_regression(shares).x
    above = np.flatnonzero(smooth >= SURE)
    if above.size == 0 or above[0] == 0:
        return None
    last = above[0]
    low, high = smooth[last - 1], smooth[last]
    return float(np.interp(SURE, [low, high], rungs[last - 1 : last + 1]))


def _estimates(release: CountRelease, items: pa.Array, *, significant: bool = False) -> F64:
    """The estimate of each item; not a number if it is not listed, or not significant."""
    rows = pc.index_in(items, value_set=release.items).to_numpy(zero_copy_only=False)
    rows = np.nan_to_num(rows, nan=-1).astype(np.int64)
    values = np.r_[np.where(release.significant | (not significant), release.counts, np.nan)]
    return np.where(rows >= 0, np.r_[values, np.nan][rows], np.nan)


def _measure_mean(case: Case, planned: Plan, seeds: range) -> dict[str, Any]:
    vectors = _vectors(case)
    truth = vectors.mean(axis=0)
    order = np.argsort(-np.abs(truth))
    tenth = max(1, truth.size // 10)
    middle = truth.size // 2
    groups = {
        "rare": order[-tenth:],
        "middle": order[middle - tenth // 2 : middle + tenth // 2 + 1],
        "largest": order[:tenth],
    }
    errors, uploads = {group: Errors() for group in GROUPS}, list[int]()
    for seed in seeds:
        release = simulate(planned, vectors, seed=seed)
        for group, places in groups.items():
            errors[group].add(release.mean[places] - truth[places])
        uploads.append(release.cost.bytes_per_device)
    return {
        **{group: errors[group].summary() for group in GROUPS},
        "detectable": None,
        "bytes": float(np.mean(uploads)),
    }


def _vectors(case: Case) -> F64:
    """One vector per device, as long as the clip: a common part, and directions of their own."""
    chance = np.random.default_rng(0)
    shape = (case.devices, case.keys["dimensions"])
    own = chance.standard_normal(shape)
    common = chance.standard_normal(shape[1])
    own /= np.linalg.norm(own, axis=1, keepdims=True)
    vectors = case.length * common / np.linalg.norm(common)
    vectors = vectors + math.sqrt(1 - case.length**2) * own
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors * (case.keys["clip"] / norms))


def _law(case: Case, planted: I64 | None = None) -> tuple[pa.Array, I64]:
    """Items and how many devices hold each, the most common first and planted ones last."""
    extra = np.zeros(0, dtype=np.int64) if planted is None else planted
    if case.file is not None:
        shares = _file_counts(case)[1].astype(np.float64)
    else:
        shares = np.arange(1, (case.items or case.devices) + 1, dtype=np.float64) ** -EXPONENT
    shares = (
        shares[: shares.size - extra.size] if case.study.facts.dictionary == "listed" else shares
    )
    devices = case.devices - int(extra.sum())
    chance = np.random.default_rng(0).random(shares.size)
    counts = np.floor(devices * shares / shares.sum() + chance).astype(np.int64)
    counts[0] += devices - counts.sum()  # rounding
    counts = np.r_[counts, extra]
    return _names(case, counts.size), counts


def _listed(case: Case) -> pa.Array | None:
    if case.file is not None:
        return _file_counts(case)[0]
    return _names(case, case.items) if case.items else None


def _names(case: Case, count: int) -> pa.Array:
    """Different items; words of four letters or more, in no order."""
    if case.file is not None:
        return _file_counts(case)[0]
    if case.items:
        return pa.array([f"item {number:05d}" for number in range(count)])
    length = min(int(case.keys.get("word_length", 6)), 6)
    radix = len(LATIN)
    codes = (np.arange(count, dtype=np.int64) * 1_000_003 + 12_345) % radix**length
    letters = [
        np.frombuffer(LATIN.encode(), dtype=np.uint8)[codes // radix**k % radix]
        for k in range(length)
    ]
    words = np.stack(letters, axis=1)
    return pa.array([bytes(word).decode() for word in words])


def _file_counts(case: Case) -> tuple[pa.Array, I64]:
    assert case.file is not None  # callers have checked
    table = pa.csv.read_csv(_path(case.file))
    table = table.sort_by([("count_2020_06", "descending")])
    return table["emoji"].combine_chunks(), table["count_2020_06"].to_numpy()


def _population(items: pa.Array, counts: I64) -> Population:
    rows = np.flatnonzero(counts)
    table = pa.table({"item": items.take(pa.array(rows)), "count": counts[rows]})
    return Population.load(table, count_column="count")


def ratio(result: Line, group: str) -> tuple[float, float, float] | None:
    """The measured error over the prediction, with its interval; None if there is no such pair."""
    predicted, measured = result["predicted"][group], result["measured"][group]
    if not predicted or measured is None:
        return None
    low, high = measured["interval"]
    return measured["error"] / predicted, low / predicted, high / predicted


def is_off(result: Line, group: str) -> bool:
    """Whether a prediction is wrong by more than 10%, beyond the error of the measurement."""
    ratios = ratio(result, group)
    return ratios is not None and not (ratios[1] <= TOLERANCE and ratios[2] >= 1 / TOLERANCE)


def error_of(result: Line) -> float | None:
    """The measured number by which `compare` ranks: the detectable count of a list or of a local
    study, otherwise the error of a rare item."""
    measured = result["measured"]
    detectable: float | None = measured["detectable"]
    if result["predicted"]["detectable"] is not None:
        return detectable
    return None if measured["rare"] is None else float(measured["rare"]["error"])


def beaten_by(lines: Sequence[Line], study: str) -> list[str]:
    """The algorithms that beat the chosen one in both error and bytes by more than 10%."""
    possible = [result for result in lines if _study(result) == study and result.get("measured")]
    own = next((result for result in possible if result["chosen"]), None)
    if own is None:  # a pattern left it out
        return []
    error, most = error_of(own), own["measured"]["bytes"]
    return [
        result["algorithm"]
        for result in possible
        if not result["chosen"]
        and result["measured"]["bytes"] * TOLERANCE < most
        and error is not None
        and (other := error_of(result)) is not None
        and other * TOLERANCE < error
    ]


def missed(lines: Sequence[Line]) -> list[str]:
    """The requirements that these lines miss."""
    complaints = [
        f"plans/{study}: the plan is beaten in error and bytes by {', '.join(better)}"
        for study in _studies(lines)
        if (better := beaten_by(lines, study))
    ]
    for result in lines:
        for group in GROUPS if result.get("measured") else ():
            if is_off(result, group):
                value, low, high = ratio(result, group) or (math.nan,) * 3
                complaints.append(
                    f"plans/{result['case']}: the error of {_items(result, group)} is {value:.2f} "
                    f"({low:.2f} to {high:.2f}) times the prediction; seeds {result['seeds'][0]} "
                    f"to {result['seeds'][1]}"
                )
    return complaints


def table(lines: Sequence[Line]) -> str:
    """Predictions and measurements, one row per algorithm; then the impossible ones."""
    header = ["study", "algorithm", *(f"error ({group})" for group in GROUPS)]
    header += ["detectable", "bytes up", "runs"]
    rows = []
    for result in lines:
        if not result.get("measured"):
            continue
        predicted, measured = result["predicted"], result["measured"]
        name = result["algorithm"]
        rows.append(
            [
                _study(result),
                f"**{name}**" if result["chosen"] else name,
                *(_pair(result, group) for group in GROUPS),
                _numbers(predicted["detectable"], measured["detectable"]),
                _bytes(predicted, measured["bytes"]),
                str(result["repetitions"]),
            ]
        )
    problems = [
        f"- {_study(result)}, {result['algorithm']}: {result['problem']}."
        for result in lines
        if result["problem"]
    ]
    return "\n\n".join([markdown(header, rows), _verdicts(lines), *_problems(problems)])


def report(lines: Sequence[Line]) -> str:
    """The whole Markdown file."""
    return f"""# Plans against measurements

A cell shows the prediction → the measurement, and in parentheses the measurement divided by the
prediction with its 95% interval over runs. The algorithm in bold is the one that the planner chose.
Errors are root mean squares: of the tenth of the items that are rarest, of those in the middle, and
of the most common item. For lists, rare items are planted with the count that is predicted to be
detectable, and their error is that of overestimates, since the threshold hides the others; the
middle is that of the items that can be found. Where the data do not follow the law that a plan
assumes, a number in parentheses comes first: the plan's own, for `share_of_largest`. The prediction
after it is the plan's formula for the share that the item has. Detectable is the count from which
items are found (for frequencies: are significant) with a probability of {SURE:.0%}, measured by
planting items with counts around it. For means, items are coordinates. Bytes are what one device
sends, in all rounds.
Generated from `plans.jsonl`.

{table(lines)}
"""


def _verdicts(lines: Sequence[Line]) -> str:
    studies = _studies(lines)
    losses = [
        f"In {study} the plan is beaten by {', '.join(better)}."
        for study in studies
        if (better := beaten_by(lines, study))
    ]
    possible = [result for result in lines if result.get("measured")]
    pairs = [(result, group) for result in possible for group in GROUPS if ratio(result, group)]
    off = [f"{result['case']} ({group})" for result, group in pairs if is_off(result, group)]
    far = [
        (result, group)
        for result, group in pairs
        if not _is_near((ratio(result, group) or (0.0,))[0])
    ]
    own = [result["chosen"] for result, _ in pairs].count(True)
    far_own = [f"{result['case']} ({group})" for result, group in far if result["chosen"]]
    near = [f"{result['case']} ({group})" for result, group in far if not is_off(result, group)]
    return "\n\n".join(
        [
            f"**Choices.** In {len(studies) - len(losses)} of {len(studies)} studies no possible "
            "algorithm beats the chosen one in both error and bytes by more than 10%. "
            + " ".join(losses),
            f"**Predictions.** Of {len(pairs)} errors, {len(pairs) - len(far)} are measured within "
            f"10% of the prediction; of the {own} of chosen plans, {own - len(far_own)} are. The "
            f"others of chosen plans: {'; '.join(far_own) or 'none'}. In {len(near)} of the "
            f"{len(far)} cases the interval reaches a difference of 10%, so that too few runs may "
            f"explain it. It does not in {len(off)}: {'; '.join(off) or 'none'}.",
        ]
    )


def _problems(problems: Sequence[str]) -> list[str]:
    return ["**Algorithms that were not possible**", "\n".join(problems)] if problems else []


def _is_near(value: float) -> bool:
    return 1 / TOLERANCE <= value <= TOLERANCE


def _studies(lines: Sequence[Line]) -> list[str]:
    return list(dict.fromkeys(_study(result) for result in lines))


def _study(result: Line) -> str:
    return "/".join(result["case"].split("/")[:3])


def _items(result: Line, group: str) -> str:
    if result["study"]["question"] == "mean":
        return f"{group} coordinates"
    return "the largest item" if group == "largest" else f"{group} items"


def _pair(result: Line, group: str) -> str:
    predicted, measured = result["predicted"][group], result["measured"][group]
    text = _numbers(predicted, None if measured is None else measured["error"])
    assumed = result["predicted"].get(f"{group}_as_assumed")
    if assumed is not None:
        text = f"({assumed:,.3g}) {text}"
    ratios = ratio(result, group)
    if ratios is None:
        return text
    value, low, high = ratios
    return f"{text} ({value:.2f}; {low:.2f} to {high:.2f})"


def _bytes(predicted: Mapping[str, Any], measured: float) -> str:
    least, most = predicted["bytes"], predicted["most_bytes"]
    text = f"{most:,}" if least == most else f"{least:,} to {most:,}"
    return f"{text} → {measured:,.0f}"


def _numbers(predicted: float | None, measured: float | None) -> str:
    first, last = ("–" if value is None else f"{value:,.3g}" for value in (predicted, measured))
    return f"{first} → {last}"
