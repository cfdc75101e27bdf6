"""`loraserve verify`: hold what is served against PEFT itself."""

from __future__ import annotations

import json
import math
import typing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from loraserve.cli.refusals import EXIT_REFUSED, refusals
from loraserve.config import Device, Dtype, Kernels, LoraConfig
from loraserve.errors import ConfigError

if TYPE_CHECKING:
    from loraserve.verify import Check, Verdict

EXIT_DIFFERENT = 1
_MAX_PROMPTS_FILE = 1 << 20


def verify(
    path: Annotated[Path, typer.Argument(help="Folder of the adapter.")],
    model: Annotated[str | None, typer.Option(help="Base model: folder or Hub id (default: the demo model).")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub model.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Text file with one prompt to a line (default: built-in ones).")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate for each prompt.", min=1)] = 16,
    dtype: Annotated[
        str, typer.Option(metavar="[auto|float32|bfloat16|float16]", help="What to serve in.")
    ] = "float32",
    device: Annotated[str, typer.Option(metavar="[auto|cpu|cuda]", help="Where to serve.")] = "auto",
    kernels: Annotated[
        str, typer.Option(metavar="[auto|triton|cpu|reference]", help="Implementation of the operators.")
    ] = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads (default: all cores).")] = None,
    max_lora_rank: Annotated[int, typer.Option(help="Largest rank accepted.", min=1)] = LoraConfig().max_lora_rank,
    against: Annotated[
        Path | None,
        typer.Option(help="Folder that PEFT reads instead of PATH, such as the original of a converted one."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Serve an adapter in this process and compare logits and greedy tokens with Hugging Face + PEFT in float32.

    Compared are all prompts and answers: alone, in one batch beside the base and a copy of the adapter, after the
    adapter was evicted from the device, and after an unload and load. |Δlogit| must be below 0.001 in float32, and all
    tokens equal. In float16 it must be below 0.05, in bfloat16 below 0.5, or twice what PEFT in that dtype differs from
    PEFT in float32, and the first unequal token must be that near a tie; later ones are not compared.
    Exit code 0: equal; 1: different, or the served logits are not finite; 2: the adapter is refused, or the comparison
    cannot run.
    """
    with refusals():
        texts = None if prompts is None else _read_prompts(prompts)
        _require_one_of("--dtype", dtype, Dtype)
        _require_one_of("--device", device, Device)
        _require_one_of("--kernels", kernels, Kernels)
        verdict = _run(
            path.expanduser(),
            threads,
            as_json,
            model=model,
            revision=revision,
            prompts=texts,
            max_tokens=max_tokens,
            dtype=dtype,
            device=device,
            kernels=kernels,
            max_lora_rank=max_lora_rank,
            against=None if against is None else against.expanduser(),
        )
    if as_json:
        typer.echo(json.dumps(_as_json(verdict), indent=2, ensure_ascii=False))
    else:
        _print(verdict)
    raise typer.Exit(0 if verdict.passed else EXIT_DIFFERENT)


def _run(path: Path, threads: int | None, silent: bool, **options: Any) -> Verdict:
    from loraserve.kernels.threads import configure_threads

    configure_threads(threads)  # before the libraries that read its settings are imported
    from loraserve.verify import VerifyOptions, verify_adapter

    def say(stage: str) -> None:
        if not silent:
            typer.echo(f"{stage} …", err=True)

    return verify_adapter(path, VerifyOptions(**options), say)


def _read_prompts(file: Path) -> tuple[str, ...]:
    try:
        if file.stat().st_size > _MAX_PROMPTS_FILE:
            raise ConfigError(f"{file} is larger than {_MAX_PROMPTS_FILE} bytes")
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "is not UTF-8 text"
        raise ConfigError(f"--prompts {file}: {reason}") from error
    return tuple(line for line in lines if line.strip())


def _require_one_of(flag: str, value: str, choices: Any) -> None:
    allowed: tuple[str, ...] = typing.get_args(choices)
    if value not in allowed:
        raise ConfigError(f"{flag} {value!r} is not one of {', '.join(allowed)}")


def _print(verdict: Verdict) -> None:
    console = Console()
    console.print(
        f"version {verdict.version[:12]} on {verdict.model}: {verdict.dtype} on {verdict.device}, {verdict.kernels} "
        f"kernels; {verdict.num_prompts} prompts, {verdict.max_tokens} tokens each",
        highlight=False,
    )
    table = Table(box=None, pad_edge=False)
    for column in ("scenario", "served", "rows", "max |Δlogit|", "limit", "first divergence", ""):
        table.add_column(column, justify="right" if column in ("rows", "max |Δlogit|", "limit") else "left")
    for check in verdict.checks:
        passed = check.passed
        table.add_row(
            str(check.scenario),
            str(check.served),
            str(check.num_rows),
            f"{check.max_delta:.2e}",
            f"{check.limit:.3g}",
            _divergences(check),
            "[green]ok[/green]" if passed else "[bold red]FAILED[/bold red]",
        )
    console.print(table)
    for warning in verdict.warnings:
        console.print(f"warning: {warning}", markup=False, highlight=False)
    if verdict.effect == 0:
        console.print("warning: in PEFT too the adapter changes no logit of these prompts", highlight=False)
    word = "[bold green]PASSED[/bold green]" if verdict.passed else "[bold red]FAILED[/bold red]"
    console.print(
        f"{word}: max |Δlogit| {verdict.max_delta:.2e}; the adapter itself moves logits by up to {verdict.effect:.3g}",
        highlight=False,
    )


def _divergences(check: Check) -> str:
    """`none`, or for each prompt the token of the answer where it leaves PEFT's."""
    parts = []
    for prompt in check.broken:
        parts.append(f"prompt {prompt + 1}: the engine's logits are not finite")
    for found in check.divergences:
        where = f"prompt {found.prompt + 1} at token {found.position + 1}"
        parts.append(f"{where}: {found.token}, PEFT has {found.expected} (ahead by {found.gap:.2g})")
    return "\n".join(parts) or "none"


def _as_json(verdict: Verdict) -> dict[str, Any]:
    def finite(value: float) -> float | Literal["inf"]:
        return value if math.isfinite(value) else "inf"

    checks = [
        asdict(check)
        | {
            "max_delta": finite(check.max_delta),
            "divergences": [found._asdict() for found in check.divergences],
            "passed": check.passed,
        }
        for check in verdict.checks
    ]
    totals = {"passed": verdict.passed, "max_delta": finite(verdict.max_delta)}
    return asdict(verdict) | totals | {"effect": finite(verdict.effect), "checks": checks}


__all__ = ["EXIT_DIFFERENT", "EXIT_REFUSED", "verify"]
