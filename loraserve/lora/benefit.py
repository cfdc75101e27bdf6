"""Which copy of an adapter is worth keeping: how likely it is needed again times what it costs to bring back, per byte.

The likelihood is a count of uses that halves every `HALF_LIFE_S`: recency and frequency weighed in one number.
All counts decay alike; their order at any moment is the order of `log2(count) + time of the count / HALF_LIFE_S`, which
needs no clock and no rewriting of idle entries.
"""

from __future__ import annotations

from math import log2

from loraserve.lora.states import AdapterEntry

HALF_LIFE_S = 300.0
# Rough costs of bringing a copy back: what every adapter costs, and seconds per byte. Only their order of magnitude
# matters: small adapters cost more per byte, and those without a host copy more than those with one.
_UPLOAD_S, _UPLOAD_S_PER_BYTE = 1e-3, 1e-10
_STAGE_S, _STAGE_S_PER_BYTE = 5e-3, 2e-9


def warm(entry: AdapterEntry, at: float) -> None:
    """The version is used at this moment (seconds on the engine's clock)."""
    entry.last_used = max(entry.last_used, at)
    if entry.heat == 0.0 or at <= entry.heat_at:
        entry.heat_at = at if entry.heat == 0.0 else entry.heat_at
        entry.heat += 1.0
        return
    entry.heat = entry.heat * 2.0 ** ((entry.heat_at - at) / HALF_LIFE_S) + 1.0
    entry.heat_at = at


def device_benefit(entry: AdapterEntry) -> tuple[float, float]:
    """Sorts residents: the lowest goes first."""
    cost = _UPLOAD_S + _UPLOAD_S_PER_BYTE * entry.device_needed
    if entry.host is None:
        cost += _STAGE_S + _STAGE_S_PER_BYTE * entry.device_needed
    return _likelihood(entry) + log2(cost / max(entry.device_needed, 1)), entry.last_used


def host_benefit(entry: AdapterEntry) -> tuple[float, float]:
    """Sorts staged copies: the lowest goes first."""
    cost = _STAGE_S + _STAGE_S_PER_BYTE * entry.host_needed
    return _likelihood(entry) + log2(cost / max(entry.host_needed, 1)), entry.last_used


def _likelihood(entry: AdapterEntry) -> float:
    return (log2(entry.heat) if entry.heat > 0 else 0.0) + entry.heat_at / HALF_LIFE_S
