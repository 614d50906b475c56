"""Rows that only ask, through real architectures: they see what is stored, not themselves, and leave no trace."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvcellar.cache.memory import Memory
from kvcellar.errors import ModelRefused
from kvcellar.models.guest import Guest
from kvcellar.plan import Batch, Feed
from kvcellar.spans import Span
from tests.models.remasked import Rule, remasked_logits
from tests.models.timeline import BOUND, animal, read, relative, run, small_memory
from tests.zoo import RECURRENT, reference_logits

# Full, sliding, shared keys, latents that are expanded, sinks, learned positions; convolutions, a delta rule, a scan.
NAMES = ("llama", "gemma3", "gemma4-e2b", "deepseek-v3", "gpt-oss", "opt", "lfm3", "qwen3.5", "kimi-linear", "jamba")
STORED = 21  # tokens of the sequence that is asked


def text(length: int, seed: int) -> list[int]:
    return torch.randint(3, 101, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def asked_logits(judge: PreTrainedModel, told: Sequence[int], asked: Sequence[int], at: int) -> Tensor:
    """[m,V] of rows at `at`, `at + 1`, ... that see what a row there sees of `told`, and no key of each other."""
    n = len(told)

    def change(rule: Rule) -> Rule:
        def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            pos = torch.where(query < n, query, query - n + at)
            return rule(batch, head, pos, key) & ((query < n) | (key < n))

        return seen

    positions = [*range(n), *range(at, at + len(asked))]
    return remasked_logits(judge, [*told, *asked], change, positions)[n:]


def remembered(memory: Memory, seq: int) -> list[Tensor]:
    """Copies of all that the next row of a sequence would read: keys, values and states."""
    plan = memory.begin(Batch((Feed(seq, Span(memory.length(seq), memory.length(seq) + 1), stores=False),)))
    held = [x for group in memory.storage.groups for layer in group.layers for x in memory.get(layer).in_order()]
    for layer in memory._states._planes:
        held += memory.state(layer, plan.states).values()
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
def test_rows_that_only_ask_see_what_is_stored_and_leave_it_so(name: str, rows: int) -> None:
    guest, judge = animal(name)
    told, asked, more, others = text(STORED, 1), text(rows, 2), text(4, 3), text(9, 4)
    memory = small_memory(guest, 40)
    read(guest, memory, (1, told))
    before, free, left = remembered(memory, 1), memory.storage.free(), memory.rows.free
    read(guest, memory, (2, others[:5]))
    first, answers, last = forward(
        guest,
        memory,
        [
            (Feed(2, Span(5, 9)), others[5:]),
            (Feed(1, Span(STORED, STORED + rows), stores=False), asked),
            (Feed(3, Span(0, 4)), more),
        ],
    )
    memory.commit()
    assert relative(answers, asked_logits(judge, told, asked, STORED)) <= BOUND
    assert relative(first, reference_logits(judge, others)[5:]) <= BOUND
    assert relative(last, reference_logits(judge, more)) <= BOUND
    assert memory.length(1) == STORED
    assert same(before, remembered(memory, 1))
    memory.drop(2)
    memory.drop(3)
    assert (memory.storage.free(), memory.rows.free) == (free, left)
    (onwards,) = read(guest, memory, (1, more))
    assert relative(onwards, reference_logits(judge, [*told, *more])[STORED:]) <= BOUND
    memory.check()


@pytest.mark.parametrize("name", NAMES)
def test_a_step_in_which_all_rows_only_ask_stores_nothing(name: str) -> None:
    guest, judge = animal(name)
    memory = small_memory(guest, 40)
    told, asked = {1: text(STORED, 5), 2: text(6, 6)}, {1: text(2, 7), 2: text(1, 8)}
    read(guest, memory, *told.items())
    before, free, rows = [remembered(memory, seq) for seq in told], memory.storage.free(), memory.rows.free
    feeds = [(Feed(s, Span(len(told[s]), len(told[s]) + len(ids)), stores=False), ids) for s, ids in asked.items()]
    for end in (memory.abandon, memory.commit):
        for seq, answers in zip(asked, forward(guest, memory, feeds), strict=True):
            assert relative(answers, asked_logits(judge, told[seq], asked[seq], len(told[seq]))) <= BOUND
        end()
        assert (memory.storage.free(), memory.rows.free) == (free, rows)
        assert all(same(held, remembered(memory, seq)) for held, seq in zip(before, told, strict=True))
    memory.check()


@pytest.mark.parametrize("name", [name for name in NAMES if name not in RECURRENT])
def test_rows_may_ask_from_before_the_end(name: str) -> None:
    guest, judge = animal(name)
    memory = small_memory(guest, 40)
    told, asked = text(STORED, 9), text(2, 10)
    read(guest, memory, (1, told))
    at = STORED - 1  # one of them sees the last stored position as its own, the other stands behind it
    (answers,) = forward(guest, memory, [(Feed(1, Span(at, at + 2), stores=False), asked)])
    memory.commit()
    assert relative(answers, asked_logits(judge, told, asked, at)) <= BOUND
    assert memory.length(1) == STORED


@pytest.mark.parametrize("name", NAMES)
def test_asking_is_another_thing_than_being_stored(name: str) -> None:
    """The judge above tells the two apart."""
    _, judge = animal(name)
    told, asked = text(STORED, 11), text(1, 12)
    asking = asked_logits(judge, told, asked, STORED)
    assert relative(asking, reference_logits(judge, [*told, *asked])[STORED:]) > 10 * BOUND


def test_a_solo_model_says_why_its_rows_cannot_only_ask() -> None:
    guest, judge = animal("bloom")
    memory = small_memory(guest, 40)
    read(guest, memory, (1, [5, 6, 7]))
    before = remembered(memory, 1)
    with pytest.raises(ModelRefused, match="runs solo attends to its new tokens"):
        forward(guest, memory, [(Feed(1, Span(3, 4), stores=False), [8])])
    memory.abandon()
    assert same(before, remembered(memory, 1))
    (onwards,) = run(guest, memory, [(1, [8])])
    memory.commit()
    assert relative(onwards, reference_logits(judge, [5, 6, 7, 8])[3:]) <= BOUND
