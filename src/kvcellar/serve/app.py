"""app: the ASGI application, made of the routes and the middleware."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response

from kvcellar.serve.admin import admin_routes
from kvcellar.serve.anthropic.routes import anthropic_routes
from kvcellar.serve.api_errors import api_error
from kvcellar.serve.conversations import conversation_routes
from kvcellar.serve.embeddings import embedding_routes
from kvcellar.serve.health import health_routes
from kvcellar.serve.metrics.exposition import metrics_routes
from kvcellar.serve.metrics.requests import RequestCounts
from kvcellar.serve.middleware import RequestMiddleware
from kvcellar.serve.ollama import ollama_routes
from kvcellar.serve.ollama_library import library_routes
from kvcellar.serve.openai.routes import openai_routes
from kvcellar.serve.openapi.routes import openapi_routes
from kvcellar.serve.records import Records
from kvcellar.serve.request_log import RequestLog
from kvcellar.serve.responses_api.routes import responses_routes
from kvcellar.serve.shared import Mount, Shared, nothing
from kvcellar.serve.tokenizing import tokenizing_routes


def build_app(shared: Shared, mount: Mount = nothing) -> Starlette:
    """The application for the models of a host, with what is mounted on it. The caller closes what is shared."""
    settings, mounted = shared.settings, mount(shared)
    records = Records() if settings.admin_digests else None
    requests = RequestCounts()

    def ended(request: RequestLog) -> None:
        requests.ended(request)
        if shared.traces is not None:
            shared.traces.ended(request)

    app = Starlette(
        routes=[
            *health_routes(shared),
            *metrics_routes(shared, requests),
            *openapi_routes(shared, mounted.operations),
            *openai_routes(shared),
            *responses_routes(shared),
            *anthropic_routes(shared),
            *embedding_routes(shared),
            *tokenizing_routes(shared),
            *conversation_routes(shared),
            *ollama_routes(shared),
            *library_routes(shared),
            *(admin_routes(shared, records) if records is not None else ()),
            *mounted.routes,
        ],
        middleware=[
            Middleware(
                RequestMiddleware,
                settings=settings,
                keys=shared.keys,
                drain=shared.drain,
                records=records,
                ended=ended,
                mounted=mounted,
                startup=shared.host.startup,
            )
        ],
        exception_handlers={HTTPException: _no_such_route},
    )
    app.router.redirect_slashes = False  # a redirect would be a response without the API's error format
    return app


async def _no_such_route(request: Request, error: Exception) -> Response:
    return api_error(error).response(request.url.path)
