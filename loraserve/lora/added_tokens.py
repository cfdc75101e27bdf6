"""Tokens that an adapter's own tokenizer knows: read from the small files beside the adapter, never as a tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from loraserve.errors import AdapterFault, AdapterRefused
from loraserve.lora.files import AdapterFolder
from loraserve.lora.spec import AddedToken, ReplacedRows
from loraserve.lora.strict_json import Json, parse_json
from loraserve.lora.tables import Table

MAX_TOKENIZER_FILE = 64 << 20
MAX_TOKENS = 1 << 17
MAX_CONTENT = 1024  # characters
_FILES = ("tokenizer.json", "tokenizer_config.json", "added_tokens.json")


class AddedTokens(NamedTuple):
    """The tokens for which the adapter brings rows, by id."""

    tokens: tuple[AddedToken, ...] = ()
    warnings: tuple[str, ...] = ()


def read_added_tokens(folder: AdapterFolder, replaced: Sequence[ReplacedRows], vocab_size: int) -> AddedTokens:
    """Of the tokens that the adapter's files add, those whose embedding it brings.

    Others are the base's own, or have no row: they are never asked for, which is a warning where they lie beyond the
    `vocab_size`. So is a file that is no JSON, since only texts depend on it.
    """
    embed = next((rows for rows in replaced if rows.table is Table.EMBED), None)
    names = folder.names()
    # Without embeddings to name, nothing is looked for but names that would need some.
    for file in _FILES if embed is not None else _FILES[-1:]:
        if file not in names:
            continue
        try:
            missing = AdapterFault.INVALID_CONFIG
            data = folder.read(file, MAX_TOKENIZER_FILE, missing=missing, too_large=missing)
            found = dict(_tokens_in(file, parse_json(data, what=file, fault=missing, max_depth=32)))
        except AdapterRefused as error:
            return AddedTokens((), (f"the adapter's own tokens are not known: {error.message}",))
        if found:
            brought = found.keys() & {token for part in embed.parts for token in part.ids} if embed else set()
            lost = [token for token in found if token >= vocab_size and token not in brought] if vocab_size else []
            warning = f"{file} has {len(lost)} tokens that the adapter has no rows for; they are not used"
            return AddedTokens(tuple(found[token] for token in sorted(brought)), (warning,) if lost else ())
    return AddedTokens()


def _tokens_in(file: str, parsed: Json) -> Iterator[tuple[int, AddedToken]]:
    """(id, token) of one file, in whichever of the three forms it has."""
    if not isinstance(parsed, dict):
        return
    entries: list[tuple[Json, Json]] = []
    if file == "tokenizer.json":
        listed = parsed.get("added_tokens")
        entries = (
            [(entry.get("id"), entry) for entry in listed or [] if isinstance(entry, dict)]
            if isinstance(listed, list)
            else []
        )
    elif file == "tokenizer_config.json":
        decoder = parsed.get("added_tokens_decoder")
        entries = [
            (int(token) if token.isascii() and token.isdecimal() and len(token) < 10 else None, entry)
            for token, entry in (decoder.items() if isinstance(decoder, dict) else ())
        ]
    else:
        entries = [(token, {"content": content}) for content, token in parsed.items()]
    for token, entry in entries[:MAX_TOKENS]:
        if type(token) is not int or token < 0 or not isinstance(entry, dict):
            continue
        content = entry.get("content")
        if isinstance(content, str) and 0 < len(content) <= MAX_CONTENT and _is_text(content):
            flags = {
                name: entry.get(name) is True for name in ("special", "lstrip", "rstrip", "single_word", "normalized")
            }
            yield token, AddedToken(token, content, **flags)


def _is_text(content: str) -> bool:
    """Whether it can be written as UTF-8; JSON can spell halves of characters."""
    try:
        content.encode()
    except UnicodeEncodeError:
        return False
    return True
