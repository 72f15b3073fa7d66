"""Signatures checked together: which are good does not depend on how many cores look."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from sfumato.secagg import agreement
from sfumato.secagg.agreement import Claim, sign, verified


def claims(count: int) -> list[Claim]:
    """Each of another identity, about another message."""
    made = []
    for number in range(count):
        private = bytes([number % 256]) * 31 + bytes([number // 256])
        public = Ed25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()
        text = f"message {number}".encode()
        made.append((public, sign(private, text), text))
    return made


@pytest.mark.parametrize("cores", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 199, 200, 301])
def test_good_and_bad_signatures_are_told_apart_in_their_order(
    cores: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "cores_allowed", lambda: cores)
    given = claims(count)
    expected = [True] * count
    for place in {0, count // 3, count // 2, count - 1} & set(range(count)):
        identity, signature, text = given[place]
        given[place] = (identity, signature, text + b"!")
        expected[place] = False
    assert verified(given) == expected


@pytest.mark.parametrize(
    "changed",
    [
        lambda claim: (claim[0], claim[1][:-1], claim[2]),  # a byte short
        lambda claim: (claim[0], b"", claim[2]),
        lambda claim: (claim[0][:-1], claim[1], claim[2]),  # no key
        lambda claim: (b"\xff" * 32, claim[1], claim[2]),  # no point of the curve
    ],
)
def test_what_is_no_signature_or_no_key_is_a_bad_one(changed: object) -> None:
    assert callable(changed)
    good, other = claims(2)
    assert verified([changed(good), other]) == [False, True]
