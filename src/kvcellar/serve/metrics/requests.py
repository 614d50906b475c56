"""requests: what is counted when a request has ended, for each model.

Always true:
  * used on the event loop only; a scrape gets a copy;
  * a model is named as the library or the command line names it, never as a client wrote it: a request that has found
    no model counts for the name "".
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvcellar.events import Done
from kvcellar.serve.buckets import SECONDS, TOKENS, Buckets
from kvcellar.serve.request_log import RequestLog


def _seconds() -> Buckets:
    return Buckets(SECONDS)


def _tokens() -> Buckets:
    return Buckets(TOKENS)


@dataclass(eq=False, slots=True)
class ModelRequests:
    """Requests of one model. The histograms of a prompt are of those that have ended with `Done`."""

    outcomes: Counter[str] = field(default_factory=Counter[str])
    finished: Counter[str] = field(default_factory=Counter[str])  # completions, by reason
    prompt: int = 0  # tokens
    cached: int = 0  # tokens of prompts
    generated: int = 0  # tokens
    seconds: Buckets = field(default_factory=_seconds)  # from the request to the end of its response
    queued: Buckets = field(default_factory=_seconds)
    first_token: Buckets = field(default_factory=_seconds)
    prefill: Buckets = field(default_factory=_seconds)
    decode: Buckets = field(default_factory=_seconds)
    per_token: Buckets = field(default_factory=_seconds)  # of a prompt's decoding, the mean
    gaps: Buckets = field(default_factory=_seconds)  # between two deliveries of tokens of one completion
    prompt_tokens: Buckets = field(default_factory=_tokens)
    cached_tokens: Buckets = field(default_factory=_tokens)
    generation_tokens: Buckets = field(default_factory=_tokens)

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

    def copy(self) -> "ModelRequests":
        made = ModelRequests()
        for name in self.__slots__:
            value = getattr(self, name)
            setattr(made, name, value if isinstance(value, int) else value.copy())
        return made


class RequestCounts:
    """All requests that have reached the application."""

    def __init__(self) -> None:
        self._models: dict[str, ModelRequests] = {}

    def ended(self, log: RequestLog) -> None:
        name = log.servable.name if log.servable is not None else ""
        self._models.setdefault(name, ModelRequests()).count(log)

    def copy(self) -> Mapping[str, ModelRequests]:
        return {name: one.copy() for name, one in self._models.items()}
