"""Every Triton kernel in every configuration compiled for GPUs that are not here, and what it takes of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loraserve.kernels.triton_configs import Arch

SCRIPT = Path(__file__).with_name("triton_aot.py")
DOTS = {"lora_shrink", "lora_expand", "decode_attention", "extend_attention"}
KERNELS = DOTS | {"combine_splits", "plan_tiles", "lora_gather", "lora_affine"}
KERNELS |= {"norm_rows", "rotate_and_store", "gate_rows"}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Architecture → type → kernels; two processes compile at a time."""
    folder = tmp_path_factory.mktemp("aot")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    files = {arch.value: folder / f"{arch.value}.json" for arch in Arch}
    running: list[subprocess.Popen[str]] = []
    try:
        for pair in (list(files)[:2], list(files)[2:]):
            running = [
                subprocess.Popen(
                    [sys.executable, str(SCRIPT), arch, str(files[arch])], env=env, stderr=subprocess.PIPE, text=True
                )
                for arch in pair
            ]
            for process in running:
                _, errors = process.communicate(timeout=400)
                assert process.returncode == 0, errors
    finally:
        for process in running:
            process.kill()
    return {arch: json.loads(file.read_text()) for arch, file in files.items()}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("arch", list(Arch))
def test_kernels_are_built_without_spills_with_matrix_units_and_wide_accesses(
    reports: Any, arch: Arch, dtype: str
) -> None:
    found = reports[arch.value][dtype]
    assert {report["kernel"] for report in found} == KERNELS
    assert len(found) > 35
    for report in found:
        assert report["spills"] == 0, report
        assert report["shared"] <= report["limit"], report
        assert report["matrix"] is (report["kernel"] in DOTS), report
        assert 0 < report["registers"] <= 512, report
        if report["kernel"] in DOTS:
            # The sizes are multiples of 16: a lost hint of that would make every access one element wide.
            assert report["narrow"] == 0, report
