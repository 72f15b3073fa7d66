"""How many neighbours a device masks with, and how many shares recover a secret.

Each device shares its secrets among its neighbours on a random ring of the cohort. Few neighbours
are cheap; too few, and the corrupt devices may surround an honest one, or so many may drop out that
a secret is lost. `find` gives the fewest that rule out both with high probability, after Bell,
Bonawitz, Gascón, Lepoint and Raykova, "Secure single-server aggregation with (poly)logarithmic
overhead", 2020.

Of n devices, at most a = ⌊corrupt·n⌋ are corrupt and d = ⌊dropout·n⌋ drop out. With k neighbours,
A of which are corrupt and D drop out, a threshold t must satisfy all of the following. (A and D are
hypergeometric, k of n: of all n devices, the expected number whose A exceeds c is n·P[A > c].)

- connected: the honest devices that stay are one component; otherwise the sum of each component is
  revealed. A cut takes two runs of k/2 bad devices, n·(n − k − 1)/2 pairs of places that are all
  bad, so it happens with probability at most n·(n − k − 1)/2 · b(b−1)⋯(b−k+1) / n(n−1)⋯(n−k+1),
  where b = a + d; this must be below 2^−(security_bits + 1);
- secret: for the least c with P[A > c] ≤ 2^−(security_bits + 1)/n, t > c; and t > (c + k)/2 when
  the collector may tell some neighbours that a device dropped out and others that it did not
  ("semi_malicious"): corrupt neighbours answer both, so 2t ≤ k + c would yield both its secrets;
- recoverable: for the least m with P[D > m] < 2^−correctness_bits/n, t ≤ k − m.

This assumes that dropouts do not depend on the ring. A collector that claims dropouts may choose
them by the ring, and two runs of k/2 cut it. With `any_dropouts` "connected" becomes:

- no gaps: let h be the least with P[A' > h] ≤ 2^−(security_bits + 1)/n, A' being the corrupt
  devices among k/2, a run on the ring. Devices refuse survivors if some run of k/2 has fewer than
  h + 1 of them (`window`), so an honest one survives in every run, and another one near it. Chance
  must not violate this: for the least m' with P[D' > m'] < 2^−correctness_bits/n, D' being those
  of k/2 that drop out, k/2 − m' > h.

The least even k for which some t exists is taken, with the least such t, which is at least 2. A
cohort below 20 has the complete graph, k = n − 1, and so has one for which no even k works. There
the same conditions hold with certainty: c = a and m = d, so a < t ≤ n − 1 − d.

In "semi_malicious" rounds a committee signs the set of survivors for all: the first k on the ring,
of which t are a quorum. With c corrupt ones among them, as among the neighbours of a device, and
t > (c + k)/2, no two sets have a quorum; and t stay, as t ≤ k − m.

Everything is computed in whole numbers. A rate means the decimal that it prints as: 0.1 is a tenth.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

from sfumato.errors import ImpossibleError
from sfumato.spec import require

Mode = Literal["semi_honest", "semi_malicious"]

LEAST_SECURITY_BITS: dict[Mode, int] = {"semi_honest": 40, "semi_malicious": 80}
"""An honest collector draws one ring. One that may cheat can try 2**40, which takes 40 bits."""

LARGEST_COHORT = 1 << 24
COMPLETE_BELOW = 20  # in smaller cohorts all devices are neighbours
MOST_NEIGHBOURS = 4096
LEAST_THRESHOLD = 2  # one neighbour alone never opens a secret


@dataclass(frozen=True, slots=True)
class Parameters:
    """`neighbours` of each device hold a share of its secrets; `threshold` of them recover one.

    At least `window` of every neighbours/2 in a row on the ring must survive.
    """

    neighbours: int
    threshold: int
    window: int = 0

    def __post_init__(self) -> None:
        require(
            LEAST_THRESHOLD <= self.threshold <= self.neighbours <= MOST_NEIGHBOURS,
            f"threshold must be {LEAST_THRESHOLD} to neighbours, and neighbours at most "
            f"{MOST_NEIGHBOURS}; got {self.threshold} and {self.neighbours}",
        )


def require_security(security_bits: int, mode: Mode) -> None:
    """Raise SpecError unless a round of this mode may have so few bits of security."""
    least = LEAST_SECURITY_BITS[mode]
    require(
        security_bits >= least,
        f"security_bits must be at least {least} in mode {mode}; got {security_bits}",
    )


def find(
    cohort: int,
    *,
    corrupt: float,
    dropout: float,
    mode: Mode,
    security_bits: int = 40,
    correctness_bits: int = 20,
    any_dropouts: bool = False,
) -> Parameters:
    """The fewest neighbours, and the lowest threshold for them, that are safe and recoverable.

    A partial sum of honest devices is revealed, or a secret opened, with probability at most
    2^−security_bits; a secret is lost with probability at most 2^−correctness_bits. With
    `any_dropouts` this holds for any choice of dropouts. Raises ImpossibleError if there are none.

    >>> find(1000, corrupt=0.1, dropout=0.1, mode="semi_honest")
    Parameters(neighbours=48, threshold=27, window=0)
    """
    return _solve(
        requirements_of(
            cohort, corrupt, dropout, mode, security_bits, correctness_bits, any_dropouts
        )
    )


def check(
    parameters: Parameters,
    cohort: int,
    *,
    corrupt: float,
    dropout: float,
    mode: Mode,
    security_bits: int = 40,
    correctness_bits: int = 20,
) -> None:
    """Raise SpecError if `parameters` are less safe than those of `find`.

    The result of `find` is accepted, and so are more neighbours or a higher threshold, as long as
    the threshold is safe for that many neighbours: with more of them, more may be corrupt.
    """
    requirements = requirements_of(cohort, corrupt, dropout, mode, security_bits, correctness_bits)
    needed = _solve(requirements)
    neighbours = parameters.neighbours
    require(
        needed.neighbours <= neighbours < cohort and _is_possible(neighbours, cohort),
        f"neighbours must be {needed.neighbours} or more for {cohort} devices, and even or all "
        f"the others; got {neighbours}",
    )
    least = _least_threshold(requirements, neighbours)
    require(
        parameters.threshold >= least,
        f"threshold must be at least {least} for {neighbours} neighbours of {cohort} devices; "
        f"got {parameters.threshold}",
    )


class Requirements(NamedTuple):
    cohort: int
    adversaries: int
    droppers: int
    mode: Mode
    security_bits: int
    correctness_bits: int
    any_dropouts: bool = False


class ThresholdBounds(NamedTuple):
    """Bounds on the threshold for a number of neighbours."""

    neighbours: int
    connected: bool
    least: int  # for secrecy
    most: int  # for recovery
    window: int


def requirements_of(
    cohort: int,
    corrupt: float,
    dropout: float,
    mode: Mode,
    security_bits: int,
    correctness_bits: int,
    any_dropouts: bool = False,
) -> Requirements:
    require(mode in get_args(Mode), f"mode must be one of {get_args(Mode)}; got {mode!r}")
    for name, rate in {"corrupt": corrupt, "dropout": dropout}.items():
        require(0 <= rate < 1, f"{name} must be at least 0 and below 1; got {rate}")
    for name, bits in {
        "security_bits": security_bits,
        "correctness_bits": correctness_bits,
    }.items():
        require(1 <= bits <= 256, f"{name} must be 1 to 256; got {bits}")
    if cohort < LEAST_THRESHOLD + 1:
        raise ImpossibleError(
            f"a secret needs {LEAST_THRESHOLD} neighbours to keep it; got a cohort of {cohort}; "
            f"ask at least {LEAST_THRESHOLD + 1} devices"
        )
    require(cohort <= LARGEST_COHORT, f"cohort must be at most {LARGEST_COHORT}; got {cohort}")
    adversaries, droppers = (int(Fraction(str(rate)) * cohort) for rate in (corrupt, dropout))
    return Requirements(
        cohort, adversaries, droppers, mode, security_bits, correctness_bits, any_dropouts
    )


def _solve(requirements: Requirements) -> Parameters:
    parameters, last = search(requirements)
    if parameters is None:
        reason = (
            f"of {last.neighbours} neighbours, at least {last.least} must be needed to keep a "
            f"secret from the {requirements.mode} collector, and only {last.most} are sure to stay"
            if last.connected
            else f"{last.neighbours} neighbours, the most possible, may not connect them"
        )
        raise ImpossibleError(
            f"no threshold works for {requirements.cohort} devices of which "
            f"{requirements.adversaries} may be corrupt and {requirements.droppers} may drop out: "
            f"{reason}; lower corrupt or dropout, or ask a larger cohort"
        )
    return parameters


def _is_possible(neighbours: int, cohort: int) -> bool:
    return neighbours == cohort - 1 or (cohort >= COMPLETE_BELOW and neighbours % 2 == 0)


@lru_cache(maxsize=1024)
def search(requirements: Requirements) -> tuple[Parameters | None, ThresholdBounds]:
    """The first parameters that satisfy all bounds, if any; and the last bounds."""
    for bounds in threshold_bounds(requirements):
        will_do = bounds.connected and bounds.least <= bounds.most
        if will_do and _is_possible(bounds.neighbours, requirements.cohort):
            return Parameters(bounds.neighbours, bounds.least, bounds.window), bounds
    return None, bounds


@lru_cache(maxsize=1024)
def _least_threshold(requirements: Requirements, neighbours: int) -> int:
    return next(
        bounds.least for bounds in threshold_bounds(requirements) if bounds.neighbours == neighbours
    )


def threshold_bounds(requirements: Requirements) -> Iterator[ThresholdBounds]:
    """The bounds for one neighbour, for two, and so on."""
    cohort, bad = requirements.cohort, requirements.adversaries + requirements.droppers
    corrupt = MarkedNeighbours(
        cohort, requirements.adversaries, bits=requirements.security_bits + 1, strict=False
    )
    dropped = MarkedNeighbours(
        cohort, requirements.droppers, bits=requirements.correctness_bits, strict=True
    )
    all_bad = 1  # ordered draws of neighbours that are all bad
    halves = [(0, 0)]  # most corrupt and dropped devices, by number of neighbours
    for neighbours in range(1, min(cohort - 1, MOST_NEIGHBOURS) + 1):
        all_bad *= max(bad - neighbours + 1, 0)
        corrupt.draw()
        dropped.draw()
        halves.append((corrupt.most, dropped.most))
        cut = all_bad * cohort * (cohort - neighbours - 1)  # over twice `corrupt.draws`
        least = corrupt.most + 1
        if requirements.mode == "semi_malicious":
            least = (corrupt.most + neighbours) // 2 + 1
        connected, window = cut << requirements.security_bits < corrupt.draws, 0
        if requirements.any_dropouts:
            some_corrupt, some_dropped = halves[neighbours // 2]
            complete = neighbours == cohort - 1
            window = 0 if complete else some_corrupt + 1
            connected = complete or neighbours // 2 - some_dropped >= window
        yield ThresholdBounds(
            neighbours,
            connected=connected,
            least=max(least, LEAST_THRESHOLD),
            most=neighbours - dropped.most,
            window=window,
        )


class MarkedNeighbours:
    """A bound on the marked devices among a device's neighbours: the least number `most` that is
    exceeded with probability at most 2^−bits/cohort (below it, if `strict`).

    Neighbours are drawn one by one without replacement, and ordered draws are counted exactly. With
    one more neighbour, `most` grows by one or not at all, so each step is a few multiplications.
    """

    def __init__(self, cohort: int, marked: int, *, bits: int, strict: bool) -> None:
        self.cohort, self.marked, self.bits, self.strict = cohort, marked, bits, strict
        self.drawn = self.most = 0
        self.draws = 1  # all ordered draws of `drawn` devices
        self.above = 0  # those with more than `most` marked ones
        self.equal = 1  # those with `most`

    def draw(self) -> None:
        """Add one more neighbour."""
        marked_left = self.marked - self.most
        clear_left = self.cohort - self.marked - (self.drawn - self.most)
        self.above = self.above * (self.cohort - self.drawn) + self.equal * marked_left
        self.draws *= self.cohort - self.drawn
        self.drawn += 1
        if (self.above * self.cohort << self.bits) + self.strict <= self.draws:
            # Draws with `most` marked devices and one more unmarked device.
            self.equal = self.equal * self.drawn * clear_left // (self.drawn - self.most)
        else:
            self.most += 1
            self.equal = self.equal * self.drawn * marked_left // self.most
            self.above -= self.equal
