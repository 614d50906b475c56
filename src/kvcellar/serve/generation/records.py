"""records: what requests read from memory, and why it was not more, in their responses, and of the last ones by id.

A request is recorded before the last part of its response is sent, so that a client that has read it finds the record.
Only a server with an admin key has them. They contain up to 16 tokens on both sides of a divergence, and no other text.

Always true:
  * at most `MOST` requests are recorded, of `MOST_PROMPTS` prompts together;
  * a record is found by the id of its response, whatever ids requests have;
  * it is found by the id of its request, which a client may choose, unless a later one of the same owner or an earlier
    one of another owner that is still recorded has the same;
  * `ms` of a record is the time to the last part of the response and does not change: the log line is written when that
    part has been sent, which may be after the client has read the record.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal

from msgspec.structs import asdict

from kvcellar.events import Placement, Recall
from kvcellar.frontend.engine import Engine
from kvcellar.serve.answers import Answer
from kvcellar.serve.http.request_log import LogLine, RequestLog


class TokensFields(Answer):
    tokens: list[int]
    text: str | None


class RewriteFields(Answer):
    message: int | None
    role: str
    by: Literal["template", "client"]
    tokens: int


class RecallFields(Answer, kw_only=True):
    asked: int  # tokens of the prompt that can come from memory: all but the last
    matched: int  # of these, tokens that were found
    restored: int  # of these, tokens that were used
    # restored tokens by the tier that had them when the request arrived: device, host, disk, remote
    sources: dict[str, int]
    seconds: float  # seconds that the request waited for tokens to be read back
    # why it was not more: `all` (the last token is always computed), `no checkpoint`, `diverged`, `new`, `evicted`,
    # `damaged`, `other weights`, `other adapter`, `cheaper to recompute`, `tier unavailable` or `prompt read`
    reason: str
    detail: str  # what the reason means here, in words
    entry: str  # where it diverged: the name of the entry of the tree that goes on in another way; else empty
    # where it diverged: the next tokens of the prompt, as `tokens` and `text`; else `null`
    ours: TokensFields | None
    theirs: TokensFields | None  # where it diverged: the next tokens of the entry, likewise
    # of a chat, the message in which the prompt is not what the conversation was so far: `message` (its index), `role`,
    # `by` (`template`: rendered in another form, or `client`: sent in another form), and `tokens`, those of the
    # conversation that cannot be used because of that; else `null`. A server with API keys and `share_prefixes` leaves
    # it, `image`, `entry`, `ours` and `theirs` empty in responses
    rewrite: RewriteFields | None
    image: str  # where it diverged: which image of the prompt is not as it was, and how; else empty


class SpeculationFields(Answer):
    """What drafts have done for a request: the fields of `kvcellar.events.Speculation`."""

    rounds: int  # steps of its completions, with drafts or without
    drafted: int  # drafts that were computed
    accepted: int  # of these, drafts that became tokens
    tried_at: list[int]  # by position in the round: drafts whose predecessors in the round were all accepted
    accepted_at: list[int]  # of these, drafts that became tokens
    acceptance_at: list[float]  # `accepted_at` / `tried_at`
    # drafts of a round in up to 8 equal parts of the rounds, from the first to the last: `[mean, most]`
    depths: list[tuple[float, int]]
    seconds_saved: float  # beside the expected seconds of plain steps for as many tokens; negative: lost


class OperatorsRecall(RecallFields, kw_only=True):
    salted: int  # first tokens that are in memory for the same API key with another salt or user


def recall_fields(recall: Recall, engine: Engine | None, *, texts: bool = True) -> RecallFields:
    """What a client gets: all but what other salts and users of its key have. `texts`: with what may be the text of
    other requests of its namespace."""
    if not texts:
        recall = replace(recall, entry="", ours=(), theirs=(), rewrite=None, image="")
    return RecallFields.of(recall, **_shown(recall, engine))


def operators_recall(recall: Recall, engine: Engine | None) -> OperatorsRecall:
    return OperatorsRecall.of(recall, **_shown(recall, engine))


def _shown(recall: Recall, engine: Engine | None) -> dict[str, Any]:
    """What is not as it is in a recall."""
    return {
        "sources": dict(recall.sources),
        "ours": _side(recall.ours, engine),
        "theirs": _side(recall.theirs, engine),
        "rewrite": None if recall.rewrite is None else RewriteFields.of(recall.rewrite),
    }


def _side(tokens: Sequence[int], engine: Engine | None) -> TokensFields | None:
    if not tokens:
        return None
    text = engine.decode(tokens, special=True) if engine is not None and engine.model.has_text else None
    return TokensFields(list(tokens), text)


MOST = 1000
MOST_PROMPTS = 8192  # each takes about a kilobyte; in a cluster, with 8 replicas considered, about three


class RequestSummary(LogLine, kw_only=True):
    """`id`: of the response. The other fields are those of the log line."""

    id: str | None
    created: float  # seconds of the wall clock


class RequestSummaries(Answer):
    requests: list[RequestSummary]


class PromptRecord(Answer):
    prompt: int
    prompt_tokens: int
    queued_ms: float
    first_token_ms: float
    recall: OperatorsRecall | None
    speculation: SpeculationFields | None
    placements: tuple[Placement, ...]  # of a cluster, the last replicas that had it


class RequestRecord(RequestSummary, kw_only=True):
    namespace: str
    prompts: list[PromptRecord]


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """One request, with the fields of its log line. An error while the last part is sent still becomes its outcome."""

    log: RequestLog
    ms: float
    created: float = field(default_factory=time.time)

    def summary(self) -> RequestSummary:
        return RequestSummary(**self._fields())

    def whole(self, engine: Engine | None) -> RequestRecord:
        """With what an operator may know: `salted` is told to no client. Without an engine, because the model has been
        unloaded, tokens have no text."""
        prompts = [
            PromptRecord(
                prompt=number,
                prompt_tokens=done.usage.prompt_tokens,
                queued_ms=1e3 * done.timings.queued,
                first_token_ms=1e3 * done.timings.first_token,
                recall=None if done.recall is None else operators_recall(done.recall, engine),
                speculation=done.speculation and SpeculationFields.of(done.speculation),
                placements=done.placements,
            )
            for number, done in sorted(self.log.done.items())
        ]
        return RequestRecord(**self._fields(), namespace=self.log.namespace, prompts=prompts)

    def _fields(self) -> dict[str, Any]:
        return {"id": self.log.response_id, "created": self.created, **asdict(self.log.line()), "ms": self.ms}


class Records:
    """Used on the event loop only."""

    def __init__(self) -> None:
        self._records: deque[Record] = deque()
        self._by_response: dict[str, Record] = {}
        self._by_request: dict[str, Record] = {}
        self._prompts = 0

    def add(self, log: RequestLog) -> None:
        """Record a request that has prompts, once."""
        if log.recorded or not log.prompts:
            return
        log.recorded, record = True, Record(log, log.ms())
        self._records.append(record)
        self._prompts += log.prompts
        if log.response_id is not None:
            self._by_response[log.response_id] = record
        before = self._by_request.get(log.request_id)
        if before is None or before.log.owner == log.owner:
            self._by_request[log.request_id] = record
        while len(self._records) > MOST or (self._prompts > MOST_PROMPTS and len(self._records) > 1):
            gone = self._records.popleft()
            self._prompts -= gone.log.prompts
            for names, name in ((self._by_response, gone.log.response_id), (self._by_request, gone.log.request_id)):
                if name is not None and names.get(name) is gone:
                    del names[name]

    def find(self, name: str) -> Record | None:
        """By the id of a response or of a request."""
        return self._by_response.get(name) or self._by_request.get(name)

    def last(self, most: int) -> list[Record]:
        """The last ones first."""
        return list(islice(reversed(self._records), most))

    def check(self) -> None:
        """Assert what is always true."""
        assert len(self._records) <= MOST
        assert self._prompts == sum(record.log.prompts for record in self._records)
        found = (*self._by_response.values(), *self._by_request.values())
        assert set(map(id, found)) <= set(map(id, self._records))
