"""The tokenizer as the server uses it: text to ids and back, exact bytes of single tokens, the chat template."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from loraserve.compat import StrEnum
from loraserve.errors import InvalidRequest, ModelLoadError
from loraserve.lora.spec import AddedToken

GENERIC_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
SHORT = 2000  # characters or ids that are worked through in less time than starting a thread takes
_BYTE_PIECE_LEN = len("<0x00>")


class Encoding(NamedTuple):
    """Ids of a text and, for each, where its piece begins in the text (0 for tokens that stand for no text)."""

    ids: list[int]
    starts: list[int]


class PieceKind(StrEnum):
    """How a vocabulary entry spells bytes."""

    BYTE_LEVEL = "byte_level"  # one printable character per byte (GPT-2's table)
    METASPACE = "metaspace"  # ▁ for a space, <0xNN> for single bytes
    PLAIN = "plain"


class Text:
    """Wraps a Hugging Face fast tokenizer; raises `ModelLoadError` for a slow one. Several threads may use it."""

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ModelLoadError(f"{type(tokenizer).__name__} is not a fast tokenizer; convert it to tokenizer.json")
        # Encoding through the wrapper re-sets truncation on the shared backend each time, which is neither fast nor
        # safe between threads; with both off the backend gives the same ids.
        backend.no_truncation()
        backend.no_padding()
        self._tokenizer = tokenizer
        self._backend = backend
        self._special = {int(token) for token in tokenizer.all_special_ids}
        self._added: dict[int, str] = {}
        for token, added in tokenizer.added_tokens_decoder.items():
            self._added[int(token)] = added.content
            if added.special:
                self._special.add(int(token))
        description = json.loads(backend.to_str())
        kinds = _types_in(description.get("decoder"))
        self.kind = PieceKind.PLAIN
        if "ByteLevel" in kinds:
            self.kind = PieceKind.BYTE_LEVEL
        elif kinds & {"ByteFallback", "Metaspace"}:
            self.kind = PieceKind.METASPACE
        self._byte_fallback = "ByteFallback" in kinds
        self._byte_of = _byte_level_table() if self.kind is PieceKind.BYTE_LEVEL else {}
        self._longest_piece = self._find_longest_piece(description)

    def with_tokens(self, tokens: Sequence[AddedToken]) -> Text | None:
        """A tokenizer that knows more tokens; this one if it knows them all, None if their ids would be others.

        A tokenizer gives new tokens the ids after its last, so those must be the ones that are wanted.
        """
        import tokenizers

        new = sorted((token for token in tokens if token.id >= self._backend.get_vocab_size()), key=lambda t: t.id)
        if not new:
            return self
        longer = copy.deepcopy(self._tokenizer)
        longer.add_tokens(
            [
                tokenizers.AddedToken(
                    token.content,
                    single_word=token.single_word,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=token.normalized,
                    special=token.special,
                )
                for token in new
            ]
        )
        if any(longer.backend_tokenizer.token_to_id(token.content) != token.id for token in new):
            return None
        return Text(longer)

    @property
    def size(self) -> int:
        """Number of token ids that the tokenizer knows."""
        return len(self._tokenizer)

    def encode(self, text: str, *, special: bool = True) -> Encoding:
        """Text → ids, with the model's own prefix and suffix tokens when `special`."""
        if len(text) <= SHORT:
            found = self._backend.encode(text, add_special_tokens=special)
        else:
            # Unlike the single form, the batch form lets other threads run meanwhile.
            (found,) = self._backend.encode_batch([text], add_special_tokens=special)
        return Encoding(found.ids, [start for start, _ in found.offsets])

    def least_tokens(self, text: str) -> int:
        """A lower bound on the number of tokens of a text, without tokenizing it; 0 where none is sure."""
        return -(-len(text) // self._longest_piece) if self._longest_piece else 0

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Ids → text; bytes that form no character become U+FFFD, unknown ids nothing."""
        if len(ids) <= SHORT:
            return str(self._backend.decode(list(ids), skip_special_tokens=skip_special))
        (text,) = self._backend.decode_batch([list(ids)], skip_special_tokens=skip_special)
        return str(text)

    def is_silent(self, token: int) -> bool:
        """Whether decoding leaves this token out: special ones, and ids that the tokenizer does not know."""
        return token in self._special or self._backend.id_to_token(token) is None

    def is_byte_piece(self, token: int) -> bool:
        """Whether this is a `<0xNN>` piece, whose meaning depends on the ones beside it."""
        if not self._byte_fallback:
            return False
        return _byte_value(self._backend.id_to_token(token)) is not None

    def token_bytes(self, token: int) -> bytes:
        """The bytes a single token stands for; special tokens spell their own name, unknown ids are empty."""
        if token in self._added:
            return self._added[token].encode()
        piece = self._backend.id_to_token(token)
        if piece is None:
            return b""
        if self.kind is PieceKind.BYTE_LEVEL:
            return b"".join(self._byte_of.get(char, char.encode()) for char in piece)
        if self.kind is PieceKind.METASPACE:
            value = _byte_value(piece)
            return bytes([value]) if value is not None else piece.replace("▁", " ").encode()
        return str(piece).encode()

    def _find_longest_piece(self, description: Mapping[str, Any]) -> int:
        """Bytes, and so at most characters, of the longest vocabulary entry; 0 if entries may stand for more."""
        if self.kind is not PieceKind.BYTE_LEVEL or not _is_lossless(description):
            return 0
        longest_added = max((len(content.encode()) for content in self._added.values()), default=0)
        return max(longest_added, max(map(len, self._backend.get_vocab(with_added_tokens=False)), default=0))

    @property
    def has_chat_template(self) -> bool:
        """Whether chat requests can be served at all."""
        return self._tokenizer.chat_template is not None

    @property
    def chat_template(self) -> str | None:
        """The model's own template, None if it has none or several."""
        found = self._tokenizer.chat_template
        return found if isinstance(found, str) else None

    @property
    def special_tokens(self) -> dict[str, str]:
        """Special tokens by the names that chat templates know them by."""
        return {name: token for name, token in self._tokenizer.special_tokens_map.items() if isinstance(token, str)}

    def render_chat(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool, continue_final_message: bool
    ) -> str:
        """Messages → prompt text by the model's chat template. Raises `InvalidRequest` when the template refuses."""
        from jinja2.exceptions import TemplateError

        if not self.has_chat_template:
            raise InvalidRequest("this model has no chat template; use /v1/completions", param="messages")
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                )
            )
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise InvalidRequest(f"the chat template refuses these messages: {error}", param="messages") from error

    def encode_chat(self, prompt: str) -> list[int]:
        """Ids of a rendered chat; the template has already written the special tokens."""
        return self.encode(prompt, special=False).ids


class Detokenizer:
    """Turns one sequence's tokens into text piece by piece; the pieces together are `Text.decode` of all tokens.

    A piece is held back while it could still change: an unfinished character, or a run of `<0xNN>` pieces. `context`
    are tokens before the sequence whose text is not wanted but whose neighbourhood matters (spaces).
    """

    def __init__(self, text: Text, context: Sequence[int] = ()) -> None:
        self._decode: Callable[[Sequence[int]], str] = text.decode
        self._text = text
        # `_window[:_read]` has been given out; it stays as the left neighbour of what follows.
        self._window: list[int] = list(context)
        self._read = len(self._window)
        self._known = self._decode(self._window)
        self._open_run = False

    def push(self, token: int) -> str:
        """Take one token; return the text that is now certain."""
        self._window.append(token)
        if not self._text.is_silent(token):
            self._open_run = self._text.is_byte_piece(token)
        text = self._decode(self._window)
        if self._open_run or text.endswith(REPLACEMENT):
            return ""
        return self._advance(text)

    def finish(self) -> str:
        """The text still held back, as a full decode would end."""
        return self._advance(self._decode(self._window))

    def _advance(self, text: str) -> str:
        piece = text[len(self._known) :]
        known = self._decode(self._window[self._read :])
        if known:
            self._window = self._window[self._read :]
            self._known = known
        else:
            # Decoders treat the first visible piece specially (a leading space goes): without one to the left of
            # what follows, the next piece would be taken for it.
            self._known = text
        self._read = len(self._window)
        return piece


def load_tokenizer(path: Path) -> Any:
    """The tokenizer beside a model's weights (or inside a GGUF). Raises `ModelLoadError`."""
    try:
        if _is_generic(path):
            # The class that the general door would choose; that door alone imports torch, which takes seconds.
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
        from transformers import AutoTokenizer

        if (gguf := _gguf_of(path)) is not None:
            return AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelLoadError(f"the tokenizer in {path} cannot be loaded: {error}") from error


def _gguf_of(path: Path) -> Path | None:
    """The GGUF file that a model is, or that is all that its folder holds of a tokenizer."""
    if path.suffix == ".gguf":
        return path
    if any((path / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        return None
    found = list(path.glob("*.gguf"))
    return found[0] if len(found) == 1 else None


def _is_generic(path: Path) -> bool:
    """Whether the folder says that its `tokenizer.json` needs no class of its own."""
    try:
        settings = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    generic = isinstance(settings, dict) and settings.get("tokenizer_class") in GENERIC_CLASSES
    return generic and (path / "tokenizer.json").is_file()


def _is_lossless(description: Mapping[str, Any]) -> bool:
    """Whether a tokenizer keeps every character, so that pieces cover the text."""
    if description.get("normalizer") is not None or any(
        token["lstrip"] or token["rstrip"] for token in description["added_tokens"]
    ):
        return False
    splitting = description.get("pre_tokenizer")
    return _types_in(splitting) <= {"Sequence", "Split", "ByteLevel", "Digits"} and "Removed" not in json.dumps(
        splitting
    )


def _types_in(node: object) -> set[str]:
    if isinstance(node, dict):
        own = {node["type"]} if isinstance(node.get("type"), str) else set()
        return own.union(*(_types_in(value) for value in node.values()))
    if isinstance(node, list):
        return set().union(*(_types_in(value) for value in node))
    return set()


def _byte_value(piece: str | None) -> int | None:
    if piece is None or len(piece) != _BYTE_PIECE_LEN or not piece.startswith("<0x") or not piece.endswith(">"):
        return None
    try:
        return int(piece[3:5], 16)
    except ValueError:
        return None


def _byte_level_table() -> dict[str, bytes]:
    """The printable character of each byte in byte-level vocabularies, inverted."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(value): bytes([value]) for value in printable}
    others = (value for value in range(256) if value not in set(printable))
    table.update({chr(256 + index): bytes([value]) for index, value in enumerate(others)})
    return table
