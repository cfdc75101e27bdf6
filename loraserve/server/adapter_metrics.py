"""Counts by adapter with few labels: the adapters with the most traffic by name, all others together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from loraserve.engine.messages import EngineInfo, EngineStats
from loraserve.server.inflight import ServedAdapter

MAX_LABELS = 50
MAX_TRACKED = 1024
OTHER = "other"
PRIVATE = "private"
"""Label of all private adapters: /metrics is open, and their names are not for everybody."""


@dataclass(slots=True)
class AdapterCounts:
    """What one label has counted. `weight` is its recent traffic, which halves now and then."""

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    weight: float = 0.0


class AdapterTraffic:
    """Gives names a label of their own when they have twice the traffic of the least one that has.

    What a name counted before stays with `other`, so no counter ever goes down; a label that is given up ends.
    """

    def __init__(self, max_labels: int = MAX_LABELS) -> None:
        self._max_labels = max_labels
        self._labels: dict[str, AdapterCounts] = {}
        self._other = AdapterCounts()
        self._weights: dict[str, float] = {}  # of names without a label

    def counts(self, name: str) -> AdapterCounts:
        """Where a new request of this adapter counts."""
        found = self._labels.get(name)
        if found is None:
            found = self._promote(name) or self._other
        found.weight += 1.0
        found.requests += 1
        return found

    def labels(self) -> list[tuple[str, AdapterCounts]]:
        """Every label and its counts, by label; `other` last."""
        return [*sorted(self._labels.items()), (OTHER, self._other)]

    def _promote(self, name: str) -> AdapterCounts | None:
        weight = self._weights.pop(name, 0.0) + 1.0
        if len(self._labels) >= self._max_labels:
            least = min(self._labels, key=lambda label: self._labels[label].weight)
            if weight <= 2 * self._labels[least].weight:
                self._remember(name, weight)
                return None
            self._weights[least] = self._labels.pop(least).weight
        found = self._labels[name] = AdapterCounts(weight=weight - 1.0)
        return found

    def _remember(self, name: str, weight: float) -> None:
        self._weights[name] = weight
        if len(self._weights) > MAX_TRACKED:
            # Old traffic fades and rare names are forgotten.
            self._weights = {key: value / 2 for key, value in self._weights.items() if value >= 2}
            for counts in self._labels.values():
                counts.weight /= 2


class AdapterCollector(Collector):
    """Metrics about adapters, and vLLM's names for what gateways route on."""

    def __init__(
        self,
        traffic: AdapterTraffic,
        stats: Callable[[], EngineStats],
        info: Callable[[], EngineInfo | None],
        used: Callable[[], Iterable[ServedAdapter]],
        model_name: str,
        max_lora: int,
        disk_bytes: Callable[[], int],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._traffic = traffic
        self._stats = stats
        self._info = info
        self._used = used
        self._model_name = model_name
        self._max_lora = max_lora
        self._disk_bytes = disk_bytes
        self._wall = wall

    def collect(self) -> Iterable[Metric]:
        """All of them."""
        yield from self._by_adapter()
        yield from _tiers(self._stats(), self._disk_bytes())
        yield from self._of_vllm(self._stats())

    def _by_adapter(self) -> Iterable[Metric]:
        requests = CounterMetricFamily("loraserve_adapter_requests", "Choices begun by adapter.", labels=["adapter"])
        tokens = CounterMetricFamily("loraserve_adapter_tokens", "Tokens by adapter.", labels=["adapter", "direction"])
        for label, counts in self._traffic.labels():
            requests.add_metric([label], counts.requests)
            tokens.add_metric([label, "in"], counts.prompt_tokens)
            tokens.add_metric([label, "out"], counts.output_tokens)
        yield requests
        yield tokens

    def _of_vllm(self, stats: EngineStats) -> Iterable[Metric]:
        for name, text, value in (
            ("num_requests_running", "Requests that generate.", stats.running),
            ("num_requests_waiting", "Requests that wait.", stats.waiting),
            ("kv_cache_usage_perc", "Part of the KV pool in use, 0 to 1.", _part(stats)),
            ("gpu_cache_usage_perc", "The same under its former name.", _part(stats)),
        ):
            family = GaugeMetricFamily(f"vllm:{name}", text, labels=["model_name", "engine"])
            family.add_metric([self._model_name, "0"], value)
            yield family
        info = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters of running and waiting requests; the value is the time.",
            labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        # The names that requests use, which are not all that a version has. The engine knows versions only.
        used = [served for served in self._used() if served.visibility == "public"]
        running, waiting = (_named(versions, used) for versions in (stats.running_adapters, stats.waiting_adapters))
        info.add_metric([str(self._max_lora), running, waiting], self._wall())
        yield info
        engine = self._info()
        if engine is not None:
            names = ["block_size", "num_gpu_blocks", "engine"]
            cache = GaugeMetricFamily("vllm:cache_config_info", "The KV pool: tokens of a page, pages.", labels=names)
            cache.add_metric([str(engine.page_size), str(engine.kv_tokens // engine.page_size), "0"], 1)
            yield cache


def _named(versions: Sequence[str], used: Sequence[ServedAdapter]) -> str:
    return ",".join(sorted({served.name for served in used if served.version in versions}))


def _part(stats: EngineStats) -> float:
    return stats.kv_tokens_used / stats.kv_tokens_total if stats.kv_tokens_total else 0.0


def _tiers(stats: EngineStats, disk_bytes: int) -> Iterable[Metric]:
    loads = CounterMetricFamily("loraserve_adapter_tier_loads", "Adapters brought to a tier.", labels=["tier"])
    loads.add_metric(["host"], stats.adapter_stagings_total)
    loads.add_metric(["device"], stats.adapter_loads_total)
    yield loads
    seconds = CounterMetricFamily("loraserve_adapter_tier_load_seconds", "Time that took.", labels=["tier"])
    seconds.add_metric(["host"], stats.adapter_staging_seconds_total)
    seconds.add_metric(["device"], stats.adapter_upload_seconds_total)
    yield seconds
    evictions = CounterMetricFamily("loraserve_adapter_tier_evictions", "Adapters evicted.", labels=["tier"])
    evictions.add_metric(["host"], stats.adapter_host_evictions_total)
    evictions.add_metric(["device"], stats.adapter_evictions_total)
    yield evictions
    lookups = CounterMetricFamily(
        "loraserve_adapter_lookups", "Whether a request found its adapter on the device.", labels=["found"]
    )
    lookups.add_metric(["yes"], stats.adapter_hits_total)
    lookups.add_metric(["no"], stats.adapter_misses_total)
    yield lookups
    states = GaugeMetricFamily("loraserve_adapter_versions", "Versions that the engine knows.", labels=["state"])
    for state, count in sorted(stats.adapters_by_state.items()):
        states.add_metric([state], count)
    yield states
    size = GaugeMetricFamily("loraserve_adapter_bytes", "Bytes of adapters by tier.", labels=["tier"])
    size.add_metric(["device"], stats.lora_bytes_used)
    size.add_metric(["host"], stats.host_lora_bytes_used)
    size.add_metric(["disk"], disk_bytes)
    yield size
    yield CounterMetricFamily(
        "loraserve_adapter_failures", "Stagings and uploads that failed.", value=stats.adapter_failures_total
    )
