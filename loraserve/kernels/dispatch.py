"""Which backend runs: one table, chosen once when the engine is built, one log line."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from loraserve.config import Kernels
from loraserve.errors import ConfigError
from loraserve.kernels.ops import Ops
from loraserve.kernels.reference import ReferenceOps

logger = logging.getLogger(__name__)


class Backend(NamedTuple):
    """A row of the table: why it cannot run here (None if it can), and how to make it."""

    obstacle: Callable[[torch.device, torch.dtype], str | None]
    make: Callable[[torch.device], Ops]


def select_ops(requested: Kernels, device: torch.device, dtype: torch.dtype) -> Ops:
    """The operators for activations of `dtype` on `device`.

    `auto` takes the first backend of the table that can run. Raises `ConfigError` saying why if the requested one
    cannot.
    """
    if requested != "auto" and requested not in _BACKENDS:
        raise ConfigError(f"--kernels {requested} is unknown; choose auto, {', '.join(_BACKENDS)}")
    candidates: list[str] = [requested]
    if requested == "auto":
        # On a CPU the Triton kernels are interpreted, which is for tests that ask for it.
        candidates = [name for name in _BACKENDS if name != "triton" or device.type != "cpu"]
    reason = None
    for name in candidates:
        backend = _BACKENDS[name]
        reason = backend.obstacle(device, dtype)
        if reason is None:
            ops = backend.make(device)
            logger.info("operators: %s (%s requested) on %s, %s", ops.name, requested, device, dtype)
            return ops
    raise ConfigError(f"--kernels {requested} cannot be used: {reason}")


def _triton_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    if not dtype.is_floating_point:
        return f"{dtype} is not a floating-point type"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (the extra `gpu` brings it)"
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type == "cpu":
        if not is_interpreted:
            return "the Triton kernels need a GPU; on a CPU they run only to be tested, with TRITON_INTERPRET=1 set"
        if dtype is torch.bfloat16:
            return "Triton's interpreter multiplies bfloat16 matrices wrongly; use float32 or float16"
        return None
    if is_interpreted:
        return "with TRITON_INTERPRET=1 set Triton interprets its kernels on the CPU"
    if not torch.cuda.is_available():
        return f"torch finds no GPU for {device}"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return "the Triton kernels need a GPU of compute capability 8.0 or newer"
    try:
        import triton.runtime  # noqa: F401 - an installed triton may still refuse this torch, driver or Python
    except (ImportError, RuntimeError, OSError) as error:
        return f"triton cannot be imported: {error}"
    return None


def _cpu_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cpu":
        return f"the CPU kernels do not run on {device}"
    if dtype != torch.float32:
        return f"the CPU kernels compute in float32 only, not {dtype}"
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed"
    try:
        import numba
    except (ImportError, SystemError) as error:  # an installed numba may still refuse this numpy or Python
        return f"numba cannot be imported: {error}"
    settings: Any = numba.config  # its attributes are made when it is imported
    return "Numba compiles nothing, because NUMBA_DISABLE_JIT is set" if settings.DISABLE_JIT else None


def _reference_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    return None if dtype.is_floating_point else f"{dtype} is not a floating-point type"


def _make_cpu(device: torch.device) -> Ops:
    from loraserve.kernels.cpu_backend import CpuOps

    return CpuOps()


def _make_triton(device: torch.device) -> Ops:
    from loraserve.kernels.triton_backend import TritonOps

    return TritonOps(device)


_BACKENDS: dict[str, Backend] = {
    "triton": Backend(_triton_obstacle, _make_triton),
    "cpu": Backend(_cpu_obstacle, _make_cpu),
    "reference": Backend(_reference_obstacle, lambda device: ReferenceOps()),
}
