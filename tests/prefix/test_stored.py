"""A catalogue of snapshots says of any key how far it can be resumed, as a search through all of them does."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.prefix.node import TOKEN, common_prefix, key_of
from kvcellar.prefix.stored import Catalogue
from kvcellar.snapshot import Snapshot, key_after
from kvcellar.spans import Span
from tests.counted import lines


@dataclass
class Dumb:
    """All snapshots, each with all tokens from the first one on."""

    anywhere: bool
    known: dict[bytes, tuple[Snapshot, tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)

    def resume(self, namespace: str, tokens: tuple[int, ...], limit: int) -> int:
        best = 0
        for snapshot, text, places in self.known.values():
            if snapshot.namespace == namespace:
                end = min(common_prefix(text, tokens), limit)
                if end > snapshot.span.start:
                    best = max([best, *([end] if self.anywhere else [pos for pos in places if pos <= end])])
        return best

    def remove(self, key: bytes) -> None:
        self.known.pop(key, None)
        for other in [one for one, found in self.known.items() if found[0].parent == key]:
            self.remove(other)


TOKENS = st.lists(st.integers(0, 1), max_size=4).map(tuple)
SPACE = st.sampled_from(["", "b"])
ADD = st.tuples(st.just("add"), SPACE, st.integers(0, 9), TOKENS.filter(len), st.sets(st.integers(1, 4)))
REMOVE = st.tuples(st.just("remove"), st.integers(0, 9))


@pytest.mark.parametrize("anywhere", [True, False])
@given(actions=st.lists(st.one_of(ADD, ADD, REMOVE), max_size=20), asked=st.lists(st.tuples(SPACE, TOKENS, TOKENS)))
def test_it_finds_what_a_search_through_all_snapshots_finds(anywhere, actions, asked) -> None:
    catalogue, dumb = Catalogue(anywhere=anywhere), Dumb(anywhere)
    for action in actions:
        if action[0] == "remove":
            keys = list(dumb.known)
            if keys:
                catalogue.remove(keys[action[1] % len(keys)])
                dumb.remove(keys[action[1] % len(keys)])
            continue
        _, space, which, tokens, marks = action
        parents = [None, *(found for found in dumb.known.values() if found[0].namespace == space)]
        parent = parents[which % len(parents)]
        before = parent[1] if parent is not None else ()
        span = Span(len(before), len(before) + len(tokens))
        above = parent[0].key if parent is not None else None
        key = key_after(above, identity=b"", namespace=space, tokens=key_of(tokens))
        places = tuple(sorted(span.start + mark for mark in marks if mark <= len(tokens)))
        snapshot = Snapshot(key, above, space, span, key_of(tokens), b"", ())
        assert catalogue.add(snapshot, places)
        dumb.known.setdefault(key, (snapshot, (*before, *tokens), places))
        catalogue.check()
    assert len(catalogue) == len(dumb.known)
    for space, first, rest in asked:
        tokens = first + rest
        for limit in (len(tokens), len(tokens) - 1):
            found = catalogue.match(space, key_of(tokens), limit)
            assert found.resume == dumb.resume(space, tokens, limit)
            assert [one.span.start for one in found.chain] == [0, *(one.span.end for one in found.chain[:-1])][
                : len(found.chain)
            ]
            known = b"".join(one.tokens for one in found.chain)[: found.resume * TOKEN]
            assert known == key_of(tokens[: found.resume])
        whole = catalogue.whole(space, key_of(tokens))
        ends = [
            len(text) for one, text, _ in dumb.known.values() if one.namespace == space and tokens[: len(text)] == text
        ]
        assert (whole[-1].span.end if whole else 0) == max(ends, default=0)
        for of in (space, None):
            begun = [
                key
                for key, (one, text, _) in dumb.known.items()
                if of in (None, one.namespace) and text[: len(tokens)] == tokens
            ]
            assert sorted(catalogue.beginning(of, key_of(tokens))) == sorted(begun)


def beside(count: int, *, anywhere: bool) -> tuple[Catalogue, bytes]:
    """A catalogue of so many snapshots with one beginning, and the key of one of them."""
    catalogue, draw = Catalogue(anywhere=anywhere), random.Random(count)
    for _ in range(count):
        tokens = key_of([7] * 20 + [draw.randrange(1000) for _ in range(12)])
        key = key_after(None, identity=b"", namespace="", tokens=tokens)
        assert catalogue.add(Snapshot(key, None, "", Span(0, 32), tokens, b"", ()), (24, 32))
    return catalogue, tokens


@pytest.mark.parametrize("anywhere", [True, False])
def test_a_lookup_costs_about_the_same_beside_any_number_of_snapshots_with_one_beginning(anywhere: bool) -> None:
    costs: list[int] = []
    for count in (8, 2000):
        catalogue, key = beside(count, anywhere=anywhere)
        costs.append(lines(lambda c=catalogue, k=key: (c.match("", k, 32), c.whole("", k))))
        assert catalogue.match("", key, 32).resume == 32
    assert costs[1] <= costs[0] + 300, "the logarithm of their number, for each length in common"


def test_a_checkpoint_that_is_not_in_its_snapshot_is_ignored() -> None:
    catalogue, tokens = Catalogue(anywhere=False), key_of([1, 2, 3])
    assert catalogue.add(Snapshot(b"k" * 32, None, "", Span(0, 3), tokens, b"", ()), (-1, 0, 2, 9))
    catalogue.check()
    assert catalogue.match("", tokens, 3).resume == 2


def test_a_snapshot_that_continues_nothing_known_is_not_taken() -> None:
    catalogue = Catalogue(anywhere=True)
    assert not catalogue.add(Snapshot(b"k" * 32, b"p" * 32, "", Span(3, 5), key_of([1, 2]), b"", ()), ())
    assert len(catalogue) == 0
