"""Where a request goes: by laws, and beside a router that keeps sets and looks at every replica and block."""

import math
import random
from collections.abc import Sequence
from hashlib import blake2b
from time import perf_counter
from typing import Any

import pytest

from kvcellar.cluster.routing import FADING, MEDIA, MOST, Load, Ranking, Router
from kvcellar.errors import BadRequest
from kvcellar.memory.prefix.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent

SIZE = 16
MASK = 2**64 - 1


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def stored(hashes: Sequence[int], medium: str = "GPU") -> BlockStored:
    return BlockStored(list(hashes), None, None, SIZE, None, medium)


def load(waiting: int = 0, *, running: int = 0, speed: float | None = 1000.0, read: float | None = None) -> Load:
    return Load(waiting, running, speed, read, cells_free=10**6, cells=10**6, waiting=0, sequences=64)


def fleet(*replicas: str, most: int = 10_000) -> tuple[Router, Clock]:
    clock = Clock()
    router = Router(SIZE, most_blocks=most, clock=clock)
    for replica in replicas:
        router.join(replica)
        router.events(replica, [AllBlocksCleared()])
        router.load(replica, load())
    return router, clock


def blocks(text: int, count: int) -> list[int]:
    return [int.from_bytes(blake2b(b"%d %d" % (text, at), digest_size=8).digest()) for at in range(count)]


def best(ranking: Ranking) -> str:
    return ranking[0].replica


# -- laws --------------------------------------------------------------------------------------------------------------


def test_without_events_there_is_no_opinion() -> None:
    router = Router(SIZE, most_blocks=10, clock=Clock())
    assert router.rank([], 1) == ()
    router.join("a")
    router.load("a", load())
    assert router.rank(blocks(1, 4), 64) == ()
    router.events("a", [AllBlocksCleared()])
    assert best(router.rank(blocks(1, 4), 64)) == "a"
    assert router.rank(blocks(1, 4), 64, exclude=frozenset({"a"})) == ()


def test_a_request_goes_to_its_prefix_until_that_is_evicted() -> None:
    router, _ = fleet("a", "b", "c")
    text = blocks(1, 8)
    router.events("b", [stored(text)])
    (first, *_) = router.rank(text, 128)
    assert (first.replica, first.have, first.compute) == ("b", 127, 0.001)
    router.events("b", [BlockRemoved(text[2:], "GPU")])
    assert router.rank(text, 128)[0].have == 32
    router.events("b", [BlockRemoved(text[:2], "GPU")])
    assert {one.have for one in router.rank(text, 128)} == {0}
    router.check()


def test_what_begins_alike_goes_together_until_waiting_costs_more() -> None:
    router, _ = fleet("a", "b")
    system, chosen = blocks(1, 64), list[str]()  # 1024 tokens: a second
    for number in range(60):
        prompt = [*system, *blocks(100 + number, 4)]
        chosen.append(best(router.rank(prompt, 1088)))
        router.sent(chosen[-1], number, prompt, 1088)
        router.check()
    first = chosen[0]
    together = next(at for at, one in enumerate(chosen) if one != first)
    assert abs(together - 1024 // 64) <= 1  # each adds 64 ms, until they are as long as the beginning
    assert 20 <= chosen.count(first) <= 40


def test_a_hot_prefix_spreads_to_a_second_replica_and_then_is_there() -> None:
    router, _ = fleet("a", "b", "c")
    hot = blocks(1, 64)
    router.events("a", [stored(hot)])
    router.sent("a", 1, [], 500)
    assert best(router.rank(hot, 1024)) == "a"
    router.sent("a", 2, [], 2500)
    second = best(router.rank(hot, 1024))
    assert second != "a"
    router.events(second, [stored(hot)])
    router.sent(second, 3, [], 1000)
    assert best(router.rank(hot, 1024)) == second
    router.first(1)
    router.first(2)
    assert best(router.rank(hot, 1024)) == "a"


def test_a_replica_that_left_is_forgotten_also_where_another_takes_its_place() -> None:
    router, _ = fleet("a", "b")
    text = blocks(1, 8)
    router.events("a", [stored(text), stored(text, "REMOTE")])
    router.sent("a", 1, blocks(2, 8), 128)
    router.leave("a")
    router.check()
    router.first(1)
    router.ended(1)
    assert [(one.replica, one.have, one.restored) for one in router.rank(text, 128)] == [("b", 0, 0)]
    router.join("c")
    assert {one.have + one.restored for one in router.rank(text, 128)} == {0}
    with pytest.raises(KeyError):
        router.events("a", [])
    router.check()


def test_what_a_request_brings_is_there_until_it_ends_or_for_as_long_as_events_say() -> None:
    router, _ = fleet("a")
    text = blocks(1, 8)
    router.sent("a", 1, text, 130)
    assert router.rank(text, 130)[0].have == 128
    assert router.rank(text, 130)[0].wait == pytest.approx(0.13)
    router.first(1)
    assert router.rank(text, 130)[0].wait == 0
    router.events("a", [stored(text[:4])])
    router.ended(1)
    assert router.rank(text, 130)[0].have == 64
    router.check()


def test_a_shared_store_is_read_by_all_and_a_disk_by_its_own_replica() -> None:
    router, _ = fleet("a", "b")
    shared, own = blocks(1, 8), blocks(2, 8)
    router.events("a", [stored(shared, "REMOTE"), stored(own, "DISK")])
    for replica in ("a", "b"):
        router.load(replica, load(read=10_000.0))
    assert {one.replica: one.restored for one in router.rank(shared, 130)} == {"a": 128, "b": 128}
    assert {one.replica: one.restored for one in router.rank(own, 130)} == {"a": 128, "b": 0}
    for replica in ("a", "b"):
        router.load(replica, load(read=500.0))
    assert {one.restored for one in router.rank(shared, 130)} == {0}, "computing is faster"


def test_a_prompt_whose_end_is_not_stored_yet_is_not_looked_through() -> None:
    """It is asked for at each message of its replica."""
    router, _ = fleet("a")
    text, looked = blocks(1, 8), list[int]()
    router.events("a", [stored(text[:7], "REMOTE")])
    there = router._blocks.stored
    router._blocks.stored = lambda block: looked.append(block) or there(block)  # type: ignore[method-assign]
    assert not router.stored(text)
    assert looked == [text[7]]
    router.events("a", [stored(text, "REMOTE")])
    assert router.stored(text)


def test_before_any_measurement_tokens_are_compared_and_one_that_has_not_measured_is_as_the_others() -> None:
    router, _ = fleet()
    for replica in ("a", "b"):
        router.join(replica)
        router.events(replica, [AllBlocksCleared()])
    router.events("b", [stored(blocks(1, 4))])
    router.load("a", load(10, speed=None))
    assert [(one.replica, one.seconds) for one in router.rank(blocks(1, 4), 100)] == [("b", 72.0), ("a", 210.0)]
    assert not any(one.measured for one in router.rank([], 100))
    router.load("b", load(speed=500.0))
    assert all(one.measured for one in router.rank([], 100))
    assert {one.replica: one.compute for one in router.rank([], 100)} == {"a": 0.2, "b": 0.2}


def test_a_replica_without_sequences_or_cells_makes_wait_until_some_end() -> None:
    router, clock = fleet("a", "b")
    router.sent("a", 1, [], 10)
    router.first(1)
    clock.now = 2.0
    router.ended(1)  # a request decodes for 2 seconds
    router.load("a", Load(0, 4, 1000.0, None, cells_free=900, cells=1000, waiting=1, sequences=4))
    router.load("b", Load(0, 4, 1000.0, None, cells_free=0, cells=1000, waiting=0, sequences=8))
    assert {one.replica: one.wait for one in router.rank([], 100)} == {"a": 2 * 2 / 4, "b": 2 * 100 / 1000}


def test_events_of_other_blocks_are_refused_and_change_nothing() -> None:
    router, _ = fleet("a", "b")
    text = blocks(1, 4)
    router.events("a", [stored(text)])
    before = router.rank(text, 64)
    with pytest.raises(BadRequest):
        router.events("a", [BlockRemoved(text, "GPU"), BlockStored([7], None, None, 2 * SIZE, None, "GPU")])
    assert router.rank(text, 64) == before
    router.check()


def test_of_an_unknown_medium_nothing_is_known() -> None:
    router, _ = fleet("a")
    router.events("a", [stored(blocks(1, 4), "TAPE")])
    assert router.rank(blocks(1, 4), 64)[0].have == 0


def test_memory_is_bounded_and_what_was_touched_last_is_kept() -> None:
    router, _ = fleet("a", "b", most=100)
    kept = blocks(0, 10)
    router.events("a", [stored(kept)])
    for text in range(1, 50):
        router.events("b" if text % 2 else "a", [stored(blocks(text, 10))])
        router.sent("a", text, kept, 160)
        router.check()
    assert router.rank(kept, 160)[0].have == 159
    assert router.rank(blocks(1, 10), 160)[0].have == 0


def test_a_rank_of_a_thousand_replicas_takes_less_than_a_few_milliseconds() -> None:
    """Below one on an idle core."""
    router, _ = fleet(*map(str, range(1024)), most=100_000)
    text = blocks(1, 512)
    for replica in range(1024):
        router.events(str(replica), [stored(text[: replica // 2])])
    took = list[float]()
    for _ in range(20):
        began = perf_counter()
        router.rank(text, 8192)
        took.append(perf_counter() - began)
    assert min(took) < 0.01


def test_gateways_that_know_the_same_send_one_prompt_to_one_replica_and_others_to_others() -> None:
    routers = [fleet(*map(str, range(64)))[0] for _ in range(4)]
    for router in routers:
        for replica in range(64):
            router.load(str(replica), load(100 if replica % 2 else 0))  # which was not expected
    chosen = {text: {best(router.rank(blocks(text, 8), 128)) for router in routers} for text in range(64)}
    assert all(len(one) == 1 for one in chosen.values())
    assert len({next(iter(one)) for one in chosen.values()}) > 16


def test_of_two_that_have_a_prompt_one_with_fewer_requests_gets_it() -> None:
    router, clock = fleet("a", "b", "c")
    text = blocks(1, 64)
    router.sent("c", 1, [], 10)
    router.first(1)
    clock.now = 2.0
    router.ended(1)  # a request decodes for 2 seconds
    for replica, running, has in (("a", 8, 60), ("b", 2, 58), ("c", 2, 0)):
        router.events(replica, [stored(text[:has])])
        router.load(replica, load(running=running))
    found = {one.replica: one for one in router.rank(text, 1024)}
    assert [one.replica for one in router.rank(text, 1024)] == ["a", "b", "c"]
    assert found["a"].others == pytest.approx(0.064 * (1 + 8 / 2 * 0.064))
    assert found["b"].others == pytest.approx(0.096 * (1 + 4 / 2 * 0.096)), "as many come as to the mean replica"
    for replica, running in (("a", 200), ("b", 1), ("c", 1)):
        router.load(replica, load(running=running))
    router.sent("a", 2, [], 20)
    router.sent("b", 3, [], 20)
    assert best(router.rank(text, 1024)) == "b"


# -- beside a dumb router ----------------------------------------------------------------------------------------------


class DumbReplica:
    def __init__(self) -> None:
        self.media = {medium: set[int]() for medium in MEDIA}
        self.heard, self.load, self.reported, self.surprise = False, load(speed=None), 0.0, 0.0
        self.reports = self.sent = self.requests = 0


class DumbRouter:
    """Sets for each replica, and a loop over all of them."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.random = clock, random.Random(0)
        self.replicas: dict[str, DumbReplica] = {}
        self.requests: dict[int, tuple[str, int, int, list[int]]] = {}  # replica, reports, tokens left, what it brings
        self.began: dict[int, float] = {}
        self.coming: dict[tuple[str, int], int] = {}
        self.decoding = self.decoded = 0.0

    def events(self, replica: str, events: Sequence[KvEvent]) -> None:
        one = self.replicas[replica]
        one.heard = True
        for event in events:
            if isinstance(event, AllBlocksCleared):
                one.media = {medium: set() for medium in MEDIA}
                continue
            media = one.media[event.medium]
            change = media.add if isinstance(event, BlockStored) else media.discard
            for block in event.hashes:
                change(block)
                if event.medium == "GPU":
                    self.coming.pop((replica, block), None)

    def each(self, name: str) -> dict[str, float] | None:
        known = {key: 1 / speed for key, one in self.replicas.items() if (speed := getattr(one.load, name)) is not None}
        mean = sum(known.values()) / len(known) if known else None
        return None if mean is None else {key: known.get(key, mean) for key in self.replicas}

    def load(self, replica: str, load: Load) -> None:
        one = self.replicas[replica]
        if one.reports:
            done = (self.clock.now - one.reported) * (one.load.prefill_speed or 0.0)
            one.surprise = max(0.0, load.waiting_tokens - max(0.0, one.load.waiting_tokens - done) - one.sent)
        one.reports += 1
        one.load, one.reported, one.sent, one.requests = load, self.clock.now, 0, load.running + load.waiting

    def sent(self, replica: str, number: int, hashes: list[int], tokens: int) -> None:
        one = self.replicas[replica]
        have, restored = self.found(replica, hashes, tokens)
        brought = [b for b in hashes if b not in one.media["GPU"] or (replica, b) in self.coming]
        self.requests[number] = replica, one.reports, tokens - have - restored, brought
        for block in brought:
            one.media["GPU"].add(block)
            self.coming[replica, block] = number
        one.sent += tokens - have - restored
        one.requests += 1

    def first(self, number: int) -> None:
        replica, reports, tokens, brought = self.requests[number]
        if number not in self.began:
            self.began[number] = self.clock.now
            if self.replicas[replica].reports == reports:
                self.replicas[replica].sent -= tokens
        self.requests[number] = replica, reports, tokens, brought

    def ended(self, number: int) -> None:
        if number in self.began:
            self.decoding = FADING * self.decoding + self.clock.now - self.began[number]
            self.decoded = FADING * self.decoded + 1
        self.first(number)
        replica, reports, _, brought = self.requests.pop(number)
        if self.replicas[replica].reports == reports:
            self.replicas[replica].requests -= 1
        for block in brought:
            if self.coming.get((replica, block)) == number:
                del self.coming[replica, block]
                self.replicas[replica].media["GPU"].discard(block)

    def leave(self, replica: str) -> None:
        for number in [number for number, one in self.requests.items() if one[0] == replica]:
            self.ended(number)
        del self.replicas[replica]

    def found(self, replica: str, hashes: list[int], tokens: int) -> tuple[int, int]:
        media = self.replicas[replica].media
        remote = set[int]().union(*(one.media["REMOTE"] for one in self.replicas.values()))
        readable = media["GPU"] | media["CPU"] | media["DISK"] | remote
        have, end = (
            min(tokens - 1, SIZE * next((at for at, b in enumerate(hashes) if b not in there), len(hashes)))
            for there in (media["GPU"], readable)
        )
        each, read = self.each("prefill_speed"), self.each("read_speed")
        slow = each is not None and read is not None and read[replica] >= each[replica]
        return have, 0 if slow else end - have

    def rank(self, hashes: list[int], tokens: int) -> dict[str, tuple[float, float]]:
        """Of each replica what it costs, and by what it is ordered."""
        if not any(one.heard for one in self.replicas.values()):
            return {}
        each, read, count = self.each("prefill_speed"), self.each("read_speed"), len(self.replicas)
        key, surprise = self.random.getrandbits(64), sum(one.surprise for one in self.replicas.values()) / count
        hold = self.decoding / max(1.0, self.decoded)
        running = sum(one.load.running for one in self.replicas.values()) / count
        ends = self.decoded / self.decoding if each and self.decoding else 0.0
        scores: dict[str, float] = {}
        doubt: dict[str, tuple[int, float]] = {}
        seconds_of: dict[str, float] = {}
        for name, one in self.replicas.items():
            second = each[name] if each else 1.0
            done = (self.clock.now - one.reported) / second if each else 0.0
            waiting = max(0.0, one.load.waiting_tokens - done) + one.sent
            have, restored = self.found(name, hashes, tokens)
            wait = waiting * second
            if each and one.reports:
                used, cells = one.load.cells - one.load.cells_free, waiting + tokens - have
                sequences = max(0, one.requests + 1 - one.load.sequences) / max(1, one.load.running)
                wait = max(wait, hold * sequences, hold * max(0.0, cells - one.load.cells_free) / max(1, used))
            start = max(wait, restored * (read[name] if read else second))
            compute = (tokens - have - restored) * second
            rate = max(running, one.requests) * ends
            scores[name] = start + compute + compute * (1 + rate * (start + compute))
            salt = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
            part = (mixed([*hashes, key][have // SIZE] ^ salt) >> 11) / 2**53
            doubt[name] = have // SIZE, -math.log1p(-part) * surprise
            seconds_of[name] = second
        least = {level: min(other for there, other in doubt.values() if there == level) for level, _ in doubt.values()}
        late = {name: (doubt[name][1] - least[doubt[name][0]]) * seconds_of[name] for name in scores}
        return {name: (seconds, seconds + late[name]) for name, seconds in scores.items()}


def mixed(key: int) -> int:
    key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & MASK
    return key ^ (key >> 31)


def change(draw: random.Random, some: list[int]) -> tuple[str, Any]:
    """A method that both have, and what it is called with after the name of a replica."""
    what = draw.randrange(20)
    if what == 0:
        return "leave", ()
    if what == 1:
        return "events", ([AllBlocksCleared()],)
    if what < 10:
        medium = draw.choice(("GPU", "GPU", *MEDIA))
        return "events", ([BlockRemoved(some[2:], medium) if what < 4 else stored(some, medium)],)
    if what < 14:
        speed, read, free = (
            draw.choice((500.0, 1000.0, None)),
            draw.choice((None, 250.0, 4000.0)),
            draw.choice((0, 900)),
        )
        waiting, running, queue = draw.randrange(0, 400, 16), draw.randrange(6), draw.randrange(4)
        return "load", (Load(waiting, running, speed, read, free, 1000, queue, 8),)
    return "sent", (draw.getrandbits(40), some, len(some) * SIZE + draw.randrange(1, SIZE))


@pytest.mark.parametrize("seed", range(20))
def test_any_events_loads_and_requests_give_the_ranking_of_a_router_that_looks_at_everything(seed: int) -> None:
    draw, clock = random.Random(seed), Clock()
    router, dumb = Router(SIZE, most_blocks=10_000, clock=clock), DumbRouter(clock)
    texts = [[*blocks(0, 3), *blocks(text, 5)] if text % 2 else blocks(text, 8) for text in range(1, 7)]
    away = [str(at) for at in range(12)]
    for _ in range(120):
        clock.now += draw.choice((0.0, 0.125, 0.25))
        some = draw.choice(texts)[: draw.randrange(9)]
        if away and (len(dumb.replicas) < 2 or draw.random() < 0.2):
            router.join(away[-1])
            dumb.replicas[away.pop()] = DumbReplica()
        if dumb.requests and draw.random() < 0.3:
            name, given = draw.choice(("first", "ended")), (draw.choice([*dumb.requests]),)
        else:
            name, given = change(draw, some)
            given = (draw.choice([*dumb.replicas]), *given)
        for one in (router, dumb):
            getattr(one, name)(*given)
        router.check()
        if not dumb.replicas:
            continue
        tokens = len(some) * SIZE + 1
        expected, got = dumb.rank(some, tokens), router.rank(some, tokens)
        assert [one.seconds for one in got] == pytest.approx([expected[one.replica][0] for one in got])
        best = sorted(key for _, key in expected.values())[:MOST]
        assert [expected[one.replica][1] for one in got] == pytest.approx(best)
        assert len({one.replica for one in got}) == len(best)
