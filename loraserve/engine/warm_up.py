"""Steps of no consequence before the first request, so that none of its kernels is compiled while it waits."""

from __future__ import annotations

import logging
import time

import torch

from loraserve.engine.location_table import LocationTable
from loraserve.kernels.metadata import AttentionBatch, LoraSegments, LoraTables
from loraserve.kvcache.pool import KVCache
from loraserve.models.decoder import Decoder
from loraserve.models.forward_batch import ForwardBatch

logger = logging.getLogger(__name__)

_FEW, _MANY = 17, 300  # tokens: one step takes the decode tiles of the LoRA kernels, the other those of prefill


def warm_up(
    decoder: Decoder, kv: KVCache, tables: LoraTables, locations: LocationTable, spare_location: int, max_context: int
) -> None:
    """Run prefill chunks and decode rows without and with adapters, single and blended, over the spare location.

    The slot is −1: all kernels are compiled and launched, none has work. `tables` should have every kind by now.
    """
    started = time.monotonic()
    everything = LoraTables(dict(tables.targets), affine_slots={0})
    with torch.no_grad():
        for count in (1, min(_FEW, max_context), min(_MANY, max_context)):
            for max_per_token in (0, 1, 2):
                batch = _step(count, max_per_token, locations, spare_location)
                hidden = decoder.forward(batch, kv, everything)
                decoder.logits(hidden[batch.logits_rows], everything, batch.lora_logits)
    logger.info("operators warmed up in %.1f s", time.monotonic() - started)


def _step(count: int, max_per_token: int, locations: LocationTable, spare_location: int) -> ForwardBatch:
    """One sequence with `count` tokens, all of them at the spare location; of one token, a decode row."""
    device = locations.tensor.device

    def ints(values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).to(device)

    def segments(rows: int) -> LoraSegments | None:
        if max_per_token == 0:
            return None
        return LoraSegments(
            tokens=ints(list(range(rows))),
            weights=torch.ones(rows).to(device),
            slots=ints([-1]),
            indptr=ints([0, rows]),
            max_segment=rows,
            max_per_token=max_per_token,
        )

    return ForwardBatch(
        input_ids=ints([0] * count, torch.int64),
        positions=ints(list(range(count)), torch.int64),
        out_loc=ints([spare_location] * count),
        context_lens=ints([count] * count, torch.int64),
        attention=AttentionBatch(
            req_rows=ints([locations.spare_row]),
            q_indptr=ints([0, count]),
            seq_lens=ints([count]),
            locations=locations.tensor,
            num_decode=int(count == 1),
            max_seq_len=count,
            max_q_len=count,
        ),
        logits_rows=ints([count - 1], torch.int64),
        lora=segments(count),
        lora_logits=segments(1),
    )
