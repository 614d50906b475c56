"""store: responses that were kept, by id: to be read again, and to be continued by `previous_response_id`.

What is kept is text, in memory only. The K/V of a response are in the prefix tree like those of every request: a
request that continues it finds there what is left of them, and computes the rest.

Always true:
  * a response is found by requests with the API key that it was made with, and by no others;
  * at most `MOST` responses of `MOST_BYTES` together are kept; those that were not used for the longest time go first,
    of the key that has the most bytes.
"""

import threading
from collections import OrderedDict
from dataclasses import dataclass

from kvcellar.serve.api_errors import ApiError

MOST = 10_000
MOST_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class Kept:
    """`response`: the whole object. `messages`: the conversation up to its input, without instructions; `reply`: the
    message that it added; `input`: the items that its request had sent, as a list; all are JSON. `omitted`: how many of
    `messages` its prompt left out, as in `Dialogue`."""

    response: bytes
    messages: bytes
    reply: bytes
    omitted: int
    input: bytes = b""

    @property
    def size(self) -> int:
        return len(self.response) + len(self.messages) + len(self.reply) + len(self.input)


class ResponseStore:
    """Thread-safe."""

    def __init__(self, most: int = MOST, most_bytes: int = MOST_BYTES) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._kept: dict[str, OrderedDict[str, Kept]] = {}  # by owner and id; the last used ones last
        self._bytes: dict[str, int] = {}  # by owner
        self._lock = threading.Lock()

    def add(self, owner: str, id: str, kept: Kept) -> None:
        """One that is larger than all that may be kept is not."""
        if kept.size > self._most_bytes:
            return
        with self._lock:
            assert id not in self._kept.get(owner, {}), "ids are never used twice"
            self._kept.setdefault(owner, OrderedDict())[id] = kept
            self._bytes[owner] = self._bytes.get(owner, 0) + kept.size
            while sum(map(len, self._kept.values())) > self._most or sum(self._bytes.values()) > self._most_bytes:
                largest = max(self._bytes, key=lambda one: self._bytes[one])
                self._remove(largest, next(iter(self._kept[largest])))

    def get(self, owner: str, id: str, param: str | None = None) -> Kept:
        """Raises `ApiError` 404, about the field `param`."""
        with self._lock:
            kept = self._kept.get(owner, {}).get(id)
            if kept is None:
                raise _unknown(param)
            self._kept[owner].move_to_end(id)
            return kept

    def delete(self, owner: str, id: str) -> None:
        """Raises `ApiError` 404. Responses that continue it stay: they have the whole conversation."""
        with self._lock:
            if id not in self._kept.get(owner, {}):
                raise _unknown(None)
            self._remove(owner, id)

    def _remove(self, owner: str, id: str) -> None:
        self._bytes[owner] -= self._kept[owner].pop(id).size
        if not self._kept[owner]:
            del self._kept[owner], self._bytes[owner]

    def check(self) -> None:
        """Assert what is always true."""
        with self._lock:
            assert sum(map(len, self._kept.values())) <= self._most
            assert sum(self._bytes.values()) <= self._most_bytes
            assert self._bytes == {owner: sum(k.size for k in kept.values()) for owner, kept in self._kept.items()}
            assert all(self._kept.values())


def _unknown(param: str | None) -> ApiError:
    message = "there is no such response: it was not stored, or was deleted, or the server was started again since"
    if param is not None:
        message = f"{param}: {message}"
    return ApiError(404, message, param, "previous_response_not_found" if param else "response_not_found")
