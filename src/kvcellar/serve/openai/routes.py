"""routes: the routes of OpenAI's API."""

from starlette.routing import Route

from kvcellar.serve.generation import GenerationHandler
from kvcellar.serve.models_list import ModelsHandler
from kvcellar.serve.openai.chat import parse_chat
from kvcellar.serve.openai.completions import parse_completion
from kvcellar.serve.shared import Shared


def openai_routes(server: Shared) -> list[Route]:
    models = ModelsHandler(server)
    return [
        Route("/v1/models", models.list, methods=["GET"]),
        Route("/v1/models/{name:path}", models.get, methods=["GET"]),
        Route("/v1/completions", GenerationHandler(server, parse_completion), methods=["POST"]),
        Route("/v1/chat/completions", GenerationHandler(server, parse_chat), methods=["POST"]),
    ]
