"""client: the replicas of one engine, as a gateway sees them. No torch, no Ray.

    client = ClusterClient(router)
    client.found(addresses)      # of all replicas that there are; again whenever they have changed
    client.wait(seconds)         # until one can be used

A request goes to the replica that the router ranks first. When a replica dies, or is shut down, its requests go on at
others (`remote_client.py`).

Where some replicas are for prompts, a request that may be stored begins at one of these if that costs fewer seconds, of
itself and of the streams that wait while its prompt is computed: there, a stream waits once, as long as handing over
has taken lately. With its first token it leaves, and goes on at another one, by the same rules, when the shared store
has its prompt, or after `HELD` seconds.

Always true:
  * each replica that was found, and is not refused, is connected, or is tried again every `AGAIN` seconds;
  * replicas that are used have one model, that of the first one, and run this version: others are refused by name.
    The first one was made of what this gateway was told: of an update, a gateway waits for replicas of its own;
  * of a request, all that is told is of the same weights: where it was told something, it goes on at replicas that have
    them. A new one may go to any, and one fails whose weights no replica has any more;
  * a replica that is to end is connected until its requests can go on at others with its weights; or, where all others
    have other ones, until those that it has are done, and others get the new ones;
  * the router knows the replicas that get requests, and no others;
  * a replica that gets requests has been told of all adapters;
  * what was counted does not fall when a replica goes, and is not counted twice when it comes back;
  * `asked` says whether replicas are to be there: where there may be none while nothing is asked for, that starts one;
  * the death of a replica counts against a request that went on alone there, and else `SUSPECT` of it: a replica can be
    killed for many reasons, and that is not told.
"""

import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace as with_fields
from math import exp, inf
from random import Random
from typing import Any, TypeVar, get_args

from kvcellar.cluster.address import Address, keep_alive
from kvcellar.cluster.observed import Told
from kvcellar.cluster.routing import Load, Ranking, Router
from kvcellar.cluster.sums import counted, merged, summed
from kvcellar.engine.card import EngineCard
from kvcellar.engine.control_replies import AdapterInfo
from kvcellar.engine.messages import (
    VERSION,
    AddAdapter,
    Admitted,
    Blocks,
    Cancel,
    CheckInvariants,
    ClearCache,
    ClearCacheAndStore,
    ControlInParts,
    ControlWithReply,
    EngineEvent,
    EngineSnapshot,
    FromEngine,
    Hello,
    Leaving,
    ListAdapters,
    ListEntries,
    ListNamespaces,
    ReadStats,
    RemoveAdapter,
    RemoveEntries,
    ShowEntry,
    ShowWay,
    StepEvents,
    Submission,
    TakePicture,
    reply_type,
)
from kvcellar.engine.stats import ClusterStats, EngineStats, ReplicaState, ReplicaStats
from kvcellar.errors import BadRequest, EngineClosed, EngineDied, KvcellarError, ModelRefused, Overloaded
from kvcellar.events import Done, Failed, Score
from kvcellar.frontend.remote_client import WAIT_SECONDS, RemoteClient, RemoteEngine, Request, dropped
from kvcellar.memory.prefix.blocks import START, blocks_of
from kvcellar.memory.prefix.kv_events import KvEvent
from kvcellar.memory.prefix.node import TOKEN
from kvcellar.memory.snapshot import with_adapter
from kvcellar.memory.tiers.upkeep import Readable
from kvcellar.wire import decode, ticks

log = logging.getLogger("kvcellar.cluster")

R = TypeVar("R")
CONNECT_SECONDS = 5.0
AGAIN = 1.0  # seconds until a replica that could not be reached is tried again
SILENT = 15.0  # seconds without a beat, after which a replica is given up
SUSPECT = 0.125
LAST_WORDS = 5.0
TICK = 0.25
ENDS = "is being shut down"
UPDATE_SECONDS = 3600.0  # that a gateway which begins waits where all replicas are refused: others may be loading
HELD = 2.0  # seconds
UNLIMITED = 1 << 62  # cells, where no layer has any: all have recurrent state
HANDED = 0.9  # weight of the mean seconds of handing over, when one more was measured
FADES = 30.0  # seconds in which that weight, and the mean, fall to 1 / e: where one took long, another one is tried
EVERYWHERE = (ClearCache, ClearCacheAndStore, RemoveEntries, AddAdapter, RemoveAdapter, CheckInvariants)
SHOWN = (TakePicture, ShowEntry, ShowWay)  # of the replica that they name
DEVICE = "device"  # the tier that each replica has for itself


class ReplicaLink(RemoteEngine):
    """A replica that is connected. `leaving`: it gets no more requests. `early`: KV events that came before it has got
    one."""

    def __init__(self, address: Address, unsent: Callable[[object, ValueError], None]) -> None:
        """Connects. Raises `OSError`."""
        self.address, self.name = address, address.replica
        end = socket.create_connection((address.host, address.port), CONNECT_SECONDS)
        try:
            keep_alive(end)
            end.sendall(address.secret)
            end.settimeout(None)
        except BaseException:
            end.close()
            raise
        super().__init__(end, unsent)
        self.told = Told()
        self.leaving = False
        self.early: list[Sequence[KvEvent]] = []

    def close(self) -> None:
        """What was not sent yet is dropped: the end of the connection is that of all that was asked for."""
        self.link.close()
        self.outbox.close(LAST_WORDS)


class ClusterClient(RemoteClient[ReplicaLink]):
    """An `EngineClient` of all replicas of an engine together."""

    def __init__(
        self,
        router: Callable[[int], Router],
        *,
        adapter: str | None = None,
        seed: int = 0,
        to_zero: bool = False,
        made: str = "",
    ) -> None:
        """`router` makes one for blocks of so many tokens. `adapter`: that of requests which name none. `to_zero`:
        there may be no replica while nothing is asked for. `made`: of what the first replica was; "": of anything."""
        super().__init__()
        self._make_router, self._default, self._random = router, adapter, Random(seed)
        self._to_zero, self._made = to_zero, made
        self._block = 0  # tokens of a block
        self._router: Router | None = None  # of the first replica's blocks. The lock is held for it, too
        self._addresses: dict[str, Address] = {}
        self._tried: dict[str, float] = {}  # when it was tried last, of those that are not connected
        self._refused: dict[str, str] = {}  # why, by replica
        self._lost: dict[str, str] = {}  # how the last connection ended, or why there was none
        self._used: set[str] = set()  # those that have a thread: they are connected, or being connected
        self._links: dict[str, ReplicaLink] = {}  # connected
        self._digests: dict[str | None, str] = {}  # of adapters, by name
        self._counts: dict[str, int] = {}  # requests by replica
        self.unranked = 0  # requests of which the router had no opinion
        self.moved = 0  # requests that went on at another replica
        self._began = time.time()
        self._past: dict[str, EngineStats] = {}  # what those had counted that have gone; "": that are not listed now
        # seconds in which a stream is told nothing as it is handed over: mean, and since when
        self._handing = (0.0, -inf)
        self._first, self._end = threading.Event(), threading.Event()
        threading.Thread(target=self._watch, name="kvcellar-watch", daemon=True).start()

    # -- replicas -----------------------------------------------------------------------------------------------

    def found(self, addresses: Sequence[Address]) -> None:
        """These are all replicas that there are. Returns at once."""
        with self._changed:
            self._addresses = {one.replica: one for one in addresses}
        self._connect_missing()

    def wait(self, going_on: Callable[[], None] = lambda: None, patience: float = UPDATE_SECONDS) -> None:
        """Until a replica can be used. `going_on` is called often, and may raise. Raises `ModelRefused` where all are
        refused after `patience` seconds."""
        until = time.monotonic() + patience
        while not self._first.wait(TICK):
            going_on()
            if self._closing:
                raise EngineClosed("the engine is closed; open a new one")
            with self._changed:
                why = self._hopeless()
            if why and time.monotonic() > until:
                raise ModelRefused(why)

    @property
    def refuses_all(self) -> bool:
        """Whether there are replicas, and none of them can be used."""
        with self._changed:
            return bool(self._hopeless())

    def _weights_of(self, request: Request[ReplicaLink] | None) -> str:
        return "" if request is None else request.weights

    def _hopeless(self, request: Request[ReplicaLink] | None = None) -> str:
        if self._able(request) or not self._addresses:
            return ""
        weights = self._weights_of(request)
        if weights and all(one.weights != weights for one in self._addresses.values()):
            return "the replicas have other weights now than those that it began with; send this again"
        if not self._addresses.keys() <= self._refused.keys():
            return ""
        return "; ".join(f"replica {name}: {why}" for name, why in self._refused.items())

    @property
    def replicas(self) -> tuple[ReplicaStats, ...]:
        """All that were found, or are connected still."""
        with self._changed:
            addresses = self._addresses | {name: one.address for name, one in self._links.items()}
            return tuple(map(self._seen, addresses.values()))

    def _seen(self, address: Address) -> ReplicaStats:
        """While `_changed` is held."""
        name, link = address.replica, self._links.get(address.replica)
        used = name in self._counts
        why = "" if used else self._refused.get(name) or self._lost.get(name, "")
        state: ReplicaState = "connected" if used else "connecting"
        if link is not None and link.leaving:
            state = "leaving"
        elif why:
            state = "refused" if name in self._refused else "lost"
        blocks = self._router.blocks(name) if self._router is not None and used else 0
        return (Told() if link is None else link.told).shown(name, f"{address.host}:{address.port}", state, why, blocks)

    @property
    def asked(self) -> bool:
        """Whether replicas are to be there: at first, while there are any, and where something waits for one, beside
        prompts that are pinned."""
        with self._changed:
            waiting = [one for number in self._to_go_on if (one := self._running.get(number)) is not None]
            requests = any(one.deliver is not dropped and not one.cancelled for one in waiting)
            return self._router is None or bool(self._addresses) or requests

    @property
    def starting(self) -> bool:
        return super().starting and not (self._to_zero and not self._addresses)

    def _ready_engine(self, request: Request[ReplicaLink] | None = None) -> ReplicaLink:
        """Requests start one where there is none, and nothing else that is asked does."""
        self._check_owner()
        with self._changed:
            if self._to_zero and self.alive and not self._engines and not self.asked:
                raise Overloaded("no engine runs now; the next request starts one")
            return super()._ready_engine(request)

    def _connect_missing(self) -> None:
        now = time.monotonic()
        with self._changed:
            if self._closing:
                return
            missing = [
                one
                for name, one in self._addresses.items()
                if name not in self._used and name not in self._refused and self._tried.get(name, 0.0) + AGAIN <= now
            ]
            self._tried = {name: at for name, at in self._tried.items() if name in self._addresses}
            self._tried |= {one.replica: now for one in missing}
            self._refused = {name: why for name, why in self._refused.items() if name in self._addresses}
            self._lost = {name: why for name, why in self._lost.items() if name in self._addresses}
            self._fold()
            self._used |= {one.replica for one in missing}
        for address in missing:
            threading.Thread(target=self._use, args=(address,), name="kvcellar-engine", daemon=True).start()

    def _use(self, address: Address) -> None:
        """On a thread of its own: connect, and read until the end."""
        link: ReplicaLink | None = None
        try:
            self._check_address(address)
            link = ReplicaLink(address, self._unsent)
            with self._changed:
                if self._closing:
                    return
                self._links[link.name] = link
                self._readers.add(threading.current_thread())
            self._greet(link)
            while True:
                self._take(link, link.receive())
        except ModelRefused as error:
            self._refuse_replica(address.replica, str(error))
        except (EOFError, OSError) as error:
            log.info("replica %s: %s", address.replica, error)
            self._lose(address.replica, ENDS if link is not None and link.leaving else str(error))
        except Exception as error:
            log.exception("what replica %s has sent cannot be read", address.replica)
            self._lose(address.replica, f"what it has sent cannot be read: {error}")
        finally:
            if link is not None:
                link.close()
                self._gone(link)
            with self._changed:
                self._used.discard(address.replica)
                self._readers.discard(threading.current_thread())

    def _check_address(self, address: Address) -> None:
        """Raises `ModelRefused`."""
        if address.version != VERSION:
            raise ModelRefused(f"it runs kvcellar {address.version}, and this gateway {VERSION}")
        with self._changed:
            if self._router is None and self._made not in ("", address.made):
                raise ModelRefused("it was made of another model or settings than this gateway, which waits for others")

    def _refuse_replica(self, name: str, why: str) -> None:
        with self._changed:
            if self._refused.get(name) == why:
                return
            self._refused[name] = why
            self._changed.notify_all()
        log.error("replica %s is not used: %s", name, why)

    def _lose(self, name: str, why: str) -> None:
        with self._changed:
            self._lost[name] = why

    def _fold(self) -> None:
        """What replicas have counted that do not come back becomes one record. While `_changed` is held."""
        gone = [one for one in self._past if one and one not in self._addresses and one not in self._links]
        if gone:
            self._past[""] = summed([self._past.pop(one) for one in ("", *gone) if one in self._past])

    def _greet(self, link: ReplicaLink) -> None:
        while not isinstance(message := link.receive(), Hello):
            self._take(link, message)
        card: EngineCard = decode(message.card, EngineCard)
        self._know(self._agree(link, ()))
        told: dict[str, AddAdapter | RemoveAdapter] = {}
        while not self._joins(link, card, told):
            with self._changed:
                news = {name: one for name, one in self._adapters.items() if told.get(name) != one}
            self._know(self._agree(link, news.values()))
            told |= news

    def _joins(self, link: ReplicaLink, card: EngineCard, told: Mapping[str, AddAdapter | RemoveAdapter]) -> bool:
        """Let a replica get requests, unless it is about to leave. False: it was not `told` of all adapters."""
        with self._changed:
            if self._router is None:
                self.card, self._block = card, link.address.block
                self._router = self._make_router(self._block)
                self._refused = {}  # they may be like this one
            elif card.model != self.card.model or link.address.block != self._block:
                raise ModelRefused(f"it has the model {card.model.name} in another form than the other replicas")
            if told != self._adapters:
                return False
            if link.leaving or self._closing:
                return True
            self._router.join(link.name)
            self._counts[link.name] = 0
            self._lost.pop(link.name, None)
            for events in link.early:
                self._router.events(link.name, events)
            link.early.clear()
            if link.told.last is not None:
                self._router.load(link.name, load_of(link.told.last))
            self._joined(link)
        self._first.set()
        return True

    def _know(self, adapters: Sequence[AdapterInfo]) -> None:
        with self._changed:
            self._digests |= {one.name: one.digest for one in adapters}
            self._digests[None] = self._digests.get(self._default or "", "")

    def _gone(self, link: ReplicaLink) -> None:
        with self._changed:
            self._links.pop(link.name, None)
            if link not in self._engines or self._closing:
                return
        if link.leaving:
            moved = self._left(link, ENDS, blame=None)
        else:
            log.warning("replica %s has gone; its requests go on at others", link.name)
            moved = self._left(
                link, "has closed its connection", blame=lambda request: 1.0 if request.alone else SUSPECT
            )
        self._go_on()
        with self._changed:
            self.moved += len(moved)

    def _let_go(self) -> None:
        """Disconnect from replicas that are to end and are not needed: they end when no gateway is connected."""
        with self._changed:
            ending = [one for one in self._links.values() if one.leaving and not self._needed(one)]
        for one in ending:
            one.link.close()

    def _needed(self, link: ReplicaLink) -> bool:
        """While `_changed` is held."""
        if link not in self._engines:
            return False
        weights, others = link.address.weights, [one for one in self._engines if not one.leaving]
        go_on = any(one.address.weights == weights for one in others)
        if go_on or all(one.weights == weights for one in self._addresses.values()):
            return False  # its requests go on there, or where a replica comes that takes its place
        return not others or any(one.engine is link for one in self._running.values())

    def _forgotten(self, engine: ReplicaLink) -> None:
        assert self._router is not None, "it has joined"
        if engine.told.last is not None:
            self._past[engine.name] = counted(engine.told.last)
        self._router.leave(engine.name)
        del self._counts[engine.name]
        self._pin_again([engine])

    # -- which replica ------------------------------------------------------------------------------------------

    def submit(self, submission: Submission, deliver: Callable[[EngineEvent], None]) -> None:
        self._check_owner()
        if submission.adapter not in self._digests and self._engines:  # it may have been added through another gateway
            self._know(self.ask(ListAdapters()))
        super().submit(submission, deliver)

    def _request(self, submission: Submission, deliver: Callable[[EngineEvent], None]) -> Request[ReplicaLink]:
        if self._router is None:
            return super()._request(submission, deliver)
        namespace = with_adapter(submission.namespace, self._digests.get(submission.adapter, ""))
        hashes = blocks_of(namespace, START, submission.prompt, self._block)[0].hashes
        return Request[ReplicaLink](submission, deliver, blocks=hashes)

    def _able(self, request: Request[ReplicaLink] | None) -> list[ReplicaLink]:
        return self._with(self._weights_of(request))

    def _with(self, weights: str) -> list[ReplicaLink]:
        """Those that have these weights, "": any, and get requests: those that are to end only where no other can."""
        found = [one for one in self._engines if weights in ("", one.address.weights)]
        return [one for one in found if not one.leaving] or found

    def _choose(self, request: Request[ReplicaLink] | None) -> ReplicaLink | None:
        able = self._able(request)
        if request is None or not able:
            return able[0] if able else None
        prefill = [one for one in able if one.address.prefill]
        others = [one for one in able if not one.address.prefill]
        found, considered = self._best(others or prefill, request)
        if prefill and others and request.first_token is None and request.submission.retention.stored:
            other, there = self._best(prefill, request)
            if not considered or not there or handed_over(considered[0], there[0], self.handing):
                found, considered = other, there
        request.considered = considered
        self.unranked += not considered
        return found

    @property
    def _fading(self) -> float:
        return exp((self._handing[1] - time.monotonic()) / FADES)

    @property
    def handing(self) -> float:
        """Seconds of the mean that count."""
        return self._handing[0] * self._fading

    def _best(self, among: Sequence[ReplicaLink], request: Request[ReplicaLink]) -> tuple[ReplicaLink, Ranking]:
        assert self._router is not None, "a replica has joined"
        by_name = {one.name: one for one in among}
        exclude = frozenset(one.name for one in self._engines if one.name not in by_name)
        considered = self._router.rank(request.blocks, len(request.submission.prompt) // TOKEN, exclude)
        for at, score in enumerate(considered):
            if (link := by_name.get(score.replica)) is not None:
                return link, considered[at:]
        some = self._random.sample(among, min(2, len(among)))
        return min(some, key=lambda one: self._counts[one.name]), ()

    def _sent(self, request: Request[ReplicaLink], engine: ReplicaLink) -> None:
        assert self._router is not None
        self._counts[engine.name] += 1
        request.placed(engine.name)
        self._router.sent(engine.name, request.submission.number, request.blocks, request.length)

    def _heard(self, request: Request[ReplicaLink], event: EngineEvent) -> None:
        assert self._router is not None, "it is told by a replica"
        if not isinstance(event, Admitted | Done | Failed) and not request.proven:
            self._router.first(request.submission.number)
            if request.engine is not None:
                request.weights = request.weights or request.engine.address.weights
            if request.handed is not None:
                now, weight = time.monotonic(), HANDED * self._fading
                self._handing = weight * self._handing[0] + (1 - weight) * (now - request.handed), now
                request.handed = None

    def _ended(self, request: Request[ReplicaLink]) -> None:
        self._held.discard(request.submission.number)
        if self._router is not None:
            self._router.ended(request.submission.number)
        if request.engine is not None and request.engine.name in self._counts:
            self._counts[request.engine.name] -= 1

    # -- what replicas tell -------------------------------------------------------------------------------------

    def _take(self, engine: ReplicaLink, message: FromEngine) -> None:
        match message:
            case Blocks(events):
                self._cached(engine, events)
            case Leaving():
                engine.leaving = True
                self._let_go()
            case _:
                super()._take(engine, message)
        if isinstance(message, EngineSnapshot):
            self._loaded(engine)
        elif isinstance(message, StepEvents) and engine.address.prefill:
            self._hand_over(engine, message)
        elif isinstance(message, Blocks):
            self._release()

    def _hand_over(self, engine: ReplicaLink, step: StepEvents) -> None:
        """Requests whose prompts are computed leave it, if there are other replicas."""
        with self._changed:
            others = not all(one.address.prefill for one in self._with(engine.address.weights))
            for number, event in step.events:
                if (request := self._running.get(number)) is None:
                    continue
                if isinstance(event, Done | Failed) and request.ending is engine:
                    request.ending = None
                if others and request.engine is engine and _leaves_prefill(request):
                    assert self._router is not None, "it has joined"
                    engine.send(Cancel(number))
                    self._router.ended(number, decoded=False)
                    self._counts[engine.name] -= 1
                    request.leave("has computed its prompt")
                    request.ending, request.handed = engine, time.monotonic()
                    self._held.add(number)
        self._release()

    def _release(self) -> None:
        """Let requests go on that wait for the store, and have ended where they were, where they may go again."""
        with self._changed:
            held = [number for number in self._held if self._has_waited(self._running[number])]
            self._held.difference_update(held)
            self._to_go_on.extend(held)
        if held:
            self._go_on()

    def _has_waited(self, request: Request[ReplicaLink]) -> bool:
        assert self._router is not None and request.handed is not None, "a replica had it"
        if request.ending is not None and self._links.get(request.ending.name) is request.ending:
            return False
        late = request.cancelled or request.failed is not None or time.monotonic() - request.handed > HELD
        return late or self._router.stored(request.blocks)

    def _cached(self, engine: ReplicaLink, events: Sequence[KvEvent]) -> None:
        with self._changed:
            if self._router is not None and engine in self._engines:
                self._router.events(engine.name, events)
            elif not engine.leaving:
                engine.early.append(events)

    def _loaded(self, engine: ReplicaLink) -> None:
        assert engine.stats is not None
        stats = decode(engine.stats, EngineStats)
        with self._changed:
            engine.told.take(stats)
            if self._router is not None and engine in self._engines:
                self._router.load(engine.name, load_of(stats))

    @property
    def last_stats(self) -> EngineStats:
        """Of all replicas together."""
        with self._changed:
            return self._together({one.name: one.told.last for one in self._engines if one.told.last is not None})

    def _together(self, by_name: Mapping[str, EngineStats]) -> EngineStats:
        """What replicas are, with what others had counted that have gone, so that no count falls."""
        found = list(by_name.values())
        with self._changed:
            past = [stats for name, stats in self._past.items() if name not in by_name]
            replicas = self.replicas
            states = dict.fromkeys(get_args(ReplicaState), 0) | Counter(one.state for one in replicas)
            cluster = ClusterStats(replicas, states, self.moved, self.unranked)
        busy = [one.at for one in found if one.running or one.waiting]
        at = min(busy) if busy else max((one.at for one in found), default=0.0)
        return with_fields(summed([*found, *past]), at=at, started=self._began, cluster=cluster)

    # -- asking -------------------------------------------------------------------------------------------------

    def ask(self, control: ControlWithReply[R], source: Readable | None = None) -> R:
        self.check_caller()
        if isinstance(control, (*EVERYWHERE, ListNamespaces)):
            found = list(self._from_all(control).values())
            if isinstance(control, AddAdapter):
                self._know([one for one in found if isinstance(one, AdapterInfo)])
            elif isinstance(control, RemoveAdapter):
                with self._changed:
                    self._digests.pop(control.name, None)
            return merged(found)
        if isinstance(control, ReadStats):
            together: Any = self._together({one.name: stats for one, stats in self._from_all(control).items()})
            return together
        if isinstance(control, SHOWN):
            return self._from_one(control)
        return super().ask(control, source)

    def _from_all(self, control: ControlWithReply[R]) -> dict[ReplicaLink, R]:
        """Also of those that join meanwhile, but not of those that leave. Where one refuses an adapter, none has it."""
        self._ready_engine()
        found: dict[ReplicaLink, R] = {}
        asked: list[ReplicaLink] = []
        while missing := self._not_asked(control, asked):
            for one in missing:
                try:
                    found[one] = decode(self._asked(control, engine=one), reply_type(control))
                except EngineDied:
                    pass
                except BaseException:
                    if isinstance(control, AddAdapter):
                        self._undo(control, found)
                    raise
            asked += missing
        if not found:
            raise EngineDied("all replicas have gone. Send this again")
        return found

    def _not_asked(self, control: ControlWithReply[Any], asked: Sequence[ReplicaLink]) -> list[ReplicaLink]:
        """Where it is none: replicas that join later are told, too."""
        with self._changed:
            if not (missing := [one for one in self._engines if one not in asked]):
                self._noted(control)
            return missing

    def _undo(self, control: AddAdapter, engines: Iterable[ReplicaLink]) -> None:
        """Let these have the adapter that was there before."""
        before = self._adapters.get(control.name) or RemoveAdapter(control.name, wait=False)
        for one in engines:
            with suppress(KvcellarError):
                self._asked(before, engine=one)

    def _from_one(self, control: TakePicture | ShowEntry | ShowWay) -> Any:
        """The reply of the replica that it names, or of the first one that does not refuse."""
        name = control.replica
        self._ready_engine()
        with self._changed:
            engines = [one for one in self._engines if name in ("", one.name)]
        refusal: KvcellarError = BadRequest(f"no replica {name!r} is connected", "replica")
        for one in engines:
            try:
                return decode(self._asked(control, engine=one), reply_type(control))
            except (BadRequest, EngineDied) as error:
                refusal = error
        raise refusal

    def parts(self, control: ControlInParts[R]) -> Generator[R]:
        """Of a list, those of all replicas; what they store is listed once, and an archive is that of one, as they may
        share it."""
        self.check_caller()
        listed: set[str] = set()
        part: Any
        for one in self._holders(control):
            for part in self._parts_of(control, one):
                if isinstance(control, ListEntries) and control.tier != DEVICE:
                    part = [entry for entry in part if entry["name"] not in listed]
                    listed.update(entry["name"] for entry in part)
                yield part

    def _holders(self, control: object) -> list[ReplicaLink]:
        self._ready_engine()
        with self._changed:
            return list(self._engines) if isinstance(control, ListEntries) else self._engines[:1]

    def check(self) -> None:
        super().check()
        with self._changed:
            for one in self._running.values():
                told = one.engine is None or one.weights in ("", one.engine.address.weights)
                assert told, "it goes on with other weights"

    # -- the end ------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        for stopped in ticks(self._end, TICK):
            self._look(WAIT_SECONDS)
            self._release()
            self._let_go()
            self._connect_missing()
            self._give_up_silent(time.monotonic(), stopped=stopped)

    def _give_up_silent(self, now: float, *, stopped: bool) -> None:
        """`stopped`: this process was, and what replicas have sent meanwhile was not read."""
        with self._changed:
            links = list(self._links.values())
        for one in links:
            if stopped:
                one.beaten = now
            elif now - one.beaten > SILENT:
                log.warning("replica %s was silent for %g s and is given up", one.name, SILENT)
                one.link.close()

    def close(self) -> bool:
        """Replicas stay: there, its requests end with the connection."""
        if self._owner != os.getpid():
            return False
        with self._changed:
            if self._closing:
                return True
            self._closing = True
            self._changed.notify_all()
            links, readers = list(self._links.values()), list(self._readers)
        self._end.set()
        for link in links:
            link.close()
        for reader in readers:
            if reader is not threading.current_thread():
                reader.join(LAST_WORDS)
        self._over(EngineClosed("the engine was closed before the answer was complete"))  # no reader tells anything now
        return True


def _leaves_prefill(request: Request[ReplicaLink]) -> bool:
    """Its prompt is computed, and another replica can read it from the store."""
    return request.first_token is not None and request.submission.retention.stored


def handed_over(stays: Score, begins: Score, handing: float) -> bool:
    """Whether a prompt is computed at a replica for prompts, which has the second score, and then handed over."""
    return begins.seconds + handing <= stays.seconds + stays.compute * stays.running


def load_of(stats: EngineStats) -> Load:
    """What a router has to know."""
    groups = stats.groups
    return Load(
        waiting_tokens=stats.waiting_tokens,
        running=stats.running - stats.prefilling,
        prefill_speed=1 / stats.token_seconds if stats.token_seconds else None,
        read_speed=1 / stats.restore_seconds if stats.restore_seconds else None,
        cells_free=min((one.cells - one.used for one in groups), default=UNLIMITED),
        cells=min((one.cells for one in groups), default=UNLIMITED),
        waiting=stats.waiting + stats.prefilling,
        sequences=stats.max_sequences,
    )
