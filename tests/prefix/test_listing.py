"""A listing has every token of the tree once, with the names that records of requests use, also in slices."""

from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from kvcellar.memory.prefix.listing import Listed, Walk
from kvcellar.memory.prefix.node import Node, digest_begun, key_of
from kvcellar.memory.prefix.tree import Tree
from kvcellar.memory.prefix.why import NAME, name_of
from tests.prefix.claims import TokenClaims

TEXTS = st.lists(
    st.tuples(st.sampled_from("ab"), st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=12)), max_size=12
)


def filled(texts: list[tuple[str, list[int]]]) -> Tree:
    claims = TokenClaims()
    tree = Tree(claims, anywhere=True)
    for namespace, text in texts:
        root = tree.root(namespace)
        tree.share(root)
        tree.unlock(tree.insert(root, key_of(text), claims.make(text, 0, set()), 0, root)[0])
    return tree


def rest(walk: Walk, most: int) -> list[tuple[Listed, Node]]:
    found: list[tuple[Listed, Node]] = []
    while not walk.over:
        some = walk.next(most)
        assert len(some) <= most
        found += some
    return found


def named(namespace: str, tokens: tuple[int, ...]) -> str:
    digest = digest_begun(namespace)
    digest.update(key_of(tokens))
    return digest.digest()[:NAME].hex()


def discarded(tree: Tree, node: Node, most: int) -> list[int]:
    """The tokens that went at each node, in one pass."""
    removal, found = tree.discarding([node]), list[int]()
    while some := list(islice(removal, most)):
        tree.check()
        found += some
    return found


@given(TEXTS, st.integers(1, 5))
def test_every_prefix_is_in_one_entry_whatever_the_slices(texts, most) -> None:
    tree = filled(texts)
    walk = Walk(tree)
    listed = rest(walk, most)
    paths: dict[tuple[str, str], tuple[int, ...]] = {("a", ""): (), ("b", ""): ()}
    seen: list[tuple[str, tuple[int, ...]]] = []
    for entry, node in listed:
        before = paths[entry.namespace, entry.parent]
        assert len(before) == entry.start
        path = before + entry.tokens
        assert entry.name == name_of(node) == named(entry.namespace, path[: entry.start + 1])
        paths[entry.namespace, entry.name] = path
        seen += [(entry.namespace, path[:n]) for n in range(entry.start + 1, entry.end + 1)]
        assert entry.leaf == (not node.children)
    expected = {(where, tuple(text[:n])) for where, text in texts for n in range(1, len(text) + 1)}
    assert len(seen) == len(set(seen))
    assert set(seen) == expected


@given(TEXTS, TEXTS, st.integers(0, 6))
def test_a_tree_that_changes_meanwhile_is_listed_without_repetition(texts, more, before) -> None:
    tree = filled(texts)
    walk = Walk(tree)
    listed = walk.next(before) if before else []
    while tree.evict_leaf(2) and len(listed) < before:
        pass
    tree.check()
    listed += rest(walk, 2)
    tokens = [(entry.namespace, entry.name) for entry, _ in listed]
    assert len(tokens) == len(set(tokens))


@given(TEXTS, st.integers(1, 4))
def test_discarding_a_subtree_leaves_the_others(texts, most) -> None:
    tree = filled([*texts, ("a", [9, 9, 9]), ("a", [9, 9, 8])])
    node = next(node for node in tree.nodes() if node.edge[:8] == key_of([9]) and node.start == 0)
    before = {(e.namespace, e.name) for e, _ in Walk(tree).next(1000) if e.tokens[0] != 9 and e.start == 0}
    while any(discarded(tree, node, most)):
        pass
    after = {(e.namespace, e.name) for e, _ in Walk(tree).next(1000) if e.start == 0}
    assert after == before
