"""Which backend is chosen, what each must have, and how threads are set up."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys

import numba
import pytest
import torch

from loraserve.errors import ConfigError
from loraserve.kernels.cpu_backend import CpuOps
from loraserve.kernels.dispatch import select_ops
from loraserve.kernels.ops import Ops
from loraserve.kernels.reference import ReferenceOps
from loraserve.kernels.threads import available_cores, configure_threads
from loraserve.kernels.triton_backend import TritonOps

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("requested", "device", "dtype", "name"),
    [
        ("auto", CPU, torch.float32, "cpu"),
        ("auto", CPU, torch.bfloat16, "reference"),
        ("auto", CPU, torch.float16, "reference"),
        ("auto", CUDA, torch.float32, "reference"),
        ("auto", CUDA, torch.bfloat16, "reference"),
        ("triton", CPU, torch.float32, "triton"),
        ("triton", CPU, torch.float16, "triton"),
        ("cpu", CPU, torch.float32, "cpu"),
        ("reference", CPU, torch.float32, "reference"),
        ("reference", CUDA, torch.float16, "reference"),
    ],
)
def test_choice(requested, device, dtype, name, caplog):
    with caplog.at_level("INFO", logger="loraserve.kernels.dispatch"):
        assert select_ops(requested, device, dtype).name == name
    assert [record.message.split()[1] for record in caplog.records] == [name]


@pytest.mark.parametrize(
    ("requested", "device", "dtype", "reason"),
    [
        ("triton", CPU, torch.bfloat16, "bfloat16 matrices wrongly"),
        ("triton", CPU, torch.int32, "not a floating-point type"),
        ("triton", CUDA, torch.float16, "interprets its kernels"),
        ("cpu", CUDA, torch.float32, "do not run on cuda"),
        ("cpu", CPU, torch.bfloat16, "float32 only"),
        ("fast", CPU, torch.float32, "unknown"),
        ("auto", CPU, torch.int32, "not a floating-point type"),
    ],
)
def test_a_request_that_cannot_be_met_says_why(requested, device, dtype, reason):
    with pytest.raises(ConfigError, match=reason):
        select_ops(requested, device, dtype)


def test_without_numbas_compiler_torch_computes(monkeypatch):
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    assert select_ops("auto", CPU, torch.float32).name == "reference"
    with pytest.raises(ConfigError, match="NUMBA_DISABLE_JIT is set"):
        select_ops("cpu", CPU, torch.float32)


def test_triton_needs_a_gpu_or_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ConfigError, match="TRITON_INTERPRET=1"):
        select_ops("triton", CPU, torch.float32)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no GPU"):
            select_ops("triton", CUDA, torch.float32)


@pytest.mark.parametrize("backend", [ReferenceOps, CpuOps, TritonOps])
def test_every_op_exists_with_the_same_parameters(backend):
    methods = [name for name, member in vars(Ops).items() if inspect.isfunction(member) and name[0] != "_"]
    assert len(methods) >= 9
    for name in methods:
        wanted = inspect.signature(getattr(Ops, name)).parameters
        assert list(inspect.signature(getattr(backend, name)).parameters) == list(wanted), name
        assert (getattr(backend, name).__doc__ or "").strip(), name
    for name in methods:
        if name != "warm_up":
            assert "Semantics" in getattr(ReferenceOps, name).__doc__, name


def test_warm_up_compiles_everything_that_serving_calls():
    """After it, a step of real shapes compiles nothing more."""
    script = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch
from lora_cases import make_attention, make_pool, make_segments
from numba.core import event
from loraserve.kernels.cpu_backend import CpuOps
ops = CpuOps(num_threads=2)
ops.warm_up()
compiled = []
class Listener(event.Listener):
    def on_start(self, e): compiled.append(e.data["dispatcher"].py_func.__name__)
    def on_end(self, e): pass
g = torch.Generator().manual_seed(0)
with event.install_listener("numba:compile", Listener()), torch.inference_mode():
    for rows in (1, 150):
        x = torch.randn(rows, 960)
        ops.rms_norm(x, x[0], 1e-5)
        ops.add_rms_norm(x, x.clone(), x[0], 1e-5)
        ops.act_and_mul(torch.randn(rows, 3072), "silu")
        cache, angle = torch.randn(rows, 3, 64), torch.randn(rows, 32)
        norm = torch.ones(64)
        for n in (None, norm):
            loc = torch.arange(rows, dtype=torch.int32)
            ops.rope_write_kv(x, angle, angle, cache, cache.clone(), loc, n, n, 1e-5)
    for lens in ([5], [900, 700]):
        case = make_attention(lens, [1] * len(lens), 9, 3, 64, generator=g)
        ops.attention(case.q, case.k_cache, case.v_cache, case.batch, 0.1, None)
    pool = make_pool([(576, 576), (576, 192)], [[16, 8], [4, 4]], generator=g)
    embed = make_pool([(99, 576)], [[4, 8]], layers=1, generator=g)
    for assignments in ([[(0, 1.0)]], [[(i % 2, 1.0)] for i in range(14)], [[(0, 1.0), (1, 1.0)]] * 14):
        segments = make_segments(assignments)
        x, y = torch.randn(len(assignments), 576), torch.randn(len(assignments), 768)
        ops.lora_apply(y, x, pool.targets, 1, segments)
        ops.lora_embed(x, torch.arange(len(x)), embed.targets[0], segments)
print(json.dumps(compiled))
"""
    here = os.path.dirname(__file__)
    done = subprocess.run(
        [sys.executable, "-c", script, here], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


def test_threads_are_configured_before_anything_is_imported():
    script = """
import os, sys
from loraserve.kernels.threads import configure_threads
assert "torch" not in sys.modules and "numba" not in sys.modules
assert configure_threads(1) == 1
import torch
from numba import config
assert os.environ["OMP_WAIT_POLICY"] == "passive"
assert torch.get_num_threads() == 1 and config.NUMBA_NUM_THREADS == 1
configure_threads(2)
assert torch.get_num_threads() == 2
"""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("OMP", "NUMBA", "MKL"))}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert "torch and numba was imported before" in done.stderr


def test_without_openmp_the_workqueue_runs_and_says_so():
    script = """
import logging, sys
logging.basicConfig(level=logging.WARNING)
sys.modules["numba.np.ufunc.omppool"] = None  # what an import of a missing OpenMP library looks like
import torch
from loraserve.kernels.cpu_backend import CpuOps
import numba
ops = CpuOps(num_threads=2)
assert ops.threading_layer == "workqueue"
x = torch.randn(150, 960)
got = ops.add_rms_norm(x, torch.zeros(150, 960), torch.ones(960), 1e-5)
torch.testing.assert_close(got, torch.nn.functional.rms_norm(x, (960,), None, 1e-5))
assert numba.threading_layer() == "workqueue"
"""
    env = {k: v for k, v in os.environ.items() if not k.startswith("NUMBA")}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert "workqueue" in done.stderr


def test_thread_counts():
    assert available_cores() >= 1
    with pytest.raises(ConfigError, match="at least 1"):
        configure_threads(0)
