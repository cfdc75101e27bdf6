"""What the step loop counts over its life, for `EngineStats`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from loraserve.scheduler.batch import ScheduleBatch


@dataclass(slots=True)
class StepCounters:
    """Cumulative counts; nothing here ever shrinks except `slowest_step_s`, which fades."""

    steps: int = 0
    slowest_step_s: float = 0.0
    mixed_steps: int = 0
    rows: Counter[str] = field(default_factory=Counter)
    step_adapters: Counter[int] = field(default_factory=Counter)
    requests: Counter[str] = field(default_factory=Counter)

    def count_step(self, batch: ScheduleBatch, seconds: float) -> None:
        """Count one forward."""
        self.steps += 1
        # Fades over some hundred steps, so that one slow start does not hide a stuck loop for good.
        self.slowest_step_s = max(seconds, self.slowest_step_s * 0.99)
        rows = batch.rows
        self.rows["base/prefill"] += rows.base_prefill
        self.rows["base/decode"] += rows.base_decode
        self.rows["adapter/prefill"] += rows.adapter_prefill
        self.rows["adapter/decode"] += rows.adapter_decode
        self.step_adapters[batch.num_adapters] += 1
        self.mixed_steps += 0 < batch.num_decode < len(batch.entries)
