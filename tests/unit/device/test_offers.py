"""Offers: terms that are the task's own, and signatures that only one key makes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sfumato.device.offers import Offer, public_key, sign, verify
from sfumato.errors import OfferError, SpecError
from sfumato.flow.aggregation import Masked, Plain
from sfumato.flow.task import LocalTask, Task
from sfumato.flow.word_discovery import FragmentPuzzle, WordTask
from sfumato.privacy import DirectResponse, HashedResponse, NoNoise
from sfumato.sketch import CountSketch, OneHot
from sfumato.spec import from_json, to_json

KEY = bytes(range(32))
HASHED = HashedResponse(epsilon=4.0, rows=16, width=56, seed=1)
LOCAL = LocalTask(randomizer=HASHED, cohort="everybody")
DIRECT = LocalTask(randomizer=DirectResponse(epsilon=1.0, categories=3), cohort="everybody")
WORDS = WordTask(
    discoverer=FragmentPuzzle(word=HASHED, fragment=replace(HASHED, epsilon=2.0), seed=1),
    cohort="everybody",
    records_per_report=2,
)
TABLE = Task(
    sketch=CountSketch(rows=3, width=8, seed=1),
    mechanism=NoNoise(),
    aggregation=Plain(modulus_bits=12),
    cohort="everybody",
    items_per_device=3,
    max_count=100,
)
OFFER = Offer(
    study="Street trees",
    purpose="Which trees to plant next.",
    question="frequencies",
    trust="local",
    task=LOCAL,
    epsilon=4.0,
)
CENTRAL = replace(OFFER, trust="central", task=TABLE, epsilon=None, items_per_report=3)
NEW = replace(OFFER, question="new_words", task=WORDS, epsilon=6.0, items_per_report=2)


@pytest.mark.parametrize("offer", [OFFER, CENTRAL, NEW], ids=["local", "central", "words"])
def test_an_offer_survives_the_way_to_a_device(offer: Offer) -> None:
    assert verify(sign(offer, KEY), public_key(KEY)) == offer
    assert from_json(to_json(offer)) == offer


def test_an_offer_without_a_passcode_is_what_it_was_before_there_were_any() -> None:
    """So that older devices read it."""
    assert "passcode" not in to_json(OFFER)
    needed = replace(OFFER, passcode=True)
    assert '"passcode":true' in to_json(needed)
    assert from_json(to_json(needed)) == needed


def test_the_terms_of_a_task_are_read_off_it() -> None:
    assert [task.epsilon for task in (LOCAL, WORDS, TABLE)] == [4.0, 6.0, None]
    assert [task.items_per_report for task in (LOCAL, WORDS, TABLE)] == [1, 2, 3]


MASKED = replace(TABLE, aggregation=Masked(modulus_bits=12, corrupt=0.0), min_count=2)
ONE_HOT = replace(TABLE, sketch=OneHot(categories=3))


@pytest.mark.parametrize(
    ("offer", "changed", "says"),
    [
        (OFFER, {"epsilon": 3.0}, "that of the task's records, 4.0; got 3.0"),
        (OFFER, {"epsilon": None}, "that of the task's records"),
        (CENTRAL, {"epsilon": 1.0}, "that of the task's records, None"),
        (OFFER, {"items_per_report": 2}, "items_per_report must be the task's, 1"),
        (OFFER, {"task": WORDS}, "must be a LocalTask; got a WordTask"),
        (OFFER, {"task": TABLE}, "must be a LocalTask; got a Task"),
        (NEW, {"question": "frequencies"}, "must be a LocalTask"),
        (CENTRAL, {"trust": "local"}, "must be a LocalTask"),
        (CENTRAL, {"task": MASKED}, "masked"),
        (CENTRAL, {"task": ONE_HOT}, "dictionary"),
        (OFFER, {"task": DIRECT, "epsilon": 1.0}, "dictionary"),
        (OFFER, {"dictionary": "trees.csv"}, "dictionary must be 64"),
        (OFFER, {"study": " Street trees"}, "study"),
        (OFFER, {"study": "Street\ntrees"}, "study"),
        (OFFER, {"purpose": ""}, "purpose"),
        (OFFER, {"purpose": "Which trees\x1b[2J to plant."}, "purpose"),
        (OFFER, {"daily_reports": 0}, "daily_reports"),
        (OFFER, {"delay_seconds": 0}, "delay_seconds"),
        (OFFER, {"lifetime_epsilon": 3.0}, "lifetime_epsilon"),
        (CENTRAL, {"lifetime_epsilon": 3.0}, "lifetime_epsilon"),
        (OFFER, {"closes": -1}, "closes"),
        (OFFER, {"trust": "secure"}, "trust"),
    ],
)
def test_an_offer_that_promises_what_its_task_does_not_keep_cannot_be_made(
    offer: Offer, changed: dict[str, Any], says: str
) -> None:
    with pytest.raises(SpecError, match=says):
        replace(offer, **changed)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 255))
def test_no_byte_of_an_envelope_can_be_changed(place: int, mask: int) -> None:
    envelope = sign(OFFER, KEY)
    for member in ("offer", "signature"):
        data = bytearray(envelope[member].encode())
        data[place % len(data)] ^= mask
        changed = data.decode(errors="surrogateescape")
        if changed != envelope[member] and changed.lower() != envelope["signature"]:
            with pytest.raises(OfferError):
                verify({**envelope, member: changed}, public_key(KEY))


def test_a_signature_of_the_bare_text_is_not_one_of_an_offer() -> None:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    text = to_json(OFFER)
    bare = Ed25519PrivateKey.from_private_bytes(KEY).sign(text.encode()).hex()
    with pytest.raises(OfferError, match="signed"):
        verify({"offer": text, "signature": bare}, public_key(KEY))


def test_an_envelope_of_something_else_is_refused() -> None:
    envelope = sign(LOCAL, KEY)  # type: ignore[arg-type]  # on purpose
    with pytest.raises(OfferError, match="got a LocalTask"):
        verify(envelope, public_key(KEY))


@pytest.mark.parametrize(
    "envelope", [None, [], "x", {}, {"offer": "{}"}, {"offer": 1, "signature": "00"}]
)
def test_what_is_no_envelope_is_refused(envelope: Any) -> None:
    with pytest.raises(OfferError, match="two texts"):
        verify(envelope, public_key(KEY))


def test_an_envelope_with_more_in_it_is_refused() -> None:
    with pytest.raises(OfferError, match="two texts"):
        verify({**sign(OFFER, KEY), "note": "x"}, public_key(KEY))


@pytest.mark.parametrize("key", [b"", bytes(31), "00" * 32])
def test_a_key_has_32_bytes(key: Any) -> None:
    envelope = sign(OFFER, KEY)
    uses = (lambda: sign(OFFER, key), lambda: public_key(key), lambda: verify(envelope, key))
    for use in uses:
        with pytest.raises(OfferError, match="32 bytes") as caught:
            use()
        assert "00000000" not in str(caught.value)
