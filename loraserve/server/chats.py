"""Which chat template a chat is rendered with: the adapter's own, if it brought one, else the base model's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from loraserve.server.generation import ResolvedUse
from loraserve.server.ports import AdapterLibrary
from loraserve.server.templates import Chat, TemplateRenderer
from loraserve.server.text import Text

_MAX_KEPT = 256  # texts in memory


class ChatRenderer:
    """Chat → prompt text. Belongs to the event loop."""

    def __init__(self, library: AdapterLibrary, *, use_own: bool = True) -> None:
        self._library = library
        self._use_own = use_own
        self._renderer = TemplateRenderer()
        self._texts: dict[str, str] = {}

    def template_of(self, uses: Sequence[ResolvedUse]) -> str | None:
        """Hash of the template that a single adapter brought; None for the base's: of the base, of a blend."""
        if not self._use_own or len({use.adapter.name for use in uses}) != 1:
            return None
        return uses[0].adapter.source.chat_template

    async def render(
        self, text: Text, messages: Sequence[Mapping[str, str]], add: bool, go_on: bool, template: str | None
    ) -> str:
        """Prompt text by the template of a hash, or the base's. Raises `InvalidRequest`, `StorageFailed`."""
        own = None if template is None else self._text(template)
        if own is None or own == text.chat_template:
            return text.render_chat(messages, add_generation_prompt=add, continue_final_message=go_on)
        return await self._renderer.render(own, Chat(messages, add, go_on, text.special_tokens))

    def close(self) -> None:
        """End the processes that render."""
        self._renderer.close()

    def _text(self, digest: str) -> str:
        if digest not in self._texts:
            if len(self._texts) >= _MAX_KEPT:
                self._texts.clear()
            self._texts[digest] = self._library.chat_template(digest)
        return self._texts[digest]
