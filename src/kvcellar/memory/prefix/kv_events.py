"""kv_events: publishes which blocks of tokens an engine has, as vLLM and SGLang do, for routers that send a request to
where its prefix is: over ZeroMQ, and to those that listen in this process, without tokens.

A PUB socket sends messages of three frames: the topic; the number of the batch, 8 bytes, big-endian; and the batch in
MessagePack: `[time, events, 0]`, where an event is an array that begins with its name:

    ["BlockStored", hashes, hash of the block before, token ids, block size, null, medium, null, extra keys]
    ["BlockRemoved", hashes, medium]
    ["AllBlocksCleared"]

A ROUTER socket replays: a request is an empty frame and the number of the first batch that is wanted; the answers are
empty frame, number and batch, and at the end the number -1 with an empty batch. Batch 0 has `AllBlocksCleared`: a
subscriber that sees numbers begin again has missed a restart. The device is the medium "GPU", of whatever kind it is.
`extra keys` has the namespace at the first block of a sequence. Of what was computed with an adapter, the null after
`medium` (vLLM's name of a LoRA) is the digest of the adapter's weights.

The engine's thread and those of tiers only put what has changed into a queue; one thread makes events of it, and owns
the sockets. What waits there has new tokens only: nodes of the prefix tree keep the hashes of their blocks.

Always true of what was published:
  * a block of a medium is stored if and only if its last token, and all before it, are there;
  * `BlockStored` and `BlockRemoved` of a block and medium alternate.

And of calls `after` what has changed: each is made once, also where changes were lost or nothing is published any
more.

Where changes were lost, because one failed or too many were waiting, `AllBlocksCleared` is published. What was there
before is then published again only where something new continues it on the device: subscribers may miss blocks that
are there, and have none that are not.
"""

import logging
import select
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import groupby
from typing import Any

import msgspec

from kvcellar.errors import BadRequest, extra_missing, shown
from kvcellar.memory.prefix.blocks import START, Blocks, Place, TreeBlocks, blocks_of
from kvcellar.memory.prefix.node import TOKEN, Node, root_of
from kvcellar.memory.snapshot import Snapshot, adapter_of, requested

log = logging.getLogger("kvcellar.engine")

MEDIA = {"device": "GPU", "host": "CPU", "disk": "DISK", "remote": "REMOTE"}
REPLAYED = 10_000  # batches that can be replayed,
REPLAYED_BYTES = 64 << 20  # of so many bytes together
TOGETHER = 256  # changes of one batch, at most
QUEUED = 10_000  # messages for one subscriber that does not read; more are lost to it, and it asks for them again
WAITING, WAITING_BYTES = 100_000, 256 << 20  # changes that were not published yet, and the bytes of their tokens
CLOSING = 1.0  # seconds for what was not sent at the end
END = (2**64 - 1).to_bytes(8, "big")  # -1


class BlockStored(msgspec.Struct, frozen=True, array_like=True, tag=True):
    hashes: list[int]
    parent: int | None  # of the block before
    tokens: list[int] | None
    size: int
    lora_id: None
    medium: str
    adapter: str | None = None  # the digest of its weights
    extra: list[list[str] | None] | None = None


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, tag=True):
    hashes: list[int]
    medium: str


class AllBlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared
Send = Callable[[list[KvEvent]], None]
Change = Callable[[], None]


class Mirror:
    """What was published. Makes events of changes; `send` is called with those of one batch."""

    def __init__(self, size: int, send: Send) -> None:
        self._size, self._send = size, send
        self._there: dict[str, Counter[int]] = {medium: Counter() for medium in MEDIA.values()}
        self._snapshots: dict[str, dict[bytes, tuple[Place, list[int]]]] = {medium: {} for medium in MEDIA.values()}
        self._events: list[KvEvent] = []

    def all(self) -> list[KvEvent]:
        """Events of all that is there, without tokens."""
        found = ((medium, list(there)) for medium, there in self._there.items() if there)
        stored = (BlockStored(hashes, None, None, self._size, None, medium) for medium, hashes in found)
        return [AllBlocksCleared(), *stored]

    def flush(self) -> None:
        """Send what has changed since the last call."""
        if self._events:
            events, self._events = self._events, []
            self._send(events)

    def clear(self) -> None:
        """Nothing is there, as when an engine begins; what was not sent is not sent any more."""
        for medium in MEDIA.values():
            self._there[medium].clear()
            self._snapshots[medium].clear()
        self._events = [AllBlocksCleared()]

    def gained(self, namespace: str, blocks: Blocks) -> None:
        """The device has these blocks, and those before them."""
        self._store(MEDIA["device"], namespace, blocks, once=True)

    def lost(self, hashes: Iterable[int]) -> None:
        """The device has these blocks no longer."""
        self._remove(MEDIA["device"], hashes)

    def device_cleared(self) -> None:
        medium = MEDIA["device"]
        self._remove(medium, list(self._there[medium].elements()))

    def stored(self, tier: str, snapshot: Snapshot) -> None:
        """A tier has a snapshot, and those before it."""
        medium = MEDIA[tier]
        known = self._snapshots[medium]
        before = known.get(snapshot.parent) if snapshot.parent is not None else (START, [])
        if snapshot.key in known or before is None:
            return
        blocks, place = blocks_of(snapshot.namespace, before[0], snapshot.tokens, self._size)
        known[snapshot.key] = place, blocks.hashes
        self._store(medium, snapshot.namespace, blocks)

    def removed(self, tier: str, key: bytes) -> None:
        """A tier has a snapshot no longer."""
        medium = MEDIA[tier]
        if (found := self._snapshots[medium].pop(key, None)) is not None:
            self._remove(medium, found[1])

    def _store(self, medium: str, namespace: str, blocks: Blocks, *, once: bool = False) -> None:
        """Several snapshots may have one block, and no two nodes of the prefix tree: what it has counts `once`."""
        there = self._there[medium]
        old = [there[one] > 0 for one in blocks.hashes]
        for one, known in zip(blocks.hashes, old, strict=True):
            there[one] += not (known and once)
        at = 0
        for known, run in groupby(old):
            until = at + len(list(run))
            if not known:
                self._events.append(self._stored(blocks, at, until, medium, namespace))
            at = until

    def _stored(self, blocks: Blocks, start: int, end: int, medium: str, namespace: str) -> BlockStored:
        """The event of the blocks number `start` to `end`."""
        hashes, step, extra = blocks.hashes[start:end], self._size * TOKEN, None
        parent = blocks.hashes[start - 1] if start else blocks.parent
        tokens = memoryview(blocks.key)[start * step : end * step].cast("q").tolist()
        if requests := requested(namespace):
            extra = [[requests] if parent is None and not at else None for at in range(len(hashes))]
        return BlockStored(hashes, parent, tokens, self._size, None, medium, adapter_of(namespace) or None, extra)

    def _remove(self, medium: str, hashes: Iterable[int]) -> None:
        there, gone = self._there[medium], list[int]()
        for one in hashes:
            if not there[one]:
                continue  # it was there when all was cleared
            there[one] -= 1
            if not there[one]:
                del there[one]
                gone.append(one)
        if gone:
            self._events.append(BlockRemoved(gone, medium))


def _zmq() -> Any:
    """Raises `BadRequest`."""
    try:
        import zmq
    except ImportError as error:
        raise BadRequest(extra_missing("kv_events", "events", error), "kv_events") from error
    return zmq


class KvEvents:
    """The publisher of one engine. What it is told of may come from any thread."""

    def __init__(self, endpoint: str | None, *, replay: str | None = None, topic: str = "", size: int = 16) -> None:
        """Binds to `endpoint`, and to `replay`; None: to nothing, for those that `listen`. Raises `BadRequest`, naming
        the setting, where that is not possible."""
        self._zmq: Any = None if endpoint is None else _zmq()
        self._encode = msgspec.msgpack.Encoder().encode
        self._context: Any = None if endpoint is None else self._zmq.Context()
        self._listeners: list[Send] = []
        self._topic, self._size = topic.encode(), size
        # with bytes of tokens, and whether it stays where changes are lost; None: the end
        self._changes: deque[tuple[int, Change | None, bool]] = deque()
        self._waiting_bytes, self._ended, self._lock = 0, False, threading.Lock()
        self._blocks, self._epoch = TreeBlocks(size), 0
        self.parted, self.joined = self._blocks.parted, self._blocks.joined
        self.lost_changes = 0  # how often all blocks were cleared because changes were lost
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._number, self._sent_bytes = 0, 0
        self._sent: deque[tuple[int, bytes]] = deque()
        self._mirror = Mirror(size, self._publish)
        try:
            self._pub: Any = None
            self._replay: Any = None
            if endpoint is not None:
                self._pub = self._bound(self._zmq.PUB, endpoint, "kv_events")
                self.endpoint = self._address(self._pub)
            if endpoint is not None and replay is not None:
                self._replay = self._bound(self._zmq.ROUTER, replay, "kv_events_replay")
                self.replay_endpoint = self._address(self._replay)
            self._mirror.clear()
            self._thread = threading.Thread(target=self._run, name="kvcellar-events", daemon=True)
            self._thread.start()
        except BaseException:
            self._close_sockets()
            raise

    def _bound(self, kind: int, endpoint: str, setting: str) -> Any:
        opened = self._context.socket(kind)
        opened.set_hwm(QUEUED)
        try:
            opened.bind(endpoint)
        except self._zmq.ZMQError as error:
            opened.close(linger=0)
            raise BadRequest(f"{setting}: cannot publish at {shown(endpoint)}: {error}", setting) from error
        return opened

    def _address(self, opened: Any) -> str:
        return opened.getsockopt_string(self._zmq.LAST_ENDPOINT)

    # -- listeners in this process ------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Tokens of a block."""
        return self._size

    def listen(self, send: Send) -> None:
        """From now on `send` is called with events, on the thread that makes them: first with those of all that is
        there. It must neither raise nor block."""

        def begin() -> None:
            self._mirror.flush()
            send(self._mirror.all())
            self._listeners.append(send)

        self._put(begin, stays=True)

    def leave(self, send: Send) -> None:
        """One that listens is not called any more, soon."""
        self._put(lambda: self._listeners.remove(send) if send in self._listeners else None, stays=True)

    def after(self, call: Callable[[], None]) -> None:
        """`call` when listeners have been told all that has changed until now. It must neither raise nor block."""

        def told() -> None:
            try:
                self._mirror.flush()
            finally:
                call()

        if not self._put(told, stays=True):
            call()

    # -- changes ------------------------------------------------------------------------------------------------

    def gained(self, node: Node, start: int) -> None:
        """A node of the prefix tree has tokens from `start` on that it did not have."""
        namespace, epoch = root_of(node).namespace, self._epoch
        for blocks in self._blocks.gained(node, start, epoch):
            self._put(lambda blocks=blocks: self._mirror.gained(namespace, blocks), len(blocks.key), epoch)

    def lost(self, node: Node, start: int) -> None:
        """A node is about to lose its tokens from `start` on."""
        if gone := self._blocks.lost(node, start):
            self._put(lambda: self._mirror.lost(gone), len(gone) * TOKEN)

    def device_cleared(self) -> None:
        """The prefix tree was made anew."""
        self._put(self._mirror.device_cleared)

    def stored(self, tier: str, snapshot: Snapshot) -> None:
        """A tier has a snapshot, and the one that it continues."""
        self._put(lambda: self._mirror.stored(tier, snapshot), len(snapshot.tokens))

    def removed(self, tier: str, key: bytes) -> None:
        self._put(lambda: self._mirror.removed(tier, key))

    def _put(self, change: Change | None, size: int = 0, epoch: int | None = None, *, stays: bool = False) -> bool:
        """Queue a change whose tokens take `size` bytes. That of an `epoch` is left out after the epoch's end: it
        continues blocks that subscribers have forgotten. False where nothing is published any more."""
        with self._lock:
            if self._ended:
                return False
            if len(self._changes) >= WAITING or self._waiting_bytes + size > WAITING_BYTES:
                self._forget()
                self._changes.appendleft((0, self._mirror.clear, False))
                log.warning("too many KV events wait to be published; subscribers are told to forget all blocks")
            if epoch is None or epoch == self._epoch:
                self._changes.append((size, change, stays))
                self._waiting_bytes += size
        with suppress(OSError):  # it will be woken by what is there already, or is closed
            self._wake.send(b"\0")
        return True

    def _forget(self) -> None:
        """Leave out all changes that wait: subscribers begin again with no blocks. The lock is held."""
        self._changes = deque(one for one in self._changes if one[2])
        self._waiting_bytes = 0
        self._epoch += 1
        self.lost_changes += 1

    def close(self) -> None:
        """Send what has changed. May be called again."""
        self._put(None, stays=True)
        self._thread.join(CLOSING)

    # -- on the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller: Any = select.poll() if self._zmq is None else self._zmq.Poller()
        poller.register(self._woken.fileno(), select.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, select.POLLIN)
        try:
            while self._apply():
                ready = dict(poller.poll())
                if self._replay is not None and self._replay in ready:
                    self._answer(self._replay)
                if self._woken.fileno() in ready:
                    with suppress(BlockingIOError):
                        self._woken.recv(4096)
        except Exception:
            log.exception("KV events are not published any more")
        finally:
            with self._lock:
                self._ended = True
                left = [change for _, change, stays in self._changes if stays and change is not None]
                self._changes.clear()
            for change in left:
                with suppress(Exception):
                    change()
            self._close_sockets()

    def _apply(self) -> bool:
        """Publish what has changed. False at the end."""
        while True:
            try:
                more = self._apply_some()
                self._mirror.flush()
            except Exception:
                log.exception("KV events were lost; subscribers are told to forget all blocks")
                with self._lock:
                    self._forget()
                self._mirror.clear()
                self._mirror.flush()  # where this fails too, nothing more is published
                continue
            if more is not None:
                return more

    def _apply_some(self) -> bool | None:
        """Apply changes of one batch. False at the end, True if there are no more now."""
        for _ in range(TOGETHER):
            with self._lock:
                if not self._changes:
                    return True
                size, change, _ = self._changes.popleft()
                self._waiting_bytes -= size
            if change is None:
                return False
            change()
        return None

    def _publish(self, events: list[KvEvent]) -> None:
        if self._listeners:
            replace = msgspec.structs.replace
            plain = [replace(one, tokens=None) if isinstance(one, BlockStored) else one for one in events]
            for send in list(self._listeners):
                send(plain)
        if self._pub is None:
            return
        batch = self._encode([time.time(), events, 0])
        self._sent.append((self._number, batch))
        self._sent_bytes += len(batch)
        while len(self._sent) > REPLAYED or (self._sent_bytes > REPLAYED_BYTES and len(self._sent) > 1):
            self._sent_bytes -= len(self._sent.popleft()[1])
        number, self._number = self._number, self._number + 1
        self._pub.send_multipart((self._topic, number.to_bytes(8, "big"), batch))

    def _answer(self, replay: Any) -> None:
        """Replay to one subscriber. Of one that does not read, the rest is lost."""
        frames = replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            log.warning(
                "a request for KV events has %d frames, not an empty one and a number of 8 bytes", len(frames) - 1
            )
            return
        subscriber, start = frames[0], int.from_bytes(frames[2], "big")
        for number, batch in self._sent:
            if number >= start:
                replay.send_multipart((subscriber, b"", number.to_bytes(8, "big"), batch))
        replay.send_multipart((subscriber, b"", END, b""))

    def _close_sockets(self) -> None:
        if self._context is not None:
            self._context.destroy(linger=int(1000 * CLOSING))
        self._wake.close()
        self._woken.close()
