"""traces: one OpenTelemetry span for each request that generates, with the conventions of `gen_ai.*`.

A span is made when its request has ended, with the times that the request had. It has no text of prompts or
completions. `traceparent` of the client is its parent.

The package is an extra (`kvcellar[otel]`) and is imported only where traces are wanted.
"""

import logging
import threading
import time
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvcellar.errors import BadRequest, extra_missing
from kvcellar.serve.http.request_log import RequestLog
from kvcellar.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

log = logging.getLogger("kvcellar.serve")

ENDPOINTS = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
DISABLED = "OTEL_SDK_DISABLED"
NEEDED = "opentelemetry.trace", "opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter"
FLUSH_SECONDS = 2.0  # for spans that are left when the server ends
OPERATIONS: Mapping[str, str] = {  # by path; other requests have no span
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/embeddings": "embeddings",
    "/api/chat": "chat",
    "/api/generate": "text_completion",
    "/api/embed": "embeddings",
}


def wanted(asked: bool | None, environment: Mapping[str, str]) -> bool:
    """Whether spans are made: as asked, or else if the environment says where to send them."""
    if environment.get(DISABLED, "").lower() == "true":
        return False
    return any(environment.get(name) for name in ENDPOINTS) if asked is None else asked


def open_traces() -> "Traces":
    """Spans are sent where the environment says, in batches, on a thread of their own. Raises `BadRequest` without the
    extra."""
    try:
        for name in NEEDED:
            import_module(name)
    except ImportError as error:
        raise BadRequest(extra_missing("tracing", "otel", error), "traces") from error
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create()  # with what the environment says, such as OTEL_SERVICE_NAME
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "kvcellar"}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Traces(provider)


class Traces:
    """Makes spans with a provider. Close it after the last request."""

    def __init__(self, provider: "TracerProvider") -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider, self._propagator = provider, TraceContextTextMapPropagator()
        self._tracer = provider.get_tracer("kvcellar", __version__)

    def ended(self, request: RequestLog) -> None:
        """A request has ended."""
        if (operation := OPERATIONS.get(request.route)) is None:
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode

        now = time.time_ns()
        span = self._tracer.start_span(
            f"{operation} {request.model}" if request.model is not None else operation,
            context=self._propagator.extract(dict(request.trace)),
            kind=SpanKind.SERVER,
            start_time=now - int(1e6 * request.ms()),
            attributes={name: value for name, value in attributes(request, operation).items() if value is not None},
        )
        if request.result != "ok":
            span.set_attribute("error.type", request.result)
            span.set_status(Status(StatusCode.ERROR))
        span.end(now)

    def close(self) -> None:
        """Send what is left, for at most `FLUSH_SECONDS`: a collector that is down does not delay the end."""
        closing = threading.Thread(target=self._provider.shutdown, name="kvcellar-traces", daemon=True)
        closing.start()
        closing.join(FLUSH_SECONDS)
        if closing.is_alive():
            log.warning("spans of the last requests were not sent: the collector has not answered in time")


def attributes(request: RequestLog, operation: str) -> dict[str, Any]:
    """Of the span of a request; None: it has no such attribute."""
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "kvcellar",
        "gen_ai.request.model": request.model,
        "gen_ai.response.model": request.model,
        "gen_ai.response.id": request.response_id,
        "gen_ai.response.finish_reasons": sorted(request.finished.elements()) or None,
        "gen_ai.conversation.id": request.conversation,
        "http.request.method": request.method,
        "http.response.status_code": request.status or None,
        "url.path": request.route,
        "kvcellar.request_id": request.request_id,
        **_sampling(request),
        **_usage(request),
    }


def _sampling(request: RequestLog) -> dict[str, Any]:
    if (params := request.params) is None:
        return {}
    return {
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": float(params.top_k) if params.top_k else None,
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.choice.count": params.n if params.n != 1 else None,
        "gen_ai.request.stream": request.stream,
    }


def _usage(request: RequestLog) -> dict[str, Any]:
    """Without stop sequences: they are text that the client wrote."""
    done = list(request.done.values())
    if not done:
        return {}
    recalls = [one.recall for one in done if one.recall is not None]
    return {
        "gen_ai.usage.input_tokens": sum(one.usage.prompt_tokens for one in done),
        "gen_ai.usage.output_tokens": request.generated,
        "gen_ai.usage.cache_read.input_tokens": sum(one.usage.cached_tokens for one in done),
        "gen_ai.response.time_to_first_chunk": min(one.timings.first_token for one in done),
        "kvcellar.queue_seconds": max(one.timings.queued for one in done),
        "kvcellar.matched_tokens": sum(one.matched for one in recalls) if recalls else None,
        "kvcellar.restored_tokens": sum(one.restored for one in recalls) if recalls else None,
        "kvcellar.recall": request.recall,
    }
