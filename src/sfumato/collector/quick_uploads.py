"""Uploads of which there is nothing to say but that they are stored: nearly all that come."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from starlette.types import ASGIApp

from sfumato.collector.connection import Answer, plain
from sfumato.collector.http.service import Service
from sfumato.collector.http.task_cache import OpenTask, task_closed
from sfumato.collector.logs import log_error
from sfumato.collector.problems import ALWAYS, Problem, problem_response
from sfumato.collector.usual import length_of
from sfumato.errors import SfumatoError

_UPLOAD = re.compile("/v1/tasks/([0-9a-f]{64})/reports")
_MOST_COUNTERS = 1_000
_MOST_BYTES = 1 << 16  # longer ones are looked at in a thread
_STORED = plain("201 Created", b"{}", {"content-type": "application/json", **ALWAYS})


class QuickUploads:
    """A short cut for them (see `connection`). Whatever is unusual goes the long way, to the route:
    a task that is not known, a report to reject, a full queue.

    Claim: what is answered is what the route would have answered.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._most_bytes = min(_MOST_BYTES, service.settings.upload_bytes)
        self._count_stored = service.metrics.counter("sfumato_uploads_total", code="201")
        self._count_reports: dict[str, Callable[[float], None]] = {}  # by study

    def may_take(self, scope: Mapping[str, Any]) -> bool:
        if scope["method"] != "POST" or not _UPLOAD.fullmatch(scope["path"]):
            return False
        return 0 < length_of(scope) <= self._most_bytes

    def leave(self, scope: Mapping[str, Any]) -> None:
        """Nothing is kept for it."""

    def take(self, scope: Mapping[str, Any], body: bytes | bytearray, answer: Answer) -> bool:
        service, found = self._service, _UPLOAD.fullmatch(scope["path"])
        reports = bytes(body)
        task = service.tasks.known(found[1]) if found else None
        if task is None or task.admission is None:
            return False
        count = task.admission.all_good(reports)
        if not 0 < count <= service.settings.upload_reports:
            return False
        try:
            service.uploads.check_room()  # before the rate is charged
            task.bucket.take(count)
            service.uploads.hand_over(
                task.id,
                count,
                reports,
                service.bridge.bring(lambda stored: answer(self._outcome(task, count, stored))),
            )
        except Problem:
            return False  # the route says which
        return True

    def _outcome(self, task: OpenTask, count: int, stored: bool | BaseException) -> bytes | ASGIApp:
        metrics = self._service.metrics
        if stored is True:
            self._counter(task.study_id)(count)
            self._count_stored(1)
            return _STORED
        if stored is False:
            problem = task_closed()
        elif isinstance(stored, SfumatoError):
            problem = Problem.of(stored)
        else:
            log_error("internal", stored)
            problem = Problem("internal")
        metrics.add("sfumato_uploads_total", code=str(problem.status))
        return problem_response(problem)

    def _counter(self, study_id: str) -> Callable[[float], None]:
        if study_id not in self._count_reports:
            if len(self._count_reports) >= _MOST_COUNTERS:
                self._count_reports.clear()
            self._count_reports[study_id] = self._service.metrics.counter(
                "sfumato_reports_total", study=study_id, outcome="stored"
            )
        return self._count_reports[study_id]
