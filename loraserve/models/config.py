"""`ModelShape`: all that the rest of the system needs to know about a base model, read from its HF config.

Importing this module imports neither torch nor transformers; reading a config does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from loraserve.compat import StrEnum
from loraserve.models.families import Family, family_of

if TYPE_CHECKING:
    from pathlib import Path

    from loraserve.kernels.metadata import Kind, LoraTargetShape


class RopeType(StrEnum):
    """How the rotary frequencies are made; the names are those of transformers."""

    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    YARN = "yarn"
    LLAMA3 = "llama3"
    LONGROPE = "longrope"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding. Fields that the config does not give are None."""

    rope_type: RopeType
    theta: float
    rotary_dim: int  # first elements of a head that rotate
    max_position_embeddings: int
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None

    @property
    def context_threshold(self) -> int | None:
        """Context length above which a token's rotation depends on that length; None when it never does.

        Above it, the KV of equal token prefixes of two prompts of different lengths differs.
        """
        if self.rope_type is RopeType.DYNAMIC:
            return self.max_position_embeddings
        if self.rope_type is RopeType.LONGROPE:
            return self.original_max_position_embeddings
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A base model's sizes, features and special tokens."""

    family: str
    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int  # rows of the embedding
    max_context: int  # tokens
    rms_norm_eps: float
    activation: str  # silu, gelu or gelu_tanh, as `Ops.act_and_mul` names them
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]  # per layer: tokens that a position sees, itself included; None = all before it
    rope: RopeSpec
    eos_token_ids: tuple[int, ...]  # of the config and of the generation config, ascending
    bos_token_id: int | None
    pad_token_id: int | None
    dtype: str | None  # the checkpoint's, as torch names it; None when unknown (GGUF)

    @property
    def q_size(self) -> int:
        """Width of the q part of the fused qkv output."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the k part and of the v part of the fused qkv output."""
        return self.num_kv_heads * self.head_dim

    @property
    def family_data(self) -> Family:
        """The family's entry: feature switches and module names."""
        family = family_of(self.architecture)
        assert family is not None  # a shape is only made for a supported architecture
        return family

    def lora_targets(self) -> list[LoraTargetShape]:
        """Geometry of everything that an adapter may change; fused outputs lie q|k|v and gate|up."""
        from loraserve.kernels.metadata import Kind, LoraTargetShape

        hidden, inner, layers = self.hidden_size, self.intermediate_size, self.num_layers
        q, kv = self.q_size, self.kv_size
        return [
            LoraTargetShape(Kind.Q, hidden, q, 0, layers, self.qkv_bias),
            LoraTargetShape(Kind.K, hidden, kv, q, layers, self.qkv_bias),
            LoraTargetShape(Kind.V, hidden, kv, q + kv, layers, self.qkv_bias),
            LoraTargetShape(Kind.O, q, hidden, 0, layers, self.o_bias),
            LoraTargetShape(Kind.GATE, hidden, inner, 0, layers, self.mlp_bias),
            LoraTargetShape(Kind.UP, hidden, inner, inner, layers, self.mlp_bias),
            LoraTargetShape(Kind.DOWN, inner, hidden, 0, layers, self.mlp_bias),
            LoraTargetShape(Kind.EMBED, self.vocab_size, hidden, 0, 1),
            LoraTargetShape(Kind.LM_HEAD, hidden, self.vocab_size, 0, 1),
        ]

    def module_path(self, kind: Kind | str, layer: int) -> str:
        """Path of a target in the HF model, such as `model.layers.3.self_attn.q_proj`; embed and lm_head have layer 0.

        Where the checkpoint stores q|k|v or gate|up fused it is the fused module, of which a target is some rows.

        Raises `KeyError` for an unknown kind and `IndexError` for a layer that does not exist.
        """
        names = self.family_data.names
        outside = {"embed": names.embed, "lm_head": names.lm_head}
        inside = {"o": names.o, "down": names.down}
        for kinds, modules in ((("q", "k", "v"), names.qkv), (("gate", "up"), names.gate_up)):
            inside |= dict.fromkeys(kinds, modules[0]) if len(modules) == 1 else dict(zip(kinds, modules, strict=True))
        if kind in outside:
            if layer != 0:
                raise IndexError(f"{kind} has one layer, not {layer + 1}")
            return outside[kind]
        if not 0 <= layer < self.num_layers:
            raise IndexError(f"layer {layer} of a model with {self.num_layers} layers")
        return names.in_layer(layer, inside[kind])


def load_shape(path: Path) -> ModelShape:
    """Read the shape of the model at `path`, a folder or a `.gguf` file.

    Raises `UnsupportedModel` naming the architecture or feature that is not implemented, `ModelLoadError` for files
    that are missing or broken. Values of the generation config other than its token ids are not applied.
    """
    from loraserve.models.hf_config import read_shape

    return read_shape(path)
