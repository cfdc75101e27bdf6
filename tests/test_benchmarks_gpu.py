"""The GPU benchmark as a tool: its parts run on tiny shapes, and its tables find their place in the document."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import gpu

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "performance.md"


def test_parts_run_on_tiny_shapes_and_verify() -> None:
    results = gpu.run(["verify", "replay"], smoke=True)
    assert {row["ok"] for row in results["verify"]} == {True}
    assert results["replay"]["ok"]
    json.dumps(results)
    text = gpu.render(results)
    assert text.count("###") == 2
    assert "| rms_norm |" in text


def test_a_part_that_failed_is_told_and_tables_replace_the_old_ones() -> None:
    machine = {"name": "card", "copy_gbs": 3000.0, "matmul_tflops": 700.0}
    text = gpu.render({"machine": machine, "steps": {"failed": "OutOfMemoryError: no"}})
    assert "Failed: OutOfMemoryError: no" in text
    document = DOCUMENT.read_text(encoding="utf-8")
    once = gpu.insert(document, text)
    assert "3000 GB/s" in once
    assert gpu.insert(once, text) == once
    with pytest.raises(ValueError, match="no place"):
        gpu.insert("# nothing", text)
