"""A model of transformers in float64 throughout: its norms, softmax and rotary angles ask for float32 by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class DoublePrecision(TorchFunctionMode):
    """Inside it, a cast to float32 is one to float64."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `func` with every float32 among its arguments replaced."""
        del types
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        kwargs = {name: _wider(value) for name, value in (kwargs or {}).items()}
        return func(*map(_wider, args), **kwargs)


def _wider(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
