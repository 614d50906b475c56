"""routes: /metrics, for Prometheus. It needs the key that the middleware asks for; see docs/howto/metrics.md."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvcellar.serve.key_ring import METRICS
from kvcellar.serve.metrics.exposition import SERVER, Scrape, page
from kvcellar.serve.metrics.requests import RequestCounts
from kvcellar.serve.metrics.vllm import Aliases
from kvcellar.serve.shared import Shared


def metrics_routes(server: Shared, requests: RequestCounts) -> list[Route]:
    """`requests` belong to the middleware."""
    return [Route(METRICS, MetricsHandler(server, requests).scrape, methods=["GET"])]


class MetricsHandler:
    def __init__(self, server: Shared, requests: RequestCounts) -> None:
        self._server, self._requests = server, requests

    async def scrape(self, request: Request) -> Response:
        requests, accept = self._requests.copy(), request.headers.get("accept", "")

        def work() -> tuple[bytes, str]:
            found = Scrape(self._server.engines.read(), requests, self._state())
            aliases = [Aliases(found)] if self._server.settings.metrics_compat == "vllm" else []
            return page(found, accept, aliases)

        body, content_type = await self._server.threads.run("files", work)
        return Response(body, media_type=content_type)

    def _state(self) -> dict[str, float]:
        host = self._server.host
        values = len(host.residents.members()), host.residents.bytes, host.limits.max_bytes
        return dict(zip(SERVER, map(float, values), strict=True))
