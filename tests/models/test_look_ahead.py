"""Spans that look ahead, through real architectures: their tokens see later ones of the span, and nothing else does.

The judge is the model's own eager forward, of whose masks causality is lifted within the spans and nowhere else.
"""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kvcellar.cache.memory import Memory
from kvcellar.errors import ModelRefused
from kvcellar.models.guest import Guest
from kvcellar.plan import Batch, Feed
from kvcellar.spans import Span
from tests.models.remasked import Rule, remasked_logits
from tests.models.timeline import BOUND, animal, read, relative, small_memory
from tests.zoo import WINDOW, reference_logits

# Full; sliding beside full; sinks; latents that are expanded; shared keys; chunks.
NAMES = ("llama", "gemma3", "gpt-oss", "deepseek-v3", "gemma4-e2b", "llama4")
SPANS = {  # by what is looked at, and how much is told before
    "a prefix": (0, [Span(0, 7)]),
    "longer than a window": (3, [Span(4, 4 + WINDOW + 5)]),
    "two that touch": (5, [Span(6, 9), Span(9, 15)]),
    "apart, the last one at the end": (9, [Span(9, 12), Span(16, 24)]),
}
LENGTH = 24


def text(length: int, seed: int) -> list[int]:
    return torch.randint(3, 101, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def lifted(spans: Sequence[Span]):
    """A change of a rule: what lies ahead of a row within its span is seen as the row itself is."""

    def change(rule: Rule) -> Rule:
        def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            together = torch.zeros((), dtype=torch.bool)
            for span in spans:
                together = together | ((query >= span.start) & (key < span.end) & (key >= query) & (query < span.end))
            return rule(batch, head, query, torch.where(together, query, key))

        return seen

    return change


def looked(name: str, tokens: Sequence[int], spans: Sequence[Span]) -> Tensor:
    """[L,V], by the judge."""
    return remasked_logits(animal(name)[1], tokens, lifted(spans), range(len(tokens)))


def forward(guest: Guest, memory: Memory, fed: dict[int, Sequence[int]], ahead: Sequence[tuple[int, Span]]):
    """Logits [L,V] of each sequence in one step, which stays open."""
    feeds = tuple(Feed(s, Span(memory.length(s), memory.length(s) + len(ids))) for s, ids in fed.items())
    plan = memory.begin(Batch(feeds, tuple(ahead)))
    ids = torch.tensor([token for tokens in fed.values() for token in tokens])
    logits = guest.forward(memory, plan, ids, torch.arange(len(ids))).float()
    return logits.split([len(tokens) for tokens in fed.values()])


@pytest.mark.parametrize("what", SPANS)
@pytest.mark.parametrize("name", NAMES)
def test_tokens_of_a_span_see_all_of_it(name: str, what: str) -> None:
    guest, _ = animal(name)
    start, spans = SPANS[what]
    tokens, other, more = text(LENGTH, 1), text(6, 2), text(3, 3)
    memory = small_memory(guest, 40)
    if start:
        read(guest, memory, (1, tokens[:start]))
    # Another sequence has the same positions, and looks ahead elsewhere.
    ahead = [(1, span) for span in spans] + [(2, Span(1, 5))]
    theirs, ours = forward(guest, memory, {2: other, 1: tokens[start:]}, ahead)
    memory.commit()
    assert relative(ours, looked(name, tokens, spans)[start:]) <= BOUND
    assert relative(theirs, looked(name, other, [Span(1, 5)])) <= BOUND
    (onwards,) = read(guest, memory, (1, more))
    assert relative(onwards, looked(name, [*tokens, *more], spans)[LENGTH:]) <= BOUND
    memory.check()


@pytest.mark.parametrize("what", SPANS)
@pytest.mark.parametrize("name", NAMES)
def test_the_judge_tells_a_span_from_none(name: str, what: str) -> None:
    _, spans = SPANS[what]
    tokens = text(LENGTH, 1)
    plain, ahead = reference_logits(animal(name)[1], tokens), looked(name, tokens, spans)
    assert relative(looked(name, tokens, []), plain) <= BOUND
    for span in spans:
        assert relative(ahead[span.start], plain[span.start]) > 10 * BOUND, f"the first token of {span} looks ahead"
    before = slice(0, spans[0].start)
    assert torch.allclose(ahead[before], plain[before], atol=1e-4)


def test_a_solo_model_says_why_its_tokens_cannot_look_ahead() -> None:
    guest, _ = animal("bloom")
    memory = small_memory(guest, 40)
    with pytest.raises(ModelRefused, match="runs solo masks by itself"):
        forward(guest, memory, {1: [5, 6, 7]}, [(1, Span(0, 2))])
    memory.abandon()
    assert not memory.has(1)
