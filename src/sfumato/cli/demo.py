"""The demo: a collector, a fleet of devices that talk to it over HTTP, three studies at once.

Everything is real except the people: the collector is a separate process with an embedded store,
each device is a `device.Device` that takes part in all three studies, and they communicate over
loopback HTTP. Time is simulated, so that records need not wait for the end of the day.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from sfumato.collector import keys, tokens
from sfumato.collector.client import AdminClient
from sfumato.collector.settings import Settings
from sfumato.collector.store.store import Store
from sfumato.device import offers
from sfumato.errors import ServiceError
from sfumato.flow.release import CountRelease
from sfumato.simulation.network_fleet import NetworkFleet

TIMEOUT_SECONDS = 600.0  # how long to wait for a study's release
Progress = Callable[[str, str, float], None]  # gets a study's name, its stage and its progress

EMOJI = [
    "😂", "❤️", "😭", "😍", "🙏", "🔥", "😊", "👍", "🥰", "✨", "🤔", "😎", "🎉",
    "💯", "🙄", "😅", "🌹", "👏", "💀", "🍀", "🦊", "🎨", "🧀", "🚲", "🪁",
]  # fmt: skip
WORDS = [
    "sfumato", "impasto", "gesso", "ochre", "umber", "sienna", "vellum", "easel", "canvas",
    "pigment", "fresco", "tempera", "stipple", "glaze", "scumble", "varnish", "palette",
]  # fmt: skip
APPS = [f"{name}-{kind}" for name in ("maps", "mail", "music", "notes") for kind in "abcdefgh"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A study of the demo, with the devices' data."""

    name: str
    purpose: str
    study: Mapping[str, Any]
    items: Sequence[str] | None
    values: Sequence[str]  # one per device

    @property
    def truth(self) -> Counter[str]:
        return Counter(self.values)


@dataclass(frozen=True, slots=True)
class Answer:
    """The release of a question, and how long it took."""

    question: Question
    release: CountRelease
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.question.name,
            "release": self.release.to_dict(),
            "truth": dict(self.question.truth),
            "seconds": round(self.seconds, 3),
        }


def questions(devices: int, seed: int) -> tuple[Question, ...]:
    """Emoji and new words with local privacy; apps, where the collector sees only masked sums."""
    rng = np.random.default_rng(seed)

    def draw(items: Sequence[str], exponent: float) -> list[str]:
        shares = np.arange(1, len(items) + 1, dtype=np.float64) ** -exponent
        return [str(item) for item in rng.choice(items, size=devices, p=shares / shares.sum())]

    return (
        Question(
            name="Popular emoji",
            purpose="Which emoji to put first on the keyboard.",
            study={"question": "frequencies", "trust": "local", "epsilon": 4.0, "devices": devices},
            items=EMOJI,
            values=draw(EMOJI, 1.0),
        ),
        Question(
            name="New words",
            purpose="Which words the dictionary lacks.",
            study={
                "question": "new_words",
                "trust": "local",
                "epsilon": 6.0,
                "devices": devices,
                "word_length": 8,
            },
            items=None,
            values=draw(WORDS, 1.0),
        ),
        Question(
            name="Crashing apps",
            purpose="Which app to fix first.",
            study={
                "question": "frequencies",
                "trust": "secure",
                "epsilon": 1.0,
                "delta": 1e-6,
                "devices": devices // 4,
                "dropout": 0.05,
            },
            items=APPS,
            values=draw(APPS, 0.8)[: devices // 4],  # masks take most of a demo's time
        ),
    )


class Demo:
    """A running collector, and studies on it."""

    def __init__(self, server: str, key: bytes, token: str) -> None:
        self.server, self.token, self._key = server, token, key
        self._admin = AdminClient(server, token)

    @property
    def dashboard(self) -> str:
        return f"{self.server}/dashboard"

    def run(self, questions: Sequence[Question], progress: Progress) -> list[Answer]:
        """Ask all questions at once; the answers are in the same order."""
        ids = [self._create(question, progress) for question in questions]
        with ThreadPoolExecutor(len(questions)) as threads:
            jobs = [
                threads.submit(self._ask, question, study_id, progress)
                for question, study_id in zip(questions, ids, strict=True)
            ]
            return [job.result() for job in jobs]

    def _create(self, question: Question, progress: Progress) -> str:
        progress(question.name, "planning", 0.0)
        row = self._admin.create_study(
            {
                "name": question.name,
                "purpose": question.purpose,
                "study": dict(question.study),
                "items": None if question.items is None else list(question.items),
                "delay_seconds": 3600,
            }
        )
        return str(row["id"])

    def _ask(self, question: Question, study_id: str, progress: Progress) -> Answer:
        started = time.perf_counter()
        with NetworkFleet(
            self.server, self._key, [[value] for value in question.values], connections=8
        ) as fleet:
            fleet.ask(
                question.name,
                progress=lambda stage, share: progress(question.name, f"asking, {stage}", share),
            )
        progress(question.name, "waiting for the release", 1.0)
        release = self._wait_for_release(study_id)
        progress(question.name, "released", 1.0)
        return Answer(question, release, time.perf_counter() - started)

    def _wait_for_release(self, study_id: str) -> CountRelease:
        """Close the study, if it is still open, and wait for its release."""
        until = time.monotonic() + TIMEOUT_SECONDS
        self._admin.close_study(study_id)
        while (state := self._admin.study(study_id))["state"] not in ("released", "failed"):
            if time.monotonic() > until:
                raise ServiceError(
                    f"the study {state['name']!r} must be released within {TIMEOUT_SECONDS:g} "
                    f"seconds; it is still {state['state']}",
                    hint=(state["fault"] or {}).get("problem", "try again with fewer --devices"),
                )
            time.sleep(0.1)
        if state["state"] == "failed":
            raise ServiceError(f"the study {state['name']!r} failed: {state['problem']}")
        return CountRelease.from_dict(self._admin.release(study_id))


@contextmanager
def collector(folder: Path) -> Iterator[Demo]:
    """Start a collector with its store in a folder, as `sfumato serve` does, and a token for it."""
    importlib.import_module("sfumato.collector.serve")  # if an extra is missing, fail here
    store = Store.open(str(folder / "collector.db"))
    store.migrate()
    _, token = tokens.create(store, name="demo", role="admin", days=1)
    store.close()
    log = folder / "collector.log"
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("SFUMATO_")
    } | {"SFUMATO_REPORTS_PER_SECOND": "1000000"}  # its devices send those of days at once
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "sfumato", "serve", "--store", "collector.db", "--port", "0"],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )

    def stop(number: int, frame: object) -> NoReturn:
        process.terminate()  # first, so that devices that wait for it give up
        sys.exit(128 + number)

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        assert process.stdout is not None  # it is a pipe
        line = process.stdout.readline()
        if not line.startswith("listening on "):
            raise ServiceError("the collector did not start", hint=f"{log} says why")
        key = keys.read(folder / Settings().signing_key)
        yield Demo(line.split()[-1], offers.public_key(key), token)
    finally:
        signal.signal(signal.SIGTERM, previous)
        process.terminate()
        process.wait(timeout=60)
        if process.stdout is not None:
            process.stdout.close()
