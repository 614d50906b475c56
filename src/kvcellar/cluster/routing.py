"""routing: which replica of an engine a request goes to: the one where its first token costs least, in seconds.

    router.events(replica, events)        # what it has published (`kv_events`)
    router.load(replica, load)            # how it is doing
    best = router.rank(hashes, tokens)    # best first; empty: no opinion
    router.sent(best[0].replica, number, hashes, tokens)

What a replica costs is `max(wait, restore) + compute + others`, all of it measured:

  * wait: until the prompt tokens are computed that were there before, and until there are a sequence and cells, which
    those in decode leave one after the other. The speed of prompts is that of all time in which some wait, so what
    streams take of it is in it;
  * restore: of tokens that a tier has and the device has not, where reading is faster than computing. Waiting requests
    are read ahead, so this passes while the request waits;
  * compute: of the tokens that are left;
  * others: a second of the device is worth one of a user, so that nothing is computed a second time to save less than
    it takes. And a second of prompts makes each request wait a second longer that comes before the queue is empty
    again, which is `max(wait, restore) + compute` later. As many come in a second to a replica as it has requests over
    the seconds that a stream takes (Little's law), at least those that come to the mean one. So the busier a fleet is,
    the less it computes, and the busier a replica is, the sooner another one gets prompts that begin like its own.

Streams are no part of it: the scheduler gives them their tokens in time, whatever prompts wait.

What was sent and is not there yet counts as waiting and as being there. So requests that begin alike go together until
waiting for each other costs more than computing their beginning a second time, and then a second replica has it.

Several gateways have each a router, which learns of the requests of others by the next report only. How much more
waits than was expected is measured at each report. Of replicas that have as much of a prompt as each other, the wait
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
from typing import Any, TypeAlias

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kvcellar.errors import BadRequest
from kvcellar.events import Score
from kvcellar.memory.prefix.kv_events import AllBlocksCleared, BlockStored, KvEvent

DEVICE, REMOTE = 0, 3
MEDIA = ("GPU", "CPU", "DISK", "REMOTE")  # those between device and remote are read by their own replica only
MOST = 8  # replicas of a ranking
FADING = 0.99  # of the seconds of a request: about the last hundred count
_Floats: TypeAlias = NDArray[np.float64]
_Counts: TypeAlias = NDArray[np.int64]


class Load(Struct, frozen=True):
    """How a replica is doing. Speeds are None before anything was measured."""

    waiting_tokens: int  # of prompts that it has taken in: not computed, and not in its memory
    running: int  # completions in decode
    prefill_speed: float | None  # prompt tokens per second, of all time in which some wait
    read_speed: float | None  # tokens per second that are restored from the shared store
    cells_free: int  # that no running sequence uses
    cells: int
    waiting: int  # completions that are not in decode yet
    sequences: int  # the most completions that run at once


Ranking: TypeAlias = tuple[Score, ...]


class _Request(Struct):
    """A request that was sent."""

    at: int  # the place of its replica
    reports: int  # how many loads of the replica had come before
    tokens: int  # to be computed
    brought: list[int]  # blocks that were not there
    began: float | None = None  # when its prompt was computed


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

    def stored(self, block: int) -> bool:
        """In the shared store."""
        return bool(self._bits.get(block, _NOWHERE)[REMOTE])

    def count(self, at: int) -> int:
        """Of a replica, in all media."""
        return len(self._held[at])

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
            assert any(bits), "a block is known that no replica has"
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
                counts[list(_places(alive ^ left))] = count
            if not left:
                return counts
            alive = left
        count += 1
    counts[list(_places(alive))] = count
    return counts


def _places(bits: int) -> Iterator[int]:
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low


_COLUMNS = {  # of each place
    "there": bool,
    "heard": bool,  # its events
    "salt": np.uint64,
    "reports": np.int64,
    "reported": np.float64,  # when the last one came,
    "waiting": np.float64,  # the prompt tokens that waited then,
    "sent": np.float64,  # and those that were sent since
    "requests": np.float64,  # in decode and before it, with those that were sent since
    "running": np.float64,
    "sequences": np.float64,
    "free": np.float64,  # cells
    "used": np.float64,
    "each": np.float64,  # seconds of a prompt token; nan: not measured
    "read": np.float64,  # and of a restored one
    "surprise": np.float64,  # tokens that waited at the last report and were not expected
}


class Router:
    """Ranks the replicas of one model. Not for several threads at once. Methods raise `KeyError` for a replica that has
    not joined."""

    def __init__(self, block: int, *, most_blocks: int, clock: Callable[[], float], seed: int = 0) -> None:
        """`block`: tokens of a block."""
        self._size, self._clock, self._random = block, clock, Random(seed)
        self._blocks, self._place = _Blocks(most_blocks), dict[str, int]()
        self._names: list[str | None] = []  # by place
        self._seats: NDArray[Any] = np.zeros(0, [*_COLUMNS.items()])
        self._requests: dict[int, _Request] = {}
        self._coming: dict[tuple[int, int], int] = {}  # the last request that brings a block to a place
        self._decoding, self._decoded = 0.0, 0.0  # seconds of requests in decode, and how many: decayed

    def join(self, replica: str) -> None:
        if replica in self._place:
            raise BadRequest(f"{replica} has joined already")
        if None not in self._names:
            more = max(8, len(self._names))
            self._names += [None] * more
            self._seats = np.concatenate([self._seats, np.zeros(more, self._seats.dtype)])
        self._place[replica] = at = self._names.index(None)
        self._names[at], self._seats[at] = replica, 0
        self._blocks.join(at)
        salt = blake2b(replica.encode(), digest_size=8).digest()
        seat = {"there": True, "salt": int.from_bytes(salt, "little"), "sequences": np.inf, "free": np.inf}
        for name, value in {**seat, "each": np.nan, "read": np.nan}.items():
            self._seats[name][at] = value

    def leave(self, replica: str) -> None:
        at = self._place[replica]
        for number in [number for number, one in self._requests.items() if one.at == at]:
            self.ended(number)
        del self._place[replica]
        self._blocks.leave(at)
        self._names[at], self._seats[at] = None, 0

    def blocks(self, replica: str) -> int:
        """That it is known to have."""
        return self._blocks.count(self._place[replica])

    def events(self, replica: str, events: Sequence[KvEvent]) -> None:
        """Raises `BadRequest`, and changes nothing, where one has blocks of another size."""
        at = self._place[replica]
        for event in events:
            if isinstance(event, BlockStored) and event.size != self._size:
                raise BadRequest(f"a KV event has blocks of {event.size} tokens, not {self._size}")
        self._seats["heard"][at] = True
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self._blocks.clear(at)
            elif event.medium in MEDIA:
                change = self._blocks.add if isinstance(event, BlockStored) else self._blocks.remove
                medium = MEDIA.index(event.medium)
                for block in event.hashes:
                    change(at, medium, block)
                    if medium == DEVICE:
                        self._coming.pop((at, block), None)

    def load(self, replica: str, load: Load) -> None:
        at, now = self._place[replica], self._clock()
        seat = self._seats[at]
        if seat["reports"]:
            done = 0.0 if np.isnan(seat["each"]) else (now - seat["reported"]) / seat["each"]
            expected = max(0.0, seat["waiting"] - done) + seat["sent"]
            seat["surprise"] = max(0.0, load.waiting_tokens - expected)
        seat["reports"] += 1
        seat["reported"], seat["waiting"], seat["sent"] = now, load.waiting_tokens, 0
        seat["requests"], seat["running"] = load.running + load.waiting, load.running
        seat["sequences"], seat["free"], seat["used"] = load.sequences, load.cells_free, load.cells - load.cells_free
        seat["each"] = np.nan if load.prefill_speed is None else 1 / load.prefill_speed
        seat["read"] = np.nan if load.read_speed is None else 1 / load.read_speed

    # -- requests -----------------------------------------------------------------------------------------------

    def sent(self, replica: str, number: int, hashes: Sequence[int], tokens: int) -> None:
        if number in self._requests:
            raise BadRequest(f"request {number} was sent already, and has not ended")
        at = self._place[replica]
        have, restored = self._found(hashes, tokens, self._measured("each"), self._measured("read"))
        computed = tokens - int(have[at] + restored[at])
        missing = [block for block in hashes if not self._blocks.has(at, block) or (at, block) in self._coming]
        self._requests[number] = _Request(at, int(self._seats["reports"][at]), computed, missing)
        self._blocks.touch(hashes)
        for block in missing:
            self._blocks.add(at, DEVICE, block)
            self._coming[at, block] = number
        self._seats["sent"][at] += computed
        self._seats["requests"][at] += 1

    def first(self, number: int) -> None:
        """Its prompt is computed."""
        request = self._requests.get(number)
        if request is not None and request.began is None:
            request.began = self._clock()
            if request.reports == self._seats["reports"][request.at]:
                self._seats["sent"][request.at] -= request.tokens

    def ended(self, number: int, *, decoded: bool = True) -> None:
        """It is over, at any point; one that is not known is, too. `decoded`: not if it goes on elsewhere."""
        if (request := self._requests.get(number)) is None:
            return
        if request.began is not None and decoded:
            self._decoding = FADING * self._decoding + self._clock() - request.began
            self._decoded = FADING * self._decoded + 1
        self.first(number)
        del self._requests[number]
        if request.reports == self._seats["reports"][request.at]:
            self._seats["requests"][request.at] -= 1
        for block in request.brought:
            if self._coming.get((request.at, block)) == number:
                del self._coming[request.at, block]
                self._blocks.remove(request.at, DEVICE, block)

    def stored(self, hashes: Sequence[int]) -> bool:
        """Whether the shared store has all these blocks. The last ones are stored last."""
        return all(map(self._blocks.stored, reversed(hashes)))

    # -- ranking ------------------------------------------------------------------------------------------------

    def rank(self, hashes: Sequence[int], tokens: int, exclude: frozenset[str] = frozenset()) -> Ranking:
        """The best replicas for a prompt of so many tokens, best first, with the hashes of its blocks (`blocks_of`).
        Empty where no replica has published events, or none is left. Of equal ones those come first that have fewer
        requests, then those that have fewer blocks, by powers of two, and then those that the hash draws."""
        seats = self._seats
        candidates = seats["there"].copy()
        candidates[[self._place[one] for one in exclude if one in self._place]] = False
        if not (candidates & seats["heard"]).any():
            return ()
        each, read = self._measured("each"), self._measured("read")
        have, restored = self._found(hashes, tokens, each, read)
        waiting, uncomputed = self._waiting(each), tokens - have - restored
        room = 0.0 if each is None else self._room(waiting + uncomputed + restored)
        rate, measured = 0.0 if each is None else self._rates(), each is not None
        each = np.ones(len(seats)) if each is None else each
        wait, compute = np.maximum(waiting * each, room), uncomputed * each
        restore = restored * (each if read is None else read)
        start = np.maximum(wait, restore)
        others = compute * (1 + rate * (start + compute))
        seconds = start + compute + others
        doubt, tie = self._doubt(have // self._size, hashes, candidates)
        key = np.where(candidates, seconds + doubt * each, np.inf)
        most = min(MOST, int(candidates.sum()))
        among = np.flatnonzero(key <= np.partition(key, most - 1)[most - 1])
        fill = np.array([self._blocks.count(at).bit_length() for at in among.tolist()], np.int64)
        order = np.lexsort((tie[among], fill, seats["requests"][among], key[among]))
        best: list[int] = among[order][:most].tolist()
        columns = (seconds, wait, restore, compute, others, have, restored, seats["running"].astype(np.int64))
        return tuple(
            Score(name, *(column[at].item() for column in columns), measured=measured)
            for at in best
            if (name := self._names[at]) is not None
        )

    def _found(
        self, hashes: Sequence[int], tokens: int, each: _Floats | None, read: _Floats | None
    ) -> tuple[_Counts, _Counts]:
        """Tokens of the prompt that each replica has, and those that it would read. The last one is computed."""
        device, readable = self._blocks.match(hashes, len(self._seats))
        have, end = (np.minimum(count * self._size, max(0, tokens - 1)) for count in (device, readable))
        return have, end - have if each is None or read is None else np.where(read < each, end - have, 0)

    def _measured(self, column: str) -> _Floats | None:
        """Seconds of a token. A replica that has not measured is taken for the mean one; None: none has measured."""
        seconds = self._seats[column]
        known = self._seats["there"] & ~np.isnan(seconds)
        return np.where(known, seconds, seconds[known].mean()) if known.any() else None

    def _waiting(self, each: _Floats | None) -> _Floats:
        """Prompt tokens that wait."""
        seats = self._seats
        done = 0.0 if each is None else (self._clock() - seats["reported"]) / each
        return np.maximum(0.0, seats["waiting"] - done) + seats["sent"]

    def _room(self, cells: _Floats) -> _Floats:
        """Seconds until there are a sequence and so many cells: those in decode end one after the other, after the
        seconds that one takes."""
        seats = self._seats
        mean = self._decoding / max(1.0, self._decoded)
        sequence = np.maximum(0.0, seats["requests"] + 1 - seats["sequences"]) / np.maximum(1.0, seats["running"])
        return mean * np.maximum(sequence, np.maximum(0.0, cells - seats["free"]) / np.maximum(1.0, seats["used"]))

    def _rates(self) -> _Floats:
        """Requests that come in a second to each replica, which are no fewer than to the mean one."""
        seats = self._seats
        requests = np.maximum(seats["requests"], seats["running"][seats["there"]].mean())
        return requests * (self._decoded / self._decoding if self._decoding else 0.0)

    def _doubt(self, missing: _Counts, hashes: Sequence[int], among: NDArray[np.bool_]) -> tuple[_Floats, _Floats]:
        """Tokens by which the wait of each replica is uncertain, 0 for one of those that miss the same block first; and
        numbers below 1 for the order of equal ones."""
        seats = self._seats
        keys = np.array([*hashes, self._random.getrandbits(64)], np.uint64)[missing]
        drawn = (_mixed(keys ^ seats["salt"]) >> np.uint64(11)) / 2.0**53
        doubt = -np.log1p(-drawn) * seats["surprise"][seats["there"]].mean()
        least = np.full(len(hashes) + 1, np.inf)
        np.minimum.at(least, missing[among], doubt[among])
        return np.where(among, doubt - least[missing], 0.0), drawn

    def check(self) -> None:
        self._blocks.check()
        places = {name: at for at, name in enumerate(self._names) if name is not None}
        assert places == self._place and set(self._place.values()) == set(np.flatnonzero(self._seats["there"]).tolist())
        for at in self._place.values():
            late = [one for one in self._requests.values() if (one.at, one.reports) == (at, self._seats["reports"][at])]
            assert self._seats["sent"][at] == sum(one.tokens for one in late if one.began is None), (
                "tokens are miscounted"
            )
        assert {one.at for one in self._requests.values()} <= set(self._place.values())
        for (at, block), number in self._coming.items():
            assert block in self._requests[number].brought and self._requests[number].at == at


def _mixed(keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Every bit of a result depends on all of a key (splitmix64)."""
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return keys ^ (keys >> np.uint64(31))
