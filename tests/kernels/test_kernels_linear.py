"""The CPU backend's own matrix product: right at every edge of its tiles, and the same whatever is computed beside."""

from __future__ import annotations

import pytest
import torch

from loraserve.kernels.cpu_backend import CpuOps
from loraserve.kernels.cpu_linear import linear_share, pack
from loraserve.kernels.cpu_simd import TILE_COLUMNS, TILE_ROWS


@pytest.fixture(scope="module")
def ops() -> CpuOps:
    return CpuOps(2)


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product = x.double() @ weight.double().t()
    return product if bias is None else product + bias.double()


WIDTHS = [1, TILE_COLUMNS - 1, TILE_COLUMNS, TILE_COLUMNS + 1, 5 * TILE_COLUMNS + 7]


@pytest.mark.parametrize("num_out", WIDTHS)
@pytest.mark.parametrize("num_in", [1, 7, 64, 1023, 1025, 3000])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_equals_the_exact_product(ops: CpuOps, num_in: int, num_out: int, with_bias: bool) -> None:
    torch.manual_seed(num_in + num_out)
    weight, bias = torch.randn(num_out, num_in) / num_in**0.5, torch.randn(num_out) if with_bias else None
    linear = ops.pack_linear(weight, bias)
    for rows in (0, 1, 2, TILE_ROWS - 1, TILE_ROWS, TILE_ROWS + 1, 3 * TILE_ROWS - 1, 70):
        x = torch.randn(rows, num_in)
        torch.testing.assert_close(linear(x).double(), exact(x, weight, bias), atol=2e-5, rtol=2e-5)


def test_result_of_a_row_does_not_depend_on_its_batch(ops: CpuOps) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(130, 1500), torch.randn(37, 1500)
    alone = torch.cat([ops.pack_linear(weight, None)(x[i : i + 1].contiguous()) for i in range(len(x))])
    for workers in (1, 2, 5):
        assert torch.equal(pack(weight, None, workers)(x), alone)


def test_infinities_and_nan_stay_in_their_row_and_column(ops: CpuOps) -> None:
    weight, x = torch.ones(TILE_COLUMNS + 2, 5), torch.ones(3, 5)
    weight[-1, 2] = float("inf")
    x[1, 3] = float("nan")
    y = ops.pack_linear(weight, None)(x)
    assert torch.isnan(y[1]).all()
    assert torch.equal(y[0], y[2])
    assert torch.isinf(y[0, -1])
    assert torch.equal(y[0, :-1], torch.full((TILE_COLUMNS + 1,), 5.0))


def test_nothing_is_written_past_the_result() -> None:
    """The kernel writes whole tiles; y's neighbours in memory must not notice."""
    for num_out in WIDTHS:
        linear = pack(torch.ones(num_out, 3), None, 1)
        memory = torch.full((20 * num_out + 200,), 7.5)
        y = memory[100 : 100 + 20 * num_out].view(20, num_out)
        pieces = len(linear.bias) // TILE_COLUMNS * -(-20 // TILE_ROWS)
        linear_share(torch.ones(20, 3).numpy(), linear.panels, linear.bias, y.numpy(), 0, pieces)
        assert torch.equal(y, torch.full((20, num_out), 3.0))
        assert (memory[:100] == 7.5).all()
        assert (memory[100 + 20 * num_out :] == 7.5).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_computed_by_torch(ops: CpuOps, dtype: torch.dtype) -> None:
    weight, x = torch.randn(6, 4, dtype=dtype), torch.randn(2, 4, dtype=dtype)
    torch.testing.assert_close(ops.pack_linear(weight, None)(x), torch.nn.functional.linear(x, weight))
