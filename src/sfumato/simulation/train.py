"""Train a study's model, or a module of your own, on the clients of a data set: each round is
charged, then run."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sfumato.errors import BudgetError, DataError, SfumatoError, SpecError, StudyError
from sfumato.flow.release import Release, size_of_updates
from sfumato.learn import models
from sfumato.learn import plan as train_plan
from sfumato.learn.data import TESTED_ON_CLIENTS, Federated
from sfumato.learn.design import TrainingDesign
from sfumato.learn.diffsketch import FLOAT_BITS, DiffSketchDesign, SketchedTraining
from sfumato.learn.gradients import cross_entropy
from sfumato.learn.own_model import Loss, Optimizer, OwnModel, model_of
from sfumato.learn.training import Progress, RoundFigures, Training
from sfumato.planning import Plan, plan
from sfumato.privacy import Charge, Ledger, PlannedLoss, SystemRng
from sfumato.privacy.accounting import epsilon_text
from sfumato.questions.promise import SEEDED_NOISE, TIME
from sfumato.study import Study, TrainingStudy

CAMPAIGN = "training"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TrainedModel(Release):
    """A model and its accuracy on the test set, with its cost and privacy.

    Without test examples there is neither accuracy nor loss; an accuracy is of classes only.
    """

    model: nn.Module  # trained, on the CPU, in evaluation mode
    inputs: Tensor = field(compare=False)  # zeros, in the shape of two inputs
    accuracy: float | None  # without noise, like loss and history: see privacy.not_covered
    loss: float | None
    rate: float  # model parameters per cell sent
    history: tuple[RoundFigures, ...]  # for rounds after which the model was tested

    def head(self) -> dict[str, Any]:
        """Everything but the parameters as plain data."""
        return {
            **Release.head(self),
            "accuracy": self.accuracy,
            "loss": self.loss,
            "rate": self.rate,
            "history": [
                {"round": figures.round, "accuracy": figures.accuracy, "loss": figures.loss}
                for figures in self.history
            ],
        }

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The model's state: its parameters and buffers by name."""
        return self.model.state_dict()

    def save(self, path: Path | str) -> None:
        """Save the parameters for `torch.load` and `load_state_dict`; or, if the name ends in
        .onnx, the whole model for any ONNX runtime, which needs `sfumato[onnx]`."""
        check_model_file(path)
        if Path(path).suffix == ".onnx":
            _save_onnx(self.model, self.inputs, path)
        else:
            torch.save(self.parameters, path)

    def __repr__(self) -> str:
        epsilon = self.privacy.epsilon
        promise = (
            "no differential privacy" if epsilon is None else f"epsilon {epsilon_text(epsilon)}"
        )
        exact = " on clients' data (exact)" if TESTED_ON_CLIENTS in self.privacy.not_covered else ""
        figure = "" if self.loss is None else f"loss {self.loss:.4g}{exact} "
        if self.accuracy is not None:
            figure = f"accuracy {self.accuracy:.4f}{exact} "
        size = size_of_updates(self.rate)
        return f"TrainedModel: {figure}after {self.cost.rounds:,} rounds, {size}; {promise}"


def check_model_file(path: Path | str) -> None:
    """Raise SfumatoError unless a model can be written to this path, before it is trained."""
    if not Path(path).parent.is_dir():
        raise SfumatoError(f"there is no folder {Path(path).parent}")
    missing = [name for name in ("onnx", "onnx_ir", "onnxscript") if find_spec(name) is None]
    if Path(path).suffix == ".onnx" and missing:
        raise SfumatoError(
            f"a file that ends in .onnx needs the package {missing[0]}, which is not installed",
            hint='pip install "sfumato[onnx]"',
        )


def _save_onnx(model: nn.Module, inputs: Tensor, path: Path | str) -> None:
    """Export a model without the paths and lines of code that PyTorch would add."""
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's, about its own parts
        program = torch.onnx.export(
            model,
            (inputs,),
            dynamo=True,
            verbose=False,
            input_names=["inputs"],
            output_names=["outputs"],
            dynamic_shapes=({0: torch.export.Dim("examples")},),
        )
    assert program is not None  # without a file name, it is returned
    ClearMetadataAndDocStringPass()(program.model)
    program.save(str(path))


def train(
    study: Plan | Study | Mapping[str, Any] | Path | str,
    data: Federated,
    *,
    model: nn.Module | None = None,
    loss: Loss | None = None,
    optimizer: Optimizer | None = None,
    device: str = "cpu",
    exact: bool = True,
    seed: int | None = None,
    protocol: bool = False,
    ledger: Ledger | None = None,
    checkpoint: Path | None = None,
    resume: bool = False,
    metrics: Path | None = None,
    tensorboard: Path | None = None,
    evaluate_every: int = 10,
    progress: Progress | None = None,
) -> TrainedModel:
    """Train a model and return it.

    With `model`, a module of your own takes the place of the study's `training.model`; it is not
    changed, and the trained one is in the release. `loss(outputs, targets)` is the loss of a batch
    as one number, by default the cross-entropy of classes, of which −1 is ignored.
    `optimizer(parameters)` is a client's optimizer, a new one in every round, by default gradient
    descent at `training.learning_rate`. A client's whole update is clipped, whatever the module
    computes, so the promise is that of the study.

    Every round is charged to the ledger, if there is one, before its sum is opened, and all of them
    with the first: if the budget does not cover all rounds, nothing is shown. With `resume`, an
    interrupted training continues from its checkpoint, which is written after every round, before
    anything of the round is shown. A checkpoint needs the `ledger` that its training started with:
    a round that runs again, because it was lost or because the checkpoint is a copy, is charged
    again. If the ledger refuses a later round, training ends there with a note.

    With a `seed` a run repeats exactly, including its noise, so it is for experiments and never for
    a real model; so is `exact=False`, faster floating-point noise. With `protocol` every client of
    a secure sum computes by itself, with its own random generator: a collector with a
    `NetworkFleet` of the same seed, in the same cohorts, ends with the same parameters, bit for
    bit. `metrics` is a file that gets one line of JSON per round, and `tensorboard` a folder for
    the same figures, if TensorBoard is installed.
    """
    if not isinstance(data, Federated):
        raise DataError(
            f"data must be a Federated; got {type(data).__name__}",
            hint="Federated.of(…) takes each client's inputs and targets, Federated.from_table(…) "
            "a data frame",
        )
    own = _own(model, loss, optimizer)
    planned = study if isinstance(study, Plan) else plan(_for(study, data, own))
    if planned.study.facts.data != "examples":
        raise StudyError(f"the question must be train; got {planned.study.question}")
    design: Any = planned.design
    if isinstance(design, DiffSketchDesign):
        options: dict[str, Any] = {
            "checkpoint": checkpoint,
            "metrics": metrics,
            "tensorboard": tensorboard,
        }
        options |= {"protocol": protocol or None, "exact": None if exact else "float noise"}
        options |= {"device": None if device == "cpu" else device, "resume": resume or None}
        if names := ", ".join(name for name, value in options.items() if value is not None):
            raise SpecError(f'algorithm = "diffsketch" does not have {names}; leave it out')
        return _train_sketched(planned, design, data, own, seed, ledger, progress, evaluate_every)
    if resume and checkpoint is None:
        raise SpecError("resume continues from a checkpoint; got none", hint="give the checkpoint")
    if checkpoint is not None and ledger is None:
        raise SpecError(
            "a checkpoint needs the ledger of its training, so that every run of a round is "
            "charged; got no ledger",
            hint="use a ledger (--ledger FILE) from the start",
        )
    training = Training(design, data, _usable(device), exact, seed, protocol, own=own)
    if checkpoint is not None and checkpoint.exists():
        if not resume:
            raise DataError(
                f"there is already a checkpoint at {checkpoint}",
                hint="resume from it (--resume), or choose another file",
            )
        training.load(checkpoint)
    notes = list(planned.warnings)
    if ledger is not None:
        training.ledger = account = _RunLedger(ledger, training.id)
        account.require(training.campaign.rounds_held)
    with _board(tensorboard) as show:
        try:
            for figures in training.run(
                evaluate_every=evaluate_every,
                checkpoint=checkpoint,
                metrics=metrics,
                tell=progress,
            ):
                show(figures.public)
        except BudgetError as refused:
            done = training.campaign.done
            if done == 0:
                raise
            notes.append(f"{done:,} of {design.rounds:,} rounds were run: {refused}")
    if ledger is not None:
        notes += account.notes(training.campaign.rounds_held)
    return _release(planned, training, notes)


@contextmanager
def _board(folder: Path | None) -> Iterator[Callable[[RoundFigures], None]]:
    """A function that writes a round's figures to TensorBoard's files, if there is a folder."""
    if folder is None:
        yield lambda figures: None
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as problem:
        raise SfumatoError(
            "TensorBoard is not installed", hint="pip install tensorboard"
        ) from problem
    writer = SummaryWriter(str(folder))

    def show(figures: RoundFigures) -> None:
        for name, value in asdict(figures).items():
            if name in ("accuracy", "loss") and figures.not_covered is not None:
                name = f"{name} (exact, on clients' data)"
            if name not in ("round", "not_covered") and value is not None:
                writer.add_scalar(name, value, figures.round)

    try:
        yield show
    finally:
        writer.close()


def _usable(device: str) -> torch.device:
    """The PyTorch device of this name; SpecError if it cannot be used here."""
    try:
        return torch.empty(0, device=device).device
    except (AssertionError, RuntimeError):  # the former without CUDA
        raise SpecError(
            f"device must be one that PyTorch can use on this machine; got {device}",
            hint="use cpu, or install a build of PyTorch and a driver for this device",
        ) from None


def _own(
    model: nn.Module | None, loss: Loss | None, optimizer: Optimizer | None
) -> OwnModel | None:
    if model is None:
        if loss is not None or optimizer is not None:
            raise SpecError(
                "loss and optimizer are for a module of your own; got no model",
                hint="give model=…; sfumato.learn.models.make(…) is the module of a name",
            )
        return None
    if not isinstance(model, nn.Module):
        raise SpecError(
            f"model must be a torch.nn.Module; got {type(model).__name__}",
            hint="give an instance, such as model=MyModule()" if isinstance(model, type) else None,
        )
    if loss is not None and not callable(loss):
        raise SpecError(
            f"loss must be a function of outputs and targets; got {type(loss).__name__}",
            hint="such as torch.nn.MSELoss()",
        )
    if optimizer is not None and not callable(optimizer):
        raise SpecError(
            f"optimizer must be a function of the parameters; got {type(optimizer).__name__}",
            hint="every client has its own: lambda parameters: torch.optim.Adam(parameters)",
        )
    return OwnModel(model, cross_entropy if loss is None else loss, optimizer)


def _for(
    study: Study | Mapping[str, Any] | Path | str, data: Federated, own: OwnModel | None
) -> Study:
    """The study with the number of clients, and of the parameters of a module of one's own."""
    study = Study.read(study)
    keys = study.training
    if own is not None and keys is not None:
        if keys.model is not None:
            raise StudyError(
                f"the study names the model {keys.model}, and there is a module of your own",
                hint="leave out training.model, or model=…",
            )
        if (
            own.optimizer is not None
            and keys.learning_rate != TrainingStudy(cohort=1).learning_rate
        ):
            raise StudyError(
                "training.learning_rate has no effect on an optimizer of your own; leave it out"
            )
        keys = replace(keys, parameters=models.count(own.module))
    return replace(study, training=keys, devices=study.devices or len(data.train))


class _RunLedger:
    """A ledger for one run of a training: a design may be trained several times, and each run is
    charged as its own plan."""

    def __init__(self, ledger: Ledger, run: str) -> None:
        self.ledger, self.run = ledger, run

    def charge(self, *, campaign: str, cohort: str, task: str, loss: Charge) -> None:
        """Charge all rounds as one plan with the first; a round that runs again is charged
        additionally, when the plan is used up."""
        if isinstance(loss, PlannedLoss):
            loss = replace(loss, plan=self.run)
        name = f"{CAMPAIGN} {self.run} {campaign}"
        self.ledger.charge(campaign=name, cohort=cohort, task=task, loss=loss)

    def rounds(self) -> int:
        """The number of charged rounds of this run."""
        own = f"{CAMPAIGN} {self.run}"
        return sum(each.campaign.startswith(own) for each in self.ledger.entries())

    def require(self, rounds: int) -> None:
        """Raise DataError if a checkpoint has more rounds than the ledger."""
        missing = rounds - self.rounds()
        if missing > 0:
            raise DataError(
                f"the ledger must have the {rounds:,} rounds of the checkpoint; it lacks "
                f"{missing:,} of them",
                hint="use the ledger that the training started with",
            )

    def notes(self, rounds: int) -> list[str]:
        """A note about charged rounds that are not in the model, if there are any."""
        extra = self.rounds() - rounds
        if not extra:
            return []
        more = "1 more round was" if extra == 1 else f"{extra:,} more rounds were"
        return [
            f"{more} charged than this model has: they were lost in an interruption, or run from a "
            "copy of the checkpoint"
        ]


def _train_sketched(
    planned: Plan,
    design: DiffSketchDesign,
    data: Federated,
    own: OwnModel | None,
    seed: int | None,
    ledger: Ledger | None,
    progress: Progress | None,
    evaluate_every: int,
) -> TrainedModel:
    """Run a training by DiffSketch. Without a seed its noise and cohorts are secret."""
    training = SketchedTraining(design, data, seed, delta=planned.study.delta, own=own)
    if ledger is not None:
        training.ledger = _RunLedger(ledger, SystemRng().words(2).tobytes().hex())
    started, history = time.perf_counter(), []
    tested = frozenset(range(evaluate_every, design.rounds + 1, evaluate_every))
    not_covered = TESTED_ON_CLIENTS if data.has_private_test else None
    for figures in training.run(evaluate_at=tested):
        if figures.accuracy is not None:
            history.append(
                RoundFigures(
                    round=figures.round, cells=figures.bits // FLOAT_BITS, clip=math.inf,
                    accuracy=figures.accuracy, rate=design.rate, not_covered=not_covered,
                )
            )  # fmt: skip
        if progress is not None:
            progress(f"round {figures.round}", figures.round / design.rounds)
    accuracy, loss = training.evaluate()
    privacy = planned.privacy
    exceptions = [*data.not_covered, TIME]
    if seed is not None:
        exceptions.insert(0, SEEDED_NOISE)
    for exception in exceptions:
        privacy = privacy.but_for(exception)
    predicted = planned.predicted
    return TrainedModel(
        **_trained(design, own, training.flat, data),
        accuracy=accuracy,
        loss=loss,
        rate=design.rate,
        history=tuple(history),
        **planned.release_head(
            devices=design.clients,
            rounds=design.rounds,
            bytes_per_device=predicted["bytes_per_device"],
            seconds=time.perf_counter() - started,
            privacy=privacy,
            notes=(
                *planned.warnings,
                f"a device also received {predicted['bytes_down']:,} bytes in its rounds",
            ),
        ),
    )


def _trained(
    design: TrainingDesign | DiffSketchDesign, own: OwnModel | None, flat: Tensor, data: Federated
) -> dict[str, Any]:
    """The model, of a copy that has seen no example, and the shape of its inputs."""
    model = model_of(design, own).cpu().eval()
    models.assign(model, flat)
    return {
        "model": model,
        "inputs": data.train.inputs.new_zeros(2, *data.train.inputs.shape[1:]).cpu(),
    }


def _release(planned: Plan, training: Training, notes: Sequence[str]) -> TrainedModel:
    design, campaign = training.design, training.campaign
    accuracy, loss = training.evaluate()
    privacy = train_plan.promise(planned.study, design, exact=training.exact)
    if training.noise_seed is not None:
        privacy = privacy.but_for(SEEDED_NOISE)
    for exception in (*training.data.not_covered, TIME):
        privacy = privacy.but_for(exception)
    cells = campaign.cells_sent / max(campaign.done, 1)
    return TrainedModel(
        **_trained(design, training.own, campaign.flat, training.data),
        accuracy=accuracy,
        loss=loss,
        rate=campaign.rate,
        history=tuple(training.history),
        **planned.release_head(
            devices=design.clients,
            rounds=campaign.done,
            bytes_per_device=round(
                train_plan.round_bytes(design, campaign.length, round(cells))
                * design.rounds
                * design.cohort
                / design.clients
            ),
            seconds=training.seconds,
            privacy=privacy,
            notes=notes,
        ),
    )
