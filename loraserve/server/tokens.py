"""`POST /tokenize` and `/detokenize`."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from loraserve.errors import InvalidRequest, PayloadTooLarge
from loraserve.server.caller import caller_of
from loraserve.server.fields import check_fields
from loraserve.server.intake import check_tokens
from loraserve.server.openai_chat import render_prompt
from loraserve.server.protocol import DetokenizeRequest, TokenizeRequest
from loraserve.server.responses import DetokenizeResponse, TokenizeResponse
from loraserve.server.state import ServerState
from loraserve.server.strict_body import StrictRoute

MAX_CHARS = 1 << 20
"""Longest text that is tokenized at once; texts of this length are also told that they do not fit a context."""

MAX_IDS = 1 << 17
"""Most ids that are turned into text at once, unless a context has more."""


def tokens_router(state: ServerState) -> APIRouter:
    """The routes; authorisation is the app's."""
    router = APIRouter(tags=["tokens"], route_class=StrictRoute)

    @router.post("/tokenize", response_model=TokenizeResponse, summary="Text or messages to token ids")
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        """The ids that the same prompt or messages would be generated from."""
        state.require_ready()
        check_fields(body, {})
        uses = state.uses_of(body.model, caller_of(request.scope))
        tokenizer = await state.text_for(uses)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("give exactly one of prompt and messages", param="prompt")
        if body.prompt is not None:
            for name in ("add_generation_prompt", "continue_final_message"):
                if getattr(body, name) is not None:
                    raise InvalidRequest(f"{name} belongs to messages", param=name)
            special = body.add_special_tokens is None or body.add_special_tokens
            _check_size(len(body.prompt), MAX_CHARS, "characters", "prompt")
            ids = (await state.encode(tokenizer, body.prompt, special=special)).ids
        else:
            if body.add_special_tokens:
                raise InvalidRequest("the chat template writes the special tokens", param="add_special_tokens")
            go_on = bool(body.continue_final_message)
            template = state.chats.template_of(uses)
            text = await render_prompt(state, body.messages or [], body.add_generation_prompt, go_on, template)
            _check_size(len(text), MAX_CHARS, "characters", "messages")
            ids = (await state.encode(tokenizer, text, special=False)).ids
        answer = TokenizeResponse(tokens=ids, count=len(ids), max_model_len=state.max_tokens)
        # Not returned as it is: FastAPI would check every id again.
        return Response(answer.model_dump_json(), media_type="application/json")

    @router.post("/detokenize", summary="Token ids to text")
    async def detokenize(body: DetokenizeRequest, request: Request) -> DetokenizeResponse:
        """The text of ids, special tokens included unless `skip_special_tokens`."""
        state.require_ready()
        check_fields(body, {})
        uses = state.uses_of(body.model, caller_of(request.scope))
        _check_size(len(body.tokens), max(MAX_IDS, state.max_tokens), "token ids", "tokens")
        ids = check_tokens(body.tokens, state.vocab_size_for(uses), "tokens")
        text = await state.decode(await state.text_for(uses), ids, skip_special=bool(body.skip_special_tokens))
        return DetokenizeResponse(prompt=text)

    return router


def _check_size(size: int, most: int, what: str, param: str) -> None:
    if size > most:
        raise PayloadTooLarge(f"{param} has {size} {what}; at most {most} are taken at once", param=param)
