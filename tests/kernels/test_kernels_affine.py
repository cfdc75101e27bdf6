"""`lora_affine`: gain and shift of the base's output, every backend against a plain computation token by token."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from lora_cases import MIXES, make_pool, make_segments, popularity
from torch import Tensor

from loraserve.kernels.cpu_backend import CpuOps
from loraserve.kernels.metadata import LoraTarget
from loraserve.kernels.ops import Ops
from loraserve.kernels.reference import ReferenceOps, slot_factors
from loraserve.kernels.triton_backend import TritonOps

WIDTHS = [(16, 24), (16, 8), (16, 40)]
RANKS = [[3, 0, 8, 5], [3, 4, 0, 5], [0, 4, 8, 5]]  # per target and slot, gain and shift included below


BACKENDS = {
    "reference": ReferenceOps,
    "cpu": lambda: CpuOps(num_threads=2),
    "triton": lambda: TritonOps(torch.device("cpu")),
}


@pytest.fixture(params=BACKENDS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return BACKENDS[request.param]()


def affine_targets(seed: int) -> tuple[tuple[LoraTarget, ...], dict[tuple[int, int, int], Tensor]]:
    """Targets of which every second (layer, slot) ends B with gain and shift, and those rows."""
    pool = make_pool(WIDTHS, RANKS, generator=torch.Generator().manual_seed(seed))
    targets, rows = [], {}
    for t, target in enumerate(pool.targets):
        ranks, affine = target.ranks.clone(), torch.zeros(target.ranks.shape, dtype=torch.bool)
        for layer in range(ranks.shape[0]):
            for slot in range(ranks.shape[1]):
                factors = slot_factors(target, layer, slot)
                if factors is not None and (layer + slot + t) % 2 == 0:
                    rows[t, layer, slot] = factors[1][-2:]
                    ranks[layer, slot] -= 2
                    affine[layer, slot] = True
        targets.append(dataclasses.replace(target, ranks=ranks, affine=affine))
    return tuple(targets), rows


@pytest.mark.parametrize("mix", MIXES)
def test_gain_and_shift_see_the_base_output(ops: Ops, mix: str) -> None:
    generator = torch.Generator().manual_seed(3)
    targets, rows = affine_targets(4)
    chosen = popularity(mix, 13, 4, generator)
    # Token 5 is a blend of two slots, token 6 has no adapter.
    assignments = [[(slot, 0.5 + 0.1 * i)] for i, slot in enumerate(chosen)]
    assignments[5] = [(2, 0.25), (3, -1.5)]
    assignments[6] = []
    segments = make_segments(assignments, extra=[1])
    for layer in range(2):
        before = torch.randn(13, 72, generator=generator)
        expected = before.clone()
        for token, pairs in enumerate(assignments):
            for slot, weight in pairs:
                for t, target in enumerate(targets):
                    if (t, layer, slot) in rows:
                        gain, shift = rows[t, layer, slot]
                        columns = slice(target.out_offset, target.out_offset + target.out_features)
                        expected[token, columns] += weight * (before[token, columns] * gain + shift)
        y = before.clone()
        ops.lora_affine(y, targets, layer, segments)
        torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)
        assert not torch.equal(y, before)


def test_slots_without_the_rows_change_nothing(ops: Ops) -> None:
    targets, _ = affine_targets(4)
    plain = tuple(dataclasses.replace(target, affine=None) for target in targets)
    y = torch.ones(3, 72)
    ops.lora_affine(y, plain, 0, make_segments([[(0, 1.0)], [(2, 1.0)], [(3, 1.0)]]))
    ops.lora_affine(y, targets, 0, make_segments([[(-1, 1.0)], [], []]))
    ops.lora_affine(y, (), 0, make_segments([[(0, 1.0)], [], []]))
    assert torch.equal(y, torch.ones(3, 72))


def test_many_tokens_take_the_parallel_form() -> None:
    targets, _ = affine_targets(4)
    segments = make_segments([[(i % 4, 1.0)] for i in range(3000)])
    y = torch.randn(3000, 72, generator=torch.Generator().manual_seed(1))
    expected = y.clone()
    CpuOps(num_threads=2).lora_affine(y, targets, 0, segments)
    ReferenceOps().lora_affine(expected, targets, 0, segments)
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)
