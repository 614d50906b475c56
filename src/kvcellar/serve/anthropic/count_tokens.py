"""count_tokens: how many tokens a prompt has, without running it."""

from kvcellar.engine.served_engine import ServedEngine
from kvcellar.serve.anthropic.dialogue import chat_of
from kvcellar.serve.anthropic.fields import PromptBody
from kvcellar.serve.anthropic.parse import chat_request
from kvcellar.serve.chat_request import Json
from kvcellar.serve.parsing import Fields, validated
from kvcellar.serve.prepare import prompt_tokens
from kvcellar.serve.writer import Caller


def count_tokens(engine: ServedEngine, sent: Fields, caller: Caller) -> Json:
    """A body of `/v1/messages/count_tokens`. As many as the message itself is about to count, within the same bounds.
    Raises `ApiError`, `BadRequest`, and `PromptTooLong` for more than the context."""
    body = validated(PromptBody, sent)
    request = chat_request(body, chat_of(body), sampling={})
    return {"input_tokens": prompt_tokens(engine, request, caller.naming)}
