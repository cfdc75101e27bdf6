"""The base's tables of which an adapter may bring rows itself: the vocabulary's two matrices and the norms' weights.

Nothing here needs torch. A norm's weight is one row of a table, so that saved norms and trained tokens are one thing.
"""

from __future__ import annotations

from loraserve.compat import StrEnum


class Table(StrEnum):
    """What the rows belong to."""

    EMBED = "embed"  # row i: the embedding of token i
    LM_HEAD = "lm_head"  # row i: the weights of token i's logit
    NORM = "norm"  # rows by `norm_row`, as wide as the hidden states
    HEAD_NORM = "head_norm"  # rows by `head_norm_row`, as wide as an attention head


VOCABULARY = (Table.EMBED, Table.LM_HEAD)

INPUT_NORM = "input_layernorm"
POST_NORM = "post_attention_layernorm"
Q_NORM = "self_attn.q_norm"
K_NORM = "self_attn.k_norm"
FINAL_NORM = "model.norm"
FINAL_NORM_ROW = 0


def norm_row(layer: int, name: str) -> int:
    """Row of a layer's INPUT_NORM or POST_NORM in the table NORM; the final norm's comes before them."""
    return 1 + 2 * layer + (name == POST_NORM)


def head_norm_row(layer: int, name: str) -> int:
    """Row of a layer's Q_NORM or K_NORM in the table HEAD_NORM."""
    return 2 * layer + (name == K_NORM)
