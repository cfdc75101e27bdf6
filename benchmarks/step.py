"""Where a decode step's time goes: `python -m benchmarks.step table`, `… sweep`, `… flame`.

Steps are whole engine steps (intake, scheduling, forward, sampling, outputs) of the demo model in float32, compared
with the bare base GEMMs over the same rows. Base, mixed and GEMMs take turns within one run, so that a busy moment hits
all three; the ratios are what counts.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from loraserve.kernels.threads import configure_threads

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
Rows = Annotated[int, typer.Option(help="Sequences that decode together.")]
Context = Annotated[int, typer.Option(help="Tokens of context of each.")]
Adapters = Annotated[int, typer.Option(help="Distinct adapters among the rows.")]
Rank = Annotated[int, typer.Option(help="Rank of each adapter, on all linears.")]
Rounds = Annotated[int, typer.Option(help="Times that base, mixed and GEMMs take their turn.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads (default: all).")]
Kernels = Annotated[str, typer.Option(help="Backend, as for serve.")]

_STEPS = 16  # decode steps of each turn


def _engine(threads: int | None, kernels: str, **settings: Any) -> Any:
    configure_threads(threads)
    from benchmarks.engine_bench import BenchEngine

    return BenchEngine(kernels=kernels, **settings)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


@app.command()
def table(
    rows: Rows = 16,
    context: Context = 110,
    adapters: Adapters = 8,
    rank: Rank = 16,
    rounds: Rounds = 5,
    threads: Threads = None,
    kernels: Kernels = "auto",
) -> None:
    """Step times, the ratios to the bare GEMMs, and the share of each kind of operator."""
    engine = _engine(threads, kernels)
    gemms = engine.gemms(rows)
    found: dict[str, list[float]] = {"gemms": [], "base": [], "mixed": []}
    for _ in range(rounds):
        found["gemms"].append(statistics.median(gemms() for _ in range(_STEPS)))
        found["base"].append(statistics.median(engine.decode_steps(rows, context, _STEPS)))
        found["mixed"].append(statistics.median(engine.decode_steps(rows, context, _STEPS, adapters, rank)))
    for name, times in found.items():
        print(f"{name:<6} {_ms(statistics.median(times)):>7} ms  (rounds: {', '.join(map(_ms, times))})")
    base_ratio = [base / bare for base, bare in zip(found["base"], found["gemms"], strict=True)]
    tax = [1 - base / mixed for base, mixed in zip(found["base"], found["mixed"], strict=True)]
    print(f"base step / bare GEMMs: {statistics.median(base_ratio):.2f}   LoRA tax: {statistics.median(tax):.1%}")
    for title, count in (("base", 0), (f"{adapters} adapters of rank {rank}", adapters)):
        with engine.clocked() as clock:
            engine.decode_steps(rows, context, _STEPS, count, rank, clock)
        everything = sum(clock.steps)
        clock.seconds["everything else"] = everything - sum(clock.seconds.values())
        print(f"\n{title}: {_ms(everything / len(clock.steps))} ms a step with the clocks on")
        for kind, seconds in sorted(clock.seconds.items(), key=lambda item: -item[1]):
            print(f"  {kind:<18}{seconds / everything:>7.1%}{clock.calls[kind]:>8} calls")
    engine.close()


@app.command()
def prefill(
    tokens: Annotated[int, typer.Option(help="Prompt tokens of the step, all of one request.")] = 256,
    adapters: Adapters = 8,
    rank: Rank = 16,
    rounds: Rounds = 5,
    threads: Threads = None,
    kernels: Kernels = "auto",
) -> None:
    """Prefill steps: the share of the bare GEMMs' rate that is reached, and what an adapter costs."""
    engine = _engine(threads, kernels, kv_bytes=2**28)  # small, so that it has been written before, as in a long run
    gemms = engine.gemms(tokens, head_rows=1)
    found: dict[str, list[float]] = {"gemms": [], "base": [], "adapter": []}
    for _ in range(rounds + 1):
        found["gemms"].append(statistics.median(gemms() for _ in range(5)))
        found["base"].append(statistics.median(engine.prefill_steps(tokens, 8)))
        found["adapter"].append(statistics.median(engine.prefill_steps(tokens, 8, adapters, rank)))
    for name, times in found.items():
        del times[0]  # whatever is done for the first time
        print(f"{name:<8} {_ms(statistics.median(times)):>7} ms  (rounds: {', '.join(map(_ms, times))})")
    rate = [bare / base for base, bare in zip(found["base"], found["gemms"], strict=True)]
    tax = [1 - base / mixed for base, mixed in zip(found["base"], found["adapter"], strict=True)]
    print(f"share of the bare GEMMs' rate: {statistics.median(rate):.1%}   LoRA tax: {statistics.median(tax):.1%}")
    engine.close()


@app.command()
def sweep(
    out: Annotated[Path, typer.Option(help="Folder for the table and, with matplotlib, the plots.")] = Path("."),
    rounds: Rounds = 3,
    threads: Threads = None,
    kernels: Kernels = "auto",
) -> None:
    """Step time against rows, distinct adapters, rank and context."""
    engine = _engine(threads, kernels)
    series: dict[str, list[tuple[int, float, float]]] = {}

    def measure(name: str, at: int, **shape: int) -> None:
        fixed = {"rows": 16, "context": 110, "adapters": 8, "rank": 16} | shape
        gemms = engine.gemms(fixed["rows"])
        bare, step = [], []
        for _ in range(rounds):
            bare.append(statistics.median(gemms() for _ in range(_STEPS)))
            step.append(statistics.median(engine.decode_steps(steps=_STEPS, **fixed)))
        series.setdefault(name, []).append((at, statistics.median(step), statistics.median(bare)))
        print(f"{name:<9}{at:>6}  step {_ms(series[name][-1][1]):>7} ms  bare GEMMs {_ms(series[name][-1][2]):>7} ms")

    for rows in (1, 2, 4, 8, 16, 32, 64):
        measure("rows", rows, rows=rows, adapters=min(8, rows))
    for adapters in (0, 1, 2, 4, 8, 16, 32, 64):
        measure("adapters", adapters, rows=64, adapters=adapters)
    for rank in (4, 8, 16, 32, 64, 128):
        measure("rank", rank, rank=rank)
    for context in (64, 128, 256, 512, 1024, 2048, 4096):
        measure("context", context, context=context)
    engine.close()
    _plot(series, out)


def _plot(series: dict[str, list[tuple[int, float, float]]], out: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        print("no plots: matplotlib is not installed")
        return
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(series), figsize=(4 * len(series), 3.2))
    for axis, (name, points) in zip(axes, series.items(), strict=True):
        axis.plot([at for at, *_ in points], [step * 1e3 for _, step, _ in points], marker="o", label="step")
        axis.plot([at for at, *_ in points], [bare * 1e3 for *_, bare in points], linestyle="--", label="bare GEMMs")
        axis.set_xlabel(name)
        axis.set_ylabel("ms")
        axis.set_ylim(bottom=0)
        axis.legend()
    figure.tight_layout()
    figure.savefig(out / "step.svg")
    print(f"plots: {out / 'step.svg'}")


@app.command()
def flame(
    out: Annotated[Path, typer.Option(help="The SVG to write.")] = Path("step-flame.svg"),
    seconds: Annotated[int, typer.Option(help="How long to sample.")] = 20,
    adapters: Adapters = 8,
) -> None:
    """A flame graph of mixed decode steps, by py-spy (`pip install py-spy`)."""
    if shutil.which("py-spy") is None:
        raise typer.BadParameter("py-spy is not installed: pip install py-spy")
    command = [sys.executable, "-m", "benchmarks.step", "spin", "--seconds", str(seconds), "--adapters", str(adapters)]
    recorder = ["py-spy", "record", "--native", "--output", str(out), "--rate", "200", "--", *command]
    raise typer.Exit(subprocess.run(recorder, check=False, env=os.environ).returncode)


@app.command(hidden=True)
def spin(seconds: int = 20, adapters: int = 8, threads: Threads = None, kernels: Kernels = "auto") -> None:
    """Decode for a while: what `flame` looks at."""
    import time

    engine = _engine(threads, kernels)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        engine.decode_steps(16, 110, 64, adapters)
    engine.close()


if __name__ == "__main__":
    app()
