"""Offers to devices: a study's task and terms, signed by the collector.

An offer travels as an envelope: its canonical JSON, and an Ed25519 signature over it. A device
knows the collector's public key beforehand and refuses offers signed by any other key.

    >>> from sfumato.privacy import HashedResponse
    >>> randomizer = HashedResponse(epsilon=4.0, rows=1024, width=56, seed=1)
    >>> offer = Offer(study="Street trees", purpose="Which trees to plant next.",
    ...               question="frequencies", trust="local", epsilon=4.0,
    ...               task=LocalTask(randomizer=randomizer, cohort="everybody"))
    >>> key = bytes(range(32))  # in production, 32 random bytes that are kept secret
    >>> verify(sign(offer, key), public_key(key)) == offer
    True
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from sfumato.device.outbox import SendingRule, check_hex
from sfumato.errors import OfferError, SpecError
from sfumato.flow.model_terms import ModelTerms
from sfumato.flow.report import WIRE_VERSION
from sfumato.flow.task import LocalTask, Task
from sfumato.flow.word_discovery import WordTask
from sfumato.privacy import NoNoise
from sfumato.sketch import (
    CountSketch,
    NormBins,
    OneHot,
    RoundSketch,
    TextKeys,
    VectorSketch,
    WordKeys,
)
from sfumato.sketch.words import Prefix
from sfumato.spec import from_json, later, require, spec, to_json
from sfumato.study import QUESTIONS, TRUSTS

KEY_BYTES = 32
WRONG_SIGNATURE = (
    "an offer must be signed with the collector's key; this signature does not match it"
)
_CONTEXT = b"sfumato offer v1\0"  # so that the signature of an offer is valid for nothing else


@spec("offer")
class Offer:
    """An invitation to take part in a study: its purpose, its terms and its task.

    The terms must be the task's own: an offer cannot state an epsilon that its randomizer does not
    provide. `epsilon` is None under trust "central", where nothing is private to the collector, and
    under "secure", where the noise of all devices together makes a masked sum private. A trusted
    collector may ask for `masked` tables as well; it then sees only their sum.
    """

    study: str  # the name that users see; consent is recorded under it
    purpose: str  # one sentence, shown beside the name
    question: str
    trust: Literal["local", "secure", "central"]
    task: LocalTask | Task | WordTask
    epsilon: float | None  # of one record
    delta: float | None = None  # of the release, if not local
    noise: float | None = None
    """The least noise in any of the study's tables: its standard deviation divided by the L2 norm
    of one device's contribution. None if no table has noise, or if this is the only task."""
    daily_reports: int = 1
    delay_seconds: int = 86_400
    lifetime_epsilon: float | None = None
    items_per_report: int = 1
    contributions: int = 1  # the most tasks of the study that one device answers
    dictionary: str | None = None  # digest of the list of items to count, or of known words to skip
    keys: TextKeys | WordKeys | Prefix | NormBins | None = None
    """Which part of an item, or of a vector, a table counts, if the task's own sketch does not
    say."""
    model: ModelTerms | None = None  # the model to train in this round
    closes: int | None = None  # the last day, since 1970-01-01 UTC, on which devices answer
    min_version: int = WIRE_VERSION  # the lowest wire version that a device must support
    masked: bool = later(False)  # under trust "central": tables are sent in masked rounds
    passcode: bool = later(False)  # only devices that have the study's passcode take part
    segments: tuple[str, ...] = later(())  # a value is one of these and an item (`flow.segments`)

    def check(self) -> None:
        require(
            self.purpose.isprintable() and self.purpose.strip() == self.purpose != "",
            "purpose must be one line of printable text without spaces around it; "
            f"got {self.purpose!r}",
        )
        require(
            self.question in QUESTIONS and self.trust in QUESTIONS[self.question].planners,
            f"this version has no {self.question} with trust {self.trust}; a newer one may",
        )
        facts, trust = QUESTIONS[self.question], TRUSTS[self.trust]
        expected: type = Task
        if trust.is_local:
            expected = LocalTask if facts.dictionary == "listed" else WordTask
        require(
            isinstance(self.task, expected),
            f"the task of {self.question} with trust {self.trust} must be a {expected.__name__}; "
            f"got a {type(self.task).__name__}",
        )
        require(
            self.epsilon == self.task.epsilon,
            f"epsilon must be that of the task's records, {self.task.epsilon}; got {self.epsilon}",
        )
        require(
            self.items_per_report == self.task.items_per_report,
            f"items_per_report must be the task's, {self.task.items_per_report}; "
            f"got {self.items_per_report}",
        )
        if isinstance(self.task, Task):
            masked = self.task.is_masked
            require(
                masked == (self.masked or trust.is_masked),
                'a table must be masked if, and only if, trust is "secure" or the offer says so; '
                f'got {"a masked" if masked else "an open"} one with trust "{self.trust}"',
            )
            require(
                not trust.is_masked
                or self.task.mechanism.in_shares
                or isinstance(self.task.mechanism, NoNoise),
                "a masked sum must get its noise from devices; a collector that adds noise at the "
                "release would see the sum without it; use noise in shares",
            )
            multiplier = self.task.noise_multiplier
            require(
                self.noise is None or multiplier is None or self.noise <= multiplier * (1 + 1e-9),
                f"noise must be at most the task's, {multiplier}; got {self.noise}",
            )
            self._check_values(self.task)
        require(
            not self.masked or not (trust.is_local or trust.is_masked),
            f'masked is for trust "central" only; got trust "{self.trust}"',
        )
        require(
            not self.segments or facts.dictionary == "listed",
            f"segments are for frequencies; got {self.question} with {len(self.segments)}",
        )
        self._check_model()
        if self.dictionary is not None:
            check_hex(self.dictionary, 64, "dictionary")
        require(
            self.dictionary is not None or not self.task.takes_categories(self.keys),
            "dictionary must name the list of categories, since this task takes categories; "
            "got None",
        )
        require.at_least(1, contributions=self.contributions)
        require.at_least(0, closes=self.closes, min_version=self.min_version)
        _ = self.rule  # checks the name and the limits

    def _check_values(self, task: Task) -> None:
        is_of_vectors = isinstance(task.sketch, VectorSketch) or isinstance(self.keys, NormBins)
        is_of_vectors |= isinstance(task.sketch, RoundSketch) and self.model is not None
        require(
            (QUESTIONS[self.question].data != "items") == is_of_vectors,
            "a mean or a model must have a task of vectors, and no other question may have one; "
            f"got {self.question} with a {type(task.sketch).__name__}",
        )
        require(
            self.keys is None or isinstance(task.sketch, OneHot | CountSketch),
            "keys must be None unless the table is a OneHot or a CountSketch; "
            f"got them with a {type(task.sketch).__name__}",
        )
        if isinstance(self.keys, NormBins):
            require(
                task.categories == self.keys.count,
                f"a table of norms must be a OneHot of {self.keys.count} cells; "
                f"got {task.categories or type(task.sketch).__name__}",
            )
        if isinstance(self.keys, Prefix) and isinstance(task.sketch, OneHot):
            prefixes = self.keys.radix**self.keys.size
            require(
                task.sketch.categories == prefixes,
                f"a table of prefixes must have {prefixes} cells; got {task.sketch.categories}",
            )

    def _check_model(self) -> None:
        require(
            (QUESTIONS[self.question].data == "examples") == (self.model is not None),
            "model must be given for a train study, and only then; "
            f"got {self.question} {'without' if self.model is None else 'with'} a model",
        )
        if self.model is None:
            return
        require(
            TRUSTS[self.trust].is_masked,
            f'a model must be trained with trust "secure"; got "{self.trust}"',
        )
        length = getattr(getattr(self.task, "sketch", None), "length", None)
        require(
            length == self.model.parameters,
            f"the task's vectors must have the length of the model, {self.model.parameters}; "
            f"got {length}",
        )

    @property
    def rule(self) -> SendingRule:
        """The rule by which a device's outbox sends records for this study."""
        return SendingRule(
            study=self.study,
            task_id=self.task.id,
            epsilon=self.epsilon,
            daily_reports=self.daily_reports,
            delay_seconds=self.delay_seconds,
            lifetime_epsilon=self.lifetime_epsilon,
            lifetime_reports=self.contributions,
        )


def sign(offer: Offer, key: bytes) -> dict[str, str]:
    """The offer's envelope, signed with the collector's secret Ed25519 key of 32 bytes."""
    text = to_json(offer)
    return {"offer": text, "signature": signature(_CONTEXT, text, key)}


def verify(envelope: Mapping[str, Any], key: bytes) -> Offer:
    """The offer in an envelope that the holder of this public key signed.

    Raises OfferError otherwise. The signature is checked before the offer is parsed.
    """
    members = envelope if isinstance(envelope, Mapping) else {}
    text, digits = members.get("offer"), members.get("signature")
    if members.keys() != {"offer", "signature"} or not (
        isinstance(text, str) and isinstance(digits, str)
    ):
        raise OfferError("an envelope must hold two texts, offer and signature; got others")
    check_signature(_CONTEXT, text, digits, key)
    return offer_from_text(text)


def signature(context: bytes, text: str, key: bytes) -> str:
    """The Ed25519 signature over both, in hexadecimal, with a collector's secret key."""
    return _secret(key).sign(context + text.encode()).hex()


def check_signature(context: bytes, text: str, digits: str, key: bytes) -> None:
    """Raise OfferError unless the holder of this public key signed the text in this context.

    `digits` is the signature in hexadecimal.
    """
    _check_key(key)
    try:
        public = Ed25519PublicKey.from_public_bytes(key)
        public.verify(bytes.fromhex(digits), context + text.encode())
    except (InvalidSignature, ValueError):  # ValueError: not hexadecimal, or a surrogate
        raise OfferError(
            WRONG_SIGNATURE,
            hint="check the collector's address and its public key",
        ) from None


def offer_from_text(text: str) -> Offer:
    """The offer with this canonical JSON; for texts whose signature was checked."""
    try:
        offer = from_json(text)
    except SpecError as problem:
        raise OfferError(f"this offer cannot be read: {problem}") from problem
    if not isinstance(offer, Offer):
        raise OfferError(f"an envelope must hold an offer; got a {type(offer).__name__}")
    return offer


def public_key(key: bytes) -> bytes:
    """The public half, 32 bytes, of a secret key; devices get it beforehand."""
    return _secret(key).public_key().public_bytes_raw()


def _secret(key: bytes) -> Ed25519PrivateKey:
    _check_key(key)
    return Ed25519PrivateKey.from_private_bytes(key)


def _check_key(key: bytes) -> None:
    if not isinstance(key, bytes) or len(key) != KEY_BYTES:
        raise OfferError(f"a key must be {KEY_BYTES} bytes; got something else")
