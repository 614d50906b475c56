"""What the caches of Ollama and llama.cpp do in small cases by numbers, where ours must agree: defragmentation, the
removal of the middle of a full cache, what is dropped when a context is full, and layouts that are empty."""

import pytest
import torch

from benchmarks.zeros import put_zeros
from kvcellar.engine.request_options import shift_span
from kvcellar.memory.attention.sdpa import Sdpa
from kvcellar.memory.cells.layouts import Causal
from kvcellar.memory.memory import Group, Memory
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.shapes import Plane
from kvcellar.memory.spans import Span
from tests.cache.tagged import Tagged
from tests.laws.dumb import causal, member, shifting
from tests.laws.player import Player
from tests.laws.watch import Wishes, highest


@pytest.mark.parametrize(
    ("context", "keep", "gone"),
    [
        (2048, 5, Span(5, 1026)),
        (2048, 0, Span(0, 1024)),
        (2048, 2047, Span(2047, 2048)),
        (2048, 2048, Span(2047, 2048)),
        (2048, 10**9, Span(2047, 2048)),
        (2048, 2046, Span(2046, 2047)),
        (1, 0, Span(0, 1)),
        (1, 5, Span(0, 1)),
    ],
)
def test_a_full_context_forgets_half_of_what_is_behind_what_it_keeps_and_at_least_one_token(
    context, keep, gone
) -> None:
    assert shift_span(context, keep) == gone


@pytest.mark.parametrize("budget", [1, 3, 100])
def test_a_cache_with_holes_is_filled_from_the_front_and_every_token_is_where_its_sequence_says(budget: int) -> None:
    tagged = Tagged(Sdpa(), 16, names=["full"])
    for _ in range(4):
        tagged.step(dict.fromkeys(range(4), 1))
    for seq in (1, 3):
        tagged.memory.drop(seq)
        del tagged.tokens[seq]
    while moved := tagged.memory.storage.compact(budget):
        assert moved <= budget
        tagged.check()
    assert (highest(tagged.memory.storage.stores[0].cells), tagged.runs(0)) == (8, 2)
    tagged.step({7: 8})
    assert len(tagged.memory._sequences.known(7)[0].runs) == 1, "what is free is one run"
    tagged.check()


def test_a_batch_goes_into_a_cache_whose_free_cells_lie_apart() -> None:
    tagged = Tagged(Sdpa(), 16, names=["full"])
    for _ in range(8):
        tagged.step({0: 1, 1: 1})
    tagged.memory.drop(1)
    del tagged.tokens[1]
    tagged.step({2: 8})
    tagged.check()
    assert tagged.memory.free() == {"full": 0}


@pytest.mark.parametrize("gone", [Span(2, 4), Span(0, 1), Span(0, 15), Span(8, 12)])
@pytest.mark.parametrize("wishes", [Wishes(), Wishes("head")])
def test_the_middle_of_one_sequence_can_be_removed_when_no_cell_is_free(gone: Span, wishes: Wishes) -> None:
    player = Player([shifting(member("full", causal(), [0, 5], (4, 2), 16, 24), turns=True)], [16], wishes=wishes)
    for _ in range(4):
        player.step(player.batch({0: 4}))
    assert player.memory.free() == {"full": 0}
    player.remove(0, gone)
    assert player.memory.free() == {"full": len(gone)}
    player.check()
    player.step(player.batch({0: len(gone)}))
    player.check()


NO_LAYERS = Group("none", Causal(), (Plane("k", 1, 4), Plane("v", 1, 4)), (), no_shift=None)


@pytest.mark.parametrize("groups", [(), (NO_LAYERS,)], ids=["no groups", "a group without layers"])
def test_a_memory_of_nothing_still_counts_tokens(groups) -> None:
    memory = Memory(groups, cells={"none": 9}, dtype=torch.float32, device="cpu", backend=Sdpa())
    for start in (0, 3):
        put_zeros(memory, memory.begin(Batch((Feed(0, Span(start, start + 3)),))))
        memory.commit({0: 3 - start // 3})
    assert memory.length(0) == 5
    assert memory.fork(0, 1, 4) == 4
    assert memory.remove(1, Span(1, 3)) == 2
    assert memory.remove(0, Span(4, 5)) == 4
    memory.check()
    memory.drop(1)
    for name in memory.free():
        assert memory.storage.piece(name) > 0
        assert memory.storage.compact(4, name) == 0
    assert (memory.storage.compact(4), memory.storage.bytes, memory.length(0), memory.length(1)) == (0, 0, 4, 0)
    memory.clear()
    assert memory.free() == memory.storage.capacity()
