"""Size a question that is answered by sums: the sketch, the noise and the predicted error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np

from sfumato.arrays import F64
from sfumato.errors import ImpossibleError, StudyError
from sfumato.flow import secure_sum
from sfumato.flow.release import NoisedSum, Privacy
from sfumato.flow.report import HEADER_BYTES
from sfumato.flow.secure_sum import SecureSum
from sfumato.flow.task import Task, bits_for, most_devices
from sfumato.privacy import (
    Mechanism,
    Noise,
    NoiseAtRelease,
    NoiseInShares,
    NoNoise,
    SeededRng,
    calibrate,
    epsilon_of,
    least_noise,
)
from sfumato.privacy.accounting import epsilon_text
from sfumato.privacy.noise import AT_RELEASE
from sfumato.privacy.noise_kinds import NOISES
from sfumato.questions import sizing
from sfumato.questions.answers import with_sampling
from sfumato.questions.costs import costs
from sfumato.questions.frequencies.design import (
    PILOT_COHORT,
    PILOT_WIDTH,
    Estimates,
    FrequencyCampaign,
    FrequencyDesign,
    Mode,
)
from sfumato.questions.promise import (
    SEES_ALL,
    SEES_ALL_ITEMS,
    SEES_ITEMS,
    SEES_TABLES,
    ZERO_ITEMS,
    ZERO_OUT,
    device_promise,
    sum_visibility,
)
from sfumato.questions.question import Dictionary, Plan
from sfumato.sketch import CountSketch, Norms, OneHot
from sfumato.study import LARGEST_COHORT, Study

DEFAULT_BYTES = 1 << 16  # upload limit of a device, if the study sets none
REFERENCE_EXPONENT = 1.1  # of the power law for rehearsals
SMALLEST_WIDTH = 10  # the paper's theorems need more than ten cells per row
MOST_CELLS = 1 << 20  # upper limit, for sizing cells before their number is fixed
PILOT_MOST, PILOT_LEAST = 10_000, 500  # devices
PAPER_PILOT_MOST = 5_000  # of a million
MOST_SKETCHES = 100  # of the rounds of a campaign, unless the study asks for one per round
_REHEARSED_COHORT = 1 << 23  # devices at most
READINGS = 30  # of each item by the refined decoder, also to find the significant ones
VARIANTS: dict[str, Mode] = {"shared": "shared", "fresh": "fresh", "hybrid": "hybrid"}
SKETCHES = ("count_sketch", *VARIANTS)  # algorithms of a study


def plan(study: Study, dictionary: Dictionary | None) -> Plan:
    """Plan a study of frequencies that is answered by sums."""
    assert dictionary is not None  # a study of frequencies lists its items
    design, estimates = _size(study, len(dictionary))
    # A release counts all devices asked, also those that only answered the pilot.
    scale = study.device_count / study.answering(study.device_count - design.pilot_devices)
    law = reference_law(estimates.counts.size)
    counts = study.device_count * study.items_per_device * law
    errors = with_sampling(estimates.standard_error, counts * (1 - law), scale)
    predicted = {
        "standard_error": float(errors[-1]),
        "standard_error_of_middle": float(errors[errors.size // 2]),
        "standard_error_of_largest": float(errors[0]),
        **_causes(design, estimates, scale, float(errors[0])),
        "half_width_95": scale * float(estimates.half_width[-1]),
        "standard_error_share": float(errors[-1]) / study.device_count,
        "width": estimates.width or None,
        **design.traffic(estimates.width),
        **_bounds(study, design),
        **({"dictionary_bytes": dictionary.bytes} if design.mode == "one_hot" else {}),
        **_costs(design, estimates.width),
        "rounds": design.rounds + (1 if design.pilot_devices else 0),
        **(
            assumption(law)
            if design.mode != "one_hot" or scale > 1  # sampling depends on how common an item is
            else {"assumes": "nothing about the data"}
        ),
    }
    return Plan(
        study=study,
        design=design,
        dictionary=dictionary,
        algorithm=algorithm(design),
        predicted=predicted,
        privacy=promise(study, design),
        warnings=(*_warnings(study, design, estimates), *dictionary.warnings),
    )


def _causes(
    design: FrequencyDesign, estimates: Estimates, scale: float, largest: float
) -> dict[str, float]:
    """Where the errors come from: those of a rare item, and sampling, which the most common one has
    most of."""
    total = float(estimates.standard_error[-1])
    noise = total
    if design.mode != "one_hot":
        noise = design.cell_noise(estimates.respondents) * estimates.respondents
        noise *= math.sqrt((math.pi / 2 if "median" in estimates.decoder else 1) / design.rows)
        noise = min(noise, total)
    sampling = largest**2 - (scale * float(estimates.standard_error[0])) ** 2
    return {
        "error_from_noise": scale * noise,
        "error_from_collisions": scale * math.sqrt(max(total**2 - noise**2, 0.0)),
        "error_from_sampling": math.sqrt(max(sampling, 0.0)),
    }


def _bounds(study: Study, design: FrequencyDesign) -> dict[str, int]:
    """Sizes that are not exceeded, if a pilot decides."""
    if not design.pilot_devices:
        return {}
    widest = design.traffic()
    most = max(widest["bytes_per_device"], widest["pilot_bytes_per_device"])
    return {"most_bytes_per_device": most, "minimax_width": minimax_width(study)}


def _costs(design: FrequencyDesign, width: int) -> dict[str, float | int]:
    tasks: list[tuple[Task, int]] = [
        (design.main_task(0, width), design.devices - design.pilot_devices)
    ]
    if design.pilot_devices:
        tasks.append((design.pilot(), design.pilot_devices))
    tables = design.tables if design.mode != "shared" else 1
    tables = min(tables, design.sketches or tables)
    is_exact = design.mode == "one_hot"
    lookups = 0 if is_exact else READINGS * design.items * design.rows * tables
    return costs(tasks, lookups=lookups, items=design.items)


def promise(study: Study, design: FrequencyDesign) -> Privacy:
    """The privacy statement of a design, which holds for all of its releases."""
    task, mechanism = design.main_task(0), ""
    sees = SEES_ALL if study.epsilon is None else SEES_TABLES
    if design.sparse:
        sees = SEES_ALL_ITEMS if study.epsilon is None else SEES_ITEMS
    if study.epsilon is not None:
        noise = design.mechanism
        assert isinstance(noise, NoiseAtRelease | NoiseInShares)  # a finite epsilon has noise
        kind = NOISES[noise.noise if isinstance(noise, NoiseAtRelease) else "skellam"].title
        spent = epsilon_of([task.loss], study.delta)
        mechanism = (
            f"{kind} noise of scale {noise.scale:.4f} on every cell, at a cost of epsilon "
            f"{epsilon_text(spent)}"
        )
    return device_promise(
        study,
        neighbours=ZERO_ITEMS if design.sparse else ZERO_OUT.format("table becomes"),
        mechanism=mechanism,
        sees=sees if design.secure is None else sum_visibility(task),
        secure=design.secure,
        assumptions=(
            "a device answers in one round (or in the pilot), and each round's table gets noise"
            if design.every_round or design.pilot_devices
            else "a device answers once, and the table of all devices gets noise once",
        ),
        influence=design.influence,
    )


def rehearse(design: FrequencyDesign, study: Study) -> Estimates:
    """Run the campaign on synthetic devices whose items follow the reference law.

    The prediction includes the decoder and the noise, but nothing is charged.
    """
    if design.sketches:
        design = _in_fewer_rounds(design, study)
    items = min(design.items, max(2_000, 200_000 // design.rounds), 20_000)
    synthetic = np.arange(items, dtype=np.int64)
    shares = reference_law(items)
    chance = np.random.default_rng(0)
    if design.mode == "one_hot":
        design = replace(design, items=items)

    left = design.devices - design.pilot_devices
    each = -(-left // design.rounds) if design.every_round else left
    campaign, rng = FrequencyCampaign(design, synthetic), SeededRng(0)
    while (task := campaign.next_task()) is not None:
        cohort = design.pilot_devices if task.cohort == PILOT_COHORT else each
        devices = max(study.answering(cohort), task.min_count)
        law = shares[chance.permutation(items)] if study.cohorts == "different" else shares
        expected = devices * design.items_per_device * law
        counts = np.floor(expected + chance.random(items)).astype(np.int64)
        table = task.sketch.encode(synthetic, counts)
        total = task.mechanism.at_device(table, devices=devices, rng=rng)
        noised = task.mechanism.at_release(total, count=devices, rng=rng)
        campaign.absorb(NoisedSum(task, noised, devices))
    return campaign.estimates()


def _in_fewer_rounds(design: FrequencyDesign, study: Study) -> FrequencyDesign:
    """About one round for each of the design's sketches, and in all of them together the same
    noise: its tables add up to tables of the same law, but for the shape of the noise."""

    def total(design: FrequencyDesign) -> float:
        devices = max(1, study.answering(design.devices) // design.rounds)
        return math.sqrt(design.rounds) * design.main_task(0).mechanism.stddev(devices)

    rounds = max(design.sketches, -(-design.devices // _REHEARSED_COHORT))
    fewer = replace(design, rounds=rounds)
    if total(fewer) == 0:
        return fewer
    assert isinstance(fewer.mechanism, NoiseAtRelease | NoiseInShares)  # others add no noise
    scale = fewer.mechanism.scale * total(design) / total(fewer)
    return replace(fewer, mechanism=replace(fewer.mechanism, scale=scale))


def reference_law(items: int) -> F64:
    """The share of each item that predictions assume, the most common first."""
    shares = np.arange(1, items + 1, dtype=np.float64) ** -REFERENCE_EXPONENT
    return np.asarray(shares / shares.sum())


def assumption(law: F64) -> dict[str, Any]:
    """What predictions assume about the data, and which share the most common item has by it."""
    return {
        "share_of_largest": float(law[0]),
        "assumes": f"counts fall like rank^-{REFERENCE_EXPONENT}",
    }


def _size(study: Study, items: int) -> tuple[FrequencyDesign, Estimates]:
    """Choose the sizes, then the mode with the best rehearsal that the cohorts allow."""
    _check_sizes(study)
    rows = study.rows or sizing.rows_for(items, risk=_risk(study), paper=study.paper_mode)
    is_sparse = _is_sparse(study, items)
    width, pilot = (0, 0) if is_sparse else _width(study, items, rows)
    sketch, secure = width > 0, secure_of(study)
    mechanism = noise_for(study, _norms(study, rows if sketch else 0))

    # Sizes for a target error are computed for a sketch per round.
    shares_sketches = (
        study.round_count > MOST_SKETCHES
        and study.algorithm not in VARIANTS
        and study.target_error is None
        and not study.paper_mode
    )
    is_shown = (study.publish == "rounds" or secure is not None) and study.round_count > 1
    mixed: Mode = "fresh" if study.cohorts == "different" else "hybrid"
    modes: dict[Mode, bool]  # and whether every round has noise
    if not sketch:
        modes = {"one_hot": is_shown}
    elif study.algorithm in VARIANTS:
        modes = {VARIANTS[study.algorithm]: is_shown or study.algorithm != "shared"}
    elif study.round_count == 1:
        modes = {"shared": False}
    elif study.paper_mode:
        modes = {mixed: True}
    elif shares_sketches:  # with noise on every table anyway, Shared only has more collisions
        modes = {"fresh": True} if is_shown else {"fresh": True, "shared": False}
    else:
        modes = {"fresh": True}
        if not (pilot and is_shown):  # with noise on every table, Shared never needs fewer cells
            modes["shared"] = is_shown
        if mixed == "hybrid":
            modes["hybrid"] = True
    designs = [
        FrequencyDesign(
            mode=mode,
            items=items,
            devices=study.device_count,
            rounds=study.round_count,
            rows=rows if sketch else 1,
            width=width,
            seed=0,
            items_per_device=study.items_per_device,
            mechanism=mechanism,
            decode="median" if study.paper_mode else "refined",
            every_round=every_round,
            pilot_devices=pilot,
            target_error=study.target_error if pilot else None,
            failure_probability=_risk(study) if pilot and not study.paper_mode else None,
            similar=study.cohorts == "similar" or not pilot,
            constant=sizing.PAPER_CONSTANT if study.paper_mode else sizing.CONSTANT,
            secure=secure,
            sparse=is_sparse,
            sketches=MOST_SKETCHES if shares_sketches and mode in ("fresh", "hybrid") else 0,
        )
        for mode, every_round in modes.items()
    ]
    rehearsals = [(design, rehearse(design, study)) for design in designs]
    # With a pilot every candidate meets the target, so the smallest table wins.
    return min(
        rehearsals,
        key=lambda pair: (
            pair[1].width if pilot else 0,
            float(np.median(pair[1].half_width)),
        ),
    )


def _risk(study: Study) -> float:
    return study.failure_probability or sizing.RISK


def _check_sizes(study: Study) -> None:
    """Refuse sizes of a sketch that the study does not ask for, or asks for twice."""
    if study.rows is None and study.width is None:
        return
    if study.algorithm not in SKETCHES:
        raise StudyError(
            "rows and width are the sizes of count sketches; algorithm is "
            + (study.algorithm or "not given"),
            hint=f"set algorithm to {' or '.join(SKETCHES)}, or leave out rows and width",
        )
    if study.width is not None and study.target_error is not None:
        raise StudyError(
            "width gives the size of the sketch, and target_error asks for one",
            hint="leave out width or target_error",
        )


def _is_sparse(study: Study, items: int) -> bool:
    """Whether devices send the places of their items. Its error is that of one-hot tables, the
    least there is, so it is chosen unless a table of all items is shorter, the study's limit is
    shorter, or the study asks for another algorithm."""
    if study.is_masked or study.paper_mode or study.algorithm not in (None, "sparse"):
        return False
    entries = HEADER_BYTES + -(-study.items_per_device * items.bit_length() // 8)
    bits = bits_for(most_devices(study.device_count) * study.items_per_device)
    limit = study.bytes_per_device
    if study.algorithm == "sparse":
        if limit is not None and entries > limit:
            raise ImpossibleError(
                f"a report of {study.items_per_device} items has {entries} bytes; "
                f"bytes_per_device is {limit}",
                hint=f"set bytes_per_device to {entries} or more, or reduce items_per_device",
            )
        is_sparse = True
    else:
        is_sparse = entries <= min(HEADER_BYTES + -(-items * bits // 8), limit or entries)
    if is_sparse and study.target_error is not None:
        _check_noise(study, items, 0, study.answering())
    return is_sparse


def _width(study: Study, items: int, rows: int) -> tuple[int, int]:
    """The width (0 for one-hot) and the pilot's devices, from the target error or the bytes."""
    devices = study.answering()
    bits, besides = _bits_and_bytes(study, rows)
    limit = study.bytes_per_device
    cells = max(0, ((limit or DEFAULT_BYTES) - besides) * 8 // bits)
    constant = sizing.PAPER_CONSTANT if study.paper_mode else sizing.CONSTANT
    may_be_exact = study.algorithm not in SKETCHES
    if study.algorithm == "one_hot":
        return _one_hot(study, items, cells, bits, besides), 0
    if study.width is not None:
        if limit is not None and rows * study.width > cells:
            need = besides + -(-rows * study.width * bits // 8)
            raise ImpossibleError(
                f"a sketch of {rows} × {study.width} cells has {need:,} bytes; bytes_per_device is "
                f"{limit}",
                hint=f"set bytes_per_device to {need} or more, or reduce rows or width",
            )
        return study.width, 0
    if study.target_error is None:
        if items <= cells and may_be_exact:
            return 0, 0
        width = min(cells // rows, math.ceil(constant * devices))
        if width < SMALLEST_WIDTH:
            need = besides + -(-rows * SMALLEST_WIDTH * bits // 8)
            raise ImpossibleError(
                f"a sketch of {items:,} items needs at least {need:,} bytes per device; "
                f"bytes_per_device is {limit}",
                hint=f"set bytes_per_device to {need} or more",
            )
        return width, 0
    pilot = min(PAPER_PILOT_MOST if study.paper_mode else PILOT_MOST, devices // 10)
    pilot = pilot if pilot >= PILOT_LEAST else 0
    if study.paper_mode:
        usual = widest = minimax_width(study)
    else:
        usual, widest = _target_widths(study, items, rows, devices - pilot)
    is_exact_smaller = items <= rows * (max(usual, PILOT_WIDTH) if pilot else widest)
    allowed = widest if limit is None else min(widest, cells // rows)
    adapts = pilot > 0 and not study.paper_mode
    is_enough = allowed >= (SMALLEST_WIDTH if adapts else widest)
    fits = limit is None or items <= cells
    if may_be_exact and fits and (is_exact_smaller or not is_enough):
        _check_noise(study, items, 0, devices)
        return 0, 0
    if not is_enough:
        need = besides + -(-rows * (SMALLEST_WIDTH if adapts else widest) * bits // 8)
        raise ImpossibleError(
            f"target_error {study.target_error:g} needs {need:,} bytes per device; "
            f"bytes_per_device is {limit}",
            hint=f"set bytes_per_device to {need}, or raise target_error",
        )
    _check_noise(study, items, rows, devices)
    return allowed, pilot


def minimax_width(study: Study) -> int:
    """The width of equation (3), which no study needs to exceed."""
    assert study.target_error is not None  # callers have checked
    constant = sizing.PAPER_CONSTANT if study.paper_mode else sizing.CONSTANT
    width = sizing.minimax_width(study.target_error, constant=constant, devices=study.answering())
    return max(math.ceil(study.items_per_device * width), SMALLEST_WIDTH)


def _target_widths(study: Study, items: int, rows: int, devices: int) -> tuple[int, int]:
    """The widths with which the target error is met for the reference law, and for any data."""
    assert study.target_error is not None  # callers have checked
    risk = _risk(study) / 2  # of errors, and of items that are not taken out
    spread = sizing.largest_spread(study.target_error, items=items, risk=risk)
    assert spread is not None  # nothing is sampled here
    tables = _noised_tables(study)
    each = noise_for(study, _norms(study, rows)).stddev(max(devices // tables, 1))
    reading = sizing.Reading(
        rows=rows,
        noise=math.sqrt(tables) * each / devices,
        rounds=study.round_count,
        gain=study.round_count if study.cohorts == "similar" and tables > 1 else 1,
        risk=risk,
    )
    widest = sizing.width_for_any(spread, reading, mass=study.items_per_device)
    widest = min(widest, minimax_width(study))
    widest = max(math.ceil(widest), SMALLEST_WIDTH)
    law = study.items_per_device * reference_law(items)
    return sizing.width_for(law, spread, reading, most=widest), widest


def _noised_tables(study: Study) -> int:
    """The number of tables that get noise, at least."""
    return study.round_count if study.publish == "rounds" or study.noise_in_shares else 1


def _one_hot(study: Study, items: int, cells: int, bits: int, besides: int) -> int:
    """The width of one-hot tables, 0, if they fit into the study's limits."""
    if study.target_error is not None:
        _check_noise(study, items, 0, study.answering())
    if study.bytes_per_device is not None and items > cells:
        need = besides + -(-items * bits // 8)
        raise ImpossibleError(
            f"a table of {items:,} items has {need:,} bytes; bytes_per_device is "
            f"{study.bytes_per_device}",
            hint=f"set bytes_per_device to {need} or more, or use another algorithm",
        )
    return 0


def _bits_and_bytes(study: Study, rows: int) -> tuple[int, int]:
    """The bits of a cell, and the bytes that a device sends besides cells."""
    secure = secure_of(study)
    if secure is None:
        most = most_devices(study.device_count)
        return bits_for(most * study.items_per_device), HEADER_BYTES
    task = secure.task(
        sketch=OneHot(categories=MOST_CELLS),
        mechanism=noise_for(study, _norms(study, rows)),
        campaign="",
        cohort="",
        devices=_cohort(study),
        items_per_device=study.items_per_device,
    )
    up, _ = secure_sum.bytes_of(task)
    return task.aggregation.modulus_bits, up - task.message_bytes


def secure_of(study: Study) -> SecureSum | None:
    """The secure sum of a study whose tables are masked, else None."""
    if not study.is_masked:
        return None
    return SecureSum(corrupt=study.corrupt, dropout=study.expected_dropout, mode=study.collector)


def _cohort(study: Study) -> int:
    """The number of devices in a round."""
    return -(-study.device_count // study.round_count)


def noise_for(study: Study, norms: Norms) -> Mechanism:
    """The least noise that meets the guarantee; with trust "secure", Skellam noise in shares, whose
    sum is again Skellam noise."""
    if study.epsilon is None:
        return NoNoise()
    secure = secure_of(study) if study.noise_in_shares else None
    if secure is not None and study.delta == 0:
        raise ImpossibleError(
            "noise in shares needs a delta above 0; delta is 0",
            hint=f"set delta to {0.1 / (study.devices or 1):.1g}",
        )
    if secure is not None:
        bounds: Any = {"l1": float(norms.l1), "l2": float(norms.l2), "unit_cells": norms.unit_cells}
        scale = calibrate("skellam", **bounds, epsilon=study.epsilon, delta=study.delta)
        return secure.noise(scale, _cohort(study))
    noises: Sequence[Noise] = ("gaussian",) if study.paper_mode and study.delta else AT_RELEASE
    return least_noise(norms, epsilon=study.epsilon, delta=study.delta, noises=noises)


def _norms(study: Study, rows: int) -> Norms:
    if rows == 0:
        return OneHot(categories=1).sensitivity(study.items_per_device)
    return CountSketch(rows=rows, width=2, seed=0).sensitivity(study.items_per_device)


def _check_noise(study: Study, items: int, rows: int, devices: int) -> None:
    """Refuse a target error that the noise alone exceeds, with a hint how to reach it."""
    assert study.target_error is not None  # callers have checked
    tables = _noised_tables(study)
    spread = noise_for(study, _norms(study, rows)).stddev(devices // tables)
    if rows:
        spread *= math.sqrt(math.pi / (2 * rows))  # for a median of `rows` readings
    deviations = NormalDist().inv_cdf(1 - _risk(study) / (2 * items))
    share = deviations * spread * math.sqrt(tables) / devices
    if share > study.target_error:
        raise ImpossibleError(
            f"with epsilon {study.epsilon:g} and {study.devices:,} devices the noise alone causes "
            f"errors of {share:.2g}; target_error is {study.target_error:g}",
            hint=f"ask {math.ceil(study.device_count * share / study.target_error):,} devices, "
            f"set epsilon to {study.epsilon * share / study.target_error:.2g}, "  # type: ignore[operator]  # noise means epsilon is a number
            f"or target_error to {share:.2g}",
        )


def _warnings(study: Study, design: FrequencyDesign, estimates: Estimates) -> list[str]:
    warnings = common_warnings(study)
    if design.mode == "one_hot":
        return warnings
    collisions = sizing.majority_collisions(design.items, design.rows, design.width)
    if collisions > 0.1:
        warnings.append(
            f"about {collisions:.2g} items will collide with the most common one in a majority of "
            "rows, so that a median gives its count for theirs"
            + (", in every round" if design.mode == "hybrid" else "")
            + "; use more rows or a larger width"
        )
    if not study.is_masked:
        warnings.append(
            "with trust central the collector sees every report, so a sketch hides nothing from "
            'it; algorithm "sparse" has fewer bytes and no collisions'
        )
    if design.mode == "hybrid" and study.cohorts == "different":
        warnings.append(
            "hybrid sketches spread the error of one round's common items over all rounds; "
            'for cohorts that differ, algorithm "fresh" does not'
        )
    if design.pilot_devices and estimates.width == design.width:
        warnings.append(
            "the target error may need more than bytes_per_device allows: a table of that size "
            f"suffices only if counts fall faster than rank^-{REFERENCE_EXPONENT}"
        )
    if study.paper_mode and study.width is None:
        warnings.append(
            "paper_mode uses the constant 2, which misses the target error by a factor of up to 7"
        )
    if design.every_round and study.epsilon is not None and study.round_count > 1:
        warnings.append(
            f"the noise of {study.round_count} rounds adds up; fewer, larger rounds would have less"
        )
    return warnings


def common_warnings(study: Study) -> list[str]:
    """Warnings about delta, and about masked rounds of this size."""
    warnings, cohort, most = [], _cohort(study), LARGEST_COHORT
    if study.is_masked and cohort > most:
        warnings.append(
            f"masked rounds are tested with up to {most:,} devices; this study has {cohort:,}"
            + (
                f" (rounds = {-(-study.device_count // most)} would have fewer, but more noise)"
                if study.facts.dictionary == "listed"
                else ""
            )
        )
    if study.is_masked and study.expected_dropout == 0:
        warnings.append(
            "dropout is 0, so a round fails if a single device drops out; set the share to expect"
        )
    if study.epsilon is not None and study.delta > 1 / study.device_count:
        warnings.append(
            f"delta {study.delta:g} is more than 1/devices: even publishing one random device's "
            "data would satisfy such a guarantee; use at most "
            f"{0.1 / study.device_count:.1g}"
        )
    return warnings


def algorithm(design: FrequencyDesign) -> str:
    if design.sparse:
        return "sparse one-hot reports"
    if design.mode == "one_hot":
        return "one-hot" if design.secure is None else "masked one-hot"
    name = "count sketch" if design.rounds == 1 else f"{design.mode} count sketches"
    if design.secure is not None:
        name = f"{name} in masked rounds" if design.rounds > 1 else f"masked {name}"
    return f"two-phase {name}" if design.pilot_devices else name
