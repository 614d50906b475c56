"""routes: /openapi.json, the document of all routes."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvcellar.serve.json_text import to_json
from kvcellar.serve.openapi.document import Operations, document
from kvcellar.serve.shared import Shared


def openapi_routes(server: Shared, mounted: Operations) -> list[Route]:
    return [Route("/openapi.json", DocumentHandler(server, mounted).get, methods=["GET"])]


class DocumentHandler:
    def __init__(self, server: Shared, mounted: Operations) -> None:
        self._threads, self._mounted = server.threads, mounted
        self._made: bytes | None = None  # by the first request

    async def get(self, request: Request) -> Response:
        if self._made is None:
            self._made = await self._threads.run("models", lambda: to_json(document(self._mounted)))
        return Response(self._made, media_type="application/json")
