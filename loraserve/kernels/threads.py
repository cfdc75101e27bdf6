"""How many threads the engine computes with, and which pools run them.

Torch and Numba read these settings when they are imported, so `configure_threads` is the first thing that an engine
process calls; this module imports neither at the top.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import sys
from pathlib import Path
from typing import Any

from loraserve.errors import ConfigError

logger = logging.getLogger(__name__)

_CGROUP_LIMIT = Path("/sys/fs/cgroup/cpu.max")


def configure_threads(num_threads: int | None) -> int:
    """Set the thread pools up for `num_threads` (None: all cores this process may use) and return the number.

    Call before torch and numba are imported; afterwards only torch's own count can still be changed, and a warning says
    so. An OMP_WAIT_POLICY that the user has set is kept. Raises `ConfigError` for a number below 1.
    """
    if num_threads is not None and num_threads < 1:
        raise ConfigError(f"--threads must be at least 1, got {num_threads}")
    count = num_threads or available_cores()
    # Torch's and Numba's OpenMP pools are separate. Threads of one that spin while the other works steal its cores:
    # on a busy machine that made a step 30 times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # But waking a sleeping thread costs more than many an operator: threads look for work for about 0.1 ms first, the
    # time between two operators, which took a fifth off a step. Who shares the cores with others may set it lower.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
        os.environ[name] = str(count)
    imported = [name for name in ("torch", "numba") if name in sys.modules]
    if imported:
        logger.warning(
            "%s was imported before the thread pools were configured; idle threads may take cores",
            " and ".join(imported),
        )
        if "torch" in imported:
            sys.modules["torch"].set_num_threads(count)
    logger.info("computing with %d CPU threads", count)
    return count


def available_cores() -> int:
    """Cores that this process may use: its affinity, cut by a container's CPU quota."""
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity else os.cpu_count() or 1
    try:
        quota, period = _CGROUP_LIMIT.read_text().split()
        return max(1, min(count, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return max(1, count)


def use_best_layer() -> str:
    """Choose Numba's threading layer: `omp`, or `workqueue` (ten times slower to start) where OpenMP is missing.

    Import torch first, so that its own OpenMP library is the one that it gets. A layer that the user has chosen by
    NUMBA_THREADING_LAYER is kept. No effect once Numba has run a parallel function. Returns the layer's name.
    """
    settings: Any = importlib.import_module("numba").config
    if "NUMBA_THREADING_LAYER" not in os.environ:
        try:
            importlib.import_module("numba.np.ufunc.omppool")
            settings.THREADING_LAYER = "omp"
        except ImportError as error:
            logger.warning("Numba's OpenMP threads are not available (%s); using its slower workqueue", error)
            settings.THREADING_LAYER = "workqueue"
    return str(settings.THREADING_LAYER)
