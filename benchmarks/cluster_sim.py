"""cluster_sim: what a fleet computes twice and what its users wait, by which rule requests go to replicas. Simulated.

The router is the real one, one in each gateway; time is virtual, and engines are models: a step takes `base + row *
rows + each * prompt tokens` seconds, prompts share it with streams as the scheduler does, memory is blocks of a prefix
tree, evicted by last use, and its events and reports come late. Costs are those that were measured of ours (`GPU`,
`CPU`). Requests are the traces of `replay`, several copies at a time, and sessions with the published numbers of
Mooncake's and Azure's. Everything but the microseconds of a rank is the same on every machine.
"""

import heapq
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from itertools import count
from math import ceil
from time import perf_counter
from typing import NamedTuple

import msgspec

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
GPU = Costs("H200, 1B", 0.003, 0.000_125, 1 / 95_711, 32_768 / 10e9, 4096, 64, 8_000_000, 512)
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

    def __init__(self, number: int, session: int, turn: Turn, block: int, sent: float, gateway: int) -> None:
        self.number, self.session, self.turn, self.sent, self.gateway = number, session, turn, sent, gateway
        self.prompt = turn.blocks[: turn.prompt // block]
        self.left, self.produced, self.replica = turn.prompt, 0, 0  # tokens to compute, and drawn


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
        self._decode: list[Ask] = []
        self._restoring, self._reads = 0, 0.0  # tokens; when the last read ends
        self._step: tuple[float, float, int] | None = None  # began; seconds of one, how many
        self._epoch = 0
        self._speed = [0.0, 0.0]  # tokens of prompts and seconds of steps that had some
        self.computed, self.busy = 0, 0.0

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
        self._decode.remove(ask)
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
            have = self._have(ask)
            if have < len(ask.prompt) and ask.prompt[have] in self._computing:
                continue  # an older prompt computes it
            block = self.costs.block
            need = ceil((ask.turn.prompt + ask.turn.answer) / block) - have
            mine = sum(one in self._idle for one in ask.prompt[:have])
            if len(self._prefill) + len(self._decode) >= self.costs.sequences:
                break
            if need + mine + len(self._used) + self._reserved > self._most and self._used:
                break
            self._waiting.remove(ask)
            self._use(ask.prompt[:have])
            events += self._evict(need)
            self._reserved += need
            self._computing.update(ask.prompt[have:])
            ask.left = ask.turn.prompt - have * block
            self.computed += ask.left
            self._prefill.append(ask)
        return events

    def _use(self, blocks: Sequence[int]) -> None:
        for one in blocks:
            self._idle.pop(one, None)
            self._used[one] = self._used.get(one, 0) + 1

    def _evict(self, blocks: int) -> list[KvEvent]:
        over = len(self._used) + len(self._idle) + self._reserved + blocks - self._most
        gone = [self._idle.popitem(last=False)[0] for _ in range(min(over, len(self._idle)))]
        return [BlockRemoved(gone, "GPU")] if gone else []

    def _begin(self) -> None:
        """A step, or many of decoding alone."""
        self._tell(self._admit())
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
            steps = min(one.turn.answer - one.produced for one in self._decode)
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
        _, each, steps = self._step
        self.busy += each * steps
        events: list[KvEvent] = []
        for ask in self._decode:
            ask.produced += steps
        for ask, tokens in chunks:
            size, done = self.costs.block, ask.turn.prompt - ask.left
            ask.left -= tokens
            events += self._keep(ask.turn.blocks[done // size : min((done + tokens) // size, len(ask.prompt))])
            if not ask.left:
                self._prefill.remove(ask)
                self._decode.append(ask)
                ask.produced = 1
                self._first(ask)
        for ask in [one for one in self._decode if one.produced >= one.turn.answer]:
            self._decode.remove(ask)
            blocks, size = ask.turn.blocks, self.costs.block
            events += self._keep(blocks[len(ask.prompt) :])
            self._reserved -= ceil((ask.turn.prompt + ask.turn.answer) / size) - len(blocks)
            self._free(blocks)
            self._ended(ask)
        self._tell(events)
        self._begin()

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
    """Chooses in one gateway. `queues`: how many requests each replica has, which the rules of others know at once."""

    def __init__(self, fleet: "Fleet", gateway: int) -> None:
        self.fleet, self.random = fleet, random.Random(gateway)

    def choose(self, ask: Ask) -> int:
        raise NotImplementedError

    def events(self, replica: int, events: list[KvEvent]) -> None: ...
    def load(self, replica: int, load: Load) -> None: ...
    def first(self, ask: Ask) -> None: ...
    def ended(self, ask: Ask) -> None: ...


class RoundRobin(Rule):
    def __init__(self, fleet: "Fleet", gateway: int) -> None:
        super().__init__(fleet, gateway)
        self._next = gateway * len(fleet.engines) // len(fleet.rules or [1])

    def choose(self, ask: Ask) -> int:
        self._next = (self._next + 1) % len(self.fleet.engines)
        return self._next


class PowerOfTwo(Rule):
    def choose(self, ask: Ask) -> int:
        queues = self.fleet.queues
        return min(self.random.sample(range(len(queues)), min(2, len(queues))), key=lambda at: queues[at])


class BySession(Rule):
    def choose(self, ask: Ask) -> int:
        digest = blake2b(ask.session.to_bytes(8, "little"), digest_size=8).digest()
        return int.from_bytes(digest, "little") % len(self.fleet.engines)


class PrefixAffinity(Rule):
    """As Ray's `PrefixCacheAffinityRouter`: one tree of what was sent where, without evictions; the replicas that have
    the longest match, if that is a tenth of the prompt, else those that were sent least; the shortest queue of these.
    Beyond a difference of queues, two at random."""

    imbalance = float("inf")

    def choose(self, ask: Ask) -> int:
        queues, tree, sizes = self.fleet.queues, self.fleet.tree, self.fleet.sizes
        matched, owners = 0, set(range(len(queues)))
        for block in ask.prompt:
            if not (found := tree.get(block)):
                break
            matched, owners = matched + 1, found
        if max(queues) - min(queues) > self.imbalance:
            among = self.random.sample(range(len(queues)), min(2, len(queues)))
        elif matched < 0.1 * len(ask.prompt) or not ask.prompt:
            least = min(sizes)
            among = [at for at, size in enumerate(sizes) if size == least]
        else:
            among = sorted(owners)
        chosen = min(self.random.sample(among, len(among)), key=lambda at: queues[at])
        for block in ask.prompt:
            owners = tree.setdefault(block, set())
            sizes[chosen] += chosen not in owners
            owners.add(chosen)
        return chosen


class PrefixAffinity10(PrefixAffinity):
    imbalance = 10


class Ours(Rule):
    def __init__(self, fleet: "Fleet", gateway: int) -> None:
        super().__init__(fleet, gateway)
        self.router = Router(fleet.costs.block, most_blocks=2_000_000, clock=lambda: fleet.world.now, seed=gateway)
        for at in range(len(fleet.engines)):
            self.router.join(str(at))
            self.router.events(str(at), [AllBlocksCleared()])

    def choose(self, ask: Ask) -> int:
        began = perf_counter()
        ranking = self.router.rank(ask.prompt, ask.turn.prompt)
        self.fleet.ranked.append(perf_counter() - began)
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
    "session": BySession,
    "prefix affinity": PrefixAffinity,
    "prefix affinity, 10": PrefixAffinity10,
    "ours": Ours,
}


# -- a fleet -----------------------------------------------------------------------------------------------------------


class Found(NamedTuple):
    """What a run has shown."""

    asked: int  # prompt tokens
    computed: int
    first: tuple[float, float]  # seconds until the first token: median and 99th of a hundred
    whole: float  # seconds of a request, on the mean
    imbalance: float  # of the busiest replica over the mean
    messages: float  # per second, to a gateway
    bytes: float  # without token ids, which events of engines have
    ranks: float  # microseconds


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
        self._until = 0.0
        self._sessions: dict[int, Iterator[Turn]] = {}
        self._numbers, self._random = count(), random.Random(7)

    def serve(self, sessions: Sequence[tuple[float, Session]]) -> Found:
        self._open = sum(len(session) for _, session in sessions)
        self._until = max(start for start, _ in sessions)
        for number, (start, session) in enumerate(sessions):
            self._sessions[number] = iter(session)
            self.world.after(start, lambda number=number: self._next(number))
        if self._observed:
            for at in range(len(self.engines)):
                self.world.after(REPORT * at / len(self.engines), lambda at=at: self._report(at))
        self.world.run(lambda: not self._open)
        busy = [engine.busy for engine in self.engines]
        waits = sorted(self._waits)
        return Found(
            asked=self._asked,
            computed=sum(engine.computed for engine in self.engines),
            first=(waits[len(waits) // 2], waits[int(0.99 * len(waits))]),
            whole=sum(self._wholes) / len(self._wholes),
            imbalance=max(busy) * len(busy) / sum(busy),
            messages=self._messages / self._until,
            bytes=self._bytes / self._until,
            ranks=1e6 * sum(self.ranked) / max(1, len(self.ranked)),
        )

    def _next(self, session: int) -> None:
        if (turn := next(self._sessions[session], None)) is not None:
            self.world.after(turn.think, lambda: self._send(session, turn))

    def _send(self, session: int, turn: Turn) -> None:
        gateway = self._random.randrange(len(self.rules))
        ask = Ask(next(self._numbers), session, turn, self.costs.block, self.world.now, gateway)
        self._asked += turn.prompt
        ask.replica = self.rules[gateway].choose(ask)
        self.queues[ask.replica] += 1
        self.world.after(WIRE, lambda: self.engines[ask.replica].take(ask))

    def _first(self, ask: Ask) -> None:
        self._waits.append(self.world.now - ask.sent)
        self.world.after(WIRE, lambda: self.rules[ask.gateway].first(ask))

    def _ended(self, ask: Ask) -> None:
        self._open -= 1
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
        """To all gateways. It is counted while sessions begin."""
        if self.world.now <= self._until:
            self._messages += 1
            self._bytes += len(msgspec.msgpack.encode(message))
        for rule in self.rules:
            self.world.after(late, lambda rule=rule: deliver(rule))


def ideal(costs: Costs, replicas: int, sessions: Sequence[tuple[float, Session]]) -> Found:
    """One engine that has all memory, and computes prompts and decodes as fast as all."""
    whole = costs._replace(
        row=costs.row / replicas,
        each=costs.each / replicas,
        step_tokens=costs.step_tokens * replicas,
        sequences=costs.sequences * replicas,
        cells=costs.cells * replicas,
    )
    return Fleet(whole, 1, RoundRobin, gateways=1, store=False).serve(sessions)


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
        apart: dict[int, Session] = {}
        for turn in TRACES[name](Writer(seed, scale)):
            text, tokens = [*turn.prompt, *turn.answer], len(turn.prompt)
            blocks, _ = blocks_of("", START, key_of(text), block)
            key = turn.conversation if name in ("users", "chats") else 0
            pause = draw.expovariate(0.5)
            apart.setdefault(key, []).append(Turn(blocks.hashes, tokens, len(turn.answer), pause))
        found += apart.values()
    draw.shuffle(found)
    return found


# -- the row -----------------------------------------------------------------------------------------------------------


class Scene(NamedTuple):
    """`amount`: copies of a trace, or requests, for each replica; `rate`: requests a second, likewise."""

    name: str
    replicas: int
    amount: int
    rate: float
    store: bool = False

    @property
    def costs(self) -> Costs:
        return CPU if self.name in TRACES else FINE if self.name.startswith("Azure") else GPU

    def sessions(self, *, scale: float = 1.0) -> list[tuple[float, Session]]:
        draw = random.Random(5)
        if self.name in TRACES:
            made = copies(self.name, self.amount * self.replicas, self.costs.block, draw, scale)
        else:
            made = published(MIXES[self.name], int(self.amount * self.replicas * scale), self.costs.block, draw)
        return spread(draw, made, self.rate * self.replicas * len(made) / sum(map(len, made)))

    @property
    def gateways(self) -> int:
        return min(8, max(2, self.replicas // 2))


SCENES = (
    *(Scene(name, replicas, 1, 0.7) for name in ("agent", "users") for replicas in (2, 4)),
    *(Scene(name, replicas, 3, 0.6) for name in ("edits", "chats") for replicas in (2, 4)),
    *(Scene("conversation", replicas, 600, rate) for replicas in (2, 4) for rate in (7, 11)),
    Scene("conversation", 4, 600, 7, store=True),
    *(Scene("tool and agent", replicas, 600, rate) for replicas in (2, 4) for rate in (15, 25)),
    *(Scene(name, 4, 600, rate) for name, rate in (("Azure conversation", 40), ("Azure code", 80))),
    *(Scene("tool and agent", at, amount, 15) for at, amount in ((16, 200), (64, 80), (256, 30), (1024, 10))),
    Scene("conversation", 16, 200, 8),
)
QUICK = (Scene("chats", 2, 1, 1), Scene("tool and agent", 2, 40, 20, store=True))


def row(given: Given) -> Lines:
    """Every rule on every scene. `computed`: prompt tokens, over those of one engine with all memory."""
    names = ("computed", "first", "p99 s", "mean s", "busiest", "msg/s", "kB/s", "µs")
    found = dict[str, dict[str, object]]()
    for scene in QUICK if given.quick else SCENES:
        costs, sessions = scene.costs, scene.sessions(scale=0.1 if given.quick and scene.name in TRACES else 1.0)
        best = ideal(costs, scene.replicas, sessions)
        label = f"{scene.name}, {scene.replicas} x {costs.name}, {scene.rate:g} requests a second each"
        label += ", a shared store" if scene.store else ""
        yield f"\n{label}: {best.asked} tokens, ideal {best.computed / best.asked:.3f}, {scene.gateways} gateways"
        yield "{:20} {:>8} {:>7} {:>7} {:>7} {:>7} {:>7} {:>7} {:>5}".format("", *names)
        found[label] = {"ideal": best._asdict()}
        for name, rule in RULES.items():
            one = Fleet(costs, scene.replicas, rule, gateways=scene.gateways, store=scene.store).serve(sessions)
            found[label][name] = one._asdict()
            yield (
                f"{name:20} {one.computed / best.computed:8.3f} {one.first[0]:7.3f} {one.first[1]:7.2f} "
                f"{one.whole:7.2f} "
                f"{one.imbalance:7.2f} {one.messages:7.0f} {one.bytes / 1e3:7.1f} {one.ranks:5.0f}"
            )
    return found
