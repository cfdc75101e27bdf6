"""All adapter versions of an engine in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from loraserve.lora.placement import DeviceTier
from loraserve.lora.staging import HostTier
from loraserve.lora.states import AdapterEntry, AdapterState, ResidencyStats


def residency_stats(
    entries: Collection[AdapterEntry], wanted: int, device: DeviceTier, host: HostTier, counts: Mapping[str, int]
) -> ResidencyStats:
    """Counts and bytes of all tiers. `counts` are the residency's own; `wanted` versions are waited for."""
    states = Counter(entry.state for entry in entries)
    return ResidencyStats(
        registered=len(entries),
        absent=states[AdapterState.ABSENT],
        fetching=states[AdapterState.FETCHING],
        staged=states[AdapterState.STAGED],
        resident=states[AdapterState.RESIDENT],
        failed=states[AdapterState.FAILED],
        wanted=wanted,
        uploading=len(device.uploading),
        leases=sum(entry.leases for entry in device.resident.values()),
        device_bytes=device.pool.stats().used_bytes,
        device_capacity=device.limit_bytes,
        host_bytes=host.used_bytes,
        host_capacity=host.capacity_bytes,
        stagings=counts["stagings"],
        uploads=device.num_uploads,
        evictions=device.num_evictions,
        host_evictions=host.num_evictions,
        failures=counts["failures"],
        hits=counts["hits"],
        misses=counts["misses"],
        staging_seconds=host.staging_seconds,
        upload_seconds=device.upload_seconds,
    )
