"""routing: which replica of an engine a request goes to: the one where its first token comes soonest, in seconds.

    router.events(replica, events)        # what it has published (`kv_events`)
    router.load(replica, load)            # how it is doing
    best = router.rank(hashes, tokens)    # best first; empty: no opinion
    router.sent(best[0].replica, number, hashes, tokens)

The seconds of a replica are `max(wait, restore) + compute + others`:

  * wait: prompt tokens that were there before, by the speed of its prompts. That speed is measured in steps in which
    others decode, as the scheduler mixes them, so what these take is in it;
  * restore: tokens that a tier has and the device has not, where reading them is faster than computing them. Waiting
    requests are read ahead, so it passes while the request waits;
  * compute: the tokens that are left;
  * others: what those pay who wait behind. A second of the device that another replica would not have to spend is one
    that each request waits longer which comes before the queue is empty. As many as wait now, on the mean of all
    replicas, will have waited for it: by Little's law the seconds of prompts that wait, by those of one request. So an
    idle fleet prefers the first token that comes soonest, and a busy one the least work.

What was sent and is not there yet counts as waiting and as being there. So requests that begin alike go together until
waiting for each other takes longer than computing their beginning a second time, and then there is a second replica
that has it.

Several gateways have each a router, which learns of the requests of the others by the next report only. How much more
waits than was expected is measured at every report. Among replicas that have as much of a prompt as each other, waiting
is uncertain by that much, and a part of it is added that the hash of the first missing block draws: so gateways send
different prompts to different replicas, and the same one to the same.

Always true:
  * a block is known as long as a replica has it in some medium, and at most `most_blocks` are: the one that was touched
    longest ago is forgotten, which only means to think that replicas have less;
  * of a replica that has left, nothing is known;
  * what a request brings counts as being on its replica until events say so, or it ends.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from random import Random
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from kvcellar.errors import BadRequest

DEVICE, REMOTE = 0, 3
MEDIA = ("GPU", "CPU", "DISK", "REMOTE")  # those between device and remote are read by their own replica only
MOST = 8  # replicas of a ranking
_COUNT = Annotated[int, Meta(ge=0)]
_RATE = Annotated[float, Meta(gt=0)]
_Floats: TypeAlias = NDArray[np.float64]
_Counts: TypeAlias = NDArray[np.int64]


class Load(Struct, frozen=True):
    """How a replica is doing. Speeds are None before anything was measured."""

    waiting_tokens: _COUNT  # prompt tokens not computed yet of requests that it has taken in
    running: _COUNT  # completions in decode
    decode_seconds: _RATE | None  # of a step with those
    prefill_speed: _RATE | None  # prompt tokens per second, in steps that have some
    read_speed: _RATE | None  # tokens per second that are restored from the shared store
    cells_free: _COUNT  # that no running sequence uses
    cells: _COUNT


class Score(Struct, frozen=True):
    """What a replica was chosen by. Where no replica has measured a speed, tokens stand for seconds."""

    replica: str
    seconds: float  # in all
    wait: float
    restore: float
    compute: float
    others: float
    have: int  # tokens of the prompt on its device, or about to be there
    restored: int  # tokens that it would read
    room: bool  # whether it has cells for the rest


Ranking: TypeAlias = tuple[Score, ...]


class _Stored(Struct, frozen=True, array_like=True, tag="BlockStored"):
    hashes: list[_COUNT]
    parent: _COUNT | None
    tokens: Any
    size: int
    lora: Any
    medium: str
    adapter: Any = None
    extra: Any = None


class _Removed(Struct, frozen=True, array_like=True, tag="BlockRemoved"):
    hashes: list[_COUNT]
    medium: str


class _Cleared(Struct, frozen=True, array_like=True, tag="AllBlocksCleared"):
    pass


_Event: TypeAlias = _Stored | _Removed | _Cleared


class _Request(Struct):
    """A request that was sent."""

    at: int  # the place of its replica
    reports: int  # how many loads of the replica had come before
    tokens: int  # to be computed; 0: they are
    brought: list[int]  # blocks that were not there


class _Blocks:
    """Who has which block: for each medium the places of replicas, as bits of an integer."""

    def __init__(self, most: int) -> None:
        self._most, self._tiers = most, False  # whether any was in another medium than the device
        self._bits: OrderedDict[int, list[int]] = OrderedDict()  # of each medium, by block; the last was touched last
        self._held: dict[int, set[int]] = {}  # by place
        self._bit: dict[int, int] = {}  # shared, so that a block of one replica takes no integer of its own

    def join(self, at: int) -> None:
        self._held[at], self._bit[at] = set(), 1 << at

    def leave(self, at: int) -> None:
        self.clear(at)
        del self._held[at], self._bit[at]

    def clear(self, at: int) -> None:
        for block in self._held[at]:
            bits = self._bits[block]
            for medium in range(len(MEDIA)):
                bits[medium] &= ~self._bit[at]
            if not any(bits):
                del self._bits[block]
        self._held[at].clear()

    def add(self, at: int, medium: int, block: int) -> None:
        if (bits := self._bits.get(block)) is None:
            bits = self._bits[block] = [0] * len(MEDIA)
            if len(self._bits) > self._most:
                self._drop()
        self._bits.move_to_end(block)
        self._tiers |= medium != DEVICE
        bits[medium] = bits[medium] | self._bit[at] if bits[medium] else self._bit[at]
        self._held[at].add(block)

    def remove(self, at: int, medium: int, block: int) -> None:
        if (bits := self._bits.get(block)) is None:
            return  # it was dropped
        bits[medium] &= ~self._bit[at]
        if not any(one & self._bit[at] for one in bits):
            self._held[at].discard(block)
            if not any(bits):
                del self._bits[block]

    def has(self, at: int, block: int) -> bool:
        """On its device."""
        return block in self._bits and bool(self._bits[block][DEVICE] & self._bit[at])

    def touch(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if block in self._bits:
                self._bits.move_to_end(block)

    def _drop(self) -> None:
        block, bits = self._bits.popitem(last=False)
        for at in _places(bits[0] | bits[1] | bits[2] | bits[3]):
            self._held[at].discard(block)

    def match(self, blocks: Sequence[int], places: int) -> tuple[_Counts, _Counts]:
        """How many of the first blocks each replica has on its device, and how many with what it can read."""
        device = _prefixes((self._bits.get(block, _NOWHERE)[DEVICE] for block in blocks), places)
        if not self._tiers:
            return device, device
        everyone, readable = (1 << places) - 1, (self._bits.get(block, _NOWHERE) for block in blocks)
        return device, _prefixes((everyone if one[REMOTE] else one[0] | one[1] | one[2] for one in readable), places)

    def check(self) -> None:
        held: dict[int, set[int]] = {at: set() for at in self._held}
        for block, bits in self._bits.items():
            assert any(bits), "a block that nobody has is known"
            for at in _places(bits[0] | bits[1] | bits[2] | bits[3]):
                held[at].add(block)
        assert held == self._held, "blocks of replicas and replicas of blocks differ"
        assert len(self._bits) <= self._most, "too many blocks are known"


_NOWHERE = [0] * len(MEDIA)


def _prefixes(owners: Iterable[int], places: int) -> _Counts:
    """How many of the first blocks each place has, where those that have a block are the bits of an integer."""
    counts, alive, count = np.zeros(places, np.int64), (1 << places) - 1, 0
    for bits in owners:
        if (left := alive & bits) != alive:
            if count:
                _set(counts, alive ^ left, count)
            if not left:
                return counts
            alive = left
        count += 1
    _set(counts, alive, count)
    return counts


def _places(bits: int) -> Iterator[int]:
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low


def _set(counts: _Counts, bits: int, value: int) -> None:
    """At the places of these bits."""
    if bits.bit_count() < 16:
        for at in _places(bits):
            counts[at] = value
    else:
        packed = np.frombuffer(bits.to_bytes((len(counts) + 7) // 8, "little"), np.uint8)
        counts[np.unpackbits(packed, count=len(counts), bitorder="little").view(bool)] = value


class _Seats:
    """Numbers of replicas by place, in arrays: a rank looks at all of them at once."""

    def __init__(self) -> None:
        self.names: list[str | None] = []
        self.there = np.zeros(0, bool)
        self.heard = np.zeros(0, bool)  # its events
        self.salt = np.zeros(0, np.uint64)
        self.reports = np.zeros(0, np.int64)
        self.reported = np.zeros(0)  # when the last one came,
        self.waiting = np.zeros(0)  # the tokens that waited then,
        self.sent = np.zeros(0)  # and those that were sent since
        self.each = np.zeros(0)  # seconds of a prompt token; nan: not measured
        self.read = np.zeros(0)  # and of a restored one
        self.requests = np.zeros(0)  # in decode, or sent since the last report
        self.free = np.zeros(0)  # cells
        self.surprise = np.zeros(0)  # tokens that waited at the last report and were not expected

    def join(self, name: str) -> int:
        if None not in self.names:
            self._grow()
        at = self.names.index(None)
        self.names[at], self.there[at], self.heard[at] = name, True, False
        self.salt[at] = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
        self.each[at] = self.read[at] = np.nan
        self.free[at] = np.inf
        for column in (self.reports, self.reported, self.waiting, self.sent, self.requests, self.surprise):
            column[at] = 0
        return at

    def leave(self, at: int) -> None:
        self.names[at], self.there[at] = None, False

    def _grow(self) -> None:
        more = max(8, len(self.names))
        self.names += [None] * more
        for name, column in vars(self).items():
            if isinstance(column, np.ndarray):
                setattr(self, name, np.concatenate([column, np.zeros(more, column.dtype)]))

    def measured(self, column: _Floats) -> _Floats | None:
        """Seconds of a token. What a replica has not measured is as in the mean of those that have; None: none has."""
        known = self.there & ~np.isnan(column)
        return np.where(known, column, column[known].mean()) if known.any() else None

    def expected(self, now: float, each: _Floats | None) -> _Floats:
        """Tokens that wait."""
        done = 0.0 if each is None else (now - self.reported) / each
        return np.maximum(0.0, self.waiting - done) + self.sent


class Router:
    """Ranks the replicas of one model. Not for several threads at once. Methods raise `KeyError` for a replica that has
    not joined."""

    def __init__(self, block: int, *, most_blocks: int, clock: Callable[[], float], seed: int = 0) -> None:
        """`block`: tokens of a block."""
        self._size, self._clock, self._random = block, clock, Random(seed)
        self._blocks, self._seats = _Blocks(most_blocks), _Seats()
        self._place: dict[str, int] = {}
        self._requests: dict[int, _Request] = {}
        self._coming: dict[tuple[int, int], int] = {}  # the last request that brings a block to a place
        self._work, self._sends = 0.0, 0  # tokens that requests had computed

    def join(self, replica: str) -> None:
        if replica in self._place:
            raise BadRequest(f"{replica} has joined already")
        self._place[replica] = at = self._seats.join(replica)
        self._blocks.join(at)

    def leave(self, replica: str) -> None:
        at = self._place.pop(replica)
        for number in [number for number, one in self._requests.items() if one.at == at]:
            self.ended(number)
        self._blocks.leave(at)
        self._seats.leave(at)

    def events(self, replica: str, events: Sequence[Any]) -> None:
        """Raises `BadRequest`, and changes nothing, where one of them is malformed."""
        at, read = self._place[replica], self._read(events)
        self._seats.heard[at] = True
        for event in read:
            if isinstance(event, _Cleared):
                self._blocks.clear(at)
            elif event.medium in MEDIA:
                change = self._blocks.add if isinstance(event, _Stored) else self._blocks.remove
                medium = MEDIA.index(event.medium)
                for block in event.hashes:
                    change(at, medium, block)
                    if medium == DEVICE:
                        self._coming.pop((at, block), None)

    def _read(self, events: Sequence[Any]) -> list[_Event]:
        try:
            read = msgspec.convert(list(events), list[_Event])
        except (msgspec.ValidationError, TypeError) as error:
            raise BadRequest(f"not KV events: {error}") from error
        for event in read:
            if isinstance(event, _Stored) and event.size != self._size:
                raise BadRequest(f"a KV event has blocks of {event.size} tokens, not {self._size}")
            if not isinstance(event, _Cleared) and any(block >> 64 for block in event.hashes):
                raise BadRequest("a KV event has the hash of a block that is above 64 bits")
        return read

    def load(self, replica: str, load: Load) -> None:
        at, seats, now = self._place[replica], self._seats, self._clock()
        if seats.reports[at]:
            done = 0.0 if np.isnan(seats.each[at]) else (now - seats.reported[at]) / seats.each[at]
            expected = max(0.0, seats.waiting[at] - done) + seats.sent[at]
            seats.surprise[at] = max(0.0, load.waiting_tokens - expected)
        seats.reports[at] += 1
        seats.reported[at], seats.waiting[at], seats.sent[at] = now, load.waiting_tokens, 0
        seats.each[at] = np.nan if load.prefill_speed is None else 1 / load.prefill_speed
        seats.read[at] = np.nan if load.read_speed is None else 1 / load.read_speed
        seats.requests[at], seats.free[at] = load.running, load.cells_free

    # -- requests -----------------------------------------------------------------------------------------------

    def sent(self, replica: str, number: int, hashes: Sequence[int], tokens: int) -> None:
        at, seats = self._place[replica], self._seats
        missing = [block for block in hashes if not self._blocks.has(at, block) or (at, block) in self._coming]
        have, readable = self._match(hashes, tokens)
        computed = tokens - int(max(have[at], readable[at]))
        request = _Request(at, int(seats.reports[at]), computed, missing)
        self._requests[number] = request
        self._blocks.touch(hashes)
        for block in missing:
            self._blocks.add(at, DEVICE, block)
            self._coming[at, block] = number
        seats.sent[at] += computed
        seats.requests[at] += 1
        self._work, self._sends = self._work + computed, self._sends + 1

    def first(self, number: int) -> None:
        """Its prompt is computed."""
        if (request := self._requests.get(number)) is not None:
            if request.reports == self._seats.reports[request.at]:
                self._seats.sent[request.at] -= request.tokens
            request.tokens = 0

    def ended(self, number: int) -> None:
        """It is over, at any point; one that is not known is, too."""
        if (request := self._requests.get(number)) is None:
            return
        self.first(number)
        del self._requests[number]
        if request.reports == self._seats.reports[request.at]:
            self._seats.requests[request.at] -= 1
        for block in request.brought:
            if self._coming.get((request.at, block)) == number:
                del self._coming[request.at, block]
                self._blocks.remove(request.at, DEVICE, block)

    # -- ranking ------------------------------------------------------------------------------------------------

    def rank(self, hashes: Sequence[int], tokens: int, exclude: frozenset[str] = frozenset()) -> Ranking:
        """The best replicas for a prompt of so many tokens, best first, with the hashes of its blocks (`blocks_of`).
        Empty where no replica has published events, or none is left."""
        seats = self._seats
        candidates = seats.there.copy()
        candidates[[self._place[one] for one in exclude if one in self._place]] = False
        if not (candidates & seats.heard).any():
            return ()
        have, readable = self._match(hashes, tokens)
        each = seats.measured(seats.each)
        waiting = seats.expected(self._clock(), each)
        each = np.ones(len(waiting)) if each is None else each
        read = seats.measured(seats.read)
        restored = readable - have if read is None else np.where(read < each, readable - have, 0)
        read = each if read is None else read
        uncomputed = tokens - have - restored
        doubt, tie = self._doubt(have, hashes)
        wait, restore, compute = waiting * each, restored * read, uncomputed * each
        others = compute * self._price(waiting[seats.there].mean())
        seconds = np.maximum(wait, restore) + compute + others
        room = uncomputed + restored <= seats.free
        key = seconds + doubt * each
        key += np.where(room, 0.0, 1.0 + key.max())  # those without room come last
        best = _least(np.where(candidates, key, np.inf), seats.requests + tie, min(MOST, int(candidates.sum())))
        columns = (seconds, wait, restore, compute, others, have, restored, room)
        return tuple(
            Score(name, *(column[at].item() for column in columns))
            for at in best
            if (name := seats.names[at]) is not None
        )

    def _match(self, hashes: Sequence[int], tokens: int) -> tuple[_Counts, _Counts]:
        """Tokens of the prompt that each replica has on its device, and those with what it can read. The last one is
        always computed."""
        device, readable = self._blocks.match(hashes, len(self._seats.names))
        return np.minimum(device * self._size, tokens - 1), np.minimum(readable * self._size, tokens - 1)

    def _price(self, waiting: float) -> float:
        """Seconds that others wait for one second of prompts on the mean replica."""
        return waiting * self._sends / self._work if self._work else 0.0

    def _doubt(self, have: _Counts, hashes: Sequence[int]) -> tuple[_Floats, _Floats]:
        """Tokens by which the waiting of each replica is uncertain, 0 for one of those that have as much of the prompt;
        and numbers below 1 for the order of equal ones."""
        seats = self._seats
        missing = have // self._size
        keys = np.array([*hashes, self._random.getrandbits(64)], np.uint64)[missing]
        drawn = (_mixed(keys ^ seats.salt) >> np.uint64(11)) / 2.0**53
        doubt = -np.log1p(-drawn) * seats.surprise[seats.there].mean()
        least = np.full(len(hashes) + 1, np.inf)
        np.minimum.at(least, missing, np.where(seats.there, doubt, np.inf))
        return doubt - least[missing], drawn

    def check(self) -> None:
        self._blocks.check()
        for replica, at in self._place.items():
            assert self._seats.names[at] == replica and self._seats.there[at]
            mine = [one for one in self._requests.values() if one.at == at]
            now = [one for one in mine if one.reports == self._seats.reports[at]]
            assert self._seats.sent[at] == sum(one.tokens for one in now), "tokens that were sent are miscounted"
        assert int(self._seats.there.sum()) == len(self._place)
        assert all(self._seats.names[one.at] is not None for one in self._requests.values())
        for (at, block), number in self._coming.items():
            assert block in self._requests[number].brought and self._requests[number].at == at


def _least(first: _Floats, then: _Floats, most: int) -> list[int]:
    """The indices of the least numbers, in order; of equal ones by another key."""
    among = np.flatnonzero(first <= np.partition(first, most - 1)[most - 1])
    return among[np.lexsort((then[among], first[among]))][:most].tolist()


def _mixed(keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Every bit of a result depends on all of a key (splitmix64)."""
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return keys ^ (keys >> np.uint64(31))
