"""Fixtures shared by all rooms' tests."""

from __future__ import annotations

import os

from hypothesis import settings

# Before anything imports torch or numba: idle threads must sleep, tests share the machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# The Triton kernels run on the CPU, in Triton's interpreter; it must know before anything imports a kernel.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Progress bars of model loading drown what a failed test has to say.
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TQDM_DISABLE", "1")

# The same examples in every run, so that a red run can be repeated and a change is not blamed for an old find;
# LORASERVE_FUZZ=1 draws new ones.
settings.register_profile("repeatable", derandomize=True)
if not os.environ.get("LORASERVE_FUZZ"):
    settings.load_profile("repeatable")
