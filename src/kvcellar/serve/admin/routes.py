"""routes: routes for the operator of a server: the records of the last requests, the cache (see `admin_cache`),
and reading its key files again, as SIGHUP does.

They exist only where the server has an admin key, which the middleware has checked before a request gets here.
"""

from contextlib import nullcontext

from starlette.requests import Request
from starlette.responses import Response

from kvcellar.errors import BadRequest
from kvcellar.serve.admin.cache import whole
from kvcellar.serve.answers import Answer
from kvcellar.serve.generation.records import MOST, Records, RequestSummaries
from kvcellar.serve.http.api_errors import ApiError
from kvcellar.serve.http.json_text import printable
from kvcellar.serve.http.sending import json_response
from kvcellar.serve.shared import Shared


class KeyCounts(Answer):
    api: int
    admin: int
    metrics: int


class ReloadedKeys(Answer):
    keys: KeyCounts


class KeysHandler:
    def __init__(self, server: Shared) -> None:
        self._keys, self._threads = server.keys, server.threads

    async def reload(self, request: Request) -> Response:
        """The number of keys of each kind. Running requests go on, also those of keys that are gone."""
        try:
            keys = await self._threads.run("admin", self._keys.reload)
        except BadRequest as error:  # the message may name files of the server
            message = "the keys were not changed; the log of the server has the reason"
            raise ApiError(409, message, code="keys_not_changed") from error
        return json_response(ReloadedKeys(KeyCounts(**keys.counts())))


LISTED = 20  # requests, unless `limit` is sent


class RequestsHandler:
    """What the last requests read from memory."""

    def __init__(self, server: Shared, records: Records) -> None:
        """The records belong to the middleware."""
        self._host, self._records = server.host, records

    async def list(self, request: Request) -> Response:
        most = whole(request, "limit", LISTED, MOST)
        return json_response(RequestSummaries([record.summary() for record in self._records.last(most)]))

    async def get(self, request: Request) -> Response:
        name = request.path_params["id"]
        if (record := self._records.find(name)) is None:
            message = f"no request {printable(name, 100)!r} is recorded; /admin/requests lists the last ones"
            raise ApiError(404, message, code="not_found")
        spec = record.log.spec
        with (spec and self._host.take(spec)) or nullcontext() as lease:
            return json_response(record.whole(lease and lease.engine))
