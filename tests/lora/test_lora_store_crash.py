"""The store's process is killed in the middle of whatever it does; what is found afterwards is whole.

`LORASERVE_CRASH_STEP=1` kills at every single line of the store's code instead of every few.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

STEP = int(os.environ.get("LORASERVE_CRASH_STEP", "29"))


def crash(tmp_path: Path, *how: str) -> int:
    """Number of kills."""
    result = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("store_crasher.py")), str(tmp_path), *how],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, f"{how}: {result.stderr}"
    return int(result.stdout)


def test_killed_at_any_line(tmp_path: Path) -> None:
    first = random.Random().randint(1, STEP)  # over many runs every line has its turn
    assert crash(tmp_path, "lines", str(first), str(STEP)) > 800 // STEP


def test_killed_before_each_effect(tmp_path: Path) -> None:
    assert crash(tmp_path, "effects") > 200
