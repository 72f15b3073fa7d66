"""Reports of an upload are admitted or rejected together as they would be one by one."""

from __future__ import annotations

import secrets
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving import TASK, reports
from sfumato.errors import MismatchError
from sfumato.flow.admission import Admission, Rejection, TooManyReportsError, frames
from sfumato.flow.aggregation import Plain
from sfumato.flow.contribute import local_report, report
from sfumato.flow.report import HEADER_BYTES, Report, from_frames, to_frames
from sfumato.flow.task import LocalTask, Task
from sfumato.flow.word_discovery import PrefixExtension, WordTask
from sfumato.privacy import HashedResponse, NoNoise, SeededRng
from sfumato.sketch import OneHot

PAIRS = LocalTask(
    randomizer=HashedResponse(epsilon=1.0, rows=3, width=3, seed=2),
    cohort="everybody",
    records_per_report=2,
)  # 9 codes in a byte: most bytes are not records
TABLE = Task(
    sketch=OneHot(categories=5),
    mechanism=NoNoise(),
    aggregation=Plain(modulus_bits=7),
    cohort="everybody",
    max_count=10,
)  # 35 bits: five of the last byte must be zero


def as_sent(message: bytes, task: LocalTask | Task = PAIRS) -> bytes:
    return Report(task.id, secrets.token_bytes(16), message).to_bytes()


def reasons(task: LocalTask | Task | WordTask, batch: list[bytes]) -> Counter[Rejection]:
    return Admission(task).admit(to_frames(batch), most_reports=1_000).rejected


def reason_of(task: LocalTask | Task, data: bytes) -> Rejection | None:
    """Why one report is rejected, by an independent reading of the format."""
    if len(data) < HEADER_BYTES or data[0] != 1:
        return Rejection.MALFORMED
    if data[1:33].hex() != task.id:
        return Rejection.WRONG_TASK
    message = data[HEADER_BYTES:]
    if isinstance(task, Task):
        number = int.from_bytes(message, "little")
        if len(message) != 5 or number >> 35:  # 5 cells of 7 bits
            return Rejection.MALFORMED
        cells = [number >> 7 * place & 127 for place in range(5)]
        possible = sorted(cells) in ([0] * 5, [0, 0, 0, 0, 1])
        return None if possible else Rejection.IMPOSSIBLE
    if not 0 < len(message) <= 2:  # records of one byte, at most two
        return Rejection.MALFORMED
    return None if all(byte < 9 for byte in message) else Rejection.IMPOSSIBLE


messages = st.binary(max_size=4)
sendings = st.one_of(
    st.builds(as_sent, messages),
    st.builds(as_sent, messages, st.just(TASK)),
    st.binary(max_size=HEADER_BYTES + 2),
)


@given(st.lists(sendings, min_size=1, max_size=30))
def test_many_are_judged_as_one_by_one(batch: list[bytes]) -> None:
    admitted = Admission(PAIRS).admit(to_frames(batch), most_reports=1_000)
    expected, rejected = [], Counter[Rejection]()
    for data in batch:
        reason = reason_of(PAIRS, data)
        rejected += Counter([] if reason is None else [reason])
        expected += [data] if reason is None else []
    assert admitted.rejected == rejected
    assert admitted.count == len(expected)
    assert from_frames(admitted.body) == expected


lengths = st.binary(min_size=4, max_size=6)
bits = st.integers(0, 39).map(lambda place: (1 << place).to_bytes(5, "little"))


@given(st.lists(lengths | bits, min_size=1, max_size=30))
def test_tables_are_judged_as_one_by_one(messages: list[bytes]) -> None:
    batch = [as_sent(message, TABLE) for message in messages]
    one_by_one = [reason for data in batch if (reason := reason_of(TABLE, data)) is not None]
    assert reasons(TABLE, batch) == Counter(one_by_one)


def test_what_devices_send_is_admitted() -> None:
    batch = reports(100)
    admitted = Admission(TASK).admit(to_frames(batch), most_reports=100)
    assert (admitted.count, admitted.rejected) == (100, {})
    assert admitted.body == to_frames(batch)


def test_a_table_that_a_device_sends_is_admitted() -> None:
    data = report(TABLE, np.array([3]), rng=SeededRng(1)).to_bytes()
    assert not reasons(TABLE, [data])


def test_words_that_a_device_sends_are_admitted_and_others_are_not() -> None:
    prefix = HashedResponse(epsilon=2.0, rows=2, width=5, seed=1)
    task = WordTask(discoverer=PrefixExtension(prefix=prefix), cohort="everybody")
    data = local_report(task, ["tree"], rng=SeededRng(1)).to_bytes()
    assert not reasons(task, [data])
    wrong = data[:-1] + b"\xff"
    assert reasons(task, [wrong, data]) == {Rejection.IMPOSSIBLE: 1}


@pytest.mark.parametrize(
    "body", [b"", b"\1", b"\1\0\0", b"\2\0\0\0a", b"\1\0\0\0ab", b"\xff\xff\xff\xff"]
)
def test_a_body_that_does_not_add_up_is_refused_whole(body: bytes) -> None:
    with pytest.raises(MismatchError, match="upload"):
        Admission(TASK).admit(body, most_reports=10)


@pytest.mark.parametrize("sizes", [[5] * 11, [5, 6] * 6, [0] * 11])
def test_more_reports_than_an_upload_may_have_are_too_large(sizes: list[int]) -> None:
    with pytest.raises(TooManyReportsError, match="at most 10 reports"):
        Admission(TASK).admit(to_frames([bytes(size) for size in sizes]), most_reports=10)


@given(st.lists(st.binary(max_size=9), min_size=1, max_size=20))
def test_frames_are_found_where_they_are(batch: list[bytes]) -> None:
    body = to_frames(batch)
    starts, sizes = frames(body, most=20)
    parts = [body[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    assert parts == batch


def test_what_is_admitted_does_not_print() -> None:
    batch = reports(1)
    text = repr(Admission(TASK).admit(to_frames(batch), most_reports=1))
    assert text == "AdmittedReports(1 reports, rejected={})"
