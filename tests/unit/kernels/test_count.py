"""The compiled loops and their numpy twins: one signature, equal results, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from checks import SEED
from sfumato import kernels
from sfumato.kernels.count import compiled, plain

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
PRIME = plain.PRIME
TWINS: list[Any] = [compiled, plain]
EDGES = np.array([0, 1, 2**32 - 1, 2**32, 2**60, PRIME - 2, PRIME - 1], dtype=np.uint64)


def elements(rng: np.random.Generator, *shape: int) -> U64:
    """Field elements, a tenth of them at the edges where carries and folds go wrong."""
    values = rng.integers(0, PRIME, shape, dtype=np.uint64)
    return np.where(rng.random(shape) < 0.1, rng.choice(EDGES, shape), values)


def hashes(
    rng: np.random.Generator, rounds: int, rows: int, kind: str
) -> tuple[U64, U64, I64, bool]:
    """Hash functions of a shared, hybrid or fresh campaign: buckets, signs, rounds, fresh."""
    fresh = kind == "fresh" and rounds > 1
    buckets = elements(rng, rounds if fresh else 1, rows, 2)
    signs = elements(rng, 1 + (rounds - 1) // 3, rows, 4)  # a new block every third round
    index = np.arange(rounds)
    which = np.stack([index if fresh else index * 0, index // 3, index * 7 % 60], axis=1)
    return buckets, signs, which, fresh


def same(first: npt.NDArray[np.generic], second: npt.NDArray[np.generic]) -> bool:
    """Equal to the last bit, type and shape too; −0.0 is not 0.0."""
    return (
        first.dtype == second.dtype
        and first.shape == second.shape
        and first.tobytes() == second.tobytes()
    )


def strings(rng: np.random.Generator, count: int) -> tuple[npt.NDArray[np.uint8], I64]:
    """Byte strings of 0 to 30 bytes, one after the other, with bytes before and after them."""
    offsets = 5 + np.r_[0, np.cumsum(rng.integers(0, 31, count))]
    data = rng.integers(0, 256, int(offsets[-1]) + 3, dtype=np.uint8)
    return data, offsets.astype(np.int64)


@pytest.mark.parametrize("count", [0, 1, 2, 1000])
def test_fingerprints_of_integers_are_the_same(count: int) -> None:
    rng = np.random.default_rng([SEED, count])
    items = rng.integers(-(2**63), 2**63 - 1, count)
    for point in (*EDGES, *elements(rng, 5)):
        assert same(
            compiled.fingerprint_integers(items, point), plain.fingerprint_integers(items, point)
        )


@pytest.mark.parametrize("count", [1, 2, 500])
@pytest.mark.parametrize("spare", [0, 3], ids=["to the last byte", "bytes to spare"])
def test_fingerprints_of_bytes_are_the_same(count: int, spare: int) -> None:
    """Also where the last item ends with the buffer, so that no whole word may be read there."""
    rng = np.random.default_rng([SEED, count, spare])
    data, offsets = strings(rng, count)
    data = data[: int(offsets[-1]) + spare]
    for point in (*EDGES, *elements(rng, 5)):
        assert same(
            compiled.fingerprint_bytes(data, offsets, point),
            plain.fingerprint_bytes(data, offsets, point),
        )


def test_fingerprints_of_every_short_length_at_every_place_are_the_same() -> None:
    rng = np.random.default_rng(SEED)
    data = rng.integers(0, 256, 40, dtype=np.uint8)
    (point,) = elements(rng, 1)
    for start in range(41):
        for stop in range(start, 41):
            offsets = np.array([start, stop])
            assert same(
                compiled.fingerprint_bytes(data, offsets, point),
                plain.fingerprint_bytes(data, offsets, point),
            )


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 5, 16, 17])
@pytest.mark.parametrize("width", [2, 3, 64, 1000])
def test_encoded_tables_are_the_same(rows: int, width: int, weighted: bool) -> None:
    rng = np.random.default_rng([SEED, rows, width])
    points = elements(rng, 300)
    weights = rng.integers(-(10**12), 10**12, 300) if weighted else None
    buckets, signs = elements(rng, rows, 2), elements(rng, rows, 4)
    for bit in (0, 31, 59):
        assert same(
            compiled.encode(points, weights, buckets, signs, bit, width),
            plain.encode(points, weights, buckets, signs, bit, width),
        )


@pytest.mark.parametrize("count", [1, 511, 512, 513])
@pytest.mark.parametrize("kind", ["shared", "hybrid", "fresh"])
@pytest.mark.parametrize("rounds", [1, 2, 7])
def test_decoded_counts_are_the_same_for_every_number_of_rounds(
    count: int, kind: str, rounds: int
) -> None:
    """Float tables: equal only when both twins add in the same order."""
    rng = np.random.default_rng([SEED, count, rounds])
    tables = rng.normal(0, 1000, (rounds, 5, 33))
    buckets, signs, which, fresh = hashes(rng, rounds, 5, kind)
    points = elements(rng, count)
    for mean in (False, True):
        assert same(
            compiled.decode(points, tables, buckets, signs, which, mean, fresh),
            plain.decode(points, tables, buckets, signs, which, mean, fresh),
        )


@pytest.mark.parametrize("rows", range(1, 18))
def test_decoded_counts_are_the_same_for_every_number_of_rows(rows: int) -> None:
    """Each number of rows has its own sorting network; ties and whole numbers come often here."""
    rng = np.random.default_rng([SEED, rows])
    points = elements(rng, 700)
    buckets, signs, which, fresh = hashes(rng, 3, rows, "hybrid")
    whole = rng.integers(-2, 3, (3, rows, 8)).astype(np.float64)
    for tables in (whole, rng.normal(0, 1, (3, rows, 8)), whole * 2.0**40):
        for mean in (False, True):
            assert same(
                compiled.decode(points, tables, buckets, signs, which, mean, fresh),
                plain.decode(points, tables, buckets, signs, which, mean, fresh),
            )


@pytest.mark.parametrize("kind", ["shared", "hybrid", "fresh"])
@pytest.mark.parametrize("rows", [1, 4, 5])
def test_readings_are_the_same(kind: str, rows: int) -> None:
    rng = np.random.default_rng([SEED, rows])
    tables = rng.normal(0, 1000, (7, rows, 33))
    buckets, signs, which, _ = hashes(rng, 7, rows, kind)
    points = elements(rng, 300)
    assert same(
        compiled.readings(points, tables, buckets, signs, which),
        plain.readings(points, tables, buckets, signs, which),
    )


@pytest.mark.parametrize("size", range(1, 18))
def test_the_sorting_network_sorts(size: int) -> None:
    """A network that sorts every sequence of zeros and ones sorts everything (Knuth 5.3.4)."""
    network = compiled.sorting_network(size)
    words = np.arange(2**size, dtype=np.int64) if size <= 12 else _some_words(size)
    columns = [(words >> k & 1).astype(np.int8) for k in range(size)]
    for low, high in network:
        a, b = columns[low], columns[high]
        columns[low], columns[high] = np.minimum(a, b), np.maximum(a, b)
    assert all((columns[k] <= columns[k + 1]).all() for k in range(size - 1))


def _some_words(size: int) -> I64:
    """All sequences that are sorted but for one block, and many others drawn at random."""
    blocks = [(2**a - 1) << b for a in range(size + 1) for b in range(size + 1 - a)]
    words = np.random.default_rng(SEED).integers(0, 2**size, 10_000)
    return np.concatenate([np.array(blocks, dtype=np.int64), words])


def test_nothing_decodes_to_nothing() -> None:
    rng = np.random.default_rng(SEED)
    buckets, signs, which, fresh = hashes(rng, 2, 3, "hybrid")
    tables, none = rng.normal(0, 1, (2, 3, 8)), np.empty(0, dtype=np.uint64)
    for twin in TWINS:
        assert twin.decode(none, tables, buckets, signs, which, False, fresh).shape == (0,)
        assert twin.readings(none, tables, buckets, signs, which).shape == (2, 3, 0)
        assert not twin.encode(none, None, buckets[0], signs[0], 0, 8).any()


@pytest.mark.parametrize("twin", TWINS, ids=["compiled", "plain"])
def test_kernels_write_to_none_of_their_inputs(twin: Any) -> None:
    """Read-only inputs work, and a write to one would raise (numpy) or show (compiled)."""
    rng = np.random.default_rng(SEED)
    data, offsets = strings(rng, 50)
    buckets, signs, which, _ = hashes(rng, 4, 3, "hybrid")
    inputs: dict[str, npt.NDArray[Any]] = {
        "data": data,
        "offsets": offsets,
        "points": elements(rng, 100),
        "weights": rng.integers(0, 9, 100),
        "tables": rng.normal(0, 1, (4, 3, 16)),
        "buckets": buckets,
        "signs": signs,
        "which": which,
    }
    before = {name: value.tobytes() for name, value in inputs.items()}
    for value in inputs.values():
        value.flags.writeable = False
    points, tables = inputs["points"], inputs["tables"]
    twin.fingerprint_bytes(data, offsets, np.uint64(5))
    twin.fingerprint_integers(inputs["weights"], np.uint64(5))
    twin.encode(points, inputs["weights"], buckets[0], signs[0], 0, 16)
    twin.readings(points, tables, buckets, signs, which)
    for mean in (False, True):
        twin.decode(points, tables, buckets, signs, which, mean, False)
    assert before == {name: value.tobytes() for name, value in inputs.items()}


def test_many_items_in_threads_give_what_they_give_in_one() -> None:
    """Sizes past the point where work is cut into one piece per core."""
    rng = np.random.default_rng(SEED)
    count = 3 * kernels.PIECE + 17
    points = elements(rng, count)
    weights = rng.integers(-5, 6, count)
    buckets, signs, which, fresh = hashes(rng, 2, 3, "hybrid")
    tables = rng.normal(0, 1, (2, 3, 16))
    assert same(
        kernels.encode(points, weights, buckets[0], signs[0], 5, 16),
        compiled.encode(points, weights, buckets[0], signs[0], 5, 16),
    )
    assert same(
        kernels.decode(points, tables, buckets, signs, which, "median", fresh),
        compiled.decode(points, tables, buckets, signs, which, False, fresh),
    )
    items = rng.integers(-(2**63), 2**63 - 1, count)
    assert same(
        kernels.fingerprint_integers(items, 12345),
        compiled.fingerprint_integers(items, np.uint64(12345)),
    )
    data, offsets = strings(rng, count)
    assert same(
        kernels.fingerprint_bytes(data, offsets, 12345),
        compiled.fingerprint_bytes(data, offsets, np.uint64(12345)),
    )
