"""vllm: the same numbers under the names that dashboards for vLLM read, for `metrics_compat`.

Only what means the same here: a name whose meaning differs would make a dashboard lie. docs/howto/metrics.md says which
names are missing, and why.
"""

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from kvcellar.serve.metrics.engines import Totals
from kvcellar.serve.metrics.exposition import MODEL, Scrape, histogram
from kvcellar.serve.metrics.requests import ModelRequests

HISTOGRAMS: Mapping[str, str] = {  # name: attribute of `ModelRequests`
    "vllm:e2e_request_latency_seconds": "seconds",
    "vllm:time_to_first_token_seconds": "first_token",
    "vllm:inter_token_latency_seconds": "gaps",
    "vllm:request_time_per_output_token_seconds": "per_token",
    "vllm:request_queue_time_seconds": "queued",
    "vllm:request_prefill_time_seconds": "prefill",
    "vllm:request_decode_time_seconds": "decode",
    "vllm:request_prompt_tokens": "prompt_tokens",
    "vllm:request_generation_tokens": "generation_tokens",
}
TOTALS: Mapping[str, str] = {
    "vllm:prompt_tokens": "prompt",
    "vllm:prompt_tokens_cached": "cached",
    "vllm:generation_tokens": "generated",
}
GAUGES: Mapping[str, str] = {  # name: ours
    "vllm:num_requests_running": "kvcellar_completions_running",
    "vllm:num_requests_waiting": "kvcellar_completions_waiting",
}
COUNTERS: Mapping[str, str] = {
    "vllm:prefix_cache_queries": "kvcellar_asked_tokens",
    "vllm:prefix_cache_hits": "kvcellar_restored_tokens",
    "vllm:num_preemptions": "kvcellar_preemptions",
    "vllm:spec_decode_num_draft_tokens": "kvcellar_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "kvcellar_accepted_tokens",
}
USAGE = "vllm:kv_cache_usage_perc"
SUCCESS = "vllm:request_success"
REASONS = ("stop", "length")  # a completion that was cancelled is no success
ABOUT = "The same as {} of kvcellar."


class Aliases(Collector):
    def __init__(self, scrape: Scrape) -> None:
        self._scrape = scrape

    def collect(self) -> Iterator[Family]:
        engines, requests = self._scrape.engines, self._scrape.requests
        for kind, names in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for name, ours in names.items():
                family = kind(name, ABOUT.format(ours), labels=[MODEL])
                for model, values in engines.values.items():
                    if (ours, ()) in values:
                        family.add_metric([model], values[ours, ()])
                yield family
        yield _usage(engines)
        yield from _requests({model: one for model, one in requests.items() if any(one.seconds.counts)})


def _usage(engines: Totals) -> Family:
    """The fullest group decides when a request has to wait. Cells of the prefix cache alone are free, as in vLLM."""
    family = GaugeMetricFamily(USAGE, "Used part of the cells of the fullest group, from 0 to 1.", labels=[MODEL])
    for model, values in engines.values.items():
        cells = {labels: value for (name, labels), value in values.items() if name == "kvcellar_cells" and value}
        used = [values.get(("kvcellar_cells_used", labels), 0.0) / value for labels, value in cells.items()]
        if used:
            family.add_metric([model], max(used))
    return family


def _requests(requests: Mapping[str, ModelRequests]) -> Iterator[Family]:
    success = CounterMetricFamily(SUCCESS, "Completions that have ended.", labels=[MODEL, "finished_reason"])
    for model, one in requests.items():
        for reason in REASONS:
            success.add_metric([model, reason], one.finished[reason])
    yield success
    for name, attribute in TOTALS.items():
        family = CounterMetricFamily(name, "Tokens of requests that have ended.", labels=[MODEL])
        for model, one in requests.items():
            family.add_metric([model], getattr(one, attribute))
        yield family
    for name, attribute in HISTOGRAMS.items():
        text = f"The same as {attribute.replace('_', ' ')} of kvcellar."
        yield histogram(name, text, {model: getattr(one, attribute) for model, one in requests.items()})
