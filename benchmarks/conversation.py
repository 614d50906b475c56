"""conversation: how many prompt tokens of a conversation are computed again, with few checkpoints of recurrent state.

Tokens are counted, not time. A session is compared with two caches: one with as many checkpoints, chosen with knowledge
of all later turns; and one with a checkpoint at every token.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import Any, NamedTuple

import torch

from benchmarks.networks import hybrid
from benchmarks.row import Given, Lines
from kvcellar.bench import hf_baseline
from kvcellar.frontend.engine import Engine
from kvcellar.frontend.session import Session
from kvcellar.memory.prefix.node import common_prefix

CHECKPOINTS = (2, 4, 8, 32)
STEP_TOKENS = 512
CACHE_BYTES = 1 << 28
MAX_REREAD = 0.02  # prompt tokens computed again, over the ideal cache


@dataclass(frozen=True, slots=True)
class Script:
    """Eight turns, back to the third, five other turns, and the last of those again."""

    start: int = 2000
    user: int = 40
    completion: int = 8

    def turns(self) -> Iterator[tuple[int, list[int]]]:
        """How many turns to rewind, and the tokens to send then."""
        draw = random.Random(0)
        sent = [[draw.randrange(3, 100) for _ in range(self.user)] for _ in range(13)]
        sent[0] = [draw.randrange(3, 100) for _ in range(self.start)] + sent[0]
        yield from ((5 if turn == 8 else 0, tokens) for turn, tokens in enumerate(sent))
        yield 1, sent[-1]


QUICK = Script(start=100, user=10, completion=4)


class Turn(NamedTuple):
    """A turn: its prompt, how many tokens of it were not computed, and its completion."""

    prompt: tuple[int, ...]
    cached: int
    completion: tuple[int, ...]

    @property
    def held(self) -> tuple[int, ...]:
        """The tokens in memory after the turn: the last sampled token has not been computed."""
        return (*self.prompt, *self.completion[:-1])


class Computed(NamedTuple):
    """Prompt tokens computed: by a session, with the best choice of checkpoints, with a checkpoint at every token."""

    ours: int
    ideal: int
    by_token: int


def play(session: Session, script: Script) -> list[Turn]:
    turns: list[Turn] = []
    for back, tokens in script.turns():
        session.rewind(back)
        prompt = (*session.tokens, *tokens)
        result = session.send(tokens, max_tokens=script.completion, temperature=0.0, ignore_eos=True)
        turns.append(Turn(prompt, result.usage.cached_tokens, result.token_ids))
    return turns


def reads(turns: Sequence[Turn], *, checkpoints: int, step_tokens: int) -> Computed:
    return Computed(
        ours=sum(len(turn.prompt) - turn.cached for turn in turns),
        ideal=ideal(turns, checkpoints=checkpoints, step_tokens=step_tokens),
        by_token=sum(len(turn.prompt) - common for turn, common in zip(turns, _common_prefixes(turns), strict=True)),
    )


def _common_prefixes(turns: Sequence[Turn]) -> list[int]:
    """Tokens of each prompt that need not be computed with a checkpoint at every token; never its last token."""
    before: tuple[tuple[int, ...], ...] = ((), *(turn.held for turn in turns[:-1]))
    found = [common_prefix(list(held), list(turn.prompt)) for held, turn in zip(before, turns, strict=True)]
    return [min(common, len(turn.prompt) - 1) for common, turn in zip(found, turns, strict=True)]


def ideal(turns: Sequence[Turn], *, checkpoints: int, step_tokens: int) -> int:
    """The fewest prompt tokens that must be computed with up to `checkpoints` checkpoints beside the newest state.

    A checkpoint is possible after every `step_tokens` tokens, before the last token of a prompt, and after a turn.
    """
    commons = _common_prefixes(turns)
    # For each turn, the lowest position up to each later turn: checkpoints beyond it are invalid by then.
    wanted = [{min(commons[i + 1 : j + 1]) for j in range(i + 1, len(turns))} for i in range(len(turns))]

    @cache
    def fewest(i: int, kept: frozenset[int], end: int) -> int:
        if i == len(turns):
            return 0
        alive = {place for place in (*kept, end, 0) if place <= commons[i]}
        prompt, held = len(turns[i].prompt), len(turns[i].held)
        places = alive | set(range(step_tokens, prompt - 1, step_tokens)) | {prompt - 1}
        # Only checkpoints that are the best for some later turn are worth keeping.
        best = {max(place for place in places if place <= pos) for pos in wanted[i]} - {0}
        ways = combinations(sorted(best), min(checkpoints, len(best)))
        return prompt - max(alive) + min(fewest(i + 1, frozenset(way), held) for way in ways)

    return fewest(0, frozenset(), 0)


def conversation(script: Script, *, small: bool) -> dict[int, Computed]:
    """By number of checkpoints. The network has gated delta rules and attention."""
    network = hf_baseline.network(hybrid("qwen3_5_text", hidden=256, layers=4, head=64), torch.bfloat16)
    found: dict[int, Computed] = {}
    limits: dict[str, Any] = {"max_sequences": 1, "cache_bytes": CACHE_BYTES, "step_tokens": STEP_TOKENS}
    for checkpoints in CHECKPOINTS[-1:] if small else CHECKPOINTS:
        with Engine(network, threads=1, **limits) as engine, engine.session(chat=False) as session:
            _leave_free(engine, checkpoints + 2)  # the sequence has a row, and a step takes one
            found[checkpoints] = reads(play(session, script), checkpoints=checkpoints, step_tokens=STEP_TOKENS)
    return found


def _leave_free(engine: Engine, count: int) -> None:
    """Take rows of recurrent state until no more than `count` are free. An engine has far more for its bytes."""
    rows = engine._built.memory.rows
    while (rows.free or 0) > count:
        rows.take()
    assert rows.free == count, f"an engine with {CACHE_BYTES} bytes has too few rows"


def row(given: Given) -> Lines:
    found = conversation(QUICK if given.quick else Script(), small=given.quick)
    for checkpoints, one in found.items():
        yield (
            f"turns         {one.ours:7} prompt tokens computed with {checkpoints} checkpoints: "
            f"{one.ours / one.ideal - 1:.1%} more than the best choice of checkpoints, target below {MAX_REREAD:.0%}; "
            f"{one.ours / one.by_token - 1:.1%} more than with a checkpoint at every token"
        )
    return {str(checkpoints): one._asdict() for checkpoints, one in found.items()}
