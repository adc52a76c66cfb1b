"""What /metrics tells, in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from coldframe.node.durations import Durations
from coldframe.node.sandboxes import Load
from coldframe.protocol.models import Ledger

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Meters:
    """What the service counts by itself. The rest is the node's."""

    def __init__(self) -> None:
        self.boot = Durations()
        self.requests: dict[int, int] = {}
        """Answers by status."""

    def count(self, status: int) -> None:
        """Note an answer."""
        self.requests[status] = self.requests.get(status, 0) + 1

    def render(self, load: Load, ledger: Ledger) -> bytes:
        """Return all of it at this moment."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Snapshot(self, load, ledger))
        return generate_latest(registry)


class _Snapshot(Collector):
    def __init__(self, meters: Meters, load: Load, ledger: Ledger) -> None:
        self._meters, self._load, self._ledger = meters, load, ledger

    def collect(self) -> Iterator[Metric]:
        """See `Collector`."""
        sandboxes = GaugeMetricFamily(
            "coldframe_sandboxes",
            "Sandboxes that have not ended, by image and state.",
            labels=["image", "state"],
        )
        for (image, state), count in self._load.live.items():
            sandboxes.add_metric([image, state.value], count)
        yield sandboxes
        yield _gauges(
            "coldframe_ledger",
            "Terms of the ledger; created = deleted + expired + failed + lost + live + leaked.",
            "term",
            self._ledger.model_dump(exclude={"leaks"}),
        )
        yield _gauges(
            "coldframe_queue_depth",
            "Operations that wait for their turn.",
            "queue",
            self._load.waiting,
        )
        running = "Commands that have not ended, those that wait included."
        yield GaugeMetricFamily("coldframe_execs_running", running, value=self._load.running)
        spools = "What kept output counts for; of commands that run, what they may keep."
        yield GaugeMetricFamily("coldframe_spool_bytes", spools, value=self._load.spool_bytes)
        boot = "From a create's request to a ready sandbox; its quantiles are of the latest 2,048."
        yield _summary("coldframe_boot_seconds", boot, self._meters.boot)
        run = "Of commands that have ended, their wait included; quantiles of the latest 2,048."
        yield _summary("coldframe_exec_seconds", run, self._load.took)
        answers = CounterMetricFamily(
            "coldframe_answers", "Answers by HTTP status.", labels=["status"]
        )
        for status, count in sorted(self._meters.requests.items()):
            answers.add_metric([str(status)], count)
        yield answers


def _gauges(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _summary(name: str, text: str, durations: Durations) -> Metric:
    family = Metric(name, text, "summary")
    for quantile, seconds in durations.quantiles():
        family.add_sample(name, {"quantile": str(quantile)}, seconds)
    family.add_sample(f"{name}_count", {}, durations.count)
    family.add_sample(f"{name}_sum", {}, durations.sum)
    return family
