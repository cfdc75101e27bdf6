"""Compile what the Triton backend launches, for a GPU that is not there, and report what it takes of one.

Run without TRITON_INTERPRET: `python triton_aot.py sm90 OUT.json`. The real backend calls its real kernels with
tensors on the CPU; a driver in place of the GPU's compiles for the wanted target and launches nothing.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from loraserve.kernels import triton_attention, triton_lora, triton_pointwise
from loraserve.kernels.metadata import AttentionBatch, LoraSegments, LoraTarget
from loraserve.kernels.triton_backend import TritonOps
from loraserve.kernels.triton_configs import SHARED_MEMORY, Arch

TARGETS = {
    Arch.SM80: GPUTarget("cuda", 80, 32),
    Arch.SM90: GPUTarget("cuda", 90, 32),
    Arch.SM100: GPUTarget("cuda", 100, 32),
    Arch.GFX942: GPUTarget("hip", "gfx942", 64),
}
HEADS = {64: (14, 2), 80: (32, 32), 96: (32, 8), 128: (32, 8), 256: (16, 8)}  # head_dim → heads, KV heads
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class CompilingDriver:
    """A driver whose device takes every kernel and runs none."""

    def __init__(self, arch: Arch) -> None:
        self.target = TARGETS[arch]
        self.max_shared = SHARED_MEMORY[arch]
        self.utils = self
        self.kernels: dict[str, Any] = {}

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": self.max_shared}

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[Any, ...]:
        return object(), 0, 0, 0, 1024

    def unload_module(self, module: Any) -> None:
        pass

    def launcher_cls(self, src: Any, metadata: Any) -> Any:
        return lambda *args: None


def launch_everything(ops: TritonOps, dtype: torch.dtype) -> None:
    """Every kernel in every class of shape: few elements, but the sizes of real models, so that alignment is real."""
    x = torch.zeros(2, 4096, dtype=dtype)
    ops.rms_norm(x, x[0], 1e-5)
    ops.add_rms_norm(x, x.clone(), x[0], 1e-5)
    for activation in ("silu", "gelu", "gelu_tanh"):
        ops.act_and_mul(x, activation)
    for head_dim, (heads, kv_heads) in HEADS.items():
        _launch_attention(ops, dtype, head_dim, heads, kv_heads)
    for num_triples in (32, 512):  # decode and prefill tiles
        _launch_lora(ops, dtype, num_triples)


def launch_float32(ops: TritonOps) -> None:
    """What takes the most shared memory when elements have four bytes: it must still fit."""
    _launch_attention(ops, torch.float32, 256, *HEADS[256])


def _launch_attention(ops: TritonOps, dtype: torch.dtype, head_dim: int, heads: int, kv_heads: int) -> None:
    cache = torch.zeros(64, kv_heads, head_dim, dtype=dtype)
    angle = torch.zeros(2, head_dim // 2)
    qkv = torch.zeros(2, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    norm = torch.ones(head_dim, dtype=dtype) if head_dim == 128 else None
    q = ops.rope_write_kv(qkv, angle, angle, cache, cache, torch.zeros(2, dtype=torch.int32), norm, norm, 1e-5)
    for num_decode, length, window, cap in ((1, 4000, None, None), (2, 10, None, None), (0, 4000, 512, 30.0)):
        if head_dim != 128:
            if num_decode == 2:
                continue  # without splits less is computed, the same for each head
            window = cap = None
        batch = AttentionBatch(
            req_rows=torch.zeros(2, dtype=torch.int32),
            q_indptr=torch.arange(3, dtype=torch.int32),
            seq_lens=torch.ones(2, dtype=torch.int32),
            locations=torch.zeros(2, 4096, dtype=torch.int32),
            num_decode=num_decode,
            max_seq_len=length,
            max_q_len=1,
        )
        ops.attention(q, cache, cache, batch, 0.1, window, cap)


def _launch_lora(ops: TritonOps, dtype: torch.dtype, num_triples: int) -> None:
    storage = torch.zeros(64, dtype=dtype)
    pages, ranks = torch.zeros(2, 4, 32, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.int32)

    def target(width_in: int, width_out: int, column: int = 0, page_rows: int = 8) -> LoraTarget:
        affine = torch.zeros(2, 4, dtype=torch.bool)
        return LoraTarget(storage, pages, pages, ranks, page_rows, width_in, width_out, column, affine, alignment=16)

    def segments(max_per_token: int) -> LoraSegments:
        return LoraSegments(
            tokens=torch.zeros(num_triples, dtype=torch.int32),
            weights=torch.zeros(num_triples),
            slots=torch.zeros(4, dtype=torch.int32),
            indptr=torch.zeros(5, dtype=torch.int32),
            max_segment=num_triples,
            max_per_token=max_per_token,
        )

    plain = segments(1)
    qkv = (target(4096, 4096), target(4096, 1024, 4096), target(4096, 1024, 5120))
    x, y = torch.zeros(1, 4096, dtype=dtype), torch.zeros(1, 6144, dtype=dtype)
    for group in (qkv, qkv[:2], qkv[:1]) if num_triples == 32 else (qkv,):
        ops.lora_apply(y, x, group, 0, plain)
    ops.lora_apply(y, x, (target(4096, 6144, page_rows=1),), 0, plain)  # lm_head
    ops.lora_embed(y, torch.zeros(1, dtype=torch.int64), target(4096, 6144, page_rows=1), plain)
    ops.lora_affine(y, qkv[:1], 0, plain)
    blend = segments(2)
    ops.lora_apply(y, x, qkv, 0, blend)
    ops.lora_affine(y, qkv[:1], 0, blend)


def report_of(name: str, kernel: Any, arch: Arch) -> dict[str, Any]:
    """Registers, spilled bytes, shared memory, matrix instructions and 16-bit accesses of a compiled kernel."""
    asm = kernel.asm
    report = {"kernel": name, "shared": kernel.metadata.shared, "limit": SHARED_MEMORY[arch]}
    if arch is Arch.GFX942:
        text = asm["amdgcn"]
        report["registers"] = int(re.search(r"\.vgpr_count:\s+(\d+)", text)[1])
        report["spills"] = int(re.search(r"\.vgpr_spill_count:\s+(\d+)", text)[1])
        report["matrix"] = "v_mfma" in text
        report["narrow"] = len(re.findall(r"(?:global|buffer)_(?:load_ushort|store_short)\b", text))
        return report
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        usage = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    report["registers"] = int(re.search(r"REG:(\d+)", usage)[1])
    report["spills"] = int(re.search(r"STACK:(\d+)", usage)[1]) + int(re.search(r"LOCAL:(\d+)", usage)[1])
    report["matrix"] = re.search(r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma)", asm["ptx"]) is not None
    report["narrow"] = len(re.findall(r"\b(?:ld|st)\.global\.b16\b", asm["ptx"]))
    return report


def main(arch: Arch) -> dict[str, list[dict[str, Any]]]:
    """Compile for one target, in both 16-bit types. → type → reports."""
    triton.runtime.driver.set_active(CompilingDriver(arch))
    kernels = [
        (name, function)
        for module in (triton_attention, triton_lora, triton_pointwise)
        for name, function in vars(module).items()
        if isinstance(function, triton.runtime.JITFunction)
    ]
    if SHARED_MEMORY[arch] < 128 * 1024:
        launch_float32(TritonOps(torch.device("cpu"), num_units=100, arch=arch))  # raises where it does not fit
    found: dict[str, list[dict[str, Any]]] = {}
    for dtype in (torch.bfloat16, torch.float16):
        for _, function in kernels:
            function.device_caches.clear()
        launch_everything(TritonOps(torch.device("cpu"), num_units=100, arch=arch), dtype)
        found[str(dtype).removeprefix("torch.")] = [
            report_of(name, kernel, arch)
            for name, function in kernels
            if 0 in function.device_caches
            for kernel in function.device_caches[0][0].values()
        ]
    return found


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(Arch(sys.argv[1]))))
