"""AES-128 in counter mode by the processor's own instructions, added as it is made.

A group is eight vectors of one, two or four cipher blocks. All its vectors go through a round
before the next round begins, so that none waits for its own last one. A group's first counter is a
multiple of its size: within it counters differ in their last byte alone, so that one `xor` makes
each; the carry, from group to group, is an addition. What lies before a stream's start or beyond
the end of the accumulator is made and thrown away.

A stream is subtracted by adding its complement and 1; the complement is in the last round key.

Nothing branches on a key or on a stream, and nothing is looked up at a place that they say; sizes,
signs and counters are public. Expanded keys are wiped.
"""

# mypy: disable-error-code="call-arg", no-warn-unreachable
# Numba passes an intrinsic its context itself, and mypy takes the calls that miss it for ones that
# never return.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

U64 = npt.NDArray[np.uint64]
Words = npt.NDArray[np.unsignedinteger[Any]]

BLOCK = 1 << 15  # bytes of the accumulator that every stream is added to before the next ones
_VECTORS = 8
_ROUNDS = 10
_KEY = 2 * (_ROUNDS + 1)  # words of an expanded key
_0, _ALL = np.uint64(0), np.uint64((1 << 64) - 1)
_WORD, _LANE = ir.IntType(64), ir.IntType(32)
_PAIR = ir.VectorType(_WORD, 2)
_SUFFIXES = {1: "", 2: ".256", 4: ".512"}
_NEEDS = {4: {"+vaes", "+avx512f"}, 2: {"+vaes", "+avx2"}, 1: {"+aes", "+sse2"}}


def _widths(features: str) -> tuple[int, ...]:
    """How many cipher blocks one instruction takes with these features, most first."""
    there = set(features.split(","))
    if not _NEEDS[1] <= there:
        return ()
    return tuple(width for width, needed in _NEEDS.items() if needed <= there)


# The features that numba compiles for: it may have been told to leave out some that the host has.
WIDTHS = _widths(cpu_target.target_context.codegen().magic_tuple()[2])


def add_streams(
    total: Words,
    keys_and_starts: Sequence[tuple[bytes, bytes]],
    signs: Sequence[int],
    width: int | None = None,
) -> None:
    """Where `WIDTHS` has any; `width` is one of them, the first if not given."""
    keys = b"".join(key for key, _ in keys_and_starts)
    starts = b"".join(start for _, start in keys_and_starts)
    schedule = np.empty((len(signs), _KEY), dtype=np.uint64)
    schedule[:, :2] = np.frombuffer(keys, dtype=np.uint64).reshape(-1, 2)
    counters = np.frombuffer(starts, dtype=">u8").reshape(-1, 2).astype(np.uint64)
    subtracted = np.array([sign < 0 for sign in signs], dtype=total.dtype)
    _add(total, schedule.reshape(-1), counters, subtracted, (0,) * (width or WIDTHS[0]))
    schedule.fill(0)


@njit(nogil=True, cache=True)
def _add(
    total: Words, schedule: U64, counters: U64, subtracted: Words, width: tuple[int, ...]
) -> None:
    """`subtracted` is (streams,) of zeros and ones; `width` is a tuple of that length, since its
    length is part of its type."""
    blocks = _VECTORS * len(width)  # in a group
    size = blocks * 16 // total.itemsize  # cells in a group
    places = np.empty(subtracted.size, dtype=np.int64)  # where the next group of each stream goes
    for stream in range(subtracted.size):
        key = stream * _KEY
        _expand(schedule, key)
        if subtracted[stream]:
            schedule[key + _KEY - 2] ^= _ALL
            schedule[key + _KEY - 1] ^= _ALL
        early = counters[stream, 1] % np.uint64(blocks)
        counters[stream, 1] -= early
        places[stream] = -np.int64(early) * 16 // total.itemsize
    part = np.zeros(size, dtype=total.dtype)  # a group at an edge is added to a copy
    step = BLOCK // total.itemsize
    for start in range(0, total.size, step):
        stop = min(start + step, total.size)
        for stream in range(subtracted.size):
            key, one, place = stream * _KEY, subtracted[stream], places[stream]
            high, low = counters[stream, 0], counters[stream, 1]
            while place < stop:
                inside = place >= 0 and place + size <= total.size
                first, last = max(place, 0), min(place + size, total.size)
                if not inside:
                    for cell in range(first, last):
                        part[cell - place] = total[cell]
                _add_group(total, place, part, inside, schedule, key, high, low, one, width)
                if not inside:
                    for cell in range(first, last):
                        total[cell] = part[cell - place]
                place += size
                low += np.uint64(blocks)
                high += np.uint64(low == _0)  # a multiple of `blocks`: it wraps to 0 exactly
            places[stream], counters[stream, 0], counters[stream, 1] = place, high, low


@intrinsic
def _expand(context: Any, schedule: Any, place: Any) -> Any:
    """Write the ten round keys that follow the key at `place`."""
    quarters, byte = ir.VectorType(_LANE, 4), ir.IntType(8)
    zeros = ir.Constant(quarters, None)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        words = _address(context, builder, signature, args, 0)
        assist = _named(builder, "llvm.x86.aesni.aeskeygenassist", _PAIR, [_PAIR, byte])
        key, power = _load(builder, words, 0, _PAIR), 1
        for round in range(1, _ROUNDS + 1):
            turned = builder.bitcast(builder.call(assist, [key, byte(power)]), quarters)
            key = builder.bitcast(key, quarters)
            key = builder.xor(key, _shuffle(builder, zeros, key, [0, 4, 5, 6]))
            key = builder.xor(key, _shuffle(builder, zeros, key, [0, 1, 4, 5]))
            key = builder.xor(key, _shuffle(builder, turned, turned, [3, 3, 3, 3]))
            key = builder.bitcast(key, _PAIR)
            builder.store(key, _at(builder, words, 2 * round, _PAIR), align=8)
            power = power << 1 if power < 0x80 else 0x1B  # of x, modulo the field's polynomial
        return context.get_dummy_value()

    return types.void(schedule, types.int64), generate


@intrinsic
def _add_group(
    context: Any,
    total: Any,
    place: Any,
    part: Any,
    inside: Any,
    schedule: Any,
    key: Any,
    high: Any,
    low: Any,
    one: Any,
    width: Any,
) -> Any:
    """Add the group whose first counter is (high, low), and `one`: to the cells at `place`, or, if
    they are not all inside, to `part`."""
    blocks, bits = len(width), total.dtype.bitwidth
    vector = ir.VectorType(_WORD, 2 * blocks)
    cells = ir.VectorType(ir.IntType(bits), blocks * 128 // bits)
    each = [0, 1] * blocks  # a pair of words in every block of a vector

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        target = _address(context, builder, signature, args, 0)
        copy = context.make_array(signature.args[2])(context, builder, args[2])
        target = builder.select(args[3], target, copy.data)
        keys = _address(context, builder, signature, args, 4)
        name, of = "llvm.x86.aesni.aesenc", _SUFFIXES[blocks]
        turn = _named(builder, name + of, vector, [vector, vector])
        finish = _named(builder, name + "last" + of, vector, [vector, vector])
        swap = _named(builder, "llvm.bswap.v2i64", _PAIR, [_PAIR])

        counter = builder.insert_element(_PAIR(ir.Undefined), args[6], _LANE(0))
        counter = builder.call(swap, [builder.insert_element(counter, args[7], _LANE(1))])
        counter = builder.xor(counter, _load(builder, keys, 0, _PAIR))
        counter = _shuffle(builder, counter, counter, each)
        states = []
        for index in range(0, _VECTORS * blocks, blocks):
            numbers = [word for block in range(blocks) for word in (0, (index + block) << 56)]
            states.append(builder.xor(counter, vector(numbers)))
        for round in range(1, _ROUNDS + 1):
            pair = _load(builder, keys, 2 * round, _PAIR)
            function = turn if round < _ROUNDS else finish
            round_key = _shuffle(builder, pair, pair, each)
            states = [builder.call(function, [state, round_key]) for state in states]

        ones = builder.insert_element(cells(ir.Undefined), args[8], _LANE(0))
        ones = _shuffle(builder, ones, ones, [0] * cells.count)
        for index, state in enumerate(states):
            address = _at(builder, target, index * cells.count, cells)
            total = builder.add(builder.load(address, align=1), builder.bitcast(state, cells))
            builder.store(builder.add(total, ones), address, align=1)
        return context.get_dummy_value()

    word = types.uint64
    kinds = (
        total,
        types.int64,
        part,
        types.boolean,
        schedule,
        types.int64,
        word,
        word,
        total.dtype,
        width,
    )
    return types.void(*kinds), generate


def _named(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    found = builder.module.globals.get(name)
    return found or ir.Function(builder.module, ir.FunctionType(result, arguments), name)


def _address(context: Any, builder: Any, signature: Any, args: Any, which: int) -> Any:
    """Where a flat array's element is: the array is argument `which`, its place the next one."""
    array = context.make_array(signature.args[which])(context, builder, args[which])
    return builder.gep(array.data, [args[which + 1]])


def _at(builder: Any, start: Any, step: int, kind: Any) -> Any:
    return builder.bitcast(builder.gep(start, [_WORD(step)]), kind.as_pointer())


def _load(builder: Any, start: Any, step: int, kind: Any) -> Any:
    return builder.load(_at(builder, start, step, kind), align=8)


def _shuffle(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.VectorType(_LANE, len(lanes))(lanes))
