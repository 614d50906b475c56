"""The host tier: bytes within their cap, and the order of eviction."""

import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.memory.retention import Retention
from kvcellar.memory.snapshot import Snapshot
from kvcellar.memory.tiers.host import OVERHEAD, HostTier
from kvcellar.memory.tiers.tier import Entry
from tests.tiers.made import content, made

EACH = made(0)[0].size + len(made(0)[0].tokens) + len(made(0)[0].record) + OVERHEAD  # bytes of a made entry


def keys(tier: HostTier) -> set[bytes]:
    return {entry.snapshot.key for entry in tier.entries()}


def test_what_is_put_comes_back_and_once() -> None:
    tier, one = HostTier(10 * EACH), made(1)
    assert tier.put(*one)
    assert tier.put(*one)
    assert tier.size() == EACH
    assert content(tier, one[0].key) == one
    assert tier.contains(one[0].key)
    assert content(tier, made(2)[0].key) is None
    tier.close()
    assert tier.size() == 0
    assert not tier.contains(one[0].key)


def test_chunks_of_other_sizes_are_an_error_that_frees_their_bytes() -> None:
    tier, (snapshot, chunks) = HostTier(10 * EACH), made(1)
    for wrong in (chunks[:1], [*chunks, b"x"], [chunks[0] + b"x", chunks[1]]):
        with pytest.raises(ValueError, match="a snapshot has"):
            tier.put(snapshot, wrong)
    assert tier.size() == 0


def test_bytes_are_reserved_before_chunks_are_read() -> None:
    tier, (snapshot, chunks) = HostTier(2 * EACH), made(1)
    seen: list[int] = []

    def read() -> Iterator[bytes]:
        for chunk in chunks:
            seen.append(tier.size())
            yield chunk

    for seed in (2, 3):
        tier.put(*made(seed))
    assert tier.put(snapshot, read())
    assert seen == [2 * EACH, 2 * EACH]  # one was evicted before


def test_the_least_worth_for_its_bytes_goes_first_and_never_what_is_continued_or_pinned() -> None:
    parent = made(1)
    child, pinned, used, large = made(2, parent[0]), made(3), made(4), made(5, size=400)
    tier = HostTier(4 * EACH + EACH + 540)
    for one in (parent, child, large, used):
        assert tier.put(*one)
    assert tier.put(*pinned, Retention(pinned=True))
    tier.used([used[0].key])
    assert tier.put(*made(6))
    assert keys(tier) == {one[0].key for one in (parent, child, pinned, used, made(6))}
    assert tier.put(*made(7))
    assert child[0].key not in keys(tier)
    assert {parent[0].key, pinned[0].key, used[0].key} <= keys(tier)


def test_a_level_of_priority_is_worth_as_much_as_a_second_use() -> None:
    tier = HostTier(3 * EACH)
    for seed, priority in ((1, 1), (2, 0), (3, -1)):
        tier.put(*made(seed), Retention(priority=priority))
    for seed, left in ((4, {1, 2, 4}), (5, {1, 4, 5})):
        tier.put(*made(seed), Retention(priority=3))
        assert keys(tier) == {made(one)[0].key for one in left}


def test_what_is_not_used_goes_at_last_however_often_it_was_used_before() -> None:
    tier = HostTier(3 * EACH)
    tier.put(*made(0))
    tier.used([made(0)[0].key] * 5)
    for seed in range(1, 40):
        tier.put(*made(seed))
        tier.used([made(seed)[0].key])
    assert made(0)[0].key not in keys(tier)


def test_nothing_goes_for_what_does_not_fit() -> None:
    tier = HostTier(3 * EACH)
    for seed in (1, 2):
        tier.put(*made(seed))
    tier.put(*made(3), Retention(pinned=True))
    before = keys(tier)
    assert not tier.put(*made(4, size=2 * EACH))
    assert keys(tier) == before
    assert tier.failures["too large"] == 1
    assert tier.put(*made(5))
    assert len(keys(tier)) == 3


def test_entries_expire_by_the_clock_pinned_or_not() -> None:
    now = [0.0]
    tier = HostTier(3 * EACH, clock=lambda: now[0])
    tier.put(*made(1), Retention(expires=10.0, pinned=True))
    tier.put(*made(2), Retention(expires=20.0))
    tier.put(*made(3))
    now[0] = 10.0
    assert content(tier, made(1)[0].key) is None
    assert keys(tier) == {made(2)[0].key, made(3)[0].key}
    assert tier.put(*made(4))  # in the place of the expired one
    assert keys(tier) == {made(seed)[0].key for seed in (2, 3, 4)}


def test_putting_again_keeps_an_entry_at_least_as_long() -> None:
    now = [0.0]
    tier = HostTier(2 * EACH, clock=lambda: now[0])
    tier.put(*made(1), Retention(expires=10.0))
    tier.put(*made(1), Retention(expires=20.0, pinned=True))
    tier.put(*made(1), Retention(expires=5.0))
    now[0] = 15.0
    tier.put(*made(2))
    assert tier.put(*made(3))
    assert tier.entries() == [
        Entry(made(1)[0], Retention(expires=20.0, pinned=True)),
        Entry(made(3)[0], Retention()),
    ]


def test_an_owner_over_its_quota_evicts_its_own_entries() -> None:
    tier = HostTier(6 * EACH, quota=2 * EACH)
    for seed in (1, 2):
        tier.put(*made(seed), Retention(owner="a"))
    tier.put(*made(3), Retention(owner="b"))
    tier.put(*made(4), Retention(owner="a"))
    assert keys(tier) == {made(seed)[0].key for seed in (2, 3, 4)}
    tier.renew([made(2)[0].key, made(4)[0].key], Retention(pinned=True))
    assert not tier.put(*made(5), Retention(owner="a"))
    assert tier.put(*made(5), Retention(owner="b"))
    tier.remove([made(2)[0].key])
    assert tier.put(*made(6), Retention(owner="a"))
    assert made(4)[0].key in keys(tier)


def test_one_owner_may_have_all_and_evicts_its_own_entries() -> None:
    tier = HostTier(3 * EACH, quota=3 * EACH)
    for seed in range(9):
        assert tier.put(*made(seed), Retention(owner="a"))
    assert keys(tier) == {made(seed)[0].key for seed in (6, 7, 8)}


def test_an_entry_is_not_evicted_for_the_one_that_continues_it() -> None:
    first, other = made(1), made(2)
    second = made(3, first[0])
    tier = HostTier(2 * EACH)
    for one in (first, other, second):
        assert tier.put(*one)
    assert keys(tier) == {first[0].key, second[0].key}
    third = made(4, second[0])
    assert not tier.put(*third), "without the others it would be of no use"


def test_a_full_tier_with_a_quota_evicts_the_entries_of_all_owners() -> None:
    tier = HostTier(20 * EACH, quota=18 * EACH)
    for seed in range(300):
        assert tier.put(*made(seed), Retention(owner="abc"[seed % 3]))
    assert len(keys(tier)) == 20


@given(seed=st.integers(0, 10**6))
def test_the_cap_and_the_quota_hold_and_no_byte_is_lost(seed: int) -> None:
    rng, now = random.Random(seed), [0.0]
    tier = HostTier(8 * EACH, quota=5 * EACH, clock=lambda: now[0])
    stored: dict[bytes, tuple[Snapshot, list[bytes]]] = {}
    owners: dict[bytes, str] = {}
    for _ in range(40):
        now[0] += 1
        parent = rng.choice([one[0] for one in stored.values()]) if stored and rng.random() < 0.5 else None
        number = rng.randrange(30)
        one = made(number, parent, size=(40, 40, 800, 6000)[number % 4])
        expires = now[0] + rng.randrange(1, 20) if rng.random() < 0.3 else None
        owner = owners.setdefault(one[0].key, rng.choice("abc"))
        tier.put(*one, Retention(rng.randrange(-1, 2), rng.random() < 0.05, expires, owner))
        stored[one[0].key] = one
        some = rng.sample(sorted(stored), min(3, len(stored)))
        match rng.randrange(6):
            case 0:
                tier.remove(some)
            case 1:
                tier.renew(some, Retention(priority=rng.randrange(3), pinned=rng.random() < 0.1))
            case 2:
                tier.used(some)
        for key in some:
            assert content(tier, key) in (None, stored[key])
        assert tier.size() <= tier.cap
        by_owner = {"a": 0, "b": 0, "c": 0}
        for snapshot, _ in tier.entries():
            by_owner[owners[snapshot.key]] += snapshot.size + len(snapshot.tokens) + len(snapshot.record) + OVERHEAD
        assert max(by_owner.values()) <= 5 * EACH
        assert sum(by_owner.values()) <= tier.size()
    tier.remove(stored)
    assert tier.size() == 0
