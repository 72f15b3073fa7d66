"""What paper 001 promises of a list and of a histogram, and the sizes that keep it.

ApproxHH: every item with a count of at least `threshold` is listed, and none with a tenth of it or
less. ApproxHist: every count is within `threshold` of the truth. Each fails with probability at
most `failure_probability`, over the coins and hash functions of all devices together, whatever they
hold. docs/proofs/listing.md has the proofs; the paper's own constants are in `PaperSizes`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

from sfumato.privacy import ListedAbove
from sfumato.privacy.listing import noise_tail

LIGHT = 0.1  # items with this share of the threshold, or less, must not be listed
UNREAD = 1 / 64  # chance that a table cannot be listed, of those with several repetitions
CELLS_PER_KEY = 1.3  # of the paper's tables, in three rows
WORDS_PER_KEY = 8  # the paper's words of 16 bits, cells included
_ERRORS = (0.3, 0.25, 0.2, 0.15, 0.1, 0.07, 0.05, 0.03)  # of one row, to choose from
_MOST_REPETITIONS = 4_096


def most_heavy(total: float, threshold: float) -> int:
    """The most items that can have a count of at least `threshold`, of `total` in all."""
    return int(total // threshold)


def votes_needed(repetitions: int) -> int:
    """In how many lists an item must be: at least half of them."""
    return -(-repetitions // 2)


def list_failure(
    total: float,
    threshold: float,
    *,
    sampling_threshold: float,
    repetitions: int,
    unread: float,
    wrong: float = 0.0,
) -> float:
    """A bound on the chance that a majority of threshold samples breaks ApproxHH.

    `total` is the number of all copies, `unread` the chance that the table of a sampled item cannot
    be listed, `wrong` the expected number of wrong keys in all tables.

    An item with a count of at least the threshold is missing from a repetition with probability at
    most exp(−threshold/sampling_threshold) + unread; one with c ≤ threshold/10 is in it with
    probability at most c/sampling_threshold. Repetitions are independent.

    >>> f"{list_failure(6_000 * 50, 50, sampling_threshold=25, repetitions=131, unread=1/32):.1e}"
    '5.5e-10'
    """
    from scipy import stats

    needed = votes_needed(repetitions)
    missed = min(1.0, (math.exp(-threshold / sampling_threshold) if sampling_threshold > 1 else 0.0)
                 + unread)  # fmt: skip
    failure = wrong + most_heavy(total, threshold) * float(
        stats.binom.cdf(needed - 1, repetitions, 1 - missed)
    )
    light = math.floor(LIGHT * threshold)
    if light:
        # P(votes ≥ needed)/chance rises with the chance up to (needed − 1)/(repetitions − 1), so
        # all light items together are worst with the largest counts.
        chance = light / sampling_threshold
        if repetitions == 1 or chance > (needed - 1) / (repetitions - 1):
            return 1.0
        failure += total / light * float(stats.binom.sf(needed - 1, repetitions, chance))
    return min(1.0, failure)


def repetitions_for_list(
    total: float, threshold: float, failure: float, *, sampling_threshold: float
) -> int | None:
    """The least odd number of repetitions with which a list keeps ApproxHH, if there is one.

    For 6,000 thresholds in all and a failure of 0.05 the paper's algorithm takes 131, and its proof
    308 (and its lemma J.1 does not hold).

    >>> repetitions_for_list(6_000 * 50, 50, 0.05, sampling_threshold=25.0)
    51
    """
    for repetitions in range(1, _MOST_REPETITIONS, 2):
        bound = list_failure(
            total,
            threshold,
            sampling_threshold=sampling_threshold,
            repetitions=repetitions,
            unread=UNREAD,
        )
        if bound <= failure:
            return repetitions
    return None


@dataclass(frozen=True, slots=True)
class Cut:
    """From which noisy count on items are listed, and how often that breaks ApproxHH."""

    count: int
    failure: float


def best_cut(mechanism: ListedAbove, total: float, threshold: float) -> Cut:
    """The least failure of a list of exact counts with noise, over where it is cut.

    An item of the threshold is missing if its noise is below cut − threshold; one with c copies, at
    most a tenth, is listed if its noise is cut − c or more. That is convex in c, so of all light
    items with `total` copies together those with one copy, or those with a tenth, are worst.
    """
    heavy, light = math.ceil(threshold), math.floor(LIGHT * threshold)
    if mechanism.noise == "none":
        return Cut(max(heavy, 1), 0.0)

    def tail(least: int) -> float:
        return noise_tail(mechanism.noise, mechanism.scale, least) if least >= 1 else 1.0

    def missed(cut: int) -> float:
        return most_heavy(total, threshold) * tail(heavy - cut + 1)

    def listed(cut: int) -> float:
        if not light:  # then only items that some device has are at stake, and all may be listed
            return 0.0
        return total * max(tail(cut - 1), tail(cut - light) / light)

    least = max(mechanism.threshold, light + 1)
    cuts = range(least, max(heavy, least) + 1)
    cross = least + bisect_left(cuts, True, key=lambda cut: missed(cut) >= listed(cut))
    cuts_near = {min(max(cut, least), cuts[-1]) for cut in (cross - 1, cross)}
    best = min(cuts_near, key=lambda cut: missed(cut) + listed(cut))
    return Cut(best, min(1.0, missed(best) + listed(best)))


def noise_failure(mechanism: ListedAbove, total: float, threshold: float) -> float:
    """A bound on the chance that the noise on a listed count is above `threshold`."""
    if mechanism.noise == "none":
        return 0.0
    least = math.floor(threshold) + 1
    return min(1.0, 2 * total * noise_tail(mechanism.noise, mechanism.scale, least))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """The devices behind a histogram: their rounds, and what each may send."""

    devices: int  # in each round
    rounds: int
    items_per_device: int
    alike: bool  # whether devices are assigned to rounds at random

    @property
    def total(self) -> float:
        """All copies of all rounds, at most."""
        return float(self.devices * self.rounds * self.items_per_device)


def row_error(rounds: Rounds, threshold: float, width: float, failure: float) -> float:
    """A bound on the chance that one row of a Hybrid count sketch reads an item with an error above
    `threshold`, except with probability `failure` for the assignment of devices to rounds.

    Whatever devices hold: 2·total/(width·threshold). If devices are assigned to rounds at random,
    a factor √R is gained, as in the paper's theorem B.1, whose proof assumes it silently.
    """
    total, each = rounds.total, rounds.items_per_device
    worst = 2 * total / (width * threshold)
    if not rounds.alike or rounds.rounds == 1:
        return worst
    count = rounds.rounds
    spread = 1 + math.sqrt(32 * count * math.log(1 / failure) / rounds.devices)
    alike = worst * math.sqrt(spread / count) + each * total / (width * threshold**2)
    return min(worst, alike)


def counts_failure(
    rounds: Rounds, threshold: float, *, rows: int, width: int, failure: float
) -> float:
    """A bound on the chance that the median over rows errs by more than `threshold` for a listed
    item. `failure` is the part of it that the assignment of devices to rounds may take."""
    from scipy import stats

    error = min(1.0, row_error(rounds, threshold, width, failure))
    items = rounds.total / max(LIGHT * threshold, 1.0)
    return min(1.0, failure + items * float(stats.binom.sf(-(-rows // 2) - 1, rows, error)))


def sketch_for(rounds: Rounds, threshold: float, failure: float) -> tuple[int, int]:
    """The (rows, width) of fewest cells with which counts are within `threshold`.

    >>> sketch_for(Rounds(devices=1_000, rounds=1, items_per_device=1, alike=True), 50, 0.05)
    (19, 267)
    """
    from scipy import stats

    best: tuple[int, int] | None = None
    items = rounds.total / max(LIGHT * threshold, 1.0)
    for error in _ERRORS:
        width = max(2, math.ceil(row_error(rounds, threshold, 1.0, failure / 10) / error))
        rows = 1
        while items * float(stats.binom.sf(rows // 2, rows, error)) > 0.9 * failure:
            rows += 2
        if best is None or rows * width < best[0] * best[1]:
            best = (rows, width)
    assert best is not None  # there are errors to choose from
    return best


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperSizes:
    """The constants of paper 001's algorithms 2 and 3, for m·n items in each of R rounds.

    Logarithms are natural. For R = 1 the paper's L0 and gamma are 0; here ln R is then 1. The
    paper's text and proof have b = 20 ln(40mnR/(tau·beta)).

    >>> sizes = PaperSizes(items=10_000, rounds=30, threshold=50.0, failure_probability=0.05)
    >>> sizes.sampling_threshold, sizes.repetitions, sizes.keys, round(sizes.gamma, 3)
    (25.0, 131, 13605, 3.401)
    >>> sizes.width, sizes.rows
    (10955, 14)
    """

    items: int  # mn
    rounds: int
    threshold: float  # tau
    failure_probability: float  # beta

    @property
    def sampling_threshold(self) -> float:
        """t = max(tau/2, 1)."""
        return max(self.threshold / 2, 1.0)

    @property
    def repetitions(self) -> int:
        """b of algorithm 2."""
        return math.ceil(10 * self.logarithm)

    @property
    def keys(self) -> int:
        """L0: the distinct keys that a table must list."""
        return math.ceil(20 * self.items / self.threshold * self.gamma)

    @property
    def gamma(self) -> float:
        return math.log(self.rounds) if self.rounds > 1 else 1.0

    @property
    def width(self) -> int:
        """w of algorithm 3."""
        return math.ceil(10 * self.items * math.sqrt(self.rounds) / self.threshold)

    @property
    def rows(self) -> int:
        """b of algorithm 3."""
        return math.ceil(self.logarithm)

    @property
    def words(self) -> int:
        """The words of 16 bits of algorithm 2's message, as the paper counts them."""
        return self.repetitions * WORDS_PER_KEY * self.keys

    @property
    def logarithm(self) -> float:
        """ln(4mnR/(tau·beta)), and at least 1."""
        most = 4 * self.items * self.rounds / (self.threshold * self.failure_probability)
        return max(math.log(most), 1.0)


def list_cost(items: float, threshold: float) -> float:
    """The order of what a device must send for ApproxHH, without logarithms: mn/tau words suffice
    (theorem 4.1), and fewer do not (theorem 4.2), however many rounds there are."""
    return items / threshold


def histogram_cost(items: float, rounds: int, threshold: float) -> float:
    """The same for ApproxHist: mn·min(√R/tau, 1) words (theorems B.1 and B.2, table 1)."""
    return items * min(math.sqrt(rounds) / threshold, 1.0)
