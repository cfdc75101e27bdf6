"""`verify_adapter`: all comparisons of one adapter."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from loraserve.inspection import open_base
from loraserve.lora.format import parse_adapter
from loraserve.lora.version import content_version
from loraserve.verify.bench import Bench
from loraserve.verify.compare import (
    TOLERANCES,
    Check,
    Expectation,
    Scenario,
    Served,
    compare,
    distance,
    expectations,
    is_doubtful,
    refined,
)
from loraserve.verify.options import VerifyOptions, token_prompts
from loraserve.verify.reference import ReferenceUnavailable

_CLEAR = 10.0  # how many times the limit an adapter must change logits for a comparison to mean something


@dataclass(frozen=True, slots=True)
class Verdict:
    """All comparisons of one adapter."""

    version: str
    model: str
    dtype: str
    device: str
    kernels: str
    num_prompts: int
    max_tokens: int
    effect: float  # largest |adapter − base| of PEFT's logits: 0 means that the adapter does nothing
    checks: tuple[Check, ...]
    warnings: tuple[str, ...]

    @property
    def max_delta(self) -> float:
        """Largest difference of all checks."""
        return max(check.max_delta for check in self.checks)

    @property
    def passed(self) -> bool:
        """Whether every check is within the tolerance."""
        return all(check.passed for check in self.checks)


def verify_adapter(folder: Path, options: VerifyOptions, say: Callable[[str], None] = lambda _: None) -> Verdict:
    """Compare what is served with what PEFT computes. `say` is told each stage.

    Raises `AdapterRefused`, and whatever else keeps the adapter from being served; `ReferenceUnavailable` if PEFT
    cannot load it; `ConfigError` for prompts that do not fit. A difference is not raised: it is in the verdict.
    """
    base = open_base(options.model, options.revision)
    spec = parse_adapter(folder, base.geometry, options.max_lora_rank)
    version = content_version(spec, folder)
    prompts = token_prompts(base, options, spec)
    starts = [spec.first_token(prompt) for prompt in prompts]
    say("starting the engine")
    bench = Bench(base, spec, options, prompts)
    try:
        bench.load(version, folder)
        say("serving the adapter alone")
        both = (Served.BASE, Served.ADAPTER)
        alone = [bench.ask([(served, i)])[0] for served in both for i in range(len(prompts))]
        say("asking PEFT")
        dtype, against = bench.parts.info.dtype, options.against or folder
        expected = expectations(base, against, prompts, alone, dtype, starts, spec.num_new_tokens)
        checks = compare(Scenario.ALONE, alone, expected, prompts)
        if dtype == "float32" and is_doubtful(checks):
            say("asking PEFT in float64")
            with suppress(ReferenceUnavailable):  # no memory for it, say; the plain limit holds then
                expected = refined(expected, base, against, prompts, alone, starts, spec.num_new_tokens)
                checks = compare(Scenario.ALONE, alone, expected, prompts)
        del alone  # gigabytes, for a large vocabulary
        say("serving it in a mixed batch, after eviction and after a reload")
        everyone = [(served, i) for i in range(len(prompts)) for served in Served]
        checks += compare(Scenario.MIXED, bench.ask(everyone), expected, prompts)
        adapter_only = [(Served.ADAPTER, i) for i in range(len(prompts))]
        bench.evict(version)
        checks += compare(Scenario.EVICTED, bench.ask(adapter_only), expected, prompts)
        bench.reload(version, folder)
        checks += compare(Scenario.RELOADED, bench.ask(adapter_only), expected, prompts)
    finally:
        bench.close()
    info = bench.parts.info
    vocab = base.shape.vocab_size
    effect = max(
        distance(adapted[: len(prompt), :vocab], plain[: len(prompt)])
        for prompt, adapted, plain in zip(
            prompts, expected[Served.ADAPTER].logits, expected[Served.BASE].logits, strict=True
        )
        if max(prompt) < vocab
    )
    return Verdict(
        version=version,
        model=base.path.name,
        dtype=info.dtype,
        device=info.device,
        kernels=info.kernels,
        num_prompts=len(prompts),
        max_tokens=options.max_tokens,
        effect=effect,
        checks=tuple(checks),
        warnings=spec.warnings + _remarks(starts, expected, effect),
    )


def _remarks(starts: list[int | None], expected: dict[Served, Expectation], effect: float) -> tuple[str, ...]:
    """What keeps the comparison from telling much."""
    if all(start is None for start in starts):
        return ("no prompt invokes the adapter",)
    limit = expected[Served.ADAPTER].limit
    if limit > TOLERANCES["float32"] and 0 < effect < _CLEAR * limit:
        return (
            f"the adapter moves logits by {effect:.3g}, and {limit:.3g} may be rounding: an equal result shows little",
        )
    return ()
