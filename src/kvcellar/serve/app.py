"""app: the ASGI application, made of the routes and the middleware."""

from http import HTTPStatus
from typing import Any, cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match

from kvcellar.serve.generation.records import Records
from kvcellar.serve.http.api_errors import api_error
from kvcellar.serve.http.middleware import RequestMiddleware
from kvcellar.serve.http.request_log import RequestLog
from kvcellar.serve.metrics.requests import RequestCounts
from kvcellar.serve.routes import TABLE, Handlers, routes
from kvcellar.serve.shared import Mount, Shared, nothing


def build_app(shared: Shared, mount: Mount = nothing) -> Starlette:
    """The application for the models of a host, with what is mounted on it. The caller closes what is shared."""
    settings, mounted = shared.settings, mount(shared)
    records, requests = Records(), RequestCounts()
    handlers = Handlers(shared, requests, records, {**TABLE, **mounted.operations})

    def ended(request: RequestLog) -> None:
        requests.ended(request)
        if shared.traces is not None:
            shared.traces.ended(request)

    app = Starlette(
        routes=[*routes(handlers, operated=bool(settings.admin_digests)), *mounted.routes],
        middleware=[
            Middleware(
                RequestMiddleware,
                server=shared,
                records=records if settings.admin_digests else None,
                ended=ended,
                mounted=mounted,
            )
        ],
        exception_handlers={HTTPException: cast(Any, _no_such_route)},
    )
    app.router.redirect_slashes = False  # a redirect would be a response without the API's error format
    return app


async def _no_such_route(request: Request, error: HTTPException) -> Response:
    """Starlette names the methods of the first route with the path; others may have it, too."""
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        routes = [one for one in request.app.routes if one.matches(request.scope)[0] is not Match.NONE]
        error.headers = {"Allow": ", ".join(sorted({method for one in routes for method in one.methods}))}
    return api_error(error).response(request.url.path)
