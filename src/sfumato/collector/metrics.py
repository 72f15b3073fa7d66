"""Counters and gauges of one process, written as Prometheus reads them.

Nothing here is about a device: reports are counted by study and outcome, uploads by the status
that was answered. Whoever reads these numbers knows when: with a count of one they would say when
somebody's report came. So what devices make go up is published in steps, as the log counts reports
from 100 on (`logs.MANY`): rounded down to a multiple of its step, and not at all below the first.

    >>> metrics = Metrics()
    >>> metrics.add("sfumato_uploads_total", by=250, code="201")
    >>> metrics.add("sfumato_uploads_total", by=99, code="429")
    >>> print(metrics.text())
    # HELP sfumato_reports_total Reports by study and what became of them, in steps of 100.
    # TYPE sfumato_reports_total counter
    # HELP sfumato_uploads_total Uploads by the status that was answered, in steps of 100.
    # TYPE sfumato_uploads_total counter
    sfumato_uploads_total{code="201"} 200
    ...
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from types import MappingProxyType

MANY = 100  # the same as in the log
MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# name: type, help, labels
KNOWN: Mapping[str, tuple[str, str, tuple[str, ...]]] = MappingProxyType(
    {
        "sfumato_reports_total": (
            "counter",
            "Reports by study and what became of them, in steps of 100.",
            ("study", "outcome"),
        ),
        "sfumato_uploads_total": (
            "counter",
            "Uploads by the status that was answered, in steps of 100.",
            ("code",),
        ),
        "sfumato_round_messages_total": (
            "counter",
            "Messages of masked rounds by the status that was answered, in steps of 100.",
            ("code",),
        ),
        "sfumato_rounds_total": ("counter", "Masked rounds by how they ended.", ("outcome",)),
        "sfumato_commits_total": (
            "counter",
            "Transactions that stored uploads, in steps of 100.",
            (),
        ),
        "sfumato_commit_seconds_total": (
            "counter",
            "Time that those transactions took, in whole seconds.",
            (),
        ),
        "sfumato_worker_errors_total": ("counter", "Steps of the worker that failed.", ()),
        "sfumato_queue_bytes": ("gauge", "Bytes that wait to be stored, in steps of 8 MiB.", ()),
        "sfumato_queue_uploads": ("gauge", "Uploads that wait to be stored, in steps of 100.", ()),
        "sfumato_worker_last_success_age_seconds": (
            "gauge",
            "Time since the worker last ended a step without an error.",
            (),
        ),
        "sfumato_build_info": ("gauge", "1, with the version of this collector.", ("version",)),
    }
)

STEPS: Mapping[str, int] = MappingProxyType(  # of what devices make go up
    {
        "sfumato_reports_total": MANY,
        "sfumato_uploads_total": MANY,
        "sfumato_round_messages_total": MANY,
        "sfumato_commits_total": MANY,
        "sfumato_commit_seconds_total": 1,
        "sfumato_queue_bytes": 8 << 20,
        "sfumato_queue_uploads": MANY,
    }
)


class Metrics:
    """What one process has counted since it started, and what it reads when asked."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, dict[tuple[str, ...], float]] = defaultdict(dict)
        self._read: dict[str, Callable[[], float]] = {}

    def add(self, name: str, by: float = 1, **labels: str) -> None:
        """Count; the labels must be those that the metric has."""
        key, values = self._key(name, labels), self._values[name]
        with self._lock:
            values[key] = values.get(key, 0) + by

    def set(self, name: str, value: float, **labels: str) -> None:
        key = self._key(name, labels)
        with self._lock:
            self._values[name][key] = value

    def read(self, name: str, source: Callable[[], float]) -> None:
        """A gauge that asks `source` each time."""
        self._key(name, {})
        self._read[name] = source

    def text(self) -> str:
        """Everything, in Prometheus' text format."""
        for name, source in self._read.items():
            self.set(name, source())
        lines = []
        with self._lock:
            for name, (kind, sentence, labels) in KNOWN.items():
                lines += [f"# HELP {name} {sentence}", f"# TYPE {name} {kind}"]
                for key, counted in self._values[name].items():
                    step = STEPS.get(name)
                    value = counted if step is None else step * math.floor(counted / step)
                    if step is not None and kind == "counter" and not value:
                        continue  # even a zero would say that there was a first one
                    pairs = ",".join(
                        f'{label}="{_escaped(said)}"'
                        for label, said in zip(labels, key, strict=True)
                    )
                    lines.append(
                        f"{name}{{{pairs}}} {value:.17g}" if pairs else f"{name} {value:.17g}"
                    )
        return "\n".join(lines) + "\n"

    def _key(self, name: str, labels: Mapping[str, str]) -> tuple[str, ...]:
        wanted = KNOWN[name][2]
        key = tuple([labels[label] for label in wanted if label in labels])
        if not len(key) == len(wanted) == len(labels):
            raise TypeError(f"{name} has the labels {wanted}; got {tuple(labels)}")
        return key


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
