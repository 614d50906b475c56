"""room: which connections are open, and which one is closed when there are too many.

A connection is admitted once a request on it had the key that its path needs; until then it is a stranger. A client
without a key can open any number of connections and send nothing on them, so strangers are the first to be closed.

Always true, at a limit of `n` connections:
  * at most `n` are open, and one with a running request of a key is never closed for another;
  * a connection is refused only when all others are admitted and have a running request;
  * strangers never take the place of admitted connections beyond `n // STRANGERS` places, not even of idle ones; and up
    to as many places the strangers keep beside idle ones, so that a new client has the time to send its key;
  * of the strangers, one of the address that has most of them is closed, the oldest: a client is not closed for what
    comes from another address.
"""

import ipaddress
from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar

STRANGERS = 8


class Open(Hashable, Protocol):
    @property
    def idle(self) -> bool:
        """Whether no request is running."""
        ...


C = TypeVar("C", bound=Open)


class Room(Generic[C]):
    """All methods are called on the event loop."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._of: dict[C, str] = {}  # the address of each stranger
        self._strangers: dict[str, dict[C, None]] = {}  # by address; the oldest first
        self._admitted: dict[C, None] = {}  # the one whose last request came first is first

    def enter(self, connection: C, address: str) -> C | None:
        """A connection is open. Returns the one that has to be closed for it, which may be itself, and which has left
        then; None if there is room."""
        network = _network(address)
        self._of[connection] = network
        self._strangers.setdefault(network, {})[connection] = None
        if len(self._of) + len(self._admitted) <= self._limit:
            return None
        closed = self._closed_for(connection)
        self.leave(closed)
        return closed

    def admit(self, connection: C) -> None:
        """It has sent a request with a valid key. One that has left stays away."""
        if connection in self._of or connection in self._admitted:
            self.leave(connection)
            self._admitted[connection] = None

    def leave(self, connection: C) -> None:
        """It is closed, or is being closed."""
        self._admitted.pop(connection, None)
        if (network := self._of.pop(connection, None)) is not None:
            del self._strangers[network][connection]
            if not self._strangers[network]:
                del self._strangers[network]

    def _closed_for(self, new: C) -> C:
        if len(self._of) <= max(1, self._limit // STRANGERS):
            idle = next((one for one in self._admitted if one.idle), None)
            if idle is not None:
                return idle
        if len(self._of) == 1:
            return new
        return next(iter(max(self._strangers.values(), key=len)))

    def check(self) -> None:
        assert len(self._of) + len(self._admitted) <= self._limit
        assert not self._of.keys() & self._admitted.keys()
        assert self._of == {one: network for network, found in self._strangers.items() for one in found}
        assert all(self._strangers.values())


def _network(address: str) -> str:
    """What one client can choose addresses from: its address, or the first half of it in IPv6."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        return str(parsed.ipv4_mapped or ipaddress.IPv6Network((parsed, 64), strict=False))
    return str(parsed)
