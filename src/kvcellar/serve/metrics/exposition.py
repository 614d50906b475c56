"""exposition: the page of a scrape, in the text formats of Prometheus and of OpenMetrics.

One registry for each scrape of one server, never the global one of the library.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from kvcellar.serve.buckets import Buckets
from kvcellar.serve.metrics.engines import Totals
from kvcellar.serve.metrics.requests import ModelRequests
from kvcellar.serve.metrics.samples import COUNTERS, GAUGES, Metric
from kvcellar.version import __version__

MODEL = "model_name"
HISTOGRAMS: Mapping[str, tuple[str, str]] = {  # name: attribute of `ModelRequests`, meaning
    "kvcellar_request_seconds": ("seconds", "Seconds from a request to the end of its response."),
    "kvcellar_queue_seconds": ("queued", "Seconds from submission to admission, of each prompt."),
    "kvcellar_time_to_first_token_seconds": ("first_token", "Seconds from submission to the first token."),
    "kvcellar_prefill_seconds": ("prefill", "Seconds from admission to the first token."),
    "kvcellar_decode_seconds": ("decode", "Seconds from the first token to the last."),
    "kvcellar_time_per_output_token_seconds": (
        "per_token",
        "Mean seconds for a token after the first, of each prompt.",
    ),
    "kvcellar_inter_token_seconds": ("gaps", "Seconds between two deliveries of tokens of one completion."),
    "kvcellar_request_prompt_tokens": ("prompt_tokens", "Tokens of a prompt."),
    "kvcellar_request_cached_tokens": ("cached_tokens", "Tokens of a prompt that came from memory."),
    "kvcellar_request_generation_tokens": ("generation_tokens", "Tokens generated for a prompt."),
}
TOTALS: Mapping[str, tuple[str, str]] = {
    "kvcellar_prompt_tokens": ("prompt", "Tokens of prompts of requests that have ended."),
    "kvcellar_cached_tokens": ("cached", "Of these, tokens that came from memory."),
    "kvcellar_generated_tokens": ("generated", "Tokens generated for requests that have ended."),
}
OUTCOMES = "kvcellar_requests", "Requests by outcome: ok, the code of an error, or client_gone."
FINISHED = "kvcellar_completions_finished", "Completions that have ended, by reason."
STALE = "kvcellar_stats_stale", "1 if an engine has failed, or is at work and has told no numbers for a second."
SERVER: Mapping[str, str] = {
    "kvcellar_models_loaded": "Models that are loaded.",
    "kvcellar_memory_bytes": "Bytes of all models that are loaded or being loaded, with their caches.",
    "kvcellar_memory_limit_bytes": "Cap on these; 0 for a server of one model that the caller has made.",
}


@dataclass(frozen=True, slots=True)
class Scrape:
    """What a scrape shows. `server` has the values of `SERVER`."""

    engines: Totals
    requests: Mapping[str, ModelRequests]  # by model
    server: Mapping[str, float]


def page(scrape: Scrape, accept: str, more: "Sequence[Collector]" = ()) -> tuple[bytes, str]:
    """The page in the format that `accept` wants, and its content type."""
    registry = CollectorRegistry(auto_describe=False)
    for collector in (_Collected(scrape), *more):
        registry.register(collector)
    if _wants_openmetrics(accept):
        text = openmetrics.generate_latest(registry, escaping=openmetrics.ALLOWUTF8, version="1.0.0")
        return text, "application/openmetrics-text; version=1.0.0; charset=utf-8"
    return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4


def _wants_openmetrics(accept: str) -> bool:
    """Not by the library's `choose_encoder`: that raises for a version which is no number, and writes vLLM's names with
    an underscore in samples but with a colon in their descriptions unless the client asks for UTF-8."""
    parts = [part.replace(" ", "").lower().split(";") for part in accept.split(",")]
    return any(kind == "application/openmetrics-text" and "q=0" not in options for kind, *options in parts)


class _Collected(Collector):
    def __init__(self, scrape: Scrape) -> None:
        self._scrape = scrape

    def collect(self) -> Iterator[Family]:
        scrape = self._scrape
        yield InfoMetricFamily("kvcellar_build", "The version of the server.", {"version": __version__})
        for name, text in SERVER.items():
            yield GaugeMetricFamily(name, text, scrape.server[name])
        stale = GaugeMetricFamily(*STALE, labels=[MODEL])
        for model, one in scrape.engines.stale.items():
            stale.add_metric([model], float(one))
        yield stale
        yield from map(partial(_engine_family, scrape.engines, GaugeMetricFamily), GAUGES)
        yield from map(partial(_engine_family, scrape.engines, CounterMetricFamily), COUNTERS)
        yield from _request_families(scrape.requests)


def _engine_family(
    engines: Totals, kind: type[GaugeMetricFamily] | type[CounterMetricFamily], metric: Metric
) -> Family:
    family = kind(metric.name, metric.text, labels=[MODEL, *metric.labels])
    for model, values in engines.values.items():
        for (name, labels), value in values.items():
            if name == metric.name:
                family.add_metric([model, *labels], value)
    return family


def _request_families(requests: Mapping[str, ModelRequests]) -> Iterator[Family]:
    outcomes = CounterMetricFamily(*OUTCOMES, labels=[MODEL, "outcome"])
    finished = CounterMetricFamily(*FINISHED, labels=[MODEL, "reason"])
    for model, one in requests.items():
        for outcome, count in one.outcomes.items():
            outcomes.add_metric([model, outcome], count)
        for reason, count in one.finished.items():
            finished.add_metric([model, reason], count)
    yield outcomes
    yield finished
    ran = {model: one for model, one in requests.items() if any(one.seconds.counts)}
    for name, (attribute, text) in TOTALS.items():
        family = CounterMetricFamily(name, text, labels=[MODEL])
        for model, one in ran.items():
            family.add_metric([model], getattr(one, attribute))
        yield family
    for name, (attribute, text) in HISTOGRAMS.items():
        yield histogram(name, text, {model: getattr(one, attribute) for model, one in ran.items()})


def histogram(name: str, text: str, values: Mapping[str, Buckets]) -> Family:
    """A histogram of each model."""
    family = HistogramMetricFamily(name, text, labels=[MODEL])
    for model, buckets in values.items():
        family.add_metric([model], buckets.cumulative(), buckets.total)
    return family
