"""The devices of paper 000's experiments: from files, or drawn from a power law.

A power law replaces a file that `reproduce.files` does not find, and the source's `data`, which is
in every number and title, says so.

The paper's own three sets are not all public. Their substitutes:

- Gowalla: 546,698 check-ins in the contiguous US on the paper's grid of 175,000 cells; fewer cells
  are occupied than in the whole set, and the largest holds 19%.
- C4 (pages per web domain) has no public counts. *Commits per author* has the head of the law
  i^-1.8, for which figure 3 is known to hold (52%, 16%, 8%, …), but 53,542 devices, not 150,000.
  *Hosts per registered domain* has enough devices, and 92% of them hold the same item.
- Sentiment-140: a tenth of the users, one word each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from sfumato.arrays import F64, I64
from sfumato.errors import DataError
from sfumato.questions.sizing import RISK, rows_for
from sfumato.reproduce.files import find_file, read_arrays

Draw = Callable[[int, np.random.Generator], I64]

ROUNDS = 10
PILOT_DEVICES = 5_000
GOWALLA_CELLS = 175_000
C4_ITEMS = 150_868
C4_DEVICES = 150_000
C4_ROWS = 5
LAW_ITEMS = 100_000  # figure 2
LAW_ROWS = 5
SENTIMENT_WORDS = 49_803
SENTIMENT_USERS = 69_064


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Devices with one item each, and the sizes of the paper's problem on them."""

    name: str  # for titles
    data: str  # a full description
    categories: int
    rows: int
    one_round: int  # devices of the single-round problem
    per_round: int  # devices of each of the ten rounds
    draw: Draw  # draws the items of different devices, (devices,)
    light_tail: bool = False  # whether the paper finds Hybrid best, not merely like Fresh

    def counts(self, rounds: int, devices: int, rng: np.random.Generator) -> I64:
        """The number of each round's devices that hold each item, (rounds, categories)."""
        items = self.draw(rounds * devices, rng).reshape(rounds, devices)
        return np.stack([np.bincount(each, minlength=self.categories) for each in items])


def gowalla() -> Source:
    """Check-ins on the US grid, or the law i^-1.3."""
    path = find_file("gowalla_us_cells.parquet")
    data, draw = "law i^-1.3 in place of Gowalla", power_law(1.3, GOWALLA_CELLS)
    if path is not None:
        cells, counts = read_arrays(path, us_cell=pa.int64(), count=pa.int64())
        pool = np.repeat(np.asarray(cells), np.asarray(counts))
        data = f"Gowalla US check-ins ({path.name})"
        draw = _from_pool(pool, categories=GOWALLA_CELLS, least=GOWALLA_CELLS, path=path)
    return Source(
        name="Gowalla US cells" if path else "law i^-1.3 for Gowalla",
        data=data,
        categories=GOWALLA_CELLS,
        rows=rows_for(GOWALLA_CELLS, risk=RISK, paper=True),
        one_round=GOWALLA_CELLS // 10,
        per_round=GOWALLA_CELLS // ROUNDS,
        draw=draw,
    )


def c4_law() -> Source:
    """The law i^-1.8 over C4's number of items."""
    return _c4("law i^-1.8", "law i^-1.8", power_law(1.8, C4_ITEMS))


def c4_commits() -> Source | None:
    """Item = an author's number of commits; None without the file."""
    path = find_file("commit_users.parquet")
    if path is None:
        return None
    (commits,) = read_arrays(path, commits=pa.int64())
    pool = np.asarray(commits)
    draw = _from_pool(pool, categories=C4_ITEMS, least=2 * PILOT_DEVICES, path=path)
    data = f"commits per author in place of C4 ({path.name})"
    return _c4("commits per author, for C4", data, draw, pool.size, PILOT_DEVICES)


def c4_hosts() -> Source | None:
    """Item = the number of hosts of a registered web domain; None without the file."""
    path = find_file("domains_crux_au.parquet")
    if path is None:
        return None
    hosts, labels = read_arrays(path, host=pa.string(), domain_labels=pa.int64())
    domains = Counter(
        tuple(host.rsplit(".", count)[-count:])
        for host, count in zip(hosts.to_pylist(), labels.to_pylist(), strict=True)
    )
    pool = np.fromiter(domains.values(), dtype=np.int64)
    draw = _from_pool(pool, categories=C4_ITEMS, least=C4_DEVICES + PILOT_DEVICES, path=path)
    data = f"hosts per registered domain in place of C4 ({path.name})"
    return _c4("hosts per domain, for C4", data, draw)


def _c4(name: str, data: str, draw: Draw, devices: int = C4_DEVICES, pilot: int = 0) -> Source:
    """`pilot` is the number of devices that the single round must leave to the pilot."""
    return Source(
        name=name,
        data=data,
        categories=C4_ITEMS,
        rows=C4_ROWS,
        one_round=devices - pilot,
        per_round=devices // ROUNDS,
        draw=draw,
        light_tail=True,
    )


def sentiment() -> Source:
    """One word per user, drawn from all that the user wrote, or the law i^-1.05."""
    path = find_file("sentiment140_user_words.parquet")
    categories, users = SENTIMENT_WORDS, SENTIMENT_USERS
    data, draw = "law i^-1.05 in place of Sentiment-140", power_law(1.05, categories)
    if path is not None:
        user, word, count = read_arrays(path, user=pa.int64(), word=pa.string(), count=pa.int64())
        encoded = word.dictionary_encode()
        categories = len(encoded.dictionary)
        draw, users = _one_word_per_user(
            np.asarray(user), np.asarray(encoded.indices).astype(np.int64), np.asarray(count)
        )
        if users < 2 * PILOT_DEVICES:
            raise DataError(f"{path} must hold at least {2 * PILOT_DEVICES} users; got {users}")
        data = f"Sentiment-140, one word per user ({path.name})"
    return Source(
        name="Sentiment-140 words" if path else "law i^-1.05 for Sentiment-140",
        data=data,
        categories=categories,
        rows=17,  # as in the paper, whose vocabulary is fifteen times larger
        one_round=users // ROUNDS,
        per_round=users // ROUNDS,
        draw=draw,
    )


def power_law_shares(exponent: float, categories: int) -> F64:
    """Shares proportional to i^-exponent, largest first."""
    weight = np.arange(1, categories + 1, dtype=np.float64) ** -exponent
    return np.asarray(weight / weight.sum())


def power_law(exponent: float, categories: int) -> Draw:
    """Devices that each draw an item by the law, independently."""
    below = np.cumsum(power_law_shares(exponent, categories))

    def draw(devices: int, rng: np.random.Generator) -> I64:
        items = np.searchsorted(below, rng.random(devices), side="right")
        return np.minimum(items, categories - 1).astype(np.int64)

    return draw


def _from_pool(pool: I64, *, categories: int, least: int, path: Path) -> Draw:
    """Devices drawn from the pool, each at most once."""
    if pool.size < least:
        raise DataError(f"{path} must hold at least {least} devices; got {pool.size}")
    if not 0 <= pool.min() <= pool.max() < categories:
        raise DataError(
            f"items of {path} must be 0 to {categories - 1}; got {pool.min()} to {pool.max()}"
        )
    return lambda devices, rng: rng.choice(pool, size=devices, replace=False)


def _one_word_per_user(user: I64, word: I64, count: I64) -> tuple[Draw, int]:
    """Random users, each with one of its own words; and the number of users."""
    order = np.argsort(user, kind="stable")
    word, ends = word[order], np.cumsum(count[order])  # ends of each row's run of tokens
    _, first = np.unique(user[order], return_index=True)
    starts = np.where(first > 0, ends[first - 1], 0)
    tokens = np.diff(np.append(starts, ends[-1]))

    def draw(devices: int, rng: np.random.Generator) -> I64:
        indices = rng.choice(starts.size, size=devices, replace=False)
        token = starts[indices] + rng.integers(tokens[indices])
        return word[np.searchsorted(ends, token, side="right")]

    return draw, starts.size
