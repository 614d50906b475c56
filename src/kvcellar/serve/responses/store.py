"""store: responses that were kept, by id: to be read again, and to be continued by `previous_response_id`.

What is kept is text, in memory; with a store, it is in an archive (`archived`). The K/V of a response are in the prefix
tree like those of every request: a request that continues it finds there what is left of them, and computes the rest. A
response has the messages of its own turn; those before it are in the responses that it continues, once for all that
continue the same one.

Always true:
  * a response is found by requests with the API key that it was made with, and by no others, for `seconds` after it
    was used last;
  * turns of a response that was deleted or dropped stay as long as a response is kept that continues it, and count;
  * one key has at most `most_bytes_of_key`, and all together at most `most_bytes` in `most` responses. What a key adds
    beyond its own part drops its own responses, those first that were not used for the longest time; where the limits
    of all are reached, it is the key that has the most bytes.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from kvcellar.frontend.transcript import Turn
from kvcellar.serve.http.api_errors import ApiError

MOST = 10_000
MOST_BYTES = 256 * 2**20
MOST_BYTES_OF_KEY = 64 * 2**20
SECONDS = 30 * 86400.0


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """`response`: the whole object as JSON. `input`: the items of its input. They go when it is deleted or dropped,
    whatever continues its `turn`."""

    response: bytes
    input: bytes
    turn: Turn

    @property
    def own(self) -> int:
        """Bytes without its turn."""
        return len(self.response) + len(self.input)


@dataclass(slots=True)
class _Owner:
    """`kept`: when each was used, by id, the last used ones last. `holds`: how many kept responses and turns that are
    held need a turn, of those with any."""

    kept: OrderedDict[str, tuple[Kept, float]] = field(default_factory=OrderedDict[str, tuple[Kept, float]])
    holds: dict[Turn, int] = field(default_factory=dict[Turn, int])
    bytes: int = 0

    def add(self, id: str, kept: Kept, now: float) -> None:
        self.kept[id] = kept, now
        self.bytes += kept.own
        for one in kept.turn.line():
            self.holds[one] = self.holds.get(one, 0) + 1
            if self.holds[one] > 1:
                return
            self.bytes += len(one.messages)

    def remove(self, id: str) -> None:
        kept, _ = self.kept.pop(id)
        self.bytes -= kept.own
        for one in kept.turn.line():
            self.holds[one] -= 1
            if self.holds[one]:
                return
            del self.holds[one]
            self.bytes -= len(one.messages)

    def check(self) -> None:
        held = {one: 0 for kept, _ in self.kept.values() for one in kept.turn.line()}
        for kept, _ in self.kept.values():
            held[kept.turn] += 1
        for one in held:
            if one.parent is not None:
                held[one.parent] += 1
        assert self.holds == held
        assert all(one.total == sum(len(each.messages) for each in one.line()) for one in held)
        assert self.bytes == sum(kept.own for kept, _ in self.kept.values()) + sum(len(one.messages) for one in held)


class ResponseStore:
    """Thread-safe."""

    def __init__(
        self,
        most: int = MOST,
        most_bytes: int = MOST_BYTES,
        *,
        most_bytes_of_key: int = MOST_BYTES_OF_KEY,
        seconds: float = SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._most_of_key, self._seconds, self._clock = min(most_bytes, most_bytes_of_key), seconds, clock
        self._owners: dict[str, _Owner] = {}
        self._lock = threading.Lock()

    def add(self, owner: str, id: str, kept: Kept) -> None:
        """One that is larger than all that a key may keep is not kept, with what it continues. Runs on the event loop:
        it takes as long for a conversation of many turns as for one of few, where the turn before it is kept."""
        if kept.own + kept.turn.total > self._most_of_key:
            return
        with self._lock:
            self._expire()
            mine = self._owners.setdefault(owner, _Owner())
            assert id not in mine.kept, "ids are never used twice"
            mine.add(id, kept, self._clock())
            while mine.bytes > self._most_of_key:
                self._drop(owner)
            while sum(len(one.kept) for one in self._owners.values()) > self._most or self._bytes > self._most_bytes:
                self._drop(max(self._owners, key=lambda one: self._owners[one].bytes))

    def get(self, owner: str, id: str, param: str | None = None) -> Kept:
        """Raises `ApiError` 404, about the field `param`."""
        with self._lock:
            self._expire()
            mine = self._owners.get(owner)
            if mine is None or id not in mine.kept:
                raise unknown(param)
            kept, _ = mine.kept[id]
            mine.kept[id] = kept, self._clock()
            mine.kept.move_to_end(id)
            return kept

    def has(self, owner: str, id: str) -> bool:
        """Whether it is kept; that is no use of it."""
        with self._lock:
            self._expire()
            return owner in self._owners and id in self._owners[owner].kept

    def delete(self, owner: str, id: str) -> None:
        """Raises `ApiError` 404. Responses that continue it stay, with its turn."""
        with self._lock:
            self._expire()
            if owner not in self._owners or id not in self._owners[owner].kept:
                raise unknown(None)
            self._remove(owner, id)

    @property
    def _bytes(self) -> int:
        return sum(one.bytes for one in self._owners.values())

    def _expire(self) -> None:
        before = self._clock() - self._seconds
        for owner, mine in [*self._owners.items()]:
            while mine.kept and next(iter(mine.kept.values()))[1] < before:
                self._drop(owner)

    def _drop(self, owner: str) -> None:
        """Remove what was not used for the longest time."""
        self._remove(owner, next(iter(self._owners[owner].kept)))

    def _remove(self, owner: str, id: str) -> None:
        self._owners[owner].remove(id)
        if not self._owners[owner].kept:
            del self._owners[owner]

    def check(self) -> None:
        """Assert what is always true."""
        with self._lock:
            assert sum(len(one.kept) for one in self._owners.values()) <= self._most
            assert self._bytes <= self._most_bytes
            for mine in self._owners.values():
                assert mine.kept
                assert mine.bytes <= self._most_of_key
                mine.check()


def unknown(param: str | None) -> ApiError:
    message = "there is no such response: it was not stored, or was deleted or dropped since"
    if param is not None:
        message = f"{param}: {message}"
    return ApiError(404, message, param, "previous_response_not_found" if param else "response_not_found")
