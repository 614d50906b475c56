"""The tree against sets of prefixes, on random histories: what it finds, keeps and evicts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.memory.prefix.node import Node, ids_of, key_of, path_key, root_of
from kvcellar.memory.prefix.tree import Tree
from tests.prefix.claims import TokenClaims

Tokens = tuple[int, ...]

UNIT = st.sampled_from([(1,), (2,), (3,), (0, 1, 1), (0, 1, 2)])
TEXT = st.lists(UNIT, min_size=1, max_size=8)
SPACE = st.sampled_from(["", "b"])


@dataclass(frozen=True)
class Run:
    """A request: its prompt, its checkpoints among the borders of its units, and after which units steps end."""

    space: str
    units: list[Tokens]
    marks: list[int]
    steps: list[int]
    keep: bool  # it stays locked


RUN = st.builds(
    Run, SPACE, TEXT, st.lists(st.integers(1, 8), max_size=3), st.lists(st.integers(1, 7), max_size=2), st.booleans()
)
ACTION = st.one_of(
    RUN,
    st.tuples(st.just("leaf"), st.integers(1, 5)),
    st.tuples(st.just("checkpoint"), st.integers(0, 6)),
    st.tuples(st.just("window"), st.integers(1, 40)),
    st.tuples(st.just("release"), st.integers(0, 5)),
)


@dataclass
class World:
    """A tree, and what must be in it: every prefix of a token sequence whose memory is held, and every one that has a
    checkpoint. With a `window`, claims have tails, and a token sees so many, its own included."""

    anywhere: bool
    window: int = 0
    locked: list[tuple[str, Tokens, Node]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.claims = TokenClaims(tails=self.window > 0)
        lowest = (lambda pos: max(0, pos - self.window + 1)) if self.window else None
        self.tree = Tree(self.claims, anywhere=self.anywhere, lowest=lowest)

    def held(self) -> tuple[set[tuple[str, Tokens]], set[tuple[str, Tokens]]]:
        """By walking all nodes: the prefixes that claims hold, and those that have a checkpoint."""
        prefixes: set[tuple[str, Tokens]] = set()
        points: set[tuple[str, Tokens]] = set()
        for space in ("", "b"):
            rest = [((), child) for child in self.tree.root(space).children.values()]
            while rest:
                before, node = rest.pop()
                tokens = before + self.claims.tokens[node.claim]
                assert key_of(tokens[node.start :]) == node.edge
                assert self.claims.spans[node.claim].start == node.start == len(before)
                prefixes |= {(space, tokens[:n]) for n in range(node.start + 1, node.end + 1)}
                for pos, seen in self.claims.points[node.claim].items():
                    assert seen == tokens[:pos], "a checkpoint is of other tokens"
                    points.add((space, seen))
                rest += [(tokens, child) for child in node.children.values()]
        return prefixes, points

    def tails(self) -> set[tuple[str, Tokens]]:
        """The prefixes whose last token is in the tail of a claim."""
        return {
            (root_of(node).namespace, tokens[:n])
            for node in self.tree.nodes()
            for tokens in [tuple(ids_of(path_key(node, node.end)))]
            for n in range(self.claims.tails[node.claim] + 1, node.end + 1)
        }

    def resumable(self, space: str, tokens: Tokens, points: set[tuple[str, Tokens]], borders: Sequence[int]) -> bool:
        """Whether a checkpoint is behind these tokens, or else tails have what the next one sees."""
        seen = range(max(0, len(tokens) - self.window + 1), len(tokens))
        within = self.window and len(tokens) in borders
        return (space, tokens) in points or bool(
            within and {(space, tokens[: pos + 1]) for pos in seen} <= self.tails()
        )

    def check(self) -> None:
        self.tree.check()
        assert {node.claim for node in self.tree.nodes()} == set(self.claims.spans), "a claim is in no node"
        prefixes, _ = self.held()
        for space, tokens, _ in self.locked:
            assert not tokens or (space, tokens) in prefixes, "what a sequence uses was evicted"

    def run(self, run: Run) -> None:
        tokens = [token for unit in run.units for token in unit]
        borders = [sum(map(len, run.units[:n])) for n in range(len(run.units) + 1)]
        marks = {borders[n] for n in run.marks if n < len(borders)} | ({len(tokens)} if run.keep else set())
        prefixes, points = self.held()
        root, key = self.tree.root(run.space), key_of(tokens)
        match = self.tree.match(root, key, len(tokens) - 1)
        known = [n for n in range(len(tokens) + 1) if not n or (run.space, tuple(tokens[:n])) in prefixes]
        assert match.matched == known[-1]
        possible = [0] + [
            n
            for n in range(1, min(match.matched, len(tokens) - 1) + 1)
            if (n in borders if self.anywhere else self.resumable(run.space, tuple(tokens[:n]), points, borders))
        ]
        assert match.resume == possible[-1]
        assert [node.start for node in match.path] == [0, *(node.end for node in match.path[:-1])][: len(match.path)]
        assert not match.path or match.path[-1].start < match.resume <= match.path[-1].end
        node = self.tree.lock(root, match)
        self.tree.touch(node)
        at = match.resume
        for end in sorted({borders[n] for n in run.steps if n < len(borders)} | {len(tokens)}):
            if end <= at:
                continue
            claim = self.claims.make(tokens[:end], at, marks & set(range(at + 1, end + 1)))
            node, had = self.tree.insert(root, key[: 8 * end], claim, at, node, spare=lambda pos: pos % 3 == 1)
            assert had == max(n for n in range(end + 1) if not n or (run.space, tuple(tokens[:n])) in prefixes)
            prefixes, _ = self.held()
            at = end
            self.tree.check()
        held = tuple(tokens[: node.end])
        if run.keep:
            self.locked.append((run.space, held, node))
        else:
            self.tree.unlock(node)

    def evict(self, what: str, most: int) -> None:
        prefixes, points = self.held()
        if what == "leaf":
            gone = self.tree.evict_leaf(most)
            now, _ = self.held()
            free = [tokens for tokens in prefixes if not self._used(*tokens)]
            assert (gone > 0) == bool(free), "what no sequence uses could not be evicted"
            assert now <= prefixes
            assert len(prefixes) - len(now) >= gone
            assert not self.anywhere or len(prefixes) - len(now) == gone
        elif what == "window":
            before = self.tails()
            gone = self.tree.evict_window(lambda kept: most % 2 > 0, most)
            _, now = self.held()
            assert gone == bool(points or before)
            assert now <= points
            assert not gone or len(now) < len(points) or self.tails() < before
        else:
            values = [kept.value for node in self.tree.nodes() for kept in node.checkpoints.values()]
            assert len(values) == len(points)
            worth = self.tree.worth(most, spare=most % 2 > 0) if most else inf
            gone = self.tree.evict_checkpoint(worth=worth)
            _, now = self.held()
            assert now <= points
            assert (gone is not None) == (bool(values) and min(values) <= worth)
            assert gone is None or gone.value == min(values)
            assert len(points) - len(now) == (gone is not None)

    def _used(self, space: str, tokens: Tokens) -> bool:
        return any(of == space and held[: len(tokens)] == tokens for of, held, _ in self.locked)

    def play(self, action: object) -> None:
        match action:
            case Run():
                self.run(action)
            case ("release", int(n)):
                if self.locked:
                    self.tree.unlock(self.locked.pop(n % len(self.locked))[2])
            case (str(what), int(most)):
                self.evict(what, most)


@pytest.mark.parametrize(("anywhere", "window"), [(True, 0), (False, 0), (False, 1), (False, 3), (False, 9)])
@given(actions=st.lists(ACTION, max_size=25))
def test_it_finds_and_keeps_what_the_sets_of_prefixes_say(anywhere, window, actions) -> None:
    world = World(anywhere, window)
    for action in actions:
        world.play(action)
        world.check()
    for _, _, node in world.locked:
        world.tree.unlock(node)
    world.locked.clear()
    while world.tree.evict_leaf(3):
        pass
    world.check()
    assert not world.claims.spans, "memory is left that nothing can evict"


def test_a_locked_node_stays_apart_from_its_only_child() -> None:
    world = World(anywhere=True)
    world.run(Run("", [(1,), (2,), (3,)], [], [], keep=False))
    world.run(Run("", [(1,), (2,)], [], [], keep=True))
    world.run(Run("", [(1,), (2,), (3,), (3,)], [], [], keep=False))  # its end settles the child
    (_, _, node) = world.locked.pop()
    assert (node.start, node.end, node.users) == (1, 2, 1)
    world.check()
    world.tree.unlock(node)
    assert [(one.start, one.end, one.users) for one in world.tree.nodes()] == [(0, 1, 0), (1, 4, 0)]
    world.check()


def test_nodes_of_one_class_become_one_when_the_last_branch_but_one_goes() -> None:
    world = World(anywhere=True)
    for token in (3, 4):
        world.run(Run("", [(1,), (2,), (token,)], [], [], keep=False))
    (above,) = [node for node in world.tree.nodes() if node.children]
    for node in world.tree.nodes():
        assert above.use is not None
        assert node.use is not None
        node.use.kind = above.use.kind
    assert world.tree.evict_leaf(1) == 1
    assert [(one.start, one.end) for one in world.tree.nodes()] == [(0, 3)]
    world.check()


@given(
    gone=st.integers(0, 60),
    lasting=st.sets(st.integers(1, 63)),
)
@settings(max_examples=50)
def test_spare_checkpoints_become_sparser_and_go_before_any_other(gone: int, lasting: set[int]) -> None:
    """Of those of one text: no two that are left are much farther apart than others, while any could be spared."""
    claims = TokenClaims()
    tree = Tree(claims, anywhere=False)
    root, tokens = tree.root(""), list(range(65))
    claim = claims.make(tokens, 0, set(range(1, 65)))
    node, _ = tree.insert(root, key_of(tokens[:64]), claim, 0, root, spare=lambda pos: pos not in lasting and pos < 64)
    for _ in range(gone):
        tree.evict_checkpoint()
    left = sorted(node.checkpoints)
    kept = [pos for pos in left if pos not in lasting and pos < 64]
    assert len(left) == 64 - gone
    assert not kept or lasting <= {*left}, "one that is not spare went before one that is"
    if kept:
        saved = [pos - before for before, pos in zip([0, *left], left, strict=False) if pos in kept]
        assert max(saved) <= 2 * (1 + gone // max(1, len(kept))) + 2
    tree.check()
