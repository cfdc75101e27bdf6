"""Fixtures shared by all rooms' tests."""

from __future__ import annotations

import os

# Before anything imports torch or numba: idle threads must sleep, tests share the machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Progress bars of model loading drown what a failed test has to say.
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
