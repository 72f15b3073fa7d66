"""What a device asks of a collector, over any `Send`: offers, dictionaries, models, room for
reports."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from sfumato.device.transport import Response, Send
from sfumato.errors import OfferError, ServiceError
from sfumato.flow.model_terms import ModelTerms, digest_of
from sfumato.flow.report import LENGTH_BYTES, Report, to_frames

MOST_REPORTS = 10_000  # of one upload
MOST_BYTES = 1 << 22
LONGEST_ASKED = 7 * 86_400  # seconds that a collector may ask a device to wait
_OVER = {(404, "unknown-task"), (410, "task-closed")}


@dataclass(frozen=True, slots=True)
class Upload:
    """What became of some reports. `stored`: the collector has them, but for those rejected."""

    stored: bool
    rejected: int = 0
    is_over: bool = False  # the task takes no more
    retry_after_seconds: int = 0


@dataclass(frozen=True, slots=True)
class Dictionary:
    """A list of items by its digest, which says what is in it."""

    digest: str
    body: bytes = field(compare=False, repr=False)

    def places(self) -> dict[str, int]:
        """The place of each item in the list."""
        return _places(self)


def fetch_offers(send: Send) -> list[Any]:
    """The envelopes of all open tasks, as they came: nothing is verified yet."""
    answer = _expect(send("GET", "/v1/offers", b"", {}))
    try:
        envelopes = json.loads(answer.body)["offers"]
    except (ValueError, LookupError, TypeError, RecursionError):
        envelopes = None
    if not isinstance(envelopes, list):
        raise ServiceError("the collector's offers cannot be read", hint="check its address")
    return envelopes


def fetch_dictionary(send: Send, digest: str) -> Dictionary:
    """The dictionary of this digest; another body is refused."""
    body = _expect(send("GET", f"/v1/dictionaries/{digest}", b"", {})).body
    if hashlib.sha256(body).hexdigest() != digest:
        raise OfferError("a dictionary must have the digest that the offer names; got another")
    dictionary = Dictionary(digest, body)
    dictionary.places()
    return dictionary


def fetch_model(send: Send, terms: ModelTerms) -> bytes:
    """The parameters that these terms name; another body is refused."""
    body = _expect(send("GET", f"/v1/models/{terms.digest}", b"", {})).body
    if len(body) != terms.size or digest_of(body) != terms.digest:
        raise OfferError("a model must have the size and the digest that the offer names")
    return body


def upload(send: Send, task_id: str, reports: Sequence[Report]) -> Upload:
    """Send reports in one body, of which `in_uploads` says how many fit."""
    body = to_frames(report.to_bytes() for report in reports)
    answer = send("POST", f"/v1/tasks/{task_id}/reports", body, {})
    if answer.status in (200, 201):
        return Upload(stored=True, rejected=_rejected(answer))
    return Upload(
        stored=False,
        is_over=(answer.status, problem_of(answer)[0]) in _OVER,
        retry_after_seconds=retry_after(answer),
    )


def in_uploads(reports: Sequence[Report]) -> Iterator[Sequence[Report]]:
    """The reports of one task in as many pieces as bodies take."""
    start, size = 0, 0
    for place, report in enumerate(reports):
        more = LENGTH_BYTES + len(report.to_bytes())
        if place > start and (size + more > MOST_BYTES or place - start == MOST_REPORTS):
            yield reports[start:place]
            start, size = place, 0
        size += more
    if start < len(reports):
        yield reports[start:]


@lru_cache(maxsize=4)
def _places(dictionary: Dictionary) -> dict[str, int]:
    try:
        items = [json.loads(line) for line in dictionary.body.split(b"\n") if line]
    except (ValueError, RecursionError):
        items = [None]
    if not all(isinstance(item, str) for item in items) or len(set(items)) < len(items):
        raise OfferError("a dictionary must have one text a line, each once; got something else")
    return {item: place for place, item in enumerate(items)}


def _expect(answer: Response) -> Response:
    if answer.status != 200:
        raise ServiceError(
            f"the collector answered {answer.status}", hint="check its address; try again later"
        )
    return answer


def _rejected(answer: Response) -> int:
    try:
        counts = json.loads(answer.body).get("rejected", {}).values()
        return sum(int(count) for count in counts)
    except (ValueError, AttributeError, TypeError, RecursionError):
        return 0


def problem_of(answer: Response) -> tuple[str, str]:
    """The code of a problem, and what it says; a 410 without one is a task that is over."""
    try:
        told = json.loads(answer.body)
        code, said = told.get("code"), told.get("detail") or told.get("title")
    except (ValueError, AttributeError, RecursionError):
        code = said = None
    if code is None and answer.status == 410:
        code = "task-closed"
    return str(code), str(said or f"the collector answered {answer.status}")


def retry_after(answer: Response) -> int:
    """Seconds for which the collector asks to be left alone."""
    text = answer.headers.get("retry-after", "")
    return min(int(text[:9]), LONGEST_ASKED) if text.isascii() and text.isdigit() else 0
