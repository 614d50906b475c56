"""admin: routes for the operator of a server: the records of the last requests.

They exist only where the server has an admin key, which the middleware has checked before a request gets here.
"""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvcellar.serve.api_errors import ApiError
from kvcellar.serve.json_text import printable, to_json
from kvcellar.serve.protocols import ServedEngine
from kvcellar.serve.reader_threads import ReaderThreads
from kvcellar.serve.records import MOST, Records

LISTED = 20  # requests, unless `limit` is sent


def admin_routes(engine: ServedEngine, records: Records, threads: ReaderThreads) -> list[Route]:
    """The records belong to the middleware."""
    requests = RequestsHandler(engine, records)
    return [
        Route("/admin/requests", requests.list, methods=["GET"]),
        Route("/admin/requests/{id}", requests.get, methods=["GET"]),
    ]


class RequestsHandler:
    """What the last requests read from memory."""

    def __init__(self, engine: ServedEngine, records: Records) -> None:
        self._engine, self._records = engine, records

    async def list(self, request: Request) -> Response:
        most = whole(request, "limit", LISTED, MOST)
        return answer({"requests": [record.summary() for record in self._records.last(most)]})

    async def get(self, request: Request) -> Response:
        name = request.path_params["id"]
        if (record := self._records.find(name)) is None:
            message = f"no request {printable(name, 100)!r} is recorded; /admin/requests lists the last ones"
            raise ApiError(404, message, code="not_found")
        return answer(record.whole(self._engine))


def whole(request: Request, name: str, default: int, most: int) -> int:
    """A parameter of the query: a number from 1 to `most`. Raises `ApiError` 400."""
    text = request.query_params.get(name, str(default))
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= most):
        raise ApiError(400, f"{name} must be a whole number from 1 to {most}", name)
    return int(text)


def answer(value: object) -> Response:
    return Response(to_json(value), media_type="application/json")
