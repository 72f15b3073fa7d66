"""A person who visits the dashboard, without a browser."""

from __future__ import annotations

import re
from typing import Any

import httpx

from browsing import Stage
from sfumato.collector.tokens import Role


class Visitor:
    """Keeps cookies, and sends forms as a page of the dashboard would."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.http = httpx.Client(base_url=stage.address, timeout=60)
        self.headers = {"Origin": stage.address}

    def get(self, path: str, **headers: str) -> httpx.Response:
        return self.http.get(path, headers=headers)

    def post(self, path: str, fields: dict[str, str], **options: Any) -> httpx.Response:
        """A form with the token of the session, unless the fields have one."""
        data = {"csrf": self.csrf(), **fields}
        return self.http.post(path, data=data, headers=self.headers, **options)

    def sign_in(self, token: str, **fields: str) -> httpx.Response:
        return self.http.post(
            "/dashboard/sign-in", data={"token": token, **fields}, headers=self.headers
        )

    def csrf(self) -> str:
        """The CSRF token of the session."""
        match = re.search(r'name="csrf" value="([0-9a-f]{64})"', self.get("/dashboard/costs").text)
        return match[1] if match else ""

    def close(self) -> None:
        self.http.close()


def sign_in_as(stage: Stage, role: Role = "admin") -> Visitor:
    visitor = Visitor(stage)
    answer = visitor.sign_in(stage.token(role))
    assert answer.status_code == 303, answer.text
    return visitor
