"""request_options: what clients say of a request beside its tokens and sampling, and what both sides compute of it."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from kvcellar.constraint import Constraint
from kvcellar.engine.messages import PoolingMode
from kvcellar.events import Timings
from kvcellar.memory.retention import RetentionOptions
from kvcellar.memory.spans import Span
from kvcellar.sampling_params import SamplingOptions
from kvcellar.text.replies.machine import Machine


@dataclass(frozen=True, slots=True)
class RequestReading:
    """How the answers of a request are read: each by a copy of `opened`, which has read the end of the prompt; and what
    they have to match: `constraint` is for its sampling."""

    opened: Machine
    constraint: Constraint | None


class HowOptions(TypedDict, total=False):
    """`retention`: how what the request uses and computes is kept. `adapter`: the name of the adapter that it is
    computed with; "": none; None: that of the engine's settings. `reading`: how its answers are read; None: as text."""

    retention: RetentionOptions | None
    adapter: str | None
    reading: RequestReading | None


class SubmitOptions(HowOptions, total=False):
    """What `Engine.submit` says of each. `pooling`: the request ends with its prompt, and gives its hidden states,
    pooled that way. `session` has no effect; earlier versions read it."""

    namespace: str
    session: int | None
    checkpoint_positions: Sequence[int] | None
    breakpoints: Sequence[int]
    pooling: PoolingMode | None


class RequestOptions(SamplingOptions, HowOptions, total=False):
    """The fields of `SamplingParams` and of `HowOptions`."""


def timings_of(submitted: float, admitted: float | None, first: float | None, last: float | None) -> Timings:
    """Up to now, from times of `time.perf_counter`; None: that has not been yet."""
    now = time.perf_counter()
    began = first or now
    return Timings((admitted or now) - submitted, began - submitted, (last or began) - began)


def shift_span(context: int, keep: int) -> Span:
    """What a context shift drops from a text that fills the context: half of what follows the first `keep` tokens.

    As in Ollama it drops at least one token, so `keep` counts as at most `context - 1`.
    """
    keep = min(keep, context - 1)
    return Span(keep, keep + max(1, (context - keep) // 2))


def fresh_seed() -> int:
    """A seed for a request without one."""
    return random.SystemRandom().getrandbits(63)
