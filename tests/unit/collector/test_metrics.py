"""Metrics are counted exactly, and published in steps, as Prometheus reads them."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from sfumato.collector import logs
from sfumato.collector.metrics import BUCKETS, MANY, STEPS, Metrics

ROOT = Path(__file__).resolve().parents[3]
ROUTE = "/v1/tasks/{task_id}/reports"


def families(metrics: Metrics) -> dict[str, Metric]:
    """Every metric that is published, by its name."""
    return {family.name: family for family in text_string_to_metric_families(metrics.text())}


def samples(metrics: Metrics, name: str) -> dict[tuple[str, ...], float]:
    """Every sample of a metric: its suffix and its labels in alphabetic order, and its value."""
    return {
        (
            sample.name.removeprefix(name),
            *dict(sorted(sample.labels.items())).values(),
        ): sample.value
        for sample in families(metrics)[name].samples
    }


def busy_metrics() -> Metrics:
    """Metrics of which all are published."""
    metrics = Metrics()
    metrics.reports.labels("a", "stored").inc(MANY)
    for counter in (metrics.uploads, metrics.round_messages, metrics.rounds):
        counter.labels("x").inc(MANY)
    for counter in (metrics.commits, metrics.commit_seconds, metrics.worker_errors):
        counter.inc(MANY)
    for gauge in (
        metrics.queue_bytes,
        metrics.queue_uploads,
        metrics.worker_success_age,
        metrics.worker_active,
    ):
        metrics.watch(gauge, lambda: 1e9)
    for _ in range(MANY):
        metrics.observe_request("/health", "GET", 200, 0.01)
    return metrics


def test_counts_add_up_by_their_labels() -> None:
    metrics = Metrics()
    metrics.reports.labels("a", "stored").inc(350)
    metrics.reports.labels("a", "stored").inc(150)
    metrics.reports.labels("b", "malformed").inc(100)
    assert samples(metrics, "sfumato_reports") == {
        ("_total", "stored", "a"): 500,
        ("_total", "malformed", "b"): 100,
    }


def test_numbers_that_devices_increase_are_published_in_steps_from_the_first_on() -> None:
    """And only go up, as Prometheus expects of a counter."""
    metrics, values = Metrics(), []
    for _ in range(500):
        metrics.reports.labels("a", "stored").inc(7)
        values.append(samples(metrics, "sfumato_reports").get(("_total", "stored", "a")))
    assert values == [7 * count // 100 * 100 or None for count in range(1, 501)]
    assert MANY == logs.MANY


def test_all_that_devices_increase_has_a_step() -> None:
    """All but masked rounds, each of a whole cohort, and what is about the collector itself."""
    exact = {
        "sfumato_rounds",
        "sfumato_worker_errors",
        "sfumato_failing_studies",
        "sfumato_worker_last_success_age_seconds",
        "sfumato_worker_active",
        "sfumato_build_info",
    }
    assert families(busy_metrics()).keys() - STEPS.keys() == exact


def test_a_gauge_is_published_when_it_can_be_read_and_read_each_time() -> None:
    metrics, value = Metrics(), [450]
    assert "sfumato_queue_uploads" not in families(metrics)
    metrics.watch(metrics.queue_uploads, lambda: value[0])
    assert samples(metrics, "sfumato_queue_uploads") == {("",): 400}
    value[0] = 0
    assert samples(metrics, "sfumato_queue_uploads") == {("",): 0}


def test_the_time_of_a_request_is_in_its_bucket() -> None:
    metrics = Metrics()
    for seconds in (0.0004, 0.02, 7.0, 31.0):
        for _ in range(100):
            metrics.observe_request(ROUTE, "POST", 201, seconds)
    values = samples(metrics, "sfumato_request_seconds")
    buckets = {float(key[2]): value for key, value in values.items() if key[0] == "_bucket"}
    assert list(buckets) == [*BUCKETS, float("inf")]
    assert [buckets[bound] for bound in (0.001, 0.01, 0.025, 5.0, 10.0, 30.0, float("inf"))] == [
        100, 100, 200, 200, 300, 300, 400,
    ]  # fmt: skip
    assert values["_count", "201", "POST", ROUTE] == 400
    assert values["_sum", "201", "POST", ROUTE] == pytest.approx(100 * 38.0204)


def test_times_do_not_tell_when_a_request_came() -> None:
    """One request more changes nothing, however long it took. The control: the hundredth does."""
    metrics, changes = Metrics(), []
    for number in range(1, 301):
        before = metrics.text()
        metrics.observe_request(ROUTE, "POST", 201, 20.0 if number % 7 else 0.0001)
        if metrics.text() != before:
            changes.append(number)
    assert changes == [100, 200, 300]


def test_uploads_and_messages_of_rounds_are_counted_by_status_beside_their_times() -> None:
    metrics = Metrics()
    for _ in range(MANY):
        metrics.observe_request(ROUTE, "POST", 429, 0.01)
        metrics.observe_request("/v1/rounds/{round_id}/{phase}/{member}", "PUT", 201, 0.01)
        metrics.observe_request("/v1/rounds/{round_id}/{phase}/{member}", "GET", 204, 25.0)
    assert samples(metrics, "sfumato_uploads") == {("_total", "429"): MANY}
    assert samples(metrics, "sfumato_round_messages") == {("_total", "201"): MANY}


def test_metrics_of_two_services_are_apart() -> None:
    one, other = Metrics(), Metrics()
    one.commits.inc(MANY)
    assert samples(one, "sfumato_commits") == {("_total",): MANY}
    assert not samples(other, "sfumato_commits")


def test_a_label_cannot_break_out_of_its_quotes() -> None:
    metrics = Metrics()
    metrics.reports.labels('1"} 2\n\\x', "stored").inc(MANY)
    assert 'study="1\\"} 2\\n\\\\x"} 100.0\n' in metrics.text()
    assert samples(metrics, "sfumato_reports") == {("_total", "stored", '1"} 2\n\\x'): MANY}


def test_no_time_is_published_but_the_worker_s() -> None:
    """A time of creation would be that of a first report."""
    assert "_created" not in busy_metrics().text()


def test_threads_lose_no_count() -> None:
    metrics = Metrics()

    def count() -> None:
        for _ in range(2_000):
            metrics.commits.inc()
            metrics.reports.labels("a", "stored").inc(1)
            metrics.observe_request(ROUTE, "POST", 201, 0.5)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert samples(metrics, "sfumato_commits") == {("_total",): 8_000}
    assert samples(metrics, "sfumato_reports") == {("_total", "stored", "a"): 8_000}
    assert samples(metrics, "sfumato_request_seconds")["_count", "201", "POST", ROUTE] == 8_000


def test_every_metric_is_in_the_reference() -> None:
    text = (ROOT / "docs" / "reference" / "http.md").read_text(encoding="utf-8")
    rows = set(re.findall(r"^\| `(sfumato_\w+)` \| (\w+) \| (.*?) \| (.+) \|$", text, re.MULTILINE))
    published = set()
    for family in families(busy_metrics()).values():
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = {label: None for sample in family.samples for label in sample.labels}
        names = ", ".join(f"`{label}`" for label in sorted(labels.keys() - {"le"}))
        published.add((name, family.type, names, family.documentation.rstrip(".")))
    assert {(*row[:2], ", ".join(sorted(row[2].split(", "))), row[3]) for row in rows} == published
