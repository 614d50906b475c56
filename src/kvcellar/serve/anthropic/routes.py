"""routes: the routes of Anthropic's API. The list of models is OpenAI's, with the fields of both. The
tokens of a prompt are counted without running it.
"""

from starlette.routing import Route

from kvcellar.engine.served_engine import ServedEngine
from kvcellar.serve.anthropic.dialogue import chat_of
from kvcellar.serve.anthropic.fields import PromptBody
from kvcellar.serve.anthropic.parse import chat_request, parse_messages
from kvcellar.serve.chat_request import Json
from kvcellar.serve.generation import GenerationHandler
from kvcellar.serve.model_route import ModelRoute
from kvcellar.serve.parsing import Fields, validated
from kvcellar.serve.prepare import prompt_tokens
from kvcellar.serve.shared import Shared
from kvcellar.serve.writer import Caller


def count_tokens(engine: ServedEngine, sent: Fields, caller: Caller) -> Json:
    """A body of `/v1/messages/count_tokens`. As many as the message itself is about to count, within the same bounds.
    Raises `ApiError`, `BadRequest`, and `PromptTooLong` for more than the context."""
    body = validated(PromptBody, sent)
    request = chat_request(body, chat_of(body), sampling={})
    return {"input_tokens": prompt_tokens(engine, request, caller.naming)}


def anthropic_routes(server: Shared) -> list[Route]:
    return [
        Route("/v1/messages", GenerationHandler(server, parse_messages), methods=["POST"]),
        Route("/v1/messages/count_tokens", ModelRoute(server, count_tokens), methods=["POST"]),
    ]
