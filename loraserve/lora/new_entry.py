"""An adapter version becomes known to an engine: what it will need, before anything of it is read."""

from __future__ import annotations

from pathlib import Path

from loraserve.config import format_bytes
from loraserve.errors import AdapterFault, AdapterRefused
from loraserve.lora.pool import LoraPool
from loraserve.lora.spec import AdapterSpec
from loraserve.lora.states import AdapterEntry
from loraserve.lora.weights import staged_bytes


def new_entry(pool: LoraPool, version: str, folder: Path, spec: AdapterSpec, order: int) -> AdapterEntry:
    """The entry of a version. Raises `AdapterRefused` if it does not fit the base model or the empty pool."""
    device_needed = pool.bytes_needed(spec)
    if not pool.fits_empty(spec):
        have = format_bytes(pool.capacity_bytes)
        text = f"the adapter needs {format_bytes(device_needed)} of device memory; the LoRA pool has {have}"
        raise AdapterRefused(AdapterFault.ADAPTER_TOO_LARGE, text)
    return AdapterEntry(
        version=version,
        folder=folder,
        spec=spec,
        pinned=False,
        order=order,
        demand=pool.layout.demand(spec),
        device_needed=device_needed,
        host_needed=staged_bytes(spec, pool.layout, pool.dtype),
    )
