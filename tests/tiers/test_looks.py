"""What any process has stored elsewhere is found by what a text begins with: by name, without a listing."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvcellar.memory.prefix.node import TOKEN, key_of
from kvcellar.memory.prefix.stored import Catalogue
from kvcellar.memory.retention import Retention
from kvcellar.memory.snapshot import SEGMENT, Snapshot, key_after
from kvcellar.memory.spans import Span
from kvcellar.memory.tiers import remote
from kvcellar.memory.tiers.buckets import BLOCK, LONGEST, Member, Rest, member_of
from kvcellar.memory.tiers.codec import AesGcm
from kvcellar.memory.tiers.objects import MOST_MEMBERS, Objects, RedisObjects, open_objects
from kvcellar.memory.tiers.remote import AHEAD, CLOCKS, MOST_ALIKE, RemoteTier
from kvcellar.memory.tiers.tier import NEXT_LOOK, Breaker
from tests.tiers.in_memory import InMemory
from tests.tiers.made import IDENTITY, content
from tests.tiers.test_remote import PREFIX, needs_server, objects, running  # noqa: F401  # pytest finds two by name
from tests.tiers.test_shared import in_children

TEXT = key_of(range(1, 2001))


def of(text: bytes, start: int, end: int, parent: Snapshot | None = None, *, secret: bytes = b"", namespace="n"):
    """The snapshot of a part of a text, and its chunk."""
    tokens, before = text[start * TOKEN : end * TOKEN], parent.key if parent is not None else None
    key = key_after(before, identity=IDENTITY, namespace=namespace, tokens=tokens, secret=secret)
    chunk = random.Random(key).randbytes(50)
    return Snapshot(key, before, namespace, Span(start, end), tokens, b"record", (len(chunk),)), [chunk]


def chain_of(text: bytes, *ends: int, **how) -> list[tuple[Snapshot, list[bytes]]]:
    found: list[tuple[Snapshot, list[bytes]]] = []
    for end in ends:
        start, parent = (found[-1][0].span.end, found[-1][0]) if found else (0, None)
        found.append(of(text, start, end, parent, **how))
    return found


class Process:
    """A tier of one process, with what it has reported."""

    def __init__(self, store: Objects, **options) -> None:
        self.now = 100.0
        given = {"identity": IDENTITY, "cap": 1 << 24, "clock": lambda: self.now, "breaker": Breaker(after=10**9)}
        self.tier = RemoteTier(store, **given | options)
        self.known = self.tier.catalogue = Catalogue(anywhere=True)

    def looks(self, text: bytes, namespace: str = "n") -> list[bytes]:
        """What it knows of a text after a look."""
        self.tier.look(namespace, text, self.known.whole(namespace, text))
        self.known.check()
        self.tier.check()
        return [one.key for one in self.known.whole(namespace, text)]


def listed(one: Snapshot, secret: bytes = b"") -> Member:
    """A snapshot as it is in its bucket."""
    return Rest(IDENTITY, secret, one.namespace, one.parent, one.tokens).named(one.key)


def keys(chain) -> list[bytes]:
    return [one.key for one, _ in chain]


def test_a_chain_is_found_by_its_beginning_on_every_store(objects) -> None:  # noqa: F811
    stored = chain_of(TEXT, 5, 45, 557, 1069, 1100)
    writer, reader = Process(objects()), Process(objects())
    assert all(writer.tier.put(*one) for one in stored)
    assert reader.looks(TEXT[: 1500 * TOKEN]) == keys(stored)
    for one in stored:
        assert content(reader.tier, one[0].key) == one
    assert Process(objects()).looks(TEXT[: 600 * TOKEN]) == keys(stored[:3])
    assert Process(objects()).looks(TEXT, "m") == []
    assert Process(objects()).looks(key_of(range(2, 500))) == []
    writer.tier.remove(keys(stored[3:]))
    assert Process(objects()).looks(TEXT) == keys(stored[:3])
    assert objects().members([listed(one).bucket for one, _ in stored[3:]]) == [[], []]
    assert not writer.tier.failures | reader.tier.failures


def test_what_others_store_is_found_at_the_next_look_and_places_are_read_once_until_then() -> None:
    store, stored = InMemory(), chain_of(TEXT, 100, 200)
    writer, reader = Process(store), Process(store)
    assert reader.looks(TEXT) == []
    assert all(writer.tier.put(*one) for one in stored)
    calls = store.calls
    assert reader.looks(TEXT) == []
    assert store.calls == calls, "it was read just now"
    reader.now += NEXT_LOOK
    assert reader.looks(TEXT) == keys(stored)
    assert not store.by_kind["names"]


def test_processes_at_random_find_all_that_is_stored_of_a_text() -> None:
    """The model: a set of snapshots. After a look, a process knows every one whose chain is there and of the text."""
    for seed in range(30):
        rng, store = random.Random(seed), InMemory()
        processes = [Process(store) for _ in range(3)]
        texts = [key_of([*range(40 * rng.randrange(6)), *[rng.randrange(9) + 500] * 200]) for _ in range(6)]
        there: dict[bytes, tuple[Snapshot, list[bytes]]] = {}
        for _ in range(40):
            process, text = rng.choice(processes), rng.choice(texts)
            process.now += NEXT_LOOK
            act, ends = rng.random(), sorted(rng.sample(range(1, len(text) // TOKEN), 3))
            if act < 0.4:
                known = process.known.whole("n", text)
                parent = known[-1] if known else None
                for end in ends:
                    if end > (parent.span.end if parent else 0):
                        one = of(text, parent.span.end if parent else 0, end, parent)
                        assert process.tier.put(*one)
                        there[one[0].key], parent = one, one[0]
            elif act < 0.5 and there:
                gone = rng.choice(list(there))
                process.tier.remove([gone])
                del there[gone]
            else:
                process.looks(text)
                reached: set[bytes | None] = {None}
                for one, _ in sorted(there.values(), key=lambda one: one[0].span.start):
                    tokens = text[one.span.start * TOKEN : one.span.end * TOKEN]
                    if one.parent in reached and one.tokens == tokens:
                        reached.add(one.key)
                        assert process.tier.contains(one.key)
                        assert content(process.tier, one.key) == there[one.key]
        assert not store.by_kind["names"]
        assert not any(set(process.tier.failures) - {"gone"} for process in processes)
        named = [member[:64] for members in store.buckets.values() for member in members]
        assert len(named) == len(set(named))
        assert {*named} >= store.content.keys()


@pytest.mark.parametrize("others", [10, 10_000])
def test_calls_do_not_depend_on_how_many_objects_there_are(others) -> None:
    store, stored = InMemory(), chain_of(TEXT, 512, 1024)
    for number in range(others):
        name = f"{number:064x}"
        store.content[name], store.buckets[name] = b"other", [f"{name}{64:08x}"]
    writer = Process(store)
    assert all(writer.tier.put(*one) for one in stored)
    assert store.by_kind == {"read": 2, "write": 2, "add": 2}
    store.by_kind.clear()
    assert Process(store).looks(TEXT) == keys(stored)
    assert store.by_kind == {"members": 2, "read": 2}


def test_long_texts_are_looked_up_many_snapshots_at_a_time() -> None:
    text = key_of(range(1, 100 * SEGMENT))
    store, stored = InMemory(), chain_of(text, *range(SEGMENT, 100 * SEGMENT, SEGMENT))
    writer = Process(store)
    assert all(writer.tier.put(*one) for one in stored)
    store.by_kind.clear()
    assert Process(store).looks(text) == keys(stored)
    assert store.by_kind == {"members": 1 + -(-98 // AHEAD), "read": 1 + -(-98 // AHEAD)}


def test_a_look_ends_when_it_is_not_wanted_any_more() -> None:
    text = key_of(range(1, 100 * SEGMENT))
    store, stored = InMemory(), chain_of(text, *range(SEGMENT, 100 * SEGMENT, SEGMENT))
    writer, reader = Process(store), Process(store)
    assert all(writer.tier.put(*one) for one in stored)
    store.by_kind.clear()
    wanted = iter([True, True, False, False])
    reader.tier.look("n", text, [], wanted=lambda: next(wanted))
    assert [one.key for one in reader.known.whole("n", text)] == keys(stored)[:1]
    assert store.by_kind == {"members": 1, "read": 1}


def test_of_a_full_bucket_what_has_as_many_tokens_as_most_is_found() -> None:
    store, stored = InMemory(), chain_of(TEXT, SEGMENT, 2 * SEGMENT)
    writer = Process(store)
    assert all(writer.tier.put(*one) for one in stored)
    for number in range(MOST_MEMBERS):
        store.buckets[listed(stored[0][0]).bucket].append(f"{number:064x}{100:08x}{'0' * 12}")
    assert Process(store).looks(TEXT) == keys(stored)
    assert Process(store).looks(TEXT[: (SEGMENT - 1) * TOKEN]) == []


@pytest.mark.parametrize("late", [1.0, CLOCKS])
def test_what_has_expired_by_the_clock_of_another_machine_is_a_miss_and_stays(late: float) -> None:
    store, one = InMemory(), of(TEXT, 0, 100)
    assert Process(store).tier.put(*one, Retention(expires=150.0))
    reader = Process(store)
    reader.now = 150.0 + late
    assert reader.looks(TEXT) == []
    assert content(reader.tier, one[0].key) is None
    there = late < CLOCKS
    assert (one[0].key.hex() in store.content, listed(one[0]).bucket in store.buckets) == (there, there)


def test_what_is_stored_for_about_as_long_is_not_written_again() -> None:
    store, one = InMemory(), of(TEXT, 0, 100)
    for expires, writes in ((200.0, 1), (210.0, 1), (290.0, 1), (310.0, 2), (None, 3), (400.0, 3)):
        assert Process(store).tier.put(*one, Retention(expires=expires, priority=writes))
        assert store.by_kind["write"] == writes


def test_what_others_have_pinned_is_not_pinned_here() -> None:
    store, one = InMemory(), of(TEXT, 0, 100)
    assert Process(store).tier.put(*one, Retention(pinned=True))
    reader = Process(store)
    assert reader.looks(TEXT) == [one[0].key]
    assert [entry.retention.pinned for entry in reader.tier.entries()] == [False]


@needs_server
def test_a_bucket_of_a_server_has_its_time_and_no_name_that_is_too_long(running) -> None:  # noqa: F811
    opened = RedisObjects(running.url, PREFIX)
    key, at = opened._bucket("b"), opened._redis
    at.set(key, "of another kind")
    assert opened.members(["b", "c"]) == [[], []]
    for name in ("x", "y", "x"):
        opened.add("b", name)
    at.zadd(key, {"z" * (LONGEST + 1): 1e20})
    assert opened.members(["b"]) == [["y", "x"]]
    at.expire(key, 1000)
    opened.strike([("b", "x"), ("c", "x")])
    assert opened.members(["b"]) == [["y"]]
    assert 0 < at.ttl(key) <= 1000
    at.flushall()


def test_a_known_chain_is_looked_up_with_one_call() -> None:
    store, stored = InMemory(), chain_of(TEXT, *range(100, 2000, 100))
    writer = Process(store)
    assert all(writer.tier.put(*one) for one in stored)
    store.by_kind.clear()
    assert writer.looks(TEXT) == keys(stored)
    assert store.by_kind == {"members": 1}


def test_of_what_differs_later_the_most_alike_is_read_and_each_once(objects) -> None:  # noqa: F811
    def text(common: int, other: int) -> bytes:
        return TEXT[: common * TOKEN] + key_of([other] * (600 - common))

    writer, reader = Process(objects()), Process(objects())
    for number, common in enumerate((40, 300, 70, 200, *[BLOCK] * 9)):
        assert writer.tier.put(*of(text(common, 5000 + number), 0, 600))
    reader.looks(TEXT)
    assert len(reader.known) == MOST_ALIKE
    assert reader.known.match("n", TEXT, 1999).resume == 300
    reader.now += NEXT_LOOK
    reader.looks(TEXT)
    assert len(reader.known) == MOST_ALIKE


def test_one_writes_what_several_have_computed(objects) -> None:  # noqa: F811
    stored = chain_of(TEXT, 100, 200)
    processes = [Process(objects()) for _ in range(3)]
    for process in processes:
        for one, chunks in stored:
            assert process.tier.put(one, iter(chunks) if process is processes[0] else iter(()))
            assert process.tier.contains(one.key)
    for process in (*processes, Process(objects())):
        assert process.looks(TEXT) == keys(stored)
        assert all(content(process.tier, one[0].key) == one for one in stored)
    assert [len(found) for found in objects().members([listed(one).bucket for one, _ in stored])] == [
        1,
        1,
    ]


def test_what_is_stored_for_a_shorter_time_or_is_damaged_or_is_not_named_is_repaired() -> None:
    store, (one, chunks) = InMemory(), of(TEXT, 0, 100)
    name = one.key.hex()
    assert Process(store).tier.put(one, chunks, Retention(expires=200.0))
    assert Process(store).tier.put(one, chunks)
    assert store.seconds[name] is None
    whole = store.content[name]
    for damaged in (whole[:-1], b"x", whole[:100] + b"?" + whole[101:]):
        store.content[name] = damaged
        assert Process(store).tier.put(one, chunks)
        assert store.content[name] == whole
    store.buckets.clear()
    writes = store.by_kind["write"]
    assert Process(store).tier.put(one, chunks)
    assert store.by_kind["write"] == writes
    assert Process(store).looks(TEXT) == [one.key]


@pytest.mark.parametrize("wrong", ["", "../../etc", "z" * 64 + "0" * 8, "0" * 71, "0" * (LONGEST + 1), "é" * 72])
def test_names_that_are_no_members_are_counted_and_removed(wrong) -> None:
    store, (one, chunks) = InMemory(), of(TEXT, 0, 100)
    assert Process(store).tier.put(one, chunks)
    bucket = next(iter(store.buckets))
    store.buckets[bucket].insert(0, wrong)
    reader = Process(store)
    assert reader.looks(TEXT) == [one.key]
    assert reader.tier.failures == {"damaged": 1}
    assert wrong not in store.buckets[bucket]


def test_members_that_are_missing_foreign_expired_or_of_other_tokens_are_removed() -> None:
    store = InMemory()
    writer = Process(store)
    good, missing, gone = of(TEXT, 0, 100), of(TEXT, 0, 50), of(TEXT, 0, 60)
    other = of(key_of(range(900, 1000)), 0, 70)
    foreign, name = of(TEXT, 0, 80), of(TEXT, 0, 90)
    for one in (good, missing, other, foreign):
        assert writer.tier.put(*one)
    assert writer.tier.put(*gone, Retention(expires=150.0))
    del store.content[missing[0].key.hex()]
    whole = store.content[foreign[0].key.hex()]
    store.content[foreign[0].key.hex()] = whole[:8] + b"\xff" + whole[9:]  # another version
    store.content[name[0].key.hex()] = store.content[good[0].key.hex()]  # a copy under another name
    store.buckets[listed(good[0]).bucket].append(listed(name[0]).text)
    forged = replace(other[0], key=of(TEXT, 0, 95)[0].key)  # whole, but its name is that of other tokens
    assert writer.tier.put(forged, other[1])
    store.buckets[listed(good[0]).bucket].append(listed(of(TEXT, 0, 95)[0]).text)
    reader = Process(store)
    reader.now = 150.0 + CLOCKS
    assert reader.looks(TEXT) == [good[0].key]
    assert reader.tier.failures == {"damaged": 2, "foreign": 1}
    assert store.buckets[listed(good[0]).bucket] == [listed(good[0]).text]
    assert foreign[0].key.hex() in store.content
    assert name[0].key.hex() not in store.content


def test_a_bucket_of_many_costs_as_many_as_its_limit(objects) -> None:  # noqa: F811
    """The newest are found where the store has an order."""
    good, bucket = of(TEXT, 0, 100), listed(of(TEXT, 0, 100)[0]).bucket
    opened = objects()
    if not isinstance(opened, RedisObjects):
        pytest.skip("each name is a file")
    for number in range(2 * MOST_MEMBERS + 300):
        opened.add(bucket, f"{number:064x}{100:08x}" + "0" * 64)
    assert Process(objects()).tier.put(*good)
    reader = Process(objects())
    assert reader.looks(TEXT) == [good[0].key]
    (found,) = opened.members([bucket])
    assert len(found) == MOST_MEMBERS
    assert all(member_of(bucket, name) for name in found)
    assert opened._redis.zcard(opened._bucket(bucket)) == MOST_MEMBERS
    assert not reader.tier.failures


def test_a_store_that_is_down_costs_a_look_nothing_but_a_miss() -> None:
    store = InMemory()
    reader = Process(store, breaker=Breaker())
    store.fails = True
    assert reader.looks(TEXT) == []
    assert reader.tier.failures == {"unreachable": 1}
    calls = store.calls
    assert reader.looks(TEXT) == []
    assert store.calls == calls


@pytest.mark.parametrize("kind", ["directory", pytest.param("redis", marks=needs_server)])
def test_processes_that_store_look_and_remove_at_once_read_no_wrong_byte(kind, request, tmp_path) -> None:
    pytest.importorskip("fsspec", reason="the extra `remote` is not installed")
    url = request.getfixturevalue("running").url if kind == "redis" else f"file://{tmp_path}/store"
    stored = chain_of(TEXT, *range(100, 1100, 100))

    def plays(seed: int) -> Callable[[], None]:
        def play() -> None:
            rng, process = random.Random(seed), Process(open_objects(url, PREFIX))
            for _ in range(150):
                process.now += NEXT_LOOK
                one = rng.choice(stored)
                act = rng.random()
                if act < 0.4:
                    assert process.tier.put(*one)
                elif act < 0.9:
                    process.looks(TEXT)
                    assert content(process.tier, one[0].key) in (None, one)
                else:
                    process.tier.remove([one[0].key])
            assert not set(process.tier.failures) - {"gone"}

        return play

    in_children(*(plays(seed) for seed in range(3)))
    last = Process(open_objects(url, PREFIX))
    assert all(last.tier.put(*one) for one in stored)
    assert Process(open_objects(url, PREFIX)).looks(TEXT) == keys(stored)


def test_memory_for_buckets_is_bounded(monkeypatch) -> None:
    monkeypatch.setattr(remote, "MOST_REMEMBERED", 5)
    reader = Process(InMemory())
    for number in range(9):
        assert reader.tier.put(*of(TEXT[: 40 * TOKEN] + key_of([number] * 10), 0, 50))
    reader.looks(TEXT)
    assert not any(members for _, members in reader.tier._read.values()), "a bucket of nine names"
    for number in range(20):
        reader.looks(key_of([number] * 40))
        assert len(reader.tier._read) <= 5


def test_two_with_one_secret_find_each_others_and_names_tell_others_nothing() -> None:
    pytest.importorskip("cryptography", reason="the extra `encryption` is not installed")
    store, secret, cipher = InMemory(), b"names", AesGcm(bytes(32))
    stored = chain_of(TEXT, 100, 600, secret=secret)
    writer, reader = (Process(store, cipher=cipher, secret=secret) for _ in range(2))
    assert all(writer.tier.put(*one) for one in stored)
    assert reader.looks(TEXT) == keys(stored)
    guess = Process(store, cipher=AesGcm(bytes([1]) * 32), secret=b"guess")
    assert guess.looks(TEXT) == []
    assert store.content.keys() == {key.hex() for key in keys(stored)}
    plain = listed(stored[0][0])
    assert plain.bucket not in store.buckets
    named = [member for members in store.buckets.values() for member in members]
    assert not any(plain.marks[:4] in member[72:] for member in named)


def test_a_member_says_how_much_of_a_text_it_has() -> None:
    rng = random.Random(0)
    for _ in range(200):
        n, m, common = rng.randrange(1, 700), rng.randrange(1, 700), rng.randrange(700)
        common = min(n, m, common)
        one = key_of(range(common)) + key_of([7000] * (n - common))
        two = key_of(range(common)) + key_of([8000] * (m - common))
        member, rest = listed(of(one, 0, n)[0]), Rest(IDENTITY, b"", "n", None, two)
        assert rest.common(member) == min(common, 16 * BLOCK) // BLOCK * BLOCK
        assert rest.has(member) == (common == n <= SEGMENT)
        assert (member.bucket in rest.buckets) == ((common >= BLOCK) if n >= BLOCK else common > 0)
        assert member_of(member.bucket, member.text) == member
