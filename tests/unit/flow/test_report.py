"""The bytes of a report."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sfumato.errors import MismatchError
from sfumato.flow.aggregation import Plain
from sfumato.flow.contribute import report
from sfumato.flow.report import HEADER_BYTES, WIRE_VERSION, Report, report_bytes
from sfumato.flow.task import Task
from sfumato.privacy import NoNoise, SeededRng
from sfumato.sketch import OneHot

TASK = Task(
    sketch=OneHot(categories=5),
    mechanism=NoNoise(),
    aggregation=Plain(modulus_bits=7),
    cohort="everybody",
    max_count=50,
)


@given(
    task=st.binary(min_size=32, max_size=32),
    name=st.binary(min_size=16, max_size=16),
    message=st.binary(max_size=60),
)
def test_a_report_survives_its_bytes(task: bytes, name: bytes, message: bytes) -> None:
    original = Report(task.hex(), name, message)
    data = original.to_bytes()
    assert Report.from_bytes(data) == original
    assert Report.from_bytes(data).to_bytes() == data
    assert len(data) == HEADER_BYTES + len(message)


def test_bytes_are_version_task_id_and_message_in_this_order() -> None:
    data = Report("ab" * 32, bytes(range(16)), b"cells").to_bytes()
    assert data == bytes([1]) + b"\xab" * 32 + bytes(range(16)) + b"cells"


@pytest.mark.parametrize("length", [0, 1, HEADER_BYTES - 1])
def test_a_cut_header_is_refused(length: int) -> None:
    data = Report("ab" * 32, bytes(16), b"cells").to_bytes()
    with pytest.raises(MismatchError, match=f"a header of {HEADER_BYTES} bytes"):
        Report.from_bytes(data[:length])


@pytest.mark.parametrize("version", [0, WIRE_VERSION + 1, 255])
def test_another_version_is_refused(version: int) -> None:
    data = Report("ab" * 32, bytes(16), b"cells").to_bytes()
    with pytest.raises(MismatchError, match=f"begin with version {WIRE_VERSION}"):
        Report.from_bytes(bytes([version]) + data[1:])


def test_every_report_of_a_task_is_equally_long() -> None:
    lengths = {len(report(TASK, values, rng=SeededRng(1)).to_bytes()) for values in ([], [0], [4])}
    assert lengths == {report_bytes(TASK)}
    assert report_bytes(TASK) == HEADER_BYTES + 5
