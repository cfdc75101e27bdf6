"""A pretended `cuda:0`: real arithmetic on the CPU, and an error wherever a real GPU would refuse to mix devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

DEVICE = torch.device("cuda", 0)

# Operators that take tensors of several devices on a real GPU: copies, and indices that lie on the host.
_CROSSING = ("copy_", "_to_copy", "index", "index_put", "index_put_", "_index_put_impl_", "set_", "lift_fresh")


# What makes the host wait for an element.
_READS = (Tensor.tolist, Tensor.item, Tensor.__int__, Tensor.__float__, Tensor.__bool__, Tensor.__index__)


class DeviceMismatch(AssertionError):
    """What a real GPU would have raised for."""


class OnCuda(Tensor):
    """Says that it lies on `cuda:0`; its elements are `inner`, on the CPU."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnCuda:
        made = Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )
        made.inner = inner
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnCuda({self.inner!r})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A build without CUDA has no device guard for it, and indexing and copies ask for one before they dispatch.
        with torch._C.DisableTorchFunctionSubclass():
            if func is Tensor.__getitem__:
                _check_indexed(args[0], args[1])
                return OnCuda(args[0].inner[_unwrap(args[1])])
            if func is Tensor.__setitem__:
                _check_indexed(args[0], args[1])
                args[0].inner[_unwrap(args[1])] = _unwrap(args[2])
                return None
            if func is Tensor.copy_:
                _unwrap(args[0]).copy_(_unwrap(args[1]))
                return args[0]
            if func in _READS:
                PretendCuda.num_waits += 1
                return func(args[0].inner)
            if func in (torch.nonzero, Tensor.nonzero):
                PretendCuda.num_waits += 1
                return OnCuda(args[0].inner.nonzero())
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class PretendCuda(TorchDispatchMode):
    """While it is active, whatever is made on or moved to `cuda:0` becomes an `OnCuda`."""

    num_waits = 0  # how often the host had to know an element

    def __init__(self) -> None:
        super().__init__()
        # torch starts no CUDA runtime, which a CPU build does not have, while a mode of this key is active.
        self._mode_key = torch._C._TorchDispatchModeKey.FAKE

    def __enter__(self) -> PretendCuda:
        self._before = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor(…, device="cuda")` then goes through `to`
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        torch._C._set_only_lift_cpu_tensors(self._before)
        super().__exit__(*exc)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class EagerGraphs:
    """A stand-in for graphs: runs what was captured anew for each replay, into the tensor of the capture."""

    def __init__(self) -> None:
        self.num_captures = self.num_replays = 0

    def capture(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self.num_captures += 1
        output = run()

        def replay() -> Tensor:
            self.num_replays += 1
            output.copy_(run())
            return output

        return replay


def _check_indexed(indexed: Any, index: Any) -> None:
    if not isinstance(indexed, OnCuda) and _any_cuda(index):
        raise DeviceMismatch("a CPU tensor is indexed by one on cuda")


def _unwrap(tree: Any) -> Any:
    return tree_map(lambda value: value.inner if isinstance(value, OnCuda) else value, tree)


def _any_cuda(tree: Any) -> bool:
    found = False

    def look(value: Any) -> Any:
        nonlocal found
        found |= isinstance(value, OnCuda)
        return value

    tree_map(look, tree)
    return found


def _run(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    name = func.overloadpacket.__name__  # type: ignore[attr-defined]
    tensors: list[Tensor] = []
    tree_map(lambda v: tensors.append(v) if isinstance(v, Tensor) else None, (args, kwargs))
    ours = [t for t in tensors if isinstance(t, OnCuda)]
    if ours and name not in _CROSSING:
        strangers = [t for t in tensors if not isinstance(t, OnCuda) and t.dim() > 0]
        if strangers:
            raise DeviceMismatch(
                f"{func}: {len(ours)} tensors on cuda, {[tuple(t.shape) for t in strangers]} on the CPU"
            )
    if name in ("copy_",) or name.startswith(("index_put", "_index_put")):
        result_on_cuda = isinstance(args[0], OnCuda)
    elif name in ("index",):
        result_on_cuda = isinstance(args[0], OnCuda)
        if not result_on_cuda and ours:
            raise DeviceMismatch(f"{func}: a CPU tensor is indexed by one on cuda")
    else:
        result_on_cuda = bool(ours)
    if "device" in kwargs and kwargs["device"] is not None:
        result_on_cuda = torch.device(kwargs["device"]).type == "cuda"
        kwargs = kwargs | {"device": torch.device("cpu")}
    if kwargs.get("pin_memory"):
        kwargs = kwargs | {"pin_memory": False}

    originals = {id(t.inner): t for t in ours}
    out = func(*_unwrap(args), **_unwrap(kwargs))

    def wrap(value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, OnCuda):
            return value
        if id(value) in originals:  # an operator in place gives its own argument back
            return originals[id(value)]
        if not result_on_cuda:
            return value
        return OnCuda(value)

    if name == "_to_copy" and not result_on_cuda and ours:
        return out
    return tree_map(wrap, out)
