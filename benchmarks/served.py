"""served: the traces of `replay` on a server that draws the answers itself: later prompts go on from what it drew."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from benchmarks.replay import TRACES, Turn, Writer, ideal


class Served(NamedTuple):
    """What a server drew after a prompt, and how many tokens of the prompt it did not compute."""

    answer: Sequence[int]
    cached: int


class Computed(NamedTuple):
    """Prompt tokens in all, those that were computed, and those that an ideal cache computes on the same texts."""

    tokens: int
    computed: int
    ideal: int


def computed(name: str, serve: Callable[[list[int], int], Served], *, scale: float = 1.0, seed: int = 1) -> Computed:
    """Replay a trace: `serve` is called with each prompt and the number of tokens to draw."""
    turns, count = list[Turn](), 0
    for turn in TRACES[name](Writer(seed, scale)):
        drawn, cached = serve(turn.prompt, len(turn.answer))
        turn.answer[:] = drawn  # which the trace goes on from
        turns.append(turn._replace(answer=list(drawn)))
        count += len(turn.prompt) - cached
    return Computed(sum(len(turn.prompt) for turn in turns), count, ideal(turns))
