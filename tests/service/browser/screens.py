"""A page in a browser that collects everything that goes wrong on it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from browsing import Stage
from sfumato.dashboard import sessions

if TYPE_CHECKING:  # without a browser, tests are skipped
    from playwright.sync_api import BrowserContext, Page

TIMEOUT = 20_000.0  # in milliseconds; the first plan imports much
AXE = Path(__file__).parent / "axe.min.js"
WATCH = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => {
  window.violations.push(`${event.violatedDirective}: ${event.blockedURI} ${event.sample}`);
});
"""


@dataclass
class Screen:
    """A page in a browser, and the errors on it."""

    context: BrowserContext
    page: Page
    stage: Stage
    errors: list[str] = field(default_factory=list)

    def watch(self, page: Page) -> None:
        page.on("pageerror", lambda error: self.errors.append(f"script: {error}"))
        page.on("request", lambda request: self._check_url(request.url))
        page.on("console", lambda message: self._check_message(message.type, message.text))

    def open(self, path: str) -> None:
        self.page.goto(f"{self.stage.address}{path}")

    def enter(self) -> None:
        """Sign in without the form."""
        name, _ = sessions.start(self.stage.collector.store, self.stage.token(), now=time.time())
        self.context.add_cookies(
            [{"name": sessions.COOKIE, "value": name, "url": f"{self.stage.address}/dashboard"}]
        )

    def sign_in(self, token: str | None = None) -> None:
        self.open("/dashboard/sign-in")
        self.page.get_by_label("Token").fill(token or self.stage.token())
        self.page.get_by_role("button", name="Sign in").click()

    def _check_url(self, url: str) -> None:
        if not url.startswith((f"{self.stage.address}/", "data:", "blob:")):
            self.errors.append(f"request to {url}")

    def _check_message(self, kind: str, text: str) -> None:
        if kind == "error" and "Failed to load resource" not in text:  # an HTTP status is fine
            self.errors.append(f"console: {text}")
