"""events: what the engine tells a request while it runs. Plain records; no torch, no text handling.

The order for every choice is: any number of `Piece`, then one `Finished`. When all choices have finished there is one
`Done`. A request that cannot go on gets one `Failed` instead of whatever was still to come. Nothing follows `Done` or
`Failed`.
"""

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token of the answer with its log-probability (natural log) under the model's own distribution."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # the most likely (token id, logprob), best first


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer. `text` never ends inside a character; it is empty while one is still incomplete."""

    choice: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None  # one for each of token_ids, if asked for


@dataclass(frozen=True, slots=True)
class Finished:
    """No more pieces of this choice will come. `stop_string` is the one that was met, if any."""

    choice: int
    reason: FinishReason
    stop_string: str | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request."""

    prompt_tokens: int  # of the prompt
    cached_tokens: int  # of the prompt that came from memory instead of being computed
    completion_tokens: int  # of all completions together


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
class Done:
    """The whole request is over, and everything it held has been given back."""

    usage: Usage
    timings: Timings


@dataclass(frozen=True, slots=True)
class Failed:
    """The request got an error; everything it held has been given back."""

    error: Exception


Event = Piece | Finished | Done | Failed
