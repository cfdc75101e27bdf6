"""Load generator for any OpenAI-compatible server: `python -m benchmarks.serve --help`.

Closed loop (a fixed number of clients, each with one request at a time) or open loop (Gamma-distributed arrivals at a
given rate), adapters drawn from a Zipf law, prompts with shared prefixes. Reports what clients saw, in one table.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.table import Table

WORDS = (
    "river stone light garden paper winter copper market engine silver morning letter bridge forest window "
    "harbour candle story island machine summer kitchen doctor teacher yellow number music orange quiet field"
).split()


@dataclass(slots=True)
class Sample:
    """One request as its client saw it; times in seconds."""

    adapter: str | None
    ttft: float = 0.0
    total: float = 0.0
    gaps: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What to send."""

    url: str
    model: str
    adapters: tuple[str, ...]
    zipf: float
    requests: int
    concurrency: int
    rate: float | None
    burstiness: float
    prompt_words: int
    prefix_words: int
    num_prefixes: int
    max_tokens: int
    seed: int
    api_key: str | None


@dataclass(frozen=True, slots=True)
class Job:
    """One request to send."""

    prompt: str
    adapter: str | None


def make_jobs(load: Load) -> list[Job]:
    """Draw prompts and adapters. Same seed, same jobs."""
    rng = random.Random(load.seed)

    def words(count: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(count))

    prefixes = [words(load.prefix_words) for _ in range(load.num_prefixes)] if load.prefix_words else [""]
    weights = [1 / (rank + 1) ** load.zipf for rank in range(len(load.adapters))]
    jobs = []
    for index in range(load.requests):
        adapter: str | None = None
        if load.adapters:
            adapter = rng.choices(load.adapters, weights)[0] if load.zipf else load.adapters[index % len(load.adapters)]
        jobs.append(
            Job(f"{rng.choice(prefixes)} {words(load.prompt_words)}".strip(), None if adapter == "base" else adapter)
        )
    return jobs


async def send(client: httpx.AsyncClient, load: Load, job: Job) -> Sample:
    """Stream one completion and time it."""
    body: dict[str, Any] = {
        "model": job.adapter or load.model,
        "prompt": job.prompt,
        "max_tokens": load.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    sample = Sample(job.adapter)
    started = last = time.perf_counter()
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                sample.error = f"HTTP {response.status_code}: {(await response.aread())[:200]!r}"
                return sample
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    sample.error = str(event["error"])
                    break
                now = time.perf_counter()
                if event.get("usage"):
                    usage = event["usage"]
                    sample.prompt_tokens = usage["prompt_tokens"]
                    sample.output_tokens = usage["completion_tokens"]
                    sample.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
                if event.get("choices"):
                    if sample.ttft == 0.0:
                        sample.ttft = now - started
                    else:
                        sample.gaps.append(now - last)
                    last = now
    except httpx.HTTPError as error:
        sample.error = f"{type(error).__name__}: {error}"
    sample.total = time.perf_counter() - started
    return sample


async def run(load: Load, on_done: Callable[[Sample], None] = lambda _: None) -> tuple[list[Sample], float]:
    """Send all jobs; samples and the wall-clock seconds they took together."""
    jobs = make_jobs(load)
    headers = {"Authorization": f"Bearer {load.api_key}"} if load.api_key else {}
    limits = httpx.Limits(max_connections=None)
    samples: list[Sample] = []
    async with httpx.AsyncClient(base_url=load.url, headers=headers, timeout=None, limits=limits) as client:

        async def one(job: Job) -> None:
            sample = await send(client, load, job)
            samples.append(sample)
            on_done(sample)

        started = time.perf_counter()
        await (_closed(jobs, load.concurrency, one) if load.rate is None else _open(jobs, load, one))
        return samples, time.perf_counter() - started


async def _closed(jobs: list[Job], concurrency: int, one: Callable[[Job], Awaitable[None]]) -> None:
    remaining = iter(jobs)

    async def client() -> None:
        for job in remaining:
            await one(job)

    await asyncio.gather(*(client() for _ in range(concurrency)))


async def _open(jobs: list[Job], load: Load, one: Callable[[Job], Awaitable[None]]) -> None:
    assert load.rate is not None
    rng = random.Random(load.seed + 1)
    tasks = []
    for job in jobs:
        tasks.append(asyncio.ensure_future(one(job)))
        # Gamma with shape b has a squared coefficient of variation of 1/b; b = 1 is a Poisson process.
        await asyncio.sleep(rng.gammavariate(load.burstiness, 1 / (load.rate * load.burstiness)))
    await asyncio.gather(*tasks)


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of one run; times in milliseconds."""

    requests: int
    errors: int
    seconds: float
    requests_per_s: float
    output_tokens_per_s: float
    ttft_p50: float
    ttft_p99: float
    gap_p50: float
    gap_p99: float
    gap_max: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int

    @classmethod
    def of(cls, samples: list[Sample], seconds: float) -> Summary:
        """Summarise the requests that succeeded; the others are counted."""
        good = [sample for sample in samples if sample.error is None]
        gaps = [gap for sample in good for gap in sample.gaps]
        output = sum(sample.output_tokens for sample in good)
        ttfts = [sample.ttft for sample in good]
        return cls(
            requests=len(samples),
            errors=len(samples) - len(good),
            seconds=seconds,
            requests_per_s=len(good) / seconds,
            output_tokens_per_s=output / seconds,
            ttft_p50=_percentile(ttfts, 50),
            ttft_p99=_percentile(ttfts, 99),
            gap_p50=_percentile(gaps, 50),
            gap_p99=_percentile(gaps, 99),
            gap_max=max(gaps, default=0.0) * 1000,
            prompt_tokens=sum(sample.prompt_tokens for sample in good),
            cached_tokens=sum(sample.cached_tokens for sample in good),
            output_tokens=output,
        )


def _percentile(values: list[float], percent: int) -> float:
    if len(values) < 2:
        return (values[0] if values else 0.0) * 1000
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1] * 1000


def show(summary: Summary, title: str) -> None:
    """Print a summary for people."""
    table = Table(title=title, show_header=False)
    rows = {
        "requests": f"{summary.requests} ({summary.errors} failed) in {summary.seconds:.1f} s",
        "throughput": f"{summary.requests_per_s:.2f} req/s, {summary.output_tokens_per_s:.1f} output tok/s",
        "time to first token": f"p50 {summary.ttft_p50:.0f} ms, p99 {summary.ttft_p99:.0f} ms",
        "inter-token": f"p50 {summary.gap_p50:.0f} ms, p99 {summary.gap_p99:.0f} ms, max {summary.gap_max:.0f} ms",
        "tokens": f"{summary.prompt_tokens} prompt ({summary.cached_tokens} cached), {summary.output_tokens} output",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table)


def main(
    url: Annotated[str, typer.Option(help="Server.")] = "http://127.0.0.1:8000",
    model: Annotated[str, typer.Option(help="Name of the base model (default: ask the server).")] = "",
    adapters: Annotated[str, typer.Option(help="Comma-separated adapter names; `base` stands for the base.")] = "",
    zipf: Annotated[float, typer.Option(help="Exponent of the adapters' popularity; 0 takes them in turn.")] = 0.0,
    requests: Annotated[int, typer.Option(help="Requests in all.")] = 32,
    concurrency: Annotated[int, typer.Option(help="Clients of the closed loop.")] = 16,
    rate: Annotated[float, typer.Option(help="Requests per second of the open loop; 0: closed loop.")] = 0.0,
    burstiness: Annotated[
        float, typer.Option(help="Shape of the Gamma arrivals; 1 is Poisson, less is burstier.")
    ] = 1.0,
    prompt_words: Annotated[int, typer.Option(help="Words of each prompt's own part.")] = 60,
    prefix_words: Annotated[int, typer.Option(help="Words of the shared prefix.")] = 0,
    num_prefixes: Annotated[int, typer.Option(help="How many different shared prefixes.")] = 1,
    max_tokens: Annotated[int, typer.Option(help="Tokens generated by each request (EOS is ignored).")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of prompts, adapters and arrivals.")] = 0,
    api_key: Annotated[str, typer.Option(envvar="LORASERVE_API_KEY", help="Key for /v1.")] = "",
    output: Annotated[Path | None, typer.Option(help="Also write the figures as JSON.")] = None,
) -> None:
    """Send load to a server and print what its clients saw."""
    if not model:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        listed = httpx.get(f"{url}/v1/models", headers=headers).raise_for_status().json()["data"]
        model = next(entry["id"] for entry in listed if not entry.get("parent"))
    load = Load(
        url=url,
        model=model,
        adapters=tuple(name for name in adapters.split(",") if name),
        zipf=zipf,
        requests=requests,
        concurrency=concurrency,
        rate=rate or None,
        burstiness=burstiness,
        prompt_words=prompt_words,
        prefix_words=prefix_words,
        num_prefixes=num_prefixes,
        max_tokens=max_tokens,
        seed=seed,
        api_key=api_key or None,
    )
    samples, seconds = asyncio.run(run(load))
    summary = Summary.of(samples, seconds)
    show(summary, f"{model}: {', '.join(load.adapters) or 'base only'}")
    for error in sorted({sample.error for sample in samples if sample.error}):
        print("failed:", error)
    if output is not None:
        output.write_text(json.dumps({"load": asdict(load), "summary": asdict(summary)}, indent=2) + "\n")
    raise typer.Exit(1 if summary.errors else 0)


if __name__ == "__main__":
    typer.run(main)
