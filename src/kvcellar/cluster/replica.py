"""replica: an engine that gateways connect to. No Ray: `engine_replica.py` runs it in a replica of Ray Serve.

A gateway connects by TCP, sends the secret of the replica, and from then on both send the messages of
`engine/messages.py`, as a front end and an engine in a process of its own do.

Always true:
  * of a connection, `SECRET` bytes are read, within `GREETING` seconds, before it is known to be of a gateway; others
    are closed;
  * what a gateway has asked for ends with its connection; the others and the engine go on;
  * the end of a request is told after all gateways were told what it has brought to memory, so that what is sent next
    is ranked by that;
  * after `leave`, each gateway is told that it is to disconnect when its requests can go on elsewhere, or are done.
"""

import hmac
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from kvcellar.cluster.address import SECRET, keep_alive
from kvcellar.cluster.scaling import Meter
from kvcellar.engine.load.build import build, source_of
from kvcellar.engine.load.open_store import identity_of
from kvcellar.engine.load.settings import settings_of
from kvcellar.engine.messages import VERSION, Blocks, EngineSnapshot, Hello, Leaving, ReadStats, ToEngine
from kvcellar.engine.stats import EngineStats
from kvcellar.errors import EngineClosed
from kvcellar.frontend.front_end import FrontEnd, Pools
from kvcellar.frontend.thread_client import ThreadClient
from kvcellar.memory.prefix.kv_events import KvEvent
from kvcellar.wire import Link, packed

log = logging.getLogger("kvcellar.cluster")

GREETING = 5.0  # seconds
GREETED = 64  # connections that may be unknown at once
BEAT = 1.0  # seconds
PAUSE = 0.1  # seconds, where a connection could not be accepted
FAILED = 70  # exit status: an error has ended the engine


class Replica:
    """One engine, and the gateways that use it."""

    def __init__(self, model: str | None, settings: Mapping[str, Any], host: str, began: float) -> None:
        """Blocks until the model is loaded. Listens at an address of this machine, at a port that is free. `began`:
        when its start did, by the monotonic clock. Raises what `build` raises."""
        self.secret = secrets.token_bytes(SECRET)
        self._pools, self._leaving = Pools(), False
        self._fronts: tuple[FrontEnd, ...] = ()  # replaced, never changed
        self._lock, self._unknown = threading.Lock(), threading.Semaphore(GREETED)
        self._ended = threading.Event()
        with ExitStack() as opened:
            built = build(model, settings_of(dict(settings)), opened, torch_of=os.getpid(), watched=True)
            self._client = ThreadClient(built)
            opened.callback(self._client.close)
            events = built.loop.manager.events
            assert events is not None, "it is watched"
            self._events = events
            self.meter = Meter(time.monotonic() - began)
            self._client.start(turned=self._turned, counted=self._counted, failed=self._failed)
            self._listener = opened.enter_context(socket.create_server((host, 0), backlog=GREETED))
            opened.pop_all()
        self.weights = identity_of(built.memory, source_of(built.loaded, built.guest)).hex()
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        for run in (self._accept, self._beats):
            threading.Thread(target=run, name="kvcellar-replica", daemon=True).start()

    @property
    def alive(self) -> bool:
        return self._client.alive

    @property
    def block(self) -> int:
        """Tokens of a block of its KV events."""
        return self._events.size

    # -- on the engine's thread ---------------------------------------------------------------------------------

    def _turned(self) -> None:
        for front in self._fronts:
            front.turned()

    def _counted(self, stats: EngineStats) -> None:
        self.meter.note(stats)
        if fronts := self._fronts:
            snapshot = EngineSnapshot(packed(stats))
            for front in fronts:
                front.outbox.put(snapshot)

    def _failed(self) -> None:
        """An error has ended the engine. Requests are not told: they go on at another replica."""
        os._exit(FAILED)

    # -- on threads of their own --------------------------------------------------------------------------------

    def _beats(self) -> None:
        while not self._ended.wait(BEAT):
            beat = self._client.beat
            for front in self._fronts:
                front.outbox.put(beat)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._ended.wait(PAUSE):
                    return
                log.error("a connection of a gateway could not be accepted: %s", error)  # too many files are open
                continue
            if not self._unknown.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._greet, args=(connection,), name="kvcellar-gateway", daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        try:
            known = self._knows_secret(connection)
        finally:
            self._unknown.release()
        if not known:
            connection.close()
            return
        front = FrontEnd(Link(connection, ToEngine), self._pools, self._events.after)
        front.client = self._client
        try:
            self._use(front)
        finally:
            self._forget(front)

    def _knows_secret(self, connection: socket.socket) -> bool:
        given, until = b"", time.monotonic() + GREETING
        try:
            while len(given) < SECRET and (left := until - time.monotonic()) > 0:
                connection.settimeout(left)
                if not (part := connection.recv(SECRET - len(given))):
                    break
                given += part
            connection.settimeout(None)
            keep_alive(connection)
        except OSError:
            return False
        return hmac.compare_digest(given, self.secret)

    def _use(self, front: FrontEnd) -> None:
        """Until the gateway has gone."""
        front.outbox.put(EngineSnapshot(packed(self._client.last_stats)))
        front.outbox.put(Hello(VERSION, packed(self._client.card)))
        with self._lock:
            if self._ended.is_set():
                return
            self._fronts = (*self._fronts, front)
            if self._leaving:
                front.outbox.put(Leaving())
        told = partial(self._told, front)
        self._events.listen(told)
        try:
            front.read()
        except EOFError:
            pass
        except Exception:
            log.exception("what a gateway has sent cannot be done; its connection is closed")
        finally:
            self._events.leave(told)

    def _told(self, front: FrontEnd, events: Sequence[KvEvent]) -> None:
        front.outbox.put(Blocks(tuple(events)))

    def _forget(self, front: FrontEnd) -> None:
        front.end()  # first: `leave` waits until there are none
        with self._lock:
            self._fronts = tuple(one for one in self._fronts if one is not front)

    # -- the end ------------------------------------------------------------------------------------------------

    def leave(self, moving: float, writing: float) -> None:
        """Until no gateway is connected, for at most `moving` seconds: each has it as long as it needs it. Then write
        what is to be stored, for at most `writing` seconds, and close the engine. May be called again."""
        with self._lock:
            self._leaving = True
            for front in self._fronts:
                front.outbox.put(Leaving())
        _wait_while(lambda: bool(self._fronts), moving)
        with suppress(EngineClosed):
            _wait_while(self._unwritten, writing)
        self.close()

    def _unwritten(self) -> bool:
        store = self._client.ask(ReadStats()).store
        return store is not None and store.unwritten

    def close(self) -> None:
        """At once: requests are not done, and gateways let others go on with them."""
        with self._lock:
            self._ended.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends `accept`
        self._listener.close()
        for front in self._fronts:
            front.hang_up()
        self._client.close()


def _wait_while(holds: Callable[[], bool], seconds: float) -> None:
    """For at most so long."""
    until = time.monotonic() + seconds
    while holds() and time.monotonic() < until:
        time.sleep(0.05)
