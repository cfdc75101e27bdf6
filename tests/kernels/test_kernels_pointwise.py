"""Norms, rotation, activations and linears of every backend against independent formulas."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.nn.functional as F
from lora_cases import NAN
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from loraserve.errors import ConfigError
from loraserve.kernels.cpu_backend import CpuOps
from loraserve.kernels.ops import Ops
from loraserve.kernels.reference import ReferenceOps
from loraserve.kernels.triton_backend import TritonOps

BACKENDS = {
    "reference": ReferenceOps,
    "cpu_serial": lambda: CpuOps(num_threads=1),
    "cpu_parallel": lambda: CpuOps(num_threads=2),
    "triton": lambda: TritonOps(torch.device("cpu")),
}
DTYPES = [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)]
SIZES = [(0, 8), (1, 1), (3, 37), (16, 576), (129, 576)]


@pytest.fixture(params=BACKENDS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return BACKENDS[request.param]()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(11)


@pytest.mark.parametrize(("dtype", "tol"), DTYPES)
@pytest.mark.parametrize(("rows", "width"), SIZES)
def test_rms_norm(ops, rows, width, dtype, tol):
    x, weight = (torch.randn(rows, width) * 3).to(dtype), torch.rand(width).to(dtype)
    want = F.rms_norm(x.double(), (width,), weight.double(), 1e-5)
    got = ops.rms_norm(x, weight, 1e-5)
    assert got.dtype is dtype
    torch.testing.assert_close(got.double(), want, atol=tol, rtol=tol)


@pytest.mark.parametrize(("dtype", "tol"), DTYPES)
@pytest.mark.parametrize(("rows", "width"), SIZES)
def test_add_rms_norm(ops, rows, width, dtype, tol):
    x, residual = torch.randn(rows, width).to(dtype), torch.randn(rows, width).to(dtype)
    weight = torch.rand(width).to(dtype)
    total = x + residual
    got = ops.add_rms_norm(x, residual, weight, 1e-6)
    if ops.name == "triton" and dtype is torch.bfloat16:
        return  # Triton's interpreter cuts bfloat16 off instead of rounding it
    assert torch.equal(residual, total)
    torch.testing.assert_close(
        got.double(), F.rms_norm(total.double(), (width,), weight.double(), 1e-6), atol=tol, rtol=tol
    )


@pytest.mark.parametrize(("dtype", "tol"), DTYPES)
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "rotary"), [(9, 3, 64, 64), (4, 1, 80, 32), (2, 2, 96, 96)])
@pytest.mark.parametrize("rows", [1, 5, 150])
def test_rope_write_kv(ops, rows, heads, kv_heads, head_dim, rotary, norms, dtype, tol):
    if ops.name == "triton":
        rows = min(rows, 12)  # each token and block of heads is a program that is interpreted
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * head_dim).to(dtype)
    angle = torch.rand(rows, rotary // 2) * 100
    cos, sin = angle.cos(), angle.sin()
    k_cache = torch.full((rows + 9, kv_heads, head_dim), NAN, dtype=dtype)
    v_cache = k_cache.clone()
    loc = torch.randperm(rows + 9)[:rows].to(torch.int32)
    q_norm, k_norm = (torch.rand(head_dim).to(dtype), torch.rand(head_dim).to(dtype)) if norms else (None, None)
    got = ops.rope_write_kv(qkv, cos, sin, k_cache, v_cache, loc, q_norm, k_norm, 1e-6)

    q, k, v = torch.split(qkv.double().view(rows, -1, head_dim), [heads, kv_heads, kv_heads], dim=1)
    if norms:
        q = F.rms_norm(q, (head_dim,), q_norm.double(), 1e-6)
        k = F.rms_norm(k, (head_dim,), k_norm.double(), 1e-6)
    wide_cos, wide_sin = torch.cat((cos, cos), -1).double()[None], torch.cat((sin, sin), -1).double()[None]
    # transformers' layout is [batch, heads, tokens, head_dim]
    turned_q, turned_k = apply_rotary_pos_emb(
        q[..., :rotary].transpose(0, 1)[None], k[..., :rotary].transpose(0, 1)[None], wide_cos, wide_sin
    )
    want_q = torch.cat((turned_q[0].transpose(0, 1), q[..., rotary:]), -1)
    want_k = torch.cat((turned_k[0].transpose(0, 1), k[..., rotary:]), -1)
    assert got.shape == (rows, heads, head_dim)
    assert got.dtype is dtype
    torch.testing.assert_close(got.double(), want_q, atol=tol, rtol=tol)
    torch.testing.assert_close(k_cache[loc.long()].double(), want_k, atol=tol, rtol=tol)
    assert torch.equal(v_cache[loc.long()].double(), v)
    untouched = torch.ones(rows + 9, dtype=torch.bool)
    untouched[loc.long()] = False
    assert k_cache[untouched].isnan().all()
    assert v_cache[untouched].isnan().all()


@pytest.mark.parametrize(("dtype", "tol"), DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(0, 6), (1, 1), (3, 37), (16, 1536), (50, 1536)])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_act_and_mul(ops, rows, width, activation, dtype, tol):
    x = (torch.randn(rows, 2 * width) * 8).to(dtype)
    gate, up = x.double().chunk(2, -1)
    act = {
        "silu": F.silu(gate),
        "gelu": F.gelu(gate),
        "gelu_tanh": F.gelu(gate, approximate="tanh"),
    }[activation]
    got = ops.act_and_mul(x, activation)
    assert got.dtype is dtype
    torch.testing.assert_close(got.double(), act * up, atol=tol, rtol=tol)


def test_silu_of_extreme_gates(ops):
    gate = torch.tensor([[-1e4, -200.0, -88.0, -1e-3, 0.0, 88.0, 1e4, NAN]])
    got = ops.act_and_mul(torch.cat((gate, torch.ones_like(gate)), 1), "silu")
    torch.testing.assert_close(got, F.silu(gate), atol=1e-30, rtol=1e-5, equal_nan=True)


def test_an_unknown_activation_is_named(ops):
    for dtype in (torch.float32, torch.float16):
        with pytest.raises(ConfigError, match="relu2"):
            ops.act_and_mul(torch.ones(1, 2, dtype=dtype), "relu2")


@pytest.mark.parametrize(("dtype", "tol"), [(torch.float32, 1e-4), (torch.bfloat16, 0.2), (torch.float16, 2e-2)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 3, 16, 65])
def test_linear(ops, rows, bias, dtype, tol):
    weight = torch.randn(51, 37).to(dtype)
    offset = torch.randn(51).to(dtype) if bias else None
    linear = ops.pack_linear(weight, offset)
    assert (linear.in_features, linear.out_features) == (37, 51)
    x = torch.randn(rows, 37).to(dtype)
    want = x.double() @ weight.double().T + (offset.double() if bias else 0)
    got = linear(x)
    assert got.dtype is dtype
    torch.testing.assert_close(got.double(), want, atol=tol, rtol=tol)


def test_a_packed_weight_replaces_the_plain_one():
    weight = torch.randn(64, 32)
    plain = weakref.ref(weight)
    linear = CpuOps(num_threads=1).pack_linear(weight, None)
    del weight
    assert plain() is None
    assert linear(torch.ones(1, 32)).shape == (1, 64)


def test_inputs_that_are_not_contiguous_are_computed_all_the_same(ops):
    wide = torch.randn(6, 40)
    x, weight = wide[:, :20], torch.rand(20)
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5), F.rms_norm(x, (20,), weight, 1e-5))
    torch.testing.assert_close(ops.act_and_mul(x, "silu"), F.silu(x[:, :10]) * x[:, 10:], atol=1e-6, rtol=1e-5)
