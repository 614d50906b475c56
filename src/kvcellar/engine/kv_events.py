"""kv_events: publishes which blocks of tokens an engine has, as vLLM and SGLang do, for routers that send a request to
where its prefix is.

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
the sockets.

Always true of what was published:
  * a block of a medium is stored if and only if its last token, and all before it, are there;
  * `BlockStored` and `BlockRemoved` of a block and medium alternate.

Where changes were lost, because one failed or too many were waiting, `AllBlocksCleared` is published. What was there
before is then published again only where something new continues it on the device: subscribers may miss blocks that
are there, and have none that are not.
"""

import logging
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any

from kvcellar.engine.settings import Settings
from kvcellar.errors import BadRequest, shown
from kvcellar.prefix.blocks import START, Block, Place, blocks_of
from kvcellar.prefix.node import Node, root_of
from kvcellar.prefix.why import path_key
from kvcellar.snapshot import Snapshot, adapter_of, requested

log = logging.getLogger("kvcellar.engine")

MEDIA = {"device": "GPU", "host": "CPU", "disk": "DISK", "remote": "REMOTE"}
REPLAYED = 10_000  # batches that can be replayed,
REPLAYED_BYTES = 64 << 20  # of so many bytes together
TOGETHER = 256  # changes of one batch, at most
QUEUED = 10_000  # messages for one subscriber that does not read; more are lost to it, and it asks for them again
WAITING, WAITING_BYTES = 100_000, 256 << 20  # changes that were not published yet, and the bytes of their tokens
CLOSING = 1.0  # seconds for what was not sent at the end
END = (2**64 - 1).to_bytes(8, "big")  # -1
_LOOPBACK = ("tcp://127.", "tcp://localhost:", "tcp://[::1]:")
Event = list[Any]
Send = Callable[[list[Event]], None]
Change = Callable[[], None]


class Mirror:
    """What was published. Makes events of changes; `send` is called with those of one batch."""

    def __init__(self, size: int, send: Send) -> None:
        self._size, self._send = size, send
        self._there: dict[str, Counter[int]] = {medium: Counter() for medium in MEDIA.values()}
        self._snapshots: dict[str, dict[bytes, tuple[Place, list[int]]]] = {medium: {} for medium in MEDIA.values()}
        self._events: list[Event] = []

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
        self._events = [["AllBlocksCleared"]]

    def gained(self, namespace: str, key: bytes, start: int) -> None:
        """The device has the tokens of a key from `start` on."""
        blocks, _ = blocks_of(namespace, START, key, self._size)
        there = self._there[MEDIA["device"]]
        new = [block for block in blocks if block.end > start or not there[block.hash]]  # others: see `clear`
        self._store(MEDIA["device"], namespace, new)

    def lost(self, namespace: str, key: bytes, start: int) -> None:
        """The device has the tokens of a key from `start` on no longer."""
        blocks, _ = blocks_of(namespace, START, key, self._size)
        self._remove(MEDIA["device"], [block.hash for block in blocks if block.end > start])

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
        known[snapshot.key] = place, [block.hash for block in blocks]
        self._store(medium, snapshot.namespace, blocks)

    def removed(self, tier: str, key: bytes) -> None:
        """A tier has a snapshot no longer."""
        medium = MEDIA[tier]
        if (found := self._snapshots[medium].pop(key, None)) is not None:
            self._remove(medium, found[1])

    def _store(self, medium: str, namespace: str, blocks: Iterable[Block]) -> None:
        """Several snapshots, or sequences that were computed apart, may have one block."""
        there = self._there[medium]
        known: list[tuple[bool, Block]] = []
        for block in blocks:
            known.append((there[block.hash] > 0, block))
            there[block.hash] += 1
        for old, run in groupby(known, key=lambda one: one[0]):
            if not old:
                self._events.append(self._stored([block for _, block in run], medium, namespace))

    def _stored(self, run: Sequence[Block], medium: str, namespace: str) -> Event:
        tokens = [token for block in run for token in block.tokens]
        extra = None
        if requests := requested(namespace):
            extra = [[requests] if block.parent is None else None for block in run]
        hashes, adapter = [block.hash for block in run], adapter_of(namespace) or None
        return ["BlockStored", hashes, run[0].parent, tokens, self._size, None, medium, adapter, extra]

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
            self._events.append(["BlockRemoved", gone, medium])


class KvEvents:
    """The publisher of one engine. What it is told of may come from any thread."""

    def __init__(self, endpoint: str, *, replay: str | None = None, topic: str = "", size: int = 16) -> None:
        """Binds to `endpoint`, and to `replay`. Raises `BadRequest`, naming the setting, where that is not possible."""
        try:
            import msgspec
            import zmq
        except ImportError as error:
            raise BadRequest("kv_events needs pyzmq and msgspec: install kvcellar[events]", "kv_events") from error
        self._zmq, self._encode = zmq, msgspec.msgpack.Encoder().encode
        self._context = zmq.Context()
        self._topic, self._size = topic.encode(), size
        self._changes: deque[tuple[int, Change | None]] = deque()  # with bytes of tokens; None: the end
        self._waiting_bytes, self._ended, self._lock = 0, False, threading.Lock()
        self.lost_changes = 0  # how often all blocks were cleared because changes were lost
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._number, self._sent_bytes = 0, 0
        self._sent: deque[tuple[int, bytes]] = deque()
        self._mirror = Mirror(size, self._publish)
        try:
            self._pub = self._bound(zmq.PUB, endpoint, "kv_events")
            self.endpoint = self._address(self._pub)
            self._replay = self._bound(zmq.ROUTER, replay, "kv_events_replay") if replay is not None else None
            self.replay_endpoint = self._address(self._replay) if self._replay is not None else None
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

    # -- changes ------------------------------------------------------------------------------------------------

    def gained(self, node: Node, start: int) -> None:
        """A node of the prefix tree has tokens from `start` on that it did not have."""
        namespace, key = root_of(node).namespace, path_key(node, node.end)
        self._put(lambda: self._mirror.gained(namespace, key, start), len(key))

    def lost(self, node: Node, start: int) -> None:
        """A node is about to lose its tokens from `start` on."""
        namespace, key = root_of(node).namespace, path_key(node, node.end)
        self._put(lambda: self._mirror.lost(namespace, key, start), len(key))

    def device_cleared(self) -> None:
        """The prefix tree was made anew."""
        self._put(self._mirror.device_cleared)

    def stored(self, tier: str, snapshots: Iterable[Snapshot]) -> None:
        """A tier has snapshots, those that others continue first."""
        for snapshot in snapshots:
            self._put(lambda snapshot=snapshot: self._mirror.stored(tier, snapshot), len(snapshot.tokens))

    def removed(self, tier: str, key: bytes) -> None:
        self._put(lambda: self._mirror.removed(tier, key))

    def _put(self, change: Change | None, size: int = 0) -> None:
        with self._lock:
            if self._ended:
                return
            if len(self._changes) >= WAITING or self._waiting_bytes + size > WAITING_BYTES:
                self._drop()
            self._changes.append((size, change))
            self._waiting_bytes += size
        with suppress(OSError):  # it will be woken by what is there already, or is closed
            self._wake.send(b"\0")

    def _drop(self) -> None:
        """Of too many changes: subscribers begin again with no blocks. The lock is held."""
        closing = any(change is None for _, change in self._changes)
        self._changes.clear()
        self._waiting_bytes = 0
        self._changes.append((0, self._mirror.clear))
        if closing:
            self._changes.append((0, None))
        self.lost_changes += 1
        log.warning("too many KV events wait to be published; subscribers are told to forget all blocks")

    def close(self) -> None:
        """Send what has changed. May be called again."""
        self._put(None)
        self._thread.join(CLOSING)

    # -- on the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = self._zmq.Poller()
        poller.register(self._woken, self._zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, self._zmq.POLLIN)
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
                self._changes.clear()
            self._close_sockets()

    def _apply(self) -> bool:
        """Publish what has changed. False at the end."""
        while True:
            try:
                more = self._apply_some()
                self._mirror.flush()
            except Exception:
                log.exception("KV events were lost; subscribers are told to forget all blocks")
                self.lost_changes += 1
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
                size, change = self._changes.popleft()
                self._waiting_bytes -= size
            if change is None:
                return False
            change()
        return None

    def _publish(self, events: list[Event]) -> None:
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
        self._context.destroy(linger=int(1000 * CLOSING))
        self._wake.close()
        self._woken.close()


def open_events(settings: Settings) -> KvEvents | None:
    """The publisher that the settings ask for."""
    if settings.kv_events is None:
        return None
    for endpoint in (settings.kv_events, settings.kv_events_replay):
        if endpoint is not None and endpoint.startswith("tcp://") and not endpoint.startswith(_LOOPBACK):
            log.warning("KV events at %s have the tokens of prompts, for every machine that can reach it", endpoint)
    return KvEvents(
        settings.kv_events,
        replay=settings.kv_events_replay,
        topic=settings.kv_events_topic,
        size=settings.kv_events_block,
    )
