"""Model families as data: what an architecture's config means and how its weights are called. No torch here.

To add a family, add an entry to `FAMILIES`. Weights that a checkpoint stores already fused (Phi-3's `qkv_proj`) are a
`qkv` or `gate_up` of one name.
"""

from __future__ import annotations

from dataclasses import dataclass

from loraserve.compat import StrEnum


class Windowing(StrEnum):
    """Which layers see only a sliding window."""

    NONE = "none"
    ALL = "all"  # every layer, when the config has `sliding_window`
    LAYER_TYPES = "layer_types"  # those that the config's `layer_types` calls sliding_attention


@dataclass(frozen=True, slots=True)
class ModuleNames:
    """Paths of the modules in the Hugging Face model; those of a layer are relative to `layer`."""

    embed: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    lm_head: str = "lm_head"
    layer: str = "model.layers.{layer}"
    input_norm: str = "input_layernorm"
    post_norm: str = "post_attention_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    o: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"

    def in_layer(self, layer: int, module: str) -> str:
        """Full path of a layer's module."""
        return f"{self.layer.format(layer=layer)}.{module}"


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture. A bias switch is fixed, or the name of the config field that says it."""

    name: str
    architecture: str
    model_type: str
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    windowing: Windowing = Windowing.NONE
    partial_rotary: bool = False
    names: ModuleNames = ModuleNames()


FAMILIES: tuple[Family, ...] = (
    Family(
        name="llama",  # also SmolLM2 and every other model saved as Llama
        architecture="LlamaForCausalLM",
        model_type="llama",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    Family(
        name="mistral",
        architecture="MistralForCausalLM",
        model_type="mistral",
        windowing=Windowing.ALL,
    ),
    Family(
        name="qwen2",
        architecture="Qwen2ForCausalLM",
        model_type="qwen2",
        qkv_bias=True,
        windowing=Windowing.LAYER_TYPES,
    ),
    Family(
        name="qwen3",
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        windowing=Windowing.LAYER_TYPES,
    ),
    Family(
        name="phi3",
        architecture="Phi3ForCausalLM",
        model_type="phi3",
        windowing=Windowing.ALL,
        partial_rotary=True,
        names=ModuleNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
    ),
)


def family_of(architecture: str) -> Family | None:
    """The family that implements an architecture name of a HF config, or None."""
    return next((family for family in FAMILIES if family.architecture == architecture), None)


def supported_architectures() -> str:
    """The architecture names of all families, for error messages."""
    return ", ".join(family.architecture for family in FAMILIES)
