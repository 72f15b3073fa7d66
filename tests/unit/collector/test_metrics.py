"""Metrics are counted under known names and labels, and written as Prometheus reads them."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest

from sfumato.collector import logs
from sfumato.collector.metrics import KNOWN, MANY, STEPS, Metrics

ROOT = Path(__file__).resolve().parents[3]
SAMPLE = re.compile(r'^([a-z_]+)(?:\{(?:[a-z]+="(?:[^"\\\n]|\\.)*",?)+\})? (\S+)$')


def samples(text: str) -> dict[str, float]:
    """Every sample of a page, by all that stands before its value."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert all(SAMPLE.match(line) for line in lines)
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def test_counts_add_up_by_their_labels() -> None:
    metrics = Metrics()
    metrics.add("sfumato_reports_total", 350, study="a", outcome="stored")
    metrics.add("sfumato_reports_total", 150, study="a", outcome="stored")
    metrics.add("sfumato_reports_total", 100, study="b", outcome="malformed")
    assert samples(metrics.text()) == {
        'sfumato_reports_total{study="a",outcome="stored"}': 500,
        'sfumato_reports_total{study="b",outcome="malformed"}': 100,
    }


def test_what_devices_make_go_up_is_published_in_steps_from_the_first_on() -> None:
    """And only goes up, as Prometheus expects of a counter."""
    metrics, seen = Metrics(), []
    for _ in range(500):
        metrics.add("sfumato_reports_total", by=7, study="a", outcome="stored")
        seen.append(
            samples(metrics.text()).get('sfumato_reports_total{study="a",outcome="stored"}')
        )
    assert seen == [7 * count // 100 * 100 or None for count in range(1, 501)]
    assert MANY == logs.MANY


def test_all_that_devices_make_go_up_has_a_step() -> None:
    """All but masked rounds, each of a whole cohort, and what is about the collector itself."""
    exact = {"sfumato_rounds_total", "sfumato_worker_errors_total", "sfumato_build_info"}
    assert KNOWN.keys() - STEPS.keys() == exact | {"sfumato_worker_last_success_age_seconds"}


def test_a_gauge_is_read_when_asked() -> None:
    metrics, waiting = Metrics(), [450]
    metrics.read("sfumato_queue_uploads", lambda: waiting[0])
    assert samples(metrics.text()) == {"sfumato_queue_uploads": 400}
    waiting[0] = 0
    assert samples(metrics.text()) == {"sfumato_queue_uploads": 0}


@pytest.mark.parametrize(
    "labels", [{}, {"study": "a"}, {"study": "a", "outcome": "b", "peer": "c"}]
)
def test_other_labels_are_refused(labels: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        Metrics().add("sfumato_reports_total", **labels)


def test_an_unknown_metric_is_refused() -> None:
    with pytest.raises(KeyError):
        Metrics().add("sfumato_peers_total")


def test_every_metric_has_its_help_and_its_type() -> None:
    text = Metrics().text()
    assert text.endswith("\n")
    for name, (kind, sentence, _) in KNOWN.items():
        assert f"# HELP {name} {sentence}\n# TYPE {name} {kind}\n" in text


def test_a_label_cannot_break_out_of_its_quotes() -> None:
    metrics = Metrics()
    metrics.set("sfumato_build_info", 1, version='1"} 2\n\\x')
    assert list(samples(metrics.text())) == ['sfumato_build_info{version="1\\"} 2\\n\\\\x"}']


def test_threads_lose_no_count() -> None:
    metrics = Metrics()

    def count() -> None:
        for _ in range(2_000):
            metrics.add("sfumato_commits_total")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert samples(metrics.text()) == {"sfumato_commits_total": 8_000}


def test_every_metric_is_in_the_reference() -> None:
    text = (ROOT / "docs" / "reference" / "http.md").read_text(encoding="utf-8")
    for name, (kind, sentence, labels) in KNOWN.items():
        told = ", ".join(f"`{label}`" for label in labels)
        assert f"| `{name}` | {kind} | {told} | {sentence.rstrip('.')} |" in text
