"""Somebody at a screen: what goes wrong on it is collected, and must be nothing."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from browsing import Stage
from sfumato.dashboard import sessions

if TYPE_CHECKING:  # where there is no browser, tests are skipped and not in error
    from playwright.sync_api import BrowserContext, Page

PATIENCE = 20_000.0  # milliseconds: a first plan imports what it needs
AXE = Path(__file__).parent / "axe.min.js"
WATCH = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => {
  window.violations.push(`${event.violatedDirective}: ${event.blockedURI} ${event.sample}`);
});
"""


@dataclass
class Screen:
    """A page in a browser, and what went wrong on it."""

    context: BrowserContext
    page: Page
    stage: Stage
    wrong: list[str] = field(default_factory=list)

    def watch(self, page: Page) -> None:
        page.on("pageerror", lambda error: self.wrong.append(f"script: {error}"))
        page.on("request", lambda request: self._see(request.url))
        page.on("console", lambda message: self._hear(message.type, message.text))

    def open(self, path: str) -> None:
        self.page.goto(f"{self.stage.address}{path}")

    def enter(self) -> None:
        """Be signed in, without having seen the form."""
        name, _ = sessions.start(self.stage.collector.store, self.stage.token(), now=time.time())
        self.context.add_cookies(
            [{"name": sessions.COOKIE, "value": name, "url": f"{self.stage.address}/dashboard"}]
        )

    def sign_in(self, token: str | None = None) -> None:
        self.open("/dashboard/sign-in")
        self.page.get_by_label("Token").fill(token or self.stage.token())
        self.page.get_by_role("button", name="Sign in").click()

    def _see(self, url: str) -> None:
        if not url.startswith((f"{self.stage.address}/", "data:", "blob:")):
            self.wrong.append(f"request to {url}")

    def _hear(self, kind: str, text: str) -> None:
        if kind == "error" and "Failed to load resource" not in text:  # a status is no error here
            self.wrong.append(f"console: {text}")
