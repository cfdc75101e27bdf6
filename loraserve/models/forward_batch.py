"""`ForwardBatch`: one step's device tensors, all that the decoder reads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from loraserve.kernels.metadata import AttentionBatch, LoraSegments
from loraserve.models.replaced import LogitsRows, StepRows


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Tokens of all sequences of the step, concatenated; decode sequences first, then prefill chunks."""

    input_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    out_loc: Tensor  # [num_tokens] int32, where each token's K and V go in the cache
    context_lens: Tensor  # [num_tokens] int64, max(prompt length, position + 1): only dynamic RoPE reads it
    attention: AttentionBatch
    logits_rows: Tensor  # [num_rows] int64, tokens whose logits are wanted
    lora: LoraSegments | None  # over tokens
    lora_logits: LoraSegments | None  # over logits_rows (token index = row of the gathered hidden states)
    rows: StepRows | None = None  # over tokens: what their adapters bring in place of the base's
    rows_logits: LogitsRows | None = None  # over logits_rows
