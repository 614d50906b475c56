"""conversation: how much of a conversation is read again where recurrent state can be gone back to at few places only.

Counted, not timed: what a session read of its prompts, beside what two caches would have had to read. One has as many
rows for states, may keep them where sessions do, and knows all that will be asked. The other can go back to every
token.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import Any, NamedTuple

import torch

from kvcellar.bench import hf_baseline
from kvcellar.bench.network import hybrid
from kvcellar.engine.build import build
from kvcellar.engine.engine import Engine
from kvcellar.engine.manager import common_prefix
from kvcellar.engine.session import Session
from kvcellar.engine.settings import Settings

CAPTURES = (2, 4, 8, 32)
PIECE = 512  # tokens of a prompt that are read in one step


@dataclass(frozen=True, slots=True)
class Script:
    """Eight turns, back to the third, five others, and the last answer once more."""

    start: int = 2000
    user: int = 40
    answer: int = 8

    def acts(self) -> Iterator[tuple[int, list[int]]]:
        """How many turns to go back, and what to send then."""
        draw = random.Random(0)
        sent = [[draw.randrange(3, 100) for _ in range(self.user)] for _ in range(13)]
        sent[0] = [draw.randrange(3, 100) for _ in range(self.start)] + sent[0]
        yield from ((5 if turn == 8 else 0, tokens) for turn, tokens in enumerate(sent))
        yield 1, sent[-1]


QUICK = Script(start=100, user=10, answer=4)


class Turn(NamedTuple):
    """Of a turn: its prompt, how much of that was not read again, and the answer."""

    prompt: tuple[int, ...]
    cached: int
    answer: tuple[int, ...]

    @property
    def held(self) -> tuple[int, ...]:
        """What memory has when it is over: the last token that was drawn has not been read."""
        return (*self.prompt, *self.answer[:-1])


class Reads(NamedTuple):
    """Tokens of prompts that were read: by a session, by who knows the future, by who can go back to every token."""

    ours: int
    ideal: int
    by_token: int


def play(session: Session, script: Script) -> list[Turn]:
    turns: list[Turn] = []
    for back, tokens in script.acts():
        session.rewind(back)
        prompt = (*session.tokens, *tokens)
        result = session.send(tokens, max_tokens=script.answer, temperature=0.0, ignore_eos=True)
        turns.append(Turn(prompt, result.usage.cached_tokens, result.token_ids))
    return turns


def reads(turns: Sequence[Turn], *, captures: int, piece: int) -> Reads:
    return Reads(
        ours=sum(len(turn.prompt) - turn.cached for turn in turns),
        ideal=ideal(turns, captures=captures, piece=piece),
        by_token=sum(len(turn.prompt) - common for turn, common in zip(turns, _commons(turns), strict=True)),
    )


def _commons(turns: Sequence[Turn]) -> list[int]:
    """How much of each prompt who could go back to every token would not read: never its last token."""
    before: tuple[tuple[int, ...], ...] = ((), *(turn.held for turn in turns[:-1]))
    found = [common_prefix(list(held), list(turn.prompt)) for held, turn in zip(before, turns, strict=True)]
    return [min(common, len(turn.prompt) - 1) for common, turn in zip(found, turns, strict=True)]


def ideal(turns: Sequence[Turn], *, captures: int, piece: int) -> int:
    """The fewest tokens of prompts that can be read by who keeps up to `captures` states beside the newest one.

    A state can be kept behind every `piece` tokens, before the last token of a prompt, and at the end of a turn.
    """
    commons = _commons(turns)
    # The lowest place that each later turn goes back to, seen from each turn: a state beyond it is lost by then.
    wanted = [{min(commons[i + 1 : j + 1]) for j in range(i + 1, len(turns))} for i in range(len(turns))]

    @cache
    def fewest(i: int, kept: frozenset[int], end: int) -> int:
        if i == len(turns):
            return 0
        alive = {place for place in (*kept, end, 0) if place <= commons[i]}
        prompt, held = len(turns[i].prompt), len(turns[i].held)
        places = alive | set(range(piece, prompt - 1, piece)) | {prompt - 1}
        # Of all that could be kept only what is the best for some later turn is ever worth it.
        best = {max(place for place in places if place <= pos) for pos in wanted[i]} - {0}
        ways = combinations(sorted(best), min(captures, len(best)))
        return prompt - max(alive) + min(fewest(i + 1, frozenset(way), held) for way in ways)

    return fewest(0, frozenset(), 0)


def conversation(script: Script, *, small: bool) -> dict[int, Reads]:
    """What is read with room for so many captures, of a network with gated delta rules and attention."""
    network = hf_baseline.network(hybrid("qwen3_5_text", hidden=256, layers=4, head=64), torch.bfloat16)
    found: dict[int, Reads] = {}
    row = build(network, Settings(cache_bytes=1 << 28)).capacity.states.bytes_per_row
    for captures in CAPTURES[-1:] if small else CAPTURES:
        # An engine has as many rows for captures as fit a 32nd of its bytes, and as many for sessions that rest. There
        # is one session, so captures may have both: all but its own row, and the one that a step takes.
        limits: dict[str, Any] = {
            "max_sequences": 1,
            "cache_bytes": 16 * (captures + 2) * row - 1,
            "step_tokens": PIECE,
        }
        with Engine(network, threads=1, **limits) as engine, engine.session(chat=False) as session:
            assert engine.stats().rows == captures + 2, "an engine divides its bytes otherwise"
            found[captures] = reads(play(session, script), captures=captures, piece=PIECE)
    return found
