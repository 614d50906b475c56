"""admin_keys: the route of the operator that reads the key files of a server again, as SIGHUP does."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvcellar.errors import BadRequest
from kvcellar.serve.api_errors import ApiError
from kvcellar.serve.json_text import to_json
from kvcellar.serve.shared import Shared


def key_routes(server: Shared) -> list[Route]:
    return [Route("/admin/keys/reload", KeysHandler(server).reload, methods=["POST"])]


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
        return Response(to_json({"keys": keys.counts()}), media_type="application/json")
