"""routes: responses that were kept, as the Responses API has them."""

from starlette.requests import Request
from starlette.responses import Response

from kvcellar.serve.generation.namespaces import owner
from kvcellar.serve.http.api_errors import unsupported
from kvcellar.serve.http.json_text import to_json
from kvcellar.serve.http.sending import json_response
from kvcellar.serve.responses.input_items import page
from kvcellar.serve.responses.response_writer import DeletedResponse
from kvcellar.serve.responses.store import ResponseStore
from kvcellar.serve.shared import Shared


class KeptHandler:
    """Responses that were kept."""

    def __init__(self, server: Shared) -> None:
        settings = server.settings
        self._server = server
        self.store = ResponseStore(most_bytes_of_key=settings.responses_bytes, seconds=settings.responses_seconds)

    async def get(self, request: Request) -> Response:
        if request.query_params.get("stream", "false") != "false":
            raise unsupported("stream", "stream is not supported here; leave it out")
        kept = self.store.get(owner(request.scope), request.path_params["id"])
        return Response(kept.response, media_type="application/json")

    async def input_items(self, request: Request) -> Response:
        id, query = request.path_params["id"], request.query_params
        kept = self.store.get(owner(request.scope), id)

        def work() -> bytes:  # the input may be as long as a body
            return to_json(page(id, kept.input, query))

        return Response(await self._server.threads.run("files", work), media_type="application/json")

    async def delete(self, request: Request) -> Response:
        id = request.path_params["id"]
        self.store.delete(owner(request.scope), id)
        return json_response(DeletedResponse(id))
