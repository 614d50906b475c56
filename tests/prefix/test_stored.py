"""A catalogue of snapshots says of any key how far it can be resumed, as a search through all of them does."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.errors import BadRequest, KvcellarError
from kvcellar.images.image import FIRST
from kvcellar.memory.prefix.node import TOKEN, common_prefix, key_of
from kvcellar.memory.prefix.stored import Catalogue
from kvcellar.memory.retention import DEFAULT
from kvcellar.memory.snapshot import Snapshot, StoredImage, image_of, key_after, requested
from kvcellar.memory.spans import Span
from tests.counted import lines


@dataclass
class Dumb:
    """All snapshots, each with all tokens from the first one on."""

    anywhere: bool
    known: dict[bytes, tuple[Snapshot, tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)

    def reached(self, key: bytes | None) -> bool:
        return key is None or (key in self.known and self.reached(self.known[key][0].parent))

    def resume(self, namespace: str, tokens: tuple[int, ...], limit: int) -> int:
        best = 0
        for snapshot, text, places in self.known.values():
            if snapshot.namespace == namespace and self.reached(snapshot.key):
                end = min(common_prefix(text, tokens), limit)
                if end > snapshot.span.start:
                    best = max([best, *([end] if self.anywhere else [pos for pos in places if pos <= end])])
        return best


def catalogued(anywhere: bool) -> Catalogue:
    """Its records are the positions of checkpoints."""
    return Catalogue(anywhere=anywhere, positions=list)


TOKENS = st.lists(st.integers(0, 1), max_size=4).map(tuple)
SPACE = st.sampled_from(["", "b"])
ADD = st.tuples(st.just("add"), SPACE, st.integers(0, 9), TOKENS.filter(len), st.sets(st.integers(1, 4)))
REMOVE = st.tuples(st.just("remove"), st.integers(0, 9))


@pytest.mark.parametrize("anywhere", [True, False])
@given(actions=st.lists(st.one_of(ADD, ADD, REMOVE), max_size=20), asked=st.lists(st.tuples(SPACE, TOKENS, TOKENS)))
def test_it_finds_what_a_search_through_all_snapshots_finds(anywhere, actions, asked) -> None:
    catalogue, dumb = catalogued(anywhere), Dumb(anywhere)
    for action in actions:
        if action[0] == "remove":
            keys = list(dumb.known)
            if keys:
                catalogue.removed("disk", keys[action[1] % len(keys)], "evicted")
                del dumb.known[keys[action[1] % len(keys)]]
            continue
        _, space, which, tokens, marks = action
        parents = [None, *(found for found in dumb.known.values() if found[0].namespace == space)]
        parent = parents[which % len(parents)]
        before = parent[1] if parent is not None else ()
        span = Span(len(before), len(before) + len(tokens))
        above = parent[0].key if parent is not None else None
        key = key_after(above, identity=b"", namespace=space, tokens=key_of(tokens))
        places = tuple(sorted(span.start + mark for mark in marks if mark <= len(tokens)))
        snapshot = Snapshot(key, above, space, span, key_of(tokens), bytes(places), ())
        catalogue.stored("disk", snapshot, DEFAULT)
        dumb.known.setdefault(key, (snapshot, (*before, *tokens), places))
        catalogue.check()
    assert len(catalogue) == len(dumb.known)
    reached = {key for key in dumb.known if dumb.reached(key)}
    listed = [one.key for one in catalogue]
    assert sorted(listed) == sorted(reached)
    assert all(one.parent is None or listed.index(one.parent) < listed.index(one.key) for one in catalogue)
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
            len(text)
            for key, (one, text, _) in dumb.known.items()
            if key in reached and one.namespace == space and tokens[: len(text)] == text
        ]
        assert (whole[-1].span.end if whole else 0) == max(ends, default=0)
        for of in (space, None):
            begun = [
                key
                for key, (one, text, _) in dumb.known.items()
                if key in reached and of in (None, one.namespace) and text[: len(tokens)] == tokens
            ]
            assert sorted(catalogue.beginning(of, key_of(tokens))) == sorted(begun)


def beside(count: int, *, anywhere: bool) -> tuple[Catalogue, bytes]:
    """A catalogue of so many snapshots with one beginning, and the key of one of them."""
    catalogue, draw = catalogued(anywhere), random.Random(count)
    for _ in range(count):
        tokens = key_of([7] * 20 + [draw.randrange(1000) for _ in range(12)])
        key = key_after(None, identity=b"", namespace="", tokens=tokens)
        catalogue.stored("disk", Snapshot(key, None, "", Span(0, 32), tokens, bytes([24, 32]), ()), DEFAULT)
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
    catalogue, tokens = Catalogue(anywhere=False, positions=lambda record: (-1, 0, 2, 9)), key_of([1, 2, 3])
    catalogue.stored("disk", Snapshot(b"k" * 32, None, "", Span(0, 3), tokens, b"", ()), DEFAULT)
    catalogue.check()
    assert catalogue.match("", tokens, 3).resume == 2


def test_it_has_what_a_tier_has_and_events_have_parents_first() -> None:
    events: list[tuple[str, bytes]] = []

    class Heard:
        def stored(self, tier: str, snapshot: Snapshot) -> None:
            events.append((f"{tier} has", snapshot.tokens))

        def removed(self, tier: str, key: bytes) -> None:
            events.append((f"{tier} lost", key))

    catalogue = Catalogue(anywhere=True, watch=Heard())
    tokens = key_of([1]), key_of([2])
    first = Snapshot(b"k" * 32, None, "", Span(0, 1), tokens[0], b"", ())
    second = Snapshot(b"l" * 32, first.key, "", Span(1, 2), tokens[1], b"", ())
    catalogue.stored("host", second, DEFAULT)
    assert catalogue.of(second.key) == {"host"}
    assert not events
    assert not catalogue.match("", b"".join(tokens), 2).chain
    catalogue.stored("disk", first, DEFAULT)
    catalogue.stored("host", first, DEFAULT)
    catalogue.stored("host", first, DEFAULT)
    assert events == [("disk has", tokens[0]), ("host has", tokens[0]), ("host has", tokens[1])]
    assert catalogue.match("", b"".join(tokens), 2).chain == (first, second)
    catalogue.removed("host", first.key, "evicted")
    assert first.key in catalogue
    catalogue.removed("disk", first.key, "damaged")
    assert first.key not in catalogue
    assert catalogue.lost() == [("disk", "", tokens[0], 0)]
    assert not catalogue.lost()
    assert events[3:] == [("host lost", first.key), ("disk lost", first.key)]


def test_features_of_images_have_no_events_no_checkpoints_and_the_namespace_of_their_requests() -> None:
    events: list[str] = []

    class Heard:
        def stored(self, tier: str, snapshot: Snapshot) -> None:
            events.append("stored")

        def removed(self, tier: str, key: bytes) -> None:
            events.append("removed")

    def positions(record: bytes) -> tuple[int, ...]:
        raise BadRequest("this is no record of K/V")

    image = StoredImage("a:b", bytes(range(32)), key_of([FIRST + 1, FIRST + 2]))
    catalogue = Catalogue(anywhere=False, positions=positions, watch=Heard())
    catalogue.stored("disk", Snapshot(b"k" * 32, None, image.space, Span(0, 2), image.tokens, b"[]", ()), DEFAULT)
    catalogue.check()
    assert not catalogue.unusable()
    assert [one.key for one in catalogue.whole(image.space, image.tokens)] == [b"k" * 32]
    assert not catalogue.whole("a:b", image.tokens)
    assert catalogue.beginning("a:b", b"") == [b"k" * 32]
    assert not catalogue.beginning("a", b"")
    assert (requested(image.space), image_of(image.space)) == ("a:b", image.digest.hex())
    catalogue.removed("disk", b"k" * 32, "removed")
    assert not events
    catalogue.check()


def test_a_record_that_cannot_be_used_is_reported_once() -> None:
    def refused(record: bytes) -> tuple[int, ...]:
        raise KvcellarError("it is of another version")

    catalogue = Catalogue(anywhere=True, positions=refused)
    catalogue.stored("disk", Snapshot(b"k" * 32, None, "", Span(0, 1), key_of([1]), b"", ()), DEFAULT)
    assert len(catalogue) == 0
    assert catalogue.unusable() == [b"k" * 32]
    assert not catalogue.unusable()
