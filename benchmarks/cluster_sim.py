"""cluster_sim: what a fleet computes twice and what its users wait, by which rule requests go to replicas. Simulated.

The router is the real one, one in each gateway; time is virtual, and engines are models: a step takes `base + row *
rows + each * prompt tokens` seconds, prompts share it with streams as the scheduler does, memory is blocks of a prefix
tree, evicted by last use, and its events and reports come late. Costs are those that were measured of ours (`GPU`,
`CPU`), or follow from them (`LARGE`). Requests are the traces of `replay`, several copies at a time, and sessions with
the published numbers of Mooncake's and Azure's. They come for `Scene.warm` seconds which are not counted, and then for
`Scene.seconds`. Everything but the microseconds of a rank is the same on every machine.
"""

import gc
import heapq
import random
import tracemalloc
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import count
from math import ceil, inf
from time import process_time
from typing import NamedTuple

import msgspec
import numpy as np

from benchmarks.replay import TRACES, Writer
from benchmarks.row import Given, Lines
from kvcellar.cluster.routing import Load, Router
from kvcellar.memory.prefix.blocks import START, blocks_of
from kvcellar.memory.prefix.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from kvcellar.memory.prefix.node import key_of

STREAM_SECONDS = 0.07  # of a step beside streams, and the part of decoding that prompts have at least (`Chunks`)
LEAST_SHARE = 0.5
WIRE = 0.001  # seconds of a message between gateway and replica,
LATE = 0.005  # until an event is there,
REPORT = 0.25  # and from one report of a replica to the next
FADING = 0.9  # of measured speeds
STALE = 10.0  # seconds until a handle of Ray Serve asks a replica for its queue again
MOST_BLOCKS = 2_000_000  # of a router


class Costs(NamedTuple):
    """An engine: seconds of a step, of each row in decode, prompt token and restored token; and its limits."""

    name: str
    base: float
    row: float
    each: float
    read: float
    step_tokens: int
    sequences: int
    cells: int
    block: int


# docs/howto/cuda.md: Llama 3.2 1B on an H200; cells and speed of the store (10 GB/s at 32 KiB a token) are assumed
GPU = Costs("H200, 1B", 0.003, 0.000_125, 1 / 95_711, 32_768 / 10e9, 4096, 64, 3_500_000, 512)
# assumed: 12 times the weights of the model above, so the seconds of a prompt token, and 196 608 bytes of a cell
LARGE = Costs("H200, 14B", 0.012, 0.000_3, 12 / 95_711, 196_608 / 10e9, 4096, 64, 460_000, 512)
SMALL = LARGE._replace(name="H200, 14B, little memory", cells=100_000)
# docs/performance.md: 125M on one Zen 5 core: decode-512, ragged-32, prefill-512; 1 GB of cells, 1 GB/s of the store
CPU = Costs("CPU, 125M", 0.0076, 0.001, 0.310 / 512, 6_144 / 1e9, 512, 32, 170_000, 64)

FINE = GPU._replace(cells=1_000_000, block=64)  # for short prompts


class Turn(NamedTuple):
    blocks: list[int]  # of prompt and answer
    prompt: int  # tokens
    answer: int
    think: float  # seconds until it is sent after the turn before


Session = list[Turn]


class Ask:
    """A request on its way."""

    def __init__(
        self, number: int, session: int, turn: Turn, block: int, sent: float, gateway: int, *, counts: bool
    ) -> None:
        self.number, self.session, self.turn, self.sent, self.gateway = number, session, turn, sent, gateway
        self.prompt, self.counts = turn.blocks[: turn.prompt // block], counts
        self.left, self.replica = turn.prompt, 0  # tokens to compute


class World:
    """What happens when."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order, self._events = count(), list[tuple[float, int, Callable[[], None]]]()

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), call))

    def run(self, until: Callable[[], bool]) -> None:
        while self._events and not until():
            self.now, _, call = heapq.heappop(self._events)
            call()


# -- an engine ---------------------------------------------------------------------------------------------------------


class Engine:
    """`tell` gets its events, `first` and `ended` requests. `store`: blocks that all can read; None: there is none."""

    def __init__(
        self,
        costs: Costs,
        world: World,
        store: set[int] | None,
        tell: Callable[[list[KvEvent]], None],
        first: Callable[[Ask], None],
        ended: Callable[[Ask], None],
    ) -> None:
        self.costs, self._world, self._store = costs, world, store
        self._tell, self._first, self._ended = tell, first, ended
        self._used: dict[int, int] = {}  # blocks of running requests, with how many these are
        self._idle: OrderedDict[int, None] = OrderedDict()  # blocks of none
        self._computing: set[int] = set()
        self._reserved, self._most = 0, costs.cells // costs.block
        self._waiting: list[Ask] = []
        self._prefill: list[Ask] = []
        self._decode: list[tuple[int, int, Ask]] = []  # a heap, by the number of the step that ends it
        self._steps = 0  # that have ended
        self._restoring, self._reads = 0, 0.0  # tokens; when the last read ends
        self._step: tuple[float, float, int] | None = None  # began; seconds of one, how many
        self._epoch = 0
        self._speed = [0.0, 0.0]  # tokens of prompts and seconds of steps that had some
        self.computed, self.evicted = 0, 0  # tokens; those of requests that do not count are not in it, and blocks

    def load(self) -> Load:
        tokens, seconds = self._speed
        waiting = self._restoring + sum(one.left for one in self._prefill)
        waiting += sum(one.turn.prompt - self._have(one) * self.costs.block for one in self._waiting)
        free = (self._most - len(self._used) - self._reserved) * self.costs.block
        read = 1 / self.costs.read if self._store is not None else None
        speed = tokens / seconds if seconds else None
        queue = len(self._waiting) + len(self._prefill)
        cells = max(0, free), self.costs.cells
        return Load(waiting, len(self._decode), speed, read, *cells, queue, self.costs.sequences)

    def blocks(self) -> set[int]:
        return {*self._used, *self._idle}

    def take(self, ask: Ask) -> None:
        if (tokens := self._stored(ask)) == 0:
            self._queue(ask)
            return
        self._restoring += tokens
        self._reads = max(self._reads, self._world.now) + tokens * self.costs.read
        self._world.after(self._reads - self._world.now, lambda: self._restored(ask, tokens))

    def _stored(self, ask: Ask) -> int:
        """Tokens that are read from the store, if that is faster than computing them."""
        if self._store is None or self.costs.read >= self.costs.each:
            return 0
        start = end = self._have(ask)
        while end < len(ask.prompt) and ask.prompt[end] in self._store:
            end += 1
        return (end - start) * self.costs.block

    def _restored(self, ask: Ask, tokens: int) -> None:
        self._restoring -= tokens
        start = self._have(ask)
        found = ask.prompt[start : start + tokens // self.costs.block]
        events = self._evict(len(found))
        if len(self._used) + len(self._idle) + self._reserved + len(found) <= self._most:
            self._idle.update(dict.fromkeys(reversed(found)))
            events.append(BlockStored(found, None, None, self.costs.block, None, "GPU"))
        self._tell(events)
        self._queue(ask)

    def _queue(self, ask: Ask) -> None:
        self._waiting.append(ask)
        if self._step is None:
            self._begin()
        else:
            self._cut(self._step)

    def _cut(self, step: tuple[float, float, int]) -> None:
        """Of many steps, the one that runs now is the last."""
        began, each, steps = step
        if steps > 1:
            self._run(began, each, max(1, ceil((self._world.now - began) / each - 1e-9)), [])

    def leave(self, ask: Ask) -> None:
        """Its prompt is computed, and it goes on elsewhere."""
        self._decode = [one for one in self._decode if one[2] is not ask]
        heapq.heapify(self._decode)
        self._reserved -= ceil((ask.turn.prompt + ask.turn.answer) / self.costs.block) - len(ask.prompt)
        self._free(ask.prompt)
        if self._step is not None:
            self._cut(self._step)

    def _has(self, block: int) -> bool:
        return block in self._used or block in self._idle

    def _have(self, ask: Ask) -> int:
        """Blocks, of which the last token is always computed."""
        most = (ask.turn.prompt - 1) // self.costs.block
        return next((at for at, one in enumerate(ask.prompt[:most]) if not self._has(one)), min(most, len(ask.prompt)))

    def _admit(self) -> list[KvEvent]:
        events: list[KvEvent] = []
        for ask in [*self._waiting]:
            if len(self._prefill) + len(self._decode) >= self.costs.sequences:
                break
            have = self._have(ask)
            if have < len(ask.prompt) and ask.prompt[have] in self._computing:
                continue  # an older prompt computes it
            block = self.costs.block
            need = ceil((ask.turn.prompt + ask.turn.answer) / block) - have
            mine = sum(one in self._idle for one in ask.prompt[:have])
            if need + mine + len(self._used) + self._reserved > self._most and self._used:
                break
            self._waiting.remove(ask)
            self._use(ask.prompt[:have])
            events += self._evict(need)
            self._reserved += need
            self._computing.update(ask.prompt[have:])
            ask.left = ask.turn.prompt - have * block
            self.computed += ask.left if ask.counts else 0
            self._prefill.append(ask)
        return events

    def _use(self, blocks: Sequence[int]) -> None:
        for one in blocks:
            self._idle.pop(one, None)
            self._used[one] = self._used.get(one, 0) + 1

    def _evict(self, blocks: int) -> list[KvEvent]:
        over = len(self._used) + len(self._idle) + self._reserved + blocks - self._most
        gone = [self._idle.popitem(last=False)[0] for _ in range(min(over, len(self._idle)))]
        self.evicted += len(gone)
        return [BlockRemoved(gone, "GPU")] if gone else []

    def _begin(self, events: Sequence[KvEvent] = ()) -> None:
        """A step, or many of decoding alone. `events`: of the one before."""
        self._tell([*events, *self._admit()])
        rows = len(self._decode)
        chunks = self._chunks(rows)
        tokens = sum(tokens for _, tokens in chunks)
        if not rows and not tokens:
            self._step = None
            return
        seconds = self.costs.base + self.costs.row * rows + self.costs.each * tokens
        if tokens or self._waiting:
            self._speed = [FADING * self._speed[0] + tokens, FADING * self._speed[1] + seconds]
        steps = 1
        if not self._prefill and not self._waiting:
            steps = self._decode[0][0] - self._steps
        self._run(self._world.now, seconds, steps, chunks)

    def _chunks(self, rows: int) -> list[tuple[Ask, int]]:
        left = self.costs.step_tokens - rows
        if rows:
            decoding = self.costs.base + self.costs.row * rows
            late = min(1.0, len(self._prefill) / rows) * (decoding - STREAM_SECONDS)
            left = min(left, int(max(STREAM_SECONDS - decoding, LEAST_SHARE * decoding, late) / self.costs.each))
        found: list[tuple[Ask, int]] = []
        others = sum(one.left for one in self._prefill[1:])
        for ask in (*self._prefill[:1], *sorted(self._prefill[1:], key=lambda one: one.left)):
            most = left - min(others, left // 2) if not found else left
            if (tokens := min(ask.left, most)) > 0:
                found.append((ask, tokens))
                left -= tokens
        return found

    def _run(self, began: float, each: float, steps: int, chunks: list[tuple[Ask, int]]) -> None:
        self._step, self._epoch = (began, each, steps), self._epoch + 1
        epoch = self._epoch
        self._world.after(began + steps * each - self._world.now, lambda: self._end(epoch, chunks))

    def _end(self, epoch: int, chunks: list[tuple[Ask, int]]) -> None:
        if epoch != self._epoch or self._step is None:
            return  # it ended earlier
        self._steps += self._step[2]
        events: list[KvEvent] = []
        for ask, tokens in chunks:
            size, done = self.costs.block, ask.turn.prompt - ask.left
            ask.left -= tokens
            events += self._keep(ask.turn.blocks[done // size : min((done + tokens) // size, len(ask.prompt))])
            if not ask.left:
                self._prefill.remove(ask)
                heapq.heappush(self._decode, (self._steps + ask.turn.answer - 1, ask.number, ask))
                self._first(ask)
        while self._decode and self._decode[0][0] <= self._steps:
            _, _, ask = heapq.heappop(self._decode)
            blocks, size = ask.turn.blocks, self.costs.block
            events += self._keep(blocks[len(ask.prompt) :])
            self._reserved -= ceil((ask.turn.prompt + ask.turn.answer) / size) - len(blocks)
            self._free(blocks)
            self._ended(ask)
        self._begin(events)

    def _free(self, blocks: Sequence[int]) -> None:
        for one in reversed(blocks):
            self._used[one] -= 1
            if not self._used[one]:
                del self._used[one]
                self._idle[one] = None

    def _keep(self, blocks: list[int]) -> list[KvEvent]:
        """Blocks that a running request has computed."""
        new = [one for one in blocks if not self._has(one)]
        self._reserved -= len(blocks)
        self._computing.difference_update(blocks)
        self._use(blocks)
        events: list[KvEvent] = []
        if new:
            events.append(BlockStored(new, None, None, self.costs.block, None, "GPU"))
        if self._store is not None and (late := [one for one in blocks if one not in self._store]):
            self._store.update(late)
            events.append(BlockStored(late, None, None, self.costs.block, None, "REMOTE"))
        return events


# -- rules -------------------------------------------------------------------------------------------------------------


class Rule:
    """Chooses in one gateway. `calls`: what it had to ask for, and got a reply to."""

    def __init__(self, fleet: "Fleet", gateway: int) -> None:
        self.fleet, self.random, self.calls = fleet, random.Random(gateway), 0

    def choose(self, ask: Ask) -> int:
        raise NotImplementedError

    def lengths(self, among: Sequence[int]) -> Sequence[int]:
        """Of the queues of these replicas: as they are now."""
        queues = self.fleet.queues
        return [queues[at] for at in among]

    def events(self, replica: int, events: list[KvEvent]) -> None: ...
    def load(self, replica: int, load: Load) -> None: ...
    def taken(self, ask: Ask) -> None: ...
    def first(self, ask: Ask) -> None: ...
    def ended(self, ask: Ask) -> None: ...


class AsHandles(Rule):
    """Lengths of queues are those that a handle of Ray Serve has: what a replica said when it took a request of this
    gateway, and what this gateway has sent and got back since; asked for where that is `STALE` seconds ago."""

    def __init__(self, fleet: "Fleet", gateway: int) -> None:
        super().__init__(fleet, gateway)
        self._lengths = np.zeros(len(fleet.engines), np.int64)
        self._known = np.full(len(fleet.engines), -inf)  # since when

    def choose(self, ask: Ask) -> int:
        at = super().choose(ask)
        self._note(at, int(self._lengths[at]) + 1)
        return at

    def lengths(self, among: Sequence[int]) -> Sequence[int]:
        every = np.asarray(among)
        for at in every[self.fleet.world.now - self._known[every] > STALE].tolist():
            self.calls += 1
            self._note(at, self.fleet.queues[at])
        return self._lengths[every].tolist()

    def taken(self, ask: Ask) -> None:
        self._note(ask.replica, self.fleet.queues[ask.replica])

    def ended(self, ask: Ask) -> None:
        if self.fleet.world.now - self._known[ask.replica] <= STALE:
            self._note(ask.replica, max(0, int(self._lengths[ask.replica]) - 1))

    def _note(self, at: int, length: int) -> None:
        self._lengths[at], self._known[at] = length, self.fleet.world.now


class RoundRobin(Rule):
    def __init__(self, fleet: "Fleet", gateway: int) -> None:
        super().__init__(fleet, gateway)
        self._next = gateway * len(fleet.engines) // len(fleet.rules or [1])

    def choose(self, ask: Ask) -> int:
        self._next = (self._next + 1) % len(self.fleet.engines)
        return self._next


class PowerOfTwo(Rule):
    def choose(self, ask: Ask) -> int:
        replicas = len(self.fleet.engines)
        two = self.random.sample(range(replicas), min(2, replicas))
        lengths = self.lengths(two)
        return two[lengths.index(min(lengths))]


class PowerOfTwoOfHandles(AsHandles, PowerOfTwo): ...


class BySession(Rule):
    def choose(self, ask: Ask) -> int:
        digest = blake2b(ask.session.to_bytes(8, "little"), digest_size=8).digest()
        return int.from_bytes(digest, "little") % len(self.fleet.engines)


class PrefixAffinity(Rule):
    """As Ray's `PrefixCacheAffinityRouter`: one tree of what was sent where, without evictions; the replicas that have
    the longest match, if that is a tenth of the prompt, else those that were sent least; the shortest queue of these.
    Beyond a difference of queues, two at random. The tree is one actor, also of several gateways."""

    imbalance = inf

    def choose(self, ask: Ask) -> int:
        among = self.among(ask.prompt)
        drawn = self.random.sample(among, len(among))
        lengths = self.lengths(drawn)
        chosen = drawn[lengths.index(min(lengths))]
        self.insert(ask.prompt, chosen)
        return chosen

    def among(self, prompt: Sequence[int]) -> Sequence[int]:
        """Of which the shortest queue is taken."""
        every = range(len(self.fleet.engines))
        lengths = self.lengths(every)
        if max(lengths) - min(lengths) > self.imbalance:
            return self.random.sample(every, min(2, len(every)))
        self.calls += 1
        matched, owners = 0, set(every)
        for block in prompt:
            if not (found := self.fleet.tree.get(block)):
                break
            matched, owners = matched + 1, found
        if prompt and matched / len(prompt) >= 0.1:
            return sorted(owners)
        self.calls += 1
        sizes = self.fleet.sizes
        least = min(sizes)
        return [at for at, size in enumerate(sizes) if size == least]

    def insert(self, prompt: Sequence[int], at: int) -> None:
        self.calls += 1
        tree, sizes = self.fleet.tree, self.fleet.sizes
        for block in prompt:
            owners = tree.setdefault(block, set())
            sizes[at] += at not in owners
            owners.add(at)


class PrefixAffinity10(PrefixAffinity):
    imbalance = 10


class PrefixAffinity10OfHandles(AsHandles, PrefixAffinity10): ...


class Ours(Rule):
    def __init__(self, fleet: "Fleet", gateway: int) -> None:
        super().__init__(fleet, gateway)
        self.router = Router(fleet.costs.block, most_blocks=MOST_BLOCKS, clock=lambda: fleet.world.now, seed=gateway)
        for at in range(len(fleet.engines)):
            self.router.join(str(at))
            self.router.events(str(at), [AllBlocksCleared()])

    def choose(self, ask: Ask) -> int:
        began = process_time()
        ranking = self.router.rank(ask.prompt, ask.turn.prompt)
        self.fleet.ranked.append(process_time() - began)
        self.router.sent(ranking[0].replica, ask.number, ask.prompt, ask.turn.prompt)
        return int(ranking[0].replica)

    def events(self, replica: int, events: list[KvEvent]) -> None:
        self.router.events(str(replica), events)

    def load(self, replica: int, load: Load) -> None:
        self.router.load(str(replica), load)

    def first(self, ask: Ask) -> None:
        self.router.first(ask.number)

    def ended(self, ask: Ask) -> None:
        self.router.ended(ask.number)


RULES: dict[str, type[Rule]] = {
    "round robin": RoundRobin,
    "power of two": PowerOfTwo,
    "power of two, handles": PowerOfTwoOfHandles,
    "session": BySession,
    "affinity": PrefixAffinity,
    "affinity, 10": PrefixAffinity10,
    "affinity, 10, handles": PrefixAffinity10OfHandles,
    "ours": Ours,
}


# -- a fleet -----------------------------------------------------------------------------------------------------------


class Found(NamedTuple):
    """What a run has shown, of requests that count."""

    asked: int  # prompt tokens
    computed: int
    first: tuple[float, float]  # seconds until the first token: median and 99th of a hundred
    whole: float  # seconds of a request, on the mean
    imbalance: float  # prompt tokens that were computed by the replica that has most, over the mean
    evicted: float  # tokens, over the cells that there are
    messages: float  # per second, to a gateway: events, reports and replies
    bytes: float  # of events and reports, without token ids, which events of engines have
    ranks: float  # microseconds of CPU time

    @property
    def share(self) -> float:
        """Of prompt tokens that were computed. Where answers take longer, sessions ask for less in the same time."""
        return self.computed / self.asked


class Fleet:
    def __init__(self, costs: Costs, replicas: int, rule: type[Rule], *, gateways: int, store: bool) -> None:
        self.costs, self.world = costs, World()
        self.queues = [0] * replicas
        self.tree: dict[int, set[int]] = {}  # blocks that were sent, and how many to whom: of `PrefixAffinity`
        self.sizes = [0] * replicas
        self.ranked: list[float] = []
        shared: set[int] | None = set() if store else None
        self.engines = [
            Engine(costs, self.world, shared, lambda events, at=at: self._tell(at, events), self._first, self._ended)
            for at in range(replicas)
        ]
        self.rules: list[Rule] = []
        self.rules = [rule(self, gateway) for gateway in range(gateways)]
        self._observed = issubclass(rule, Ours)
        self._waits: list[float] = []
        self._wholes: list[float] = []
        self._asked = self._messages = self._bytes = self._open = 0
        self._warm, self._end = 0.0, inf
        self._sessions: dict[int, deque[Turn]] = {}  # what is to come
        self._numbers, self._random = count(), random.Random(7)

    def serve(self, sessions: Sequence[tuple[float, Session]], *, warm: float = 0.0, end: float = inf) -> Found:
        """Until all are answered. Turns that are sent before `warm` do not count, and those behind `end` are not
        sent."""
        self._open, self._warm, self._end = sum(len(session) for _, session in sessions), warm, end
        for number, (start, session) in enumerate(sessions):
            self._sessions[number] = deque(session)
            self.world.after(start, lambda number=number: self._next(number))
        if self._observed:
            for at in range(len(self.engines)):
                self.world.after(REPORT * at / len(self.engines), lambda at=at: self._report(at))
        self.world.after(warm, self._reset)
        self.world.run(lambda: not self._open)
        seconds = min(self.world.now, end) - warm
        waits, computed = sorted(self._waits), [engine.computed for engine in self.engines]
        calls = sum(rule.calls for rule in self.rules) / len(self.rules)
        evicted = sum(engine.evicted for engine in self.engines) * self.costs.block
        return Found(
            asked=self._asked,
            computed=sum(computed),
            first=(waits[len(waits) // 2], waits[int(0.99 * len(waits))]),
            whole=sum(self._wholes) / len(self._wholes),
            imbalance=max(computed) * len(computed) / sum(computed),
            evicted=evicted / self.costs.cells / len(self.engines),
            messages=(self._messages + calls) / seconds,
            bytes=self._bytes / seconds,
            ranks=1e6 * sum(self.ranked) / max(1, len(self.ranked)),
        )

    def _reset(self) -> None:
        for rule in self.rules:
            rule.calls = 0
        for engine in self.engines:
            engine.evicted = 0

    def _next(self, session: int) -> None:
        if turns := self._sessions[session]:
            turn = turns.popleft()
            self.world.after(turn.think, lambda: self._send(session, turn))

    def _send(self, session: int, turn: Turn) -> None:
        if self.world.now >= self._end:
            self._open -= 1 + len(self._sessions[session])
            return
        gateway, counts = self._random.randrange(len(self.rules)), self.world.now >= self._warm
        ask = Ask(next(self._numbers), session, turn, self.costs.block, self.world.now, gateway, counts=counts)
        self._asked += turn.prompt if counts else 0
        ask.replica = self.rules[gateway].choose(ask)
        self.queues[ask.replica] += 1
        self.world.after(WIRE, lambda: self._take(ask))

    def _take(self, ask: Ask) -> None:
        self.engines[ask.replica].take(ask)
        self.world.after(WIRE, lambda: self.rules[ask.gateway].taken(ask))

    def _first(self, ask: Ask) -> None:
        if ask.counts:
            self._waits.append(self.world.now - ask.sent)
        self.world.after(WIRE, lambda: self.rules[ask.gateway].first(ask))

    def _ended(self, ask: Ask) -> None:
        self._open -= 1
        if ask.counts:
            self._wholes.append(self.world.now - ask.sent)
        self.queues[ask.replica] -= 1
        self.world.after(WIRE, lambda: self.rules[ask.gateway].ended(ask))
        self._next(ask.session)

    def _tell(self, at: int, events: list[KvEvent]) -> None:
        if events and self._observed:
            self._publish(LATE, events, lambda rule: rule.events(at, events))

    def _report(self, at: int) -> None:
        load = self.engines[at].load()
        self._publish(WIRE, load, lambda rule: rule.load(at, load))
        self.world.after(REPORT, lambda: self._report(at))

    def _publish(self, late: float, message: object, deliver: Callable[[Rule], None]) -> None:
        """To all gateways."""
        if self._warm <= self.world.now < self._end:
            self._messages += 1
            self._bytes += len(msgspec.msgpack.encode(message))

        def arrives() -> None:
            for rule in self.rules:
                deliver(rule)

        self.world.after(late, arrives)


def ideal(
    costs: Costs, replicas: int, sessions: Sequence[tuple[float, Session]], *, warm: float = 0.0, end: float = inf
) -> Found:
    """One engine that has all memory, and computes prompts and decodes as fast as all."""
    whole = costs._replace(
        row=costs.row / replicas,
        each=costs.each / replicas,
        step_tokens=costs.step_tokens * replicas,
        sequences=costs.sequences * replicas,
        cells=costs.cells * replicas,
    )
    return Fleet(whole, 1, RoundRobin, gateways=1, store=False).serve(sessions, warm=warm, end=end)


def memory(fleet: Fleet) -> int:
    """Bytes of a router that knows what the engines of a fleet have, and of the integers that came with events."""
    size = fleet.costs.block
    told = [[BlockStored([*one.blocks()], None, None, size, None, "GPU")] for one in fleet.engines]
    sent = [msgspec.msgpack.encode(one) for one in told]
    gc.collect()
    tracemalloc.start()
    router = Router(size, most_blocks=MOST_BLOCKS, clock=lambda: 0.0)
    for at, events in enumerate(sent):
        router.join(str(at))
        router.events(str(at), msgspec.msgpack.decode(events, type=list[KvEvent]))
    found, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return found


# -- requests ----------------------------------------------------------------------------------------------------------


def spread(draw: random.Random, sessions: Sequence[Session], rate: float) -> list[tuple[float, Session]]:
    """Sessions that begin at random, so many a second."""
    at, found = 0.0, list[tuple[float, Session]]()
    for session in sessions:
        at += draw.expovariate(rate)
        found.append((at, session))
    return found


class Published(NamedTuple):
    """Sessions of several turns over one of some system prompts. Lengths of texts are log-normal: median and sigma.
    `turns`: of the power law of their number, 0: one turn."""

    systems: int
    system: tuple[float, float]
    zipf: float  # how unequally often system prompts are used
    begin: tuple[float, float]  # tokens of a first message,
    more: tuple[float, float]  # and of further ones
    answer: tuple[float, float]
    turns: float
    think: tuple[float, float]  # seconds
    longest: int = 100_000


# Mooncake: https://github.com/kvcache-ai/Mooncake/tree/main/FAST25-release; Azure (of the paper Splitwise):
# https://github.com/Azure/AzurePublicDataset, AzureLLMInferenceDataset2023
MIXES = {
    # FAST'25, and counted in the trace itself: 12 035 tokens on the mean, median 6 909; answers of 343, median 350;
    # 39 % of requests go on from an earlier one, after 126 s (median), with 829 new tokens; 40 % of tokens seen before
    "conversation": Published(1, (512, 0), 1, (5500, 1.0), (829, 1.0), (300, 0.5), 2.2, (120, 0.8)),
    # FAST'25: 8 596 tokens, answers of 182, 59 % seen before. Number and use of system prompts are assumed
    "tool and agent": Published(60, (3000, 0.5), 1.1, (2500, 0.8), (500, 0.8), (120, 0.9), 2.0, (3, 0.8)),
    # Splitwise, 2023: medians of 1 020 and 129 tokens (conversation). System prompts, turns and pauses are assumed
    "Azure conversation": Published(20, (400, 0.3), 1.1, (500, 1.0), (150, 1.0), (129, 0.9), 1.5, (30, 0.8)),
    # Splitwise, 2023: medians of 1 500 and 13 tokens (code). That each file is asked about several times is assumed
    "Azure code": Published(1, (200, 0), 1, (1300, 0.9), (60, 0.8), (13, 0.8), 1.3, (10, 0.8)),
}  # fmt: skip


def published(mix: Published, requests: int, block: int, draw: random.Random) -> list[Session]:
    lengths = [_length(draw, mix.system, mix.longest) for _ in range(mix.systems)]
    weights = [(at + 1) ** -mix.zipf for at in range(mix.systems)]
    found, made = list[Session](), 0
    while made < requests:
        (system,) = draw.choices(range(mix.systems), weights)
        first, own = lengths[system] // block, draw.getrandbits(40)
        head = [_block(system, at) for at in range(first)]
        tokens, session = lengths[system] + _length(draw, mix.begin, mix.longest), Session()
        turns = min(50, int(draw.random() ** (-1 / mix.turns))) if mix.turns else 1
        for turn in range(turns):
            if tokens > mix.longest:
                break
            answer = _length(draw, mix.answer, 4000)
            blocks = [*head, *(_block(own + 1000, at) for at in range(first, (tokens + answer) // block))]
            think = draw.lognormvariate(0, mix.think[1]) * mix.think[0] if turn else 0.0
            session.append(Turn(blocks, tokens, answer, think))
            tokens += answer + _length(draw, mix.more, mix.longest)
        found.append(session)
        made += len(session)
    return found


def _length(draw: random.Random, law: tuple[float, float], most: int) -> int:
    return max(1, min(most, int(law[0] * draw.lognormvariate(0, law[1]))))


def _block(owner: int, at: int) -> int:
    return int.from_bytes(blake2b(b"%d %d" % (owner, at), digest_size=8).digest(), "little")


def copies(name: str, number: int, block: int, draw: random.Random, scale: float = 1.0) -> list[Session]:
    """Copies of a trace of `replay`, each with texts of its own: turns of a conversation follow each other."""
    found: list[Session] = []
    for seed in range(number):
        apart, task = dict[int, Session](), 0
        for turn in TRACES[name](Writer(seed, scale)):
            text, tokens = [*turn.prompt, *turn.answer], len(turn.prompt)
            blocks, _ = blocks_of("", START, key_of(text), block)
            task = turn.conversation if turn.conversation >= 0 else task  # a branch of an agent is a part of its task
            pause = draw.expovariate(0.5)
            apart.setdefault(task, []).append(Turn(blocks.hashes, tokens, len(turn.answer), pause))
        found += apart.values()
    draw.shuffle(found)
    return found


def sessions_of(
    name: str, replicas: int, amount: float, rate: float, block: int, scale: float = 1.0
) -> list[tuple[float, Session]]:
    """`amount`: copies of a trace, or requests, for each replica; `rate`: requests a second, likewise. `scale`: of the
    lengths of a trace."""
    draw = random.Random(5)
    if name in TRACES:
        made = copies(name, ceil(amount * replicas), block, draw, scale)
    else:
        made = published(MIXES[name], int(amount * replicas), block, draw)
    return spread(draw, made, rate * replicas * len(made) / sum(map(len, made)))


# -- the row -----------------------------------------------------------------------------------------------------------


class Scene(NamedTuple):
    """`rate`: requests a second and replica, for `seconds` behind `warm` ones."""

    name: str
    replicas: int
    rate: float
    costs: Costs = LARGE
    warm: float = 20.0
    seconds: float = 60.0
    store: bool = False

    @property
    def end(self) -> float:
        return self.warm + self.seconds

    def sessions(self, scale: float = 1.0) -> list[tuple[float, Session]]:
        amount = self.rate * self.end / (REQUESTS[self.name] if self.name in TRACES else 1)
        return sessions_of(self.name, self.replicas, amount, self.rate, self.costs.block, scale)

    @property
    def gateways(self) -> int:
        return min(8, max(2, self.replicas // 2))

    def __str__(self) -> str:
        text = f"{self.name}, {self.replicas} x {self.costs.name}, {self.rate:g} requests a second each"
        return text + (", a shared store" if self.store else "")


REQUESTS = {"agent": 120, "users": 200, "edits": 40, "chats": 128}  # of a copy of a trace, about
SIZES = (2, 8, 32, 128, 512, 1024)
SCENES = (
    *(Scene("tool and agent", replicas, 1) for replicas in SIZES),
    *(Scene("tool and agent", replicas, 1, SMALL) for replicas in (8, 128)),
    *(Scene("tool and agent", replicas, rate, GPU) for replicas, rate in ((2, 15), (8, 15), (8, 25), (32, 15))),
    *(Scene("conversation", replicas, 0.6, warm=240, seconds=240) for replicas in (2, 8, 32)),
    Scene("conversation", 8, 0.6, warm=240, seconds=240, store=True),
    Scene("conversation", 16, 8, GPU, warm=60),
    *(Scene(name, 4, rate, FINE) for name, rate in (("Azure conversation", 40), ("Azure code", 80))),
    *(Scene(name, at, 0.7, CPU, 120, 120) for name in ("agent", "users") for at in (2, 4, 32)),
    *(Scene(name, at, 0.6, CPU, 120, 120) for name in ("edits", "chats") for at in (2, 4, 32)),
    Scene("agent", 128, 0.7, CPU, 120, 120),
)  # fmt: skip
QUICK = (Scene("chats", 2, 20, CPU, 2, 4), Scene("tool and agent", 2, 20, FINE, 1, 2, store=True))
COLUMNS = ("computed", "median s", "p99 s", "mean s", "busiest", "evicted", "msg/s", "kB/s", "µs")


def row(given: Given) -> Lines:
    """Every rule on every scene. `computed`: share of prompt tokens, over that of one engine with all memory."""
    found, began = dict[str, dict[str, object]](), process_time()
    for scene in QUICK if given.quick else SCENES:
        costs, end = scene.costs, scene.end
        sessions = scene.sessions(0.1 if given.quick else 1.0)
        best = ideal(costs, scene.replicas, sessions, warm=scene.warm, end=end)
        yield f"\n{scene}: {best.asked} tokens in {scene.seconds:g} s, ideal {best.share:.3f}"
        yield "{:22}".format("") + " ".join(f"{name:>8}" for name in COLUMNS)
        found[str(scene)] = {"ideal": best._asdict()}
        for name, rule in RULES.items():
            fleet = Fleet(costs, scene.replicas, rule, gateways=scene.gateways, store=scene.store)
            one = fleet.serve(sessions, warm=scene.warm, end=end)
            found[str(scene)][name] = one._asdict()
            yield (
                f"{name:22}{one.share / best.share:8.3f} {one.first[0]:8.3f} {one.first[1]:8.2f} "
                f"{one.whole:8.2f} {one.imbalance:8.2f} {one.evicted:8.2f} {one.messages:8.0f} {one.bytes / 1e3:8.1f} "
                f"{one.ranks:8.0f}"
            )
            if name == "ours":
                held, blocks = memory(fleet), sum(len(engine.blocks()) for engine in fleet.engines)
                found[str(scene)]["router"] = {"bytes": held, "blocks": blocks}
                yield f"each of {scene.gateways} routers: {held / 1e6:.1f} MB, {blocks} blocks of replicas"
    yield f"\n{process_time() - began:.0f} s of CPU time"
    return found
