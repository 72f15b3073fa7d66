"""A collector with its dashboard, devices that answer it over HTTP, and a browser to look at it."""

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

if TYPE_CHECKING:  # a browser is for some of the tests only
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
    """A collector that runs, and what a test does with it from outside."""

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
        told = {"name": name, "purpose": purpose, "study": study, "items": items}
        return str(self.client.create_study(told | (terms or {}))["id"])

    def answer(self, study: str, values: Sequence[str]) -> None:
        """Let a device hold each of these values, and send it in one upload with the others'."""
        task = self._task(study)
        frames = [self._report(task, value) for value in values]
        sent = serving.ask(self.address, "POST", f"/v1/tasks/{task.id}/reports", to_frames(frames))
        assert sent.status == 201, sent.body

    def state(self, study_id: str) -> str:
        return str(self.client.study(study_id)["state"])

    def finish(self, study_id: str, state: str = "released") -> None:
        """Close a study, and wait until it has come to this state."""
        self.client.close_study(study_id)
        serving.wait_for(lambda: self.state(study_id) == state, f"the study to be {state}")

    def offers(self) -> list[Offer]:
        """What devices are told."""
        told = serving.ask(self.address, "GET", "/v1/offers").json()["offers"]
        key = bytes.fromhex(self.collector.public_key)
        return [offers.verify(envelope, key) for envelope in told]

    def _task(self, study: str) -> LocalTask | Task | WordTask:
        (offer,) = [offer for offer in self.offers() if offer.study == study]
        return offer.task

    def _report(self, task: LocalTask | Task | WordTask, value: str) -> bytes:
        held: Any = TREES.index(value) if task.takes_categories() else value
        if isinstance(task, Task):
            return device.report(task, [held], rng=self._rng).to_bytes()
        assert isinstance(task, LocalTask)  # what the tests ask
        return device.local_report(task, [held], rng=self._rng).to_bytes()


@contextmanager
def staged(folder: Path, **settings: Any) -> Iterator[Stage]:
    """A collector with its dashboard, in a thread, while the block lasts."""
    with serve.running(serving.settings(folder, **settings), routes=ROUTES) as collector:
        yield Stage(collector)


def program() -> str:
    """A browser of this machine; LookupError says why there is none."""
    if importlib.util.find_spec("playwright") is None:
        raise LookupError("playwright is not installed")
    found = subprocess.run([ROOT / "scripts/browser"], capture_output=True, text=True, check=False)
    if found.returncode != 0:
        raise LookupError(f"scripts/browser found none: {found.stderr.strip()[-200:]}")
    return found.stdout.strip()


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser that runs while the block lasts; LookupError says why there is none."""
    path = program()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        try:
            yield opened
        finally:
            opened.close()


def held(counts: dict[str, int]) -> list[str]:
    """What devices hold, so many each."""
    return [value for value, count in counts.items() for _ in range(count)]


def falling(devices: int) -> dict[str, int]:
    """Trees, each less common than the one before; so many in all."""
    shares = [1 / (place + 2) for place in range(len(TREES))]
    counts = [round(devices * share / sum(shares)) for share in shares]
    counts[0] += devices - sum(counts)
    return dict(zip(TREES, counts, strict=True))
