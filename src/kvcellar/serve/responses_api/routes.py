"""routes: the routes of the Responses API."""

from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvcellar.serve.api_errors import ApiError
from kvcellar.serve.generation import GenerationHandler
from kvcellar.serve.json_text import to_json
from kvcellar.serve.model_use import ModelRoute
from kvcellar.serve.namespaces import owner
from kvcellar.serve.responses_api.fields import count_input, parse_response
from kvcellar.serve.responses_api.input_items import page
from kvcellar.serve.responses_api.store import ResponseStore
from kvcellar.serve.shared import Shared

PATH = "/v1/responses"


def responses_routes(server: Shared) -> list[Route]:
    settings = server.settings
    store = ResponseStore(most_bytes_of_key=settings.responses_bytes, seconds=settings.responses_seconds)
    kept = KeptHandler(server, store)
    return [
        Route(PATH, GenerationHandler(server, partial(parse_response, store)), methods=["POST"]),
        Route(f"{PATH}/input_tokens", ModelRoute(server, partial(count_input, store)), methods=["POST"]),
        Route(f"{PATH}/{{id}}", kept.get, methods=["GET"]),
        Route(f"{PATH}/{{id}}", kept.delete, methods=["DELETE"]),
        Route(f"{PATH}/{{id}}/input_items", kept.input_items, methods=["GET"]),
    ]


class KeptHandler:
    """Responses that were kept."""

    def __init__(self, server: Shared, store: ResponseStore) -> None:
        self._server, self._store = server, store

    async def get(self, request: Request) -> Response:
        if request.query_params.get("stream", "false") != "false":
            raise ApiError(400, "stream is not supported here; leave it out", "stream", "unsupported_parameter")
        kept = self._store.get(owner(request.scope), request.path_params["id"])
        return Response(kept.response, media_type="application/json")

    async def input_items(self, request: Request) -> Response:
        id, query = request.path_params["id"], request.query_params
        kept = self._store.get(owner(request.scope), id)

        def work() -> bytes:  # the input may be as long as a body
            return to_json(page(id, kept.input, query))

        return Response(await self._server.threads.run("files", work), media_type="application/json")

    async def delete(self, request: Request) -> Response:
        id = request.path_params["id"]
        self._store.delete(owner(request.scope), id)
        return Response(to_json({"id": id, "object": "response", "deleted": True}), media_type="application/json")
