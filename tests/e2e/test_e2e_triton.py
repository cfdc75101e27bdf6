"""The whole engine on the Triton kernels, in Triton's interpreter: answers equal Hugging Face + PEFT."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_driver import Driver, engine_config
from tiny_models import ATTENTION, MLP, Oracle, make_adapter, make_model
from torch import Tensor
from variants import make_variant

ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"r": 5, "lora_alpha": 8, "target_modules": ATTENTION + MLP},
    "ends": {"r": 3, "lora_alpha": 6, "target_modules": ["embed_tokens", "lm_head", "o_proj"]},
    "dora": {"r": 3, "lora_alpha": 6, "use_dora": True, "target_modules": ["v_proj", "up_proj"]},
}
SAVED: dict[str, Any] = {"r": 3, "target_modules": ["q_proj", "down_proj"], "modules_to_save": ["lm_head", "norm"]}


class EagerGraphs:
    """A stand-in for CUDA graphs: a replay runs the computation again on the same arrays."""

    def capture(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        output = run()
        return lambda: output.copy_(run())


@pytest.mark.parametrize("graphs", [False, True])
def test_mixed_adapters_on_triton_kernels_equal_peft(tmp_path: Path, graphs: bool) -> None:
    model = make_model(
        tmp_path / "model", seed=3, num_hidden_layers=2, tie_word_embeddings=False, max_position_embeddings=64
    )
    for seed, (name, settings) in enumerate(ADAPTERS.items()):
        make_adapter(model, tmp_path / name, seed, **settings)
    make_variant(model, tmp_path / "saved", 9, **SAVED)
    oracle = Oracle(model)
    names: list[str | None] = [None, *ADAPTERS, "saved"]
    prompts = [[5, 9, 33, 120, 77, 201, 14], [8], [90, 4], [44, 45, 46, 47, 48], [17, 18]]
    config = engine_config(model, kernels="triton", scheduler={"max_running": 2, "prefill_chunk": 6})
    with Driver(config, graph_device=EagerGraphs() if graphs else None) as driver:
        assert driver.parts.info.kernels == "triton"
        for name in names[1:]:
            assert name is not None
            driver.load(name, tmp_path / name)
        ids = [driver.add(prompt, name, max_tokens=4) for name, prompt in zip(names, prompts, strict=True)]
        answers = driver.finish(*ids, seconds=200.0)
        for name, prompt, tokens in zip(names, prompts, answers, strict=True):
            assert tokens == oracle.greedy(tmp_path / name if name else None, prompt, 4), name
        driver.assert_idle()
