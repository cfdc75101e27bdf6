"""DoRA and trained biases → two vectors, gain and shift, by which a module's base output y changes: y·gain + shift."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from loraserve.errors import AdapterFault, AdapterRefused
from loraserve.kernels.metadata import Kind

# Elements of a base matrix that are looked at together. torch works on so few on the calling thread alone, which leaves
# the cores to the step loop.
_TILE = 16384


class BaseWeights(Protocol):
    """The base's own weights, as it is served with them; asked for by the loader's threads."""

    def rows(self, kind: Kind, layer: int, begin: int, end: int) -> Tensor:
        """Rows [begin, end) of a projection's weight [out, in] (embed: [vocab, hidden]) in float32.

        Raises `AdapterRefused` if this base's rows are not to be had.
        """
        ...

    def bias(self, kind: Kind, layer: int) -> Tensor | None:
        """A projection's bias [out] in float32, None if it has none."""
        ...


class Module(NamedTuple):
    """A module of the base."""

    kind: Kind
    layer: int
    num_rows: int  # of its weight
    num_columns: int


def dora_factor(module: Module, magnitude: Tensor, a: Tensor, b: Tensor, base: BaseWeights) -> Tensor:
    """What DoRA multiplies W + s·BA with: m / ‖row‖. a: [rank, in], b: [rank, out], s inside, float32 → [out].

    For embed the norm is over the vocabulary, so its `rows` are summed over. Not finite where a norm is zero.
    """
    step = max(1, _TILE // module.num_columns)
    over_rows = module.kind is Kind.EMBED
    squares = torch.zeros_like(magnitude)
    for begin in range(0, module.num_rows, step):
        end = min(begin + step, module.num_rows)
        rows = base.rows(module.kind, module.layer, begin, end)
        if over_rows:
            squares += rows.addmm(a[:, begin:end].T, b).square_().sum(0)
        else:
            squares[begin:end] = rows.addmm(b[:, begin:end].T, a).square_().sum(1)
    return magnitude / squares.sqrt_()


def need(base: BaseWeights | None) -> BaseWeights:
    """The base's weights. Raises `AdapterRefused` if there are none to compute with."""
    if base is None:
        raise AdapterRefused(
            AdapterFault.UNSUPPORTED_VARIANT, "the adapter changes base weights that are not at hand here"
        )
    return base
