"""What the prefix tree costs, counted in lines of Python that run in it: the path of a prompt, never the whole tree."""

import random
from collections.abc import Callable
from hashlib import blake2b
from itertools import islice
from typing import Any

import pytest

from benchmarks.hits import Serving
from benchmarks.prefix import NODE, Spans, _insert, bushy, grown
from benchmarks.replay import Replay, Turn, _completion
from kvcellar.engine.core.request import Completion, Status
from kvcellar.memory.prefix import node
from kvcellar.memory.prefix.listing import Walk
from kvcellar.memory.prefix.node import TOKEN, Kept, key_of
from kvcellar.memory.prefix.tree import Tree
from kvcellar.memory.prefix.why import _diverging
from kvcellar.memory.prefixes import SLICE
from tests.counted import lines


def some(seed: int, tokens: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 50_000) for _ in range(tokens)]


def lookup(tree: Tree, text: list[int]) -> int:
    return lines(lambda: tree.match(tree.root(""), key_of(text), len(text) - 1))


def test_a_lookup_costs_the_nodes_of_its_path_in_a_tree_of_any_size() -> None:
    assert lookup(bushy(100), some(9, 64)) == lookup(bushy(5000), some(9, 64))
    tree, texts = grown(40_000)
    for text in texts[::10]:
        path = len(tree.match(tree.root(""), key_of(text), len(text) - 1).path)
        assert lookup(tree, text) <= 40 + 12 * path


def test_naming_what_diverges_costs_the_same_beside_any_number_of_texts() -> None:
    def named(tree: Tree) -> int:
        found = lines(lambda: _diverging(tree, "", key_of([1])))
        assert _diverging(tree, "", key_of([1])) is not None
        return found

    assert named(bushy(100)) == named(bushy(5000))


def test_a_lookup_costs_the_logarithm_of_the_tokens_of_an_edge() -> None:
    costs: list[int] = []
    for tokens in (1000, 16_000):
        tree, (text,) = grown_by_one(tokens)
        costs.append(lookup(tree, [*text[: tokens // 2], 1, 2, 3]))
    assert costs[1] <= costs[0] + 4 * 6, "four more halvings"


def grown_by_one(tokens: int) -> tuple[Tree, list[list[int]]]:
    """A tree with one node of at least so many tokens."""
    replay = Replay("full", cells=2 * tokens, rows=0)
    replay.serve(Turn(text := some(1, tokens), [1]))
    return replay.manager.prefixes.tree, [text]


def test_an_eviction_costs_the_same_in_a_tree_of_any_size() -> None:
    costs: list[int] = []
    for nodes in (100, 1000, 10_000):
        tree = bushy(nodes)
        costs.append(max(lines(lambda tree=tree: tree.evict_leaf(NODE)) for _ in range(40)))
    assert max(costs) == min(costs) < 200


@pytest.fixture
def hashed(monkeypatch) -> list[int]:
    """The bytes of each update of a digest of a path."""
    sizes: list[int] = []

    class Counted:
        def __init__(self, state: Any) -> None:
            self._state, self.digest = state, state.digest

        def update(self, data: bytes) -> None:
            sizes.append(len(data))
            self._state.update(data)

        def copy(self) -> "Counted":
            return Counted(self._state.copy())

    monkeypatch.setattr(
        node, "blake2b", lambda data=b"", digest_size=16: Counted(blake2b(data, digest_size=digest_size))
    )
    return sizes


def test_evicting_a_long_leaf_costs_a_constant_for_each_of_its_tokens(hashed: list[int]) -> None:
    replay = Replay("full", cells=100_000, rows=0)
    replay.serve(Turn(some(1, tokens := 60_000), [1]))
    tree, calls, left, seen = replay.manager.prefixes.tree, 0, tokens, []
    while n := tree.evict_leaf(1):
        calls, left = calls + 1, left - n
        seen.append(n / (left + n))
    assert max(seen[: len(seen) // 2]) < 0.02, "much more was evicted than was needed"
    assert calls < 350
    assert sum(hashed) < 70 * TOKEN * tokens


def test_evicting_short_leaves_below_a_long_text_does_not_cost_the_text_each_time(hashed: list[int]) -> None:
    replay, shared = Replay("full", cells=50_000, rows=0), some(1, 20_000)
    for seed in range(20):
        replay.serve(Turn([*shared, *some(seed, 40)], [1]))
    tree = replay.manager.prefixes.tree
    hashed.clear()
    for _ in range(20):
        assert 0 < tree.evict_leaf(16) <= 42
    assert sum(hashed) < 2 * TOKEN * len(shared)


def test_an_eviction_passes_over_few_checkpoints_that_would_free_nothing() -> None:
    costs: list[int] = []
    for texts in (4, 40):
        replay = Replay("hybrid", cells=100_000, rows=1000)
        for seed in range(texts):
            replay.serve(Turn(some(seed, 1040), [1]))
        tree, tried = replay.manager.prefixes.tree, list[Kept]()
        number = sum(len(one.checkpoints) for one in tree.nodes())
        assert number > 16
        assert tree.evict_checkpoint(lambda kept, tried=tried: bool(tried.append(kept)), worth=2.0**60) is None
        assert len(tried) == 16
        found = tree.evict_checkpoint(lambda kept: False)
        assert found is tried[0], "it was not the next one"
        costs.append(lines(lambda tree=tree: tree.evict_checkpoint(lambda kept: False)))
        tree.check()
    assert costs[1] <= costs[0] < 800


@pytest.mark.parametrize(("kind", "group"), [("sliding", "window"), ("chunked", "chunk"), ("hybrid", None)])
def test_an_eviction_of_a_checkpoint_costs_the_same_beside_any_number(kind: str, group: str | None) -> None:
    costs: list[list[int]] = []
    for texts in (20, 60):
        replay = Replay(kind, cells=100_000, rows=1000)
        for seed in range(texts):
            replay.serve(Turn(some(seed, 520), [1]))
        costs.append([lines(lambda r=replay: r.manager.evict(group, 1)) for _ in range(8)])
    assert max(costs[1]) <= max(costs[0]) < 2000


def dense(tokens: int) -> Replay:
    """One text with a checkpoint every 16 tokens."""
    replay = Replay("hybrid", cells=2 * tokens, rows=tokens)
    replay.manager.prefixes._every = 16
    replay.serve(Turn(some(1, tokens), [1]))
    assert replay.checkpoints >= tokens // 16
    return replay


def test_resuming_and_evicting_cost_the_same_beside_any_number_of_checkpoints_of_a_node() -> None:
    costs: list[tuple[int, ...]] = []
    for tokens in (1000, 16_000):
        replay, text = dense(tokens), some(1, tokens)
        tree, manager = replay.manager.prefixes.tree, replay.manager
        costs.append(
            (
                lookup(tree, text),
                lines(lambda r=replay, t=text: r.serve(Turn([*t, *some(2, 20)], [1])), below="/memory/prefix/"),
                lines(lambda m=manager: m.evict(None, 1)),
                lines(lambda t=tree: t.evict_leaf(300)),
            )
        )
    for few, many in zip(*costs, strict=True):
        assert many <= 1.05 * few + 30, costs


def test_a_cached_prompt_costs_the_same_for_any_number_of_cached_tokens() -> None:
    costs: list[int] = []
    for tokens in (256, 4096):
        replay = Replay("full", cells=3 * tokens + 1000, rows=0)
        shared = some(0, tokens)
        replay.serve(Turn(shared, [1]))
        before = replay.computed
        costs.append(lines(lambda r=replay, s=shared: r.serve(Turn([*s, *some(1, 32)], [1])), below="/memory/prefix/"))
        assert replay.computed - before == 32
    assert costs[1] <= costs[0] + 6 * 24, "some halvings more"
    assert costs[0] < 600


def begun(replay: Replay, prompt: list[int]) -> Completion:
    completion = _completion(prompt)
    replay.manager.admit(completion)
    replay.manager.start(completion)
    completion.become(Status.PREFILL)
    replay._step(completion, len(prompt))
    completion.become(Status.DECODE)
    return completion


def test_a_decoding_step_does_not_enter_the_tree() -> None:
    replay = Replay("full", cells=10_000, rows=0)
    running = [begun(replay, some(seed, 40)) for seed in range(32)]

    def step() -> None:
        for completion in running:
            completion.tokens.append(7)
            replay._step(completion, 1)

    assert lines(step, below="/memory/prefix/") == 0
    assert 0 < lines(step, below="/memory/prefixes") <= 32 * 8, "some lines for each sequence"


def flat(nodes: int) -> Tree:
    """So many texts that differ in their first token."""
    claims = Spans()
    tree = Tree(claims, anywhere=True)
    for first in range(nodes):
        _insert(tree, claims, [first, 1, 2])
    return tree


SHAPES = pytest.mark.parametrize(
    "shape", [flat, bushy, lambda nodes: grown(150 * nodes)[0]], ids=["flat", "bushy", "deep"]
)


@SHAPES
def test_a_slice_of_a_listing_costs_the_same_in_a_tree_of_any_size_and_shape(shape) -> None:
    for nodes in (300, 3000):
        walk = Walk(shape(nodes))
        while not walk.over:
            assert lines(lambda walk=walk: walk.next(32)) <= 32 * 60


def test_a_slice_of_a_listing_reads_a_bounded_number_of_tokens(monkeypatch) -> None:
    monkeypatch.setattr("kvcellar.memory.prefix.listing.BYTES", 10 * TOKEN)
    walk, slices = Walk(flat(20)), 0
    while not walk.over:
        assert len(walk.next(100)) <= 4
        slices += 1
    assert slices >= 5


@SHAPES
def test_a_slice_of_a_removal_costs_the_same_in_a_tree_of_any_size_and_shape(shape) -> None:
    for nodes in (300, 3000):
        tree = shape(nodes)
        while True:
            removal, removed = tree.discarding(tree.roots()), 0
            while went := counted(lambda removal=removal: list(islice(removal, 32)), 32 * 150):
                removed += sum(went)
            if not removed:
                break
        assert not list(tree.nodes())


def counted(act: Callable[[], list[int]], most: int) -> list[int]:
    found: list[list[int]] = []
    assert lines(lambda: found.append(act())) <= most
    return found[0]


def test_the_cache_is_cleared_in_slices() -> None:
    """Without checkpoints a slice costs its leaves."""
    replay = Replay("full", cells=100_000, rows=0)
    for seed in range(3 * SLICE):
        replay.serve(Turn(some(seed, 20), [1]))
    manager, before = replay.manager, sum(node.tokens for node in replay.manager.prefixes.tree.nodes())
    assert lines(manager.clear_some) <= SLICE * 300
    assert 0 < sum(node.tokens for node in manager.prefixes.tree.nodes()) < before
    while manager.clear_some():
        pass
    assert not list(manager.prefixes.tree.nodes())


@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_a_request_costs_the_same_beside_any_number_of_entries(kind: str) -> None:
    """From its arrival until the engine rests. After few requests, few uses have reached a further span of ages."""
    costs: list[int] = []
    for tokens in (1000, 10_000):
        serving = Serving(kind, cells=tokens * 4 // 3, rows=0)
        serving.fill(tokens)
        costs.append(lines(lambda s=serving: [s.hit() for _ in range(16)]))
    assert costs[1] <= 1.25 * costs[0], costs


def test_a_request_costs_about_the_same_beside_any_number_of_entries_while_it_evicts() -> None:
    """Texts are in somewhat more runs there."""
    costs: list[int] = []
    for tokens in (1000, 10_000):
        serving = Serving("full", cells=tokens * 4 // 3, rows=0)
        serving.fill(tokens)
        serving.overfill()
        costs.append(lines(lambda s=serving: [s.hit() for _ in range(16)]))
        assert serving.manager.prefixes.losses.cause, "nothing was evicted"
    assert costs[1] <= 1.5 * costs[0], costs


def test_an_engine_that_rests_costs_the_same_beside_any_number_of_entries() -> None:
    costs: list[int] = []
    for tokens in (500, 5000):
        serving = Serving("sliding", cells=2 * tokens, rows=0)
        serving.fill(tokens)
        costs.append(lines(lambda s=serving: s.loop.turn()))
    assert costs[0] == costs[1] < 100
