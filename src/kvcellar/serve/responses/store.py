"""store: responses that were kept, by id: to be read again, and to be continued by `previous_response_id`. Any
server that has the archive does so, also after a restart, unless the archive is in memory.

A response is two documents: its object with its input, and its turn, which names the turn that it continues. A turn is
written before the response, and read again where it is not at hand. The K/V of a response are in the prefix tree like
those of every request: a request that continues it finds there what is left of them, and computes the rest.

Always true:
  * a response that was added is found, with all turns that it continues, until it is deleted or forgotten: what is used
    has a lower stamp than its turn, which has a lower one than the turn that it continues, so it is forgotten first;
  * a turn of a deleted response stays while one continues it, and is deleted with the last one of those;
  * a response is found with the key that it was made with, and with no other.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec

from kvcellar.frontend.documents import Documents
from kvcellar.frontend.transcript import Turn
from kvcellar.memory.tiers.archive import SLACK, Archive, Changed, Full
from kvcellar.memory.tiers.codec import Damaged, Foreign, TooLarge
from kvcellar.places import NoPlace
from kvcellar.serve.http.api_errors import ApiError
from kvcellar.wire import prepared

log = logging.getLogger("kvcellar.serve")

OVERHEAD = 512  # bytes of a document beside what is kept
MEMORY_BYTES = 256 * 2**20  # of all responses, where they are in memory
RECENT, RECENT_BYTES = 256, 64 * 2**20  # turns that are in memory, and their texts with those that they continue
Whole = Annotated[int, msgspec.Meta(ge=0)]


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


@dataclass(frozen=True, slots=True)
class _Head:
    """Of the turn of the response `id`, whose body has its messages. Or, with `response`, of the response, whose body
    has so many bytes of its object, and then its input."""

    owner: str
    id: str
    parent: str | None = None
    omitted: Whole = 0
    response: Whole | None = None

    @property
    def name(self) -> str:
        return _turn(self.id) if self.response is None else _response(self.id)


_HEAD = prepared(_Head)


def _response(id: str) -> str:
    return f"response {id}"


def _turn(id: str) -> str:
    return f"turn {id}"


def open_responses(documents: Documents, *, bytes_of_key: int, seconds: float) -> "ResponseStore":
    """In the store, if there is one, else in memory."""
    documents = documents if documents.durable else replace(documents, cap=MEMORY_BYTES)
    own = min(bytes_of_key, int(documents.share * documents.cap))
    return ResponseStore(documents.archive("responses", forgets=documents.forgets(seconds, own)), own - own // SLACK)


class ResponseStore:
    """For any thread but the event loop. All methods raise `ApiError` 503 where the archive fails."""

    def __init__(self, archive: Archive, most: int) -> None:
        """`most` bytes of a response and all that it continues."""
        self._archive, self._most = archive, most
        self._recent: OrderedDict[tuple[str, str], Turn] = OrderedDict()  # by owner and response, the last used last
        self._lock = threading.Lock()

    def add(self, owner: str, id: str, kept: Kept) -> None:
        """When this returns, it is durable. One that is larger than all that a key may keep is not kept, with what it
        continues."""
        line = [*kept.turn.line()]
        if kept.own + kept.turn.total + OVERHEAD * (len(line) + 1) > self._most:
            return
        with _failing("cannot be kept"):
            used = self._archive.stamp
            self._put_turn(owner, kept.turn, used + 1)
            self._renew(owner, line[1:], used + 2)
            head = _Head(owner, id, response=len(kept.response))
            self._put(head, kept.response + kept.input, used)
        self._remember(owner, kept.turn)

    def get(self, owner: str, id: str, param: str | None = None) -> Kept:
        """Raises `ApiError` 404, about the field `param`."""
        with _failing("cannot be read"):
            try:
                if (found := self._read(owner, id, _response(id))) is None or (turn := self._line(owner, id)) is None:
                    raise unknown(param)
            except (Damaged, Foreign) as error:
                log.warning("a response that was kept cannot be read: %s", error)
                raise unknown(param) from error
            used = self._archive.stamp
            self._renew(owner, turn.line(), used + 1)
            self._archive.touch(owner, [_response(id)], used)
        self._remember(owner, turn)
        head, body = found
        return Kept(body[: head.response], body[head.response :], turn)

    def delete(self, owner: str, id: str) -> None:
        """Raises `ApiError` 404. Responses that continue it stay, with its turn."""
        with _failing("cannot be deleted"):
            if not self._archive.delete(owner, _response(id)):
                raise unknown(None)
            self._collect(owner, id)

    # -- turns --------------------------------------------------------------------------------------------------

    def _renew(self, owner: str, line: Iterable[Turn], used: int) -> None:
        """Turns are used, each later than the one that continues it. One that was deleted meanwhile is stored again."""
        turns = [*line]
        there = self._archive.touch(owner, [_turn(turn.id) for turn in turns], used)
        for at, (turn, found) in enumerate(zip(turns, there, strict=True)):
            if not found:
                self._put_turn(owner, turn, used + at)

    def _put_turn(self, owner: str, turn: Turn, used: int) -> None:
        parent = None if turn.parent is None else turn.parent.id
        self._put(_Head(owner, turn.id, parent, turn.omitted), turn.messages, used)

    def _put(self, head: _Head, body: bytes, used: int) -> None:
        self._archive.put(head.owner, head.name, msgspec.json.encode(head), body, used=used)

    def _line(self, owner: str, id: str) -> Turn | None:
        """The turn of a response, with all that it continues. None if one of them is not there. Raises `Damaged` and
        `Foreign`."""
        read, left, at, known = list[tuple[_Head, bytes]](), self._most, id, None
        while at is not None:
            with self._lock:
                if (known := self._recent.get((owner, at))) is not None:
                    break
            if (found := self._read(owner, at, _turn(at))) is None:
                return None
            read.append(found)
            left, at = left - OVERHEAD - len(found[1]), found[0].parent
            if left < 0:
                raise Damaged("it continues more than may be kept")
        turn = known
        for head, body in reversed(read):
            turn = Turn(turn, body, head.omitted, id=head.id)
        return turn

    def _read(self, owner: str, id: str, name: str) -> tuple[_Head, bytes] | None:
        """Raises `Damaged` and `Foreign`."""
        if (found := self._archive.get(owner, name)) is None:
            return None
        head = _head_of(found.head)
        if (head.owner, head.id, head.name) != (owner, id, name):
            raise Damaged("it is another document")
        listed = b"[%s]" % found.body if head.response is None else found.body[head.response :]
        try:
            items = msgspec.json.decode(listed, type=list[dict[str, Any]])
        except (ValueError, RecursionError) as error:
            raise Damaged(f"its content cannot be read: {error}") from error
        if head.response is None and not all(isinstance(item.get("role"), str) for item in items):
            raise Damaged("its messages are none of a chat")
        return head, found.body

    def _remember(self, owner: str, turn: Turn) -> None:
        """So that it need not be read again."""
        with self._lock:
            self._recent[owner, turn.id] = turn
            self._recent.move_to_end((owner, turn.id))
            while len(self._recent) > RECENT or sum(one.total for one in self._recent.values()) > RECENT_BYTES:
                self._recent.popitem(last=False)

    def _collect(self, owner: str, id: str) -> None:
        """Delete the turn of a deleted response, and those that it continues, as far as no other one needs them. What
        is used meanwhile has another stamp, and stays."""
        with self._lock:
            self._recent.pop((owner, id), None)
        stamps = self._archive.stamps(owner)
        kept, turns = set[str](), dict[str, str | None]()
        for content in self._archive.heads(owner):
            with suppress(Damaged, Foreign):  # what cannot be read is not continued
                if isinstance(content, Exception):
                    raise content
                head = _head_of(content)
                if head.response is None:
                    turns[head.id] = head.parent
                else:
                    kept.add(head.id)
        at: str | None = id
        while at in turns and at not in kept and at not in turns.values():
            if not self._archive.delete(owner, _turn(at), unused_since=stamps):
                return
            at = turns.pop(at)

    def check(self) -> None:
        """Assert what is always true of what is in memory."""
        with self._lock:
            assert len(self._recent) <= RECENT
            assert all(turn.id == id for (_, id), turn in self._recent.items())
            assert all(one.id for turn in self._recent.values() for one in turn.line())


def unknown(param: str | None) -> ApiError:
    message = "there is no such response: it was not stored, or was deleted or dropped since"
    if param is not None:
        message = f"{param}: {message}"
    return ApiError(404, message, param, "previous_response_not_found" if param else "response_not_found")


def _head_of(content: bytes) -> _Head:
    """Raises `Damaged`."""
    try:
        return msgspec.json.decode(content, type=_HEAD)
    except ValueError as error:
        raise Damaged(f"its head cannot be read: {error}") from error


@contextmanager
def _failing(what: str) -> Iterator[None]:
    """Raises `ApiError` 503 for what the archive raises, whose reason is only in the log: it may name places."""
    try:
        yield
    except (OSError, NoPlace, Full, TooLarge, Changed) as error:
        log.warning("a response %s: %s", what, error)
        message = f"the response {what}: the store of the server has failed; try again later"
        raise ApiError(503, message, code="store_failed", headers={"retry-after": "1"}) from error
