"""A subscriber that applies KV events, and asks for those that it has missed, knows exactly the full blocks that the
prefix tree and the tiers below it can match. Messages are decoded with the types that vLLM's subscribers have."""

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from kvcellar import BadRequest, Engine
from kvcellar.memory.prefix.blocks import START, TreeBlocks, blocks_of
from kvcellar.memory.prefix.kv_events import MEDIA, KvEvents, Mirror
from kvcellar.memory.prefix.node import TOKEN, Node, key_of, path_key, root_of
from kvcellar.memory.prefix.tree import LEAST, Tree
from kvcellar.memory.snapshot import Snapshot
from kvcellar.memory.spans import Span
from tests.engine.mixes import bytes_for, small_engine, tokens
from tests.engine.places import eventually
from tests.prefix.claims import TokenClaims
from tests.prefix.test_tree import ACTION, Run, World
from tests.zoo import ARCHS

GREEDY = {"max_tokens": 2, "temperature": 0.0, "ignore_eos": True}
PATIENCE = 240.0
LAST = (2**64 - 1).to_bytes(8, "big")
SIZE = 4
LOCAL = {"kv_events": "tcp://127.0.0.1:*", "kv_events_replay": "tcp://127.0.0.1:*", "kv_events_topic": "kv@here"}
ON = LOCAL | {"kv_events_block": SIZE}


class Batch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: "list[BlockStored | BlockRemoved | AllBlocksCleared]"
    data_parallel_rank: int | None = None


class Event(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(Event):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None = None
    extra_keys: list[tuple[Any, ...] | None] | None = None


class BlockRemoved(Event):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(Event):
    pass


DECODER = msgspec.msgpack.Decoder(Batch)


@dataclass
class Subscriber:
    """By medium and hash: the namespace and all tokens up to the end of a block."""

    blocks: dict[tuple[str, int], tuple[str, tuple[int, ...]]] = field(default_factory=dict)

    def apply(self, events: list[Any]) -> None:
        for event in events:
            match event:
                case AllBlocksCleared():
                    self.blocks.clear()
                case BlockRemoved(hashes, medium):
                    for one in hashes:
                        del self.blocks[medium, one]  # raises for what is not there
                case BlockStored():
                    self._store(event)

    def _store(self, event: BlockStored) -> None:
        size, parent = event.block_size, event.parent_block_hash
        assert len(event.token_ids) == size * len(event.block_hashes) > 0
        extra = event.extra_keys or [None] * len(event.block_hashes)
        namespace, text = ("", ()) if parent is None else self.blocks[event.medium, parent]
        if parent is None and extra[0] is not None:
            (namespace,) = extra[0]
        for at, one in enumerate(event.block_hashes):
            text += tuple(event.token_ids[at * size : (at + 1) * size])
            assert (event.medium, one) not in self.blocks, "stored twice"
            self.blocks[event.medium, one] = namespace, text

    def known(self, medium: str = "GPU") -> set[tuple[str, tuple[int, ...]]]:
        found = [block for (where, _), block in self.blocks.items() if where == medium]
        assert len(found) == len(set(found)), "two hashes of one block"
        return set(found)


def full(texts: set[tuple[str, tuple[int, ...]]], size: int) -> set[tuple[str, tuple[int, ...]]]:
    """Of prefixes: those that are full blocks."""
    return {(namespace, text) for namespace, text in texts if len(text) % size == 0}


def as_sent(events: list[Any]) -> list[Any]:
    return DECODER.decode(msgspec.msgpack.encode([0.0, events, 0])).events


# -- laws ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(0, 9), max_size=9), max_size=5), st.integers(1, 4), st.sampled_from(["", "n"]))
def test_blocks_of_parts_are_those_of_the_whole(parts, size, namespace) -> None:
    place, found, key = START, [], b""
    for part in parts:
        before = place.last
        blocks, place = blocks_of(namespace, place, key_of(part), size)
        assert blocks.parent == before == (found[-1] if found else None)
        assert len(blocks.key) == len(blocks.hashes) * size * TOKEN
        found, key = found + blocks.hashes, key + blocks.key
    whole = key_of(token for part in parts for token in part)
    assert (None, found, key) == blocks_of(namespace, START, whole, size)[0]
    assert len(found) == len(whole) // (size * TOKEN)
    assert whole.startswith(key)
    assert not set(found) & set(blocks_of(namespace + "x", START, whole, size)[0].hashes), "another namespace"


class Watched(World):
    """A world whose tree is published to a subscriber."""

    def watch(self, size: int) -> "Watched":
        self.subscriber, self.blocks, self.epoch = Subscriber(), TreeBlocks(size), 0
        self.parted, self.joined = self.blocks.parted, self.blocks.joined
        self.mirror = Mirror(size, lambda events: self.subscriber.apply(as_sent(events)))
        self.tree = Tree(self.claims, anywhere=self.anywhere, watch=self)
        return self

    def gained(self, node: Node, start: int) -> None:
        for blocks in self.blocks.gained(node, start, self.epoch):
            self.mirror.gained(root_of(node).namespace, blocks)

    def lost(self, node: Node, start: int) -> None:
        self.mirror.lost(self.blocks.lost(node, start))

    def forget(self) -> None:
        self.epoch += 1
        self.mirror.clear()


@pytest.mark.parametrize("anywhere", [True, False])
@given(actions=st.lists(ACTION, max_size=20), size=st.integers(1, 3))
def test_a_subscriber_knows_the_full_blocks_of_the_tree(anywhere, actions, size) -> None:
    world = Watched(anywhere).watch(size)
    for action in actions:
        world.play(action)
        world.mirror.flush()
        assert world.subscriber.known() == full(world.held()[0], size)
    while any(world.tree.discarding(world.tree.roots())):
        pass
    world.mirror.flush()
    assert world.subscriber.known() == full(world.held()[0], size)
    world.mirror.device_cleared()
    world.mirror.flush()
    assert not world.subscriber.blocks


@given(actions=st.lists(st.one_of(ACTION, st.none()), max_size=20), size=st.integers(1, 3))
def test_after_all_was_forgotten_blocks_come_back_with_what_continues_them(actions, size) -> None:
    """None: what was published is forgotten. Subscribers never have a block that is not there, nor one without those
    before it; and they have all that the last request, which is new, continues."""
    world = Watched(anywhere=True).watch(size)
    for action in actions:
        world.forget() if action is None else world.play(action)
        world.mirror.flush()
        assert world.subscriber.known() <= full(world.held()[0], size)
    world.play(Run("", [(1,), (0, 1, 1), (7,) * size], [], [], keep=True))
    world.mirror.flush()
    text = (1, 0, 1, 1, *(7,) * size)
    whole = {("", text[:n]) for n in range(size, len(text) + 1, size)}
    assert whole <= world.subscriber.known() <= full(world.held()[0], size)


def grow(tree: Tree, claims: TokenClaims, seed: int, *, tokens: int = 4000, chunk: int = 100) -> None:
    """A prompt is read in chunks, and evicted in parts."""
    text = [seed, *range(10, 9 + tokens)]
    root = tree.root("")
    node = tree.lock(root, tree.match(root, key_of(text), tokens - 1))
    for end in range(chunk, tokens + 1, chunk):
        claim = claims.make(text[:end], end - chunk, set())
        node, _ = tree.insert(root, key_of(text[:end]), claim, end - chunk, node)
    tree.unlock(node)


def test_each_token_is_hashed_and_queued_once_in_whatever_chunks_it_is_computed(monkeypatch) -> None:
    hashed: list[int] = []

    def counted(data: bytes = b"", **how: Any) -> Any:
        hashed.append(len(data))
        return blake2b(data, **how)

    world, size, tokens = Watched(anywhere=True).watch(16), 16, 4000
    monkeypatch.setattr("kvcellar.memory.prefix.blocks.blake2b", counted)
    queued: list[int] = []
    monkeypatch.setattr(world.mirror, "gained", lambda namespace, blocks: queued.append(len(blocks.key)))
    grow(world.tree, world.claims, 1, tokens=tokens)
    assert sum(hashed) == sum(queued) == tokens // size * size * TOKEN
    while world.tree.evict_leaf(LEAST):
        pass
    assert sum(hashed) == tokens // size * size * TOKEN, "what is lost was hashed already"


def test_long_prompts_wait_to_be_published_in_as_many_bytes_as_they_have(monkeypatch) -> None:
    monkeypatch.setattr("kvcellar.memory.prefix.kv_events.WAITING_BYTES", 2 * 4000 * TOKEN)
    events, go_on = KvEvents("tcp://127.0.0.1:*", size=16), threading.Event()
    try:
        events._put(lambda: go_on.wait() and None)
        claims = TokenClaims()
        tree = Tree(claims, anywhere=True, watch=events)
        for seed in (1, 2):
            grow(tree, claims, seed)
        assert not events.lost_changes
        grow(tree, claims, 3)
        assert events.lost_changes
    finally:
        go_on.set()
        events.close()


@given(st.data())
def test_a_subscriber_knows_the_full_blocks_of_tiers(data) -> None:
    """Snapshots of one text that are cut differently have blocks in common: these stay until the last one goes."""
    size, subscriber = data.draw(st.integers(1, 3)), Subscriber()
    mirror = Mirror(size, lambda events: subscriber.apply(as_sent(events)))
    text = tuple(data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=10)))
    chains = [sorted(data.draw(st.sets(st.integers(1, len(text)), min_size=1))) for _ in range(3)]
    there: dict[tuple[str, int], list[Snapshot]] = {}
    for tier in ("host", "disk"):
        for number, ends in enumerate(chains):
            keys = [bytes([number, end]) for end in ends]
            parts = zip([None, *keys], [0, *ends], ends, keys, strict=False)
            there[tier, number] = [
                Snapshot(key, parent, "n", Span(start, end), key_of(text[start:end]), b"", ())
                for parent, start, end, key in parts
            ]
    stored: dict[tuple[str, int], int] = dict.fromkeys(there, 0)
    for _ in range(20):
        chain, grows = data.draw(st.sampled_from(sorted(there))), data.draw(st.booleans())
        if grows and stored[chain] < len(there[chain]):
            mirror.stored(chain[0], there[chain][stored[chain]])
            stored[chain] += 1
        elif not grows and stored[chain]:
            stored[chain] -= 1
            mirror.removed(chain[0], there[chain][stored[chain]].key)
        mirror.flush()
        for tier in ("host", "disk"):
            ends = {there[one][stored[one] - 1].span.end for one in there if one[0] == tier and stored[one]}
            expected = {("n", text[:n]) for n in range(size, max(ends, default=0) + 1, size)}
            assert subscriber.known(MEDIA[tier]) == expected


# -- the wire -----------------------------------------------------------------------------------------------------


class Listener:
    """A subscriber at the sockets of an engine."""

    def __init__(self, engine: Engine, topic: bytes = b"kv@here") -> None:
        events = engine._built.loop.manager.events
        assert events is not None
        self.context = zmq.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.connect(events.endpoint)
        self.sub.setsockopt(zmq.SUBSCRIBE, topic)
        self.request = self.context.socket(zmq.DEALER)
        self.request.connect(events.replay_endpoint)
        self.subscriber, self.next, self.topic = Subscriber(), 0, topic

    def replay(self) -> None:
        """Apply all that was missed, from the replay socket."""
        self.request.send_multipart([b"", self.next.to_bytes(8, "big")])
        while True:
            assert self.request.poll(1000 * PATIENCE)
            empty, number, batch = self.request.recv_multipart()
            assert empty == b""
            if number == LAST:
                assert batch == b""
                return
            assert int.from_bytes(number, "big") == self.next
            self.take(batch)

    def read(self) -> list[int]:
        """The numbers of the messages that have arrived. Applies those that follow what was applied, asks for what is
        missing, and passes over what is known."""
        numbers = []
        while self.sub.poll(50):
            topic, number, batch = self.sub.recv_multipart()
            assert topic == self.topic
            numbers.append(int.from_bytes(number, "big"))
            if numbers[-1] > self.next:
                self.replay()
            elif numbers[-1] == self.next:
                self.take(batch)
        return numbers

    def until(self, medium: str, expected: set[tuple[str, tuple[int, ...]]]) -> None:
        until = time.monotonic() + PATIENCE
        while self.subscriber.known(medium) != expected:
            assert time.monotonic() < until, "the events do not say what there is"
            self.read()
            self.replay()

    def take(self, batch: bytes) -> None:
        self.subscriber.apply(DECODER.decode(batch).events)
        self.next += 1

    def close(self) -> None:
        self.context.destroy(linger=0)


@contextmanager
def listening(engine: Engine) -> Iterator[Listener]:
    listener = Listener(engine)
    try:
        yield listener
    finally:
        listener.close()


def in_tree(engine: Engine) -> set[tuple[str, tuple[int, ...]]]:
    """The full blocks of the tree, on the engine's thread."""

    def find() -> set[tuple[str, tuple[int, ...]]]:
        found: set[tuple[str, tuple[int, ...]]] = set()
        for node in engine._built.loop.manager.prefixes.tree.nodes():
            path = tuple(memoryview(path_key(node, node.end)).cast("q"))
            found |= {(root_of(node).namespace, path[:n]) for n in range(node.start + 1, node.end + 1)}
        return full(found, SIZE)

    return engine._loop.call(find)


def in_store(engine: Engine) -> set[tuple[str, tuple[int, ...]]]:
    def find() -> set[tuple[str, tuple[int, ...]]]:
        store, found = engine._built.loop.manager.store, set[tuple[str, tuple[int, ...]]]()
        assert store is not None
        for entry in store.transfers.tiers[-1].entries():
            path = store.catalogue.path(entry.snapshot.key)
            assert path is not None
            namespace, key, start = path
            text = tuple(memoryview(key).cast("q"))
            found |= {(namespace, text[:n]) for n in range(start + 1, len(key) // TOKEN + 1)}
        return full(found, SIZE)

    return engine._loop.call(find)


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_a_subscriber_of_an_engine_knows_what_it_has(name) -> None:
    draw = random.Random(1)
    texts = [list(tokens(draw, 30)) for _ in range(4)]
    texts += [[*texts[0][:13], *texts[1]], [*texts[2], *texts[3]]]
    with small_engine(name, cache_bytes=bytes_for(name, 120, **ON), **ON) as engine, listening(engine) as listener:
        for number, text in enumerate(texts):
            engine.generate(text, **GREEDY)
            if number % 2:
                listener.until("GPU", in_tree(engine))
        engine.clear_cache()
        listener.until("GPU", set())


def test_one_that_comes_late_or_has_lost_messages_asks_for_them() -> None:
    with small_engine("llama", **ON) as engine:
        first = list(tokens(random.Random(1), 40))
        engine.generate(first, **GREEDY)
        with listening(engine) as late:
            while not late.read():  # until its subscription has arrived
                engine.generate(list(tokens(random.Random(time.monotonic()), 9)), **GREEDY)
            assert ("", tuple(first[:SIZE])) in late.subscriber.known()
            late.sub.setsockopt(zmq.UNSUBSCRIBE, late.topic)
            late.sub.setsockopt(zmq.SUBSCRIBE, b"nothing")
            engine.generate(list(tokens(random.Random(2), 40)), **GREEDY)
            late.until("GPU", in_tree(engine))


def test_a_namespace_is_an_extra_key_of_the_first_block() -> None:
    from kvcellar.frontend.result import Collector

    with small_engine("llama", **ON) as engine, listening(engine) as listener:
        for namespace in ("a", "b"):
            collector = Collector(1)
            engine.submit([5] * 20, engine.params(**GREEDY), deliver=collector.deliver, namespace=namespace)
            collector.result()
        listener.until("GPU", in_tree(engine))
        assert {namespace for namespace, _ in listener.subscriber.known()} == {"a", "b"}
        assert len(listener.subscriber.blocks) == 2 * (21 // SIZE)


def test_blocks_of_the_store_have_its_medium(tmp_path) -> None:
    ARCHS["llama"].build().save_pretrained(tmp_path / "model")
    settings = {"dtype": "float32", "cache_bytes": 16_000_000, "threads": 1, "store": str(tmp_path / "store"), **ON}
    text = list(tokens(random.Random(1), 100))
    for again in (False, True):
        with Engine(tmp_path / "model", **settings) as engine, listening(engine) as listener:
            if again:
                listener.until("DISK", in_store(engine))
                assert not listener.subscriber.known("GPU")
                assert ("", tuple(text)) in listener.subscriber.known("DISK")
            engine.generate(text, **GREEDY)
            while engine.stats().store.unwritten:
                time.sleep(0.005)
            listener.until("DISK", in_store(engine))
            listener.until("GPU", in_tree(engine))
    with Engine(tmp_path / "model", **settings) as engine, listening(engine) as listener:
        engine.cache.clear()
        listener.until("DISK", set())


def test_a_restart_begins_with_batch_0_that_clears_all_blocks() -> None:
    with small_engine("llama", **ON) as engine, listening(engine) as listener:
        listener.request.send_multipart([b"", bytes(8)])
        assert listener.request.poll(1000 * PATIENCE)
        _, number, batch = listener.request.recv_multipart()
        assert number == bytes(8)
        assert DECODER.decode(batch).events == [AllBlocksCleared()]
        assert DECODER.decode(batch).data_parallel_rank == 0


def test_a_change_that_fails_or_is_lost_clears_all_and_events_go_on(monkeypatch) -> None:
    """Subscribers have no block that is not there; what continues a known prefix brings all of that back."""
    with small_engine("llama", **ON) as engine, listening(engine) as listener:
        events, text = engine._built.loop.manager.events, list(tokens(random.Random(1), 24))
        called = list[int]()

        def until_known() -> None:
            until = time.monotonic() + PATIENCE
            while ("", tuple(text[: len(text) // SIZE * SIZE])) not in listener.subscriber.known():
                assert time.monotonic() < until
                listener.replay()

        for number in range(2):
            engine.generate(text, **GREEDY)
            until_known()
            if number:
                monkeypatch.setattr("kvcellar.memory.prefix.kv_events.WAITING", 0)
                events._put(lambda: None)
                monkeypatch.undo()
            else:
                events._put(lambda: 1 // 0)
            events.after(lambda number=number: called.append(number))
            listener.until("GPU", set())
            assert engine.stats().kv_events_lost == number + 1
            eventually(lambda number=number: called == [*range(number + 1)], "it is called")
            text += tokens(random.Random(number), 24)
            engine.generate(text, **GREEDY)
            until_known()
            assert listener.subscriber.known() <= in_tree(engine)
        engine.clear_cache()
        listener.until("GPU", set())


def test_without_its_thread_nothing_waits_to_be_published(monkeypatch) -> None:
    def failing(events: list[Any]) -> None:
        raise RuntimeError

    with small_engine("llama", **ON) as engine:
        events = engine._built.loop.manager.events
        monkeypatch.setattr(events._mirror, "_send", failing)
        engine.generate([5] * 12, **GREEDY)
        events._thread.join(PATIENCE)
        engine.generate([6] * 12, **GREEDY)
        assert not events._thread.is_alive()
        assert not events._changes
        called = list[int]()
        events.after(lambda: called.append(1))
        assert called == [1], "at once"


def test_calls_stay_where_changes_are_lost_and_are_made_at_the_end(monkeypatch) -> None:
    events, called, held = KvEvents(None), list[int](), threading.Event()
    events.after(held.wait)
    monkeypatch.setattr("kvcellar.memory.prefix.kv_events.WAITING", 0)
    for number in range(3):
        events.after(lambda number=number: called.append(number))
    monkeypatch.setattr(events._mirror, "_send", lambda batch: 1 // 0)
    held.set()
    events._thread.join(PATIENCE)
    assert called == [0, 1, 2]


def test_requests_that_are_none_are_ignored() -> None:
    with small_engine("llama", **ON) as engine, listening(engine) as listener:
        for frames in ([b""], [b"", b"x"], [b"", bytes(8), bytes(8)], [b"x" * 100]):
            listener.request.send_multipart(frames)
        listener.replay()
        assert listener.next > 0


def test_only_the_last_batches_are_replayed(monkeypatch) -> None:
    monkeypatch.setattr("kvcellar.memory.prefix.kv_events.REPLAYED", 3)
    with small_engine("llama", **ON) as engine, listening(engine) as listener:
        for number in range(6):
            engine.generate([5 + number] * 12, **GREEDY)
        until = time.monotonic() + PATIENCE
        numbers: list[int] = []
        while len(numbers) != 3 or numbers[0] == 0:
            assert time.monotonic() < until
            listener.request.send_multipart([b"", bytes(8)])
            numbers = []
            while (frames := listener.request.recv_multipart())[1] != LAST:
                numbers.append(int.from_bytes(frames[1], "big"))
        assert numbers == list(range(numbers[0], numbers[0] + 3)), "a subscriber sees that batches are missing"


def test_an_engine_that_cannot_be_made_frees_the_address(tmp_path) -> None:
    address = f"ipc://{tmp_path / 'events'}"
    with pytest.raises(BadRequest, match="has no files"):
        small_engine("llama", kv_events=address, store=str(tmp_path / "store"))
    assert not [thread for thread in threading.enumerate() if thread.name == "kvcellar-events"]
    with small_engine("llama", kv_events=address) as engine:
        assert engine._built.loop.manager.events is not None


def test_without_an_address_nothing_is_published() -> None:
    with small_engine("llama") as engine:
        assert engine._built.loop.manager.events is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_events": "nowhere"}, "kv_events: cannot publish at 'nowhere'"),
        ({"kv_events": "tcp://127.0.0.1:*", "kv_events_replay": "x"}, "kv_events_replay: cannot publish at 'x'"),
        ({"kv_events_replay": "tcp://127.0.0.1:*"}, "kv_events_replay needs kv_events"),
        ({"kv_events_block": 0}, "kv_events_block must be a whole number of at least 1"),
        ({"kv_events_topic": 5}, "kv_events_topic must be text"),
        ({"kv_events": 5}, "kv_events must be text"),
    ],
)
def test_settings_that_cannot_be_met_are_refused(settings, message) -> None:
    with pytest.raises(BadRequest, match=message):
        small_engine("llama", **settings).close()
