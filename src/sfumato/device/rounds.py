"""The client of a masked round, without I/O: its next request, and how it handles the answer.

    join ─▶ wait ─▶ say enrol ─▶ hear share ─▶ say share ─▶ hear mask ─▶ say mask
         ─▶ [hear ack ─▶ say ack] ─▶ hear unmask ─▶ say unmask ─▶ over
    and back to wait if too few devices enrol: only public keys have been sent by then

"say" puts the device's message of a phase, "hear" gets what the next message depends on. `request`
returns the next request, `receive` takes its answer, and every step is in the device's box before
the next request can be sent. So after a crash, or while the collector is away, the client continues
where it was, with the same bytes. The values are not stored: if the app crashes before the table is
masked, it must supply them again.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from sfumato.device import invitations
from sfumato.device.box import Box, State
from sfumato.device.client import Response, Send, passcode_headers, problem_of, retry_after
from sfumato.device.offers import Offer, offer_from_text, public_key
from sfumato.errors import ImpossibleError, MismatchError, OfferError, ServiceError, SpecError
from sfumato.flow.contribute import join_round
from sfumato.flow.task import Task
from sfumato.privacy import Rng
from sfumato.secagg.participant import Participant
from sfumato.spec import canonical, to_json

VERSION = 1
TIMEOUT_SECONDS = 600.0  # how long to try without progress
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # the longest first pause, and of all, between two tries
POLL_SECONDS = 15  # how long the collector may hold a request; less than a connection's timeout
_PHASES = ("enrol", "share", "mask", "ack", "unmask")
_AFTER_MASKING = ("say mask", "hear ack", "say ack", "hear unmask", "say unmask")
_NOT_IN_A_SUM = ("round-aborted", "message-refused", "wrong-phase")
_BUSY = (408, 429, 500, 502, 503, 504, 507)  # the same request may succeed later
_UNREADABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)

MakeTable = Callable[[Rng], npt.NDArray[np.int64]]
Transaction = Callable[[], AbstractContextManager[State]]


class RoundOutcome(StrEnum):
    """How a round ended for a device. None of these is an error."""

    DONE = "done"  # the device sent its last message
    NOT_NEEDED = "not_needed"  # the task is closed, or its round began without this device
    LATE = "late"  # the round went on without it, or refused its message
    ABORTED = "aborted"  # too few devices were left; nothing was opened, and it may join again
    LOST = "lost"  # the round ended while its sum was being opened: it counts as a contribution
    REFUSED = "refused"  # the device refused to continue; `RoundClient.problem` says why
    WRONG_PASSCODE = "wrong_passcode"  # the study has another passcode; with it, it may join again
    UNREACHABLE = "unreachable"  # no answer, or no progress, in time; the same call continues
    WAITING = "waiting"  # no round began in time; the same call continues


@dataclass(frozen=True, slots=True, repr=False)
class Request:
    """A request to the collector."""

    method: str
    path: str
    body: bytes
    headers: dict[str, str]

    def __repr__(self) -> str:  # tickets and passcodes are in the headers
        return f"Request({self.method})"


@dataclass(frozen=True, slots=True, repr=False)
class _Progress:
    """The state of a round as stored in the box, without the last message."""

    offer: Offer
    stage: str  # "join", "wait", "say <phase>" or "hear <phase>"
    ticket: str
    identity: str  # Ed25519 private key, in hexadecimal
    round_id: str = ""
    member: int = 0
    participant: str = ""

    @property
    def task(self) -> Task:
        assert isinstance(self.offer.task, Task)  # checked before `begin`
        return self.offer.task

    @property
    def semi_malicious(self) -> bool:
        return getattr(self.task.aggregation, "mode", "") == "semi_malicious"

    def to_json(self) -> str:
        data: dict[str, Any] = {
            "version": VERSION,
            "offer": to_json(self.offer),
            "stage": self.stage,
            "ticket": self.ticket,
            "identity": self.identity,
            "round_id": self.round_id,
            "member": self.member,
            "participant": self.participant,
        }
        return canonical(data)

    @classmethod
    def from_json(cls, text: str) -> _Progress:
        try:
            data = json.loads(text)
            if data.pop("version") != VERSION:
                raise ValueError
            return cls(**{**data, "offer": offer_from_text(data["offer"])})
        except (*_UNREADABLE, OfferError):  # the cause is hidden: it might show a secret
            raise SpecError(
                "the state of a masked round in this box cannot be read; "
                "use the release of sfumato that wrote it"
            ) from None


class RoundClient:
    """One device in one masked round of a study, at the last stage stored in its box.

    Send `request()` and pass its answer to `receive`, until `outcome` is set.
    """

    def __init__(
        self,
        box: Box,
        transaction: Transaction,
        key: bytes,
        study: str,
        *,
        rng: Rng,
    ) -> None:
        """`transaction` opens a transaction of the box on the device's state."""
        self._box, self._transaction, self._key, self._study = box, transaction, key, study
        self._rng = rng
        self.make_table: MakeTable | None = None  # from the device's values
        self.passcode: str | None = None  # of the study, to join
        self.participant: Participant | None = None
        self.outcome: RoundOutcome | None = None
        self.problem = ""  # why the collector or the device refused
        self.retry_after_seconds = 0  # as the collector asked
        row = box.round(study)
        if row is None:
            raise SpecError("this device is not in a round of the study; join it")
        self._text, self._message = row
        self._progress = _Progress.from_json(self._text)

    @staticmethod
    def begin(box: Box, offer: Offer, *, rng: Rng) -> None:
        """Begin to take part in the offer's task, within a transaction of the box."""
        progress = _Progress(
            offer=offer,
            stage="join",
            ticket=rng.words(4).tobytes().hex(),
            identity=rng.words(4).tobytes().hex(),
        )
        box.keep_round(offer.study, progress.to_json(), b"")

    @property
    def offer(self) -> Offer:
        """The offer that this round answers."""
        return self._progress.offer

    @property
    def phase(self) -> str:
        """The current phase: join, wait, or a phase of the round."""
        return self._progress.stage.rpartition(" ")[2]

    @property
    def waits(self) -> bool:
        """Whether the collector may hold the next request until there is news."""
        return self._progress.stage.startswith(("wait", "hear"))

    def request(self, wait_seconds: int = POLL_SECONDS) -> Request:
        """The next request. It stays the same until `receive` gets an answer."""
        progress = self._progress
        headers = {"Authorization": f"Ticket {progress.ticket}"}
        if progress.stage == "join":
            identity = public_key(bytes.fromhex(progress.identity))
            headers |= passcode_headers(self.passcode)
            return Request("POST", f"/v1/tasks/{progress.task.id}/join", identity, headers)
        if progress.stage == "wait":
            return Request("GET", f"/v1/tickets?wait={wait_seconds}", b"", headers)
        verb, _, phase = progress.stage.partition(" ")
        path = f"/v1/rounds/{progress.round_id}/{phase}/{progress.member}"
        if verb == "say":
            return Request("PUT", path, self._message, headers)
        return Request("GET", f"{path}?wait={wait_seconds}", b"", headers)

    def receive(self, answer: Response) -> bool:
        """Handle an answer; returns whether it made progress."""
        self.retry_after_seconds = retry_after(answer)
        if answer.status in _BUSY or answer.status == 204:
            return False
        stage = self._progress.stage
        try:
            if answer.status in (200, 201):
                return self._advance(stage, answer.body)
            self._handle_refusal(stage, answer)
        except (ImpossibleError, MismatchError, OfferError, SpecError) as problem:
            # It leaves the round; whether its table is in the sum, it cannot know.
            self.problem = str(problem)
            self._end(RoundOutcome.REFUSED)
        return True

    def _advance(self, stage: str, body: bytes) -> bool:
        verb, _, phase = stage.partition(" ")
        if stage == "join":
            self._keep(replace(self._progress, stage="wait"), b"")
        elif stage == "wait":
            return self._enrol(body)
        elif verb == "hear":
            self._answer(phase, body)
        elif phase == "unmask":
            self._end(RoundOutcome.DONE)
        else:
            place = _PHASES.index(phase) + 1
            if _PHASES[place] == "ack" and not self._progress.semi_malicious:
                place += 1
            self._drop_message(phase, replace(self._progress, stage=f"hear {_PHASES[place]}"))
        return True

    def _drop_message(self, phase: str, progress: _Progress) -> None:
        """Forget the message, which has arrived, and everything that could reveal a table."""
        participant = self._take_participant()
        if phase == "mask":
            participant.forget_table()
            progress = replace(progress, participant=participant.to_json())
        self._keep(progress, b"")
        self.participant = participant

    def _enrol(self, body: bytes) -> bool:
        """Enrol in the round of a complete cohort, if it fits the task.

        False if the round is the one that was aborted: a collector may be a second behind.
        """
        progress = self._progress
        try:
            envelope = json.loads(body)
            member = int(envelope["member"])
        except _UNREADABLE:
            raise MismatchError(
                "an invitation must be a JSON object with a member; got something else"
            ) from None
        invitation = invitations.verify(envelope, self._key)
        if invitation.round.nonce == progress.round_id:
            return False
        identity = bytes.fromhex(progress.identity)
        participant = join_round(
            progress.task, invitation.round, member, identity, invitation.roster, rng=self._rng
        )
        joined = replace(progress, round_id=invitation.round.nonce, member=member)
        self._put_message("enrol", participant, participant.enrol(), joined)
        return True

    def _answer(self, phase: str, body: bytes) -> None:
        participant = self._take_participant()
        if phase == "share":
            message = participant.share(body)
        elif phase == "mask":
            if self.make_table is None:
                raise SpecError("this device's values are needed to mask them; join with them")
            message = participant.mask(body, self.make_table(self._rng))
        elif phase == "ack":
            message = participant.acknowledge(body)
        elif self._progress.semi_malicious:  # it knows the survivors: it signed them
            message = participant.unmask(participant.survivors, body)
        else:
            message = participant.unmask(body)
        self._put_message(phase, participant, message, self._progress)

    def _put_message(
        self, phase: str, participant: Participant, message: bytes, progress: _Progress
    ) -> None:
        """Store a message, and the state that the next one depends on, before it can be sent."""
        self._keep(
            replace(progress, stage=f"say {phase}", participant=participant.to_json()),
            message,
            contributes=phase == "mask",
        )
        self.participant = participant

    def _take_participant(self) -> Participant:
        """The participant, to change and store. Until it is stored, the one in the box counts, and
        the next try begins with it."""
        participant, self.participant = self.participant, None
        return participant or Participant.from_json(self._progress.participant)

    def _handle_refusal(self, stage: str, answer: Response) -> None:
        code, self.problem = problem_of(answer)
        if stage == "join":
            is_passcode = code == "wrong-passcode"
            self._end(RoundOutcome.WRONG_PASSCODE if is_passcode else RoundOutcome.NOT_NEEDED)
        elif stage == "wait" and code not in ("round-lost", "round-over"):
            aborted = code == "round-aborted" or self._progress.round_id != ""
            self._end(RoundOutcome.ABORTED if aborted else RoundOutcome.NOT_NEEDED)
        elif code == "round-aborted" and stage in ("say enrol", "hear share"):
            # It may have to wait for another round; forget its state in this one.
            self.participant = None
            self._keep(replace(self._progress, stage="wait", member=0, participant=""), b"")
        elif code in ("round-lost", "round-over"):
            self._end(RoundOutcome.LOST if stage in _AFTER_MASKING else RoundOutcome.LATE)
        else:
            # If the collector follows the protocol, the table is in no sum. A collector that need
            # not follow it could say so about a table that it goes on to open.
            is_credible = not self._progress.semi_malicious and code in _NOT_IN_A_SUM
            self._end(
                RoundOutcome.ABORTED if code == "round-aborted" else RoundOutcome.LATE,
                take_back=is_credible and stage in ("say mask", "hear unmask"),
            )

    def _keep(self, progress: _Progress, message: bytes, *, contributes: bool = False) -> None:
        text = progress.to_json()
        with self._transaction() as state:
            self._check_alone()
            if contributes:  # check again: the device may have answered another study since
                if not state.may_contribute(progress.offer, progress.task):
                    raise MismatchError(
                        "a device must join one cohort per campaign, each task once, and no more "
                        "tasks of a study than agreed; this table would be one too many"
                    )
                state.contribute(progress.offer, progress.task).tasks.add(progress.task.id)
            self._box.keep_round(self._study, text, message)
        self._progress, self._text, self._message = progress, text, message

    def _end(self, outcome: RoundOutcome, *, take_back: bool = False) -> None:
        """Forget the round; with `take_back`, it does not count as a contribution."""
        task = self._progress.task
        with self._transaction() as state:
            self._check_alone()
            if take_back:
                state.take_back(self._progress.offer, task)
            self._box.drop_round(self._study)
        self.participant, self.outcome = None, outcome

    def _check_alone(self) -> None:
        row = self._box.round(self._study)
        if row is None or row[0] != self._text:
            raise SpecError(
                "only one program may drive a device's round; "
                "another one has continued or left it since"
            )

    def __repr__(self) -> str:  # never a secret
        return f"RoundClient({self._progress.stage})"


def drive(
    client: RoundClient,
    send: Send,
    random: Callable[[], float],
    *,
    timeout_seconds: float = TIMEOUT_SECONDS,
    cohort_seconds: float = math.inf,
    pause: Callable[[float], None] = time.sleep,
) -> RoundOutcome:
    """Exchange messages until the round is over for this device.

    Stops if there is no progress for `timeout_seconds`, or no round after `cohort_seconds`. After a
    failure it pauses as long as the collector asks, plus a random time (`random` draws from [0, 1))
    whose bound doubles with each failure.
    """
    until, failures = time.monotonic() + timeout_seconds, 0
    joining_until = time.monotonic() + cohort_seconds
    while client.outcome is None:
        if client.phase == "wait" and time.monotonic() > joining_until:
            return RoundOutcome.WAITING
        request, status = client.request(), 0
        try:
            answer = send(request.method, request.path, request.body, request.headers)
            status, has_advanced = answer.status, client.receive(answer)
        except ServiceError:
            has_advanced = False
        if has_advanced or (status == 204 and client.phase == "wait"):
            until, failures = time.monotonic() + timeout_seconds, 0
        elif time.monotonic() > until:
            return RoundOutcome.UNREACHABLE
        elif status == 204:  # the collector held the request; ask again at once
            failures = 0
        else:
            failures += 1
            longest = min(FIRST_PAUSE * 2.0 ** min(failures - 1, 32), LONGEST_PAUSE)
            pause(client.retry_after_seconds + longest * random())
    return client.outcome
