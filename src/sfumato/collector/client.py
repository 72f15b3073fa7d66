"""A client for administrators and analysts of a collector, which the command line uses.

It does not need the packages of the service.
"""

from __future__ import annotations

import http.client
import json
import math
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pyarrow as pa

from sfumato import files
from sfumato.collector.problems import error_of
from sfumato.device import passcodes
from sfumato.device.client import is_loopback
from sfumato.errors import ServiceError, SpecError, StudyError
from sfumato.study import Study

TIMEOUT_SECONDS = 600  # planning a study with millions of items takes minutes


class AdminClient:
    """A client for a remote collector. Each method is one request, and raises if it is refused.

    The errors are those that the same functions raise locally: StudyError, ImpossibleError,
    BudgetError, StoreError; NotReadyError for a release still to come, ServiceError for the rest.
    """

    def __init__(
        self,
        server: str,
        token: str,
        *,
        ca: Path | str | None = None,
        plain_http: bool = False,
    ) -> None:
        """`ca` is a file of certificates to trust besides the system's; the token is sent over
        plain http to this machine only, unless `plain_http` says that the network is safe."""
        try:
            parts = urlsplit(server)
            _ = parts.port  # raises if it is no port
        except ValueError:
            parts = urlsplit("")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise SpecError(f"a server must be https://HOST[:PORT] or http://…; got {server}")
        if parts.scheme == "http" and not (plain_http or is_loopback(parts.hostname)):
            raise SpecError(
                f"a token is not sent to {parts.hostname} over plain http",
                hint="use https://, or --plain-http if the network is safe",
            )
        if not token.isascii() or not token.isprintable():
            raise SpecError("a token must be printable ASCII characters", hint=_TOKEN_HINT)
        self._parts, self._token, self._ca = parts, token, ca

    def me(self) -> dict[str, Any]:
        return self._ask("GET", "/v1/me")

    def plan(self, request: Mapping[str, Any]) -> dict[str, Any]:
        return self._ask("POST", "/v1/plan", request)

    def create_study(self, request: Mapping[str, Any]) -> dict[str, Any]:
        return self._ask("POST", "/v1/studies", request)

    def studies(self) -> list[dict[str, Any]]:
        return list(self._ask("GET", "/v1/studies")["studies"])

    def study(self, study_id: str) -> dict[str, Any]:
        return self._ask("GET", f"/v1/studies/{_safe(study_id)}")

    def close_study(self, study_id: str) -> dict[str, Any]:
        return self._ask("POST", f"/v1/studies/{_safe(study_id)}/close")

    def replace_passcode(self, study_id: str, passcode: str) -> dict[str, Any]:
        """Let devices in with this passcode only. Just its digest is sent."""
        digest = passcodes.digest(passcode).hex()
        path = f"/v1/studies/{_safe(study_id)}/passcode"
        return self._ask("PUT", path, {"passcode_digest": digest})

    def retry_study(self, study_id: str) -> dict[str, Any]:
        return self._ask("POST", f"/v1/studies/{_safe(study_id)}/retry")

    def delete_study(self, study_id: str) -> dict[str, Any]:
        return self._ask("DELETE", f"/v1/studies/{_safe(study_id)}")

    def release(self, study_id: str) -> dict[str, Any]:
        return self._ask("GET", f"/v1/studies/{_safe(study_id)}/release")

    def model(self, study_id: str) -> bytes:
        """The parameters of a released model: float32 numbers, little-endian."""
        return self._fetch("GET", f"/v1/studies/{_safe(study_id)}/model")

    def ledger(self) -> dict[str, Any]:
        return self._ask("GET", "/v1/ledger")

    def id_of(self, study: str) -> str:
        """The id of a study, from its id or its name."""
        rows = self.studies()
        for key in ("id", "name"):
            if ids := [row["id"] for row in rows if row[key] == study]:
                return str(ids[0])
        raise SpecError(f"there is no study {study!r}", hint="sfumato study list shows all studies")

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        answer = _parse(self._fetch(method, path, body))
        if not isinstance(answer, dict):
            raise error_of(200, answer)
        return answer

    def _fetch(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        data = None if body is None else json.dumps(body, ensure_ascii=False).encode()
        headers = {"Authorization": f"Bearer {self._token}", "Accept": "application/json"}
        if data is not None:
            headers["Content-Type"] = "application/json"
        connection = self._connection()
        try:
            connection.request(method, self._parts.path.rstrip("/") + path, data, headers)
            response = connection.getresponse()
            status, content = response.status, response.read()
        except (OSError, http.client.HTTPException) as problem:
            raise ServiceError(
                f"the collector at {self._parts.netloc} cannot be reached: {_reason(problem)}",
                hint="check the address (--server or SFUMATO_SERVER), and that it runs",
            ) from problem
        finally:
            connection.close()
        if status >= 300:
            raise error_of(status, _parse(content))
        return content

    def _connection(self) -> http.client.HTTPConnection:
        host, port = self._parts.hostname or "", self._parts.port
        if self._parts.scheme == "http":
            return http.client.HTTPConnection(host, port, timeout=TIMEOUT_SECONDS)
        try:
            context = ssl.create_default_context()
            if self._ca is not None:
                context.load_verify_locations(cafile=str(self._ca))
        except (OSError, ssl.SSLError) as problem:
            raise SpecError(f"the certificates {self._ca} cannot be read") from problem
        return http.client.HTTPSConnection(host, port, timeout=TIMEOUT_SECONDS, context=context)

    def __repr__(self) -> str:  # never the token
        return f"AdminClient({self._parts.netloc})"


_TOKEN_HINT = "set SFUMATO_TOKEN to the output of sfumato token create"  # noqa: S105  # no token


def study_keys(path: Path | str) -> dict[str, Any]:
    """The `study` and `items` of a request, from a study file and the dictionary that it names."""
    study = Study.load(path)
    keys = study.to_dict()
    dictionary = keys.pop("dictionary", None)
    column = keys.pop("dictionary_column", None)
    items = None
    if dictionary is None and study.facts.dictionary == "listed":
        raise StudyError(
            f"{study.question} need a list of items, the study's dictionary; got none",
            hint='set dictionary = "FILE" in the study',
        )
    if dictionary is not None:
        name = column or files.column_names(dictionary)[0]
        batches = files.read_columns(dictionary, [name], [pa.string()])
        items = [item for batch in batches for item in batch.column(0).to_pylist()]
        if None in items:
            raise StudyError(f"the dictionary {dictionary} has a missing item")
    for name, value in keys.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise StudyError(f"{name} must be finite; got {value}")
    return {"study": keys, "items": items}


def _parse(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return None


def _safe(study_id: str) -> str:
    return quote(study_id, safe="")


def _reason(problem: Exception) -> str:
    text = getattr(problem, "strerror", None) or str(problem) or type(problem).__name__
    return text[:200]
