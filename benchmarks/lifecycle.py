"""Adapters come and go under traffic: `python -m benchmarks.lifecycle [a b c d e]`, from the repository's root.

(a) running streams while a cold adapter arrives from a slow source: the gaps between their tokens
(b) many registered adapters, few of which fit on the device, Zipf traffic: hit rates, first tokens, memory
(c) replace and rollback under traffic, every answer checked against what its version answers alone
(d) start-up with many registered adapters and with none
(e) how fast an adapter is loaded, against how fast its file can be read
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import psutil
import typer

from benchmarks.make_adapters import make_adapter
from loraserve.lora.files import AdapterFolder
from loraserve.lora.spec import AdapterSource
from loraserve.lora.store import AdapterStore
from loraserve.models.demo import prepare_demo_model

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from fake_hub import FakeHub, serve
from live_server import LiveServer

PROMPT = list(range(20, 52))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the parts share."""

    model: Path
    root: Path
    streams: int
    source_s: float
    adapters: int
    slots: int
    requests: int
    cycles: int
    rank: int


def quantile(values: list[float], part: float) -> float:
    """The value below which `part` of the values lie; 0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else 0.0


async def stream(client: httpx.AsyncClient, gaps: list[tuple[float, float]], **body: Any) -> list[int]:
    """One streamed answer; appends (when, gap in seconds) for each token after the first."""
    ids: list[int] = []
    last: float | None = None
    body = {"model": "base", "prompt": PROMPT, "temperature": 0, "ignore_eos": True, "stream": True} | body
    async with client.stream("POST", "/v1/completions", json=body | {"return_token_ids": True}) as response:
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            now = time.monotonic()
            for choice in event["choices"]:
                if choice.get("token_ids"):
                    ids += choice["token_ids"]
                    if last is not None:
                        gaps.append((now, now - last))
                    last = now
    return ids


def server(plan: Plan, data: Path, *flags: str, env: dict[str, str] | None = None) -> LiveServer:
    """A server on the plan's model."""
    return LiveServer(plan.model, data, ["--adapter-dir", str(plan.root), *flags], env or {})


# -- (a) --------------------------------------------------------------------------------------------------------------


def gaps_while_an_adapter_arrives(plan: Plan) -> dict[str, float]:
    """Gaps between the tokens of running streams while an adapter is fetched, staged and used for the first time."""
    folder = plan.root / "cold"
    make_adapter(plan.model, folder, plan.rank, seed=1)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    hub = FakeHub({"bench/cold": files}, pace={"adapter_model.safetensors": plan.source_s})
    with serve(hub), tempfile.TemporaryDirectory() as cache:
        env = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_CACHE": cache, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
        with server(plan, plan.root / "data-a", "--max-running", str(plan.streams + 1), env=env) as live:
            return asyncio.run(_watch_gaps(plan, live))


async def _watch_gaps(plan: Plan, live: LiveServer) -> dict[str, float]:
    gaps: list[tuple[float, float]] = []
    running = True
    async with httpx.AsyncClient(base_url=live.url, timeout=600) as client:

        async def keep_on(index: int) -> None:
            while running:
                await stream(client, gaps, prompt=[*PROMPT, 20 + index], max_tokens=64)

        tasks = [asyncio.create_task(keep_on(index)) for index in range(plan.streams)]
        await asyncio.sleep(max(2.0, plan.source_s))
        begin = time.monotonic()
        await asyncio.sleep(max(2.0, plan.source_s))
        middle = time.monotonic()
        answer = await client.post("/adapters/load", json={"name": "cold", "repo": "bench/cold"})
        answer.raise_for_status()
        await stream(client, [], lora="cold", max_tokens=8)
        end = time.monotonic()
        running = False
        await asyncio.gather(*tasks)
    without = [gap for when, gap in gaps if begin <= when < middle]
    during = [gap for when, gap in gaps if middle <= when < end]
    p99 = quantile(without, 0.99)
    return {
        "tokens without": len(without),
        "tokens during": len(during),
        "p99 gap without, s": p99,
        "largest gap without, s": max(without, default=0.0),
        "p99 gap during, s": quantile(during, 0.99),
        "largest gap during, s": max(during, default=0.0),
        "largest during / p99 without": max(during, default=0.0) / p99 if p99 else 0.0,
    }


# -- (b), (d) ---------------------------------------------------------------------------------------------------------


def register_many(plan: Plan, data: Path) -> None:
    """Register adapters of equal weights and different alpha: as many versions, made quickly."""
    folder = plan.root / "small"
    make_adapter(plan.model, folder, 2, seed=2)
    config = json.loads((folder / "adapter_config.json").read_text())
    with AdapterStore(data) as store:
        for index in range(plan.adapters):
            (folder / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 2 + index / 1000}))
            record = store.ingest(AdapterFolder.at(folder), AdapterSource("local", path=str(folder)), None, 256)
            store.set_alias(f"small-{index}", record.version, replace=True)


def zipf_traffic(plan: Plan) -> dict[str, float]:
    """Hit rates, first tokens and memory with many more adapters than fit on the device."""
    data = plan.root / "data-many"
    if not data.exists():
        register_many(plan, data)
    rng = random.Random(0)
    weights = [1 / (index + 1) for index in range(plan.adapters)]
    names = [f"small-{index}" for index in rng.choices(range(plan.adapters), weights, k=plan.requests)]
    pools = {"--kv-memory": 256, "--lora-memory": 256, "--host-lora-memory": 512}  # MiB
    flags = [text for flag, size in pools.items() for text in (flag, f"{size}MiB")]
    with server(plan, data, "--max-lora-slots", str(plan.slots), *flags) as live:
        engine = psutil.Process(live.engine_pid)
        before = engine.memory_info().rss
        peak = before

        async def send(client: httpx.AsyncClient, name: str) -> None:
            nonlocal peak
            await stream(client, [], lora=name, max_tokens=8)
            peak = max(peak, engine.memory_info().rss)

        seconds = asyncio.run(_closed_loop(live.url, names, 16, send))
        time.sleep(1.0)  # the engine reports twice a second
        found, missed = (live.metric("loraserve_adapter_lookups_total", found=value) for value in ("yes", "no"))
        staged = live.metric("loraserve_adapter_tier_loads_total", tier="host")
        first = "loraserve_adapter_time_to_first_token_seconds"
        mean = {
            kind: live.metric(f"{first}_sum", residency=kind) / max(live.metric(f"{first}_count", residency=kind), 1)
            for kind in ("warm", "cold")
        }
    lookups = max(found + missed, 1)
    return {
        "requests per second": plan.requests / seconds,
        "found on the device": found / lookups,
        "found on the host": max(0.0, missed - staged) / lookups,
        "read from disk": min(staged, missed) / lookups,
        "mean first token warm, s": mean["warm"],
        "mean first token cold, s": mean["cold"],
        "RSS growth of the engine, MiB": (peak - before) / 2**20,
        "room of its pools, MiB": float(sum(pools.values())),
    }


async def _closed_loop(
    url: str, items: list[str], clients: int, send: Callable[[httpx.AsyncClient, str], Awaitable[None]]
) -> float:
    """Send all items, `clients` at a time; returns the seconds it took."""
    queue = list(reversed(items))
    begin = time.monotonic()
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:

        async def work() -> None:
            while queue:
                await send(client, queue.pop())

        await asyncio.gather(*(work() for _ in range(clients)))
    return time.monotonic() - begin


def start_up(plan: Plan) -> dict[str, float]:
    """Seconds from the process's start to /ready, with none and with many registered adapters."""
    data = plan.root / "data-many"
    if not data.exists():
        register_many(plan, data)
    times: dict[str, list[float]] = {"none": [], "many": []}
    for _ in range(3):
        for kind, folder in (("none", plan.root / "data-none"), ("many", data)):
            begin = time.monotonic()
            with server(plan, folder):
                times[kind].append(time.monotonic() - begin)
    none, many = min(times["none"]), min(times["many"])
    return {"with none, s": none, f"with {plan.adapters}, s": many, "difference, s": many - none}


# -- (c) --------------------------------------------------------------------------------------------------------------


def replace_under_traffic(plan: Plan) -> dict[str, float]:
    """Replace and rollback while requests run; each answer must be the one of the version that it names."""
    folders = [plan.root / f"version-{index}" for index in range(4)]
    for index, folder in enumerate(folders):
        make_adapter(plan.model, folder, plan.rank, seed=10 + index)
    with server(plan, plan.root / "data-c") as live:
        oracle: dict[str, list[int]] = {}
        for index, folder in enumerate(folders):
            info = live.load(f"alone-{index}", folder).raise_for_status().json()
            answer = live.complete(PROMPT, lora=f"alone-{index}", max_tokens=12).raise_for_status().json()
            oracle[info["version"]] = answer["choices"][0]["token_ids"]
        live.load("changing", folders[0]).raise_for_status()
        return asyncio.run(_change_and_check(plan, live.url, folders, oracle))


async def _change_and_check(
    plan: Plan, url: str, folders: list[Path], oracle: dict[str, list[int]]
) -> dict[str, float]:
    checked, wrong, running = 0, 0, True
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:

        async def ask() -> None:
            nonlocal checked, wrong
            body = {"model": "base", "prompt": PROMPT, "lora": "changing", "max_tokens": 12, "temperature": 0}
            while running:
                answer = await client.post(
                    "/v1/completions", json=body | {"ignore_eos": True, "return_token_ids": True}
                )
                answer.raise_for_status()
                content = answer.json()
                checked += 1
                wrong += content["choices"][0]["token_ids"] != oracle[content["lora"][0]["version"]]

        tasks = [asyncio.create_task(ask()) for _ in range(8)]
        begin = time.monotonic()
        for cycle, folder in zip(range(plan.cycles), itertools.cycle(folders[1:] + folders[:1]), strict=False):
            if cycle % 3 == 2:
                change = await client.post("/adapters/rollback", json={"name": "changing"})
            else:
                body = {"name": "changing", "path": str(folder), "replace": True}
                change = await client.post("/adapters/load", json=body)
            change.raise_for_status()
        seconds = time.monotonic() - begin
        running = False
        await asyncio.gather(*tasks)
    return {"changes": plan.cycles, "changes per second": plan.cycles / seconds, "answers": checked, "wrong": wrong}


# -- (e) --------------------------------------------------------------------------------------------------------------


def load_rate(plan: Plan) -> dict[str, float]:
    """MB/s of a load, from the call to a staged adapter (copied, hashed, checked), against reading the file alone."""
    rates, reads = [], []
    with server(plan, plan.root / "data-e", "--host-lora-memory", "2GiB", "--lora-memory", "1GiB") as live:
        for index in range(3):
            folder = plan.root / f"large-{index}"
            make_adapter(plan.model, folder, 4 * plan.rank, seed=20 + index)
            file = folder / "adapter_model.safetensors"
            size = file.stat().st_size / 1e6
            reads.append(size / _read_seconds(file))
            _forget(file)
            begin = time.monotonic()
            live.load(f"large-{index}", folder).raise_for_status()
            rates.append(size / (time.monotonic() - begin))
    return {"MB per adapter": size, "load, MB/s": max(rates), "read alone, MB/s": max(reads)}


def _read_seconds(file: Path) -> float:
    _forget(file)
    begin = time.monotonic()
    with file.open("rb", buffering=0) as reading:
        while reading.read(1 << 20):
            pass
    return time.monotonic() - begin


def _forget(file: Path) -> None:
    """Ask the system to drop the file from its page cache."""
    with file.open("rb") as handle:
        os.fsync(handle.fileno())
        os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


PARTS: dict[str, Callable[[Plan], dict[str, float]]] = {
    "a": gaps_while_an_adapter_arrives,
    "b": zipf_traffic,
    "c": replace_under_traffic,
    "d": start_up,
    "e": load_rate,
}


def main(
    parts: Annotated[list[str] | None, typer.Argument(help="Which of a, b, c, d, e (default: all).")] = None,
    model: Annotated[Path | None, typer.Option(help="Folder of the base model (default: the demo model).")] = None,
    streams: Annotated[int, typer.Option(help="Running streams of (a).")] = 24,
    source_s: Annotated[float, typer.Option(help="Seconds that the source of (a) takes.")] = 5.0,
    adapters: Annotated[int, typer.Option(help="Registered adapters of (b) and (d).")] = 2000,
    slots: Annotated[int, typer.Option(help="Adapters on the device at once in (b).")] = 64,
    requests: Annotated[int, typer.Option(help="Requests of (b).")] = 1000,
    cycles: Annotated[int, typer.Option(help="Replacements and rollbacks of (c).")] = 200,
    rank: Annotated[int, typer.Option(help="Rank of the adapters of (a) and (c); (e) takes four times as much.")] = 16,
    output: Annotated[Path | None, typer.Option(help="Also write the figures as JSON.")] = None,
) -> None:
    """Measure the life of adapters on this machine. Each part starts servers of its own."""
    root = Path(tempfile.mkdtemp(prefix="loraserve-lifecycle-"))
    plan = Plan(
        model=model or prepare_demo_model(),
        root=root,
        streams=streams,
        source_s=source_s,
        adapters=adapters,
        slots=slots,
        requests=requests,
        cycles=cycles,
        rank=rank,
    )
    results: dict[str, dict[str, float]] = {}
    try:
        for part in parts or list(PARTS):
            if part not in PARTS:
                raise typer.BadParameter(f"{part!r} is not one of {', '.join(PARTS)}")
            results[part] = PARTS[part](plan)
            for name, value in results[part].items():
                typer.echo(f"({part}) {name}: {value:.4g}")
    finally:
        shutil.rmtree(root, ignore_errors=True)
    if output is not None:
        output.write_text(json.dumps(results, indent=2) + "\n")
    raise typer.Exit(1 if results.get("c", {}).get("wrong") else 0)


if __name__ == "__main__":
    typer.run(main)
