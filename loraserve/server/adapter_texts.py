"""Tokenizers of adapters that bring tokens of their own: the base's with these added."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence

from loraserve.server.generation import ResolvedUse
from loraserve.server.text import Text

logger = logging.getLogger(__name__)

# A copy of a large vocabulary takes tens of megabytes and some hundred milliseconds to make.
MAX_KEPT = 16


class AdapterTexts:
    """Made when first asked for; the last ones used are kept. Belongs to the event loop."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Text] = OrderedDict()
        self._making = asyncio.Lock()

    async def text_for(self, base: Text, uses: Sequence[ResolvedUse]) -> Text:
        """The tokenizer of a request with these adapters: the base's, unless it has one that brings tokens."""
        if len(uses) != 1 or not uses[0].adapter.stored.report.added_tokens:
            return base
        adapter = uses[0].adapter
        async with self._making:
            text = self._kept.pop(adapter.version, None)
            if text is None:
                text = await asyncio.to_thread(base.with_tokens, adapter.stored.report.added_tokens)
                if text is None:
                    logger.warning(
                        "adapter %s: its own tokens do not follow the base tokenizer's, so they have no text",
                        adapter.name,
                    )
                    text = base
            self._kept[adapter.version] = text
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
            return text


def num_new_tokens(uses: Sequence[ResolvedUse]) -> int:
    """Token ids beyond the base's vocabulary that a request with these adapters may have."""
    return max((use.adapter.stored.report.new_tokens for use in uses), default=0)
