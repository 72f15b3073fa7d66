"""Sfumato in pfl-research: postprocessors that sketch a user's statistics and decode the sum.

pfl runs postprocessors in order on a user's statistics and in reverse on the server, so those after
a sketch in the list work on the table:

    [Sketched(rate=10, seed=7), CentrallyAppliedPrivacyMechanism(GaussianMechanism(0.5, 1.0))]
        user: sketch ─▶ clip the table        server: noise on the table ─▶ decode

    [SketchedSum(UpdateDesign(clip=0.5, noise_multiplier=1.0, rate=10, seed=7), cohort=100,
                 population=10_000, delta=1e-5)]
        user: clip, sketch, clip, round       server: charge ─▶ exact noise ─▶ decode

A table keeps the norm of its vector (in the mean of the squares), so a clip keeps its meaning.
Sketches are drawn anew in every round. Statistics are `MappedVectorStatistics`, as all models of
pfl return them, of one process: sums over several workers are refused.
"""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from sfumato.arrays import F64
from sfumato.errors import MismatchError, SfumatoError, SpecError
from sfumato.flow.accumulator import Batch
from sfumato.flow.contribute import contribute
from sfumato.flow.release import noised_sum
from sfumato.integrations.rounds import (
    Layout,
    Spending,
    UpdateDesign,
    UpdateRound,
    finite,
    most_cells,
)
from sfumato.privacy.samplers import Rng, SystemRng
from sfumato.sketch.dense import DenseSketch
from sfumato.spec import LARGEST_INTEGER, require

if importlib.util.find_spec("pfl") is None:
    raise SfumatoError(
        "sfumato.integrations.pfl needs pfl-research, which is not installed",
        hint="see the guide docs/guides/pfl.md",
    )

from pfl.context import CentralContext, UserContext
from pfl.internal.ops.selector import get_default_framework_module
from pfl.metrics import Metrics, StringMetricName, Weighted
from pfl.postprocessor.base import Postprocessor
from pfl.stats import MappedVectorStatistics


class _TableSum(Postprocessor):  # type: ignore[misc]  # pfl is not there for mypy
    """Common parts of both: statistics as one vector, and one table whose name contains the round,
    so that tables of different rounds do not add."""

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._round = 0

    def _key(self) -> str:
        return f"sfumato/{self._round}"

    def _vector(self, stats: MappedVectorStatistics) -> F64:
        """A user's statistics, (length,), or zeros if they are not finite.

        Such a user keeps its weight and is not counted: otherwise the weight, which has no noise,
        would reveal something about the user's data.
        """
        if not isinstance(stats, MappedVectorStatistics):
            raise SpecError(
                f"statistics must be MappedVectorStatistics; got {type(stats).__name__}"
            )
        arrays = {name: _numpy(tensor) for name, tensor in stats.items()}
        layout = Layout.of(arrays)
        if self._layout is None:
            require(layout.length >= 1, "statistics must hold at least one real number")
            require(
                all(np.dtype(kind).kind == "f" for _, _, kind in layout.parts),
                "statistics must be real numbers",
            )
            self._layout = layout
        if layout != self._layout:
            raise MismatchError("all users' statistics must have the same names and shapes")
        return finite(layout.vector(arrays))

    def _statistics(self, total: F64, weight: float) -> MappedVectorStatistics:
        """The sum of users' vectors as statistics again."""
        assert self._layout is not None  # a user's statistics came before
        zeros = {name: np.zeros(shape, dtype=kind) for name, shape, kind in self._layout.parts}
        arrays = self._layout.apply(zeros, total)
        tensors = {name: _tensor(array, array.dtype.name) for name, array in arrays.items()}
        return MappedVectorStatistics(tensors, weight=weight)

    def _table(self, stats: MappedVectorStatistics) -> npt.NDArray[Any]:
        """The sum of this round's tables."""
        module = get_default_framework_module()
        if module.distributed.world_size > 1:
            raise SpecError("sketched statistics are added in one process; got several workers")
        if list(stats.keys()) != [self._key()]:
            raise MismatchError(
                f"the sum must be of round {self._round} alone; got {list(stats.keys())}"
            )
        return _numpy(stats[self._key()])


class Sketched(_TableSum):
    """Sketch a user's statistics and decode their sum: for pfl's own clipping and noise.

    Put it in front of the mechanism. A user whose statistics are not finite adds zeros.
    """

    def __init__(self, *, rate: float, rows: int = 15, seed: int) -> None:
        super().__init__()
        require(math.isfinite(rate) and rate >= 1, f"rate must be at least 1; got {rate}")
        require.at_least(1, rows=rows)
        require.within(0, LARGEST_INTEGER, seed=seed)
        self.rate, self.rows, self.seed = rate, rows, seed

    def sketch(self) -> DenseSketch:
        """This round's sketch."""
        assert self._layout is not None  # a user's statistics came before
        length = self._layout.length
        return DenseSketch.within(
            most_cells(length, self.rate),
            length=length,
            rows=self.rows,
            seed=self.seed,
            round=self._round,
        )

    def postprocess_one_user(
        self, *, stats: MappedVectorStatistics, user_context: UserContext
    ) -> tuple[MappedVectorStatistics, Metrics]:
        vector = self._vector(stats)  # also learns the layout of the sketch
        table = self.sketch().encode(vector)
        return MappedVectorStatistics({self._key(): _tensor(table)}, weight=stats.weight), Metrics()

    def postprocess_server(
        self,
        *,
        stats: MappedVectorStatistics,
        central_context: CentralContext,
        aggregate_metrics: Metrics,
    ) -> tuple[MappedVectorStatistics, Metrics]:
        sketch = self.sketch()
        total = sketch.decode(self._table(stats)).astype(np.float64)
        self._round += 1
        return self._statistics(total, stats.weight), Metrics()


class SketchedSum(_TableSum):
    """Sums of whole numbers with sfumato's exact noise and its account, in place of a mechanism.

    Users are weighted alike: statistics must have weight 1. `cohort` is the algorithm's cohort
    size, `population` the number of users. The metric "sfumato | epsilon" is that of all rounds so
    far, for the relation `design.relation`. A user whose statistics are not finite adds zeros.
    Raises BudgetError when `most_epsilon` would be exceeded.

    Assumes: what `design.sampling` says about the simulated deployment; its server is trusted, and
        with "fixed" nobody else knows the cohorts. The simulation itself differs: pfl's "random"
        sampler may draw a user twice into a cohort, and its "minimize_reuse" takes users in turn.
    """

    def __init__(
        self,
        design: UpdateDesign,
        *,
        cohort: int,
        population: int,
        delta: float,
        most_epsilon: float | None = None,
        rng: Rng | None = None,
    ) -> None:
        super().__init__()
        require(not design.secure, "a simulation has no masked rounds; set secure to false")
        require(
            1 <= cohort <= population,
            f"a cohort must be 1 to the population of {population}; got {cohort}",
        )
        self.design, self.cohort, self.population = design, cohort, population
        self.spending = Spending(delta=delta, most_epsilon=most_epsilon)
        self.rng: Rng = SystemRng() if rng is None else rng
        self._current: tuple[int, UpdateRound] | None = None

    def round(self) -> UpdateRound:
        """The current round."""
        assert self._layout is not None  # a user's statistics came before
        if self._current is None or self._current[0] != self._round:
            self._current = self._round, self.design.round(self._layout, self.cohort, self._round)
        return self._current[1]

    def postprocess_one_user(
        self, *, stats: MappedVectorStatistics, user_context: UserContext
    ) -> tuple[MappedVectorStatistics, Metrics]:
        if stats.weight != 1:
            raise SpecError(
                f"users must be weighted alike, with weight 1; got {stats.weight}: remove the "
                "weighting"
            )
        vector = self._vector(stats)  # also learns the layout of the round
        round = self.round()
        values = round.values(vector, rng=self.rng)
        table = contribute(round.task, values, devices=1, rng=self.rng)
        return MappedVectorStatistics({self._key(): _tensor(table, "int64")}, weight=1.0), Metrics()

    def postprocess_server(
        self,
        *,
        stats: MappedVectorStatistics,
        central_context: CentralContext,
        aggregate_metrics: Metrics,
    ) -> tuple[MappedVectorStatistics, Metrics]:
        if central_context.cohort_size != self.cohort:
            raise MismatchError(
                f"the cohort must be {self.cohort}, as configured; "
                f"got {central_context.cohort_size}"
            )
        round = self.round()
        task = round.task
        batch = Batch(task.id, self._table(stats), int(stats.weight))
        loss = self.design.charge_of(task, self.cohort / self.population)
        answer = noised_sum(task, batch, ledger=self.spending, rng=self.rng, loss=loss)
        mean = round.sketch.decode(answer.table, answer.count)
        self._round += 1
        epsilon = Weighted.from_unweighted(self.spending.epsilon)
        metrics = Metrics([(StringMetricName("sfumato | epsilon"), epsilon)])
        return self._statistics(mean * answer.count, float(answer.count)), metrics


def _numpy(tensor: Any) -> npt.NDArray[Any]:
    if isinstance(tensor, np.ndarray):  # numpy's own to_numpy would make it float32
        return tensor
    return np.asarray(get_default_framework_module().to_numpy(tensor))


def _tensor(values: npt.NDArray[Any], kind: str = "float32") -> Any:
    return get_default_framework_module().to_tensor(values, dtype=kind)
