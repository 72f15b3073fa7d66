"""A decoder better than the median: peel the heavy items off the tables, then read the rest.

Beyond paper 000. The decoder knows the hash functions, so once it knows that a heavy item is there
it can subtract it from all its cells, and no other item collides with it any more. The rest is
lighter, so more items stand out; repeat.

Four rules prevent overfitting (docs/concepts/refined.md has a table of where it helps):

- *Significant and consistent.* An item is peeled only if its count is at least four standard
  deviations of the error, and if the mean of its readings agrees with their median: an item that
  merely collides with a heavy one in a majority of rows has its median but not its mean. Candidates
  are taken best first and read again after each one, so a heavy item is not counted twice.
- *Rounds may differ.* With several tables, each item has a count per round, moved from the pooled
  count towards the round's own reading as far as rounds disagree (a variance ratio). Similar
  rounds are pooled; rounds with nothing in common are peeled each on its own.
- *One table* (a single round, or shared ones) has no rounds to compare, and few readings for a
  median: there the item with the largest mean is peeled, all peeled items are fitted again by
  least squares, and those that no longer stand out are put back, until nothing changes.
- *Placebos decide.* Errors are measured on items that do not exist (`DecodedRounds.placebos`), on
  the same tables, noise included. They set the thresholds, choose median or mean for the last
  reading, give the intervals, and unless they got clearly better the median is returned.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from sfumato import kernels
from sfumato.arrays import F64, I64, U64
from sfumato.kernels.count import plain
from sfumato.sketch.rounds import GRID, DecodedRounds

_THRESHOLDS = (10.0, 8.0, 6.4, 5.1, 4.5, 4.5, 4.0, 4.0)
"""Standard deviations of the error from which an item is peeled, one pass over the dictionary for
each; the most significant first, since every peeled item makes the next ones more significant."""

_AGREE = 0.75  # share of its median that an item's mean must reach; colliders stay nearer 1/2
_BETTER = 0.95  # the placebo error must fall below this share of the simpler reading's
_PASSES = 6  # passes over the most promising items for each threshold
_FIT, _STEPS = 1e-4, 30  # precision and most steps of least squares
_PURSUIT = 200  # most steps of a pursuit
_NEAR = 0.7  # least reading of the items of one step, as a share of the largest
_KEEP = 0.8  # share of the threshold below which an item is put back
_SMALLEST = 0.5  # counts are whole: less than half is zero


@dataclass(frozen=True, slots=True, kw_only=True)
class Refined:
    """Counts (n,), the errors of placebo items (placebos,), and how they were computed."""

    counts: F64
    placebo_errors: F64
    decode: kernels.Decode
    peeled: I64  # indices of the subtracted items; none if the plain median was as good
    inflation: float
    """The error of a peeled item relative to a placebo. Peeling fits numbers to the tables, and
    each absorbs a share of the noise: the residual has less noise than the tables, and the fitted
    counts have the rest (docs/proofs/placebos.md)."""

    def widen(self, error: float) -> F64:
        """The error of every item, (n,), from that of a placebo."""
        errors = np.full(self.counts.size, error)
        errors[self.peeled] *= self.inflation
        return errors


@dataclass(frozen=True, slots=True)
class _Peeled:
    items: I64  # indices of the subtracted points
    counts: F64  # how much of each in each round, (rounds, items)
    freedom: float  # number of values fitted to the tables: one per item up to one per round
    residual: DecodedRounds  # the tables without them


def refine(rounds: DecodedRounds, points: U64, *, shares: F64 | None = None) -> Refined:
    """Decode `rounds` for the items with these fingerprints; see the module's docstring.

    `shares` are the rounds' shares of the devices; equal if not given.
    """
    count = len(rounds.sketches)
    part = np.full(count, 1 / count) if shares is None else shares
    best = peeled = _Peeled(np.empty(0, np.int64), np.zeros((count, 0)), 0.0, rounds)
    if count == 1:
        return _answer(rounds, _pursue(peeled, points), points, part)
    error = _placebo_error(best)
    for sure in _THRESHOLDS:
        pool = _promising(peeled, points)
        for _ in range(_PASSES):
            before = peeled.items
            peeled = _pass(rounds, peeled, points, pool, part, sure)
            if np.array_equal(before, peeled.items):
                break
        reached = _placebo_error(peeled)
        if reached < error:
            best, error = peeled, reached
    return _answer(rounds, best, points, part)


def _pursue(peeled: _Peeled, points: U64) -> _Peeled:
    """Peel one table by orthogonal matching pursuit with items put back (after Pati, Rezaiifar and
    Krishnaprasad 1993): the largest mean readings are added, and all items are fitted again."""
    table, alone = peeled.residual, np.ones(1)
    limit = table.tables.size // 2  # more unknowns than equations explain anything
    at_once = max(8, table.tables.shape[2] // 16)  # this few rarely share a cell
    for _ in range(_PURSUIT):
        residual = peeled.residual
        spread = _spread(residual.estimate(residual.placebos(2048), decode="mean"))
        threshold = max(_THRESHOLDS[-1] * spread, _SMALLEST)
        stay = peeled.counts[0] > _KEEP * threshold
        read = residual.estimate(points, decode="mean")
        read[peeled.items] = 0
        fresh = np.flatnonzero(read > max(threshold, _NEAR * read.max()))
        fresh = fresh[np.argsort(-read[fresh], kind="stable")][:at_once]
        if not stay.all():
            fresh = fresh[:0]  # first read the tables without them
        elif fresh.size == 0 or peeled.items.size + fresh.size > limit:
            break
        items = np.concatenate([peeled.items[stay], fresh])
        counts = np.concatenate([peeled.counts[:, stay], _on_grid(read[None, fresh])], axis=1)
        residual = table.subtract(points[items], counts)
        state = _Peeled(items, counts, float(items.size), residual)
        peeled = _least_squares(table, state, points, alone)
    return peeled


def _placebo_error(peeled: _Peeled) -> float:
    return _root_mean_square(peeled.residual.estimate(peeled.residual.placebos()))


def _answer(rounds: DecodedRounds, peeled: _Peeled, points: U64, shares: F64) -> Refined:
    """Read the tables, and their residual by median and by mean; keep the reading with the least
    error on placebos."""
    both = np.concatenate([points, rounds.placebos()])
    read = rounds.estimate(both)
    best = Refined(
        counts=read[: points.size],
        placebo_errors=read[points.size :],
        decode="median",
        peeled=np.empty(0, dtype=np.int64),
        inflation=1.0,
    )
    error = _root_mean_square(best.placebo_errors)
    inflation = 1 / (1 - min(_freedom(peeled, points) / rounds.tables.size, 0.5))
    fitted = _least_squares(rounds, peeled, points, shares)
    none = _Peeled(best.peeled, np.zeros((len(shares), 0)), 0.0, rounds)
    readings: list[tuple[kernels.Decode, _Peeled]] = [
        ("mean", none),
        ("median", peeled),
        ("mean", fitted),
    ]
    for decode, state in readings:
        read = state.residual.estimate(both, decode=decode)
        read[state.items] += state.counts.sum(axis=0)
        reached = _root_mean_square(read[points.size :])
        if reached < _BETTER * error:
            error = reached
            best = Refined(
                counts=read[: points.size],
                placebo_errors=read[points.size :],
                decode=decode,
                peeled=state.items,
                inflation=inflation if state.items.size else 1.0,
            )
    return best


def _freedom(peeled: _Peeled, points: U64) -> float:
    """How many numbers were fitted, the choice of items included.

    Choosing the items is fitting, too: by Stein's identity a hard threshold adds, for every item,
    its density at the threshold times the height of the step, both in standard deviations.
    """
    if peeled.items.size == 0:
        return 0.0
    residual = peeled.residual
    read = residual.estimate(np.concatenate([points, residual.placebos(2048)]))
    read[peeled.items] += peeled.counts.sum(axis=0)
    height = read[: points.size] / max(_spread(read[points.size :]), _SMALLEST / _THRESHOLDS[-1])
    near = np.count_nonzero(np.abs(height - _THRESHOLDS[-1]) < 0.5)
    return peeled.freedom * (1 + _THRESHOLDS[-1] * near / peeled.items.size)


def _least_squares(rounds: DecodedRounds, peeled: _Peeled, points: U64, shares: F64) -> _Peeled:
    """The totals of the peeled items that leave the least in the tables, by conjugate gradients.

    For a single item, least squares is the mean of its readings.
    """
    if peeled.items.size == 0:
        return peeled
    peeled_points = points[peeled.items]
    empty = rounds.with_tables(np.zeros_like(rounds.tables))

    def projection(tables: DecodedRounds) -> F64:
        """The projection of these tables onto each item's pattern."""
        return np.asarray(np.einsum("r,rli->i", shares, tables.readings(peeled_points)))

    step = np.zeros(peeled_points.size)
    gap = projection(peeled.residual)
    direction, size = gap.copy(), float(gap @ gap)
    goal = size * _FIT**2
    for _ in range(_STEPS):
        if size <= goal:
            break
        image = projection(empty.subtract(peeled_points, -shares[:, None] * direction))
        curvature = float(direction @ image)
        if curvature <= 0:  # the direction is finer than the grid: nothing is left to fit
            break
        length = size / curvature
        step += length * direction
        gap -= length * image
        size, last = float(gap @ gap), size
        direction = gap + size / last * direction
    counts = peeled.counts + _on_grid(shares[:, None] * step)
    return replace(peeled, counts=counts, residual=rounds.subtract(peeled_points, counts))


def _promising(peeled: _Peeled, points: U64) -> I64:
    """The items whose subtraction would gain most, best first."""
    median = peeled.residual.estimate(points)
    gain = _gain(median, peeled.residual.estimate(points, decode="mean"))
    size = min(points.size, max(2048, 8 * peeled.residual.tables.shape[2]))
    best = np.argpartition(-gain, size - 1)[:size]
    return best[np.argsort(-gain[best], kind="stable")]


def _gain(median: F64, mean: F64) -> F64:
    """How much subtracting an item's median reduces the tables' energy, per reading."""
    return np.where(median > 0, median * (2 * mean - median), 0.0)


def _pass(
    rounds: DecodedRounds, peeled: _Peeled, points: U64, pool: I64, shares: F64, sure: float
) -> _Peeled:
    """Drop items below the threshold, peel those newly above, and estimate all of them again."""
    residual = peeled.residual
    placebos = residual.placebos(2048)
    threshold = max(sure * _spread(residual.estimate(placebos)), _SMALLEST)
    total = residual.estimate(points[peeled.items]) + peeled.counts.sum(axis=0)
    stay = total > threshold
    items, counts = peeled.items[stay], peeled.counts[:, stay]
    residual = rounds.subtract(points[items], counts)
    fresh = pool[~np.isin(pool, items)]
    admitted, amounts = _admit(residual, points[fresh], threshold)
    items = np.concatenate([items, fresh[admitted]])
    counts = np.concatenate([counts, _on_grid(shares[:, None] * amounts)], axis=1)
    limit = residual.tables[0].size // 2  # more unknowns than equations explain anything
    if items.size > limit:
        largest = np.argsort(-counts.sum(axis=0), kind="stable")[:limit]
        items, counts = items[largest], counts[:, largest]
    residual = rounds.subtract(points[items], counts)
    counts, freedom = _per_round(residual, points[items], counts, shares)
    return _Peeled(items, counts, freedom, rounds.subtract(points[items], counts))


def _admit(residual: DecodedRounds, points: U64, threshold: float) -> tuple[I64, F64]:
    """Which candidates to peel, and their counts: best first, each read after the last."""
    median = residual.estimate(points)
    mean = residual.estimate(points, decode="mean")
    likely = np.flatnonzero((median > threshold) & (mean > median / 2))
    order = likely[np.argsort(-_gain(median, mean)[likely], kind="stable")]
    order = order[: 2 * residual.tables.shape[2]]
    cells, signs = _places(residual, points[order])
    tables = residual.tables.reshape(-1).copy()
    rounds, rows, _ = residual.tables.shape
    admitted, amounts = [], []
    for candidate, cell, sign in zip(order, cells, signs, strict=True):
        reading = tables[cell] * sign
        if residual.fresh:
            count = float(np.median(reading, axis=1).sum())
        else:
            count = float(np.median(reading.sum(axis=0)))
        if count > threshold and reading.sum() / rows > _AGREE * count:
            tables[cell] -= sign * (count / rounds)
            admitted.append(candidate)
            amounts.append(count)
    return np.array(admitted, dtype=np.int64), np.array(amounts)


def _places(rounds: DecodedRounds, points: U64) -> tuple[I64, F64]:
    """The cells of items, as flat indices, and their signs, each (items, rounds, rows)."""
    _, rows, width = rounds.tables.shape
    shape = (points.size, len(rounds.sketches), rows)
    cells, signs = np.empty(shape, dtype=np.int64), np.empty(shape)
    for round, sketch in enumerate(rounds.sketches):
        for row in range(rows):
            cell = plain.cells(plain.evaluate(sketch.buckets[row], points), width)
            cells[:, round, row] = cell + (round * rows + row) * width
            sign = plain.evaluate(sketch.signs[row], points)
            signs[:, round, row] = plain.sign_of(sign, sketch.sign_bit)
    return cells, signs


def _per_round(residual: DecodedRounds, points: U64, counts: F64, shares: F64) -> tuple[F64, float]:
    """Counts per round, (rounds, items): pooled if rounds agree, separate if not.

    Also the degrees of freedom: one for a pooled item, `rounds` for a separate one, and a number
    in between for others.
    """
    total = residual.estimate(points) + counts.sum(axis=0)
    pooled = shares[:, None] * total
    if points.size == 0:
        return pooled, 0.0
    placebos = residual.placebos(2048)
    own, noise = np.empty_like(counts), np.empty((len(shares), 1))
    for round in range(len(shares)):
        one = residual.one(round)
        own[round] = one.estimate(points) + counts[round]
        noise[round] = _root_mean_square(one.estimate(placebos)) ** 2
    sampling = np.maximum(pooled, 0)  # devices are assigned to rounds at random: Poisson
    disagreement = np.mean((own - pooled) ** 2 - noise, axis=0)
    between = np.maximum(sampling, disagreement)
    trust = between / np.maximum(between + noise, np.finfo(float).tiny)
    freedom = points.size + float(trust.mean(axis=0).sum()) * (len(shares) - 1)
    return _on_grid(pooled + trust * (own - pooled)), freedom


def _on_grid(counts: F64) -> F64:
    """Counts in whole 2**-20ths, so that subtracting them and adding them back is exact."""
    return np.rint(counts * GRID) / GRID


def _spread(errors: F64) -> float:
    """A standard deviation that is robust to a few colliding placebos."""
    return float(np.quantile(np.abs(errors), 0.95)) / 1.96


def _root_mean_square(errors: F64) -> float:
    return float(np.sqrt(np.mean(errors**2)))
