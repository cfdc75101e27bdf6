"""What an adapter's folder holds, found out without a server and without loading the base model's weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loraserve.config import Dtype
from loraserve.errors import AdapterFault, AdapterRefused
from loraserve.lora.container import TensorReader
from loraserve.lora.format import parse_adapter
from loraserve.lora.spec import AdapterSpec, BaseGeometry, LoadReport, TensorRef
from loraserve.lora.strict_json import show
from loraserve.lora.version import content_version
from loraserve.models.config import ModelShape, load_shape

_PIECE = 1 << 18  # elements looked at together


@dataclass(frozen=True, slots=True)
class Base:
    """A base model of which only the config was read."""

    path: Path
    shape: ModelShape
    geometry: BaseGeometry


@dataclass(frozen=True, slots=True)
class DeviceNeed:
    """What an adapter takes of the device pool of one base model, whole pages counted."""

    model: str
    dtype: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """The load report of an adapter; `device` is None where no base model was given."""

    report: LoadReport
    files: tuple[str, ...]
    device: DeviceNeed | None

    def as_json(self) -> dict[str, Any]:
        """Plain data, fit for `json.dumps`."""
        return self.report.plain() | {
            "files": self.files,
            "device": None if self.device is None else asdict(self.device),
        }


def open_base(model: str | None, revision: str | None = None) -> Base:
    """Read a base model's config; None is the demo model. Raises `ModelLoadError`, `UnsupportedModel`."""
    from loraserve.engine.build import geometry_of
    from loraserve.models.demo import prepare_demo_model
    from loraserve.models.files import resolve_model_path

    path = prepare_demo_model() if model is None else resolve_model_path(model, revision)
    shape = load_shape(path)
    names = tuple(dict.fromkeys(name for name in (model, path.name) if name))
    return Base(path, shape, geometry_of(shape, path, names))


def inspect_folder(
    folder: Path, *, base: Base | None, max_rank: int, page_rows: int, dtype: Dtype = "auto"
) -> Inspection:
    """Check everything that a load would check, and report. Raises `AdapterRefused`.

    Without a base, layers and sizes are not checked, and values must be finite in float32. With one, they must be
    finite in the dtype it would be served in. `max_rank` and `page_rows` are the server's.
    """
    spec = parse_adapter(folder, None if base is None else base.geometry, max_rank)
    if base is None:
        device = None
        _require_finite(spec, folder, _in_float32)
    else:
        device, round_to = _device_need(spec, base, max_rank, page_rows, dtype)
        _require_finite(spec, folder, round_to)
    return Inspection(LoadReport.of(spec, content_version(spec, folder)), spec.files, device)


_Cast = Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]


def _in_float32(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return values


def _device_need(
    spec: AdapterSpec, base: Base, max_rank: int, page_rows: int, dtype: Dtype
) -> tuple[DeviceNeed, _Cast]:
    import torch

    from loraserve.engine.build import resolve_device
    from loraserve.lora.layout import PoolLayout
    from loraserve.models.loading import resolve_dtype

    served = resolve_dtype(dtype, base.shape, resolve_device("auto"))
    demand = PoolLayout(base.shape.lora_targets(), page_rows, max_rank).demand(spec)
    need = sum(page * count for page, count in demand.items()) * served.itemsize
    name = str(served).removeprefix("torch.")

    def round_to(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        rounded: np.ndarray[Any, Any] = torch.from_numpy(values).to(served).float().numpy()
        return rounded

    return DeviceNeed(base.path.name, name, need), round_to


def _require_finite(spec: AdapterSpec, folder: Path, round_to: _Cast) -> None:
    """The scaling goes into B before the cast, as when an adapter is staged."""
    with TensorReader(folder) as reader, np.errstate(over="ignore", invalid="ignore"):
        for target in spec.targets:
            scaled = (target.b, target.lora_bias)
            for ref in target.refs:
                scaling = target.scaling if ref in scaled else 1.0
                for piece in reader.pieces(ref, _PIECE):
                    if not np.isfinite(round_to(_as_float32(piece, ref) * np.float32(scaling))).all():
                        raise AdapterRefused(
                            AdapterFault.NON_FINITE,
                            f"{target.module} ({show(ref.name)}) has a value that is not finite after scaling",
                        )
        for ref in dict.fromkeys(ref for rows in spec.replaced for part in rows.parts for ref in part.refs):
            for piece in reader.pieces(ref, _PIECE):
                if not np.isfinite(round_to(_as_float32(piece, ref))).all():
                    raise AdapterRefused(AdapterFault.NON_FINITE, f"{show(ref.name)} has a value that is not finite")


def _as_float32(piece: np.ndarray[Any, Any], ref: TensorRef) -> np.ndarray[Any, Any]:
    if ref.dtype == "BF16":
        return (piece.astype(np.uint32) << 16).view(np.float32)
    return piece.astype(np.float32)
