"""Compiled kernels on disk: used again while nothing they contain has changed, and never afterwards."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import loraserve.kernels
from loraserve.kernels.cpu_cache import imports_digest

KERNELS = Path(loraserve.kernels.__file__).parent

# silu_rows stands in cpu_pointwise.py, the exponential that it calls in cpu_math.py. SiLU of 1, times 3.
SILU = """
import numpy as np
from loraserve.kernels.cpu_pointwise import silu_rows
out = np.empty((1, 1), np.float32)
silu_rows(np.float32([[1, 3]]), out, 0, 1)
print(out[0, 0], sum(silu_rows.stats.cache_hits.values()))
"""


def run(root: Path) -> tuple[float, int]:
    """In a process of its own: SiLU of 1, times 3, and how many kernels came from the cache."""
    environment = os.environ | {"PYTHONPATH": str(root), "NUMBA_CACHE_DIR": str(root / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", SILU], env=environment, cwd=root, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    value, hits = done.stdout.split()
    return float(value), int(hits)


def test_an_upgrade_of_a_file_that_kernels_call_into_is_not_lost(tmp_path: Path) -> None:
    copy = tmp_path / "loraserve" / "kernels"
    shutil.copytree(KERNELS.parent, copy.parent, ignore=shutil.ignore_patterns("__pycache__"))
    silu = 3 / (1 + math.exp(-1))
    assert run(tmp_path) == (pytest.approx(silu, rel=1e-6), 0)
    assert run(tmp_path) == (pytest.approx(silu, rel=1e-6), 1)
    shared = copy / "cpu_math.py"
    source = shared.read_text()
    shared.write_text(source.replace("return p * power.view(np.float32)", "return np.float32(4) + x"))
    assert shared.read_text() != source
    assert run(tmp_path) == (pytest.approx(3 / (1 + 4 - 1), rel=1e-6), 0)


def test_a_digest_covers_imports_of_imports_and_nothing_else(tmp_path: Path) -> None:
    sources = {
        "one": "import os\nfrom loraserve.kernels.two import b\n",
        "two": "from loraserve.kernels import three, one\n",
        "three": "def f():\n    import loraserve.kernels.four\n",
        "four": "x = 1\n",
        "five": "x = 1\n",
    }

    def digest(changed: str | None = None) -> str:
        folder = tmp_path / f"{changed}"
        folder.mkdir()
        for name, source in sources.items():
            (folder / f"{name}.py").write_text(source + "y = 2\n" if name == changed else source)
        return imports_digest("one", folder)

    original = digest()
    assert [name for name in sources if digest(name) != original] == ["two", "three", "four"]
