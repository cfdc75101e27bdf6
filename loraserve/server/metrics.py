"""Prometheus metrics: what the server sees of its requests, and what the engine reports of its steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from loraserve.engine.messages import AddRequest, EngineStats
from loraserve.server.adapter_metrics import PRIVATE, AdapterCounts, AdapterTraffic
from loraserve.server.inflight import ServedAdapter

STEP_ADAPTER_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_WAIT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 10.0)


class Metrics:
    """One registry per server. Labels are bounded: route templates, statuses, kinds and finish reasons."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self.registry = CollectorRegistry()
        self.http = Counter(
            "loraserve_http_requests", "HTTP answers.", ["method", "route", "status"], registry=self.registry
        )
        self.requests = Counter(
            "loraserve_requests", "Generated choices by how they ended.", ["kind", "finish"], registry=self.registry
        )
        self.in_flight = Gauge("loraserve_requests_in_flight", "Choices being generated.", registry=self.registry)
        self.prompt_tokens = Counter("loraserve_prompt_tokens", "Prompt tokens.", ["kind"], registry=self.registry)
        self.output_tokens = Counter("loraserve_output_tokens", "Tokens generated.", ["kind"], registry=self.registry)
        self.cached_tokens = Counter(
            "loraserve_cached_prompt_tokens", "Prompt tokens found in the prefix cache.", registry=self.registry
        )
        self.first_token = Histogram(
            "loraserve_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            ["kind"],
            buckets=_WAIT_BUCKETS,
            registry=self.registry,
        )
        self.inter_token = Histogram(
            "loraserve_inter_token_seconds",
            "Between tokens of one choice.",
            ["kind"],
            buckets=_TOKEN_BUCKETS,
            registry=self.registry,
        )
        self.duration = Histogram(
            "loraserve_request_seconds",
            "From a request's arrival to its last token.",
            ["kind"],
            buckets=_WAIT_BUCKETS,
            registry=self.registry,
        )
        self.queue_time = Histogram(
            "loraserve_queue_seconds",
            "From a request's arrival in the engine to its admission.",
            ["kind"],
            buckets=_WAIT_BUCKETS,
            registry=self.registry,
        )
        self.adapter_first_token = Histogram(
            "loraserve_adapter_time_to_first_token_seconds",
            "The same for requests with adapters, by whether they had to wait for theirs.",
            ["residency"],
            buckets=_WAIT_BUCKETS,
            registry=self.registry,
        )
        self.traffic = AdapterTraffic()
        self.disk_bytes = 0  # of stored adapters, as of the last scrape
        self.registry.register(EngineCollector(stats))

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)


class RequestMeter:
    """Makes a meter for each choice."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock

    def begin(self, request: AddRequest, started: float, adapters: Sequence[ServedAdapter] = ()) -> ChoiceMeter:
        """A choice goes to the engine."""
        counts = []
        for adapter in adapters:
            label = adapter.name if adapter.visibility == "public" else PRIVATE
            counts.append(self._metrics.traffic.counts(label))
            counts[-1].prompt_tokens += len(request.prompt)
        kind = ("base", "adapter")[len(request.adapters)] if len(request.adapters) < 2 else "blend"
        self._metrics.in_flight.inc()
        self._metrics.prompt_tokens.labels(kind).inc(len(request.prompt))
        return ChoiceMeter(self._metrics, self._clock, kind, started, counts)


class ChoiceMeter:
    """Times one choice."""

    def __init__(
        self,
        metrics: Metrics,
        clock: Callable[[], float],
        kind: str,
        started: float,
        counts: Sequence[AdapterCounts] = (),
    ) -> None:
        self._counts = counts
        self._metrics = metrics
        self._clock = clock
        self._kind = kind
        self._started = started
        self._last: float | None = None

    def admitted(self, queued_s: float, cold: bool) -> None:
        """The first token comes, with what the engine says of the wait for it."""
        self._metrics.queue_time.labels(self._kind).observe(queued_s)
        if self._counts:
            waited = self._clock() - self._started
            self._metrics.adapter_first_token.labels("cold" if cold else "warm").observe(waited)

    def tokens(self, count: int) -> None:
        """`count` tokens came from the engine."""
        now = self._clock()
        if self._last is None:
            self._metrics.first_token.labels(self._kind).observe(now - self._started)
        else:
            self._metrics.inter_token.labels(self._kind).observe((now - self._last) / count)
        self._last = now
        self._metrics.output_tokens.labels(self._kind).inc(count)
        for counts in self._counts:
            counts.output_tokens += count

    def end(self, finish: str, num_generated: int, num_cached: int) -> None:
        """The choice ended."""
        self._metrics.in_flight.dec()
        self._metrics.requests.labels(self._kind, finish).inc()
        self._metrics.cached_tokens.inc(num_cached)
        if num_generated:
            self._metrics.duration.labels(self._kind).observe(self._clock() - self._started)


class EngineCollector(Collector):
    """Turns the engine's latest statistics into metrics at each scrape.

    The engine's counts start again when its process does; Prometheus takes that for an ordinary counter reset.
    """

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        """All engine metrics."""
        stats = self._stats()
        yield _step_adapters(stats.step_adapters)
        rows = CounterMetricFamily(
            "loraserve_step_rows", "Rows of forwards by whose and which phase.", labels=["kind", "phase"]
        )
        for kind in ("base", "adapter"):
            for phase in ("prefill", "decode"):
                rows.add_metric([kind, phase], stats.rows_total.get(f"{kind}/{phase}", 0))
        yield rows
        yield _labelled("loraserve_engine_requests", "Requests the engine ended.", "finish", stats.requests_total)
        tokens = GaugeMetricFamily("loraserve_kv_tokens", "KV pool: tokens by what holds them.", labels=["state"])
        tokens.add_metric(["used"], stats.kv_tokens_used)
        tokens.add_metric(["cached"], stats.kv_tokens_cached)
        yield tokens
        waiting = GaugeMetricFamily("loraserve_waiting_reason", "Why requests wait.", labels=["reason"])
        for reason, count in sorted(stats.waiting_reasons.items()):
            waiting.add_metric([reason], count)
        yield waiting
        for name, help_text, value in _gauges(stats):
            yield GaugeMetricFamily(f"loraserve_{name}", help_text, value=value)
        for name, help_text, value in _counters(stats):
            yield CounterMetricFamily(f"loraserve_{name}", help_text, value=value)


def _gauges(stats: EngineStats) -> list[tuple[str, str, float]]:
    return [
        ("requests_waiting", "Requests that wait to be admitted.", stats.waiting),
        ("requests_running", "Requests that generate.", stats.running),
        ("slowest_step_seconds", "Longest recent forward.", stats.slowest_step_s),
        ("kv_tokens_capacity", "KV pool: tokens in all.", stats.kv_tokens_total),
        ("lora_bytes", "Device pool of adapters: bytes used.", stats.lora_bytes_used),
        ("lora_bytes_capacity", "Device pool of adapters: bytes in all.", stats.lora_bytes_total),
        ("host_lora_bytes", "Host memory of staged adapters.", stats.host_lora_bytes_used),
        ("adapters_resident", "Adapter versions on the device.", stats.adapters_resident),
        ("adapters_registered", "Adapter versions the engine knows.", stats.adapters_registered),
        ("engine_rss_bytes", "Resident memory of the engine process.", stats.rss_bytes),
    ]


def _counters(stats: EngineStats) -> list[tuple[str, str, float]]:
    return [
        ("steps", "Forwards.", stats.steps_total),
        ("mixed_steps", "Forwards with prefill and decode rows together.", stats.mixed_steps_total),
        ("adapter_loads", "Adapters copied to the device.", stats.adapter_loads_total),
        ("adapter_evictions", "Adapters evicted from the device.", stats.adapter_evictions_total),
        ("retractions", "Requests put back because KV ran out.", stats.retractions_total),
        ("engine_prompt_tokens", "Prompt tokens the engine took.", stats.prompt_tokens_total),
        ("engine_cached_tokens", "Prompt tokens the engine found cached.", stats.cached_tokens_total),
        ("engine_output_tokens", "Tokens the engine generated.", stats.output_tokens_total),
    ]


def _labelled(name: str, help_text: str, label: str, values: Mapping[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, help_text, labels=[label])
    for key, count in sorted(values.items()):
        family.add_metric([key], count)
    return family


def _step_adapters(counts: Mapping[int, int]) -> HistogramMetricFamily:
    buckets = [
        (f"{bound:.1f}", float(sum(count for adapters, count in counts.items() if adapters <= bound)))
        for bound in STEP_ADAPTER_BUCKETS
    ]
    buckets.append(("+Inf", float(sum(counts.values()))))
    family = HistogramMetricFamily("loraserve_step_adapters", "Distinct adapters in one forward.")
    family.add_metric([], buckets=buckets, sum_value=float(sum(key * count for key, count in counts.items())))
    return family
