"""What the Numba kernels share: how they are compiled, and an exponential that vectorises."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from loraserve.kernels.cpu_cache import imports_digest

logger = logging.getLogger(__name__)

# Sums may be reordered (else no reduction vectorises) and multiply-adds fused; NaN and infinity keep their meaning.
FAST_MATH = {"contract", "reassoc", "nsz", "arcp"}

# The kernels say themselves what runs in parallel; Numba's other rewrites would only cost compile time.
_REWRITES = ("comprehension", "reduction", "inplace_binop", "setitem", "numpy", "stencil", "fusion")
PRANGE_ONLY = {"prange": True} | dict.fromkeys(_REWRITES, False)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a kernel for one thread, cached on disk (beside the source, or in the user's cache if read-only)."""
    return _compile(function, parallel=False)


def compiled_parallel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a kernel whose `prange` loops run on Numba's threads.

    Never the same function as a `compiled` one: Numba's cache does not tell the two apart.
    """
    return _compile(function, parallel=True)


def _compile(function: Callable[..., Any], parallel: bool) -> Callable[..., Any]:
    try:
        # The name becomes that of the file in the cache.
        function.__qualname__ += f"-{imports_digest(function.__module__.rpartition('.')[2])}"
        return _jit(function, parallel, cache=True)
    except (RuntimeError, OSError) as error:  # neither the package's folder nor the user's cache can be written
        logger.info("%s is compiled anew at every start: %s; set NUMBA_CACHE_DIR", function.__name__, error)
        return _jit(function, parallel, cache=False)


def _jit(function: Callable[..., Any], parallel: bool, cache: bool) -> Callable[..., Any]:
    njit: Any = numba.njit  # its own annotations know `parallel` only as a bool
    # A copy of the options, because Numba empties the dict that it is given.
    options = dict(PRANGE_ONLY) if parallel else False
    kernel: Callable[..., Any] = njit(cache=cache, fastmath=FAST_MATH, error_model="numpy", parallel=options)(function)
    return kernel


@compiled
def fast_exp(x: Any) -> Any:
    """e^x of a float32 within 3e-7 relative, as arithmetic that LLVM turns into vector code; below −87 about 1e-38.

    Cephes' polynomial after the usual reduction x = n·ln2 + r; 2^n is built in the exponent bits.
    """
    x = np.float32(-87.0) if x < np.float32(-87.0) else x  # unlike max(), this lets NaN through
    x = np.float32(88.0) if x > np.float32(88.0) else x
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - n * np.float32(0.693359375)
    r = r - n * np.float32(-2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    power = np.int32((np.int32(n) + np.int32(127)) << np.int32(23))
    return p * power.view(np.float32)
