"""health: the routes for supervisors and load balancers. They need no key and tell nothing but the state of the server.

/live     200 while the process is alive and no engine that stays has failed, else 503: start it again
/ready    200 while requests are served; 503 while the models are loaded, with how far that is, an engine that has died
          is started again, or the server is shutting down: send requests elsewhere
/health   as llama.cpp's server has it: 503 while the models are loaded or an engine is started again, else as /live
/ping     as /live
"""

from typing import Literal

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from kvcellar.serve.answers import Answer
from kvcellar.serve.http.api_errors import HEALTH, ApiError, shutting_down
from kvcellar.serve.http.lifecycle import loading
from kvcellar.serve.http.sending import json_response
from kvcellar.serve.shared import Shared

# paths that need no key and are served while the server shuts down
OPEN = frozenset({HEALTH, "/live", "/ready", "/ping"})


class ServerState(Answer):
    status: Literal["ok", "ready"]
    model: str | UnsetType = UNSET  # where the server has no API keys


class HealthHandler:
    def __init__(self, server: Shared) -> None:
        self._host, self._drain = server.host, server.drain
        self._named = not server.settings.key_digests  # a name of a model is told to clients only

    async def alive(self, request: Request) -> Response:
        return self._state("ok")

    async def health(self, request: Request) -> Response:
        if self._host.startup.loading:
            raise loading("Loading model")
        self._refuse_starting()
        return self._state("ok")

    async def ready(self, request: Request) -> Response:
        if self._drain.started:
            raise shutting_down()
        self._host.startup.refuse(named=self._named)
        self._refuse_starting()
        return self._state("ready")

    def _refuse_starting(self) -> None:
        if self._host.starting:
            raise loading("the engine has died and is started again; requests wait for it")

    def _state(self, status: Literal["ok", "ready"]) -> Response:
        if not self._host.healthy:
            raise ApiError(503, "the engine has stopped; the server must be started again", code="engine_unhealthy")
        state = ServerState(status)
        if self._named and not self._host.startup.loading:
            state.model = self._host.find(None).name
        return json_response(state)
