"""The loops of local privacy compiled by numba: same signatures and results as `plain`."""

from __future__ import annotations

from typing import Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from sfumato.arrays import F64, I64, U8, U32, U64, Whole
from sfumato.kernels.compiling import kernel
from sfumato.kernels.count.compiled import _fold, _multiply_high, _reduce
from sfumato.kernels.local.plain import BLOCK

_0, _1, _3 = np.uint64(0), np.uint64(1), np.uint64(3)
_ALL = np.uint64((1 << 64) - 1)
_WORD = ir.IntType(64)
_HAS_SCATTER = bool(llvmlite.binding.get_host_cpu_features().get("bmi2"))
_POINTS = 1024  # points whose cells are computed together, and stay in the cache
_LANES = 8  # points that are hashed by the same instructions
_WORDS = 4  # words that are added together
_PLANES, _FULL = 6, 63  # planes of carries, and the number of vectors that they can count
_AHEAD = 8  # how many vectors ahead planes are prefetched


@intrinsic
def _count_bits(context: Any, word: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.uint64(types.uint64), generate


@intrinsic
def _prefetch(context: Any, data: Any, offset: Any) -> Any:
    """Prefetch the cache line at this place of a flat array."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        address = builder.bitcast(builder.gep(array.data, [args[1]]), ir.IntType(8).as_pointer())
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [address.type, number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch", [address.type], kind)
        builder.call(function, [address, *(ir.Constant(number, k) for k in (1, 3, 1))])
        return context.get_dummy_value()

    return types.void(data, types.int64), generate


@intrinsic
def _ripple(context: Any, planes: Any, place: Any, data: Any, offset: Any) -> Any:
    """Add a group of words, at `offset` of the bytes, to the planes at `place`: one vector register
    per plane, which the compiler does not find by itself."""
    vector = ir.VectorType(ir.IntType(64), _WORDS)

    def at(builder: Any, start: Any, step: int) -> Any:
        moved = builder.gep(start, [ir.Constant(ir.IntType(64), step)])
        return builder.bitcast(moved, vector.as_pointer())

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        counts = context.make_array(signature.args[0])(context, builder, args[0])
        source = context.make_array(signature.args[2])(context, builder, args[2])
        carry = builder.load(at(builder, builder.gep(source.data, [args[3]]), 0), align=1)
        first = builder.gep(counts.data, [args[1]])
        for plane in range(_PLANES):
            address = at(builder, first, plane * _WORDS)
            word = builder.load(address, align=8)
            builder.store(builder.xor(word, carry), address, align=8)
            carry = builder.and_(word, carry)
        return context.get_dummy_value()

    return types.void(planes, types.int64, data, types.int64), generate


@njit(inline="always")
def _cell(x8: Any, a: Any, b: Any, c: Any, width8: Any) -> Any:
    return _multiply_high(_reduce(_fold(_fold(a, x8) + b, x8) + c), width8)


@kernel
def row_cells(points: U64, rows: I64, hashes: U64, width: int) -> I64:
    result = np.empty(points.size, dtype=np.int64)
    width8 = np.uint64(width) << _3
    for i in range(points.size):
        row = rows[i]
        x8 = points[i] << _3
        result[i] = _cell(x8, hashes[row, 0], hashes[row, 1], hashes[row, 2], width8)
    return result


@kernel
def hadamard_records(
    points: U64, places: I64, flips: U64, hashes: U64, width: int, out: U8
) -> None:
    width8, last = np.uint64(width) << _3, np.uint64(width - 1)
    shift: Any = _count_bits(last)
    for i in range(points.size):
        place = np.uint64(places[i])
        row = place >> shift
        cell = _cell(points[i] << _3, hashes[row, 0], hashes[row, 1], hashes[row, 2], width8)
        minus = _count_bits(cell & place) ^ (flips[i >> 6] >> np.uint64(i & 63))
        code = (place << _1) | (minus & _1)
        for byte in range(out.shape[1]):
            out[i, byte] = np.uint8(code)
            code >>= np.uint64(8)


@kernel
def biased_words(digits: U8, words: U64, out: U64) -> tuple[int, int]:
    place, used = 0, 0
    while place + BLOCK <= out.size:
        a = b = c = d = _ALL  # lanes not yet decided
        w = x = y = z = _0  # ones
        position = used
        for k in range(digits.size):
            if a | b | c | d == _0:
                break
            if position + BLOCK > words.size:
                return place, used
            e, f, g, h = (
                words[position],
                words[position + 1],
                words[position + 2],
                words[position + 3],
            )
            position += BLOCK
            if digits[k]:
                w, x, y, z = w | (a & ~e), x | (b & ~f), y | (c & ~g), z | (d & ~h)
                a, b, c, d = a & e, b & f, c & g, d & h
            else:
                a, b, c, d = a & ~e, b & ~f, c & ~g, d & ~h
        out[place], out[place + 1], out[place + 2], out[place + 3] = w, x, y, z
        place, used = place + BLOCK, position
    return _last_words(digits, words, out, place, used)


@kernel
def _last_words(digits: U8, words: U64, out: U64, place: int, used: int) -> tuple[int, int]:
    """The same for the few words that do not fill a block."""
    size = out.size - place
    if size == 0:
        return place, used
    position = used
    lanes = np.full(size, _ALL)
    ones = np.zeros(size, dtype=np.uint64)
    for k in range(digits.size):
        if not lanes.any():
            break
        if position + size > words.size:
            return place, used
        for i in range(size):
            word = words[position + i]
            if digits[k]:
                ones[i] |= lanes[i] & ~word
                lanes[i] &= word
            else:
                lanes[i] &= ~word
        position += size
    out[place:] = ones
    return out.size, position


@intrinsic
def _scatter_bits(context: Any, bits: Any, mask: Any) -> Any:
    """The lowest bits at the places of the mask: one instruction on newer x86, otherwise a loop."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if _HAS_SCATTER:
            kind = ir.FunctionType(_WORD, [_WORD, _WORD])
            name = "llvm.x86.bmi.pdep.64"
            existing = builder.module.globals.get(name)
            function = existing or ir.Function(builder.module, kind, name)
            return builder.call(function, args)
        return context.compile_internal(builder, scatter_slowly, signature, args)

    return types.uint64(types.uint64, types.uint64), generate


def scatter_slowly(bits: Any, mask: Any) -> Any:
    result = _0
    while mask != _0:
        lowest = mask & (~mask + _1)
        if bits & _1:
            result |= lowest
        bits >>= _1
        mask ^= lowest
    return result


@kernel
def deposit(bits: U64, words: U64) -> None:
    place, used = 0, np.uint64(0)  # the next bit: a word, and how many of its bits are used
    for i in range(words.size):
        mask = words[i]
        count: Any = _count_bits(mask)
        if count == _0:
            continue
        values = bits[place] >> used
        if used + count > np.uint64(64):
            values |= bits[place + 1] << (np.uint64(64) - used)
        words[i] = _scatter_bits(values, mask)
        used += count
        if used >= np.uint64(64):
            used -= np.uint64(64)
            place += 1


@kernel
def count_rows(records: U8, row_bytes: int, counts: I64) -> U32:
    rows = np.empty(records.shape[0], dtype=np.uint32)
    for i in range(rows.size):
        row = np.uint32(0)
        for byte in range(row_bytes):
            row |= np.uint32(records[i, byte]) << np.uint32(8 * byte)
        rows[i] = row
        if row < counts.size:
            counts[row] += 1
    return rows


def add_bits(rows: Whole, records: U8, skip: int, table: Whole) -> None:
    groups = -(-table.shape[1] // (64 * _WORDS))
    if rows.size < 2 * table.shape[0]:
        _add_each(rows, records, skip, table)
        return
    # A group of the last vectors may reach beyond the records, so these are added one by one.
    size = records.shape[1]
    safe = max(0, (records.size - skip - 8 * _WORDS * groups) // size + 1)
    safe = min(safe, rows.size)
    _add_each(rows[safe:], records[safe:], skip, table)
    planes = np.zeros(table.shape[0] * _PLANES * groups * _WORDS, dtype=np.uint64)
    fill = np.zeros(table.shape[0], dtype=np.uint8)
    _add_in_planes(rows[:safe], records.reshape(-1), size, skip, groups, planes, fill, table)


@kernel
def _add_each(rows: Whole, records: U8, skip: int, table: Whole) -> None:
    for i in range(rows.size):
        line = table[rows[i]]
        for cell in range(line.size):
            line[cell] += (records[i, skip + cell // 8] >> np.uint8(cell % 8)) & np.uint8(1)


@kernel
def _add_in_planes(
    rows: Whole, data: U8, size: int, skip: int, groups: int, planes: U64, fill: U8, table: Whole
) -> None:
    """Add a row's vectors by full adders over whole words, which keep the count of every lane in
    six planes; 63 vectors fill them, and then they are spread over the row's cells."""
    each = _PLANES * groups * _WORDS
    counts = np.empty(64, dtype=np.uint8)
    for i in range(rows.size):
        if i + _AHEAD < rows.size:
            soon = np.int64(rows[i + _AHEAD]) * each
            for place in range(soon, soon + each, 8):
                _prefetch(planes, place)
        row = rows[i]
        start, at = np.int64(row) * each, i * size + skip
        for group in range(groups):
            _ripple(planes, start + _PLANES * _WORDS * group, data, at + 8 * _WORDS * group)
        fill[row] += np.uint8(1)
        if fill[row] == _FULL:
            _spread(planes[start : start + each], counts, table[row])
            fill[row] = 0
    for row in range(fill.size):
        if fill[row]:
            _spread(planes[np.int64(row) * each : (np.int64(row) + 1) * each], counts, table[row])


@intrinsic
def _count_lanes(context: Any, planes: Any, place: Any, counts: Any) -> Any:
    """The counts of the 64 lanes of the word at `place` of six planes, as bytes."""
    lanes, flags = ir.VectorType(ir.IntType(8), 64), ir.VectorType(ir.IntType(1), 64)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source = context.make_array(signature.args[0])(context, builder, args[0])
        out = context.make_array(signature.args[2])(context, builder, args[2])
        total = ir.Constant(lanes, [0] * 64)
        for plane in reversed(range(_PLANES)):  # twice the planes above, plus this one
            step = ir.Constant(ir.IntType(64), plane * _WORDS)
            word = builder.load(builder.gep(source.data, [builder.add(args[1], step)]))
            digit = builder.zext(builder.bitcast(word, flags), lanes)
            total = builder.add(builder.add(total, total), digit)
        builder.store(total, builder.bitcast(out.data, lanes.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(planes, types.int64, counts), generate


@kernel
def _spread(planes: U64, counts: U8, line: Whole) -> None:
    """Add the count of every lane to its cell, and clear the planes; `counts` is a buffer for
    64."""
    for first in range(0, line.size, 64):
        group, word = divmod(first // 64, _WORDS)
        _count_lanes(planes, _PLANES * _WORDS * group + word, counts)
        cells = line[first : first + 64]
        for lane in range(cells.size):
            cells[lane] += counts[lane]
    planes[:] = _0


@kernel
def add_signs(codes: Whole, flat: Whole) -> None:
    for i in range(codes.size):
        code = np.int64(codes[i])
        flat[code >> 1] += 1 - 2 * (code & 1)


@kernel
def _squares(points: U64) -> U64:
    result = np.empty_like(points)
    for i in range(points.size):
        result[i] = _reduce(_fold(points[i], points[i] << _3))
    return result


@intrinsic
def _hash_eight(
    context: Any, points: Any, squares: Any, at: Any, a: Any, b: Any, c: Any, width: Any, out: Any
) -> Any:
    """The cells of eight points from `at`: a·x² + b·x + c modulo 2**61 − 1, scaled to the width.

    In limbs of 31 bits, whose products are one instruction each. With 2**62 ≡ 2 the sum of all
    stays below 2**64: less than 2**63 from the low products and the carries of the middle ones,
    2**62 from the high ones, and 2**61 each from the rest and c. (On its own, the compiler
    multiplies whole words, at half the speed.)
    """
    vector, narrow = ir.VectorType(_WORD, _LANES), ir.VectorType(ir.IntType(32), _LANES)

    def all_are(number: int) -> Any:
        return ir.Constant(vector, [number] * _LANES)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        add, shift, both = builder.add, builder.lshr, builder.and_

        def address(k: int, kind: Any) -> Any:
            data = context.make_array(signature.args[k])(context, builder, args[k]).data
            return builder.bitcast(builder.gep(data, [args[2]]), kind.as_pointer())

        def spread(word: Any) -> Any:
            nothing = ir.Constant(vector, ir.Undefined)
            first = builder.insert_element(nothing, word, ir.Constant(ir.IntType(32), 0))
            return builder.shuffle_vector(first, nothing, ir.Constant(narrow, [0] * _LANES))

        def limbs(word: Any) -> tuple[Any, Any]:
            return both(word, all_are(2**31 - 1)), shift(word, all_are(31))

        def times(left: Any, right: Any) -> Any:
            half = all_are(2**32 - 1)  # says that a product of halves is enough
            return builder.mul(both(left, half), both(right, half))

        x, x_high = limbs(builder.load(address(0, vector), align=8))
        y, y_high = limbs(builder.load(address(1, vector), align=8))
        (a, a_high), (b, b_high) = limbs(spread(args[3])), limbs(spread(args[4]))
        low = add(times(a, y), times(b, x))
        middle = add(
            add(times(a, y_high), times(a_high, y)), add(times(b, x_high), times(b_high, x))
        )
        high = builder.shl(add(times(a_high, y_high), times(b_high, x_high)), all_are(1))
        rest = builder.shl(both(middle, all_are(2**30 - 1)), all_are(31))
        value = add(add(low, high), add(add(shift(middle, all_are(30)), rest), spread(args[5])))
        value = add(both(value, all_are(2**61 - 1)), shift(value, all_are(61)))
        less = builder.sub(value, all_are(2**61 - 1))  # huge, if the value is below the prime
        value = builder.select(builder.icmp_unsigned("<", value, less), value, less)
        cells = spread(args[6])
        low, high = limbs(value)
        scaled = add(times(high, cells), shift(times(low, cells), all_are(31)))
        result = builder.trunc(shift(scaled, all_are(30)), narrow)
        builder.store(result, address(7, narrow), align=4)
        return context.get_dummy_value()

    word, place = types.uint64, types.int64
    return types.void(points, squares, place, word, word, word, word, out), generate


@kernel
def _hash(points: U64, squares: U64, hash_: U64, width: int, out: U32) -> None:
    """The cell of each point in one row; the squares are of the points, modulo the prime."""
    a, b, c, cells = hash_[0], hash_[1], hash_[2], np.uint64(width)
    whole = out.size // _LANES * _LANES
    for i in range(0, whole, _LANES):
        _hash_eight(points, squares, i, a, b, c, cells, out)
    for i in range(whole, out.size):
        out[i] = _cell(points[i] << _3, a, b, c, cells << _3)


@kernel
def gather(points: U64, table: Whole | F64, hashes: U64) -> F64:
    total = np.zeros(points.size)
    squares = _squares(points)
    for row in range(0, table.shape[0], 2):
        _add_rows(points, squares, table[row : row + 2], hashes[row : row + 2], total)
    return total


@kernel
def _add_rows(points: U64, squares: U64, lines: Whole | F64, hashes: U64, total: F64) -> None:
    """Add the cells of each point in one row, or two: so points and totals are read half as
    often."""
    width = lines.shape[1]
    cells = np.empty((2, _POINTS), dtype=np.uint32)
    for start in range(0, points.size, _POINTS):
        part = slice(start, min(start + _POINTS, points.size))
        sums = total[part]
        for row in range(lines.shape[0]):
            _hash(points[part], squares[part], hashes[row], width, cells[row, : sums.size])
        if lines.shape[0] == 2:
            _add_two(lines[0], cells[0], lines[1], cells[1], sums)
        else:
            for i in range(sums.size):
                sums[i] += lines[0, cells[0, i]]


@kernel
def _add_two(first: Any, cells: U32, second: Any, others: U32, total: F64) -> None:
    for i in range(total.size):
        total[i] = total[i] + first[cells[i]] + second[others[i]]


def gather_hadamard(points: U64, table: Whole, hashes: U64) -> F64:
    # The sum of a row, whatever the signs, is at most the number of its records.
    wide = table.dtype.itemsize == 8
    lines: Whole = np.zeros((2, table.shape[1]), np.int64 if wide else np.int32)
    return _gather_hadamard(points, table, hashes, lines)


@kernel
def _gather_hadamard(points: U64, table: Whole, hashes: U64, lines: Whole) -> F64:
    total = np.zeros(points.size)
    squares = _squares(points)
    for row in range(0, table.shape[0], 2):
        some = min(2, table.shape[0] - row)
        lines[:some] = table[row : row + some]
        for k in range(some):
            _transform(lines[k])
        _add_rows(points, squares, lines[:some], hashes[row : row + some], total)
    return total


@kernel
def collide(points: U64, others: U64, weights: F64, hashes: U64, shares: F64, width: int) -> F64:
    total = np.zeros(points.size)
    even = weights.sum() / width
    lines = np.empty((1, width))
    cells = np.empty(others.size, dtype=np.uint32)
    squares, other_squares = _squares(points), _squares(others)
    for row in range(hashes.shape[0]):
        lines[:] = 0.0
        _hash(others, other_squares, hashes[row], width, cells)
        for i in range(others.size):
            lines[0, cells[i]] += weights[i]
        lines -= even
        lines *= shares[row]
        _add_rows(points, squares, lines, hashes[row : row + 1], total)
    return total


@kernel
def hadamard(rows: Whole | F64) -> None:
    for row in range(rows.shape[0]):
        _transform(rows[row])


@kernel
def _transform(line: Whole | F64) -> None:
    """Sixteen neighbours at a time first, in registers; then four parts of the line in one pass."""
    size, half = line.size, 1
    if size >= 16:
        for start in range(0, size, 16):
            _transform_sixteen(line[start : start + 16])
        half = 16
    while 4 * half <= size:
        for start in range(0, size, 4 * half):
            middle = start + 2 * half
            _cross_four(
                line[start : start + half],
                line[start + half : middle],
                line[middle : middle + half],
                line[middle + half : middle + 2 * half],
            )
        half *= 4
    while half < size:
        for start in range(0, size, 2 * half):
            for i in range(start, start + half):
                a, b = line[i], line[i + half]
                line[i], line[i + half] = a + b, a - b
        half *= 2


@njit(inline="always")
def _transform_sixteen(line: Any) -> None:
    for level in range(4):
        half = 1 << level
        for k in range(8):
            i = (k >> level << (level + 1)) | (k & (half - 1))
            a, b = line[i], line[i + half]
            line[i], line[i + half] = a + b, a - b


@kernel
def _cross_four(a: Any, b: Any, c: Any, d: Any) -> None:
    for i in range(a.size):
        e, f, g, h = a[i] + b[i], a[i] - b[i], c[i] + d[i], c[i] - d[i]
        a[i], b[i], c[i], d[i] = e + g, f + h, e - g, f - h
