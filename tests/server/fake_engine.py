"""Deterministic stand-ins for the engine and the adapter library, and tokenizers small enough to build in a test."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from loraserve.engine.client import EngineHealth
from loraserve.engine.messages import (
    AdapterStatus,
    AddRequest,
    EngineInfo,
    EngineStats,
    ErrorInfo,
    RequestOutput,
    TokenLogprobs,
)
from loraserve.errors import AdapterFault, AdapterRefused, EngineDead, EngineNotReady, LoraserveError
from loraserve.lora.chat_template import read_chat_template
from loraserve.lora.files import AdapterFolder
from loraserve.lora.names import AdapterName
from loraserve.lora.registry import Registry, VersionRecord
from loraserve.lora.spec import AdapterSource, BaseGeometry, LoadReport, TargetGeometry
from loraserve.server.library import NameBook
from loraserve.server.ports import AdapterPlace, Progress, StoredAdapter

SENTENCES = [
    "The quick brown fox jumps over the lazy dog. Hello world, I am an adapter!",
    "Größe, naïve café, Ελληνικά, русский текст, 漢字かな交じり文 и всё остальное.",
    "Emoji: 😀 👩‍👩‍👧‍👦 🇩🇪 — dashes, “quotes” and … dots.",
    "def f(x):\n    return x + 1\n\n\ttabs and  double  spaces",
]
SPECIALS = ["<|begin|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'system' and not loop.first %}{{ raise_exception('system must come first') }}{% endif %}"
    "<|{{ m['role'] }}|>{{ m['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_level_tokenizer(vocab_size: int = 420, template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Byte-level BPE like GPT-2's; encoding adds `<|begin|>` at the front."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(SENTENCES * 4, trainer)
    core.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", core.token_to_id("<|begin|>"))]
    )
    return _wrap(core, template)


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """BPE over ▁-words with `<0xNN>` pieces for everything else, like Llama 2's."""
    core = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<unk>", *SPECIALS, *(f"<0x{value:02X}>" for value in range(256))],
        initial_alphabet=list("▁abcdefghijklmnopqrstuvwxyz.,!"),
        limit_alphabet=60,
        show_progress=False,
    )
    core.train_from_iterator(SENTENCES[:1] * 4, trainer)
    # The pieces for bytes were only reserved as special tokens; in use they are ordinary ones.
    plain = Tokenizer.from_str(core.to_str())
    import json

    data = json.loads(plain.to_str())
    data["added_tokens"] = [token for token in data["added_tokens"] if not token["content"].startswith("<0x")]
    return _wrap(Tokenizer.from_str(json.dumps(data)), TEMPLATE)


def _wrap(core: Tokenizer, template: str | None) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<|begin|>", eos_token="<|end|>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = template
    return tokenizer


Script = Callable[[AddRequest], list[int]]


class FakeEngine:
    """Answers with scripted tokens. `gate` (if set) must be open for each token; `delay` passes before it."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, script: Script | None = None, delay: float = 0.0) -> None:
        self.tokenizer = tokenizer
        self.script = script or self.speak
        self.delay = delay
        self.gate: asyncio.Event | None = None
        self.load_gate: asyncio.Event | None = None
        self.drop_gate: asyncio.Event | None = None
        self.refuse: dict[str, LoraserveError] = {}  # version → error of its load
        self.fail_with: LoraserveError | None = None  # every request ends with it at once
        self.fail_after: tuple[int, LoraserveError] | None = None  # after so many tokens
        self.end_with: str | None = None  # a finish reason after the script
        self.cached = 0
        self.alive = True
        self.started = True
        self.stuck = False
        self.requests: list[AddRequest] = []
        self.left: list[str] = []  # ids whose consumer left early
        self.aborted: list[str] = []
        self.loaded: dict[str, bool] = {}
        self.load_calls: list[str] = []
        self.dropped: list[str] = []
        self.prefetched: list[tuple[str, bool]] = []
        self.limits: list[tuple[int | None, int | None]] = []
        self.used_after_drop: list[str] = []
        self.stats = EngineStats()
        self._ends: dict[str, asyncio.Future[RequestOutput]] = {}
        self._info = EngineInfo(
            model_path="/models/fake",
            architecture="Fake",
            geometry=BaseGeometry(targets=(TargetGeometry("q", 8, 8, 2),)),
            vocab_size=len(tokenizer) + 8,
            max_context=256,
            eos_token_ids=[tokenizer.eos_token_id],
            dtype="float32",
            device="cpu",
            kernels="reference",
            kv_tokens=4096,
            kv_bytes=1,
            page_size=16,
            lora_bytes=1,
            host_lora_bytes=1,
            max_lora_rank=64,
            max_running=8,
            plan=["a plan"],
        )

    def speak(self, request: AddRequest) -> list[int]:
        """Say who speaks, and end with EOS."""
        who = " and ".join(use.version[:4] for use in request.adapters) or "the base"
        return [*self.ids(f"Hello from {who} 😀, bye."), self.tokenizer.eos_token_id]

    def ids(self, text: str) -> list[int]:
        """Text → ids without special tokens."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    @property
    def info(self) -> EngineInfo:
        if not self.started:
            raise EngineNotReady("the engine is still starting")
        return self._info

    @property
    def open(self) -> set[str]:
        """Ids being generated."""
        return set(self._ends)

    def health(self) -> EngineHealth:
        ready = self.alive and self.started
        return EngineHealth(self.alive, self.stuck, ready, "ok" if ready else "the engine process is not running")

    def die(self) -> None:
        """End every open request as a crash does."""
        self.alive = False
        for request_id in list(self._ends):
            self._end(request_id, "error", EngineDead("the engine died"))

    async def generate(self, request: AddRequest) -> AsyncGenerator[RequestOutput, None]:
        if not self.alive:
            raise EngineDead("the engine process is not running")
        self.requests.append(request)
        self.used_after_drop += [use.version for use in request.adapters if use.version not in self.loaded]
        end: asyncio.Future[RequestOutput] = asyncio.get_running_loop().create_future()
        self._ends[request.id] = end
        finished = False
        try:
            async for output in self._outputs(request):
                if end.done():
                    output = end.result()
                finished = output.finish_reason is not None
                yield output
                if finished:
                    return
        finally:
            self._ends.pop(request.id, None)
            if not finished:
                self.left.append(request.id)

    async def _outputs(self, request: AddRequest) -> AsyncGenerator[RequestOutput, None]:
        params = request.params
        if self.fail_with is not None:
            yield RequestOutput(id=request.id, finish_reason="error", error=ErrorInfo.of(self.fail_with))
        prompt_logprobs = None
        if params.prompt_logprobs is not None:
            prompt_logprobs = [None, *(self.logprobs(token, params.prompt_logprobs) for token in request.prompt[1:])]
        if params.max_tokens == 0:
            yield RequestOutput(id=request.id, prompt_logprobs=prompt_logprobs, finish_reason="length")
        tokens = self.script(request)
        for index, token in enumerate(tokens):
            await self._pause(request.id)
            if self.fail_after is not None and index == self.fail_after[0]:
                yield RequestOutput(id=request.id, finish_reason="error", error=ErrorInfo.of(self.fail_after[1]))
            reason = None
            stops = {self.tokenizer.eos_token_id} - ({self.tokenizer.eos_token_id} if params.ignore_eos else set())
            if token in stops | set(params.stop_token_ids):
                reason = "stop"
            elif index + 1 == params.max_tokens:
                reason = "length"
            yield RequestOutput(
                id=request.id,
                token_ids=[token],
                logprobs=None if params.logprobs is None else [self.logprobs(token, params.logprobs)],
                prompt_logprobs=prompt_logprobs,
                finish_reason=reason,
                cached_tokens=self.cached,
                queued_s=0.25 if index == 0 else None,
                cold=bool(request.adapters) and index == 0,
            )
            prompt_logprobs = None
        yield RequestOutput(id=request.id, finish_reason=self.end_with or "length", cached_tokens=self.cached)

    def logprobs(self, token: int, num_top: int) -> TokenLogprobs:
        """Made-up but recognisable numbers."""
        top = [(token + offset, -0.25 * (offset + 1)) for offset in range(num_top)]
        return TokenLogprobs(token, -0.25, top)

    async def _pause(self, request_id: str) -> None:
        async def pause() -> None:
            await asyncio.sleep(self.delay)
            if self.gate is not None:
                await self.gate.wait()

        waiting = asyncio.ensure_future(pause())
        await asyncio.wait({waiting, self._ends[request_id]}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting

    def _end(self, request_id: str, reason: str, error: LoraserveError | None) -> None:
        end = self._ends.get(request_id)
        if end is not None and not end.done():
            info = None if error is None else ErrorInfo.of(error)
            end.set_result(RequestOutput(id=request_id, finish_reason=reason, error=info))

    async def abort(self, request_id: str, error: LoraserveError | None = None) -> None:
        self.aborted.append(request_id)
        self._end(request_id, "abort" if error is None else "error", error)

    async def load_adapter(self, version: str, folder: str, pinned: bool = False) -> None:
        self.load_calls.append(version)
        if self.load_gate is not None:
            await self.load_gate.wait()
        await asyncio.sleep(0)
        if version in self.refuse:
            raise self.refuse[version]
        self.loaded[version] = pinned

    async def drop_adapter(self, version: str, force: bool = False) -> None:
        if self.drop_gate is not None:
            await self.drop_gate.wait()
        await asyncio.sleep(0)
        self.loaded.pop(version, None)
        self.dropped.append(version)

    async def prefetch_adapter(self, version: str, to_device: bool = True, idle_s: float = 0.0) -> None:
        assert version in self.loaded
        self.prefetched.append((version, to_device))

    async def set_limits(self, lora_memory: int | None, host_lora_memory: int | None) -> None:
        self.limits.append((lora_memory, host_lora_memory))

    async def adapter_statuses(self) -> dict[str, AdapterStatus]:
        return {
            version: AdapterStatus(version=version, state="resident", residency="device") for version in self.loaded
        }


class FakeLibrary(NameBook):
    """Versions are hashes of a folder's file `weights`. `gate` (if set) must be open before a fetch ends.

    The registry is a real one.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.registry = Registry(root / "registry.sqlite3")
        self.folders: dict[str, Path] = {}
        self.purged: list[str] = []
        super().__init__(self.registry, self.folders.__getitem__)
        self.gate: threading.Event | None = None
        self.reported: dict[str, Any] = {}  # fields of the load reports that are not the plain ones
        self.adds = 0
        self.changed = False  # by another process; told once
        self.templates: dict[str, str] = {}
        self.holds: Counter[tuple[str, str | None]] = Counter()
        self._lock = threading.Lock()

    def make(self, name: str, content: str, template: str | None = None) -> str:
        """A folder with an adapter of this content and chat template; returns its path."""
        folder = self.root / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "weights").write_text(content)
        if template is not None:
            (folder / "chat_template.jinja").write_text(template)
        return str(folder)

    @staticmethod
    def version_of(content: str) -> str:
        """The version that this content has."""
        return hashlib.sha256(content.encode()).hexdigest()

    def chat_template(self, digest: str) -> str:
        return self.templates[digest]

    def add(self, place: AdapterPlace, progress: Progress) -> StoredAdapter:
        with self._lock:
            self.adds += 1
        progress(0, 10)
        if self.gate is not None:
            assert self.gate.wait(10)
        assert place.path is not None
        file = Path(place.path) / "weights"
        if not file.exists():
            raise AdapterRefused(AdapterFault.NOT_AN_ADAPTER, "the folder has no adapter")
        content = file.read_text()
        version = self.version_of(content)
        progress(10, 10)
        report = LoadReport(
            version=version,
            rank=8,
            targets=("q", "v"),
            kinds=(),
            scaling=(2.0,),
            dtype="float32",
            parameters=4,
            bytes=len(content),
            features=(),
            warnings=(),
            base_model_name=None,
        )
        report = replace(report, **self.reported)
        template = read_chat_template(AdapterFolder.at(Path(place.path)))
        digest = None if template is None else self.version_of(template)
        if digest is not None and template is not None:
            self.templates[digest] = template
        source = AdapterSource("local", path=place.path, chat_template=digest)
        self.folders[version] = Path(place.path)
        self.registry.add_version(VersionRecord(version, source, report, (), 1.0))
        stored = StoredAdapter(version, Path(place.path), report, source)
        self.hold(stored)
        return stored

    def hold(self, stored: StoredAdapter) -> None:
        self.registry.version(stored.version)
        with self._lock:
            self.holds[stored.meaning] += 1

    def let_go(self, stored: StoredAdapter) -> None:
        with self._lock:
            self.holds[stored.meaning] -= 1
            assert self.holds[stored.meaning] >= 0
            self.holds += Counter()

    def purge(self, versions: Iterable[str]) -> None:
        self.purged += self.registry.delete_unneeded(versions)

    def find_version(self, name: str, prefix: str) -> StoredAdapter:
        return self._stored_of(name, self.registry.resolve(AdapterName(name, prefix)))

    def check_access(self, place: AdapterPlace) -> None:
        raise NotImplementedError

    def is_changed(self, *, wait: bool) -> bool:
        with self._lock:
            changed, self.changed = self.changed, False
        return changed
