"""count_tokens: how many tokens a prompt has, without running it."""

from kvcellar.serve.anthropic.dialogue import chat_of
from kvcellar.serve.anthropic.fields import PromptBody
from kvcellar.serve.anthropic.parse import chat_request
from kvcellar.serve.chat_request import Json
from kvcellar.serve.field_names import naming_fields
from kvcellar.serve.parsing import Fields, validated
from kvcellar.serve.prepare import renderer
from kvcellar.serve.protocols import ServedEngine
from kvcellar.serve.writer import Caller
from kvcellar.text.replies.tools import checked


def count_tokens(engine: ServedEngine, sent: Fields, caller: Caller) -> Json:
    """A body of `/v1/messages/count_tokens`. As many as the message itself is about to count, within the same bounds.
    Raises `ApiError`, `BadRequest`, and `PromptTooLong` for more than the context."""
    body = validated(PromptBody, sent)
    request = chat_request(body, chat_of(body), sampling={})
    namespace = caller.naming(request.salt, request.users)  # its replies have the tokens that they were generated with
    with naming_fields(request.names):
        checked(request.tools)
        prompt = renderer(engine, request, namespace)(request.messages, limit=engine.model.context)
    return {"input_tokens": len(prompt)}
