"""app: the routes and what stands before them, as one ASGI application."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvcellar.serve.drain import Drain
from kvcellar.serve.failures import ApiError, api_error, to_json
from kvcellar.serve.guard import Guard
from kvcellar.serve.lanes import Lanes
from kvcellar.serve.openai import openai_routes
from kvcellar.serve.protocols import ServedEngine
from kvcellar.serve.settings import ServeSettings


def build_app(engine: ServedEngine, *, settings: ServeSettings, lanes: Lanes, drain: Drain | None = None) -> Starlette:
    """The application for `engine`. Requests are read on `lanes`, and `drain` ends them. All three stay the caller's:
    nothing is closed here."""
    drain = drain or Drain()

    async def health(request: Request) -> Response:
        if not engine.healthy:
            raise ApiError(503, "the engine has stopped; the server must be started again", code="engine_unhealthy")
        return Response(to_json({"status": "ok", "model": engine.model.name}), media_type="application/json")

    app = Starlette(
        routes=[Route("/health", health, methods=["GET"]), *openai_routes(engine, settings, lanes, drain)],
        middleware=[Middleware(Guard, settings=settings, drain=drain)],
        exception_handlers={HTTPException: _no_such_route},
    )
    app.router.redirect_slashes = False  # a redirect would be an answer without the API's shape
    return app


async def _no_such_route(request: Request, error: Exception) -> Response:
    return api_error(error).response()
