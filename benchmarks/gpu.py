"""One command for a GPU machine: `python -m benchmarks.gpu`. Verifies every kernel, then measures; under 8 minutes.

No downloads: models have random weights in the shape of Llama-3.1-8B, a 1B and Qwen2.5-0.5B. Results go to
`benchmarks/results/gpu-<card>.json` and, as tables, into `docs/performance.md`. `--smoke` runs all parts with tiny
shapes on the CPU, in Triton's interpreter: it proves the tool, and its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("verify", "kernels", "steps", "oversubscribed", "cold", "replay")
TARGETS = (
    "Targets: decode kernels ≥ 70 % of the copy rate from 32 rows on; LoRA tax ≤ 10 % with 32 rank-16 adapters at "
    "batch 32 on the 8B shape; prefill tax ≤ 10 %."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on the CPU, no results written")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to run (default: all)")
    parser.add_argument("--out", type=Path, default=None, help="results file (default: by the card's name)")
    args = parser.parse_args()
    if args.smoke:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    results = run(args.parts, args.smoke)
    text = render(results)
    print(text)
    if args.smoke and args.out is None:
        return
    card = re.sub(r"[^a-z0-9]+", "-", results["machine"]["name"].lower()).strip("-")
    out = args.out or ROOT / "benchmarks" / "results" / f"gpu-{card}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n")
    if not args.smoke:
        document = ROOT / "docs" / "performance.md"
        document.write_text(insert(document.read_text(encoding="utf-8"), text), encoding="utf-8")


def run(parts: Iterable[str], smoke: bool) -> dict[str, Any]:
    """All parts; one that fails says so in the results and does not end the others."""
    import torch

    from benchmarks.gpu_shapes import measure_machine
    from loraserve.kernels.triton_backend import TritonOps

    if not smoke and not torch.cuda.is_available():
        raise SystemExit("benchmarks.gpu needs a CUDA or ROCm device; --smoke runs without one")
    device = torch.device("cpu") if smoke else torch.device("cuda", 0)
    machine = measure_machine(device, torch.float32 if smoke else torch.bfloat16)
    ops = TritonOps(device)
    results: dict[str, Any] = {"machine": {"name": machine.name, "copy_gbs": machine.copy_gbs}}
    results["machine"] |= {"matmul_tflops": machine.matmul_tflops, "torch": torch.__version__}
    with tempfile.TemporaryDirectory() as folder:
        for name, part in _parts(machine, ops, Path(folder), smoke).items():
            if name not in parts:
                continue
            started = time.perf_counter()
            print(f"{name} …", flush=True)
            try:
                results[name] = part()
            except Exception as error:
                if smoke:
                    raise
                results[name] = {"failed": f"{type(error).__name__}: {error}"}
            results.setdefault("seconds", {})[name] = round(time.perf_counter() - started, 1)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return results


def _parts(machine: Any, ops: Any, folder: Path, smoke: bool) -> dict[str, Callable[[], Any]]:
    import torch

    from benchmarks import gpu_kernels, gpu_serving, gpu_steps

    def bench(model: str, rows: int, context: int, ranks: list[int]) -> gpu_steps.StepBench:
        return gpu_steps.StepBench(machine, ops, model, folder / f"shape-{model}", rows, context, ranks)

    def steps() -> list[dict[str, Any]]:
        if smoke:
            return gpu_steps.step_rates(machine, bench("tiny", 2, 8, [4, 8]), "tiny", [1, 2], [2])
        rows = []
        for model in ("8b", "1b", "0.5b"):
            try:
                made = bench(model, 256, 512, [16] * 256)
                rows += gpu_steps.step_rates(machine, made, model, [1, 32, 256], [1, 32, 128, 256])
                del made
            except torch.OutOfMemoryError:
                rows.append({"model": model, "step": "does not fit this card"})
            torch.cuda.empty_cache()
        return rows

    def replay() -> dict[str, Any]:
        if smoke:
            return gpu_steps.replay_equals_eager(machine, bench("tiny", 3, 8, [4, 9, 2]), 2)
        return gpu_steps.replay_equals_eager(machine, bench("1b", 64, 256, [8, 16, 64, 3] * 4), 300)

    def serving(slots: int) -> gpu_serving.Serving:
        model, adapters = folder / "model", folder / "adapters"
        if not model.exists():
            gpu_serving.save_model("tiny" if smoke else "0.5b", model, machine)
            gpu_serving.make_adapters(model, adapters, 3 if smoke else 65)
        return gpu_serving.Serving(machine, model, "triton", slots, 2 if smoke else 32, adapters)

    def oversubscribed() -> list[dict[str, Any]]:
        rows = []
        for count in (2,) if smoke else (8, 16, 64):
            engine = serving(1 if smoke else 8)
            try:
                size = (3, 2, 3) if smoke else (256, 32, 32)
                rows.append(gpu_serving.oversubscribed(engine, count, *size))
            finally:
                engine.parts.close()
        return rows

    def cold() -> dict[str, Any]:
        engine = serving(4 if smoke else 64)
        try:
            return gpu_serving.gap_of_a_cold_load(
                engine, 1 if smoke else 16, f"r{2 if smoke else 64}", 12 if smoke else 400
            )
        finally:
            engine.parts.close()

    return {
        "verify": lambda: gpu_kernels.verify(machine, ops, smoke),
        "kernels": lambda: gpu_kernels.kernel_table(machine, ops, smoke),
        "steps": steps,
        "oversubscribed": oversubscribed,
        "cold": cold,
        "replay": replay,
    }


def render(results: dict[str, Any]) -> str:
    """The results as Markdown tables."""
    machine = results["machine"]
    lines = [
        f"{machine['name']}: copy {machine['copy_gbs']:.0f} GB/s, matmul {machine['matmul_tflops']:.1f} TFLOP/s.",
        TARGETS,
    ]
    titles = {
        "verify": "Kernels against the reference",
        "kernels": "Kernels",
        "steps": "Model steps",
        "oversubscribed": "More adapters than the 8 slots",
        "cold": "A cold load beside running streams",
        "replay": "Captured steps against eager ones",
    }
    for name, title in titles.items():
        found = results.get(name)
        if found is None:
            continue
        lines += ["", f"### {title}", ""]
        if isinstance(found, dict) and "failed" in found:
            lines.append(f"Failed: {found['failed']}")
            continue
        rows = found if isinstance(found, list) else [found]
        columns = list(dict.fromkeys(key for row in rows for key in row))
        lines += ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
        lines += ["| " + " | ".join(_cell(row.get(column)) for column in columns) + " |" for row in rows]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)


def insert(document: str, tables: str) -> str:
    """The document with the tables between the marks of its GPU section. Raises `ValueError` without the marks."""
    marked = re.compile(r"(<!-- gpu -->\n).*?(\n<!-- /gpu -->)", re.DOTALL)
    found = marked.search(document)
    if found is None:
        raise ValueError("docs/performance.md has no place for the GPU's tables")
    return document[: found.end(1)] + tables + document[found.start(2) :]


if __name__ == "__main__":
    main()
