"""Base linears on CPU: oneDNN with the weight laid out once for its kernels."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

# The layout is chosen for this many rows. Measured with 1 to 512 rows: every hint from 16 up gives the same speed, a
# hint of 1 is up to twice as slow from 4 rows on.
_ROWS_HINT = 64


@dataclass(slots=True)
class OneDnnLinear:
    """A float32 weight in oneDNN's blocked layout; the plain copy is not kept."""

    packed: Tensor
    bias: Tensor | None
    in_features: int
    out_features: int

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return out


def pack(weight: Tensor, bias: Tensor | None) -> OneDnnLinear:
    """Lay out weight [out, in] float32 on CPU. Raises `RuntimeError` where torch has no oneDNN linears."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _ROWS_HINT)
    out_features, in_features = weight.shape
    return OneDnnLinear(packed, None if bias is None else bias.detach().contiguous(), in_features, out_features)


def is_available() -> bool:
    """Whether this build of torch has prepacked oneDNN linears and they compute the right thing here."""
    weight, bias, x = torch.randn(24, 40), torch.randn(24), torch.randn(3, 40)
    try:
        got = pack(weight, bias)(x)
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        logger.info("oneDNN prepacked linears are not available (%s); using torch's own", str(error).split("\n")[0])
        return False
    return torch.allclose(got, torch.nn.functional.linear(x, weight, bias), atol=1e-4)
