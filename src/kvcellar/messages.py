"""messages: what an engine is told and what it tells, as frozen records. An engine knows tokens only: what has text is
in `events`.

Always true: requests are named by numbers, so that a sender needs no object of the engine to stop one.
"""

from dataclasses import dataclass

from kvcellar.events import Done, Embedded, Failed, FinishReason, PoolingMode, PromptScored, Rewrite, TokenLogprob
from kvcellar.retention import NO_OPTIONS, RetentionOptions
from kvcellar.sample.params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A request. Its arguments were checked: see `engine/arguments.py`."""

    number: int  # its place in the order of arrival
    prompt: tuple[int, ...]
    params: SamplingParams
    namespace: str = ""  # shares memory with requests of the same one only
    checkpoint_positions: tuple[int, ...] = ()  # of the prompt, ascending, from which later requests may resume
    retention: RetentionOptions = NO_OPTIONS  # how what it uses and computes is kept
    adapter: str | None = None  # the name of the adapter that it is computed with; "": none; None: the engine's default
    session: int | None = None  # the number of its session
    pooling: PoolingMode | None = None  # it ends with its prompt, and gives its hidden states, pooled that way
    rewrite: Rewrite | None = None  # what the prompt has in another form than an earlier one of the same chat


@dataclass(frozen=True, slots=True)
class Admitted:
    """The request begins to run: the first event."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """New tokens of one choice. A token that ends it (`stop_token_ids`, the end of a text) is in none."""

    choice: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None  # one for each of token_ids, if requested
    cached_tokens: int = 0  # of the prompt, that came from memory: the same for all tokens of a request


@dataclass(frozen=True, slots=True)
class Ended:
    """The engine draws no more tokens for the choice. `tokens`: how many it has drawn, with the one that ended it."""

    choice: int
    reason: FinishReason
    tokens: int


EngineEvent = Admitted | PromptScored | Embedded | Drawn | Ended | Done | Failed
