"""Drafters that are right as often as a test wants, and what memory has of every text after every round."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor

from kvcellar import Engine
from kvcellar.engine.core.request import Completion, Status
from kvcellar.engine.speculate.chain import Chain, Key
from kvcellar.engine.speculate.drafter import Committed, Drafter
from kvcellar.engine.speculate.speculator import Speculator
from kvcellar.events import Speculation
from kvcellar.memory.kv.readout import Part
from kvcellar.memory.memory import Memory
from kvcellar.memory.spans import Span
from kvcellar.sampling_params import SamplingParams
from tests.engine.mixes import Ear, same_numbers
from tests.engine.test_limits import held

Text = tuple[int, ...]
TAIL = 6  # tokens by which a text is known


class Silent:
    """A drafter that keeps nothing, and proposes nothing."""

    name = "silent"
    deepest = 16
    catches_up = False
    reads_hidden = False

    def propose(self, chains: Sequence[Chain]) -> None:
        pass

    def committed(self, news: Sequence[Committed]) -> None:
        pass

    def fork(self, key: Key, other: Key) -> None:
        pass

    def forget(self, namespace: str | None, tokens: Sequence[int] = ()) -> None:
        pass

    def close(self, key: Key, *, keep: bool) -> None:
        pass


class Oracle(Silent):
    """Knows the texts. Of the drafts of each round the first `right` are the text's, and the next is another token;
    None: as many as `draw` says, of as many drafts as it says."""

    name = "oracle"

    def __init__(self, texts: Sequence[Sequence[int]], right: int | None = None, *, draw: int = 1) -> None:
        self.texts, self.right, self.draw = [tuple(text) for text in texts], right, Random(draw)
        self.rounds: list[int] = []  # drafts of each

    def propose(self, chains: Sequence[Chain]) -> None:
        for chain in chains:
            most, right = chain.left, self.right
            if right is None:
                right, most = self.draw.randrange(most + 1), self.draw.randrange(most + 1)
            after = self._after(chain)
            for place in range(most):
                if chain.left:
                    token = after[place] if place < len(after) else 0
                    chain.add(token if place < right else (token + 1) % chain.samplers[0].vocab_size)
            self.rounds.append(len(chain.drafts))

    def _after(self, chain: Chain) -> Text:
        """What follows a text. After a context shift it is known by its end: `pos` counts what was dropped, too."""
        at, own = chain.pos - chain.rows_of_images, tuple(chain.text)
        known = own if len(own) == at else own[-TAIL:]
        return next((text[at:] for text in self.texts if text[at - len(known) : at] == known), ())


def speculates(engine: Engine, drafter: Drafter | None, depth: int = 4) -> None:
    """Let an engine draft from now on, in every round `depth` tokens for each completion, or not at all."""
    drafting = engine._built.loop.manager.drafting
    drafting.speculator = Speculator(drafter, fixed=depth) if drafter is not None else None


@dataclass(frozen=True)
class Contents:
    """All that memory has of one sequence: in each group the span that it holds and its planes, and its state."""

    held: Mapping[str, Span]
    states: tuple[int, ...] | None
    tensors: Sequence[Tensor]

    @classmethod
    def of(cls, memory: Memory, seq: int) -> "Contents":
        tables = zip(memory.storage.stores, memory._sequences.known(seq), strict=True)
        tensors = [
            content.clone()
            for store, table in tables
            for plane, cells, _ in Part(store, table).planes(memory.device)
            for content in plane.content(cells)
        ]
        if row := memory._sequences.record(seq).states.row:
            tensors += memory.states.content(row)
        return cls(memory.held(seq), memory.state_positions(seq), tensors)

    def differs(self, other: "Contents") -> str | None:
        """Why they are not the same, if they are not."""
        if (self.held, self.states) != (other.held, other.states):
            return f"{self.held}, states at {self.states}, not {other.held}, states at {other.states}"
        for number, (one, two) in enumerate(zip(self.tensors, other.tensors, strict=True)):
            if one.dtype.is_floating_point and not same_numbers(one, two):
                return f"tensor {number} of {len(self.tensors)} is off by {float((one - two).abs().max())}"
            if not one.dtype.is_floating_point and not torch.equal(one, two):
                return f"tensor {number} of {len(self.tensors)} has other codes"
        return None


@dataclass
class Rounds:
    """After each round of each completion in decode: what memory has of its text, and of how many tokens."""

    of_text: dict[Text, Contents] = field(default_factory=dict)
    kept: list[int] = field(default_factory=list)

    def assert_as_in(self, plain: "Rounds") -> None:
        """Every round has left what plain decoding leaves of the same text."""
        assert self.of_text
        for text, contents in self.of_text.items():
            assert text in plain.of_text, f"plain decoding has no text {text}"
            assert (why := contents.differs(plain.of_text[text])) is None, f"after {len(text)} tokens: {why}"


@contextmanager
def watched(engine: Engine) -> Iterator[Rounds]:
    """Look into memory after every commit."""
    runner, memory, rounds = engine._built.runner, engine._built.memory, Rounds()
    keep = runner._keep

    def kept(completion: Completion, tokens: int, claim: int | None, drafts: Sequence[int]) -> None:
        before = completion.status is Status.DECODE
        keep(completion, tokens, claim, drafts)
        if before:
            assert completion.seq is not None
            text = (*completion.tokens, *drafts)[: completion.computed]
            assert memory.length(completion.seq) == len(text)
            rounds.of_text[text] = Contents.of(memory, completion.seq)
            rounds.kept.append(tokens)

    runner._keep = kept
    try:
        yield rounds
    finally:
        runner._keep = keep


def ask(engine: Engine, prompts: Sequence[Sequence[int]], *, clear: bool = True, **sampling: Any) -> list[Ear]:
    """What these requests come to, which begin in the same step; `clear`: with nothing in memory from before."""
    if clear:
        engine.clear_cache()
    ears = [Ear() for _ in prompts]
    with held(engine):
        for prompt, ear in zip(prompts, ears, strict=True):
            engine.submit(prompt, SamplingParams(**sampling), deliver=ear)
    for ear in ears:
        ear.wait()
        assert ear.error is None, ear.error
    return ears


def told(prompts: Sequence[Sequence[int]], ears: Sequence[Ear]) -> list[Text]:
    """The prompt and the tokens of each choice."""
    return [
        (*prompt, *ear.ids(choice)) for prompt, ear in zip(prompts, ears, strict=True) for choice in sorted(ear.reasons)
    ]


def report(ear: Ear) -> Speculation:
    found = ear.done.speculation
    assert found is not None
    return found
