"""Records in the JSON form that paper 004 shows (figure 3):

    {"key": "com.example.emoji", "parameters": {"epsilon": 4, "k": 65536, "m": 1024},
     "records": ["2034,a1b2…", …]}

A record is the row's number and the m flipped bits in hexadecimal, the first cell in the highest
bit of the first digit. Reading them requires the hash functions of the devices: here those of
`CountMeanSketch` under a seed.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from sfumato.arrays import U8
from sfumato.errors import DataError
from sfumato.privacy import CountMeanSketch


def read_apple_records(text: str, *, seed: int) -> tuple[str, CountMeanSketch, U8]:
    """The key, the sketch that the parameters name, and its records as `Tally.fold` takes them.

    Anything else raises a DataError that says what must hold; nothing is read in part.

    >>> text = '{"key": "k", "parameters": {"epsilon": 4, "k": 2, "m": 8}, "records": ["1,80"]}'
    >>> key, sketch, records = read_apple_records(text, seed=1)
    >>> sketch.rows, sketch.width, records.tolist()
    (2, 8, [[1, 1]])
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise DataError(f"records must be JSON; {problem}") from problem
    if not isinstance(data, dict) or set(data) != {"key", "parameters", "records"}:
        raise DataError("an object must have exactly key, parameters and records")
    key, parameters, lines = data["key"], data["parameters"], data["records"]
    if not isinstance(key, str) or not isinstance(lines, list):
        raise DataError("key must be a string and records a list")
    sketch = _sketch(parameters, seed)
    records = np.empty((len(lines), sketch.record_bytes), dtype=np.uint8)
    for number, line in enumerate(lines):
        records[number] = _record(line, sketch, number)
    return key, sketch, records


def record_text(sketch: CountMeanSketch, record: U8) -> str:
    """A record as `read_apple_records` reads it.

    >>> record_text(CountMeanSketch(epsilon=4.0, rows=2, width=8, seed=1), np.uint8([1, 1]))
    '1,80'
    """
    row = int.from_bytes(record[: sketch.row_bytes].tobytes(), "little")
    bits = np.unpackbits(record[sketch.row_bytes :], bitorder="little")
    return f"{row},{np.packbits(bits).tobytes().hex()}"


def _sketch(parameters: Any, seed: int) -> CountMeanSketch:
    if not isinstance(parameters, dict) or set(parameters) != {"epsilon", "k", "m"}:
        raise DataError("parameters must be exactly epsilon, k and m")
    whole = [parameters["k"], parameters["m"]]
    if not all(isinstance(value, int) and not isinstance(value, bool) for value in whole):
        raise DataError(f"k and m must be whole numbers; got {whole}")
    if parameters["m"] % 8:
        raise DataError(f"m must be a multiple of 8, to fill its bytes; got {parameters['m']}")
    epsilon = parameters["epsilon"]
    if not isinstance(epsilon, int | float) or isinstance(epsilon, bool):
        raise DataError(f"epsilon must be a number; got {epsilon!r}")
    return CountMeanSketch(
        epsilon=float(epsilon), rows=parameters["k"], width=parameters["m"], seed=seed
    )


def _record(line: Any, sketch: CountMeanSketch, number: int) -> U8:
    row, comma, digits = line.partition(",") if isinstance(line, str) else ("", "", "")
    if not comma or not row.isascii() or not row.isdecimal() or len(row) > 10:
        raise DataError(f'record {number} must be "row,hexadecimal"')
    if int(row) >= sketch.rows:
        raise DataError(f"record {number} must have a row below {sketch.rows}; got {row}")
    try:
        data = bytes.fromhex(digits)
    except ValueError as problem:
        raise DataError(f"record {number} must have hexadecimal digits") from problem
    if len(data) * 8 != sketch.width or len(digits) != 2 * len(data):
        raise DataError(f"record {number} must have {sketch.width // 4} digits; got {len(digits)}")
    bits = np.unpackbits(np.frombuffer(data, dtype=np.uint8))  # highest bit first
    packed = np.packbits(bits, bitorder="little")
    head = int(row).to_bytes(sketch.record_bytes - packed.size, "little")
    return np.concatenate([np.frombuffer(head, dtype=np.uint8), packed])
