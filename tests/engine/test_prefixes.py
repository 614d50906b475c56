"""Sequences that begin in the prefix tree read what they would have computed, whatever was shared, split or evicted.

K and V say which token they are of, at which position; a state is the sum of what came before it.
"""

from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.memory.attention.sdpa import Sdpa
from kvcellar.memory.cells.layouts import Causal, Chunked, Sliding
from kvcellar.memory.kv.group import Group
from kvcellar.memory.memory import Memory
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.prefix.node import key_of
from kvcellar.memory.prefixes import LIKELY, NAMESPACES, Branches, Prefix, Prefixes
from kvcellar.memory.shapes import Plane, Recurrent, StatePlane
from kvcellar.memory.spans import Span

PLANES = (Plane("k", 1, 4), Plane("v", 1, 4))
LAYOUTS = {"full": Causal(), "window": Sliding(3), "chunk": Chunked(4)}
KINDS = {
    "full": (("full",), False),
    "sliding": (("full", "window"), False),
    "only windows": (("window", "chunk"), False),
    "hybrid": (("full",), True),
    "recurrent": ((), True),
    "all": (("full", "window", "chunk"), True),
}
STATE = Recurrent({9: (StatePlane("sum", (1,), "float32"),)})


def memory(kind: str) -> Memory:
    names, recurrent = KINDS[kind]
    return Memory(
        [Group(name, LAYOUTS[name], PLANES, (layer,)) for layer, name in enumerate(names)],
        cells=dict.fromkeys(names, 200),
        dtype=torch.float32,
        device="cpu",
        backend=Sdpa(),
        recurrent=STATE if recurrent else None,
        rows=100 if recurrent else 0,
    )


def spelt(tokens: list[int], span: Span) -> torch.Tensor:
    """[n,1,4], of the tokens and their positions."""
    ids = torch.tensor(tokens[span.start : span.end], dtype=torch.float32)
    return (100 * ids + torch.arange(span.start, span.end)).view(-1, 1, 1).expand(-1, 1, 4)


@dataclass(eq=False)
class Running:
    seq: int
    tokens: list[int]
    prefix: Prefix
    read: int


@dataclass
class World:
    kind: str
    running: list[Running] = field(default_factory=list)
    seqs: int = 0

    def __post_init__(self) -> None:
        self.memory = memory(self.kind)
        self.layers = range(len(KINDS[self.kind][0]))
        self.prefixes = Prefixes(self.memory, every=8, spare=4)

    def begin(self, space: str, tokens: list[int], marks: list[int]) -> None:
        self.seqs += 1
        expected = self.prefixes.restorable(space, key_of(tokens))
        prefix = self.prefixes.restore(self.seqs, space, key_of(tokens), marks)
        assert self.prefixes.tree.peek("unknown") is not self.prefixes.tree.peek("unknown"), "looking made a root"
        assert prefix.restored == expected <= prefix.matched <= len(tokens)
        assert prefix.restored < len(tokens)
        assert self.memory.length(self.seqs) == prefix.restored
        one = Running(self.seqs, tokens, prefix, prefix.restored)
        self.running.append(one)
        if one.read:
            self.look(one)

    def step(self, one: Running, n: int) -> None:
        """Read up to `n` more tokens, and give them to the tree."""
        new = Span(one.read, min(one.read + n, len(one.tokens)))
        if not len(new):
            return
        places, claimed = self.prefixes.checkpoints(one.prefix, new, spare=True), self.prefixes.claimed(one.prefix, new)
        plan = self.memory.begin(Batch((Feed(one.seq, new, checkpoints=places, claimed=claimed),)))
        self._put(one, new)
        if plan.states:
            self._put_states(one, new, plan)
        made = self.memory.commit()
        one.read = new.end
        self.prefixes.publish(one.prefix, one.tokens, one.read, made.get(one.seq))
        self.look(one)

    def _put(self, one: Running, new: Span) -> None:
        for layer in self.layers:
            values = spelt(one.tokens, new)
            self.memory.put(layer, values, values)

    def _put_states(self, one: Running, new: Span, plan) -> None:
        before = self.memory.states.read(9, plan.states)["sum"]

        def at(indices, counts):
            ids = torch.tensor(one.tokens[new.start : new.end], dtype=torch.float32)
            return {"sum": torch.stack([before[i] + ids[:n].sum() for i, n in zip(indices, counts, strict=True)])}

        self.memory.states.write(9, plan.states, at([0], [len(new)]), at=at)

    def look(self, one: Running) -> None:
        """What the next token of a sequence would see is of its own tokens."""
        new = Span(one.read, one.read + 1)
        tokens = [*one.tokens[: one.read], 7]
        plan = self.memory.begin(Batch((Feed(one.seq, new),)))
        for layer in self.layers:
            values = spelt(tokens, new)
            self.memory.put(layer, values, values)
            for found in self.memory.get(layer).in_order():
                assert torch.equal(found, spelt(tokens, Span(one.read + 1 - len(found), one.read + 1)))
        if plan.states:
            assert float(self.memory.states.read(9, plan.states)["sum"]) == sum(one.tokens[: one.read])
        self.memory.abandon()

    def end(self, one: Running, publish: bool) -> None:
        if publish:
            self.prefixes.publish(one.prefix, one.tokens, one.read, at=(one.read,))
        self.prefixes.release(one.prefix)
        if self.memory.has(one.seq):
            self.memory.drop(one.seq)
        self.running.remove(one)

    def check(self) -> None:
        self.memory.check()
        self.prefixes.check([one.prefix.node for one in self.running])


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=14)
ACTION = st.one_of(
    st.tuples(st.just("begin"), st.sampled_from(["", "b"]), TOKENS, st.lists(st.integers(1, 13), max_size=2)),
    st.tuples(st.just("step"), st.integers(0, 3), st.integers(1, 9)),
    st.tuples(st.just("end"), st.integers(0, 3), st.booleans()),
    st.tuples(st.just("evict"), st.sampled_from(["full", "window", None]), st.integers(1, 5)),
)


@pytest.mark.parametrize("kind", KINDS)
@given(actions=st.lists(ACTION, max_size=30))
def test_what_the_tree_restores_is_what_would_have_been_computed(kind, actions) -> None:
    world = World(kind)
    for action in actions:
        match action:
            case ("begin", space, tokens, marks):
                world.begin(space, list(tokens), marks)
            case ("step", which, n) if world.running:
                world.step(world.running[which % len(world.running)], n)
            case ("end", which, publish) if world.running:
                world.end(world.running[which % len(world.running)], publish)
            case ("evict", group, n):
                world.prefixes.evict(group, n) if group is not None else world.prefixes.evict_row()
        world.check()
    for one in list(world.running):
        world.end(one, publish=True)
    world.check()
    world.prefixes.clear("the test says so")
    world.check()
    assert world.memory.free() == dict.fromkeys(world.memory.free(), 200), "cells are held by nothing"
    assert world.memory.rows.free in (None, 100)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_that_was_read_is_restored_but_for_its_last_token(kind) -> None:
    world = World(kind)
    world.begin("", [1, 2, 0, 1, 1, 2, 0], [])
    first = world.running[0]
    for n in (3, 2, 2):
        world.step(first, n)
    world.begin("", [1, 2, 0, 1, 1, 2, 0], [])
    assert world.running[1].read == 6, "a running sequence's prompt is known while it runs"
    world.begin("b", [1, 2, 0, 1, 1, 2, 0], [])
    assert world.running[2].read == 0, "another namespace has its own tree"
    world.end(first, publish=True)
    world.begin("", [1, 2, 0, 1, 1, 2, 0, 5], [])
    assert world.running[2].read == 7


@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_what_was_computed_twice_is_held_once(kind) -> None:
    world = World(kind)
    for _ in range(2):
        world.begin("", [1, 2, 0, 1, 1, 2, 0], [])
    for one in world.running:
        world.step(one, 7)
    assert world.memory.free()["full"] == 200 - 7


@pytest.mark.parametrize("kind", ["hybrid", "recurrent"])
def test_where_prompts_have_parted_several_times_those_with_other_texts_resume_the_second_time(kind: str) -> None:
    """As before a date behind instructions, with a mark before them."""
    world, restored = World(kind), list[int]()
    world.prefixes = Prefixes(world.memory, every=64)
    for first, date in [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2)]:
        world.begin("", [9, 9, *[first] * 7, date, 5, 5, 5], [2])
        (one,) = world.running
        restored.append(one.prefix.restored)
        world.step(one, 99)
        world.end(one, True)
    assert restored == [0, 2, 9, 2, 9]


def test_where_prompts_part_is_learned_for_each_namespace_apart() -> None:
    """Else a client could fill the rows of others with checkpoints that they do not need."""
    prefixes = Prefixes(memory("hybrid"), every=64)
    for number in range(3):
        prefixes._wanted("a", 20, 9, [2])
        assert (9 in prefixes._wanted("a", 20, 0, [2])) == (number > 0)
    assert 9 not in prefixes._wanted("b", 20, 0, [2])
    for number in range(3 * NAMESPACES):
        prefixes._wanted(f"c{number}", 20, 0, [2])
    assert len(prefixes._branches) == NAMESPACES


@given(prompts=st.lists(st.tuples(st.lists(st.integers(1, 30), max_size=4), st.integers(0, 40)), max_size=60))
def test_expected_branches_are_inside_their_segment_and_were_seen_twice(prompts) -> None:
    branches, seen = Branches(), Counter[tuple[int, int]]()
    for given_marks, pos in prompts:
        marks = sorted({*given_marks})
        number = len([mark for mark in marks if mark <= pos])
        expected = branches.expected(marks, 50)
        for at in expected:
            place = len([mark for mark in marks if mark <= at])
            assert at < 50
            assert seen[place, at - [0, *marks][place]] > 1
        assert len(expected) <= LIKELY
        branches.note(marks, pos)
        if pos - [0, *marks][number]:
            seen[number, pos - [0, *marks][number]] += 1
