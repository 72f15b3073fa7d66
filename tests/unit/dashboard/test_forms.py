"""Bodies of forms: what browsers send is read, and nothing else."""

from __future__ import annotations

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sfumato.collector.problems import Problem
from sfumato.dashboard.forms import FORM_BYTES, MOST_FIELDS, Form

URLENCODED = "application/x-www-form-urlencoded"
TEXTS = st.dictionaries(
    st.text(st.characters(codec="ascii", categories=("L", "N")), min_size=1, max_size=20),
    st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=50),
    max_size=8,
)


def encoded(**parts: object) -> tuple[str, bytes]:
    """Content type and body of a form, as another program writes them."""
    request = httpx.Request("POST", "http://collector.example/", **parts)  # type: ignore[arg-type]
    return request.headers["content-type"], request.read()


@given(TEXTS)
def test_texts_come_through_as_they_are(texts: dict[str, str]) -> None:
    if texts:
        assert dict(Form.parse(*encoded(data=texts)).texts) == texts
    parts = {"file": ("items.txt", b"oak")}
    assert dict(Form.parse(*encoded(data=texts, files=parts)).texts) == texts


@given(st.binary(max_size=500))
def test_a_file_comes_through_byte_for_byte(content: bytes) -> None:
    form = Form.parse(*encoded(files={"dictionary": ("trees.parquet", content)}))
    assert form.files["dictionary"].content == content
    assert form.files["dictionary"].name == "trees.parquet"


def test_a_file_that_was_not_chosen_is_no_file() -> None:
    body = (
        b'--x\r\nContent-Disposition: form-data; name="dictionary"; filename=""\r\n'
        b"Content-Type: application/octet-stream\r\n\r\n\r\n--x--\r\n"
    )
    assert not Form.parse("multipart/form-data; boundary=x", body).files


def test_a_name_is_not_taken_from_a_file_name() -> None:
    body = (
        b'--x\r\nContent-Disposition: form-data; filename="a"; name="dictionary"\r\n\r\n'
        b"oak\r\n--x--"
    )
    assert Form.parse("multipart/form-data; boundary=x", body).files["dictionary"].name == "a"


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("", b"a=1"),
        ("application/json", b"{}"),
        (URLENCODED, b"a=\xff"),
        (URLENCODED, b"a=%ff"),
        (URLENCODED, b"&".join(b"a%d=1" % k for k in range(300))),
        ("multipart/form-data", b"--x--"),
        ("multipart/form-data; boundary=x", b""),
        ("multipart/form-data; boundary=x", b"before --x--"),
        ("multipart/form-data; boundary=x", b'--x\r\nX: name="a"\r\n--x--'),
        ("multipart/form-data; boundary=x", b"--x\r\nX: y\r\n\r\n1\r\n--x--"),
        ("multipart/form-data; boundary=x", b'--x\r\nX: y; name="a"\r\n\r\n1\r\n--x'),
        ("multipart/form-data; boundary=x", b'--x\r\nX: y; name="a"\r\n\r\n\xff\r\n--x--'),
        ("multipart/form-data; boundary=x", b'--x\r\nX: ; name="a"\r\n\r\n1\r\n' * 300 + b"--x--"),
        ("multipart/form-data; boundary=\xe9", b"--x--"),
    ],
)
def test_what_no_browser_sends_is_refused(kind: str, body: bytes) -> None:
    with pytest.raises(Problem, match="not a form"):
        Form.parse(kind, body)


@given(st.binary(max_size=200))
def test_any_body_is_read_or_refused(body: bytes) -> None:
    for kind in (URLENCODED, "multipart/form-data; boundary=x"):
        try:
            Form.parse(kind, body)
        except Problem as problem:
            assert problem.status == 400  # noqa: PT017  # either outcome will do


def test_what_was_typed_does_not_print() -> None:
    form = Form.parse(URLENCODED, b"token=canary")
    assert "canary" not in repr(form)
    assert "canary" not in repr(Form.parse(*encoded(files={"f": ("a.txt", b"canary")})))


def test_a_form_has_a_limited_number_of_fields() -> None:
    most = {f"field {number}": "1" for number in range(MOST_FIELDS)}
    assert len(Form.parse(*encoded(data=most)).texts) == MOST_FIELDS
    parts = dict.fromkeys(most, ("", b"1"))
    for options in ({"data": most | {"more": "1"}}, {"data": {"more": "1"}, "files": parts}):
        with pytest.raises(Problem, match="not a form"):
            Form.parse(*encoded(**options))


@pytest.mark.parametrize("size", [FORM_BYTES, FORM_BYTES + 1])
def test_only_a_field_that_may_be_large_is_large(size: int) -> None:
    for options in ({"data": {"a": "x" * size}}, {"files": {"a": ("a.txt", b"x" * size)}}):
        kind, body = encoded(**options)
        Form.parse(kind, body, large_fields=["a"])
        if size <= FORM_BYTES:
            Form.parse(kind, body)
        else:
            with pytest.raises(Problem) as caught:
                Form.parse(kind, body)
            assert caught.value.code == "too-large"


def test_a_large_file_is_not_written_to_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/nonexistent")
    content = bytes(3 << 20)
    kind, body = encoded(files={"dictionary": ("trees.txt", content)})
    form = Form.parse(kind, body, large_fields=["dictionary"])
    assert form.files["dictionary"].content == content


def test_nothing_of_a_malformed_form_is_logged(capfd: pytest.CaptureFixture[str]) -> None:
    for body in (b"canary", b"--x\r\ncanary: \x00\r\n\r\n", b"--xcanary\r\n"):
        with pytest.raises(Problem):
            Form.parse("multipart/form-data; boundary=x", body)
    with pytest.raises(Problem):
        Form.parse("text/canary", b"")
    assert capfd.readouterr() == ("", "")
