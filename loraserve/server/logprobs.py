"""Log-probabilities in the two shapes that OpenAI's endpoints give them."""

from __future__ import annotations

from collections.abc import Sequence

from loraserve.server.assembly import ShownToken
from loraserve.server.responses import ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, TopLogprob
from loraserve.server.text import Text

# JSON has no infinity; OpenAI's own stand-in for an impossible token.
FLOOR = -9999.0


def token_text(text: Text, token: int) -> str:
    """A token alone as text; bytes that form no character are spelled out, so that no two tokens look alike."""
    raw = text.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{value:02x}" for value in raw)


def completion_logprobs(text: Text, tokens: Sequence[ShownToken], num_top: int) -> CompletionLogprobs:
    """Lists over `tokens`, with up to `num_top` alternatives and always the token itself among them."""
    result = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for shown in tokens:
        own = token_text(text, shown.token)
        result.tokens.append(own)
        result.text_offset.append(shown.start)
        if shown.logprobs is None:
            result.token_logprobs.append(None)
            result.top_logprobs.append(None)
            continue
        value = max(shown.logprobs.logprob, FLOOR)
        result.token_logprobs.append(value)
        if num_top == 0:
            result.top_logprobs.append(None)
            continue
        tops: dict[str, float] = {}
        for token, logprob in shown.logprobs.top[:num_top]:
            # Best first: where two ids share a spelling the likelier stays.
            tops.setdefault(token_text(text, token), max(logprob, FLOOR))
        tops.setdefault(own, value)
        result.top_logprobs.append(tops)
    return result


def chat_logprobs(text: Text, tokens: Sequence[ShownToken], num_top: int) -> ChatLogprobs:
    """One object per token, with exactly the `num_top` likeliest."""
    content = []
    for shown in tokens:
        if shown.logprobs is None:
            continue
        tops = [_top(text, token, logprob) for token, logprob in shown.logprobs.top[:num_top]]
        own = _top(text, shown.token, shown.logprobs.logprob)
        content.append(
            ChatTokenLogprob(token=own.token, logprob=own.logprob, bytes=own.bytes, top_logprobs=tops),
        )
    return ChatLogprobs(content=content, refusal=None)


def _top(text: Text, token: int, logprob: float) -> TopLogprob:
    raw = text.token_bytes(token)
    return TopLogprob(token=token_text(text, token), logprob=max(logprob, FLOOR), bytes=list(raw))
