"""request_log: one log line per request, written when its response has ended, successful or not; a probe or a scrape
that was successful has none.

A line has the fields that are known: numbers and fixed names, never text of a prompt or a response. What a client
chooses (method, path, request id) is cut to a maximum length and escaped, without spaces and control characters, so
that a request cannot forge a line or a field.
"""

import logging
import re
import secrets
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from math import inf
from typing import TYPE_CHECKING
from urllib.parse import quote

from msgspec.structs import asdict
from starlette.types import Scope

from kvcellar.events import Delta, Done, Event, Finished
from kvcellar.sampling_params import SamplingParams
from kvcellar.serve.answers import Answer

if TYPE_CHECKING:
    from kvcellar.serve.models.model_spec import ModelSpec

SECONDS = (*(base * 10.0**power for power in range(-3, 2) for base in (1, 2.5, 5)), 100.0, 250.0, 1000.0)
TOKENS = tuple(float(base * 10**power) for power in range(6) for base in (1, 2, 5))


class Buckets:
    """A histogram: values by the first bound that is not less. Used by one thread at a time."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` ascend."""
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0  # sum of all values

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def merge(self, other: "Buckets") -> None:
        assert self.bounds == other.bounds
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.total += other.total

    def __copy__(self) -> "Buckets":
        made = Buckets(self.bounds)
        made.merge(self)
        return made

    def cumulative(self) -> list[tuple[str, float]]:
        """As Prometheus has them: each bound as text, and how many values are not greater."""
        found, so_far = [], 0
        for bound, count in zip((*self.bounds, inf), self.counts, strict=True):
            so_far += count
            found.append(("+Inf" if bound == inf else repr(bound), float(so_far)))
        return found


log = logging.getLogger("kvcellar.serve")

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_KEY = "kvcellar.request_log"  # in the scope of a request
_MAX_PATH = 200  # characters
PROBES = frozenset({"/health", "/live", "/ready", "/ping", "/metrics"})  # routes
_MAX_TRACE = 512  # characters of a header


class LogLine(Answer, kw_only=True):
    """The log line of a request, in this order."""

    request_id: str  # id of the request, also in the header `x-request-id` of the response
    method: str  # HTTP method; `-` if the request could not be parsed
    route: str  # path, escaped and cut
    status: int  # HTTP status; 0 if no response was sent
    outcome: str  # `ok`, the code of the error, or `client_gone`
    key: str | None  # name of the API key, never its value
    model: str | None  # name of the model
    prompt_tokens: int | None  # tokens of the prompts
    cached_tokens: int | None  # prompt tokens that came from memory
    recall: str | None  # why no more prompt tokens came from memory; of several prompts, the first reason
    completion_tokens: int | None  # generated tokens
    draft_tokens: int | None  # drafts that were computed
    accepted_tokens: int | None  # drafts that became tokens
    ms: float  # milliseconds from the request to the end of the response


@dataclass(slots=True)
class RequestLog:
    """The fields of a request's log line. Counts are None until they are known."""

    request_id: str
    method: str = "-"  # "-": the request could not be parsed
    route: str = "-"
    status: int = 0  # of the response; 0: none was sent
    outcome: str | None = None  # None: derived from the status
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    recall: str | None = None
    response_id: str | None = None  # in the body of the response
    namespace: str = ""
    owner: str = ""
    key: str | None = None  # name of the key
    params: SamplingParams | None = None
    stream: bool = False
    conversation: str | None = None  # that it continues
    trace: Mapping[str, str] = field(default_factory=dict[str, str])  # `traceparent` and `tracestate` as sent
    prompts: int = 0
    spec: "ModelSpec | None" = None  # the model, once it is known
    recorded: bool = False  # see `records`
    done: dict[int, Done] = field(default_factory=dict[int, Done])  # by number of the prompt
    finished: Counter[str] = field(default_factory=Counter[str])  # completions, by reason
    gaps: Buckets | None = None  # seconds between two deliveries of tokens of one completion
    _delivered: dict[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])  # when, the last one
    _completion_tokens: dict[int, int] = field(default_factory=dict[int, int])  # by number of the prompt
    _began: float = field(default_factory=time.monotonic)
    _ended: float | None = None

    @classmethod
    def of(cls, scope: Scope) -> "RequestLog":
        """The log of a request, created at the first call. A valid `x-request-id` of the client becomes its id."""
        request = scope.get(_KEY)
        if request is None:
            ids = [value for name, value in scope["headers"] if name == b"x-request-id"]
            text = ids[0].decode("latin-1") if len(ids) == 1 else ""
            route = quote(scope["path"][:_MAX_PATH], safe="/:@", errors="replace")
            request = cls(text if _ID.fullmatch(text) else new_id(), scope["method"][:20], route)
            request.trace = {
                name.decode(): value.decode("latin-1")[:_MAX_TRACE]
                for name, value in scope["headers"]
                if name in (b"traceparent", b"tracestate")
            }
            scope[_KEY] = request
        return request

    def set_prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        self.prompts, self.prompt_tokens = len(prompts), sum(map(len, prompts))

    def count(self, batch: Sequence[tuple[int, Event]]) -> None:
        """Count tokens as they arrive, so that the number is right for a response that is cut off too."""
        for number, event in batch:
            match event:
                case Delta():
                    self._count_gap(number, event)
                    self._completion_tokens[number] = self._completion_tokens.get(number, 0) + len(event.token_ids)
                case Finished():
                    self.finished[event.reason] += 1
                case Done():
                    self.done[number] = event
                    self._completion_tokens[number] = event.usage.completion_tokens
                    self.cached_tokens = (self.cached_tokens or 0) + event.usage.cached_tokens
                    if event.recall is not None:
                        self.recall = self.recall or event.recall.reason.replace(" ", "-")
                case _:
                    pass

    def _count_gap(self, number: int, delta: Delta) -> None:
        if not delta.token_ids:
            return
        now, place = time.monotonic(), (number, delta.choice)
        if (before := self._delivered.get(place)) is not None:
            self.gaps = self.gaps or Buckets(SECONDS)
            self.gaps.add(now - before)
        self._delivered[place] = now

    @property
    def model(self) -> str | None:
        """As the library or the command line names it; None until it is known."""
        return self.spec.name if self.spec is not None else None

    @property
    def generated(self) -> int:
        """Tokens so far."""
        return sum(self._completion_tokens.values())

    @property
    def result(self) -> str:
        """`ok`, the code of an error, or `client_gone`."""
        return self.outcome or ("ok" if 200 <= self.status < 400 else _code_of(self.status))

    def set_error(self, status: int, code: str | None) -> None:
        """Only the first error is kept: later ones are its consequences."""
        if self.outcome is None:
            self.outcome = code or _code_of(status)
            self.status = self.status or status

    def write(self) -> None:
        """The response has ended: write the line. The attribute `request` of the log record has its fields by name."""
        self._ended = time.monotonic()
        if not log.isEnabledFor(logging.INFO) or (self.route in PROBES and self.result == "ok"):
            return
        fields = {name: value for name, value in asdict(self.line()).items() if value is not None}
        known = " ".join(f"{name}={value}" for name, value in list(fields.items())[5:])
        line = (self.request_id, self.method, self.route, self.status, fields["outcome"], known)
        log.info("%s: %s %s %d %s %s", *line, extra={"request": fields})

    def line(self) -> LogLine:
        drafted, accepted = draft_counts(self.done) or (None, None)
        return LogLine.of(
            self,
            outcome=self.result,
            completion_tokens=self.generated if self.prompt_tokens is not None else None,
            draft_tokens=drafted,
            accepted_tokens=accepted,
            ms=self.ms(),
        )

    def ms(self) -> float:
        """From the request to the end of the response, or to now while it has not ended."""
        return round(1e3 * ((self._ended or time.monotonic()) - self._began), 1)


def draft_counts(done: Mapping[int, Done]) -> tuple[int, int] | None:
    """Drafts of all prompts and those that were accepted; None without speculation."""
    found = [one.speculation for one in done.values() if one.speculation is not None]
    return (sum(one.drafted for one in found), sum(one.accepted for one in found)) if found else None


def new_id() -> str:
    return f"req-{secrets.token_hex(8)}"


def _code_of(status: int) -> str:
    """The reason phrase of a status, in the form of a code."""
    try:
        return HTTPStatus(status).phrase.lower().replace(" ", "_")
    except ValueError:
        return "client_gone" if status == 499 else "no_response"
