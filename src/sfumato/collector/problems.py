"""Problems that the service answers with: one table, read in both directions.

A problem is sent as `application/problem+json` with `status`, `code`, `title` (the sentence of the
table) and, if there is more to say, `detail` and `hint`. The service finds the code of an error by
its class; a client finds the class of a code and raises the same error again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from starlette.responses import JSONResponse

from sfumato.errors import (
    BudgetError,
    DataError,
    ImpossibleError,
    NotReadyError,
    ServiceError,
    SfumatoError,
    SpecError,
    StoreDamaged,
    StoreError,
    StoreFull,
    StoreReadOnly,
    StoreUnavailable,
)

MEDIA_TYPE = "application/problem+json"


@dataclass(frozen=True, slots=True)
class Kind:
    """A row of the table. `error` is the class that a client raises."""

    status: int
    title: str
    error: type[SfumatoError] = ServiceError


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "malformed-upload": Kind(400, "the body is not a sequence of framed reports"),
        "malformed-join": Kind(400, "the body is not a public key of 32 bytes"),
        "malformed-request": Kind(400, "the body is not the JSON that this address takes"),
        "unauthorized": Kind(401, "this needs a valid token"),
        "forbidden": Kind(403, "the role of this token does not allow this"),
        "wrong-ticket": Kind(403, "this is not the ticket of that member"),
        "wrong-passcode": Kind(403, "only devices with the passcode of this study take part in it"),
        "not-found": Kind(404, "there is nothing at this address"),
        "unknown-task": Kind(404, "there is no such task"),
        "unknown-study": Kind(404, "there is no such study"),
        "unknown-round": Kind(404, "there is no such round"),
        "unknown-dictionary": Kind(404, "there is no such dictionary"),
        "unknown-model": Kind(404, "there is no such model, or its round is over"),
        "no-model": Kind(404, "this study trains no model"),
        "not-ready": Kind(404, "this study has no release yet", NotReadyError),
        "method-not-allowed": Kind(405, "this address does not take that method"),
        "too-slow": Kind(408, "the body did not arrive in time"),
        "name-taken": Kind(409, "another study has this name"),
        "wrong-state": Kind(409, "the state of this study does not allow this"),
        "key-taken": Kind(409, "this key, or this ticket, has joined before"),
        "masked-task": Kind(
            409, "this task is answered in the other way: by reports, or in masked rounds"
        ),
        "wrong-phase": Kind(409, "the round is not in this phase"),
        "equivocating": Kind(409, "this member has sent another message in this phase"),
        "message-refused": Kind(409, "the member's message was not accepted"),
        "budget-refused": Kind(409, "the privacy budget does not allow this", BudgetError),
        "task-closed": Kind(410, "this task takes no more reports"),
        "ticket-over": Kind(410, "this ticket does not wait for a round any more"),
        "round-aborted": Kind(410, "this round was aborted, and nothing of it was opened"),
        "round-lost": Kind(410, "this round was aborted when its sum was about to be opened"),
        "round-over": Kind(410, "this round is over"),
        "too-large": Kind(413, "the body is larger than this address takes"),
        "invalid-study": Kind(422, "the study is not valid", SpecError),
        "invalid-items": Kind(422, "the items are not a valid dictionary", DataError),
        "impossible-study": Kind(
            422, "no plan meets the requirements of the study", ImpossibleError
        ),
        "busy": Kind(429, "reports arrive faster than they can be stored"),
        "internal": Kind(500, "something is wrong with the service; its log says what"),
        "store-damaged": Kind(
            500, "what the store has of this is damaged; sfumato check says more", StoreDamaged
        ),
        "store-unavailable": Kind(503, "the store does not answer", StoreUnavailable),
        "store-read-only": Kind(503, "the store cannot be written", StoreReadOnly),
        "worker-failing": Kind(503, "the worker's last step failed; the log says why"),
        "stopping": Kind(503, "the service is stopping"),
        "store-full": Kind(507, "the store has no room left", StoreFull),
    }
)
_CODES = {kind.error: code for code, kind in KINDS.items() if kind.error is not ServiceError} | {
    StoreError: "store-unavailable"  # for errors of a store without a code of their own
}


class Problem(SfumatoError):  # noqa: N818  # RFC 9457 calls it so
    """An answer that is a problem, by its code in the table."""

    def __init__(
        self,
        code: str,
        detail: str | None = None,
        *,
        hint: str | None = None,
        retry_after_seconds: int | None = None,
    ) -> None:
        super().__init__(detail or KINDS[code].title, hint=hint)
        self.code = code
        self.detail = detail
        self.retry_after_seconds = retry_after_seconds

    @property
    def status(self) -> int:
        return KINDS[self.code].status

    @classmethod
    def of(cls, error: SfumatoError) -> Problem:
        """The problem for an error; for one that is not in the table it gives no details."""
        if isinstance(error, Problem):
            return error
        for parent in type(error).__mro__:
            if code := _CODES.get(parent):
                # Messages of stores may name files and hosts; they are for the log only.
                is_store = issubclass(parent, StoreError)
                return cls(
                    code,
                    None if is_store else str(error),
                    hint=None if is_store else error.hint,
                    retry_after_seconds=5 if KINDS[code].status == 503 else None,
                )
        return cls("internal")

    def body(self) -> dict[str, Any]:
        texts = {"detail": self.detail, "hint": self.hint}
        return {
            "status": self.status,
            "code": self.code,
            "title": KINDS[self.code].title,
            **{name: text for name, text in texts.items() if text is not None},
        }

    def headers(self) -> dict[str, str]:
        headers = {"Content-Type": MEDIA_TYPE}
        if self.retry_after_seconds is not None:
            headers["Retry-After"] = str(self.retry_after_seconds)
        if self.code == "unauthorized":
            headers["WWW-Authenticate"] = "Bearer"
        if self.code == "too-slow":
            headers["Connection"] = "close"
        return headers


def problem_response(problem: Problem) -> JSONResponse:
    return JSONResponse(problem.body(), problem.status, problem.headers())


def error_of(status: int, body: Any) -> SfumatoError:
    """The error that a client raises for an answer."""
    code = body.get("code") if isinstance(body, Mapping) else None
    kind = KINDS.get(code) if isinstance(code, str) else None
    if kind is None:
        return ServiceError(
            f"the server answered {status}, but not as a collector does",
            hint="check the address",
        )
    detail, hint = (body.get(name) for name in ("detail", "hint"))
    return kind.error(
        detail if isinstance(detail, str) else kind.title,
        hint=hint if isinstance(hint, str) else None,
    )
