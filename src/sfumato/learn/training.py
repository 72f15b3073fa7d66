"""Federated training: rounds of local training, a private sum of updates, a step of the server."""

from __future__ import annotations

import copy
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from pickle import UnpicklingError  # raised by torch for files without tensors

import numpy as np
import torch
from torch import Tensor, nn

from sfumato.arrays import I64
from sfumato.device.private import update_table
from sfumato.errors import DataError, SpecError
from sfumato.flow.accumulator import Batch
from sfumato.flow.campaign import step
from sfumato.flow.release import charge
from sfumato.flow.task import Task
from sfumato.learn import models
from sfumato.learn.campaign import RoundResult, TrainingCampaign, norm_of_table
from sfumato.learn.clients import check_fit, updates
from sfumato.learn.data import IGNORED, TESTED_ON_CLIENTS, Federated
from sfumato.learn.design import TrainingDesign, table_bound
from sfumato.learn.gradients import cross_entropy
from sfumato.learn.local_update import trainer
from sfumato.learn.own_model import Loss, OwnModel, loss_of, model_of
from sfumato.learn.tensors import TensorSketch
from sfumato.privacy import Account, Charge
from sfumato.privacy.samplers import Rng, SeededRng, SystemRng
from sfumato.sketch.vector import RoundSketch, VectorSketch
from sfumato.spec import LARGEST_INTEGER, digest, require

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFigures:
    """One round. Counts and time are exact, so only the person who runs the training may see them.
    Files contain `public`, which follows from noised sums and public numbers, except for accuracy
    and loss where `not_covered` says so.
    """

    round: int
    asked: int | None = None
    answered: int | None = None
    left_out: int | None = None  # clients whose update was not finite or too long
    empty: int | None = None  # clients without examples
    cells: int  # sent by each client, of both sketches
    clip: float
    seconds: float | None = None
    accuracy: float | None = None  # on the test set, in rounds that were evaluated
    loss: float | None = None
    rate: float | None = None  # parameters divided by cells sent, over all rounds so far
    not_covered: str | None = None  # which of these figures are exact and depend on clients' data

    @property
    def public(self) -> RoundFigures:
        """The same without counts and time, which depend on the cohort and its data."""
        return replace(self, asked=None, answered=None, left_out=None, empty=None, seconds=None)


class NoLedger:
    """A ledger that charges nobody: for experiments."""

    def charge(self, *, campaign: str, cohort: str, task: str, loss: Charge) -> None:
        pass


@dataclass(slots=True)
class Training:
    """A training with all its clients in one process; `run` continues to the end.

    A round draws a cohort, adds its clients' updates and gives the sum to the flow, which charges
    the ledger, opens the sum and adds the noise; the campaign absorbs it.

    With `exact`, sums are of whole numbers and noise comes from the exact samplers, as the promise
    says. Otherwise, sums and noise are floats on the model's device: faster, and for experiments
    only. With `noise_seed` a run can be repeated, noise included. With `protocol` every client of a
    secure sum computes by itself, as devices do over a network, and a run over a network with the
    same seeds gives the same model, bit for bit.
    """

    design: TrainingDesign
    data: Federated
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    exact: bool = True
    noise_seed: int | None = None
    protocol: bool = False
    chunk: int = 16
    ledger: Account = field(default_factory=NoLedger)
    own: OwnModel | None = None  # the model of a design without a name for it
    model: nn.Module = field(init=False)
    campaign: TrainingCampaign = field(init=False)
    seconds: float = field(init=False, default=0.0)  # spent on rounds by this process
    id: str = field(init=False)  # random; in the checkpoint and in charges to a ledger
    history: list[RoundFigures] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        if len(self.data.train) != self.design.clients:
            raise SpecError(
                f"the design is for {self.design.clients} clients; the data has "
                f"{len(self.data.train)}"
            )
        if self.protocol and not (self.exact and self.design.secure is not None):
            raise SpecError(
                "clients can compute by themselves only for an exact, secure sum; set trust to "
                '"secure", and exact to True'
            )
        require(
            not (self.protocol and self.own),
            f"clients that compute by themselves have no code for {models.OWN}; leave out protocol",
        )
        self.model = model_of(self.design, self.own).to(self.device)
        check_fit(self.model, self.data.train, loss_of(self.own))
        self.data = self.data.to(self.device)
        self.campaign = TrainingCampaign.begin(self.design, self.device, self.model)
        self.id = SystemRng().words(2).tobytes().hex()

    def run(
        self,
        *,
        evaluate_every: int = 10,
        checkpoint: Path | None = None,
        metrics: Path | None = None,
        tell: Progress | None = None,
        until: int | None = None,
    ) -> Iterator[RoundFigures]:
        """Run rounds to the end (or to round `until`) and yield each one's figures.

        A refused charge stops the training by raising. A checkpoint is written whole or not at all,
        after every round and before its figures are yielded. Metrics are appended, one line of JSON
        per round.
        """
        require.at_least(1, evaluate_every=evaluate_every)
        last = self.design.rounds if until is None else min(self.design.rounds, until)
        while (done := self.campaign.done + 1) <= last:
            figures = self.round()
            if done % evaluate_every == 0 or done == last:
                accuracy, loss = self.evaluate()
                figures = replace(
                    figures,
                    accuracy=accuracy,
                    loss=loss,
                    rate=self.campaign.rate,
                    not_covered=TESTED_ON_CLIENTS if self.data.has_private_test else None,
                )
                self.history.append(figures.public)
            if checkpoint is not None:
                self.save(checkpoint)
            if metrics is not None:
                with metrics.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(figures.public)) + "\n")
            if tell is not None:
                tell(f"round {done}", done / self.design.rounds)
            yield figures

    def round(self) -> RoundFigures:
        """One round: draw a cohort, add its updates, charge, noise, decode, step."""
        campaign, number, started = self.campaign, self.campaign.done, time.perf_counter()
        task = campaign.next_task()
        if task is None:
            raise SpecError(
                f"all {self.design.rounds} rounds are done, and no more are accounted for",
                hint="make a design with more rounds",
            )
        cells, cohort = campaign.cells, self.cohort(number)
        answering = self._answering(cohort, number)
        bad: Counter[str] = Counter()
        if self.exact:
            batch = self._gather(task, answering, bad)
            if batch.count < task.min_count:
                campaign.skip()
            else:
                step(
                    campaign, task, batch, ledger=self.ledger, rng=self.rng("noise", number),
                    charge_of=self.design.charge_of,
                )  # fmt: skip
        else:
            total = FloatSum(campaign)
            for deltas in self._updates(answering, bad):
                total.add(deltas)
            charge(task, ledger=self.ledger, loss=self.design.charge_of(task))
            campaign.take(total.noised(int(self.rng("noise", number).words(1)[0])))
        seconds = time.perf_counter() - started
        self.seconds += seconds
        alone = self.protocol  # clients that compute by themselves do not report these
        return RoundFigures(
            round=number + 1, asked=len(cohort), answered=len(answering), cells=cells,
            left_out=None if alone else bad["left_out"], empty=None if alone else bad["empty"],
            clip=campaign.clip, seconds=seconds,
        )  # fmt: skip

    def _gather(self, task: Task, answering: Tensor, bad: Counter[str]) -> Batch:
        """The sum of a cohort's tables. Where the server is trusted, clients that are not drawn, or
        do not answer, count as having sent zeros, so that their number is not revealed."""
        number = self.campaign.done
        total = np.zeros(task.sketch.shape, dtype=np.int64)
        if self.protocol:
            for table in self._by_devices(task, answering):
                total += table.reshape(total.shape)
            return Batch(task.id, total, len(answering))
        sketch, rounding = task.sketch, self.rng("rounding", number)
        assert isinstance(sketch, VectorSketch | RoundSketch)  # from `next_task`
        for deltas in self._updates(answering, bad):
            total += sketch.encode(sketch.tables(deltas.cpu().numpy(), rng=rounding))
        if self.design.secure is None:
            return Batch(task.id, total, task.max_count)
        if len(answering):
            noise, devices = self.rng("noise", number), len(answering)
            total = task.mechanism.at_device(total, devices=devices, rng=noise)
        return Batch(task.id, total, len(answering))

    def _by_devices(self, task: Task, answering: Tensor) -> Iterator[I64]:
        """The tables of clients that compute by themselves, client k with its own seed: as over a
        network, except for the masks, which cancel in a sum."""
        data, seed = self.data.train.to("cpu"), self.noise_seed
        parameters = self.campaign.parameters()
        terms = self.design.model_terms(parameters, self.campaign.done)
        for client in answering.tolist():
            rng = SystemRng() if seed is None else SeededRng(seed, client)
            yield update_table(task, terms, parameters, trainer(*data.examples(client)))(rng)

    def _updates(self, answering: Tensor, bad: Counter[str]) -> Iterator[Tensor]:
        """The clients' updates, chunk by chunk. A client whose update is not finite, or too long,
        sends zeros and its share of the noise; `bad` counts these and clients without examples."""
        largest = self.design.largest_l1
        for part in updates(
            self.model, self.campaign.flat, self.data.train, answering, self.design.local,
            generator=self.generator(self.campaign.done), chunk=self.chunk, own=self.own,
        ):  # fmt: skip
            sound = part.sound
            if largest is not None:
                sound = sound & (part.deltas.abs().sum(dim=1) < largest)
            deltas = part.deltas if bool(sound.all()) else part.deltas[sound]
            bad["left_out"] += len(part.deltas) - len(deltas)
            bad["empty"] += int((part.examples == 0).sum())
            yield deltas

    def evaluate(self) -> tuple[float | None, float | None]:
        """Accuracy and mean loss on the test set."""
        return evaluate(self.model, self.campaign.flat, self.data, loss_of(self.own))

    def save(self, path: Path) -> None:
        """Write what `load` needs to continue, to a temporary file that then replaces `path`."""
        state = {
            "design": digest(self.design),
            "id": self.id,
            "history": [asdict(figures) for figures in self.history],
            **({"own": self.own.digest()} if self.own else {}),
            **self.campaign.state(),
        }
        beside = path.with_name(path.name + ".part")
        with beside.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)

    def load(self, path: Path) -> None:
        """Continue from a checkpoint, which must be of the same design."""
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, KeyError, ValueError, EOFError, UnpicklingError) as problem:
            raise DataError(f"{path} is not a checkpoint: {problem}") from problem
        if not isinstance(state, dict) or not isinstance(state.get("design"), str):
            raise DataError(f"{path} is not a checkpoint of a training")
        design = state["design"]
        if design != digest(self.design):
            raise DataError(
                f"the checkpoint {path} is of another training (design {design[:12]}…)",
                hint="continue with the study that it was made with, or start in another file",
            )
        if self.own is not None and state.get("own") != self.own.digest():
            raise DataError(
                f"the checkpoint {path} must be of the same module; names, shapes or frozen values "
                "of the one given differ"
            )
        try:
            campaign = TrainingCampaign.load(self.design, state, self.device)
            history = [RoundFigures(**figures) for figures in state["history"]]
            name = state["id"]
        except (KeyError, TypeError, AttributeError) as problem:
            raise DataError(f"the checkpoint {path} lacks something: {problem}") from problem
        if campaign.length != self.campaign.length:
            raise DataError(
                f"the checkpoint {path} must have {self.campaign.length} parameters; it has "
                f"{campaign.length}"
            )
        self.campaign, self.history, self.id = campaign, history, name

    def rng(self, label: str, round: int) -> Rng:
        """Randomness for rounding and noise; from the system unless there is a `noise_seed`."""
        if self.noise_seed is None:
            return SystemRng()
        return SeededRng(_seed(self.noise_seed, label, round))

    def generator(self, round: int) -> torch.Generator:
        """Randomness for the order of examples. All clients draw from one stream, so each of them
        changes what the others draw: unless the stream is secret, updates reveal the cohort."""
        if self.noise_seed is None:
            return torch.Generator().manual_seed(int(SystemRng().words(1)[0]))
        return torch.Generator().manual_seed(_seed(self.noise_seed, "examples", round))

    def cohort(self, round: int) -> Tensor:
        """The clients of a round: secret, so drawn from the system unless there is a `noise_seed`.
        Passes are public."""
        design = self.design
        if design.sampling == "passes":
            return torch.from_numpy(design.members(round))
        chance = np.random.default_rng(self.rng("cohort", round).words(4))
        if design.sampling == "poisson":
            heads = chance.random(design.clients) < design.cohort / design.clients
            return torch.from_numpy(np.flatnonzero(heads))
        return torch.from_numpy(np.sort(chance.permutation(design.clients)[: design.cohort]))

    def _answering(self, cohort: Tensor, round: int) -> Tensor:
        if self.design.dropout == 0:
            return cohort
        chance = np.random.default_rng(self.rng("dropout", round).words(4))
        return cohort[torch.from_numpy(chance.random(len(cohort)) >= self.design.dropout)]


@torch.no_grad()
def evaluate(
    model: nn.Module,
    flat: Tensor,
    data: Federated,
    loss_of: Loss = cross_entropy,
    batch: int = 1024,
) -> tuple[float | None, float | None]:
    """Accuracy and mean loss on the test set, of a model with these parameters: None where there
    are no test examples, and an accuracy only of classes."""
    model = copy.deepcopy(model).eval()
    models.assign(model, flat)
    right = loss = count = 0.0
    has_classes = True
    for start in range(0, len(data.test_inputs), batch):
        targets = data.test_targets[start : start + batch]
        outputs = model(data.test_inputs[start : start + batch])
        counted = targets != IGNORED
        if loss_of is not cross_entropy:
            counted = torch.ones_like(targets, dtype=torch.bool)
            has_classes = targets.ndim == 1 and not targets.is_floating_point()
            has_classes = has_classes and outputs.ndim == 2 and outputs.shape[1] > 1
        weight = float(counted.sum())
        loss, count = loss + weight * float(loss_of(outputs, targets)), count + weight
        if has_classes:
            right += float(((outputs.argmax(dim=-1) == targets) & counted).sum())
    if count == 0:
        return None, None
    return right / count if has_classes else None, loss / count


class FloatSum:
    """A round's sum in floats, on the model's device: for experiments."""

    def __init__(self, campaign: TrainingCampaign) -> None:
        self.campaign, self.within, self.device = campaign, 0.0, campaign.flat.device
        sketches = [campaign.dense, campaign.second]
        sketches = sketches if campaign.second else sketches[:1]
        self.maps = [TensorSketch(each, self.device) if each else None for each in sketches]
        self.totals = [
            torch.zeros(each.shape if each else (campaign.length,), device=self.device)
            for each in self.maps
        ]

    def add(self, deltas: Tensor) -> None:
        """Add the tables of these updates, which are clipped in place."""
        clip = self.campaign.clip
        norms = torch.linalg.vector_norm(deltas, dim=1)
        self.within += float((norms <= clip).sum()) - len(norms) / 2
        deltas *= (clip / norms).clamp(max=1.0).nan_to_num(nan=1.0)[:, None]
        # There is no headroom for sketches that are longer than their vectors: clipping those a
        # little costs a model less than the noise that headroom needs.
        for each, total in zip(self.maps, self.totals, strict=True):
            bound = table_bound(each.sketch if each else None, clip)
            total += _bounded(each.encode(deltas) if each else deltas, bound)

    def noised(self, seed: int) -> RoundResult:
        """The round's result, with noise from a generator of this seed."""
        campaign, main = self.campaign, self.totals[0]
        generator = torch.Generator(self.device).manual_seed(seed & LARGEST_INTEGER)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=self.device)

        deviation, spread = (campaign.clip * each for each in campaign.multipliers)
        deviation *= table_bound(campaign.dense, 1.0)
        if deviation:
            main += deviation * normal(*main.shape)
        measurement = within_clip = None
        if len(self.totals) > 1:
            (first, second), table = self.maps, self.totals[1]
            assert second is not None  # a second sketch is small
            in_shares = campaign.design.secure is not None  # the second table has noise, too
            if in_shares:
                table = table + spread * normal(*table.shape)
            if campaign.design.compression.asks == "error":
                table = table - second.encode(first.decode(main) if first else main)
            measurement = float(torch.linalg.vector_norm(table))
            if in_shares:
                measurement, spread = norm_of_table(measurement**2, table.numel(), spread)
            else:
                measurement += spread * float(normal())
        if campaign.design.adaptive_clip is not None:
            within_clip = self.within + campaign.count_noise * float(normal())
            within_clip += campaign.design.cohort / 2
        return RoundResult(main, deviation, measurement, spread, within_clip)


def _bounded(tables: Tensor, bound: float) -> Tensor:
    """The sum of tables (n, …), each scaled down to a norm of at most `bound`."""
    rows = tables.flatten(1)
    norms = torch.linalg.vector_norm(rows, dim=1)
    scale = (bound / norms).clamp(max=1.0).nan_to_num(nan=1.0)
    total: Tensor = (scale @ rows).reshape(tables.shape[1:])
    return total


def _seed(seed: int, label: str, round: int) -> int:
    text = f"sfumato/1/training/{seed}/{label}/{round}".encode()
    return int.from_bytes(sha256(text).digest()[:6], "little")
