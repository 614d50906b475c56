"""requests: what is counted when a request has ended, for each model.

Always true:
  * used on the event loop only; a scrape gets a copy;
  * a model is named as the library or the command line names it, never as a client wrote it: a request that has found
    no model counts for the name "".
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import field, fields
from functools import partial
from typing import Any

from kvcellar.engine.stats import Metric, statistics
from kvcellar.events import Done
from kvcellar.serve.http.request_log import SECONDS, TOKENS, Buckets, RequestLog


def _counts(name: str, text: str, label: str) -> Any:
    return field(default_factory=Counter[str], metadata={"metric": Metric("counter", name, text, label)})


def _total(name: str, text: str) -> Any:
    return field(default=0, metadata={"metric": Metric("counter", name, text)})


def _histogram(name: str, text: str, bounds: Sequence[float] = SECONDS) -> Any:
    return field(default_factory=partial(Buckets, bounds), metadata={"metric": Metric("histogram", name, text)})


@statistics(frozen=False)
class ModelRequests:
    """Requests of one model, as metrics. The histograms of a prompt are of those that have ended with `Done`."""

    outcomes: Counter[str] = _counts(
        "kvcellar_requests", "requests by outcome: ok, the code of an error, or client_gone", "outcome"
    )
    finished: Counter[str] = _counts("kvcellar_completions_finished", "completions that have ended", "reason")
    prompt: int = _total("kvcellar_prompt_tokens", "tokens of prompts of requests that have ended")
    cached: int = _total("kvcellar_cached_tokens", "of these, tokens that came from memory")
    generated: int = _total("kvcellar_generated_tokens", "tokens generated for requests that have ended")
    seconds: Buckets = _histogram("kvcellar_request_seconds", "seconds from a request to the end of its response")
    queued: Buckets = _histogram("kvcellar_queue_seconds", "seconds from submission to admission, of each prompt")
    first_token: Buckets = _histogram(
        "kvcellar_time_to_first_token_seconds", "seconds from submission to the first token"
    )
    prefill: Buckets = _histogram("kvcellar_prefill_seconds", "seconds from admission to the first token")
    decode: Buckets = _histogram("kvcellar_decode_seconds", "seconds from the first token to the last")
    per_token: Buckets = _histogram(
        "kvcellar_time_per_output_token_seconds", "mean seconds for a token after the first, of each prompt"
    )
    gaps: Buckets = _histogram(
        "kvcellar_inter_token_seconds", "seconds between two deliveries of tokens of one completion"
    )
    prompt_tokens: Buckets = _histogram("kvcellar_request_prompt_tokens", "tokens of a prompt", TOKENS)
    cached_tokens: Buckets = _histogram(
        "kvcellar_request_cached_tokens", "tokens of a prompt that came from memory", TOKENS
    )
    generation_tokens: Buckets = _histogram(
        "kvcellar_request_generation_tokens", "tokens generated for a prompt", TOKENS
    )

    def count(self, log: RequestLog) -> None:
        """A request has ended."""
        self.outcomes[log.result] += 1
        if not log.prompts:
            return
        self.seconds.add(log.ms() / 1e3)
        self.generated += log.generated
        self.finished.update(log.finished)
        if log.gaps is not None:
            self.gaps.merge(log.gaps)
        for done in log.done.values():
            self._count_prompt(done)

    def _count_prompt(self, done: Done) -> None:
        usage, timings = done.usage, done.timings
        self.prompt += usage.prompt_tokens
        self.cached += usage.cached_tokens
        self.prompt_tokens.add(usage.prompt_tokens)
        self.cached_tokens.add(usage.cached_tokens)
        self.generation_tokens.add(usage.completion_tokens)
        self.queued.add(timings.queued)
        if usage.completion_tokens:
            self.first_token.add(timings.first_token)
            self.prefill.add(max(0.0, timings.first_token - timings.queued))
            self.decode.add(timings.decoding)
        if usage.completion_tokens > 1:
            self.per_token.add(timings.decoding / (usage.completion_tokens - 1))

    def __copy__(self) -> "ModelRequests":
        return ModelRequests(**{one.name: copy(getattr(self, one.name)) for one in fields(self)})


class RequestCounts:
    """All requests that have reached the application."""

    def __init__(self) -> None:
        self._models: dict[str, ModelRequests] = {}

    def ended(self, log: RequestLog) -> None:
        self._models.setdefault(log.model or "", ModelRequests()).count(log)

    def copy(self) -> Mapping[str, ModelRequests]:
        return {name: copy(one) for name, one in self._models.items()}
