"""Whatever attends together, and however it is cut: each row sees what the dense judge says it sees."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.attention import parts as cutting
from kvcellar.attention.parts import Bundle, Part, parts
from kvcellar.attention.reference import attend_dense
from kvcellar.attention.sdpa import Sdpa
from kvcellar.cache.layouts import Causal, Chunked, Sliding
from kvcellar.cache.memory import Group, Memory
from kvcellar.contracts import Layout, Plane, Scoring
from kvcellar.plan import Batch, Feed, Plan
from kvcellar.spans import Span

LAYOUTS = [Causal(), Sliding(7), Sliding(200), Chunked(9), Chunked(150)]
BOUND = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@dataclass
class World:
    """A memory of one layer, filled with noise, and the judge's answer beside each of the backend's."""

    layout: Layout
    heads: tuple[int, int, int, int] = (6, 2, 8, 8)  # H, G, D, Dv
    dtype: torch.dtype = torch.float32
    softcap: float | None = None
    with_sinks: bool = False
    cells: int = 6000

    def __post_init__(self) -> None:
        h, g, d, dv = self.heads
        planes = (Plane("k", g, d), Plane("v", g, dv))
        group = Group("only", self.layout, planes, (0,))
        cells = {"only": self.cells}
        self.memory = Memory([group], cells=cells, dtype=self.dtype, device="cpu", backend=Sdpa())
        sinks = torch.linspace(-1, 2, h, dtype=self.dtype) if self.with_sinks else None
        self.scoring = Scoring(d**-0.5, self.softcap, sinks)
        self.noise = torch.Generator().manual_seed(0)

    def drawn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.noise).to(self.dtype)

    def step(self, feeds: dict[int, int]) -> Plan:
        """So many new tokens of each sequence; every answer is compared with the judge's."""
        h, g, d, dv = self.heads
        batch = [Feed(seq, Span(self.memory.length(seq), self.memory.length(seq) + n)) for seq, n in feeds.items()]
        plan = self.memory.begin(Batch(tuple(batch)))
        self.memory.put(0, self.drawn(plan.tokens, g, d), self.drawn(plan.tokens, g, dv))
        q = self.drawn(plan.tokens, h, d)
        k, v, visible = self.memory.get(0).dense()
        expected = attend_dense(q, k, v, visible, self.scoring)
        bound = BOUND[self.dtype]
        torch.testing.assert_close(self.memory.attend(0, q, self.scoring), expected, atol=bound, rtol=0)
        dense = self.memory.attend_dense(0, q, k, v, self.scoring)
        torch.testing.assert_close(dense, expected, atol=bound, rtol=0)
        self.memory.commit()
        return plan


def cut(plan: Plan) -> list[Part | Bundle]:
    return parts(plan.groups[0], torch.device("cpu"), bundles=True)


STEPS = st.lists(st.dictionaries(st.integers(0, 3), st.sampled_from([1, 1, 2, 5, 129, 260]), min_size=1), max_size=5)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@settings(max_examples=10)
@given(steps=STEPS)
def test_any_mixture_of_prompts_and_rows(layout: Layout, steps: Sequence[dict[int, int]]):
    world = World(layout)
    for feeds in steps:
        world.step(feeds)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@settings(max_examples=8)
@given(prompt=st.sampled_from([70, 130]), tails=st.lists(st.integers(0, 6), min_size=2, max_size=6), data=st.data())
def test_samples_of_one_prompt_read_it_once(layout: Layout, prompt: int, tails: list[int], data: st.DataObject):
    """Forks at the end or before it, that have grown by different lengths, beside a stranger."""
    world = World(layout)
    world.step({0: prompt, 99: 3})
    for seq, tail in enumerate(tails, 1):
        world.memory.fork(0, seq, prompt - data.draw(st.sampled_from([0, 0, 1, 3])))
        if tail:
            world.step({seq: tail})
    for _ in range(2):
        world.step(dict.fromkeys([*range(len(tails) + 1), 99], 1))


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("heads", [(4, 4, 16, 8), (4, 1, 8, 8), (6, 2, 8, 24)], ids=str)
@pytest.mark.parametrize("extra", ["plain", "softcap", "sinks", "softcap and sinks"])
def test_every_type_of_heads_and_scores(extra: str, heads: tuple[int, int, int, int], dtype: torch.dtype):
    world = World(Sliding(100), heads, dtype, 2.0 if "softcap" in extra else None, "sinks" in extra)
    world.step({0: 90, 1: 3, 2: 150})
    world.memory.fork(0, 3, 90)
    world.step({0: 1, 1: 1, 2: 1, 3: 1, 4: 30})
    world.step({0: 1, 1: 2, 2: 1, 3: 1, 4: 1})


def test_samples_of_one_prompt_are_one_bundle():
    world = World(Causal())
    world.step({0: 100})
    for seq in range(1, 5):
        world.memory.fork(0, seq, 100)
    for made in range(1, 4):
        (bundle,) = cut(world.step(dict.fromkeys(range(5), 1)))
        assert isinstance(bundle, Bundle)
        assert bundle.shared == slice(1, 101)
        assert len(bundle.cells) == 5 * made, "only what each has of its own is copied"


def test_long_rows_and_prompts_stay_apart():
    world = World(Causal())
    lengths = {0: cutting.SHORT, 1: 2 * cutting.SHORT, 2: 40, 3: 50}
    for seq, length in lengths.items():
        world.step({seq: length})
    found = cut(world.step({0: 1, 1: 1, 2: 1, 3: 1, 4: 9}))
    assert sorted(len(part.rows) for part in found if isinstance(part, Bundle)) == [2]
    assert sorted((part.start, part.end) for part in found if isinstance(part, Part)) == [(0, 1), (1, 2), (4, 13)]


@settings(max_examples=20)
@given(lengths=st.lists(st.sampled_from([1, 2, 30, 80, 200, 500, 511, 512, 700]), min_size=1, max_size=24))
def test_each_row_is_in_one_part_and_bundles_are_bounded(lengths: list[int]):
    """Planned on the meta device: nothing but integers is looked at."""
    planes = (Plane("k", 1, 1), Plane("v", 1, 1))
    cells = {"only": sum(lengths) + len(lengths)}
    memory = Memory(
        [Group("only", Causal(), planes, (0,))], cells=cells, dtype=torch.float32, device="meta", backend=Sdpa()
    )
    for seq, length in enumerate(lengths):
        memory.begin(Batch((Feed(seq, Span(0, length)),)))
        memory.commit()
    plan = memory.begin(Batch(tuple(Feed(seq, Span(n, n + 1)) for seq, n in enumerate(lengths))))
    rows: list[int] = []
    for part in cut(plan):
        if isinstance(part, Part):
            rows += range(part.start, part.end)
            continue
        rows += part.rows.tolist()
        assert len(part.cells) <= cutting.BUNDLE
        own = [lengths[row] + 1 for row in part.rows.tolist()]
        assert len(part.cells) == max(own) * len(own)
        assert all(a <= cutting.SPREAD * b + 32 for a, b in pairwise(sorted(own, reverse=True)))
        assert part.veil.hidden.logical_not().sum(-1).flatten().tolist() == own
    assert sorted(rows) == list(range(len(lengths)))
