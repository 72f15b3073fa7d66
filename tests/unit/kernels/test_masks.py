"""Masks: equal to the published vectors, and to the cipher of counters that are written out one by
one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st

from checks import SEED
from sfumato import kernels
from sfumato.errors import SpecError
from sfumato.kernels import masks

Words = npt.NDArray[np.unsignedinteger[Any]]
Pairs = Sequence[tuple[bytes, bytes]]

KINDS = (np.uint8, np.uint16, np.uint32, np.uint64)
EDGES = [bytes(16), bytes(15) + b"\1", bytes(8) + b"\xff" * 8, b"\xff" * 15 + b"\xf0", b"\xff" * 16]


def counters(start: bytes, count: int) -> bytes:
    first = int.from_bytes(start, "big")
    return b"".join(((first + k) % 2**128).to_bytes(16, "big") for k in range(count))


def stream(key: bytes, start: bytes, size: int) -> bytes:
    """The first bytes of a stream, from the cipher of each counter."""
    cipher = Cipher(algorithms.AES(key), modes.ECB())  # noqa: S305  # block by block is what is meant
    return cipher.encryptor().update(counters(start, -(-size // 16)))[:size]


def expected(total: Words, pairs: Pairs, signs: Sequence[int]) -> Words:
    """Sums in whole numbers, word by word."""
    bits = 8 * total.itemsize
    sums = total.astype(object)
    for (key, start), sign in zip(pairs, signs, strict=True):
        words = np.frombuffer(stream(key, start, total.nbytes), total.dtype.newbyteorder("<"))
        sums = (sums + sign * words.astype(object)) % 2**bits
    return sums.astype(total.dtype)


def some_words(rng: np.random.Generator, count: int, kind: type[np.unsignedinteger[Any]]) -> Words:
    return rng.integers(0, 2 ** (8 * np.dtype(kind).itemsize), count, dtype=kind)


def some_pairs(rng: np.random.Generator, count: int) -> list[tuple[bytes, bytes]]:
    return [(rng.bytes(16), rng.bytes(16)) for _ in range(count)]


# Published vectors


def test_the_stream_is_that_of_sp_800_38a() -> None:
    """F.5.1, CTR-AES128.Encrypt: four blocks."""
    plain = bytes.fromhex(
        "6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51"
        "30c81c46a35ce411e5fbc1191a0a52eff69f2445df4f9b17ad2b417be66c3710"
    )
    cipher = bytes.fromhex(
        "874d6191b620e3261bef6864990db6ce9806f66b7970fdff8617187bb9fffdff"
        "5ae4df3edbd5d35e5b4f09020db03eab1e031dda2fbe03d1792170a0f3009cee"
    )
    key = bytes.fromhex("2b7e151628aed2a6abf7158809cf4f3c")
    start = bytes.fromhex("f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff")
    stream_bytes = np.zeros(64, dtype=np.uint8)
    masks.add_streams(stream_bytes, [(key, start)], [1])
    assert (stream_bytes ^ np.frombuffer(plain, np.uint8)).tobytes() == cipher


@pytest.mark.parametrize(
    ("key", "plain", "cipher"),
    [
        (  # FIPS 197, appendix B
            "2b7e151628aed2a6abf7158809cf4f3c",
            "3243f6a8885a308d313198a2e0370734",
            "3925841d02dc09fbdc118597196a0b32",
        ),
        (  # FIPS 197, appendix C.1
            "000102030405060708090a0b0c0d0e0f",
            "00112233445566778899aabbccddeeff",
            "69c4e0d86a7b0430d8cdb78070b4c55a",
        ),
    ],
)
def test_a_block_is_that_of_fips_197(key: str, plain: str, cipher: str) -> None:
    block = np.zeros(16, dtype=np.uint8)
    masks.add_streams(block, [(bytes.fromhex(key), bytes.fromhex(plain))], [1])
    assert block.tobytes().hex() == cipher


# Any size, type and start


@settings(max_examples=60)
@given(
    kind=st.sampled_from(KINDS),
    count=st.integers(0, 1500),
    key=st.binary(min_size=16, max_size=16),
    start=st.binary(min_size=16, max_size=16)
    | st.integers(1, 200).map(lambda k: bytes([255]) * 16),
    sign=st.sampled_from([1, -1]),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_stream_is_that_of_cryptography(
    kind: type[np.unsignedinteger[Any]],
    count: int,
    key: bytes,
    start: bytes,
    sign: int,
    seed: int,
) -> None:
    total = some_words(np.random.default_rng(seed), count, kind)
    theirs = Cipher(algorithms.AES(key), modes.CTR(start)).encryptor().update(bytes(total.nbytes))
    words = np.frombuffer(theirs, total.dtype.newbyteorder("<"))
    summed = total + words if sign > 0 else total - words
    masks.add_streams(total, [(key, start)], [sign])
    assert total.tobytes() == summed.tobytes()


@pytest.mark.parametrize("power", [8, 32, 64, 128])
def test_counters_carry_and_wrap(power: int) -> None:
    """A carry into every byte of the counter, at every place of a group."""
    rng = np.random.default_rng([SEED, power])
    key, above = rng.bytes(16), int.from_bytes(rng.bytes(16), "big") >> power << power
    for before in (*range(40), 63, 64, 65):
        start = ((above - before) % 2**128).to_bytes(16, "big")
        total = some_words(rng, 400, np.uint32)
        sums = expected(total, [(key, start)], [1])
        masks.add_streams(total, [(key, start)], [1])
        assert total.tobytes() == sums.tobytes(), before


@pytest.mark.parametrize("around", [16, 512, masks.CHUNK])
def test_sizes_around_those_that_are_worked_in_are_right(around: int) -> None:
    """Streams that begin anywhere, and no cell beyond either end is touched."""
    rng = np.random.default_rng([SEED, around])
    for size in (around - 1, around, around + 1, 2 * around + 5):
        buffer = some_words(rng, size + 200, np.uint8)
        before, total = buffer.copy(), buffer[100:-100]
        pairs, signs = some_pairs(rng, 3), [1, -1, 1]
        streams = [np.frombuffer(stream(*pair, size), np.uint8) for pair in pairs]
        before[100:-100] += streams[0] - streams[1] + streams[2]
        masks.add_streams(total, pairs, signs)
        assert buffer.tobytes() == before.tobytes()


# Sums of streams


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_added_and_subtracted_is_gone(kind: type[np.unsignedinteger[Any]]) -> None:
    rng = np.random.default_rng(SEED)
    total = some_words(rng, 1001, kind)
    before, pairs = total.copy(), some_pairs(rng, 1)
    masks.add_streams(total, pairs, [1])
    assert (total != before).any()
    masks.add_streams(total, pairs, [-1])
    assert total.tobytes() == before.tobytes()


def test_many_streams_are_as_one_by_one() -> None:
    """Over several blocks of the cache and chunks; each stream begins elsewhere in its group."""
    rng = np.random.default_rng(SEED)
    total = some_words(rng, masks.CHUNK // 4 * 2 + 77, np.uint32)
    pairs, signs = some_pairs(rng, 9), [1, -1, -1, 1, 1, -1, 1, 1, -1]
    single = total.copy()
    for pair, sign in zip(pairs, signs, strict=True):
        masks.add_streams(single, [pair], [sign])
    masks.add_streams(total, pairs, signs)
    assert total.tobytes() == single.tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_words_of_every_size_are_added(kind: type[np.unsignedinteger[Any]]) -> None:
    rng = np.random.default_rng(SEED)
    total = some_words(rng, 20_000, kind)
    pairs, signs = some_pairs(rng, 20), rng.choice([1, -1], 20).tolist()
    before = total.copy()
    masks.add_streams(total, pairs, signs)
    assert total.tobytes() == expected(before, pairs, signs).tobytes()


def test_a_misplaced_accumulator_is_masked_all_the_same() -> None:
    """Words that do not lie at multiples of their size."""
    rng = np.random.default_rng(SEED)
    total = np.frombuffer(bytearray(rng.bytes(4 * 3000 + 1)), np.uint8)[1:].view(np.uint32)
    assert not total.flags.aligned
    pairs, before = some_pairs(rng, 2), total.copy()
    masks.add_streams(total, pairs, [1, -1])
    assert total.tobytes() == expected(before, pairs, [1, -1]).tobytes()


# What is refused

CANARY = b"canary-0f1e2d3c4"  # sixteen bytes
READ_ONLY = np.zeros(4, np.uint32)
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    ("total", "message"),
    [
        ([0, 0], "total must be an array; got list"),
        (np.zeros(4, np.int32), "got int32"),
        (np.zeros(4), "got float64"),
        (np.zeros(4, ">u4"), "got >u4"),
        (np.zeros((2, 2), np.uint32), "one dimension; got 2"),
        (np.zeros(8, np.uint32)[::2], "contiguous"),
        (READ_ONLY, "read-only"),
    ],
)
def test_an_accumulator_of_another_kind_is_refused(total: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        masks.add_streams(total, [(CANARY, CANARY)], [1])


@pytest.mark.parametrize(
    ("pairs", "signs", "message"),
    [
        ([(CANARY + b"5", CANARY)], [1], "a key must have 16 bytes; got 17"),
        ([(CANARY, CANARY[:12])], [1], "a start must have 16 bytes; got 12"),
        ([(CANARY.decode(), CANARY)], [1], "a key must be bytes; got str"),
        ([(CANARY, CANARY)], [0], "a sign must be 1 or -1; got 0"),
        ([(CANARY, CANARY)], [1, 1], "every key needs a sign; got 2 keys and 3 signs"),
    ],
)
def test_keys_and_signs_that_cannot_be_are_refused(
    pairs: Any, signs: list[int], message: str
) -> None:
    """Nothing is added, and no key is shown."""
    total = np.zeros(4, np.uint32)
    with pytest.raises(SpecError, match=message) as caught:
        masks.add_streams(total, [(bytes(16), bytes(16)), *pairs], [1, *signs])
    assert "canary" not in repr(caught.value)
    assert not total.any()


def test_no_streams_and_no_cells_are_nothing_to_do() -> None:
    total = np.ones(4, np.uint32)
    masks.add_streams(total, [], [])
    assert total.tolist() == [1] * 4
    masks.add_streams(np.zeros(0, np.uint32), [(bytes(16), bytes(16))], [1])


@pytest.mark.parametrize("kind", [np.uint8, np.uint32, np.uint64])
def test_several_cores_add_what_one_adds(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts that begin within the streams, and a counter that wraps between them."""
    starts = [bytes(15) + b"\x07", b"\xff" * 16, b"\xff" * 14 + bytes(2)]
    streams = [(bytes([k]) * 16, start) for k, start in enumerate(starts)]
    one = np.arange(10_007).astype(kind)
    several = one.copy()
    monkeypatch.setattr(kernels, "cores_allowed", lambda: 1)
    masks.add_streams(one, streams, [1, -1, 1])
    monkeypatch.setattr(kernels, "cores_allowed", lambda: 3)
    monkeypatch.setattr(masks, "BYTES_PER_CORE", 1)
    masks.add_streams(several, streams, [1, -1, 1])
    assert np.array_equal(one, several)
