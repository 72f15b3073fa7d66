"""A collector with its dashboard, devices that report to it over HTTP, and a browser."""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import serving
from sfumato.collector import serve, tokens
from sfumato.collector.client import AdminClient
from sfumato.collector.tokens import Role
from sfumato.dashboard import ROUTES
from sfumato.device import offers
from sfumato.device.offers import Offer
from sfumato.flow import contribute as device
from sfumato.flow.report import to_frames
from sfumato.flow.task import LocalTask, Task
from sfumato.flow.word_discovery import WordTask
from sfumato.privacy import SeededRng

if TYPE_CHECKING:  # only some tests need a browser
    from playwright.sync_api import Browser

ROOT = Path(__file__).resolve().parents[1]
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
TREES = [
    *("oak", "beech", "lime", "maple", "ash", "birch", "elm", "poplar", "willow", "alder"),
    *("hornbeam", "rowan", "cherry", "plane", "chestnut", "walnut", "hazel", "holly", "yew"),
    *("cedar", "larch", "spruce", "pine", "fir", "robinia", "ginkgo", "mulberry", "acacia"),
]


class Stage:
    """A running collector, and what tests do with it from outside."""

    def __init__(self, collector: serve.CollectorServer) -> None:
        self.collector = collector
        self.address = collector.address
        self._rng = SeededRng(7)
        self.client = AdminClient(self.address, self.token())

    def token(self, role: Role = "admin", name: str = "Ada", days: int = 30) -> str:
        """A new token."""
        return tokens.create(self.collector.store, role=role, name=name, days=days)[1]

    def open(
        self,
        name: str,
        *,
        items: Sequence[str] | None = TREES,
        purpose: str = "Which trees to plant next.",
        terms: dict[str, Any] | None = None,
        **keys: Any,
    ) -> str:
        """The id of a new study."""
        study = {"question": "frequencies", "trust": "local", "epsilon": 4.0, **keys}
        request = {"name": name, "purpose": purpose, "study": study, "items": items}
        return str(self.client.create_study(request | (terms or {}))["id"])

    def answer(self, study: str, values: Sequence[str]) -> bytes:
        """Send one report for each of these values, all in one upload; its body."""
        task = self._task(study)
        frames = [self._report(task, value) for value in values]
        path = f"/v1/tasks/{task.id}/reports"
        body = to_frames(frames)
        answer = serving.ask(self.address, "POST", path, body)
        assert answer.status == 201, answer.body
        return body

    def state(self, study_id: str) -> str:
        return str(self.client.study(study_id)["state"])

    def finish(self, study_id: str, state: str = "released") -> None:
        """Close a study, and wait until it is in this state."""
        self.client.close_study(study_id)
        serving.wait_for(lambda: self.state(study_id) == state, f"the study to be {state}")

    def offers(self) -> list[Offer]:
        """The offers that devices get."""
        envelopes = serving.ask(self.address, "GET", "/v1/offers").json()["offers"]
        key = bytes.fromhex(self.collector.public_key)
        return [offers.verify(envelope, key) for envelope in envelopes]

    def _task(self, study: str) -> LocalTask | Task | WordTask:
        (offer,) = [offer for offer in self.offers() if offer.study == study]
        return offer.task

    def _report(self, task: LocalTask | Task | WordTask, value: str) -> bytes:
        item: Any = TREES.index(value) if task.takes_categories() else value
        if isinstance(task, Task):
            return device.report(task, [item], rng=self._rng).to_bytes()
        assert isinstance(task, LocalTask)  # the tests ask for no other
        return device.local_report(task, [item], rng=self._rng).to_bytes()


@contextmanager
def open_stage(folder: Path, **settings: Any) -> Iterator[Stage]:
    """A collector with its dashboard, running in a thread during the block."""
    with serve.running(serving.settings(folder, **settings), routes=ROUTES) as collector:
        yield Stage(collector)


def program() -> str:
    """The path of a browser on this machine; LookupError if there is none."""
    if importlib.util.find_spec("playwright") is None:
        raise LookupError("playwright is not installed")
    script = subprocess.run([ROOT / "scripts/browser"], capture_output=True, text=True, check=False)
    if script.returncode != 0:
        raise LookupError(f"scripts/browser found none: {script.stderr.strip()[-200:]}")
    return script.stdout.strip()


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser, running during the block; LookupError if there is none."""
    path = program()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        try:
            yield opened
        finally:
            opened.close()


def values_of(counts: dict[str, int]) -> list[str]:
    """The values of devices with these counts."""
    return [value for value, count in counts.items() for _ in range(count)]


def falling_counts(devices: int) -> dict[str, int]:
    """Counts of trees, each less common than the one before, for this many devices."""
    shares = [1 / (place + 2) for place in range(len(TREES))]
    counts = [round(devices * share / sum(shares)) for share in shares]
    counts[0] += devices - sum(counts)
    return dict(zip(TREES, counts, strict=True))
