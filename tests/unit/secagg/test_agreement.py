"""Signatures checked together, keys derived as RFC 5869 says, and what hashes of a round cover."""

from __future__ import annotations

import hashlib
import hmac
import itertools
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from sfumato.secagg import agreement
from sfumato.secagg.agreement import (
    Claim,
    Keys,
    acknowledgement_text,
    derive,
    members_to_bytes,
    ring_seed,
    sign,
    verify_all,
    view_of,
)
from unit.secagg.stage import ROUND


def claims(count: int) -> list[Claim]:
    """Each of another identity, about another message."""
    result = []
    for number in range(count):
        private = bytes([number % 256]) * 31 + bytes([number // 256])
        public = Ed25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()
        text = f"message {number}".encode()
        result.append((public, sign(private, text), text))
    return result


@pytest.mark.parametrize("cores", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 199, 200, 301])
def test_good_and_bad_signatures_are_told_apart_in_their_order(
    cores: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "cores_allowed", lambda: cores)
    signed_claims = claims(count)
    expected = [True] * count
    for place in {0, count // 3, count // 2, count - 1} & set(range(count)):
        identity, signature, text = signed_claims[place]
        signed_claims[place] = (identity, signature, text + b"!")
        expected[place] = False
    assert verify_all(signed_claims) == expected


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
    assert verify_all([changed(good), other]) == [False, True]


def hkdf(secret: bytes, salt: bytes, info: bytes, size: int) -> bytes:
    """HKDF-SHA256 as RFC 5869, section 2, writes it."""
    key, block, stream = hmac.digest(salt, secret, "sha256"), b"", b""
    for counter in range(1, -(-size // 32) + 1):
        block = hmac.digest(key, block + info + bytes([counter]), "sha256")
        stream += block
    return stream[:size]


def test_the_reference_gives_the_vectors_of_rfc_5869() -> None:
    """Test cases 1 and 2 of its appendix."""
    first = hkdf(b"\x0b" * 22, bytes(range(13)), bytes(range(0xF0, 0xFA)), 42)
    assert first.hex() == (
        "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"
    )
    second = hkdf(bytes(range(80)), bytes(range(0x60, 0xB0)), bytes(range(0xB0, 0x100)), 82)
    assert second.hex() == (
        "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c59045a99cac7827271cb41c65e59"
        "0e09da3275600c2f09b8367793a9aca3db71cc30c58179ec3e87c14c01d5c1f3434f1d87"
    )


@settings(max_examples=30, deadline=None)
@given(st.binary(max_size=80), st.binary(min_size=32, max_size=32), st.integers(1, 64))
def test_keys_are_derived_by_hkdf(secret: bytes, salt: bytes, size: int) -> None:
    expected = hkdf(secret, salt, b"sfumato/1/secagg/" + b"box" + b"root", size)
    assert derive(secret, salt, b"box", b"root", size) == expected


def test_a_derived_key_never_changes() -> None:
    key = derive(b"\x0b" * 22, bytes(range(32)), b"box", b"root", 32)
    assert key.hex() == "9153f47ac30e7ca967a67de80e992876f0715d11696e5f3ab493e6d5c0ab9165"


ROUNDS = (ROUND, replace(ROUND, nonce="ef" * 16))
HASHES = (bytes(32), bytes([1]) * 32)
SETS = (frozenset(range(24)), frozenset(range(23)))


def test_the_ring_follows_from_round_roster_root_and_enrolled_members() -> None:
    seeds = set()
    for round, roster, root, members in itertools.product(ROUNDS, HASHES, HASHES, SETS):
        bits = members_to_bytes(members, 24)
        text = b"sfumato/2/secagg/graph/" + round.salt + roster + root + bits
        seeds.add(ring_seed(round, roster, root, bits))
        assert ring_seed(round, roster, root, bits) == hashlib.sha256(text).digest()
    assert len(seeds) == 16


def test_a_view_covers_roster_root_enrolled_members_and_those_that_shared() -> None:
    views = set()
    for roster, root, enrolled, shared in itertools.product(HASHES, HASHES, SETS, SETS):
        bits = members_to_bytes(enrolled, 24) + members_to_bytes(shared, 24)
        text = b"sfumato/2/secagg/view/" + roster + root + bits
        views.add(view_of(ROUND, roster, root, enrolled, shared))
        assert view_of(ROUND, roster, root, enrolled, shared) == hashlib.sha256(text).digest()
    assert len(views) == 16


def test_a_signature_is_for_one_round_and_for_one_thing() -> None:
    survivors = [members_to_bytes(members, 24) for members in SETS]
    salts = [round.salt for round in ROUNDS]
    keys = Keys(3, bytes(32), bytes(32), bytes(32), bytes(64))
    acknowledged = [
        acknowledgement_text(*facts) for facts in itertools.product(salts, HASHES, survivors)
    ]
    enrolled = [keys.signed_text(salt) for salt in salts]
    assert len({*acknowledged, *enrolled}) == 10
    assert not any(text.startswith(b"sfumato/1/secagg/keys/") for text in acknowledged)
    assert not any(text.startswith(b"sfumato/1/secagg/survivors/") for text in enrolled)
