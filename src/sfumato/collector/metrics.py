"""Counters, gauges and latencies of one process, in a registry of prometheus-client.

Nothing here is about a device: reports are counted by study and outcome, requests by the address's
pattern and the status of the answer. Whoever reads these numbers knows when, so a count of one
would say when somebody's report came. Numbers that devices increase are therefore published in
steps, just as the log counts reports from 100 on (`logs.MANY`): rounded down to a multiple of
their step, and not at all below the first.

    >>> metrics = Metrics()
    >>> metrics.uploads.labels("201").inc(250)
    >>> metrics.uploads.labels("429").inc(99)
    >>> print(metrics.text())
    # HELP sfumato_reports_total Reports by study and what became of them, in steps of 100.
    # TYPE sfumato_reports_total counter
    # HELP sfumato_uploads_total Uploads by the status that was answered, in steps of 100.
    # TYPE sfumato_uploads_total counter
    sfumato_uploads_total{code="201"} 200.0
    ...
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType

from prometheus_client import (
    CONTENT_TYPE_PLAIN_0_0_4,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    Metric,
    generate_latest,
)
from prometheus_client.samples import Sample

from sfumato import __version__

MEDIA_TYPE = CONTENT_TYPE_PLAIN_0_0_4
MANY = 100  # the same as in the log
OTHER = "other"  # an address or a method that no route has
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

STEPS: Mapping[str, int] = MappingProxyType(  # of numbers that devices increase
    {
        "sfumato_reports": MANY,
        "sfumato_uploads": MANY,
        "sfumato_round_messages": MANY,
        "sfumato_commits": MANY,
        "sfumato_commit_seconds": 1,
        "sfumato_request_seconds": MANY,
        "sfumato_queue_bytes": 8 << 20,
        "sfumato_queue_uploads": MANY,
    }
)


class Metrics:
    """The metrics of one process since it started, each an object of prometheus-client.

    They hold exact numbers; `text` is what may be published.
    """

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        self.reports = counter(
            "sfumato_reports_total",
            "Reports by study and what became of them, in steps of 100.",
            ("study", "outcome"),
        )
        self.uploads = counter(
            "sfumato_uploads_total",
            "Uploads by the status that was answered, in steps of 100.",
            ("code",),
        )
        self.round_messages = counter(
            "sfumato_round_messages_total",
            "Messages of masked rounds by the status that was answered, in steps of 100.",
            ("code",),
        )
        self.rounds = counter(
            "sfumato_rounds_total",
            "Masked rounds by how they ended.",
            ("outcome",),
        )
        self.commits = counter(
            "sfumato_commits_total",
            "Transactions that stored uploads, in steps of 100.",
        )
        self.commit_seconds = counter(
            "sfumato_commit_seconds_total",
            "Time that those transactions took, in whole seconds.",
        )
        self.request_seconds = Histogram(
            "sfumato_request_seconds",
            "Time from a request to the start of its answer, in steps of 100 requests.",
            ("route", "method", "code"),
            buckets=BUCKETS,
            registry=registry,
        )
        self.worker_errors = counter(
            "sfumato_worker_errors_total",
            "Steps of the worker that failed, for one study or for all.",
        )
        self.failing_studies = gauge(
            "sfumato_failing_studies",
            "Studies whose last step failed, and which the worker tries again.",
        )
        # Published once something can be read: see `watch`.
        self.queue_bytes = Gauge(
            "sfumato_queue_bytes", "Bytes that wait to be stored, in steps of 8 MiB.", registry=None
        )
        self.queue_uploads = Gauge(
            "sfumato_queue_uploads",
            "Uploads that wait to be stored, in steps of 100.",
            registry=None,
        )
        self.worker_success_age = Gauge(
            "sfumato_worker_last_success_age_seconds",
            "Time since the worker last ended a step without an error.",
            registry=None,
        )
        self.worker_active = Gauge(
            "sfumato_worker_active",
            "1 if this process is the store's only worker, 0 if it waits to replace it.",
            registry=None,
        )
        build = Info("sfumato_build", "1, with the version of this collector.", registry=registry)
        build.info({"version": __version__})
        self._published = Published(registry)
        self._answers = {  # counted by status, beside their times
            ("/v1/tasks/{task_id}/reports", "POST"): self.uploads,
            ("/v1/rounds/{round_id}/{phase}/{member}", "PUT"): self.round_messages,
        }

    def watch(self, gauge: Gauge, read: Callable[[], float]) -> None:
        """Publish a gauge whose value is read each time."""
        gauge.set_function(read)
        self.registry.register(gauge)

    def observe_request(self, route: str, method: str, status: int, seconds: float) -> None:
        """Count a request, and the time until its answer began.

        `route` is the pattern of an address and `method` one that it takes, or both are `OTHER`:
        strangers must not be able to make up labels.
        """
        code = str(status)
        self.request_seconds.labels(route, method, code).observe(seconds)
        if answers := self._answers.get((route, method)):
            answers.labels(code).inc()

    def text(self) -> str:
        """What may be published, in Prometheus' text format."""
        return generate_latest(self._published).decode()


class Published:
    """A collector of prometheus-client: the metrics of a registry, with their numbers in steps."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._sums: dict[tuple[str, ...], tuple[float, float]] = {}  # count and sum of a histogram

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            # When a counter was created is when its first report came.
            metric.samples = [each for each in metric.samples if not each.name.endswith("_created")]
            if step := STEPS.get(metric.name):
                metric.samples = list(self._coarsen(metric, step))
            yield metric

    def _coarsen(self, metric: Metric, step: int) -> Iterator[Sample]:
        """Round numbers down. Counters and histograms that have not reached a step are left out:
        even a zero would say that there was a first one."""
        counts = {
            _labels(sample): _floor(sample.value, step)
            for sample in metric.samples
            if sample.name.endswith(("_total", "_count"))
        }
        for sample in metric.samples:
            value, labels = _floor(sample.value, step), _labels(sample)
            if metric.type == "gauge":
                yield sample._replace(value=value)
            elif count := counts[labels]:
                if sample.name.endswith("_sum"):  # it changes when the count does, and only then
                    key = (metric.name, *labels)
                    if self._sums.get(key, (0, 0))[0] != count:
                        self._sums[key] = count, sample.value
                    value = self._sums[key][1]
                yield sample._replace(value=value)


def _floor(value: float, step: int) -> float:
    return step * math.floor(value / step)


def _labels(sample: Sample) -> tuple[str, ...]:
    """The labels of the counter or histogram that a sample belongs to."""
    return tuple([value for name, value in sample.labels.items() if name != "le"])
