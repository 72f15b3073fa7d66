"""A device's part in a masked round: what it asks next, and what it makes of the answer.

    join ─▶ wait ─▶ say enrol ─▶ hear share ─▶ say share ─▶ hear mask ─▶ say mask
         ─▶ [hear ack ─▶ say ack] ─▶ hear unmask ─▶ say unmask ─▶ over
    and back to wait if too few enrol: nothing but public keys was sent

Nothing here moves bytes: `request` says what to ask, `hear` is told the answer, and every step is
in the device's box before the next request can leave. So an app that crashes goes on where it was,
with the same bytes, and so does one whose collector was away. The values themselves are kept by
nobody: until the table is masked, the app gives them again after a crash.
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
from sfumato.device.client import Response, Send, problem_of, retry_after
from sfumato.device.offers import Offer, offer_from_text, public_key
from sfumato.errors import ImpossibleError, MismatchError, OfferError, ServiceError, SpecError
from sfumato.flow.contribute import join_round
from sfumato.flow.task import Task
from sfumato.privacy import Rng
from sfumato.secagg.participant import Participant
from sfumato.spec import canonical, to_json

VERSION = 1
PATIENCE_SECONDS = 600.0  # for a collector that does not answer
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds between tries to reach it, at most
POLL_SECONDS = 15  # that an answer is waited for: less than a connection's patience
_PHASES = ("enrol", "share", "mask", "ack", "unmask")
_SENT = ("say mask", "hear ack", "say ack", "hear unmask", "say unmask")  # its table
_NOT_IN_A_SUM = ("round-aborted", "message-refused", "wrong-phase")
_BUSY = (408, 429, 500, 502, 503, 504, 507)  # the same may work later
_UNREADABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)

MakeTable = Callable[[Rng], npt.NDArray[np.int64]]
Changing = Callable[[], AbstractContextManager[State]]


class Joined(StrEnum):
    """How a device's part in a round ended. None of these is an error."""

    DONE = "done"  # it has given its share of what opens the sum
    NOT_NEEDED = "not_needed"  # the task is closed, or its round began while it was away
    LATE = "late"  # the round went on without it, or did not take its message
    ABORTED = "aborted"  # too few were left; nothing was opened, and it may join again
    LOST = "lost"  # the round ended when the sum was about to be opened: it counts
    REFUSED = "refused"  # the device would not go on; `Part.problem` says why
    UNREACHABLE = "unreachable"  # no answer, or nothing new, in time; it can be gone on with
    WAITING = "waiting"  # there was no round in time; it can be gone on with


@dataclass(frozen=True, slots=True, repr=False)
class Request:
    """What to ask of the collector."""

    method: str
    path: str
    body: bytes
    headers: dict[str, str]

    def __repr__(self) -> str:  # tickets are in the headers
        return f"Request({self.method})"


@dataclass(frozen=True, slots=True, repr=False)
class _Progress:
    """What is kept of a part in the box, but for the last message."""

    offer: Offer
    stage: str  # "join", "wait", or "say" or "hear" and a phase
    ticket: str
    identity: str  # Ed25519 private key, in hexadecimal
    round_id: str = ""
    member: int = 0
    participant: str = ""

    @property
    def task(self) -> Task:
        assert isinstance(self.offer.task, Task)  # as `begin` has seen to
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
        except (*_UNREADABLE, OfferError):  # whatever it is: it might show a secret
            raise SpecError("the state of a masked round in this box cannot be read") from None


class Part:
    """One device in one masked round of a study, at the latest place that its box knows.

    Ask `request`, tell `hear` the answer, until `outcome` says how it ended.
    """

    def __init__(
        self,
        box: Box,
        changing: Changing,
        key: bytes,
        study: str,
        *,
        rng: Rng,
    ) -> None:
        """`changing` opens a transaction of the box on the device's state."""
        self._box, self._changing, self._key, self._study = box, changing, key, study
        self._rng = rng
        self.make_table: MakeTable | None = None  # of the device's values
        self._participant: Participant | None = None
        self.outcome: Joined | None = None
        self.problem = ""  # why it was refused, in the collector's words or the device's
        self.retry_after_seconds = 0  # that the collector asked for
        kept = box.round(study)
        if kept is None:
            raise SpecError("this device is in no round of the study; join it")
        self._text, self._message = kept
        self._progress = _Progress.from_json(self._text)

    @staticmethod
    def begin(box: Box, offer: Offer, *, rng: Rng) -> None:
        """Have a part in the offer's task, within a transaction of the box."""
        made = _Progress(
            offer=offer,
            stage="join",
            ticket=rng.words(4).tobytes().hex(),
            identity=rng.words(4).tobytes().hex(),
        )
        box.keep_round(offer.study, made.to_json(), b"")

    @property
    def offer(self) -> Offer:
        """What it answers."""
        return self._progress.offer

    @property
    def phase(self) -> str:
        """What it is about: join, wait, or a phase of the round."""
        return self._progress.stage.rpartition(" ")[2]

    @property
    def waits(self) -> bool:
        """Whether the next request is one to wait for."""
        return self._progress.stage.startswith(("wait", "hear"))

    def request(self, wait_seconds: int = POLL_SECONDS) -> Request:
        """What to ask next. The same until `hear` was told an answer."""
        progress = self._progress
        headers = {"Authorization": f"Ticket {progress.ticket}"}
        if progress.stage == "join":
            identity = public_key(bytes.fromhex(progress.identity))
            return Request("POST", f"/v1/tasks/{progress.task.id}/join", identity, headers)
        if progress.stage == "wait":
            return Request("GET", f"/v1/tickets?wait={wait_seconds}", b"", headers)
        verb, _, phase = progress.stage.partition(" ")
        path = f"/v1/rounds/{progress.round_id}/{phase}/{progress.member}"
        if verb == "say":
            return Request("PUT", path, self._message, headers)
        return Request("GET", f"{path}?wait={wait_seconds}", b"", headers)

    def hear(self, answer: Response) -> bool:
        """Take in what was answered; whether that brought it further."""
        self.retry_after_seconds = retry_after(answer)
        if answer.status in _BUSY or answer.status == 204:
            return False
        stage = self._progress.stage
        try:
            if answer.status in (200, 201):
                return self._go_on(stage, answer.body)
            self._refused(stage, answer)
        except (ImpossibleError, MismatchError, OfferError, SpecError) as problem:
            # It says nothing more in this round; whether its table is in the sum it cannot know.
            self.problem = str(problem)
            self._end(Joined.REFUSED)
        return True

    def _go_on(self, stage: str, body: bytes) -> bool:
        verb, _, phase = stage.partition(" ")
        if stage == "join":
            self._keep(replace(self._progress, stage="wait"), b"")
        elif stage == "wait":
            return self._enrol(body)
        elif verb == "hear":
            self._answer(phase, body)
        elif phase == "unmask":
            self._end(Joined.DONE)
        else:
            place = _PHASES.index(phase) + 1
            if _PHASES[place] == "ack" and not self._progress.semi_malicious:
                place += 1
            self._heard(phase, replace(self._progress, stage=f"hear {_PHASES[place]}"))
        return True

    def _heard(self, phase: str, progress: _Progress) -> None:
        """Its message has arrived: it is said no more, and nothing is kept that shows a table."""
        participant = self._take_participant()
        if phase == "mask":
            participant.forget_table()
            progress = replace(progress, participant=participant.to_json())
        self._keep(progress, b"")
        self._participant = participant

    def _enrol(self, body: bytes) -> bool:
        """The cohort is complete: take part in its round, if it is what the task asks for. False if
        it is the one that was given up: a collector may be a second behind."""
        progress = self._progress
        try:
            told = json.loads(body)
            member = int(told["member"])
        except _UNREADABLE:
            raise MismatchError("an invitation must be JSON with a member; got others") from None
        invitation = invitations.verify(told, self._key)
        if invitation.round.nonce == progress.round_id:
            return False
        identity = bytes.fromhex(progress.identity)
        known = 0 <= member < len(invitation.roster)
        if not known or invitation.roster[member] != public_key(identity):
            raise MismatchError("the roster must list this device's key under its member")
        participant = join_round(
            progress.task, invitation.round, member, identity, invitation.roster, rng=self._rng
        )
        joined = replace(progress, round_id=invitation.round.nonce, member=member)
        self._say("enrol", participant, participant.enrol(), joined)
        return True

    def _answer(self, phase: str, told: bytes) -> None:
        participant = self._take_participant()
        if phase == "share":
            message = participant.share(told)
        elif phase == "mask":
            if self.make_table is None:
                raise SpecError("this device's values are needed to mask them; join with them")
            message = participant.mask(told, self.make_table(self._rng))
        elif phase == "ack":
            message = participant.acknowledge(told)
        elif self._progress.semi_malicious:  # it knows the survivors: it signed them
            message = participant.unmask(participant.survivors, told)
        else:
            message = participant.unmask(told)
        self._say(phase, participant, message, self._progress)

    def _say(
        self, phase: str, participant: Participant, message: bytes, progress: _Progress
    ) -> None:
        """Keep a message, and what its next one depends on, before it can leave."""
        self._keep(
            replace(progress, stage=f"say {phase}", participant=participant.to_json()),
            message,
            contributes=phase == "mask",
        )
        self._participant = participant

    def _take_participant(self) -> Participant:
        """The participant, to change and to keep. Until it is kept the one in the box counts, and
        the next try begins with it."""
        participant, self._participant = self._participant, None
        return participant or Participant.from_json(self._progress.participant)

    def _refused(self, stage: str, answer: Response) -> None:
        code, self.problem = problem_of(answer)
        if stage == "join":
            self._end(Joined.NOT_NEEDED)
        elif stage == "wait" and code not in ("round-lost", "round-over"):
            given_up = code == "round-aborted" or self._progress.round_id != ""
            self._end(Joined.ABORTED if given_up else Joined.NOT_NEEDED)
        elif code == "round-aborted" and stage in ("say enrol", "hear share"):
            # It may be put back to wait; what it was in the round is forgotten.
            self._participant = None
            self._keep(replace(self._progress, stage="wait", member=0, participant=""), b"")
        elif code in ("round-lost", "round-over"):
            self._end(Joined.LOST if stage in _SENT else Joined.LATE)
        else:
            # What a collector says that follows the protocol is so: the table is in no sum. One
            # that need not follow it may say so of a table that it goes on to open.
            believed = not self._progress.semi_malicious and code in _NOT_IN_A_SUM
            self._end(
                Joined.ABORTED if code == "round-aborted" else Joined.LATE,
                take_back=believed and stage in ("say mask", "hear unmask"),
            )

    def _keep(self, progress: _Progress, message: bytes, *, contributes: bool = False) -> None:
        text = progress.to_json()
        with self._changing() as state:
            self._check_alone()
            if contributes:  # asked again: another study may have been answered since it began
                if not state.may_contribute(progress.offer, progress.task):
                    raise MismatchError(
                        "a device must be in one cohort of a campaign, a task once, and no more "
                        "tasks of a study than agreed; this table would be one too many"
                    )
                state.contribute(progress.offer, progress.task).tasks.add(progress.task.id)
            self._box.keep_round(self._study, text, message)
        self._progress, self._text, self._message = progress, text, message

    def _end(self, outcome: Joined, *, take_back: bool = False) -> None:
        """Forget the round; with `take_back` it does not count as a contribution."""
        task = self._progress.task
        with self._changing() as state:
            self._check_alone()
            if take_back:
                state.take_back(self._progress.offer, task)
            self._box.drop_round(self._study)
        self._participant, self.outcome = None, outcome

    def _check_alone(self) -> None:
        kept = self._box.round(self._study)
        if kept is None or kept[0] != self._text:
            raise SpecError("another program has gone on with this device's round, or left it")

    def __repr__(self) -> str:  # never a secret
        return f"Part({self._progress.stage})"


def drive(
    part: Part,
    send: Send,
    chance: Callable[[], float],
    *,
    patience_seconds: float = PATIENCE_SECONDS,
    cohort_seconds: float = math.inf,
    pause: Callable[[float], None] = time.sleep,
) -> Joined:
    """Ask and hear until it is over, or the collector has not answered for so long, or told nothing
    new in a phase, or there is no round after `cohort_seconds`.

    After a failure it waits for a time that doubles and is drawn by `chance`, in [0, 1), and no
    less than the collector asks for.
    """
    until, failures = time.monotonic() + patience_seconds, 0
    joining_until = time.monotonic() + cohort_seconds
    while part.outcome is None:
        if part.phase == "wait" and time.monotonic() > joining_until:
            return Joined.WAITING
        asked, status = part.request(), 0
        try:
            answer = send(asked.method, asked.path, asked.body, asked.headers)
            status, moved = answer.status, part.hear(answer)
        except ServiceError:
            moved = False
        if moved or (status == 204 and part.phase == "wait"):
            until, failures = time.monotonic() + patience_seconds, 0
        elif time.monotonic() > until:
            return Joined.UNREACHABLE
        elif status == 204:  # it was waited for
            failures = 0
        else:
            failures += 1
            most = min(FIRST_PAUSE * 2.0 ** min(failures - 1, 32), LONGEST_PAUSE)
            pause(part.retry_after_seconds + most * chance())
    return part.outcome
