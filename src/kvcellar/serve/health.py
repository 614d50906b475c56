"""health: the routes for supervisors and load balancers. They need no key and tell nothing but the state of the server.

/live     200 while the process is alive and no engine that stays has failed, else 503: start it again
/ready    200 while requests are served; 503 while the models are loaded, with how far that is, an engine that has died
          is started again, or the server is shutting down: send requests elsewhere
/health   as llama.cpp's server has it: 503 while the models are loaded or an engine is started again, else as /live
/ping     as /live
"""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvcellar.serve.api_errors import HEALTH, ApiError, shutting_down
from kvcellar.serve.json_text import to_json
from kvcellar.serve.lifecycle import loading
from kvcellar.serve.shared import Shared

# paths that need no key and are served while the server shuts down
OPEN = frozenset({HEALTH, "/live", "/ready", "/ping"})


def health_routes(server: Shared) -> list[Route]:
    handler = HealthHandler(server)
    return [
        Route(HEALTH, handler.health, methods=["GET"]),
        Route("/live", handler.alive, methods=["GET"]),
        Route("/ready", handler.ready, methods=["GET"]),
        Route("/ping", handler.alive, methods=["GET", "POST"]),
    ]


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

    def _state(self, status: str) -> Response:
        if not self._host.healthy:
            raise ApiError(503, "the engine has stopped; the server must be started again", code="engine_unhealthy")
        named = {"model": self._host.find(None).name} if self._named and not self._host.startup.loading else {}
        return Response(to_json({"status": status, **named}), media_type="application/json")
