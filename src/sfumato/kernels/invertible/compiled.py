"""The loops of invertible sketches compiled by numba: same signatures and results as their twins
in `plain`, keys in the same order.

Arrays are used in the kernels only and never passed to a helper: numba would count references to
them in the innermost loops, which takes ten times as long as the work.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from sfumato.arrays import I64, U8, U64
from sfumato.kernels.compiling import kernel
from sfumato.kernels.count.compiled import _fold, _mix, _multiply_high, _reduce
from sfumato.kernels.invertible.plain import Layout, Listed

_0, _1, _2, _3, _61 = (np.uint64(k) for k in (0, 1, 2, 3, 61))
_BLOCK = 64  # keys processed together: their state stays in the first-level cache


@njit(inline="always")
def _low(bits: Any) -> Any:
    """A mask of this many bits, at most 63."""
    return (_1 << np.uint64(bits)) - _1


@njit(inline="always")
def _twos(count: Any) -> Any:
    """How often two divides a count that is not zero."""
    twos = 0
    while (count >> np.uint64(twos)) & _1 == _0:
        twos += 1
    return twos


@njit(inline="always")
def _inverse(odd: Any) -> Any:
    """The inverse of an odd number modulo 2**64: five bits at first, doubled by each step."""
    inverse = (odd * _3) ^ _2
    for _ in range(4):
        inverse *= _2 - odd * inverse
    return inverse


@njit(inline="always")
def _hashed(x8: Any, first: Any, second: Any, third: Any) -> Any:
    return _reduce(_fold(_fold(first, x8) + second, x8) + third)


@kernel
def insert(
    table: U64,
    parts: U64,
    weights: I64,
    values: I64,
    point: np.uint64,
    buckets: U64,
    checks: U64,
    width: int,
    layout: Layout,
) -> None:
    value_bits, count_bits, check_bits, bits = layout
    words, rows, total = table.shape[1], buckets.shape[0], parts.shape[0]
    x8, mask, width8 = point << _3, _low(bits), np.uint64(width) << _3
    check_shift, top = np.uint64(61 - check_bits), np.uint64(bits - check_bits)
    first, one = np.uint64(value_bits + count_bits), _1 << np.uint64(value_bits)
    point8 = np.empty(_BLOCK, dtype=np.uint64)
    content = np.empty((words, _BLOCK), dtype=np.uint64)
    for start in range(0, total, _BLOCK):
        many = min(_BLOCK, total - start)
        point8[:many] = _0
        for word in range(words):
            for i in range(many):
                point8[i] = _reduce(_fold(point8[i], x8) + parts[start + i, word])
        for i in range(many):
            point8[i] = _mix(point8[i]) << _3
        for word in range(words):
            a, b, c = checks[word, 0], checks[word, 1], checks[word, 2]
            shift, ones = (first, one) if word == 0 else (_0, _0)
            for i in range(many):
                check = _hashed(point8[i], a, b, c) >> check_shift
                content[word, i] = (parts[start + i, word] << shift) + ones + (check << top)
            if weights.size:
                for i in range(many):
                    content[word, i] *= np.uint64(weights[start + i])
        if values.size:
            for i in range(many):
                content[0, i] += np.uint64(values[start + i])
        for row in range(rows):
            a, b, c = buckets[row, 0], buckets[row, 1], buckets[row, 2]
            for i in range(many):
                cell = row * width + np.int64(_multiply_high(_hashed(point8[i], a, b, c), width8))
                for word in range(words):
                    table[cell, word] = (table[cell, word] + content[word, i]) & mask


@kernel
def peel_singles(
    table: U64,
    keys_read: U64,
    counts: I64,
    values: I64,
    point: np.uint64,
    buckets: U64,
    checks: U64,
    width: int,
    layout: Layout,
) -> int:
    """The first and longest part of `peel`: cells that have, or come to have, one
    insertion, until none is left. Returns the number of keys.

    Cells wait in a ring, first come, first served. Those of a block are read and hashed together,
    so that the processor works on many at once, and then removed one by one.
    """
    value_bits, count_bits, check_bits, bits = layout
    size, words = table.shape
    rows = buckets.shape[0]
    x8, mask, width8 = point << _3, _low(bits), np.uint64(width) << _3
    check_shift, top = np.uint64(61 - check_bits), np.uint64(bits - check_bits)
    first = np.uint64(value_bits + count_bits)
    value_shift, value_mask, count_mask = np.uint64(value_bits), _low(value_bits), _low(count_bits)
    waiting, head, tail = np.empty(size + 1, dtype=np.int64), 0, 0
    is_waiting = np.zeros(size, dtype=np.bool_)
    for place in range(size):
        single = (table[place, 0] >> value_shift) & count_mask == _1
        waiting[tail] = place
        is_waiting[place] = single
        tail += single
    places, slots = np.empty(_BLOCK, dtype=np.int64), np.empty(_BLOCK, dtype=np.int64)
    point8, pure = np.empty(_BLOCK, dtype=np.uint64), np.empty(_BLOCK, dtype=np.bool_)
    cell = np.empty((words, _BLOCK), dtype=np.uint64)
    parts = np.empty((words, _BLOCK), dtype=np.uint64)
    cells = np.empty((rows, _BLOCK), dtype=np.int64)
    limit, listed = counts.size - 1, 0
    while head != tail and listed < limit:
        many = 0
        while head != tail and many < _BLOCK:
            place = waiting[head]
            places[many], slots[many] = place, head
            head = head + 1 if head < size else 0
            # A cell that was emptied meanwhile stays empty, and is skipped.
            is_full = (table[place, 0] >> value_shift) & count_mask != _0
            is_waiting[place] = is_full
            many += is_full
        for word in range(words):
            shift = first if word == 0 else _0
            part_mask = _low(np.uint64(bits - check_bits) - shift)
            for i in range(many):
                cell[word, i] = table[places[i], word]
                parts[word, i] = (cell[word, i] >> shift) & part_mask
        point8[:many] = _0
        for word in range(words):
            for i in range(many):
                point8[i] = _reduce(_fold(point8[i], x8) + parts[word, i])
        for i in range(many):
            point8[i] = _mix(point8[i]) << _3
            pure[i] = (cell[0, i] >> value_shift) & count_mask == _1
        for word in range(words):
            a, b, c = checks[word, 0], checks[word, 1], checks[word, 2]
            for i in range(many):
                check = _hashed(point8[i], a, b, c) >> check_shift
                pure[i] &= cell[word, i] >> top == check
        for row in range(rows):
            a, b, c = buckets[row, 0], buckets[row, 1], buckets[row, 2]
            for i in range(many):
                cells[row, i] = row * width + np.int64(
                    _multiply_high(_hashed(point8[i], a, b, c), width8)
                )
        for i in range(many):
            place, same, lies = places[i], True, False
            if (table[place, 0] >> value_shift) & count_mask == _0:  # its key was removed meanwhile
                is_waiting[place] = False
                continue
            for word in range(words):
                same &= table[place, word] == cell[word, i]
            if not same or listed == limit:  # a damaged table: read it again
                head = slots[i]
                break
            is_waiting[place] = False
            whole = pure[i]
            for row in range(rows):
                lies |= cells[row, i] == place
                whole &= (table[cells[row, i], 0] >> value_shift) & count_mask != _0
            if not (whole and lies):
                continue
            for word in range(words):
                keys_read[listed, word] = parts[word, i]
            counts[listed], values[listed] = 1, np.int64(cell[0, i] & value_mask)
            listed += 1
            for row in range(rows):
                other = cells[row, i]
                for word in range(words):
                    table[other, word] = (table[other, word] - cell[word, i]) & mask
                # Without branches, since they could not be predicted.
                single = (table[other, 0] >> value_shift) & count_mask == _1
                waiting[tail] = other
                tail += single & ~is_waiting[other]
                tail = tail if tail <= size else 0
                is_waiting[other] |= single
    return listed


@kernel
def peel(
    table: U64,
    candidates: U64,
    point: np.uint64,
    buckets: U64,
    checks: U64,
    width: int,
    layout: Layout,
) -> Listed:
    """Remove every key that can be read from the table, in place.

    A cell with a single key reveals it; then the key is removed from its other cells, and so on.
    Cells with one insertion come first: they certainly hold one key, while most others do not. Once
    that is stuck, a cell that holds one of the `candidates` and one more key is split: for each
    number of times that the candidate may be there, the rest is read as if it were alone.
    """
    value_bits, count_bits, check_bits, bits = layout
    size, words = table.shape
    rows, many = buckets.shape[0], candidates.shape[0]
    x8, mask, width8 = point << _3, _low(bits), np.uint64(width) << _3
    check_shift, top_shift = np.uint64(61 - check_bits), np.uint64(bits - check_bits)
    first, one_count = np.uint64(value_bits + count_bits), _1 << np.uint64(value_bits)
    value_shift, value_mask = np.uint64(value_bits), _low(value_bits)
    count_mask = _low(count_bits)
    part_bits = np.full(words, np.uint64(bits - check_bits))
    part_bits[0] -= first
    part_masks = (_1 << part_bits) - _1
    limit = 2 * size  # only a damaged table has more
    keys_read = np.empty((limit + 2, words), dtype=np.uint64)
    counts = np.empty(limit + 2, dtype=np.int64)
    values = np.empty(limit + 2, dtype=np.int64)
    cell, parts = np.empty(words, dtype=np.uint64), np.empty(words, dtype=np.uint64)
    tails, content = np.empty(words, dtype=np.uint64), np.empty(words, dtype=np.uint64)
    cells = np.empty(rows, dtype=np.int64)
    candidate_cells = np.empty((many, rows), dtype=np.int64)
    candidate_content = np.empty((many, words), dtype=np.uint64)
    for key in range(many):
        point8 = _0
        for word in range(words):
            point8 = _reduce(_fold(point8, x8) + candidates[key, word])
        point8 = _mix(point8) << _3
        for word in range(words):
            check = (
                _hashed(point8, checks[word, 0], checks[word, 1], checks[word, 2]) >> check_shift
            )
            part = candidates[key, word]
            low = (part << first) + one_count if word == 0 else part
            candidate_content[key, word] = low + (check << top_shift)
        for row in range(rows):
            candidate_cells[key, row] = row * width + np.int64(
                _multiply_high(
                    _hashed(point8, buckets[row, 0], buckets[row, 1], buckets[row, 2]),
                    width8,
                )
            )
    # Cells with one insertion wait in a ring, first come, first served: the next one rarely depends
    # on the last, so that the processor works on several. The others are marked as changed.
    waiting, head, tail = np.empty(size + 1, dtype=np.int64), 0, 0
    is_waiting, changed = np.zeros(size, dtype=np.bool_), np.zeros(size, dtype=np.bool_)
    changes, scan = 0, 0
    listed = peel_singles(table, keys_read, counts, values, point, buckets, checks, width, layout)
    for place in range(size):
        count = (table[place, 0] >> value_shift) & count_mask
        if count == _1:
            is_waiting[place] = True
            waiting[tail] = place
            tail += 1
        elif count != _0:
            changed[place] = True
            changes += 1
    key, row_of_key, times, most, progress = 0, 0, _0, _0, False
    while listed < limit:
        # The next cell to read; if none is left, one without a candidate.
        splits = head == tail and changes == 0
        if not splits:
            if head != tail:
                place = waiting[head]
                head = head + 1 if head < size else 0
                is_waiting[place] = False
            else:
                while not changed[scan]:
                    scan = scan + 1 if scan + 1 < size else 0
                place = scan
                changed[place] = False
                changes -= 1
            for word in range(words):
                cell[word] = table[place, word]
        else:
            if times == most:  # the next candidate in the next of its cells
                if key == many:
                    if not progress:
                        break
                    key, progress = 0, False
                    continue
                place = candidate_cells[key, row_of_key]
                times, most = _0, (table[place, 0] >> value_shift) & count_mask
                most = most - _1 if most > _0 else _0
                for row in range(rows):
                    count = (table[candidate_cells[key, row], 0] >> value_shift) & count_mask
                    most = min(most, count)
                if most == _0:
                    row_of_key += 1
                    if row_of_key == rows:
                        key, row_of_key = key + 1, 0
                    continue
            place = candidate_cells[key, row_of_key]
            times += _1
            for word in range(words):
                cell[word] = (table[place, word] - candidate_content[key, word] * times) & mask
            split_key, split_times = key, times
            if times == most:
                row_of_key += 1
                if row_of_key == rows:
                    key, row_of_key = key + 1, 0
        # Whether it holds one key alone.
        count = (cell[0] >> value_shift) & count_mask
        if count == _0:
            continue
        twos = _twos(count)
        if twos > check_bits:
            continue
        pure = True
        if count == _1:
            for word in range(words):
                bits_left = cell[word] >> (first if word == 0 else _0)
                parts[word] = bits_left & part_masks[word]
                tails[word] = bits_left >> part_bits[word]
        else:
            pure = (cell[0] >> value_shift) & _low(twos) == _0
            for word in range(1, words):
                pure &= cell[word] & _low(twos) == _0
            if not pure:
                continue
            inverse, lost = _inverse(count >> np.uint64(twos)), np.uint64(twos)
            for word in range(words):
                bits_left, space = cell[word], np.uint64(bits)
                if word == 0:
                    bits_left >>= value_shift
                    space -= value_shift
                one = ((bits_left >> lost) * inverse) & _low(space - lost)
                if word == 0:
                    pure = one & count_mask == _1
                    one >>= np.uint64(count_bits)
                parts[word] = one & part_masks[word]
                tails[word] = one >> part_bits[word]
            if not pure:
                continue
        point8 = _0
        for word in range(words):
            point8 = _reduce(_fold(point8, x8) + parts[word])
        point8 = _mix(point8) << _3
        for word in range(words):
            check = (
                _hashed(point8, checks[word, 0], checks[word, 1], checks[word, 2]) >> check_shift
            )
            pure &= tails[word] == check & _low(check_bits - twos)
            low = (parts[word] << first) + one_count if word == 0 else parts[word]
            content[word] = low + (check << top_shift)
        if not pure:
            continue
        pure = False
        for row in range(rows):
            cells[row] = row * width + np.int64(
                _multiply_high(
                    _hashed(point8, buckets[row, 0], buckets[row, 1], buckets[row, 2]),
                    width8,
                )
            )
            pure |= cells[row] == place
        for row in range(rows):
            pure &= (table[cells[row], 0] >> value_shift) & count_mask >= count
        if not pure:
            continue
        # It does: remove the key from its cells.
        value = cell[0] & value_mask
        for word in range(words):
            content[word] *= count
            keys_read[listed, word] = parts[word]
        content[0] += value
        counts[listed], values[listed] = np.int64(count), np.int64(value)
        listed += 1
        if splits:
            for word in range(words):
                keys_read[listed, word] = candidates[split_key, word]
            counts[listed], values[listed] = np.int64(split_times), 0
            listed += 1
            progress = True
            if times != most:  # no more copies of this key in this cell
                row_of_key += 1
                if row_of_key == rows:
                    key, row_of_key = key + 1, 0
                times = most
        for step in range(2 * rows if splits else rows):
            if step < rows:
                other = cells[step]
                for word in range(words):
                    table[other, word] = (table[other, word] - content[word]) & mask
            else:
                other = candidate_cells[split_key, step - rows]
                for word in range(words):
                    removed = candidate_content[split_key, word] * split_times
                    table[other, word] = (table[other, word] - removed) & mask
            count = (table[other, 0] >> value_shift) & count_mask
            # Without branches, since they could not be predicted.
            single = count == _1
            more = (count != _0) & ~single
            waiting[tail] = other
            tail += single & ~is_waiting[other]
            tail = tail if tail <= size else 0
            is_waiting[other] |= single
            changes += int(more) - int(changed[other])
            changed[other] = more
    return keys_read[:listed], counts[:listed], values[:listed]


@kernel
def text_keys(data: U8, offsets: I64, length: int, limbs: int) -> Any:
    count = offsets.size - 1
    keys, fits = np.zeros((count, limbs), dtype=np.uint64), np.zeros(count, dtype=np.bool_)
    for i in range(count):
        start, size = offsets[i], offsets[i + 1] - offsets[i]
        if size > length:
            continue
        fits[i] = True
        for place in range(size):
            keys[i, place >> 3] |= np.uint64(data[start + place]) << np.uint64(8 * (place & 7))
        keys[i, size >> 3] |= _1 << np.uint64(8 * (size & 7))
    return keys, fits
