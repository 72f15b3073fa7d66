"""The signed message that a device gets when its cohort is complete: the masked round, its roster.

An invitation travels like an offer: its canonical JSON and an Ed25519 signature over it, by the key
that signs the collector's offers. All members get the same invitation, whatever their number: the
roster in it is the root of the Merkle tree over the members' Ed25519 public keys, in their order.

    >>> from sfumato.secagg.merkle import Tree
    >>> from sfumato.secagg.round import MaskedRound
    >>> round = MaskedRound(task="5f" * 32, cells=3, modulus_bits=8, cohort=4, corrupt=0.0,
    ...                     dropout=0.25, mode="semi_honest", nonce="00" * 16)
    >>> roster = Tree([bytes([member]) * 32 for member in range(4)]).root
    >>> key = bytes(range(32))  # in production, 32 random bytes that are kept secret
    >>> verify(sign(round, roster, key), offers.public_key(key)).roster == roster
    True
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sfumato.device import offers
from sfumato.errors import OfferError, SpecError
from sfumato.secagg.merkle import HASH_BYTES
from sfumato.secagg.round import MaskedRound
from sfumato.spec import canonical, from_json, to_json

_CONTEXT = b"sfumato round v2\0"  # so that the signature of a round is valid for nothing else


@dataclass(frozen=True, slots=True)
class Invitation:
    """A round, and the Merkle root of its members' identities."""

    round: MaskedRound
    roster: bytes


def sign(round: MaskedRound, roster: bytes, key: bytes) -> dict[str, str]:
    """The invitation's envelope, signed with the collector's secret Ed25519 key of 32 bytes."""
    text = canonical({"round": json.loads(to_json(round)), "roster": roster.hex()})
    return {"invitation": text, "signature": offers.signature(_CONTEXT, text, key)}


def is_to(roster: bytes, envelope: str) -> bool:
    """Whether this is an invitation, in the current format, to a round with this roster."""
    try:
        return bool(json.loads(json.loads(envelope)["invitation"])["roster"] == roster.hex())
    except (ValueError, LookupError, TypeError):
        return False


def verify(envelope: Mapping[str, Any], key: bytes) -> Invitation:
    """The invitation that the holder of this public key signed; raises OfferError otherwise."""
    text, signature = envelope.get("invitation"), envelope.get("signature")
    if not (isinstance(text, str) and isinstance(signature, str)):
        raise OfferError("an invitation must hold two texts, itself and its signature; got others")
    offers.check_signature(_CONTEXT, text, signature, key)
    try:
        members = json.loads(text)
        round, roster = from_json(canonical(members["round"])), bytes.fromhex(members["roster"])
    except (SpecError, ValueError, LookupError, TypeError, RecursionError):
        raise OfferError(
            "this invitation cannot be read; check that the collector's version is supported"
        ) from None
    if not isinstance(round, MaskedRound) or len(roster) != HASH_BYTES:
        raise OfferError("an invitation must hold a masked round and the root of its roster")
    return Invitation(round, roster)
