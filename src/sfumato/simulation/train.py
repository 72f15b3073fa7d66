"""Train a study's model on the clients of a data set: charged first, resumed where it stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from sfumato.errors import DataError, SfumatoError, StudyError
from sfumato.flow.release import Cost, Privacy
from sfumato.learn import plan as train_plan
from sfumato.learn.data import Federated
from sfumato.learn.design import TrainingDesign
from sfumato.learn.training import Progress, RoundFigures, Training
from sfumato.planning import Plan, plan
from sfumato.privacy import Budget, Ledger
from sfumato.spec import digest
from sfumato.study import Study

CAMPAIGN = "training"
EVERYBODY = "everybody"  # all clients may be drawn in any round


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TrainedModel:
    """A model, how well it does on the test set, what it cost and what it promises."""

    parameters: dict[str, torch.Tensor]  # by name, as the model's state
    accuracy: float
    loss: float
    rate: float  # model parameters by cells sent
    history: tuple[RoundFigures, ...]  # of the rounds after which the test set was looked at
    privacy: Privacy
    cost: Cost
    study: Mapping[str, Any]
    plan: Mapping[str, Any]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Everything but the parameters as plain data."""
        return {
            "study": dict(self.study),
            "plan": dict(self.plan),
            "privacy": self.privacy.to_dict(),
            "cost": self.cost.to_dict(),
            "accuracy": self.accuracy,
            "loss": self.loss,
            "rate": self.rate,
            "history": [
                {"round": seen.round, "accuracy": seen.accuracy, "loss": seen.loss}
                for seen in self.history
            ],
            "notes": list(self.notes),
        }

    def save(self, path: Path) -> None:
        """The parameters, as `torch.load` and `load_state_dict` take them."""
        torch.save(self.parameters, path)

    def __repr__(self) -> str:
        epsilon = self.privacy.epsilon
        promise = "no differential privacy" if epsilon is None else f"epsilon {epsilon:.4g}"
        return (
            f"TrainedModel: accuracy {self.accuracy:.4f} after {self.cost.rounds:,} rounds, "
            f"{self.rate:.3g} parameters to a cell; {promise}"
        )


def train(
    study: Plan | Study | Mapping[str, Any] | Path | str,
    data: Federated,
    *,
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
    """Train to the end and give the model back.

    With `resume`, an interrupted training goes on from its checkpoint, which is written after every
    round and before anything of the round is shown. The whole training is charged to the ledger
    before it starts; what is resumed was paid for. With a `seed` a run repeats exactly, noise
    included, so it is for study and never for a real model; `exact=False`, floating-point noise, is
    for experiments as well, and quicker. With `protocol` every client of a secure sum computes by
    itself, with chance of its own: a collector that is answered by a `NetworkFleet` of the same
    seed, in the same cohorts, ends with the same parameters, bit for bit. `metrics` is a file that
    gets a line of JSON a round, and `tensorboard` a folder for the same figures, if TensorBoard is
    installed.
    """
    planned = study if isinstance(study, Plan) else plan(_for(study, data))
    design = planned.design
    if not isinstance(design, TrainingDesign):
        raise StudyError(f"only a train study is trained; got {planned.study.question}")
    training = Training(design, data, torch.device(device), exact, seed, protocol)
    if checkpoint is not None and checkpoint.exists():
        if not resume:
            raise DataError(
                f"there is a checkpoint at {checkpoint}",
                hint="resume from it (--resume), or name another file",
            )
        training.load(checkpoint)
    books = ledger or Ledger(Budget(epsilon=planned.study.epsilon, delta=planned.study.delta))
    _charge(books, design, resumed=training.done > 0)
    with _board(tensorboard) as show:
        for figures in training.run(
            evaluate_every=evaluate_every, checkpoint=checkpoint, metrics=metrics, tell=progress
        ):
            show(figures.shown)
    return _trained(planned, design, training, exact, seed)


@contextmanager
def _board(folder: Path | None) -> Iterator[Callable[[RoundFigures], None]]:
    """Shows a round's figures in TensorBoard's files, or nowhere."""
    if folder is None:
        yield lambda figures: None
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as problem:
        raise SfumatoError(
            "figures for TensorBoard need the package tensorboard", hint="pip install tensorboard"
        ) from problem
    writer = SummaryWriter(str(folder))

    def show(figures: RoundFigures) -> None:
        for name, value in asdict(figures).items():
            if name != "round" and value is not None:
                writer.add_scalar(name, value, figures.round)

    try:
        yield show
    finally:
        writer.close()


def _for(study: Study | Mapping[str, Any] | Path | str, data: Federated) -> Study:
    if isinstance(study, Path | str):
        study = Study.load(study)
    elif not isinstance(study, Study):
        study = Study.from_mapping(study)
    return replace(study, devices=study.devices or len(data.train))


def _charge(books: Ledger, design: TrainingDesign, *, resumed: bool) -> None:
    """The whole training at once, unless this is the rest of one that is on the ledger."""
    name = digest(design)
    if resumed and any(entry.task == name for entry in books.entries()):
        return
    books.charge(campaign=f"{CAMPAIGN} {name[:12]}", cohort=EVERYBODY, task=name, loss=design.loss)


def _trained(
    planned: Plan, design: TrainingDesign, training: Training, exact: bool, seed: int | None
) -> TrainedModel:
    accuracy, loss = training.evaluate()
    privacy = train_plan.promise(planned.study, design, exact=exact)
    if seed is not None:
        privacy = privacy.but_for(
            "this run's noise was drawn from a seed: who knows it can take the noise off"
        )
    notes = list(planned.warnings)
    cells = training.cells_sent / max(training.done, 1)
    return TrainedModel(
        parameters={name: value.cpu() for name, value in training.model.state_dict().items()},
        accuracy=accuracy,
        loss=loss,
        rate=training.rate,
        history=tuple(training.history),
        privacy=privacy,
        cost=Cost(
            devices=design.clients,
            rounds=training.done,
            bytes_per_device=round(
                train_plan.round_bytes(design, training.length, round(cells))
                * design.rounds
                * design.cohort
                / design.clients
            ),
            seconds=training.seconds,
        ),
        study=planned.study.to_dict(),
        plan=planned.summary(),
        notes=tuple(notes),
    )
