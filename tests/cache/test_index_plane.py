"""A plane beside keys and values, an indexer's keys: written by itself, it goes with its cells wherever they go.

Each row of a plane encodes its token and layer, and each plane does so with numbers of its own.
"""

from collections.abc import Mapping
from itertools import count

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcellar.errors import BadRequest, WrongStage
from kvcellar.memory.attention.reference import Reference
from kvcellar.memory.attention.sdpa import Sdpa
from kvcellar.memory.cells.layouts import Causal
from kvcellar.memory.kv.group import Group
from kvcellar.memory.kv.history import Backend
from kvcellar.memory.memory import Memory
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.shapes import Plane, Storage
from kvcellar.memory.spans import Span
from tests.laws.watch import nothing_changes

K, V, INDEX = Plane("k", 2, 4), Plane("v", 2, 8), Plane("index", 1, 6)
GROUPS = (Group("indexed", Causal(), (K, V, INDEX), (0, 2)), Group("shared", Causal(), (K, V), (1,)))
SEQS = st.integers(0, 3)
MOVES = st.one_of(
    st.tuples(st.just("step"), SEQS, st.integers(1, 6), st.booleans()),
    st.tuples(st.just("fork"), SEQS, SEQS, st.integers(0, 20)),
    st.tuples(st.just("cut"), SEQS, st.integers(0, 20)),
    st.tuples(st.just("drop"), SEQS),
    st.tuples(st.just("compact"), st.integers(1, 20)),
)


def memory(backend: Backend, *groups: Group) -> Memory:
    groups = groups or GROUPS
    cells = {group.name: 60 for group in groups}
    return Memory(groups, cells=cells, dtype=torch.float32, device="cpu", backend=backend)


def said(plane: Plane, layer: int, tokens: list[int]) -> Tensor:
    """[T,heads,size]"""
    offset = {"k": 0, "v": 1000, "index": 2000}[plane.name] + layer * 10_000
    return (offset + torch.tensor(tokens, dtype=torch.float32))[:, None, None].expand(-1, plane.heads, plane.size)


class Texts:
    def __init__(self, backend: Backend) -> None:
        self.memory = memory(backend)
        self.tokens: dict[int, list[int]] = {}
        self._numbers = count(1)

    def step(self, seq: int, n: int, *, index_first: bool) -> None:
        new = [next(self._numbers) for _ in range(n)]
        start = self.memory.length(seq)
        self.memory.begin(Batch((Feed(seq, Span(start, start + n)),)))
        for group in GROUPS:
            for layer in group.layers:
                index = [lambda layer=layer: self.memory.put(layer, index=said(INDEX, layer, new))]
                kv = [lambda layer=layer: self.memory.put(layer, said(K, layer, new), said(V, layer, new))]
                index = index if INDEX in group.planes else []
                for put in index + kv if index_first else kv + index:
                    put()
        self.memory.commit()
        self.tokens.setdefault(seq, []).extend(new)

    def play(self, name: str, *what: int) -> None:
        if name == "step" and what[1] <= min(self.memory.free().values()):
            self.step(what[0], what[1], index_first=bool(what[2]))
        elif name == "compact":
            self.memory.storage.compact(what[0])
        elif name == "fork" and what[0] in self.tokens and what[0] != what[1]:
            self.tokens[what[1]] = self.tokens[what[0]][: self.memory.fork(*what)]
        elif name == "cut" and what[0] in self.tokens and what[1] < len(self.tokens[what[0]]):
            kept = self.memory.can_cut(what[0], what[1])
            self.memory.remove(what[0], Span(kept, len(self.tokens[what[0]])))
            self.tokens[what[0]] = self.tokens[what[0]][:kept]
        elif name == "drop" and what[0] in self.tokens:
            self.memory.drop(what[0])
            del self.tokens[what[0]]

    def check(self) -> None:
        """Every sequence reads its own tokens, in order, in every plane of every layer."""
        self.memory.check()
        texts: Mapping[int, list[int]] = {seq: tokens for seq, tokens in self.tokens.items() if tokens}
        queries = tuple(Feed(seq, Span(len(text) - 1, len(text)), stores=False) for seq, text in texts.items())
        if not queries:
            return
        self.memory.begin(Batch(queries))
        for group in GROUPS:
            for layer in group.layers:
                for plane in group.planes:
                    read = self.memory.get(layer).plane_in_order(plane.name)
                    for one, text in zip(read, texts.values(), strict=True):
                        assert torch.equal(one, said(plane, layer, text))
        self.memory.abandon()


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(MOVES, max_size=25), st.sampled_from([Reference(), Sdpa()]))
def test_it_is_read_in_order_whatever_becomes_of_the_cells(moves, backend: Backend) -> None:
    texts = Texts(backend)
    for move in moves:
        texts.play(*move)
        texts.check()


def test_it_is_shared_by_forks_and_moved_by_compaction() -> None:
    texts = Texts(Sdpa())
    for move in (("step", 0, 8, 1), ("step", 1, 8, 0), ("fork", 1, 2, 6), ("step", 2, 3, 1), ("drop", 0)):
        texts.play(*move)
    free, moved = texts.memory.free(), 0
    while cells := texts.memory.storage.compact(100):
        moved += cells
        texts.check()
    assert moved > 11, "of both groups"
    assert texts.memory.free() == free, "two sequences still share six cells"


def test_each_plane_is_stored_once_a_step_in_its_own_shape() -> None:
    kept = memory(Reference())
    index, k, v = (said(plane, 0, [1, 2, 3]) for plane in (INDEX, K, V))
    with pytest.raises(WrongStage, match="put"):
        kept.put(0, index=index)
    kept.begin(Batch((Feed(0, Span(0, 3)),)))
    for layer, name, values, says in (
        (0, "index", index[:2], r"index of layer 0 is \[3, 1, 6\] of floats, not \[2, 1, 6\]"),
        (0, "index", index.int(), "of floats"),
        (0, "scores", index, "layer 0 has no plane scores, only k, v, index"),
        (1, "index", index, "layer 1 has no plane index, only k, v"),
        (5, "index", index, "layer 5 is in no group"),
    ):
        with nothing_changes(kept), pytest.raises(BadRequest, match=says):
            kept.put(layer, **{name: values})
    kept.put(0, index=index)
    kept.put(0, k, v)
    for again, says in (
        (lambda: kept.put(0, index=index + 1), "layer 0 was given its index of this step before"),
        (lambda: kept.put(0, k=k + 1), "layer 0 was given its k of this step before"),
        (lambda: kept.put(0, k + 1, v), "layer 0 was given its k and v of this step before"),
    ):
        with nothing_changes(kept), pytest.raises(BadRequest, match=says):
            again()
    kept.abandon()


def test_its_bytes_are_counted_and_it_keeps_its_own_type() -> None:
    stored = tuple(Plane(plane.name, plane.heads, plane.size, Storage("int8")) for plane in (K, V))
    with_index, without = (
        memory(Reference(), Group("indexed", Causal(), planes, (0, 2))) for planes in ((*stored, INDEX), stored)
    )
    assert (
        with_index.storage.bytes - without.storage.bytes == 2 * 61 * 6 * 4
    )  # layers, cells and the null cell, elements, bytes
    with_index.begin(Batch((Feed(0, Span(0, 3)),)))
    exact = torch.rand(3, 1, 6, generator=torch.Generator().manual_seed(1))
    with_index.put(0, index=exact)
    (read,) = with_index.get(0).plane_in_order("index")
    assert torch.equal(read, exact)
