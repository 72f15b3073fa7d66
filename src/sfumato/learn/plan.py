"""Plan a training: the noise that keeps the promise, the expected cost and traffic."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

from sfumato.errors import ImpossibleError, StudyError
from sfumato.flow import secure_sum
from sfumato.flow.model_terms import PARAMETER_BYTES, LocalTraining
from sfumato.flow.release import Privacy
from sfumato.flow.report import HEADER_BYTES
from sfumato.flow.secure_sum import sum_task
from sfumato.flow.task import Task, bits_for, most_devices
from sfumato.learn import models
from sfumato.learn.compression import (
    AdaptNorm,
    AdaptTail,
    Compression,
    FixedRate,
    FreeNorm,
    NoCompression,
    TwoStage,
    rounds_measured,
)
from sfumato.learn.design import (
    ROWS,
    AdaptiveClip,
    ServerOptimizer,
    TrainingDesign,
    second_whole_numbers,
    whole_numbers,
)
from sfumato.learn.diffsketch import NOT_PRIVATE, DiffSketch, DiffSketchDesign
from sfumato.privacy import Mechanism, NoiseAtRelease, NoNoise, epsilon_of
from sfumato.privacy.accounting import (
    LARGEST_MULTIPLIER,
    SampledLoss,
    epsilon_text,
    least_multiplier,
)
from sfumato.privacy.noise_kinds import NOISES
from sfumato.questions.costs import TrainingWork
from sfumato.questions.frequencies.plan import secure_of
from sfumato.questions.promise import SEES_TABLES, collusion_assumptions
from sfumato.questions.question import Dictionary, Plan
from sfumato.sketch.vector import RoundSketch, VectorSketch
from sfumato.study import Study, TrainingStudy, require

OWN_ASSUMPTION = (
    "the module, its first parameters, its loss and its optimizer were chosen without clients' "
    "data, and clients' training of it leaves nothing outside their copies"
)
_SKETCHED = ("mode", "claimed_epsilon", "padding", "correction", "i_know_this_is_not_private")
_OF_ONE_RULE = {"rate": "fixed", "prior_norm": "two_stage"}
_NEIGHBOURS = {
    "zero-out": "zero-out: what one device sends becomes zero in every round",
    "replace": "replace: what one device sends becomes another's in every round",
}


def plan(study: Study, dictionary: Dictionary | None) -> Plan:
    """The plan of a training."""
    keys = study.training
    assert keys is not None  # Study has checked
    require(
        keys.model is not None or keys.parameters is not None,
        "training must name a model, or have the number of parameters of a module of your own; "
        "got neither",
        hint=f"set training.model to one of {', '.join(models.NAMES)}, or training.parameters; "
        "sfumato.train(study, data, model=…) sets it itself",
    )
    sizes = [name for name in ("inputs", "classes", "hidden") if getattr(keys, name) is not None]
    require(
        keys.model is not None or not sizes,
        f"a module of your own has its own sizes; leave out training.{', training.'.join(sizes)}",
    )
    sketched = study.algorithm == "diffsketch"
    for name, rule in _OF_ONE_RULE.items():
        require(
            getattr(keys, name) is None or (rule == _rule_name(study) and not sketched),
            f'training.{name} has no effect without compression = "{rule}"',
            hint="leave it out",
        )
    if sketched:
        return plan_sketched(study)
    _check_keys(study)
    design = design_for(study)
    return Plan(
        study=study,
        design=design,
        algorithm=algorithm(design),
        predicted=_predicted(study, design),
        privacy=promise(study, design),
        warnings=tuple(_warnings(study, design)),
    )


def design_for(study: Study) -> TrainingDesign:
    """The training that a study asks for."""
    keys = study.training
    assert keys is not None  # Study has checked
    assert study.devices is not None  # plan() has checked
    assert study.clip is not None  # Study has checked
    require(
        keys.cohort <= study.devices,
        f"a cohort must not exceed the {study.devices} devices; got {keys.cohort}",
    )
    require(
        study.epsilon is None or keys.noise_multiplier is None,
        "give epsilon or training.noise_multiplier, not both; with epsilon = inf the multiplier "
        "stands alone",
    )
    noiseless = _is_noiseless(study)
    design = TrainingDesign(
        model=keys.model,
        inputs=keys.inputs,
        classes=keys.classes,
        hidden=keys.hidden,
        clients=study.devices,
        cohort=keys.cohort,
        rounds=study.round_count,
        sampling=_sampling(study, keys),
        local=_local_training(keys),
        clip=study.clip,
        adaptive_clip=AdaptiveClip() if keys.adaptive_clip else None,
        largest_l1=keys.largest_l1,
        noise_multiplier=0.0 if noiseless else keys.noise_multiplier or LARGEST_MULTIPLIER,
        compression=_rule(study, keys),
        rows=study.rows or ROWS,
        blocks=study.blocks or 1,
        server=ServerOptimizer(
            method=keys.server, learning_rate=keys.server_rate, momentum=keys.momentum
        ),
        dropout=study.expected_dropout,
        secure=secure_of(study),
        seed=keys.seed,
        own_parameters=keys.parameters,
    )
    if study.epsilon is not None:
        design = replace(design, noise_multiplier=_multiplier(design, study.epsilon, study.delta))
    return design


def _local_training(keys: TrainingStudy) -> LocalTraining:
    return LocalTraining(
        learning_rate=keys.learning_rate,
        batch=keys.batch,
        epochs=keys.epochs,
        steps=keys.steps,
        most_examples=keys.most_examples,
    )


def _sampling(study: Study, keys: TrainingStudy) -> Literal["poisson", "fixed", "passes"]:
    if keys.sampling == "by_examples":
        raise StudyError(
            'sampling = "by_examples" is for algorithm = "diffsketch": the number of examples is '
            "private, and a cohort that is drawn by it has no accounted cost",
            hint='set sampling to "poisson", "fixed" or "passes"',
        )
    return keys.sampling or ("passes" if study.is_masked else "poisson")


def _check_keys(study: Study) -> None:
    """Raise StudyError if a key of sketched training is set for another algorithm."""
    keys = study.training
    assert keys is not None  # Study has checked
    values = {"width": study.width}
    values |= {f"training.{name}": getattr(keys, name) for name in _SKETCHED}
    idle = [name for name, value in values.items() if value not in (None, 0, False)]
    if idle:
        raise StudyError(
            f"{', '.join(idle)} {'has' if len(idle) == 1 else 'have'} no effect without "
            'algorithm = "diffsketch"',
            hint=f"leave out {', '.join(idle)}",
        )
    require(
        keys.tail_update is None or study.compression == "adapt_tail",
        'training.tail_update has no effect without compression = "adapt_tail"',
        hint="leave out training.tail_update",
    )
    sizes = [name for name in ("rows", "blocks") if getattr(study, name) is not None]
    require(
        not sizes or _rule_name(study) != "none",
        f"{', '.join(sizes)} {'has' if len(sizes) == 1 else 'have'} no effect with "
        'compression = "none": whole updates are not sketched',
        hint=f"leave out {', '.join(sizes)}",
    )


def algorithm(design: TrainingDesign) -> str:
    name = "distributed SGD" if design.local.steps == 1 else "federated averaging"
    updates = {
        NoCompression: "whole updates",
        FixedRate: "sketches of a fixed size",
        AdaptNorm: "sketches sized by a noised norm",
        TwoStage: "whole updates, then sketches",
        AdaptTail: "sketches sized by a measured error",
        FreeNorm: "sketches sized by their own norm",
    }[type(design.compression)]
    masked = " in masked rounds" if design.secure is not None else ""
    return f"{name} with {updates}{masked}"


def promise(study: Study, design: TrainingDesign, *, exact: bool = True) -> Privacy:
    """The privacy statement of a training; `exact` is whether its noise is exact."""
    spent = epsilon_of([design.loss], study.delta)
    guarantee, mechanism = "no differential privacy: updates are clipped and not noised", "none"
    assumptions = collusion_assumptions(design.secure)
    if math.isfinite(spent):
        kind = NOISES["gaussian" if design.secure is None else "skellam"].title
        guarantee = _guarantee(study, design, spent)
        mechanism = (
            f"{kind} noise of {design.noise_multiplier:.4f} times the largest norm of what a "
            "client adds"
        )
        assumptions += (_cohorts(design), *_of_own(design))
    privacy = Privacy(
        epsilon=None if math.isinf(spent) else spent,
        delta=study.delta,
        guarantee=guarantee,
        unit="device",
        neighbours=_NEIGHBOURS[design.neighbours],
        mechanism=mechanism,
        trust=study.trust,
        sees=SEES_TABLES
        if design.secure is None
        else "the server sees sums over enough clients and no client's table",
        assumptions=assumptions,
        influence=design.influence,
    )
    if exact:
        return privacy
    return privacy.but_for(
        "this run's noise and sums are floating-point numbers of a pseudo-random generator, for "
        "experiments only"
    )


def _guarantee(study: Study, design: TrainingDesign | DiffSketchDesign, epsilon: float) -> str:
    return (
        f"({epsilon_text(epsilon)}, {study.delta:g})-differential privacy for each "
        f"client over all {design.rounds:,} rounds"
    )


def _of_own(design: TrainingDesign | DiffSketchDesign) -> tuple[str, ...]:
    return (OWN_ASSUMPTION,) if design.model is None else ()


def _cohorts(design: TrainingDesign) -> str:
    """How cohorts are formed, and whether they must stay secret."""
    if design.sampling == "passes":
        times = "one" if design.passes == 1 else f"{design.passes:,}"
        return (
            f"cohorts of {design.cohort:,} go through the {design.clients:,} clients in turn, so "
            f"that a client is in at most {times} of them; they need not be secret"
        )
    if not design.is_amplified:
        return (
            f"a client may be in all {design.rounds:,} cohorts, which need not be secret: the "
            "server knows them"
        )
    method = "each client independently" if design.sampling == "poisson" else "with a fixed size"
    return (
        f"cohorts of {design.cohort:,} in {design.clients:,} are drawn at random, {method}, and "
        "stay secret: the trusted server knows them, and nobody else who sees the model knows who "
        "took part"
    )


def _is_noiseless(study: Study) -> bool:
    return study.epsilon is None and not (study.training and study.training.noise_multiplier)


def _rule_name(study: Study) -> str:
    return study.compression or ("none" if _is_noiseless(study) else "free_norm")


def _rule(study: Study, keys: TrainingStudy) -> Compression:
    name = _rule_name(study)
    if name == "fixed":
        if keys.rate is None:
            raise StudyError('compression = "fixed" needs training.rate, parameters per cell')
        return FixedRate(rate=keys.rate)
    if name == "none":
        return NoCompression()
    if _is_noiseless(study):
        raise StudyError(
            f"{name} sizes sketches by the noise, and there is none",
            hint='set epsilon, or compression = "fixed" or "none"',
        )
    error = study.relative_error
    if name == "adapt_norm":
        return AdaptNorm(error=error)
    if name == "two_stage":
        return TwoStage(
            error=error,
            warm_up=keys.warm_up,
            prior_norm=keys.prior_norm,
            whole_slack=study.paper_mode,
        )
    if name == "adapt_tail":
        assert study.clip is not None  # Study has checked
        return AdaptTail(
            error=error,
            paper_target=keys.cohort if study.paper_mode else None,
            update=keys.tail_update or "sign",
            unit=1.0 if keys.tail_update in (None, "sign") else keys.cohort * study.clip,
        )
    return FreeNorm(error=error, early=keys.early)


def _multiplier(design: TrainingDesign, epsilon: float, delta: float) -> float:
    """The least noise multiplier, rounded up, with which all rounds cost at most epsilon."""
    if delta == 0:
        raise ImpossibleError(
            "training needs a delta above 0; delta is 0",
            hint=f"set delta to {0.1 / design.clients:.1g}",
        )

    def cost(multiplier: float) -> float:
        return epsilon_of([replace(design, noise_multiplier=multiplier).loss], delta)

    multiplier = least_multiplier(cost, epsilon)
    if math.isinf(multiplier):
        raise ImpossibleError(
            f"no noise multiplier up to {LARGEST_MULTIPLIER:g} keeps epsilon {epsilon:g} at "
            f"delta {delta:g} over {design.rounds:,} rounds",
            hint="raise epsilon, or ask for fewer rounds or smaller cohorts",
        )
    return multiplier


def _predicted(study: Study, design: TrainingDesign) -> dict[str, Any]:
    length = design.length
    second = _second_cells(design, length)
    cells = _expected_cells(design, length) + second
    most, likely = round_bytes(design, length, length + second), round_bytes(design, length, cells)
    taking_part = design.rounds * design.cohort / design.clients
    spent = epsilon_of([design.loss], study.delta)
    return {
        "epsilon": None if math.isinf(spent) else spent,
        "noise_multiplier": design.noise_multiplier,
        "model_parameters": length,
        "model_bytes": PARAMETER_BYTES * length,  # fetched by a client at the start of a round
        "rounds": design.rounds,
        "rounds_per_device": taking_part,
        "bytes_per_round_at_most": most,
        "bytes_per_round": likely,
        "bytes_per_device": round(likely * taking_part),
        "rate": length / cells,
        **_costs(design, length, cells),
        "assumes": "clients' updates have the full norm and are independent; for simulate_seconds, "
        + _of_examples(design.local),
    }


def _expected_cells(design: TrainingDesign, length: int) -> int:
    """The mean number of cells of a round, if the squared norm of a sum is cohort × clip²."""
    rule = design.compression
    if isinstance(rule, NoCompression):
        return length
    if isinstance(rule, FixedRate):
        return max(1, math.floor(length / rule.rate))
    cells = design.cohort / design.multiplier**2 / rule.error
    if isinstance(rule, FreeNorm) and rule.early > 1:  # the mean of 1/error over the rounds
        cells *= (1 - 1 / rule.early) / math.log(rule.early)
    whole = 0.0
    if isinstance(rule, TwoStage):
        whole = min(rule.rounds_measured / design.rounds, 1.0)
        if rule.prior_norm is not None:
            return rule.start(length, design.largest).cells
    return max(1, min(length, round(whole * length + (1 - whole) * min(cells, length))))


def _second_cells(design: TrainingDesign, length: int) -> int:
    measures = rounds_measured(design.compression) > 0
    return design.second_sketch(length, 0).cells if measures else 0


def round_bytes(design: TrainingDesign, length: int, cells: int) -> int:
    """Bytes that a client sends in a round with `cells`, those of a second sketch included; in a
    masked round, of all messages."""
    task = _round_task(design, length, cells)
    if design.secure is not None:
        return sum(secure_sum.bytes_of(task))
    main = task.sketch.main if isinstance(task.sketch, RoundSketch) else task.sketch
    assert isinstance(main, VectorSketch)  # of `_round_task`
    bits = bits_for(most_devices(design.cohort) * main.rounding.largest)
    return HEADER_BYTES + -(-(main.cells + _second_cells(design, length)) * bits // 8)


def _round_task(design: TrainingDesign, length: int, cells: int) -> Task:
    """The task of a round with `cells`, those of a second sketch included, as to its size."""
    second = _second_cells(design, length)
    main = whole_numbers(
        design, length, design.sketch(length, max(cells - second, 1), 0), design.clip
    )
    sketch: VectorSketch | RoundSketch = main
    if second:
        small = design.second_sketch(length, 0)
        beside = (
            whole_numbers(design, length, small, design.clip)
            if design.secure is None
            else second_whole_numbers(main, small, design.clip)
        )
        sketch = RoundSketch(main=main, second=beside)
    scale = max(design.multiplier, 1e-6) * sketch.sensitivity(1).l2
    mechanism: Mechanism = NoNoise()
    if design.secure is not None:
        mechanism = design.secure.noise(scale, design.cohort)
    elif design.multiplier:
        mechanism = NoiseAtRelease(noise="gaussian", scale=scale)
    return sum_task(
        design.secure,
        sketch=sketch,
        mechanism=mechanism,
        campaign="",
        cohort="",
        devices=design.cohort,
    )


def _work(design: TrainingDesign | DiffSketchDesign, rows: int) -> TrainingWork:
    return TrainingWork(
        rounds=design.rounds,
        cohort=design.cohort,
        parameters=design.length,
        rows=rows,
        products=models.products(design.model, parameters=design.length, inputs=design.inputs),
        examples=_examples(design.local),
    )


def _costs(design: TrainingDesign, length: int, cells: int) -> dict[str, float | int]:
    """The work of the collector and of a simulation."""
    task = _round_task(design, length, cells)
    main = task.sketch.main if isinstance(task.sketch, RoundSketch) else task.sketch
    dense = getattr(main, "dense", None)
    return _work(design, dense.rows if dense else 0).costs(task)


def _of_examples(local: LocalTraining) -> str:
    examples = _examples(local)
    return f"a client trains on {examples:,} example{'s' if examples > 1 else ''} per round"


def _examples(local: LocalTraining) -> int:
    """How many examples a client trains on in a round, repeated ones included: unless the study
    says so, one batch per epoch."""
    if local.steps is not None:
        return local.steps * local.batch
    return local.epochs * (local.most_examples or local.batch)


def _warnings(study: Study, design: TrainingDesign) -> list[str]:
    warnings = []
    spent = epsilon_of([design.loss], study.delta)
    if study.epsilon is None and math.isfinite(spent):
        warnings.append(
            f"a noise multiplier of {design.noise_multiplier:g} over {design.rounds:,} rounds "
            f"spends epsilon {epsilon_text(spent)} at delta {study.delta:g}"
        )
    if math.isfinite(spent) and spent > 10:
        warnings.append(f"epsilon {epsilon_text(spent)} promises next to nothing")
    if design.sampling == "fixed" and design.noise_multiplier:
        warnings.append(
            'cohorts of a fixed size cost much more than sampling = "poisson", which draws each '
            "client independently"
            if design.is_amplified
            else "the server knows the cohorts, so drawing them at random saves nothing; with "
            'sampling = "passes" a client is in fewer of them'
        )
    if design.noise_multiplier and study.delta > 1 / design.clients:
        warnings.append(
            f"delta {study.delta:g} is more than 1/devices: even showing one device at random "
            f"would keep that promise; use at most {0.1 / design.clients:.1g}"
        )
    return warnings


# Sketched training (paper 003).


def plan_sketched(study: Study) -> Plan:
    """The plan of a training by DiffSketch."""
    design = sketched_design(study)
    length, exchange = design.length, design.exchange
    spent, taking_part = design.epsilon(study.delta), design.rounds * design.cohort / design.clients
    up, down = exchange.bits(length) // 8, design.bytes_down
    return Plan(
        study=study,
        design=design,
        algorithm=f"{design.method} with DiffSketch, {exchange.label}",
        predicted={
            "epsilon": None if math.isinf(spent) else spent,
            "model_parameters": length,
            "rounds": design.rounds,
            "rounds_per_device": taking_part,
            "bytes_per_round": up,
            "bytes_down_per_round": down,
            "bytes_per_device": round(up * taking_part),
            "bytes_down": round(down * taking_part),
            "rate": design.rate,
            "rate_both_ways": 2 * PARAMETER_BYTES * length / (up + down),
            **_work(design, getattr(exchange, "rows", 0)).simulated(),
            "assumes": _of_examples(design.local),
        },
        privacy=sketched_promise(study, design),
        warnings=tuple(_sketched_warnings(study, design)),
    )


def sketched_design(study: Study) -> DiffSketchDesign:
    """The training by DiffSketch that a study asks for."""
    keys = study.training
    assert keys is not None  # Study has checked
    assert study.devices is not None  # plan() has checked
    idle = {
        "compression": study.compression is not None,
        "bytes_per_device": study.bytes_per_device is not None,
        "blocks": study.blocks is not None,
        "training.tail_update": keys.tail_update is not None,
        "training.server": (keys.server, keys.server_rate, keys.momentum) != ("momentum", 1.0, 0.9),
        "training.adaptive_clip": keys.adaptive_clip,
        "training.largest_l1": keys.largest_l1 is not None,
        "training.hidden": keys.hidden is not None,
    }
    if any(idle.values()):
        names = ", ".join(name for name, is_set in idle.items() if is_set)
        raise StudyError(f'no effect with algorithm = "diffsketch": {names}; leave it out')
    if keys.mode is None or study.rows is None or study.width is None:
        raise StudyError(
            'algorithm = "diffsketch" needs rows and width, the sizes of the sketch, and '
            "training.mode",
            hint='set training.mode to "gaussian" for a promise, or to "none" or "paper"',
        )
    if keys.sampling not in (None, "fixed", "by_examples"):
        raise StudyError(
            'sampling must be "fixed" or "by_examples" with algorithm = "diffsketch"; got '
            f"{keys.sampling}"
        )
    private = keys.mode == "gaussian"
    weighted = keys.sampling == "by_examples"
    require(
        not (private and weighted),
        'sampling = "by_examples" has no accounted cost, since the number of examples is private; '
        'set it to "fixed", or mode to "none" or "paper"',
    )
    require(
        private or (study.epsilon is None and not keys.noise_multiplier),
        f'mode = "{keys.mode}" promises nothing: set epsilon = inf, or mode = "gaussian"',
    )
    require(private == (study.clip is not None), 'clip is for mode = "gaussian", and needed there')
    require(
        not private or (study.epsilon is None) != (keys.noise_multiplier is None),
        'mode = "gaussian" needs epsilon, or epsilon = inf and training.noise_multiplier',
    )
    exchange = DiffSketch(
        rows=study.rows, width=study.width, mode=keys.mode, clip=study.clip,
        noise_multiplier=(keys.noise_multiplier or LARGEST_MULTIPLIER) if private else 0.0,
        epsilon=keys.claimed_epsilon, padding=keys.padding, correction=keys.correction,
        i_know_this_is_not_private=keys.i_know_this_is_not_private, seed=keys.seed,
    )  # fmt: skip
    design = DiffSketchDesign(
        model=keys.model, inputs=keys.inputs, classes=keys.classes, clients=study.devices,
        cohort=keys.cohort, rounds=study.round_count,
        local=_local_training(keys),
        exchange=exchange, by_examples=weighted, seed=keys.seed,
        own_parameters=keys.parameters,
    )  # fmt: skip
    if study.epsilon is None:
        return design

    def noised(multiplier: float) -> DiffSketchDesign:
        return replace(design, exchange=replace(exchange, noise_multiplier=multiplier))

    multiplier = least_multiplier(lambda z: noised(z).epsilon(study.delta), study.epsilon)
    if math.isinf(multiplier):
        raise ImpossibleError(
            f"no noise multiplier up to {LARGEST_MULTIPLIER:g} keeps epsilon {study.epsilon:g}",
            hint="raise epsilon or delta, or ask for fewer rounds",
        )
    return noised(multiplier)


def sketched_promise(study: Study, design: DiffSketchDesign) -> Privacy:
    """The privacy statement of a training by DiffSketch, with noise that no seed determines."""
    spent, loss = design.epsilon(study.delta), design.loss
    guarantee = f"{NOT_PRIVATE}: a sketch is a function of its vector, and its hashes are public"
    mechanism, neighbours, assumptions = "none", _NEIGHBOURS["zero-out"], tuple[str, ...]()
    mode = study.training.mode if study.training is not None else None
    if mode == "paper":
        mechanism = "as paper 003 prints it: noise that depends on private data, if any"
    if isinstance(loss, SampledLoss):
        guarantee = _guarantee(study, design, spent)
        mechanism = (
            f"discrete Gaussian noise of {design.exchange.noise_multiplier:.4f} times the largest "
            "norm of a sketch"
        )
        if loss.scheme == "fixed":
            neighbours = _NEIGHBOURS["replace"]
            assumptions = (
                f"cohorts of {design.cohort:,} in {design.clients:,} are drawn at random, with a "
                "fixed size, and stay secret",
            )
        assumptions += _of_own(design)
    return Privacy(
        epsilon=None if math.isinf(spent) else spent,
        delta=study.delta,
        guarantee=guarantee,
        unit="device",
        neighbours=neighbours,
        mechanism=mechanism,
        trust=study.trust,
        sees=SEES_TABLES,
        assumptions=assumptions,
        influence=design.influence,
    )


def _sketched_warnings(study: Study, design: DiffSketchDesign) -> list[str]:
    mode = study.training.mode if study.training is not None else None
    if mode == "gaussian":
        return []
    return [
        f'mode = "{mode}" has no DP guarantee; paper 003 claims one for sketches, '
        'and it does not hold (docs/concepts/diffsketch.md); mode = "gaussian" has one'
    ]
