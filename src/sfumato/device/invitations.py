"""The signed message that a device gets when its cohort is complete: the masked round, its members.

An invitation travels like an offer: its canonical JSON and an Ed25519 signature over it, by the key
that signs the collector's offers. All members get the same invitation.

    >>> from sfumato.secagg.round import MaskedRound
    >>> round = MaskedRound(task="5f" * 32, cells=3, modulus_bits=8, cohort=4, corrupt=0.0,
    ...                     dropout=0.25, mode="semi_honest", nonce="00" * 16)
    >>> roster = tuple(bytes([member]) * 32 for member in range(4))
    >>> key = bytes(range(32))  # in production, 32 random bytes that are kept secret
    >>> verify(sign(round, roster, key), offers.public_key(key)).roster == roster
    True
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sfumato.device import offers
from sfumato.errors import OfferError, SpecError
from sfumato.secagg.round import KEY_BYTES, MaskedRound
from sfumato.spec import canonical, from_json, to_json

_CONTEXT = b"sfumato round v1\0"  # so that the signature of a round is valid for nothing else


@dataclass(frozen=True, slots=True)
class Invitation:
    """A round, and the Ed25519 public keys of its members in their order."""

    round: MaskedRound
    roster: tuple[bytes, ...]


def sign(round: MaskedRound, roster: Sequence[bytes], key: bytes) -> dict[str, str]:
    """The invitation's envelope, signed with the collector's secret Ed25519 key of 32 bytes."""
    text = canonical({"round": json.loads(to_json(round)), "roster": b"".join(roster).hex()})
    return {"invitation": text, "signature": offers.signature(_CONTEXT, text, key)}


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
    if not isinstance(round, MaskedRound) or len(roster) != KEY_BYTES * round.cohort:
        raise OfferError("an invitation must hold a masked round and one key for each member")
    keys = (roster[start : start + KEY_BYTES] for start in range(0, len(roster), KEY_BYTES))
    return Invitation(round, tuple(keys))
