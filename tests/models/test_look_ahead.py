"""Look-ahead spans on real architectures: their tokens see later ones of the span, and no other token does.

The reference is the model's own eager forward with masks that are not causal within the spans.
"""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kvcellar.engine.models.guest import Guest
from kvcellar.errors import ModelRefused
from kvcellar.memory.memory import Memory
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.spans import Span
from tests.models.remasked import Rule, remasked_logits
from tests.models.timeline import BOUND, guest_and_reference, read, relative, small_memory
from tests.zoo import WINDOW, reference_logits

# Full; sliding beside full; sinks; latents that are expanded; shared keys; chunks.
NAMES = ("llama", "gemma3", "gpt-oss", "deepseek-v3", "gemma4-e2b", "llama4")
SPANS = {  # name: (tokens in memory before, spans)
    "a prefix": (0, [Span(0, 7)]),
    "longer than a window": (3, [Span(4, 4 + WINDOW + 5)]),
    "two that touch": (5, [Span(6, 9), Span(9, 15)]),
    "apart, the last one at the end": (9, [Span(9, 12), Span(16, 24)]),
}
LENGTH = 24


def text(length: int, seed: int) -> list[int]:
    return torch.randint(3, 101, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def lifted(spans: Sequence[Span]):
    """A change of a mask rule: later tokens of a row's span are visible if the row itself is."""

    def change(rule: Rule) -> Rule:
        def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            together = torch.zeros((), dtype=torch.bool)
            for span in spans:
                together = together | ((query >= span.start) & (key < span.end) & (key >= query) & (query < span.end))
            return rule(batch, head, query, torch.where(together, query, key))

        return visible

    return change


def reference_with(name: str, tokens: Sequence[int], spans: Sequence[Span]) -> Tensor:
    """Reference logits [L,V]."""
    return remasked_logits(guest_and_reference(name)[1], tokens, lifted(spans), range(len(tokens)))


def forward(guest: Guest, memory: Memory, fed: dict[int, Sequence[int]], ahead: Sequence[tuple[int, Span]]):
    """Logits [L,V] of each sequence in one step, which stays open."""
    feeds = tuple(Feed(s, Span(memory.length(s), memory.length(s) + len(ids))) for s, ids in fed.items())
    plan = memory.begin(Batch(feeds, tuple(ahead)))
    ids = torch.tensor([token for tokens in fed.values() for token in tokens])
    logits = guest.forward(memory, plan, ids, torch.arange(len(ids))).float()
    return logits.split([len(tokens) for tokens in fed.values()])


@pytest.mark.parametrize("what", SPANS)
@pytest.mark.parametrize("name", NAMES)
def test_tokens_of_a_look_ahead_span_see_the_whole_span(name: str, what: str) -> None:
    guest, _ = guest_and_reference(name)
    start, spans = SPANS[what]
    tokens, other, more = text(LENGTH, 1), text(6, 2), text(3, 3)
    memory = small_memory(guest, 40)
    if start:
        read(guest, memory, (1, tokens[:start]))
    # Another sequence has the same positions, and another span.
    ahead = [(1, span) for span in spans] + [(2, Span(1, 5))]
    theirs, ours = forward(guest, memory, {2: other, 1: tokens[start:]}, ahead)
    memory.commit()
    assert relative(ours, reference_with(name, tokens, spans)[start:]) <= BOUND
    assert relative(theirs, reference_with(name, other, [Span(1, 5)])) <= BOUND
    (continued,) = read(guest, memory, (1, more))
    assert relative(continued, reference_with(name, [*tokens, *more], spans)[LENGTH:]) <= BOUND
    memory.check()


@pytest.mark.parametrize("what", SPANS)
@pytest.mark.parametrize("name", NAMES)
def test_a_look_ahead_span_changes_the_reference_logits(name: str, what: str) -> None:
    _, spans = SPANS[what]
    tokens = text(LENGTH, 1)
    plain, ahead = reference_logits(guest_and_reference(name)[1], tokens), reference_with(name, tokens, spans)
    assert relative(reference_with(name, tokens, []), plain) <= BOUND
    for span in spans:
        assert relative(ahead[span.start], plain[span.start]) > 10 * BOUND, f"the first token of {span} looks ahead"
    before = slice(0, spans[0].start)
    assert torch.allclose(ahead[before], plain[before], atol=1e-4)


def test_a_solo_model_refuses_look_ahead_with_the_reason() -> None:
    guest, _ = guest_and_reference("bloom")
    memory = small_memory(guest, 40)
    with pytest.raises(ModelRefused, match="runs solo has its own masks"):
        forward(guest, memory, {1: [5, 6, 7]}, [(1, Span(0, 2))])
    memory.abandon()
    assert not memory.has(1)
