"""Which backend runs: one table, chosen once when the engine is built, one log line."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from typing import NamedTuple

import torch

from loraserve.config import Kernels
from loraserve.errors import ConfigError
from loraserve.kernels.ops import Ops
from loraserve.kernels.reference import ReferenceOps

logger = logging.getLogger(__name__)


class Backend(NamedTuple):
    """A row of the table: why it cannot run here (None if it can), and how to make it."""

    obstacle: Callable[[torch.device, torch.dtype], str | None]
    make: Callable[[], Ops]


def select_ops(requested: Kernels, device: torch.device, dtype: torch.dtype) -> Ops:
    """The operators for activations of `dtype` on `device`.

    `auto` takes the first backend of the table that can run. Raises `ConfigError` saying why if the requested one
    cannot.
    """
    if requested != "auto" and requested not in _BACKENDS:
        raise ConfigError(f"--kernels {requested} is unknown; choose auto, {', '.join(_BACKENDS)}")
    candidates = list(_BACKENDS) if requested == "auto" else [requested]
    reason = None
    for name in candidates:
        backend = _BACKENDS[name]
        reason = backend.obstacle(device, dtype)
        if reason is None:
            ops = backend.make()
            logger.info("operators: %s (%s requested) on %s, %s", ops.name, requested, device, dtype)
            return ops
    raise ConfigError(f"--kernels {requested} cannot be used: {reason}")


def _triton_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    return "the Triton kernels are not built yet; use auto or reference"


def _cpu_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cpu":
        return f"the CPU kernels do not run on {device}"
    if dtype != torch.float32:
        return f"the CPU kernels compute in float32 only, not {dtype}"
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed"
    try:
        import numba  # noqa: F401 - an installed numba may still refuse this numpy or Python
    except (ImportError, SystemError) as error:
        return f"numba cannot be imported: {error}"
    return None


def _reference_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    return None if dtype.is_floating_point else f"{dtype} is not a floating-point type"


def _make_cpu() -> Ops:
    from loraserve.kernels.cpu_backend import CpuOps

    return CpuOps()


def _make_triton() -> Ops:
    raise ConfigError("the Triton kernels are not built yet; use auto or reference")


_BACKENDS: dict[str, Backend] = {
    "triton": Backend(_triton_obstacle, _make_triton),
    "cpu": Backend(_cpu_obstacle, _make_cpu),
    "reference": Backend(_reference_obstacle, ReferenceOps),
}
