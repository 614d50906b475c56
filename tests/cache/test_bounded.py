"""Windows and chunks stay bounded, however long a text gets: at every moment, the middle of a step included."""

import random

import pytest
import torch

from benchmarks.zeros import put_zeros
from kvcellar.errors import CacheFull
from kvcellar.memory.attention.reference import Reference
from kvcellar.memory.cells.layouts import Chunked, Sliding
from kvcellar.memory.kv.group import Group
from kvcellar.memory.layout import Layout
from kvcellar.memory.memory import Memory
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.shapes import Plane
from kvcellar.memory.spans import Span

POSITIONS = 100_000
STEP = 256
LAYOUTS: dict[str, tuple[Layout, int]] = {  # with how many positions stay
    "window": (Sliding(512), 512),
    "memory": (Sliding(512, 700), 700),
    "chunk": (Chunked(1024), 1024),
    "last": (Sliding(1), 1),
}


def memory_of(cells: dict[str, int]) -> Memory:
    """Fake tensors: only where things would be stored is real."""
    planes = (Plane("k", 1, 8), Plane("v", 1, 8))
    groups = [Group(name, layout, planes, (index,)) for index, (name, (layout, _)) in enumerate(LAYOUTS.items())]
    return Memory(groups, cells=cells, dtype=torch.float32, device="meta", backend=Reference())


def begin(memory: Memory, sizes: dict[int, int]) -> None:
    """A step in which every sequence gets so many tokens, stored but not committed."""
    starts = {seq: memory.length(seq) for seq in sizes}
    plan = memory.begin(Batch(tuple(Feed(seq, Span(starts[seq], starts[seq] + n)) for seq, n in sizes.items())))
    put_zeros(memory, plan)


def test_a_long_text_holds_a_window_and_a_step() -> None:
    """The capacity is the bound itself: one cell more at any moment, and a step would not fit."""
    memory = memory_of({name: kept + STEP for name, (_, kept) in LAYOUTS.items()})
    sizes = random.Random(0)
    while memory.length(0) < POSITIONS:
        size = sizes.choice([1, 1, 7, 64, sizes.randint(1, STEP), STEP])
        begin(memory, {0: size})
        in_step = {name: memory.storage.capacity()[name] - free for name, free in memory.free().items()}
        assert all(in_step[name] <= kept + size for name, (_, kept) in LAYOUTS.items())
        memory.commit({0: sizes.randint(size // 2, size)})
        after = {name: len(span) for name, span in memory.held(0).items()}
        assert all(after[name] <= kept for name, (_, kept) in LAYOUTS.items())
        assert {name: memory.storage.capacity()[name] - free for name, free in memory.free().items()} == after
    memory.check()


def test_each_of_many_texts_holds_a_window_and_its_part_of_a_step() -> None:
    texts = 8
    memory = memory_of({name: texts * kept + STEP for name, (_, kept) in LAYOUTS.items()})
    sizes = random.Random(1)
    for _ in range(800):
        chosen = sizes.sample(range(texts), sizes.randint(1, texts))
        begin(memory, {seq: sizes.randint(1, STEP // len(chosen)) for seq in chosen})
        memory.commit()
        for seq in memory.sequences:
            assert all(len(span) <= LAYOUTS[name][1] for name, span in memory.held(seq).items())
    assert sum(memory.length(seq) for seq in range(texts)) > 50_000
    memory.check()


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_bound_is_what_the_layout_says(name: str) -> None:
    """`most_cells` is enough for any step, and one cell less is not."""
    layout, _ = LAYOUTS[name]
    most = layout.most_cells(POSITIONS, STEP)

    def read(cells: int) -> None:
        memory = memory_of(dict.fromkeys(LAYOUTS, 10_000) | {name: cells})
        while memory.length(0) < 20 * STEP:
            begin(memory, {0: STEP})
            memory.commit()

    read(most)
    with pytest.raises(CacheFull, match=f"need {STEP} cells in group {name}; {STEP - 1} are free"):
        read(most - 1)
