"""Train a study's model on the clients of a data set: each round is charged, then run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from sfumato.errors import BudgetError, DataError, SfumatoError, SpecError, StudyError
from sfumato.flow.release import Cost, Release
from sfumato.learn import plan as train_plan
from sfumato.learn.data import TESTED_ON_CLIENTS, Federated
from sfumato.learn.training import Progress, RoundFigures, Training
from sfumato.planning import Plan, plan
from sfumato.privacy import Charge, Ledger, PlannedLoss
from sfumato.questions.promise import TIME
from sfumato.study import Study

CAMPAIGN = "training"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TrainedModel(Release):
    """A model, how well it does on the test set, what it cost and what it promises."""

    parameters: dict[str, torch.Tensor]  # by name, as the model's state
    accuracy: float  # exact, as the loss and the history: see privacy.not_covered
    loss: float
    rate: float  # model parameters by cells sent
    history: tuple[RoundFigures, ...]  # of the rounds after which the test set was looked at

    def head(self) -> dict[str, Any]:
        """Everything but the parameters as plain data."""
        return {
            **Release.head(self),
            "accuracy": self.accuracy,
            "loss": self.loss,
            "rate": self.rate,
            "history": [
                {"round": seen.round, "accuracy": seen.accuracy, "loss": seen.loss}
                for seen in self.history
            ],
        }

    def save(self, path: Path) -> None:
        """The parameters, as `torch.load` and `load_state_dict` take them."""
        torch.save(self.parameters, path)

    def __repr__(self) -> str:
        epsilon = self.privacy.epsilon
        promise = "no differential privacy" if epsilon is None else f"epsilon {epsilon:.4g}"
        exact = " on clients' data (exact)" if TESTED_ON_CLIENTS in self.privacy.not_covered else ""
        return (
            f"TrainedModel: accuracy {self.accuracy:.4f}{exact} after {self.cost.rounds:,} rounds, "
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

    Every round is charged to the ledger, if there is one, before its sum is opened, and all of them
    with the first: a training whose rounds it cannot all pay for shows nothing. With `resume`, an
    interrupted training goes on from its checkpoint, which is written after every round and before
    anything of the round is shown. A checkpoint needs the `ledger` that its training started with:
    a round that is run again, since it was lost or since the checkpoint is a copy, is charged
    again. When the ledger refuses a later round, training ends there, and a note says so.

    With a `seed` a run repeats exactly, noise included, so it is for study and never for a real
    model; `exact=False`, floating-point noise, is for experiments as well, and quicker. With
    `protocol` every client of a secure sum computes by itself, with chance of its own: a collector
    that is answered by a `NetworkFleet` of the same seed, in the same cohorts, ends with the same
    parameters, bit for bit. `metrics` is a file that gets a line of JSON per round, and
    `tensorboard` a folder for the same figures, if TensorBoard is installed.
    """
    planned = study if isinstance(study, Plan) else plan(_for(study, data))
    if planned.study.facts.data != "examples":
        raise StudyError(f"only a train study is trained; got {planned.study.question}")
    design: Any = planned.design
    if checkpoint is not None and ledger is None:
        raise SpecError(
            "a checkpoint needs the ledger that its training is charged to, so that no round is "
            "run twice for one charge; got no ledger",
            hint="give a ledger (--ledger FILE) from the start",
        )
    training = Training(design, data, torch.device(device), exact, seed, protocol)
    if checkpoint is not None and checkpoint.exists():
        if not resume:
            raise DataError(
                f"there is a checkpoint at {checkpoint}",
                hint="resume from it (--resume), or name another file",
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
    return _trained(planned, training, notes)


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
            if name in ("accuracy", "loss") and figures.not_covered is not None:
                name = f"{name} (exact, on clients' data)"
            if name not in ("round", "not_covered") and value is not None:
                writer.add_scalar(name, value, figures.round)

    try:
        yield show
    finally:
        writer.close()


def _for(study: Study | Mapping[str, Any] | Path | str, data: Federated) -> Study:
    study = Study.read(study)
    return replace(study, devices=study.devices or len(data.train))


class _RunLedger:
    """A ledger on which one run of a training has a name of its own: a design may be trained twice,
    and each time is a plan of its own."""

    def __init__(self, ledger: Ledger, run: str) -> None:
        self.ledger, self.run = ledger, run

    def charge(self, *, campaign: str, cohort: str, task: str, loss: Charge) -> None:
        """All rounds are charged as one plan with the first; a round that is run again is charged
        besides, when the plan has no more left."""
        if isinstance(loss, PlannedLoss):
            loss = replace(loss, plan=self.run)
        name = f"{CAMPAIGN} {self.run} {campaign}"
        self.ledger.charge(campaign=name, cohort=cohort, task=task, loss=loss)

    def rounds(self) -> int:
        """Rounds of this run that were charged."""
        own = f"{CAMPAIGN} {self.run}"
        return sum(each.campaign.startswith(own) for each in self.ledger.entries())

    def require(self, rounds: int) -> None:
        """Raise DataError if a checkpoint has more rounds than were charged here."""
        missing = rounds - self.rounds()
        if missing > 0:
            raise DataError(
                f"the ledger must have the {rounds:,} rounds that the checkpoint has run; "
                f"it lacks {missing:,} of them",
                hint="give the ledger that the training started with",
            )

    def notes(self, rounds: int) -> list[str]:
        """That more was charged than a model of so many rounds has, if it was."""
        again = self.rounds() - rounds
        if not again:
            return []
        more = "1 more round was" if again == 1 else f"{again:,} more rounds were"
        return [
            f"{more} charged than this model has: lost in an interruption, or run from a copy "
            "of the checkpoint"
        ]


def _trained(planned: Plan, training: Training, notes: Sequence[str]) -> TrainedModel:
    design, campaign = training.design, training.campaign
    accuracy, loss = training.evaluate()
    privacy = train_plan.promise(planned.study, design, exact=training.exact)
    if training.noise_seed is not None:
        privacy = privacy.but_for(
            "this run's noise was drawn from a seed: who knows it can take the noise off"
        )
    for exception in (*training.data.not_covered, TIME):
        privacy = privacy.but_for(exception)
    cells = campaign.cells_sent / max(campaign.done, 1)
    return TrainedModel(
        parameters={name: value.cpu() for name, value in training.model.state_dict().items()},
        accuracy=accuracy,
        loss=loss,
        rate=campaign.rate,
        history=tuple(training.history),
        privacy=privacy,
        cost=Cost(
            devices=design.clients,
            rounds=campaign.done,
            bytes_per_device=round(
                train_plan.round_bytes(design, campaign.length, round(cells))
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
