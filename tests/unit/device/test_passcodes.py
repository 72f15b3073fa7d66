"""Passcodes are long and random, are compared whole, and never show up in an error."""

from __future__ import annotations

import pytest

from sfumato.device import passcodes
from sfumato.errors import SpecError


def test_a_passcode_has_256_random_bits() -> None:
    codes = {passcodes.create() for _ in range(100)}
    assert len(codes) == 100
    assert {len(code) for code in codes} == {len("sfp_") + 43}  # 32 bytes in base64url
    assert all(passcodes.check(code) == code for code in codes)


def test_only_the_passcode_itself_matches_its_digest() -> None:
    code = passcodes.create()
    digest = passcodes.digest(code)
    assert passcodes.matches(code, digest)
    for other in ("", code[:-1], code + "\n", code.upper(), passcodes.create(), "\ud800"):
        assert not passcodes.matches(other, digest)
    assert not passcodes.matches(code, b"")


@pytest.mark.parametrize("text", ["sesame", "sfp_" + "a" * 42, "sfp_" + "ü" * 43])
def test_a_short_or_strange_passcode_is_refused_whatever_the_digest(text: str) -> None:
    assert not passcodes.matches(text, passcodes.digest(text))
    with pytest.raises(SpecError) as caught:
        passcodes.check(text)
    assert text not in str(caught.value)
