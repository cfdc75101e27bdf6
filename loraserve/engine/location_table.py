"""The device's copy of the level-1 table: where each position of each request row lies in the KV cache."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from loraserve.kernels.transfer import to_device
from loraserve.kvcache.req_to_token import DirtySpan


class LocationTable:
    """`tensor` [num_rows + 1, max_context] int32 follows the host's table; its last row is all `spare_location`.

    On a CPU without captured steps the host's table is used as it is, without the spare row: `copies` is False. Call
    `update` before each step.
    """

    def __init__(
        self,
        table: NDArray[np.int32],
        take_dirty: Callable[[], list[DirtySpan]],
        device: torch.device,
        spare_location: int,
        copies: bool,
    ) -> None:
        self._table = table
        self._take_dirty = take_dirty
        self.spare_row = table.shape[0]
        self.is_shared = not copies
        if self.is_shared:
            self.tensor = torch.from_numpy(table)
        else:
            size = (table.shape[0] + 1, table.shape[1])
            self.tensor = torch.full(size, spare_location, dtype=torch.int32, device=device)

    def update(self) -> None:
        """Send what has changed since the last call, as one array."""
        if self.is_shared:
            return
        spans = self._take_dirty()
        if not spans:
            return
        width = self._table.shape[1]
        starts = [np.arange(span.start, span.stop, dtype=np.int64) + span.row * width for span in spans]
        values = [self._table[span.row, span.start : span.stop] for span in spans]
        places = np.concatenate(starts)
        sent = to_device(np.stack((places, np.concatenate(values).astype(np.int64))), self.tensor.device)
        self.tensor.view(-1).index_copy_(0, sent[0], sent[1].to(torch.int32))
