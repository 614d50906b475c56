"""routes: the routes of Anthropic's API. The list of models is OpenAI's, with the fields of both."""

from starlette.routing import Route

from kvcellar.serve.anthropic.count_tokens import count_tokens
from kvcellar.serve.anthropic.parse import parse_messages
from kvcellar.serve.generation import GenerationHandler
from kvcellar.serve.model_route import ModelRoute
from kvcellar.serve.shared import Shared


def anthropic_routes(server: Shared) -> list[Route]:
    return [
        Route("/v1/messages", GenerationHandler(server, parse_messages), methods=["POST"]),
        Route("/v1/messages/count_tokens", ModelRoute(server, count_tokens), methods=["POST"]),
    ]
