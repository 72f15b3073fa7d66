"""What devices are told: a study's task and terms, signed by the collector.

An offer travels as an envelope: its canonical JSON, and an Ed25519 signature over it. A device
knows the collector's public key beforehand and takes no offer that another key signed.

    >>> from sfumato.privacy import HashedResponse
    >>> randomizer = HashedResponse(epsilon=4.0, rows=1024, width=56, seed=1)
    >>> offer = Offer(study="Street trees", purpose="Which trees to plant next.",
    ...               question="frequencies", trust="local", epsilon=4.0,
    ...               task=LocalTask(randomizer=randomizer, cohort="everybody"))
    >>> key = bytes(range(32))  # in earnest 32 random bytes, kept secret
    >>> verify(sign(offer, key), public_key(key)) == offer
    True
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from sfumato.device.outbox import Rule, check_hex
from sfumato.errors import OfferError, SpecError
from sfumato.flow.model_terms import ModelTerms
from sfumato.flow.report import WIRE_VERSION
from sfumato.flow.task import LocalTask, Task
from sfumato.flow.word_discovery import WordTask
from sfumato.privacy import NoNoise
from sfumato.sketch import CountSketch, OneHot, TextKeys, VectorSketch, WordKeys
from sfumato.sketch.words import Prefix
from sfumato.spec import from_json, later, require, spec, to_json
from sfumato.study import QUESTIONS, TRUSTS

KEY_BYTES = 32
_CONTEXT = b"sfumato offer v1\0"  # so that a signature of an offer is never one of something else


@spec("offer")
class Offer:
    """A study as devices are asked to take part in it: what for, on which terms, and the task.

    The terms must be the task's own: a device takes no word for an epsilon that its randomizer does
    not keep. Under trust "central" nothing is private to the collector, so `epsilon` is None; so it
    is under "secure", where a masked sum is private by the noise of all devices together. A trusted
    collector may ask for `masked` tables, too: then it sees their sum, and no table.
    """

    study: str  # the name that users are shown; consent goes by it
    purpose: str  # one sentence, shown beside it
    question: str
    trust: Literal["local", "secure", "central"]
    task: LocalTask | Task | WordTask
    epsilon: float | None  # of one record
    delta: float | None = None  # of what is released, if not local
    noise: float | None = None
    """Of a study's noised tables, at least: the noise's standard deviation over the L2 norm of what
    one device adds. None where there are none, or the task is the only one to be asked."""
    daily_reports: int = 1
    delay_seconds: int = 86_400
    lifetime_epsilon: float | None = None
    items_per_report: int = 1
    contributions: int = 1  # tasks of the study that one device answers at most
    dictionary: str | None = None  # its digest: the items asked about, or the words already known
    keys: TextKeys | WordKeys | Prefix | None = None
    """What of an item a table counts, where the task's own sketch does not say."""
    model: ModelTerms | None = None  # that devices train in this round
    closes: int | None = None  # the last day, since 1970-01-01 UTC, on which devices answer
    min_version: int = WIRE_VERSION  # of the wire, that a device must speak at least
    masked: bool = later(False)  # trust "central": a table is sent in a masked round

    def check(self) -> None:
        require(
            self.purpose.isprintable() and self.purpose.strip() == self.purpose != "",
            "purpose must be a sentence to show on one line, without spaces around it",
        )
        require(
            self.question in QUESTIONS and self.trust in QUESTIONS[self.question].planners,
            f"there is no {self.question} with trust {self.trust}; a newer version may have it",
        )
        facts, trust = QUESTIONS[self.question], TRUSTS[self.trust]
        fitting: type = Task
        if trust.is_local:
            fitting = LocalTask if facts.dictionary == "listed" else WordTask
        require(
            isinstance(self.task, fitting),
            f"the task of {self.question} with trust {self.trust} must be a {fitting.__name__}; "
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
                'a table is masked if, and only if, trust is "secure" or the offer says so; '
                f'got {"a masked" if masked else "an open"} one with trust "{self.trust}"',
            )
            require(
                not trust.is_masked
                or self.task.mechanism.in_shares
                or isinstance(self.task.mechanism, NoNoise),
                "a masked sum must have its noise from devices: noise at the release is the "
                "collector's to add, who would see the sum without it; use noise in shares",
            )
            kept = self.task.noise_multiplier
            require(
                self.noise is None or kept is None or self.noise <= kept * (1 + 1e-9),
                f"noise must be at most what the task has, {kept}; got {self.noise}",
            )
            self._check_values(self.task)
        require(
            not self.masked or not (trust.is_local or trust.is_masked),
            f'masked is said with trust "central"; got "{self.trust}"',
        )
        self._check_model()
        if self.dictionary is not None:
            check_hex(self.dictionary, 64, "dictionary")
        require(
            self.dictionary is not None or not self.task.takes_categories(self.keys),
            "this task takes categories, so dictionary must name the list that they are of",
        )
        require(
            self.contributions >= 1, f"contributions must be at least 1; got {self.contributions}"
        )
        for name in ("closes", "min_version"):
            value = getattr(self, name)
            require(value is None or value >= 0, f"{name} must be at least 0; got {value}")
        _ = self.rule  # checks the name and the limits

    def _check_values(self, task: Task) -> None:
        require(
            (QUESTIONS[self.question].data != "items") == isinstance(task.sketch, VectorSketch),
            "a mean or a model, and nothing else, is of vectors",
        )
        require(
            self.keys is None or isinstance(task.sketch, OneHot | CountSketch),
            "keys are for tables that count items; this one has others of its own",
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
            "a train study, and no other, says which model is trained",
        )
        if self.model is None:
            return
        require(
            TRUSTS[self.trust].is_masked,
            f'a model is trained with trust "secure"; got {self.trust}',
        )
        length = getattr(getattr(self.task, "sketch", None), "length", None)
        require(
            length == self.model.parameters,
            f"the task's vectors must be of the model's {self.model.parameters} parameters; "
            f"got {length}",
        )

    @property
    def rule(self) -> Rule:
        """What a device's outbox does for it."""
        return Rule(
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
    """The offer in an envelope that the holder of this public key signed; else OfferError.

    The signature is checked before anything of the offer is read.
    """
    members = envelope if isinstance(envelope, Mapping) else {}
    text, signed = members.get("offer"), members.get("signature")
    if members.keys() != {"offer", "signature"} or not (
        isinstance(text, str) and isinstance(signed, str)
    ):
        raise OfferError("an envelope must hold an offer and its signature, two texts; got others")
    check_signature(_CONTEXT, text, signed, key)
    return offer_from_text(text)


def signature(context: bytes, text: str, key: bytes) -> str:
    """Ed25519 over both, in hexadecimal, with a collector's secret key."""
    return _secret(key).sign(context + text.encode()).hex()


def check_signature(context: bytes, text: str, signed: str, key: bytes) -> None:
    """Raise OfferError unless the holder of this public key signed the text in this context."""
    try:
        _public(key).verify(bytes.fromhex(signed), context + text.encode())
    except (InvalidSignature, ValueError):  # ValueError: no hexadecimal digits, or a surrogate
        raise OfferError(
            "an offer must be signed with the collector's key; this signature is another's",
            hint="check the collector's address and its public key",
        ) from None


def offer_from_text(text: str) -> Offer:
    """The offer whose canonical JSON this is: for texts whose signature was seen."""
    try:
        offer = from_json(text)
    except SpecError as problem:
        raise OfferError(f"this offer cannot be read: {problem}") from problem
    if not isinstance(offer, Offer):
        raise OfferError(f"an envelope must hold an offer; got a {type(offer).__name__}")
    return offer


def public_key(key: bytes) -> bytes:
    """The public half, 32 bytes, of a secret key: what devices are given beforehand."""
    return _secret(key).public_key().public_bytes_raw()


def _secret(key: bytes) -> Ed25519PrivateKey:
    _check_key(key)
    return Ed25519PrivateKey.from_private_bytes(key)


def _public(key: bytes) -> Ed25519PublicKey:
    _check_key(key)
    return Ed25519PublicKey.from_public_bytes(key)


def _check_key(key: bytes) -> None:
    if not isinstance(key, bytes) or len(key) != KEY_BYTES:
        raise OfferError(f"a key must be {KEY_BYTES} bytes; got something else")
