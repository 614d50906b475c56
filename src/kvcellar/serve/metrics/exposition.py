"""exposition: /metrics, in the text formats of Prometheus and of OpenMetrics: see docs/howto/metrics.md.

One registry for each scrape of one server, never the global one of the library.
"""

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from kvcellar.engine.stats import EngineStats, Metric, declared, samples
from kvcellar.serve.metrics.engines import Key, Totals
from kvcellar.serve.metrics.requests import ModelRequests, RequestCounts
from kvcellar.serve.shared import Shared
from kvcellar.version import __version__

MODEL = "model_name"
SERVER = (
    Metric("gauge", "kvcellar_models_loaded", "models that are loaded"),
    Metric("gauge", "kvcellar_memory_bytes", "bytes of all models that are loaded or being loaded, with their caches"),
    Metric(
        "gauge",
        "kvcellar_memory_limit_bytes",
        "cap on these; 0 for a server of one model that the caller has made",
    ),
)
STALE = Metric(
    "gauge", "kvcellar_stats_stale", "1 if an engine has failed, or is at work and has told no numbers for a second"
)
# The same numbers under the names that dashboards for vLLM read, for `metrics_compat`: only what means the same here,
# as a dashboard would lie else. docs/howto/metrics.md says which names are missing, and why.
VLLM: Mapping[str, str] = {
    "vllm:num_requests_running": "kvcellar_completions_running",
    "vllm:num_requests_waiting": "kvcellar_completions_waiting",
    "vllm:prefix_cache_queries": "kvcellar_asked_tokens",
    "vllm:prefix_cache_hits": "kvcellar_restored_tokens",
    "vllm:num_preemptions": "kvcellar_preemptions",
    "vllm:spec_decode_num_draft_tokens": "kvcellar_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "kvcellar_accepted_tokens",
    "vllm:prompt_tokens": "kvcellar_prompt_tokens",
    "vllm:prompt_tokens_cached": "kvcellar_cached_tokens",
    "vllm:generation_tokens": "kvcellar_generated_tokens",
    "vllm:e2e_request_latency_seconds": "kvcellar_request_seconds",
    "vllm:time_to_first_token_seconds": "kvcellar_time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds": "kvcellar_inter_token_seconds",
    "vllm:request_time_per_output_token_seconds": "kvcellar_time_per_output_token_seconds",
    "vllm:request_queue_time_seconds": "kvcellar_queue_seconds",
    "vllm:request_prefill_time_seconds": "kvcellar_prefill_seconds",
    "vllm:request_decode_time_seconds": "kvcellar_decode_seconds",
    "vllm:request_prompt_tokens": "kvcellar_request_prompt_tokens",
    "vllm:request_generation_tokens": "kvcellar_request_generation_tokens",
}
SUCCESS = ("stop", "length")  # a completion that was cancelled is no success
FAMILIES = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily, "histogram": HistogramMetricFamily}


@dataclass(frozen=True, slots=True, eq=False)
class Scrape(Collector):
    """What a scrape shows. `server` has the values of `SERVER`. With `vllm`, also under that server's names."""

    engines: Totals
    requests: Mapping[str, ModelRequests]  # by model
    server: tuple[float, ...]
    vllm: bool

    def collect(self) -> Iterator[Family]:
        yield InfoMetricFamily("kvcellar_build", "The version of the server.", {"version": __version__})
        for metric, value in zip(SERVER, self.server, strict=True):
            yield GaugeMetricFamily(metric.name, metric.help, value)
        values = self.values()
        every = {metric.name: (metric, labels) for metric, labels in all_metrics()}
        for name in every:
            yield _family(*every[name], values)
        if self.vllm:
            yield from (_family(*every[ours], values, name) for name, ours in VLLM.items())
            yield from _only_vllm(values)

    def values(self) -> dict[str, dict[Key, Any]]:
        """Of all metrics but those of the server, by model. A model that has run no request has no numbers of tokens
        and times."""
        found: defaultdict[str, dict[Key, Any]] = defaultdict(dict)
        for model, stale in self.engines.stale.items():
            found[model][STALE.name, ()] = float(stale)
        for model, values in self.engines.values.items():
            found[model].update(values)
        for model, requests in self.requests.items():
            ran = any(requests.seconds.counts)
            for metric, labels, value in samples(requests):
                if labels or ran:
                    found[model][metric.name, labels] = value
        return found


def page(scrape: Scrape, accept: str) -> tuple[bytes, str]:
    """The page in the format that `accept` wants, and its content type."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(scrape)
    if _wants_openmetrics(accept):
        text = openmetrics.generate_latest(registry, escaping=openmetrics.ALLOWUTF8, version="1.0.0")
        return text, "application/openmetrics-text; version=1.0.0; charset=utf-8"
    return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4


def _wants_openmetrics(accept: str) -> bool:
    """Not by the library's `choose_encoder`: that raises for a version which is no number, and writes vLLM's names with
    an underscore in samples but with a colon in their descriptions unless the client asks for UTF-8."""
    parts = [part.replace(" ", "").lower().split(";") for part in accept.split(",")]
    return any(kind == "application/openmetrics-text" and "q=0" not in options for kind, *options in parts)


def all_metrics() -> Iterator[tuple[Metric, tuple[str, ...]]]:
    """Of models, with the names of their labels."""
    yield STALE, ()
    yield from declared(EngineStats)
    yield from declared(ModelRequests)


def _family(
    metric: Metric, labels: tuple[str, ...], values: Mapping[str, Mapping[Key, Any]], name: str | None = None
) -> Family:
    text = metric.help if name is None else f"The same as {metric.name}."
    family: Any = FAMILIES[metric.kind](name or metric.name, text, labels=[MODEL, *labels])
    for model, found in values.items():
        for (of, where), value in found.items():
            if of == metric.name:
                shown = (value.cumulative(), value.total) if metric.kind == "histogram" else (value,)
                family.add_metric([model, *where], *shown)
    return family


def _only_vllm(values: Mapping[str, Mapping[Key, Any]]) -> Iterator[Family]:
    """The fullest group decides when a request has to wait. Cells of the prefix cache alone are free, as in vLLM."""
    text = "Used part of the cells of the fullest group, from 0 to 1."
    usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", text, labels=[MODEL])
    success = CounterMetricFamily(
        "vllm:request_success", "Completions that have ended.", labels=[MODEL, "finished_reason"]
    )
    for model, found in values.items():
        cells = {labels: value for (name, labels), value in found.items() if name == "kvcellar_cells" and value}
        if cells:
            usage.add_metric(
                [model], max(found["kvcellar_cells_used", labels] / value for labels, value in cells.items())
            )
        if ("kvcellar_request_seconds", ()) in found:
            for reason in SUCCESS:
                success.add_metric([model, reason], found.get(("kvcellar_completions_finished", (reason,)), 0))
    yield usage
    yield success


def metrics_handler(server: Shared, requests: RequestCounts) -> Callable[[Request], Awaitable[Response]]:
    """`requests` belong to the middleware, which also asks for the key."""
    host = server.host

    async def scrape(request: Request) -> Response:
        counts, accept = requests.copy(), request.headers.get("accept", "")

        def work() -> tuple[bytes, str]:
            values = tuple(map(float, (len(host.models()), host.bytes, host.limits.max_bytes)))
            vllm = server.settings.metrics_compat == "vllm"
            return page(Scrape(server.engines.read(), counts, values, vllm), accept)

        body, content_type = await server.threads.run("files", work)
        return Response(body, media_type=content_type)

    return scrape
