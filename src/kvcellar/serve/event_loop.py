"""event_loop: an event loop whose turns are short, however many connections have sent something.

asyncio calls what is ready on all sockets in one turn, and what another thread has asked for in the next one: tokens of
an engine would wait for a part of the body of every other client, several times until they are sent.

Always true:
  * a turn handles at most `SOCKETS` sockets; all that are ready are handled before any is asked for again.
"""

import asyncio
import selectors
from collections import deque
from typing import Any

SOCKETS = 8


class ShortTurns(selectors.DefaultSelector):
    """Returns some of the sockets that are ready, and the others from the next calls, unless they were unregistered
    meanwhile, or are not registered for that any more."""

    def __init__(self) -> None:
        super().__init__()
        self._rest: deque[tuple[selectors.SelectorKey, int]] = deque()

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        """Its descriptor may be that of another socket next."""
        key = super().unregister(fileobj)
        self._rest = deque(one for one in self._rest if one[0].fd != key.fd)
        return key

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = list[tuple[selectors.SelectorKey, int]]()
        while self._rest and len(found) < SOCKETS:
            key, events = self._rest.popleft()
            now = self.get_map()[key.fd]
            if wanted := events & now.events:
                found.append((now, wanted))
        if not found:
            self._rest.extend(super().select(timeout))
            found = [self._rest.popleft() for _ in range(min(SOCKETS, len(self._rest)))]
        return found


def new_event_loop() -> asyncio.AbstractEventLoop:
    return asyncio.SelectorEventLoop(ShortTurns())
