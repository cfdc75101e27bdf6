"""The whole engine on a pretended GPU: nothing mixes tensors of the host with tensors of the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_driver import Driver, engine_config
from pretend_cuda import DEVICE, DeviceMismatch, OnCuda, PretendCuda
from tiny_models import ATTENTION, MLP, Oracle, make_adapter, make_model

ADAPTERS = {
    "all": {"r": 4, "lora_alpha": 8, "target_modules": ATTENTION + MLP},
    "ends": {"r": 3, "lora_alpha": 6, "target_modules": ["embed_tokens", "lm_head", "q_proj"]},
    "dora": {"r": 3, "lora_alpha": 6, "use_dora": True, "target_modules": ["v_proj", "down_proj"]},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("cuda")
    make_model(root / "model", seed=3, tie_word_embeddings=False)
    for seed, (name, settings) in enumerate(ADAPTERS.items()):
        make_adapter(root / "model", root / name, seed, **settings)
    return root


def test_the_pretended_gpu_refuses_what_a_gpu_refuses() -> None:
    with PretendCuda():
        here, there = torch.ones(3), torch.ones(3, device=DEVICE)
        assert isinstance(there + 1, OnCuda)
        for mixed in (lambda: here + there, lambda: torch.stack([here, there]), lambda: here[there.long()]):
            with pytest.raises(DeviceMismatch):
                mixed()
        with pytest.raises(RuntimeError):
            there.numpy()
        assert there.cpu().numpy().tolist() == here.to(DEVICE).tolist() == [1.0, 1.0, 1.0]


def test_prefill_decode_and_adapters_stay_on_the_device(root: Path) -> None:
    oracle = Oracle(root / "model")
    prompts = [[5, 9, 33, 120, 77, 201, 14] * 3, [8, 4, 90]]
    config = engine_config(root / "model", kernels="reference", scheduler={"prefill_chunk": 8})
    wanted = [(name, prompt) for name in (None, *ADAPTERS) for prompt in prompts]
    expected = [oracle.greedy(root / name if name else None, prompt, 6) for name, prompt in wanted]
    with PretendCuda(), Driver(config, DEVICE) as driver:
        for name in ADAPTERS:
            driver.load(name, root / name)
        ids = [driver.add(prompt, name, max_tokens=6) for name, prompt in wanted]
        sampled = driver.add(prompts[0], "all", max_tokens=6, temperature=0.8, top_p=0.9, top_k=20, min_p=0.01, seed=3)
        told = driver.add(prompts[1], [("all", 0.5), ("dora", -1.0)], logprobs=2, prompt_logprobs=2, max_tokens=4)
        assert driver.finish(*ids) == expected
        assert [len(tokens) for tokens in driver.finish(sampled, told)] == [6, 4]
        assert driver.answers[told].outputs[0].logprobs
        driver.assert_idle()
