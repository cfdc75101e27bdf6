"""The only place where the engine is wired together."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from loraserve.config import EngineConfig, format_bytes
from loraserve.engine.adapters import AdapterDesk
from loraserve.engine.graphs import MAX_BLEND, CudaGraphs, DecodeGraphs, GraphDevice
from loraserve.engine.in_flight import NextTokens
from loraserve.engine.location_table import LocationTable
from loraserve.engine.loop import EngineLoop
from loraserve.engine.memory import MemoryPlan, plan_memory, step_bytes
from loraserve.engine.messages import EngineInfo
from loraserve.engine.runner import LogitsWatch, ModelRunner
from loraserve.engine.static_step import StaticStep
from loraserve.engine.warm_up import warm_up
from loraserve.errors import ConfigError
from loraserve.kernels.dispatch import select_ops
from loraserve.kernels.huge_pages import fill_ahead
from loraserve.kvcache.manager import CacheManager
from loraserve.kvcache.pool import KVCache
from loraserve.lora.affine import BaseWeights
from loraserve.lora.pool import LoraPool
from loraserve.lora.residency import AdapterResidency
from loraserve.lora.spec import BaseGeometry, TargetGeometry
from loraserve.models.base_rows import CheckpointRows
from loraserve.models.config import ModelShape, RopeType, load_shape
from loraserve.models.decoder import Decoder
from loraserve.models.demo import prepare_demo_model
from loraserve.models.loading import load_decoder, resolve_dtype, resolve_model_path
from loraserve.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

_READY_KV_BYTES = 2**28  # of KV memory on a CPU that is taken before it is written


@dataclass(frozen=True, slots=True)
class EngineParts:
    """A wired engine: the loop, what it tells the server about itself, and how to end it."""

    loop: EngineLoop
    info: EngineInfo
    close: Callable[[], None]


def resolve_device(requested: str) -> torch.device:
    """`auto` is CUDA (or ROCm) where there is one. Raises `ConfigError` when the requested device is not there."""
    if requested == "cpu" or (requested == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(f"--device {requested}: this machine has no CUDA or ROCm device that torch can use")
    return torch.device("cuda", 0)


def _public_name(name: str) -> str:
    """A model's name as clients may see it: a path tells them of the host."""
    is_path = name.startswith(("/", ".", "~")) or "\\" in name or name.count("/") > 1
    return Path(name.replace("\\", "/")).name or name if is_path else name


def geometry_of(shape: ModelShape, folder: Path, names: tuple[str, ...]) -> BaseGeometry:
    """What the LoRA side must know of the base model, without torch and fit for a message."""
    targets = tuple(
        TargetGeometry(str(target.kind), target.in_features, target.out_features, target.num_layers, target.has_bias)
        for target in shape.lora_targets()
    )
    return BaseGeometry(
        targets=targets,
        names=tuple(dict.fromkeys(map(_public_name, names))),
        tied_head=shape.tie_word_embeddings,
        folder=str(folder),
        head_norm_width=shape.head_dim if shape.qk_norm else 0,
    )


def build_engine(
    config: EngineConfig,
    watch: LogitsWatch | None = None,
    device: torch.device | None = None,
    graph_device: GraphDevice | None = None,
) -> EngineParts:
    """Load the model, size the pools, wire everything; `watch` sees all logits.

    `device` overrides the config's, `graph_device` what captures decode steps (default: CUDA, where it can).
    Raises named errors for whatever cannot be served.
    """
    device = device or resolve_device(config.model.device)
    path = (
        prepare_demo_model()
        if config.model.model is None
        else resolve_model_path(config.model.model, config.model.revision)
    )
    shape = load_shape(path)
    dtype = resolve_dtype(config.model.dtype, shape, device)
    ops = select_ops(config.model.kernels, device, dtype)
    decoder = load_decoder(path, shape, dtype, device, ops)
    logger.info("preparing the operators; the first start compiles them, which takes up to a minute")
    ops.warm_up()
    max_context = min(config.model.max_model_len or shape.max_context, shape.max_context)
    per_token = KVCache.bytes_per_location(shape.num_layers, shape.num_kv_heads, shape.head_dim, dtype)
    step_need = step_bytes(shape, config, dtype.itemsize) if device.type == "cuda" else 0
    plan = plan_memory(config, device, per_token, max_context, step_need)
    # One location more than there are to hand out: padding of captured steps writes there.
    kv = KVCache(shape.num_layers, plan.kv_tokens + 1, shape.num_kv_heads, shape.head_dim, dtype, device)
    if device.type == "cpu":
        fill_ahead([*kv.k, *kv.v], _READY_KV_BYTES)
    cache = CacheManager(config.cache, plan.kv_tokens, config.scheduler.max_running, max_context)
    base = CheckpointRows(path, shape, dtype)
    fixed_tables = graph_device is not None or (device.type == "cuda" and ops.name == "triton")
    residency = _residency(config, shape, dtype, device, plan, base, fixed_tables)
    geometry = geometry_of(shape, path, _base_names(config, path))
    scheduler = Scheduler(config.scheduler, cache, residency, adapter_wait_limit_s=config.lora.adapter_wait_limit_s)
    runner = _runner(config, decoder, kv, residency, cache, max_context, watch, graph_device)
    # KV computed with weights that are gone would never be asked for again; its pages are worth more free.
    desk = AdapterDesk(residency, geometry, config.lora.max_lora_rank, on_dropped=scheduler.forget_version)
    loop = EngineLoop(
        scheduler=scheduler,
        runner=runner,
        adapters=desk,
        page_size=config.cache.page_size,
        eos_token_ids=frozenset(shape.eos_token_ids),
        vocab_size=shape.vocab_size,
        default_timeout_s=config.scheduler.request_timeout_s,
        shareable_context=shape.rope.context_threshold,
    )
    info = _info(config, path, decoder, dtype, device, geometry, plan, max_context)
    for line in info.plan:
        logger.info(line)
    return EngineParts(loop=loop, info=info, close=desk.close)


def _info(
    config: EngineConfig,
    path: Path,
    decoder: Decoder,
    dtype: torch.dtype,
    device: torch.device,
    geometry: BaseGeometry,
    plan: MemoryPlan,
    max_context: int,
) -> EngineInfo:
    """What the engine tells the server about itself."""
    shape = decoder.shape
    weights = f"weights         {format_bytes(decoder.num_bytes):>10}  {shape.architecture}, {dtype} on {device}"
    return EngineInfo(
        model_path=str(path),
        architecture=shape.architecture,
        geometry=geometry,
        vocab_size=shape.vocab_size,
        max_context=max_context,
        eos_token_ids=list(shape.eos_token_ids),
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        kernels=decoder.ops.name,
        kv_tokens=plan.kv_tokens,
        kv_bytes=plan.kv_bytes,
        page_size=config.cache.page_size,
        lora_bytes=plan.lora_bytes,
        host_lora_bytes=plan.host_lora_bytes,
        max_lora_rank=config.lora.max_lora_rank,
        max_running=config.scheduler.max_running,
        plan=[weights, *plan.lines],
    )


def _runner(
    config: EngineConfig,
    decoder: Decoder,
    kv: KVCache,
    residency: AdapterResidency,
    cache: CacheManager,
    max_context: int,
    watch: LogitsWatch | None,
    graph_device: GraphDevice | None,
) -> ModelRunner:
    """The model runner; on a GPU with the Triton kernels all is compiled and captured here."""
    device, spare_location = decoder.weights.embed.device, kv.num_locations - 1
    is_triton = decoder.ops.name == "triton"
    if graph_device is None and config.model.cuda_graphs and device.type == "cuda" and is_triton:
        graph_device = CudaGraphs()
    copies = device.type != "cpu" or graph_device is not None
    locations = LocationTable(cache.table, cache.take_dirty, device, spare_location, copies)
    if copies and is_triton:
        decoder.rotary.reserve(max_context)
        warm_up(decoder, kv, residency.tables, locations, spare_location, max_context)
    graphs = None
    # Dynamic RoPE takes its frequencies from each step's lengths, on the host.
    if graph_device is not None and decoder.shape.rope.rope_type is not RopeType.DYNAMIC:
        decoder.rotary.reserve(max_context)
        rows = config.scheduler.max_running
        step = StaticStep(rows, MAX_BLEND, locations.tensor, locations.spare_row, spare_location, max_context)
        graphs = DecodeGraphs(decoder, kv, residency.tables, step, graph_device)
        try:
            graphs.capture_all()
        except RuntimeError as error:  # too little memory is one of torch's as well
            logger.warning("decode steps could not be captured and run without graphs: %s", error)
            graphs = None
    overlaps = config.scheduler.overlap_schedule
    if overlaps is None:  # a CPU's steps are computed by the thread that would schedule
        overlaps = device.type == "cuda"
    next_tokens = NextTokens(cache.table.shape[0], device) if overlaps else None
    return ModelRunner(decoder, kv, residency, locations, device, watch, graphs, next_tokens)


def _residency(
    config: EngineConfig,
    shape: ModelShape,
    dtype: torch.dtype,
    device: torch.device,
    plan: MemoryPlan,
    base: BaseWeights,
    fixed_tables: bool,
) -> AdapterResidency:
    pool = LoraPool(
        shape.lora_targets(),
        capacity_bytes=plan.lora_bytes,
        page_rows=config.lora.lora_page_rows,
        max_slots=config.lora.max_lora_slots,
        max_rank=config.lora.max_lora_rank,
        dtype=dtype,
        device=device,
    )
    if fixed_tables:
        pool.reserve_tables()
    return AdapterResidency(pool, host_capacity_bytes=plan.host_lora_bytes, base=base)


def _base_names(config: EngineConfig, path: Path) -> tuple[str, ...]:
    """Names under which an adapter's config may know this base."""
    names = (config.model.model, config.model.served_model_name, path.name)
    return tuple(dict.fromkeys(name for name in names if name))
