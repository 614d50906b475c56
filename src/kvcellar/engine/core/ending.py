"""ending: the end of an engine, in turns, so that other engines on its thread go on.

What is not stored yet is read out of memory in bounded parts on the device's thread; there, too, memory is freed. Tiers
and the publisher of KV events are closed by the caller of `Engine.close`, which may wait for them; without one, on the
device's thread.
"""

import logging
import threading

from kvcellar.engine.core.sequence_manager import SequenceManager
from kvcellar.memory.prefix.kv_events import KvEvents
from kvcellar.memory.store import Store

log = logging.getLogger("kvcellar.engine")


class Ending:
    """Made by the last call on the engine's memory. `turn` is called on the device's thread until it returns None."""

    def __init__(self, manager: SequenceManager) -> None:
        self._manager = manager
        self._lock = threading.Lock()
        self._waited_for = False  # whether a thread will call `close`
        self._stopped: list[Store | KvEvents] = []  # what is open still

    def turn(self) -> float | None:
        """A part of the work; the seconds until there is more, or None at the end. Raises nothing."""
        drafts = self._manager.drafting.memory
        stores = [one.store for one in (self._manager, drafts) if one is not None and one.store is not None]
        try:
            pauses = [pause for store in stores if (pause := store.flush()) is not None]
            if pauses:
                return min(pauses)
            for store in stores:
                store.stop()
            self._manager.clear()
            self._manager.drafting.shut_down()
        except Exception:
            log.exception("the engine has ended, and its memory could not be freed")
        with self._lock:
            events = [] if self._manager.events is None else [self._manager.events]
            self._stopped, waited_for = [*stores, *events], self._waited_for
        if not waited_for:
            self.close()
        return None

    def wait(self) -> None:
        """The calling thread will call `close` when the last turn was taken."""
        with self._lock:
            self._waited_for = True

    def close(self) -> None:
        """Close the tiers and the KV events, if that was not done. Blocks."""
        with self._lock:
            stopped, self._stopped = self._stopped, []
        for one in stopped:
            try:
                one.close()
            except Exception:
                log.exception("what an engine has stored or published could not be ended")
