"""Checkpoints on disk: layouts, ties, dtypes, and every way in which one can be wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import TOLERANCE, VOCAB, Sample, backends, hf_logits, load, random_tokens, save_random_model, serve
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from tiny_gguf import write_gguf
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from loraserve.errors import ModelLoadError, UnsupportedModel
from loraserve.kernels.reference import ReferenceLinear, ReferenceOps
from loraserve.models.config import load_shape
from loraserve.models.files import HUB_ALLOW, HUB_IGNORE
from loraserve.models.loading import load_decoder, resolve_dtype, resolve_model_path

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
TOKENS = random_tokens(12, 3)
WEIGHTS = "model.safetensors"
Q0 = "model.layers.0.self_attn.q_proj.weight"


def save(folder: Path, **overrides: Any) -> Any:
    return save_random_model(folder, LlamaConfig(**SMALL | overrides))


def rewrite(folder: Path, **changes: Tensor | None) -> None:
    """Change tensors of a single-file checkpoint; None removes one."""
    tensors: dict[str, Tensor | None] = {**load_file(folder / WEIGHTS), **changes}
    kept = {name: tensor.clone() for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / WEIGHTS, metadata={"format": "pt"})


def assert_equal_to(model: Any, folder: Path) -> None:
    for ops in backends().values():
        got, _ = serve(load(folder, ops), [Sample(TOKENS, 12)], 256)
        torch.testing.assert_close(got[0], hf_logits(model, TOKENS, 12), atol=TOLERANCE, rtol=0)


# -- layouts ----------------------------------------------------------------------------------------------------------


def test_sharded(tmp_path: Path) -> None:
    model = save(tmp_path)
    (tmp_path / WEIGHTS).unlink()
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert not (tmp_path / WEIGHTS).exists()
    assert_equal_to(model, tmp_path)


def test_old_rotary_buffers_are_ignored(tmp_path: Path) -> None:
    model = save(tmp_path)
    rewrite(tmp_path, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)})
    assert_equal_to(model, tmp_path)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_half_precision_checkpoint_in_float32(tmp_path: Path, stored: torch.dtype) -> None:
    save(tmp_path).to(stored).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert_equal_to(model, tmp_path)


def test_bfloat16_follows_float32(tmp_path: Path) -> None:
    model = save(tmp_path)
    decoder = load_decoder(tmp_path, load_shape(tmp_path), torch.bfloat16, "cpu", ReferenceOps())
    assert decoder.weights.embed.dtype == torch.bfloat16
    assert decoder.num_bytes == sum(p.numel() for p in model.parameters()) * 2


def test_weights_share_no_memory_with_the_file(tmp_path: Path) -> None:
    model = save(tmp_path)
    decoder = load(tmp_path, ReferenceOps())
    expected = hf_logits(model, TOKENS, 12)
    with (tmp_path / WEIGHTS).open("r+b") as file:
        file.seek(-5000, os.SEEK_END)
        file.write(bytes(5000))
    got, _ = serve(decoder, [Sample(TOKENS, 12)], 256)
    torch.testing.assert_close(got[0], expected, atol=TOLERANCE, rtol=0)


# -- tied heads -------------------------------------------------------------------------------------------------------


def test_tied_head_is_the_embedding_itself_where_the_backend_keeps_weights(tmp_path: Path) -> None:
    save(tmp_path, tie_word_embeddings=True)
    decoder = load(tmp_path, ReferenceOps())
    head = decoder.weights.lm_head
    assert isinstance(head, ReferenceLinear)
    assert head.weight is decoder.weights.embed
    size = decoder.weights.nbytes
    assert (size.embedding, size.head) == (VOCAB * 24 * 4, 0)


@pytest.mark.parametrize("also", ["equal", "different"])
def test_tied_checkpoint_with_both_tensors(tmp_path: Path, also: str) -> None:
    save(tmp_path, tie_word_embeddings=True)
    embed = load_file(tmp_path / WEIGHTS)["model.embed_tokens.weight"]
    rewrite(tmp_path, **{"lm_head.weight": embed if also == "equal" else embed.flip(0)})
    # transformers ties the two only if they are equal.
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight) == (also == "equal")
    assert_equal_to(model, tmp_path)


def test_tied_checkpoint_with_the_head_only(tmp_path: Path) -> None:
    model = save(tmp_path, tie_word_embeddings=True)
    embed = load_file(tmp_path / WEIGHTS)["model.embed_tokens.weight"]
    rewrite(tmp_path, **{"lm_head.weight": embed, "model.embed_tokens.weight": None})
    assert_equal_to(model, tmp_path)


# -- broken checkpoints -----------------------------------------------------------------------------------------------


def refusal(folder: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load(folder, ReferenceOps())
    return caught.value.message


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    save(tmp_path)
    rewrite(tmp_path, **{Q0: None})
    assert f"lacks {Q0}" in refusal(tmp_path)


def test_untied_checkpoint_without_head(tmp_path: Path) -> None:
    save(tmp_path)
    rewrite(tmp_path, **{"lm_head.weight": None})
    assert "lacks lm_head.weight" in refusal(tmp_path)


def test_many_missing_tensors_are_counted(tmp_path: Path) -> None:
    save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    message = refusal(tmp_path)
    assert "model.layers.2." in message
    assert "and 4 more" in message


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.2.mlp.up_proj.weight", "score"])
def test_unknown_tensor_is_named(tmp_path: Path, name: str) -> None:
    save(tmp_path)
    rewrite(tmp_path, **{name: torch.zeros(24)})
    message = refusal(tmp_path)
    assert name in message
    assert "LlamaForCausalLM" in message


def test_wrong_shape_shows_both(tmp_path: Path) -> None:
    save(tmp_path)
    rewrite(tmp_path, **{Q0: torch.zeros(24, 23)})
    message = refusal(tmp_path)
    assert all(part in message for part in (Q0, "[24, 23]", "[24, 24]"))


def test_quantized_tensor_is_named(tmp_path: Path) -> None:
    save(tmp_path)
    rewrite(tmp_path, **{Q0: torch.zeros(24, 24, dtype=torch.int8)})
    message = refusal(tmp_path)
    assert Q0 in message
    assert "I8" in message


def test_truncated_file(tmp_path: Path) -> None:
    save(tmp_path)
    content = (tmp_path / WEIGHTS).read_bytes()
    (tmp_path / WEIGHTS).write_bytes(content[:-100])
    assert WEIGHTS in refusal(tmp_path)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Two shards with an index."""
    save(tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    (tmp_path / WEIGHTS).unlink()
    first = {name: tensors[name] for name in sorted(tensors)[:5]}
    rest = {name: tensors[name] for name in sorted(tensors)[5:]}
    save_file(first, tmp_path / "a.safetensors")
    save_file(rest, tmp_path / "b.safetensors")
    write_index(tmp_path, dict.fromkeys(first, "a.safetensors") | dict.fromkeys(rest, "b.safetensors"))
    return tmp_path


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def read_index(folder: Path) -> dict[str, str]:
    index: dict[str, str] = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    return index


def test_missing_shard_is_named(sharded: Path) -> None:
    (sharded / "b.safetensors").unlink()
    assert "b.safetensors" in refusal(sharded)


def test_index_that_puts_a_tensor_in_the_wrong_shard(sharded: Path) -> None:
    write_index(sharded, read_index(sharded) | {"lm_head.weight": "b.safetensors"})
    assert "lm_head.weight" in refusal(sharded)


def test_tensor_in_two_shards(sharded: Path) -> None:
    save_file(load_file(sharded / "b.safetensors") | {"lm_head.weight": torch.zeros(1)}, sharded / "b.safetensors")
    assert "lm_head.weight is in both" in refusal(sharded)


@pytest.mark.parametrize("shard", ["../b.safetensors", "/etc/b.safetensors", "b.bin", 3])
def test_index_that_leaves_its_folder(sharded: Path, shard: Any) -> None:
    write_index(sharded, read_index(sharded) | {"lm_head.weight": shard})
    assert repr(shard) in refusal(sharded)


def test_index_without_weight_map(sharded: Path) -> None:
    write_index(sharded, None)
    assert "weight_map" in refusal(sharded)


def test_folders_that_hold_no_base_model(tmp_path: Path) -> None:
    assert "no weights" in refusal_of_shape(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "never read" in refusal_of_shape(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "is an adapter" in refusal_of_shape(tmp_path)
    (tmp_path / "a.gguf").write_bytes(b"")
    (tmp_path / "b.gguf").write_bytes(b"")
    assert "several GGUF files (a.gguf, b.gguf)" in refusal_of_shape(tmp_path)
    assert "neither" in refusal_of_shape(tmp_path / "nowhere")


def refusal_of_shape(folder: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load_shape(folder)
    return caught.value.message


# -- GGUF -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["file", "folder"])
def test_gguf(tmp_path: Path, by: str) -> None:
    model = save(tmp_path / "source")
    gguf = tmp_path / "tiny.gguf"
    write_gguf(gguf, model)
    path = resolve_model_path(str(gguf if by == "file" else tmp_path))
    shape = load_shape(path)
    assert shape.architecture == "LlamaForCausalLM"
    assert shape.eos_token_ids == (6,)
    assert resolve_dtype("auto", shape, "cpu") == torch.float32
    assert resolve_dtype("auto", shape, "cuda") == torch.bfloat16
    assert_equal_to(model, path)


def test_gguf_with_frequency_factors_is_refused(tmp_path: Path) -> None:
    gguf = tmp_path / "tiny.gguf"
    write_gguf(gguf, save(tmp_path / "source"), **{"rope_freqs.weight": torch.ones(3)})
    with pytest.raises(UnsupportedModel, match=r"rope_freqs\.weight"):
        load(gguf, ReferenceOps())


def test_gguf_that_is_broken(tmp_path: Path) -> None:
    gguf = tmp_path / "tiny.gguf"
    gguf.write_bytes(b"GGUF and nothing else")
    assert "tiny.gguf" in refusal(gguf)


# -- dtype and path ---------------------------------------------------------------------------------------------------


def test_resolve_dtype(tmp_path: Path) -> None:
    model = save(tmp_path)
    shape = load_shape(tmp_path)
    assert resolve_dtype("auto", shape, "cpu") == torch.float32
    assert resolve_dtype("auto", shape, "cuda") == torch.float32
    assert resolve_dtype("float16", shape, "cpu") == torch.float16
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    shape = load_shape(tmp_path)
    assert resolve_dtype("auto", shape, "cpu") == torch.float32
    assert resolve_dtype("auto", shape, torch.device("cuda", 0)) == torch.bfloat16
    assert resolve_dtype("float32", shape, "cuda") == torch.float32
    model.to(torch.float16).save_pretrained(tmp_path)
    shape = load_shape(tmp_path)
    assert resolve_dtype("auto", shape, "cpu") == torch.float32
    assert resolve_dtype("auto", shape, "cuda") == torch.float16


def test_dtype_that_nothing_computes_in(tmp_path: Path) -> None:
    save(tmp_path).to(torch.float64).save_pretrained(tmp_path)
    shape = load_shape(tmp_path)
    with pytest.raises(UnsupportedModel, match="float64"):
        resolve_dtype("auto", shape, "cuda")
    assert resolve_dtype("auto", shape, "cpu") == torch.float32


def test_local_paths(tmp_path: Path) -> None:
    assert resolve_model_path(str(tmp_path)) == tmp_path
    with pytest.raises(ModelLoadError, match="--revision"):
        resolve_model_path(str(tmp_path), "main")
    (tmp_path / "x.txt").write_text("")
    with pytest.raises(ModelLoadError, match="neither a model folder"):
        resolve_model_path(str(tmp_path / "x.txt"))
    with pytest.raises(ModelLoadError, match="does not exist"):
        resolve_model_path(str(tmp_path / "nowhere"))


def test_what_is_downloaded() -> None:
    wanted = ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "config.json", "tokenizer.model"]
    wanted += ["generation_config.json", "tokenizer.json", "merges.txt", "chat_template.jinja"]
    others = ["pytorch_model.bin", "pytorch_model.bin.index.json", "original/consolidated.00.pth", "training_args.bin"]
    others += ["consolidated.safetensors", "checkpoint-5/model.safetensors", "model.onnx", "m.gguf", "modeling_x.py"]
    got = filter_repo_objects(wanted + others, allow_patterns=HUB_ALLOW, ignore_patterns=HUB_IGNORE)
    assert list(got) == wanted


def test_hub_model_comes_from_the_cache_at_its_revision(tmp_path: Path) -> None:
    """Offline, so that only the cache can answer; in its own process, since the Hub client reads its settings once."""
    repo = tmp_path / "models--org--name"
    for revision, commit in (("main", "a" * 40), ("v2", "b" * 40)):
        (repo / "refs").mkdir(parents=True, exist_ok=True)
        (repo / "refs" / revision).write_text(commit)
        save(repo / "snapshots" / commit)
    code = (
        "from loraserve.errors import ModelLoadError\n"
        "from loraserve.models.files import resolve_model_path\n"
        "print(resolve_model_path('org/name').name, resolve_model_path('org/name', 'v2').name)\n"
        "try: resolve_model_path('org/name', 'v3')\n"
        "except ModelLoadError as error: print(error.message)\n"
        "try: resolve_model_path('org/other')\n"
        "except ModelLoadError as error: print(error.message)\n"
    )
    env = os.environ | {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["a" * 40, "b" * 40]
    assert "org/name at revision v3" in lines[1]
    assert "org/other" in lines[2]
