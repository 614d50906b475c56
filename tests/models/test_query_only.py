"""Query-only rows on real architectures: they see what is stored, not themselves, and store nothing."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvcellar.engine.models.guest import Guest
from kvcellar.errors import ModelRefused
from kvcellar.memory.memory import Memory
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.spans import Span
from tests.models.remasked import Rule, remasked_logits
from tests.models.timeline import BOUND, guest_and_reference, read, relative, run, small_memory
from tests.zoo import RECURRENT, reference_logits

# Full, sliding, shared keys, latents that are expanded, sinks, learned positions; convolutions, a delta rule, a scan.
NAMES = ("llama", "gemma3", "gemma4-e2b", "deepseek-v3", "gpt-oss", "opt", "lfm3", "qwen3.5", "kimi-linear", "jamba")
STORED = 21  # tokens of the sequence that is queried


def text(length: int, seed: int) -> list[int]:
    return torch.randint(3, 101, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def query_logits(reference: PreTrainedModel, stored: Sequence[int], queried: Sequence[int], at: int) -> Tensor:
    """[m,V] of rows at `at`, `at + 1`, ... that see what a row there sees of `stored`, and no key of each other."""
    n = len(stored)

    def change(rule: Rule) -> Rule:
        def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            pos = torch.where(query < n, query, query - n + at)
            return rule(batch, head, pos, key) & ((query < n) | (key < n))

        return visible

    positions = [*range(n), *range(at, at + len(queried))]
    return remasked_logits(reference, [*stored, *queried], change, positions)[n:]


def held_by(memory: Memory, seq: int) -> list[Tensor]:
    """Copies of all that the next row of a sequence would read: keys, values and states."""
    plan = memory.begin(Batch((Feed(seq, Span(memory.length(seq), memory.length(seq) + 1), stores=False),)))
    held = [x for group in memory.storage.groups for layer in group.layers for x in memory.get(layer).in_order()]
    for layer in memory.states._planes:
        held += memory.states.read(layer, plan.states).values()
    memory.abandon()
    return [x.clone() for x in held]


def forward(guest: Guest, memory: Memory, fed: Sequence[tuple[Feed, Sequence[int]]]) -> list[Tensor]:
    """Logits [L,V] of each feed of one step, which stays open."""
    plan = memory.begin(Batch(tuple(feed for feed, _ in fed)))
    ids = torch.tensor([token for _, tokens in fed for token in tokens])
    logits = guest.forward(memory, plan, ids, torch.arange(len(ids)))
    return list(logits.float().split([len(tokens) for _, tokens in fed]))


def same(before: Sequence[Tensor], after: Sequence[Tensor]) -> bool:
    return len(before) == len(after) > 0 and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_query_only_rows_see_what_is_stored_and_change_nothing(name: str, rows: int) -> None:
    guest, reference = guest_and_reference(name)
    stored, queried, more, others = text(STORED, 1), text(rows, 2), text(4, 3), text(9, 4)
    memory = small_memory(guest, 40)
    read(guest, memory, (1, stored))
    before, free, left = held_by(memory, 1), memory.free(), memory.rows.free
    read(guest, memory, (2, others[:5]))
    first, logits, last = forward(
        guest,
        memory,
        [
            (Feed(2, Span(5, 9)), others[5:]),
            (Feed(1, Span(STORED, STORED + rows), stores=False), queried),
            (Feed(3, Span(0, 4)), more),
        ],
    )
    memory.commit()
    assert relative(logits, query_logits(reference, stored, queried, STORED)) <= BOUND
    assert relative(first, reference_logits(reference, others)[5:]) <= BOUND
    assert relative(last, reference_logits(reference, more)) <= BOUND
    assert memory.length(1) == STORED
    assert same(before, held_by(memory, 1))
    memory.drop(2)
    memory.drop(3)
    assert (memory.free(), memory.rows.free) == (free, left)
    (onwards,) = read(guest, memory, (1, more))
    assert relative(onwards, reference_logits(reference, [*stored, *more])[STORED:]) <= BOUND
    memory.check()


@pytest.mark.parametrize("name", NAMES)
def test_a_step_of_query_only_rows_stores_nothing(name: str) -> None:
    guest, reference = guest_and_reference(name)
    memory = small_memory(guest, 40)
    stored, queried = {1: text(STORED, 5), 2: text(6, 6)}, {1: text(2, 7), 2: text(1, 8)}
    read(guest, memory, *stored.items())
    before, free, rows = [held_by(memory, seq) for seq in stored], memory.free(), memory.rows.free
    feeds = [
        (Feed(s, Span(len(stored[s]), len(stored[s]) + len(ids)), stores=False), ids) for s, ids in queried.items()
    ]
    for end in (memory.abandon, memory.commit):
        for seq, logits in zip(queried, forward(guest, memory, feeds), strict=True):
            assert relative(logits, query_logits(reference, stored[seq], queried[seq], len(stored[seq]))) <= BOUND
        end()
        assert (memory.free(), memory.rows.free) == (free, rows)
        assert all(same(held, held_by(memory, seq)) for held, seq in zip(before, stored, strict=True))
    memory.check()


@pytest.mark.parametrize("name", [name for name in NAMES if name not in RECURRENT])
def test_query_only_rows_may_be_before_the_end(name: str) -> None:
    guest, reference = guest_and_reference(name)
    memory = small_memory(guest, 40)
    stored, queried = text(STORED, 9), text(2, 10)
    read(guest, memory, (1, stored))
    at = STORED - 1  # the first is at the last stored position, the second behind it
    (logits,) = forward(guest, memory, [(Feed(1, Span(at, at + 2), stores=False), queried)])
    memory.commit()
    assert relative(logits, query_logits(reference, stored, queried, at)) <= BOUND
    assert memory.length(1) == STORED


@pytest.mark.parametrize("name", NAMES)
def test_query_only_logits_differ_from_those_of_stored_tokens(name: str) -> None:
    """So the reference above distinguishes the two."""
    _, reference = guest_and_reference(name)
    stored, queried = text(STORED, 11), text(1, 12)
    asking = query_logits(reference, stored, queried, STORED)
    assert relative(asking, reference_logits(reference, [*stored, *queried])[STORED:]) > 10 * BOUND


def test_a_solo_model_refuses_query_only_rows_with_the_reason() -> None:
    guest, reference = guest_and_reference("bloom")
    memory = small_memory(guest, 40)
    read(guest, memory, (1, [5, 6, 7]))
    before = held_by(memory, 1)
    with pytest.raises(ModelRefused, match="runs solo attends to its new tokens"):
        forward(guest, memory, [(Feed(1, Span(3, 4), stores=False), [8])])
    memory.abandon()
    assert same(before, held_by(memory, 1))
    (onwards,) = run(guest, memory, [(1, [8])])
    memory.commit()
    assert relative(onwards, reference_logits(reference, [5, 6, 7, 8])[3:]) <= BOUND
