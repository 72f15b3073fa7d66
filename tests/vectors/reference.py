"""The formats of wire version 1, slowly: Python integers and hashlib, and nothing of sfumato.

Run as a program it writes the vectors beside it; a test makes them again and compares. Who follows
in another language reads this file first: every step is here, in the order in which data passes.
Numbers that may exceed 2**53 are decimal strings in the vectors, since JSON readers round them.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

PRIME = 2**61 - 1
FORMAT = 1
WIRE_VERSION = 1
ROUNDS_PER_SIGN = 60

Table = list[list[int]]
Spec = dict[str, Any]


def canonical(data: object) -> str:
    """RFC 8785 for what is used here: ASCII keys, strings, and whole numbers below 2**53."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def digest(spec: Spec) -> str:
    """SHA-256 of a spec's canonical JSON with its format number, in hexadecimal."""
    return hashlib.sha256(canonical({**spec, "sfumato": FORMAT}).encode()).hexdigest()


def coefficients(seed: int, *labels: str | int, count: int) -> list[int]:
    """Field elements from SHAKE-128 over ["sfumato",1,seed,label,...]: 61 bits of each word."""
    text = canonical(["sfumato", FORMAT, seed, *labels]).encode()
    stream = hashlib.shake_128(text).digest(8 * (count + 4))
    words = [word % 2**61 for (word,) in struct.iter_unpack("<Q", stream)]
    return [word for word in words if word != PRIME][:count]


def evaluate(polynomial: list[int], x: int, prime: int = PRIME) -> int:
    """The sum of coefficient × power, highest degree first."""
    powers = [pow(x, power, prime) for power in reversed(range(len(polynomial)))]
    return sum(a * power for a, power in zip(polynomial, powers, strict=True)) % prime


def fingerprint(item: bytes | int, seed: int) -> int:
    """Chunks of seven bytes, little-endian, then the length: a polynomial at a seeded point,
    scattered."""
    data = item.to_bytes(8, "little", signed=True) if isinstance(item, int) else item
    chunks = [int.from_bytes(data[i : i + 7], "little") for i in range(0, len(data), 7)]
    (point,) = coefficients(seed, "fingerprint", count=1)
    value = 0
    for chunk in [*chunks, len(data)]:
        value = (value * point + chunk) % PRIME
    value = scatter(value)
    return scatter(value) if value == PRIME else value


def scatter(value: int) -> int:
    """One to one on 61-bit numbers."""
    value ^= value >> 32
    value = value * 0x9E3779B97F4A7C15 % 2**61
    return value ^ value >> 29


def cell(value: int, width: int) -> int:
    return value * width >> 61


def sign(value: int, bit: int) -> int:
    return 1 if value >> bit & 1 else -1


def place(sketch: Spec, item: bytes | int, row: int) -> tuple[int, int]:
    """Where an item goes in a row of a count sketch: its cell and its sign."""
    seed, x = sketch["seed"], fingerprint(item, sketch["seed"])
    block, bit = divmod(sketch["sign_round"], ROUNDS_PER_SIGN)
    to_cell = coefficients(seed, "cell", sketch["bucket_round"], row, count=2)
    to_sign = coefficients(seed, "sign", block, row, count=4)
    return cell(evaluate(to_cell, x), sketch["width"]), sign(evaluate(to_sign, x), bit)


def encode(sketch: Spec, items: Sequence[bytes | int], weights: list[int] | None = None) -> Table:
    """The table of a count sketch: each item adds weight × sign to one cell per row."""
    table = [[0] * sketch["width"] for _ in range(sketch["rows"])]
    for item, weight in zip(items, weights or [1] * len(items), strict=True):
        for row in range(sketch["rows"]):
            where, plus = place(sketch, item, row)
            table[row][where] += plus * weight
    return table


def median(readings: list[Fraction]) -> Fraction:
    ranked, middle = sorted(readings), len(readings) // 2
    if len(ranked) % 2:
        return ranked[middle]
    return (ranked[middle - 1] + ranked[middle]) / 2


def estimate(sketches: list[Spec], tables: list[Table], item: bytes | int) -> Fraction:
    """The count over all rounds: of sums of readings, or, when cells differ, a sum of medians."""
    rows = range(sketches[0]["rows"])
    readings = []
    for sketch, table in zip(sketches, tables, strict=True):
        places = [place(sketch, item, row) for row in rows]
        readings.append([Fraction(plus * table[row][at]) for row, (at, plus) in enumerate(places)])
    if len({sketch["bucket_round"] for sketch in sketches}) > 1:
        return sum((median(reading) for reading in readings), start=Fraction(0))
    return median([sum(reading, start=Fraction(0)) for reading in zip(*readings, strict=True)])


def pack(numbers: list[int], bits: int) -> bytes:
    """Numbers modulo 2**bits, least significant bit first, with no gaps between them."""
    whole = 0
    for number in reversed(numbers):
        whole = whole << bits | number % (1 << bits)
    return whole.to_bytes(-(-len(numbers) * bits // 8), "little")


def report(task: Spec, table: Table, report_id: bytes) -> bytes:
    numbers = [number for row in table for number in row]
    message = pack(numbers, task["aggregation"]["modulus_bits"])
    return bytes([WIRE_VERSION]) + bytes.fromhex(digest(task)) + report_id + message


def number_of(sketch: Spec, value: str | int) -> int:
    """A category's place, counted from one; or a text's bytes and a one after them."""
    if sketch["kind"] == "one_hot":
        return int(value) + 1
    return int.from_bytes(str(value).encode() + b"\x01", "little")


def low_words_first(number: int) -> list[int]:
    """What numbers are ordered by: their words of 64 bits, the lowest first."""
    return [number >> shift & 2**64 - 1 for shift in range(0, 2112, 64)]


def sparse_report(task: Spec, values: Sequence[str | int], report_id: bytes) -> bytes:
    """Zeros for none, then the numbers of the values in ascending order."""
    aggregation = task["aggregation"]
    numbers = sorted((number_of(task["sketch"], value) for value in values), key=low_words_first)
    return sparse_bytes(task, [0] * (aggregation["entries"] - len(numbers)) + numbers, report_id)


def sparse_bytes(task: Spec, numbers: list[int], report_id: bytes) -> bytes:
    message = pack(numbers, task["aggregation"]["entry_bits"])
    return bytes([WIRE_VERSION]) + bytes.fromhex(digest(task)) + report_id + message


def row_cell(oracle: Spec, item: bytes | int, row: int) -> int:
    """Where an item goes in a row of a local oracle: coefficients come in blocks of 256 rows."""
    seed, epoch = oracle["seed"], oracle["epoch"]
    block, place = divmod(row, 256)
    stream = coefficients(seed, "row", epoch, block, count=3 * 256)
    return cell(
        evaluate(stream[3 * place : 3 * place + 3], fingerprint(item, seed)), oracle["width"]
    )


def size_for(codes: int) -> int:
    """Bytes that hold the numbers 0 .. codes − 1."""
    return max(1, -(-(codes - 1).bit_length() // 8))


def local_record(oracle: Spec, row: int, content: int | list[int], minus: bool = False) -> bytes:
    """The bytes of a record: `content` is the bits of a count mean sketch, a place of a Hadamard
    one, a cell of a hashed response or a category of a direct one."""
    if oracle["kind"] == "count_mean_sketch":
        assert isinstance(content, list)
        return row.to_bytes(size_for(oracle["rows"]), "little") + pack(content, 1)
    assert isinstance(content, int)
    if oracle["kind"] == "direct_response":
        return content.to_bytes(size_for(oracle["categories"] + 1), "little")
    width: int = oracle["width"]
    cells: int = oracle["rows"] * width
    code = row * width + content
    if oracle["kind"] == "hashed_response":
        return code.to_bytes(size_for(cells), "little")
    return (2 * code + minus).to_bytes(size_for(2 * cells), "little")


def hadamard_sign(place: int, cell: int) -> int:
    """The coordinate `place` of the transform of a vector that is 1 at `cell`: +1 or −1."""
    return -1 if (place & cell).bit_count() % 2 else 1


def vectors() -> dict[str, Any]:
    """Every vector file of this version, by name."""
    return {
        "hashing_good.json": _hashing_good(),
        "hashing_bad.json": _hashing_bad(),
        "count_sketch_good.json": _count_sketch_good(),
        "count_sketch_bad.json": _count_sketch_bad(),
        "report_good.json": _report_good(),
        "report_bad.json": _report_bad(),
        "sparse_good.json": _sparse_good(),
        "sparse_bad.json": _sparse_bad(),
        "local_good.json": _local_good(),
        "local_bad.json": _local_bad(),
    }


LOCAL: list[Spec] = [
    {
        "kind": "count_mean_sketch",
        "epsilon": 4,
        "rows": 300,
        "width": 20,
        "seed": 7,
        "epoch": 0,
        "flips": "symmetric",
    },
    {
        "kind": "hadamard_count_mean_sketch",
        "epsilon": 2,
        "rows": 5,
        "width": 16,
        "seed": 7,
        "epoch": 3,
    },
    {"kind": "hashed_response", "epsilon": 4, "rows": 1024, "width": 56, "seed": 7, "epoch": 1},
    {"kind": "direct_response", "epsilon": 1, "categories": 300},
]


def _local_good() -> Any:
    """For each oracle: the cells of items, and records with the tally cells that they change."""
    cases = []
    for oracle in LOCAL:
        case: Spec = {"oracle": {**oracle, "sfumato": FORMAT}, "cells": [], "records": []}
        hashed = oracle["kind"] != "direct_response"
        rows = [0, oracle["rows"] // 2, oracle["rows"] - 1] if hashed else [0]
        for row in rows:
            for item in (b"oak", "森".encode()) if hashed else ():
                case["cells"].append(
                    {"item": item.hex(), "row": row, "cell": row_cell(oracle, item, row)}
                )
            case["records"] += _records_of(oracle, row)
        cases.append(case)
    return cases


def _records_of(oracle: Spec, row: int) -> list[Spec]:
    kind = oracle["kind"]
    if kind == "count_mean_sketch":
        bits = [int(place % 3 == row % 3) for place in range(oracle["width"])]
        changed = [[row, place, 1] for place, bit in enumerate(bits) if bit]
        return [{"record": local_record(oracle, row, bits).hex(), "adds": changed}]
    last = oracle["categories"] if kind == "direct_response" else oracle["width"] - 1
    records = []
    for content in (0, last // 2, last):
        for minus in (False, True) if kind == "hadamard_count_mean_sketch" else (False,):
            record = local_record(oracle, row, content, minus)
            records.append({"record": record.hex(), "adds": [[row, content, -1 if minus else 1]]})
    return records


def _local_bad() -> Any:
    """Records that the oracle never makes."""
    sketch, hadamard, hashed, direct = LOCAL
    return [
        {"oracle": {**sketch, "sfumato": FORMAT}, "record": "2c01000000", "why": "row 300 of 300"},
        {"oracle": {**sketch, "sfumato": FORMAT}, "record": "0000000010", "why": "bit 20 of 20"},
        {"oracle": {**hadamard, "sfumato": FORMAT}, "record": "a0", "why": "row 5 of 5"},
        {"oracle": {**hashed, "sfumato": FORMAT}, "record": "00e0", "why": "row 1024 of 1024"},
        {"oracle": {**direct, "sfumato": FORMAT}, "record": "2d01", "why": "category 301 of 300"},
    ]


def _hashing_good() -> Any:
    strings = ["", "a", "oak", "seven b", "eight by", "fourteen bytes", "forêt", "森", "x" * 100]
    items = [text.encode() for text in strings] + [b"\x00", b"\x00\x00", bytes(range(256))]
    integers = [0, 1, -1, 42, 2**40 + 7, 2**56 - 1, 2**56, 2**63 - 1, -(2**63)]
    seeds = [0, 1, 20261115, 2**53 - 1]
    labels: list[list[str | int]] = [
        ["fingerprint"],
        ["cell", 0, 0],
        ["cell", 1, 0],
        ["sign", 0, 3],
    ]
    golden = [123456789, 987654321, 555555555]
    values = [0, 1, 2**60, PRIME - 1, 259814812833, 261228438842260942]
    return {
        "coefficients": [
            {"seed": seed, "labels": label, "drawn": _texts(coefficients(seed, *label, count=4))}
            for seed in seeds
            for label in labels
        ],
        "fingerprints_of_bytes": [
            {"seed": seed, "item": item.hex(), "fingerprint": str(fingerprint(item, seed))}
            for seed in seeds
            for item in items
        ],
        "fingerprints_of_integers": [
            {"seed": seed, "item": str(item), "fingerprint": str(fingerprint(item, seed))}
            for seed in seeds
            for item in integers
        ],
        "polynomials": [
            {"coefficients": _texts(golden), "point": str(x), "value": str(evaluate(golden, x))}
            for x in (0, 1, 42, 2**40 + 7, PRIME - 1)
        ],
        "cells": [
            {"value": str(value), "width": width, "cell": cell(value, width)}
            for value in values
            for width in (2, 3, 1000, 1024, 2**31)
        ],
        "signs": [
            {"value": str(value), "bit": bit, "sign": sign(value, bit)}
            for value in values
            for bit in (0, 1, 59)
        ],
    }


def _hashing_bad() -> Any:
    return {
        "items": [
            {"arrow_type": "uint64", "items": [str(2**63)], "why": "beyond 64 signed bits"},
            {"arrow_type": "int64", "items": ["1", None], "why": "a missing item is not an item"},
            {
                "arrow_type": "string",
                "items": ["oak", None],
                "why": "a missing item is not an item",
            },
            {"arrow_type": "double", "items": ["1.5"], "why": "neither bytes nor a whole number"},
            {"arrow_type": "bool", "items": ["1"], "why": "neither bytes nor a whole number"},
        ],
        "seeds": [{"seed": str(2**53), "why": "JSON readers would round it"}],
    }


def _count_sketch(**fields: int) -> Spec:
    small = {"rows": 3, "width": 8, "seed": 7, "bucket_round": 0, "sign_round": 0}
    return {"kind": "count_sketch", **small, **fields}


def _count_sketch_good() -> Any:
    counts = {"oak": 5, "elm": 3, "fir": 2, "forêt": 1, "": 4}
    items = [item.encode() for item in counts]
    queries = [*items, b"nobody has this"]
    cases = []
    for name, rounds in {
        "one round": [_count_sketch()],
        "even rows": [_count_sketch(rows=4)],
        "hybrid": [_count_sketch(sign_round=m) for m in (0, 1, 59, 60)],
        "fresh": [_count_sketch(bucket_round=m, sign_round=m) for m in (0, 1, 2)],
        "wide": [_count_sketch(rows=1, width=37, seed=2**53 - 1)],
    }.items():
        weights = [[count * (m + 1) for count in counts.values()] for m in range(len(rounds))]
        tables = [encode(s, items, w) for s, w in zip(rounds, weights, strict=True)]
        cases.append(
            {
                "name": name,
                "sketches": [{**s, "sfumato": FORMAT, "digest": digest(s)} for s in rounds],
                "items": [item.hex() for item in items],
                "weights": weights,
                "tables": tables,
                "asked": [item.hex() for item in queries],
                "estimates": [float(estimate(rounds, tables, item)) for item in queries],
            }
        )
    return cases


def _count_sketch_bad() -> Any:
    good = {**_count_sketch(), "sfumato": FORMAT}
    missing = {key: value for key, value in good.items() if key != "seed"}
    return [
        {"why": "no rows", "spec": {**good, "rows": 0}},
        {"why": "one cell tells nothing apart", "spec": {**good, "width": 1}},
        {"why": "wider than 2**31", "spec": {**good, "width": 2**31 + 1}},
        {"why": "a negative seed", "spec": {**good, "seed": -1}},
        {"why": "a seed that JSON readers would round", "spec": {**good, "seed": 2**53}},
        {"why": "a negative round", "spec": {**good, "sign_round": -1}},
        {"why": "true is not a number", "spec": {**good, "rows": True}},
        {"why": "a fraction", "spec": {**good, "rows": 3.5}},
        {"why": "a string", "spec": {**good, "width": "8"}},
        {"why": "an unknown field", "spec": {**good, "colour": 1}},
        {"why": "a missing field", "spec": missing},
        {"why": "an unknown kind", "spec": {**good, "kind": "count_min"}},
        {"why": "another format", "spec": {**good, "sfumato": 2}},
        {"why": "no format", "spec": _count_sketch()},
    ]


def _task(**fields: Any) -> Spec:
    return {
        "kind": "task",
        "sketch": _count_sketch(),
        "mechanism": {"kind": "no_noise"},
        "aggregation": {"kind": "plain", "modulus_bits": 5},
        "campaign": "",
        "cohort": "everybody",
        "items_per_device": 1,
        "min_count": 1,
        "max_count": 7,
        **fields,
    }


def _report_good() -> Any:
    words = [2**64 - 1, 81985529216486895]
    report_id = struct.pack("<QQ", *words)
    one_hot: Spec = {"kind": "one_hot", "categories": 5}
    cases: list[tuple[str, Spec, list[str] | list[int]]] = [
        ("a count sketch", _task(), ["oak"]),
        ("two items of one device", _task(items_per_device=2), ["oak", "elm"]),
        ("nothing to say", _task(), []),
        ("a one-hot table", _task(sketch=one_hot), [3]),
    ]
    result = []
    for name, task, values in cases:
        if task["sketch"]["kind"] == "one_hot":
            table = [[int(category in values) for category in range(one_hot["categories"])]]
        else:
            table = encode(task["sketch"], [str(value).encode() for value in values])
        result.append(
            {
                "name": name,
                "task": {**task, "sfumato": FORMAT},
                "task_id": digest(task),
                "values": values,
                "rng_words": _texts(words),
                "report": report(task, table, report_id).hex(),
            }
        )
    return result


def _places(**fields: Any) -> Spec:
    return _task(
        sketch={"kind": "one_hot", "categories": 300},
        aggregation={"kind": "sparse", "entries": 2, "entry_bits": 9},
        **{"items_per_device": 2, **fields},
    )


def _texts_task(**fields: Any) -> Spec:
    mechanism: Spec = {
        "kind": "listed_above", "rate": 1, "noise": "none", "scale": 0, "threshold": 1,
        "items_per_device": 3, "amplified": True, "epsilon": None, "delta": 0, "unlisted": 0,
        "statistic": 0,
    }  # fmt: skip
    sketch: Spec = {
        "kind": "item_counts", "keys": {"kind": "text_keys", "length": 9}, "round": 0,
    }  # fmt: skip
    return _task(
        sketch=sketch,
        mechanism=mechanism,
        aggregation={"kind": "sparse", "entries": 3, "entry_bits": 73},
        **{"items_per_device": 3, **fields},
    )


def _sparse_good() -> Any:
    """Reports, and the sum of all of one task: the numbers that devices sent, and how often."""
    words = [2**64 - 1, 81985529216486895]
    report_id = struct.pack("<QQ", *words)
    cases: list[tuple[str, Spec, list[list[str | int]]]] = [
        ("places in a dictionary", _places(), [[7, 299], [7], [], [0, 0]]),
        (
            "items of an open domain",
            _texts_task(),
            [["oak", "elm"], ["forêt", "oak", ""], [], ["nine byte", "eight by", "eight b\x02"]],
        ),
    ]
    result: list[Spec] = []
    for name, task, devices in cases:
        numbers = [number_of(task["sketch"], value) for values in devices for value in values]
        reports: list[Spec] = [
            {"values": values, "report": sparse_report(task, values, report_id).hex()}
            for values in devices
        ]
        result.append(
            {
                "name": name,
                "task": {**task, "sfumato": FORMAT},
                "task_id": digest(task),
                "rng_words": _texts(words),
                "reports": reports,
                "sum": [
                    [str(number), numbers.count(number)]
                    for number in sorted(set(numbers), key=low_words_first)
                ],
            }
        )
    return result


def _sparse_bad() -> Any:
    """Reports that no device makes, each with the reason to refuse it."""
    ids = bytes(16)
    oak, elm = (number_of({"kind": "item_counts"}, item) for item in ("oak", "elm"))
    places, texts = _places(), _texts_task()
    smaller = number_of(texts["sketch"], "zzzzzzzz")  # but its low word is the larger one
    larger = number_of(texts["sketch"], "aaaaaaaab")
    padded = bytearray(sparse_report(places, [7], ids))
    padded[-1] |= 0x80  # 18 bits of message in 24: the last must be zero
    cases: list[tuple[str, Spec, bytes, str]] = [
        ("place 301 of 300", places, sparse_bytes(places, [0, 301], ids), "impossible"),
        ("places in descending order", places, sparse_bytes(places, [9, 8], ids), "impossible"),
        ("none after a place", places, sparse_bytes(places, [9, 0], ids), "impossible"),
        ("padding that is not zero", places, bytes(padded), "malformed"),
        ("a message cut short", places, sparse_report(places, [7], ids)[:-1], "malformed"),
        ("one item twice", texts, sparse_bytes(texts, [0, oak, oak], ids), "impossible"),
        ("items in descending order", texts, sparse_bytes(texts, [0, elm, oak], ids), "impossible"),
        ("none after an item", texts, sparse_bytes(texts, [oak, 0, elm], ids), "impossible"),
        (
            "the order of whole numbers, not of their low words",
            texts,
            sparse_bytes(texts, [0, smaller, larger], ids),
            "impossible",
        ),
        ("no end of a text", texts, sparse_bytes(texts, [0, 0, ord("o")], ids), "impossible"),
        ("bytes that are not UTF-8", texts, sparse_bytes(texts, [0, 0, 0x01FF], ids), "impossible"),
    ]
    return [
        {"why": why, "task": {**task, "sfumato": FORMAT}, "report": report.hex(), "rejection": code}
        for why, task, report, code in cases
    ]


def _report_bad() -> Any:
    """Steps at one collector, in order: a report's bytes, and the reason to refuse it, if any.

    The batch takes two reports, so the last one finds it full.
    """
    task = _task(max_count=2)
    tables = [encode(task["sketch"], [item]) for item in (b"oak", b"elm", b"fir")]
    ids = [bytes([i]) * 16 for i in range(3)]
    first, second, third = (report(task, t, i) for t, i in zip(tables, ids, strict=True))
    other = report(_task(cohort="somebody else", max_count=2), tables[0], ids[0])
    steps = [
        ("no bytes at all", b"", "malformed"),
        ("half a header", first[:40], "malformed"),
        ("another wire version", b"\x02" + first[1:], "malformed"),
        ("another task", other, "wrong_task"),
        ("a message cut short", first[:-1], "malformed"),
        ("a message too long", first + b"\x00", "malformed"),
        ("as it should be", first, None),
        ("the same again: accepted, counted once", first, None),
        ("a known id with other bytes: the first counts", report(task, tables[1], ids[0]), None),
        ("as it should be", second, None),
        ("one more than the batch may hold", third, "batch_full"),
    ]
    summed = [[a + b for a, b in zip(*rows, strict=True)] for rows in zip(*tables[:2], strict=True)]
    uneven = _task(sketch=_count_sketch(rows=1, width=3), max_count=2)
    padded = bytearray(report(uneven, encode(uneven["sketch"], [b"oak"]), ids[0]))
    padded[-1] |= 0x80  # 15 bits of message in 16: the last must be zero
    return [
        {
            "task": {**task, "sfumato": FORMAT},
            "steps": [{"why": w, "report": r.hex(), "rejection": code} for w, r, code in steps],
            "count": 2,
            "sum": summed,
        },
        {
            "task": {**uneven, "sfumato": FORMAT},
            "steps": [
                {
                    "why": "padding that is not zero",
                    "report": padded.hex(),
                    "rejection": "malformed",
                }
            ],
            "count": 0,
            "sum": [[0, 0, 0]],
        },
    ]


def _texts(numbers: list[int]) -> list[str]:
    return [str(number) for number in numbers]


def main() -> None:
    folder = Path(__file__).parent / str(WIRE_VERSION)
    folder.mkdir(exist_ok=True)
    for name, data in vectors().items():
        text = json.dumps(data, indent=1, ensure_ascii=False)
        (folder / name).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
