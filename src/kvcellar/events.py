"""events: the records that are delivered for a running request. Plain data: no torch, no text handling.

A request that reads its prompt gets one `PromptScored` or `Embedded` first. For each choice there are any number of
`Delta` and then one `Finished`. When all choices have finished there is one `Done`. A request that fails gets one
`Failed` in place of the remaining events. Nothing follows `Done` or `Failed`.
"""

from dataclasses import dataclass
from typing import Any, Literal

from msgspec import Struct

FinishReason = Literal["stop", "length", "cancelled"]
PoolingMode = Literal["last", "mean"]


class Tagged(Struct, frozen=True, tag=True, array_like=True):
    """A record that is sent between processes as a list, its name first: the receiver need not expect its class."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token with its log-probability (natural log) under the model's own distribution."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # the most likely (token id, logprob), best first
    rank: int = 0  # of a token of a prompt: 1 if it was the most likely; 0 of a generated one


class PromptScored(Tagged, frozen=True):
    """The tokens of the prompt, with their log-probabilities; None for the first, before which nothing is, and
    for rows of images."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob | None, ...]


class Embedded(Tagged, frozen=True):
    """The hidden states of the prompt, pooled: [H] in float32, not normalised."""

    vector: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Pooling:
    """How a model makes an embedding of hidden states. `sizes` are the numbers of dimensions that one may be cut to:
    those that are listed, any (None), or none (empty)."""

    mode: PoolingMode
    normalised: bool
    sizes: frozenset[int] | None = frozenset()


class Delta(Struct, frozen=True):
    """New text and tokens of one choice. `text` never ends inside a character; while one is incomplete it is empty."""

    choice: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None  # one for each of token_ids, if requested
    cached_tokens: int = 0  # of the prompt, that came from memory: the same in all deltas of a request
    # where the request said how its answers are read: what `kvcellar.text.pieces` has of them; `text` is their content
    pieces: tuple[Any, ...] | None = None
    reasoning_tokens: int = 0  # of token_ids, if it said so


class Finished(Struct, frozen=True):
    """The choice has ended. One that had not begun when its request was cancelled has no event. `stop_string` is the
    stop string that ended it, if one did. `scored`: whether log-probabilities were requested, which a choice without
    tokens has in no delta."""

    choice: int
    reason: FinishReason
    stop_string: str | None = None
    scored: bool = False


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request."""

    prompt_tokens: int  # tokens of the prompt
    cached_tokens: int  # tokens of the prompt that came from memory instead of being computed
    completion_tokens: int  # tokens of all completions together


@dataclass(frozen=True, slots=True)
class Timings:
    """Of one request."""

    queued: float  # seconds from submission to admission
    first_token: float  # seconds from submission to the first token
    decoding: float  # seconds from the first token to the last

    def tokens_per_second(self, completion_tokens: int) -> float:
        """Rate of the tokens after the first; 0 where there is no second token."""
        return (completion_tokens - 1) / self.decoding if completion_tokens > 1 and self.decoding > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A message of a chat whose text in the prompt is not what it was in the conversation so far."""

    message: int | None  # its index; None: which one it is cannot be found out
    role: str
    by: Literal["template", "client"]  # the chat template renders it in another way; or the client sent another text
    tokens: int  # of the conversation so far that cannot be used because of that

    def __str__(self) -> str:
        which = f"messages[{self.message}] ({self.role})" if self.message is not None else "a message"
        by = "the chat template renders" if self.by == "template" else "the client sent"
        return f"{by} {which} in another form than before, so {self.tokens} tokens of the conversation cannot be used"


@dataclass(frozen=True, slots=True)
class Recall:
    """What of a prompt came from memory when its request began to run, and why it was not more.

    Wherever a share of one prompt is shown, it is `restored` of all tokens of the prompt, as are `cached_tokens` of
    `prompt_tokens` in usage: the last one is always computed. Sums over requests are of `asked`, so that they can be
    100 %.
    """

    asked: int  # tokens of the prompt that can come from memory: all but the last
    matched: int  # of these, tokens that were found
    restored: int  # of these, tokens that were used
    sources: tuple[tuple[str, int], ...]  # restored tokens by the tier that had them when the request arrived
    seconds: float  # seconds that the request waited for tokens to be read back
    # all, no checkpoint, diverged, new, evicted, damaged, other weights, other adapter, cheaper to recompute,
    # tier unavailable or prompt read
    reason: str
    detail: str  # what the reason means here, in words
    # if it diverged from what was computed before, also where layers have no checkpoint there:
    entry: str = ""  # the name of the entry of the tree that goes on in another way
    ours: tuple[int, ...] = ()  # the next tokens of the prompt
    theirs: tuple[int, ...] = ()  # the next tokens of the entry
    salted: int = 0  # at least so many of its first tokens are there for the same API key with another salt or user
    rewrite: Rewrite | None = None  # of a chat: the message in which the prompt is not what the conversation was
    image: str = ""  # where it diverged: which image of the prompt is not as it was, and how, in words


@dataclass(frozen=True, slots=True)
class Speculation:
    """Drafts of one request, all its completions together. A round is a step with or without drafts."""

    rounds: int  # steps of its completions, with drafts or without
    drafted: int  # drafts that were computed
    accepted: int  # drafts that became tokens
    tried_at: tuple[int, ...]  # by position in the round: drafts whose predecessors in the round were all accepted
    accepted_at: tuple[int, ...]  # of these, drafts that became tokens
    depths: tuple[tuple[float, int], ...]  # mean and most drafts of a round, in up to 8 parts of the rounds
    seconds_saved: float  # beside the expected seconds of plain steps for as many tokens; negative: lost

    @property
    def acceptance(self) -> float:
        """The part of the drafts that became tokens."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_at(self) -> tuple[float, ...]:
        """By position in the round: the part of the tried drafts that became tokens."""
        return tuple(kept / tried for kept, tried in zip(self.accepted_at, self.tried_at, strict=True))


@dataclass(frozen=True, slots=True)
class Score:
    """What a replica of an engine was ranked by, in seconds."""

    replica: str
    seconds: float  # in all
    wait: float  # until what was there before is computed, and until there are cells
    restore: float  # reading back what the shared store has of the prompt, while it waits
    compute: float  # computing the rest
    others: float  # what that costs other requests
    have: int  # tokens of the prompt on its device, or about to be there
    restored: int  # tokens that it would read
    running: int  # completions that are in decode there
    measured: bool  # False: no replica had measured a speed, and tokens stand for seconds


@dataclass(frozen=True, slots=True)
class Placement:
    """A replica that a request was sent to."""

    replica: str
    considered: tuple[Score, ...]  # the best ones, best first; empty: none had published KV events
    left: str = ""  # how that replica ended, so that the request went on at another one


class Done(Tagged, frozen=True):
    """The whole request has ended. `recall` is None if it ended before it began to run, `speculation` if nothing was
    drafted for: the engine has no drafter, or it ended before its first token. `placements`: the last replicas that had
    it, where the engine has several."""

    usage: Usage
    timings: Timings
    recall: Recall | None = None
    speculation: Speculation | None = None
    placements: tuple[Placement, ...] = ()
    pinned: bool = False  # its prompt was, when it ended


class Failed(Tagged, frozen=True):
    """The request failed, and its memory is freed."""

    error: Exception


Event = PromptScored | Embedded | Delta | Finished | Done | Failed
