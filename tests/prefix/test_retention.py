"""Retention in the tree against one record for each token: what is matched, expires, is pinned and is evicted first."""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.memory.prefix.node import Node, Use, key_of
from kvcellar.memory.prefix.order import Part
from kvcellar.memory.prefix.tree import Tree
from kvcellar.memory.retention import DEFAULT, Retention, stronger
from tests.prefix.claims import TokenClaims

Tokens = tuple[int, ...]

TEXT = st.lists(st.integers(1, 2), min_size=1, max_size=5).map(tuple)
MOST = Part(tokens=7, checkpoints=2)
QUOTA = Part(tokens=5, checkpoints=2)
RUN = st.tuples(
    st.just("run"),
    TEXT,
    st.builds(
        Retention,
        st.integers(-1, 1),
        st.just(False),
        st.one_of(st.none(), st.integers(1, 9).map(float)),
        st.sampled_from(["", "a", "b"]),
    ),
    st.booleans(),  # it stays locked
)
ACTION = st.one_of(
    RUN,
    RUN,
    st.tuples(st.just("leaf"), st.integers(1, 4)),
    st.tuples(st.just("checkpoint")),
    st.tuples(st.just("release"), st.integers(0, 5)),
    st.tuples(st.just("wait"), st.integers(1, 4)),
    st.tuples(st.just("expire"), st.integers(0, 2)),
    st.tuples(st.just("pin"), TEXT),
    st.tuples(st.just("unpin")),
)


@dataclass
class World:
    """A tree, and of each prefix that is in it the retention that its requests together have stated."""

    anywhere: bool
    now: float = 0.0
    claims: TokenClaims = field(default_factory=TokenClaims)
    known: dict[Tokens, Retention] = field(default_factory=dict)
    pins: list[Tokens] = field(default_factory=list)  # the oldest first
    locked: list[tuple[Tokens, Node]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tree = Tree(self.claims, anywhere=self.anywhere, pins=MOST, quota=QUOTA, clock=lambda: self.now)

    def nodes(self) -> dict[Tokens, Node]:
        """The node of each prefix, by its last token."""
        found: dict[Tokens, Node] = {}
        rest = [((), child) for child in self.tree.root("").children.values()]
        while rest:
            before, node = rest.pop()
            tokens = before + self.claims.tokens[node.claim]
            found |= {tokens[:n]: node for n in range(node.start + 1, node.end + 1)}
            rest += [(tokens, child) for child in node.children.values()]
        return found

    def pinned(self, prefix: Tokens) -> bool:
        return any(pin[: len(prefix)] == prefix for pin in self.pins)

    def used(self, prefix: Tokens) -> bool:
        return any(tokens[: len(prefix)] == prefix for tokens, _ in self.locked)

    def check(self) -> None:
        self.tree.check()
        nodes = self.nodes()
        assert nodes.keys() <= self.known.keys()
        self.known = {prefix: kept for prefix, kept in self.known.items() if prefix in nodes}
        self.pins = [pin for pin in self.pins if pin in nodes]
        for prefix, node in nodes.items():
            assert node.retention == replace(self.known[prefix], pinned=self.pinned(prefix))
        assert all(tokens in nodes for tokens, _ in self.locked if tokens), "what a sequence uses has gone"
        pinned = {prefix for prefix in nodes if self.pinned(prefix)}
        assert self.tree.pins.tokens == len(pinned) <= 7
        assert self.tree.pins.idle_tokens == len({prefix for prefix in pinned if not self.used(prefix)})
        assert self.tree.pins.checkpoints <= 2

    def fresh(self) -> set[Tokens]:
        """The prefixes that have not expired."""
        return {prefix for prefix, kept in self.known.items() if not kept.expired(self.now)}

    def state(self, tokens: Tokens, end: int, retention: Retention) -> None:
        """A request with this retention has used the first `end` tokens."""
        for n in range(1, end + 1):
            before = self.known.get(tokens[:n])
            self.known[tokens[:n]] = retention if before is None else stronger(before, retention)

    def run(self, tokens: Tokens, retention: Retention, keep: bool) -> None:
        if retention.expires is not None:
            retention = replace(retention, expires=self.now + retention.expires)
        root, key = self.tree.root(""), key_of(tokens)
        match = self.tree.match(root, key, len(tokens) - 1)
        fresh = self.fresh()
        assert match.matched == max(n for n in range(len(tokens) + 1) if not n or tokens[:n] in fresh)
        assert not self.anywhere or match.resume == min(match.matched, len(tokens) - 1)
        node = self.tree.lock(root, match)
        self.tree.touch(node)
        self.tree.strengthen(node, retention)
        self.state(tokens, match.resume, retention)
        self.tree.check()
        claim = self.claims.make(list(tokens), match.resume, {len(tokens) - 1, len(tokens)})
        node, _ = self.tree.insert(root, key, claim, match.resume, node, retention)
        self.state(tokens, len(tokens), retention)
        if keep:
            self.locked.append((tokens, node))
        else:
            self.tree.unlock(node)

    def evict(self, most: int | None = None) -> None:
        before, known = self.nodes(), dict(self.known)
        candidates = {id(node): node for node in before.values() if node.evictable}
        held = {"a": 0, "b": 0} | {kept.owner: 0 for kept in known.values()}
        for prefix in before:
            held[known[prefix].owner] += 1
        if most is None:
            self.tree.evict_checkpoint()
            after = self.nodes()
            gone = before.keys() - after.keys()
        else:
            n = self.tree.evict_leaf(most)
            after = self.nodes()
            gone = before.keys() - after.keys()
            assert (n > 0) == bool(candidates), "what no sequence uses could not be evicted"
            victims = {id(before[prefix]): known[prefix].owner for prefix in gone}
            first = [node for node in candidates.values() if held[owner := node.retention.owner] > 5 and owner]
            if first:
                assert all(owner and held[owner] > 5 for owner in victims.values()), "an owner in its quota was first"
            elif candidates and self.anywhere:
                (victim,) = victims
                assert candidates[victim].value == min(node.value for node in candidates.values())
        assert not any(self.used(prefix) or self.pinned(prefix) for prefix in gone)

    def play(self, action: tuple) -> None:
        match action:
            case ("run", tokens, retention, keep):
                self.run(tokens, retention, keep)
            case ("release", n):
                if self.locked:
                    self.tree.unlock(self.locked.pop(n % len(self.locked))[1])
            case ("leaf" | "checkpoint", *most):
                self.evict(*most)
            case ("wait", seconds):
                self.now += seconds
            case ("expire", most):
                self.expire(most)
            case ("pin", tokens):
                self.pin(tokens)
            case _:
                assert self.tree.pins.release_oldest() == bool(self.pins)
                self.pins = self.pins[1:]

    def expire(self, most: int) -> None:
        if not self.tree.expire(most) and most:
            assert all(self.used(prefix) for prefix in self.known.keys() - self.fresh()), "it was not removed"

    def pin(self, tokens: Tokens) -> None:
        match = self.tree.match(self.tree.root(""), key_of(tokens), len(tokens))
        before = {prefix for prefix in self.known if self.pinned(prefix)}
        pinned = self.tree.pin(self.tree.root(""), key_of(tokens))
        new = {tokens[:n] for n in range(1, match.resume + 1)} - before
        fits = len(before) + len(new) <= 7
        assert pinned in ((0, match.resume) if fits and not self.anywhere else (match.resume if fits else 0,))
        if pinned and tokens[:pinned] not in self.pins:
            self.pins.append(tokens[:pinned])


@pytest.mark.parametrize("anywhere", [True, False])
@settings(max_examples=max(120, settings.default.max_examples))
@given(actions=st.lists(ACTION, min_size=5, max_size=40))
def test_nodes_are_kept_as_all_requests_on_them_have_stated(anywhere, actions) -> None:
    world = World(anywhere)
    for action in actions:
        world.play(action)
        world.check()
    for _, node in world.locked:
        world.tree.unlock(node)
    while world.tree.pins.release_oldest():
        pass
    while world.tree.evict_leaf(3):
        pass
    world.tree.check()
    assert not world.claims.spans, "memory is left that nothing can evict"


def test_what_expires_is_gone_one_second_later_and_its_shared_prefix_stays() -> None:
    world = World(anywhere=True)
    gone: list[tuple[int, int]] = []
    world.tree = Tree(
        world.claims, anywhere=True, evicted=lambda node, pos: gone.append((pos, node.end)), clock=lambda: world.now
    )
    world.run((1, 1), Retention(), keep=False)
    world.run((1, 1, 2, 2), Retention(expires=5.0), keep=False)
    world.run((1, 1, 2, 2, 1), Retention(expires=9.0), keep=False)
    for now, left in ((4.9, 5), (5.0, 5), (8.9, 5), (9.0, 2)):
        world.now = now
        assert world.tree.match(world.tree.root(""), key_of((1, 1, 2, 2, 1)), 5).matched == left
    assert world.tree.expire(10)
    assert gone == [(2, 5)]
    assert set(world.nodes()) == {(1,), (1, 1)}


@pytest.mark.parametrize("anywhere", [True, False])
def test_what_expires_while_it_is_used_is_removed_after_its_last_use(anywhere) -> None:
    world = World(anywhere)
    world.run((1, 1, 2), Retention(expires=5.0), keep=True)
    world.now = 6.0
    while world.tree.expire(10):
        world.check()
    assert len(world.nodes()) == 3
    world.tree.unlock(world.locked.pop()[1])
    assert world.tree.expire(10)
    assert not world.nodes()


def test_a_pin_inside_another_one_ends_without_it() -> None:
    world = World(anywhere=True)
    for tokens in ((1, 2), (1, 2, 1, 2)):
        world.run(tokens, Retention(), keep=False)
        world.pin(tokens)
        world.check()
    world.run((1, 2, 1, 2), Retention(), keep=False)
    world.check()
    assert world.tree.pins.tokens == 4
    for left in (4, 0):
        assert world.tree.pins.release_oldest()
        world.pins = world.pins[1:]
        world.check()
        assert world.tree.pins.tokens == left


def test_no_more_is_pinned_than_may_be() -> None:
    world = World(anywhere=True)
    pinned: list[int] = []
    for tokens in ((1,) * 5, (2,) * 3, (3,) * 2):
        world.run(tokens, Retention(), keep=False)
        pinned.append(world.tree.pin(world.tree.root(""), key_of(tokens)))
        world.tree.check()
    assert pinned == [5, 0, 2]


def test_a_flood_of_one_owner_leaves_what_others_have_within_their_quota() -> None:
    """The flood has the higher priority and is used again; what it has beyond its quota goes first nevertheless."""
    world = World(anywhere=True)
    for number in range(2):
        world.run((2, 3, 4 + number), Retention(owner="b"), keep=False)
    mine = set(world.nodes())
    for number in range(64):
        world.run((1, *(10 + int(bit) for bit in f"{number:06b}")), Retention(priority=8, owner="a"), keep=False)
        while len(world.nodes()) > 24:
            assert world.tree.evict_leaf(1)
        world.tree.check()
    assert mine <= set(world.nodes())


def entered(world: World, token: int, retention: Retention = DEFAULT, last: Use | None = None) -> None:
    """A leaf of one token, of the request that began last."""
    root = world.tree.root("")
    claim = world.claims.make([token], 0, set())
    world.tree.share(root)
    node, _ = world.tree.insert(root, key_of([token]), claim, 0, root, retention, last=last)
    world.tree.unlock(node)


def test_each_level_of_priority_doubles_what_a_leaf_is_worth() -> None:
    world = World(anywhere=True)
    for priority in (0, 2, 1, -1):
        entered(world, 5 + priority, Retention(priority=priority))
    values = {tokens[0] - 5: node.value for tokens, node in world.nodes().items()}
    assert [values[level] / values[-1] for level in (0, 1, 2)] == [2, 4, 8]
    gone: list[int] = []
    while left := world.nodes():
        world.tree.evict_leaf(1)
        gone += [tokens[0] - 5 for tokens in left.keys() - world.nodes().keys()]
    assert gone == [-1, 0, 1, 2]


def test_what_is_announced_to_recur_is_worth_as_much_as_what_was_used_again() -> None:
    world = World(anywhere=True)
    returns = world.tree._order.returns
    for _ in range(100):  # what was used again is used once more now and then, the rest is not
        world.run((1, 1), DEFAULT, keep=False)
        entered(world, 9)
        world.known[(9,)] = DEFAULT
        world.tree.evict_leaf(1)
        world.check()
    last = world.tree.touch(world.tree.root(""), recurring=True)
    for token, before in ((2, None), (3, last)):
        entered(world, token, last=before)
    values = {tokens: node.value for tokens, node in world.nodes().items()}
    first = returns.use()
    once, again = returns.worth(first), returns.worth(returns.use(first))
    assert (values[(2,)], values[(3,)]) == (once, again)
    assert once != again


@pytest.mark.parametrize("owned", [False, True])
def test_an_eviction_looks_at_as_few_entries_in_a_large_tree_as_in_a_small_one(owned) -> None:
    """With quotas, too, where owners are above theirs."""

    def looked_at(leaves: int) -> int:
        world = World(anywhere=True)
        owners = ["a", "b", "c"] if owned else [""]
        root = world.tree.root("")
        for number in range(leaves):
            tokens, retention = [number + 1, 1], Retention(owner=owners[number % len(owners)])
            world.tree.share(root)
            claim = world.claims.make(tokens, 0, set())
            world.tree.unlock(world.tree.insert(root, key_of(tokens), claim, 0, root, retention)[0])
        looks = 0

        def counted(node: Node) -> bool:
            nonlocal looks
            looks += 1
            return node.evictable

        ranking = world.tree._order.leaves
        for heap in (ranking._all, *ranking._of.values()):
            heap._live = counted
        for _ in range(100):
            assert world.tree.evict_leaf(1)
        return looks

    assert looked_at(2400) <= 1.5 * looked_at(240)
