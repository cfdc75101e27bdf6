"""An adapter's own chat template: the text beside its weights, and where the store keeps it.

The template is no part of a version: it changes which prompts are made of a chat, not what is computed for a prompt. So
two names may have one version and different templates, and share weights and KV. Each name has the template of the
folder that it was loaded from; the name's `AdapterSource` says which by its hash.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from loraserve.errors import AdapterFault, AdapterRefused, StorageFailed
from loraserve.lora.files import AdapterFolder
from loraserve.lora.strict_json import Json, parse_json
from loraserve.lora.workspace import Workspace, fsync_folder, storage_errors

TEMPLATE_NAME = "chat_template.jinja"
SETTINGS_NAME = "tokenizer_config.json"
MAX_TEMPLATE = 256 << 10  # bytes; those of large models have 30 KiB
_MAX_SETTINGS = 4 << 20  # with every added token written out


def read_chat_template(folder: AdapterFolder) -> str | None:
    """The template of an adapter's folder, None if it brings none. A file of its own goes before the settings' field.

    Raises `AdapterRefused`: `config_too_large`, or `invalid_config` for what is not a text. Whether the text is a
    template is only seen when a chat is rendered.
    """
    names = folder.names()
    if TEMPLATE_NAME in names:
        return _checked(_read(folder, TEMPLATE_NAME, MAX_TEMPLATE), TEMPLATE_NAME)
    if SETTINGS_NAME not in names:
        return None
    data = _read(folder, SETTINGS_NAME, _MAX_SETTINGS)
    settings = parse_json(data, what=SETTINGS_NAME, fault=AdapterFault.INVALID_CONFIG, bom=True)
    value = settings.get("chat_template") if isinstance(settings, dict) else None
    if isinstance(value, list):  # several by name; the one for plain chats is called `default`
        value = next((item.get("template") for item in value if _is_default(item)), None)  # type: ignore[union-attr]
    if value is None:
        return None
    if not isinstance(value, str):
        raise AdapterRefused(AdapterFault.INVALID_CONFIG, f"chat_template in {SETTINGS_NAME} is not a text")
    return _checked(value.encode(errors="surrogatepass"), SETTINGS_NAME)


def digest_of(template: str) -> str:
    """sha256 of a template's text, in hex: its name in `AdapterSource` and in the store."""
    return hashlib.sha256(template.encode()).hexdigest()


class TemplateFolder:
    """Templates by the hash of their text. Thread-safe; several processes may share the folder."""

    def __init__(self, folder: Path, workspace: Workspace) -> None:
        self._folder = folder
        self._workspace = workspace
        with storage_errors("opening it"):
            folder.mkdir(parents=True, exist_ok=True)

    def keep(self, text: str) -> str:
        """Store a template; returns its sha256 in hex. Raises `StorageFailed`, `DiskFull`."""
        data, digest = text.encode(), digest_of(text)
        place = self._folder / f"{digest}.jinja"
        with storage_errors("keeping a chat template"):
            if not place.is_file() or place.stat().st_size != len(data):
                copy = self._workspace.new_path()
                with open(copy, "xb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(copy, place)
                fsync_folder(self._folder)
        return digest

    def kept(self) -> list[str]:
        """Hashes of all templates. Raises `StorageFailed`."""
        with storage_errors("listing chat templates"):
            return [path.stem for path in self._folder.glob("*.jinja")]

    def delete(self, digests: Iterable[str]) -> None:
        """Delete templates. Raises `StorageFailed`."""
        with storage_errors("deleting chat templates"):
            for digest in digests:
                (self._folder / f"{digest}.jinja").unlink(missing_ok=True)

    def read(self, digest: str) -> str:
        """A template that was kept. Raises `StorageFailed` if it is gone or is another text now."""
        try:
            data = (self._folder / f"{digest}.jinja").read_bytes()
        except OSError:
            data = b""
        if hashlib.sha256(data).hexdigest() != digest:
            raise StorageFailed("the adapter's chat template is gone from the store; load the adapter again")
        return data.decode()


def _is_default(item: Json) -> bool:
    return isinstance(item, dict) and item.get("name") == "default"


def _read(folder: AdapterFolder, name: str, limit: int) -> bytes:
    return folder.read(name, limit, missing=AdapterFault.INVALID_CONFIG, too_large=AdapterFault.CONFIG_TOO_LARGE)


def _checked(data: bytes, name: str) -> str:
    if len(data) > MAX_TEMPLATE:
        raise AdapterRefused(AdapterFault.CONFIG_TOO_LARGE, f"{name}: a chat template has at most {MAX_TEMPLATE} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise AdapterRefused(AdapterFault.INVALID_CONFIG, f"{name}: the chat template is not UTF-8 text") from error
