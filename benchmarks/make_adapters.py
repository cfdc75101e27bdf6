"""Random LoRA adapters in PEFT's format, to load a server with: `python -m benchmarks.make_adapters OUT --count 8`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors.torch import save_file

from loraserve.models.config import load_shape
from loraserve.models.demo import prepare_demo_model

_MODULE_NAMES = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj"}
_MODULE_NAMES |= {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def make_adapter(model: Path, folder: Path, rank: int, seed: int) -> None:
    """Write one adapter on all linear layers of the decoder, with small random A and B in float32."""
    shape = load_shape(model)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for target in shape.lora_targets():
        if str(target.kind) not in _MODULE_NAMES:
            continue
        for layer in range(target.num_layers):
            path = f"base_model.model.{shape.module_path(target.kind, layer)}"
            a = torch.randn(rank, target.in_features, generator=generator) * 0.02
            b = torch.randn(target.out_features, rank, generator=generator) * 0.02
            tensors |= {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank}
    config |= {"target_modules": sorted(_MODULE_NAMES.values())}
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main(
    out: Annotated[Path, typer.Argument(help="Folder to write r0, r1, … into.")],
    count: Annotated[int, typer.Option(help="How many.")] = 8,
    rank: Annotated[int, typer.Option(help="Rank of each.")] = 16,
    model: Annotated[Path | None, typer.Option(help="Folder of the base model (default: the demo model).")] = None,
) -> None:
    """Write random adapters of one rank on all linear layers."""
    base = model or prepare_demo_model()
    for index in range(count):
        make_adapter(base, out / f"r{index}", rank, seed=index)
    typer.echo(f"{count} adapters of rank {rank} in {out}")


if __name__ == "__main__":
    typer.run(main)
