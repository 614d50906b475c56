"""shared_replies: the tokens of replies, in an archive that all front ends of a model have, also after a restart.

Nothing depends on them: what cannot be read in time is tokenized again, and what cannot be written is left out.

Always true:
  * a request waits for the archive for at most `SECONDS`, once, and not at all while it fails;
  * at most `WAITING` replies wait to be written, by one thread; those that come meanwhile are left out.
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from kvcellar.frontend.documents import Documents
from kvcellar.memory.tiers.archive import Archive, Changed, Full
from kvcellar.memory.tiers.bounded import Bounded, RemoteFailed
from kvcellar.memory.tiers.codec import Damaged, Foreign, TooLarge
from kvcellar.memory.tiers.tier import Breaker
from kvcellar.places import NoPlace
from kvcellar.text.replay import Answered
from kvcellar.text.turns import REPLIES

log = logging.getLogger("kvcellar.engine")

SECONDS = 0.25  # that a request waits
LASTS = 7 * 86400.0  # seconds
WAITING = 256
TRIES = 8  # to write beside other front ends


def open_replies(documents: Documents, tokenizer: str | None) -> "ArchivedReplies | None":
    """For models whose tokenizer files have this digest. None where nothing outlives this front end."""
    if not documents.durable or tokenizer is None:
        return None
    forgets = documents.forgets(LASTS, int(documents.share * documents.cap))
    return ArchivedReplies(documents.archive("replies", forgets=forgets), tokenizer)


class ArchivedReplies:
    """Thread-safe."""

    def __init__(self, archive: Archive, tokenizer: str, *, seconds: float = SECONDS) -> None:
        self._archive, self._tokenizer = archive, tokenizer
        self._breaker, self._bounded = Breaker(), Bounded(seconds)
        self._waiting, self._lock = 0, threading.Lock()
        self._pool: ThreadPoolExecutor | None = None  # of one thread, while replies are written

    def find(self, owner: str, namespace: str, history: bytes) -> Answered | None:
        if self._breaker.down:
            return None
        try:
            found = self._bounded(lambda: self._read(owner, namespace, history))[0]
        except OSError as error:
            self._failed(error)
            return None
        self._breaker.succeeded()
        return found

    def keep(self, owner: str, made: Callable[[], Answered | None]) -> None:
        with self._lock:
            if self._waiting >= WAITING or self._breaker.down:
                return
            self._waiting += 1
            self._pool = self._pool or ThreadPoolExecutor(1, "kvcellar-replies")
            self._pool.submit(self._write, owner, made)

    def rest(self) -> None:
        """Wait until what waits is written, and end the thread. The next reply starts another one."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()

    def _write(self, owner: str, made: Callable[[], Answered | None]) -> None:
        try:
            if not self._breaker.down and (answered := made()) is not None:
                self._put(owner, answered)
        except (OSError, NoPlace) as error:
            self._failed(error)
        except (Full, TooLarge) as error:
            log.info("a reply is not shared: %s", error)
        finally:
            with self._lock:
                self._waiting -= 1

    def _put(self, owner: str, answered: Answered) -> None:
        """With the replies that other front ends have had to the same prompt, the newest last."""
        name = self._name(answered.history)
        for _ in range(TRIES):
            before, seal = self._read(owner, answered.namespace, answered.history)
            if before is not None and before.ids == answered.ids:
                others = (reply for reply in before.replies if reply not in answered.replies)
                answered = answered._replace(replies=(*others, *answered.replies)[-REPLIES:])
            try:
                self._archive.put(owner, name, b"", msgspec.msgpack.encode(answered), after=seal)
                return
            except Changed:
                continue

    def _read(self, owner: str, namespace: str, history: bytes) -> tuple[Answered | None, bytes | None]:
        """What is known of a prompt, and the seal that `put` replaces."""
        try:
            if (found := self._archive.get(owner, self._name(history))) is None:
                return None, b""
            answered = msgspec.msgpack.decode(found.body, type=Answered)
        except (Damaged, Foreign, ValueError) as error:
            log.warning("the tokens of a reply cannot be read: %s", error)
            return None, None
        whole = all(len(tokens) % 4 == 0 for tokens in (answered.ids, *answered.replies))
        same = (answered.namespace, answered.history) == (namespace, history)
        return (answered, found.seal) if whole and same else (None, None)

    def _name(self, history: bytes) -> str:
        return f"{self._tokenizer} {history.hex()}"

    def _failed(self, error: Exception) -> None:
        if isinstance(error, RemoteFailed) and error.answers:
            return
        log.warning("replies are not shared with other front ends for a time: %s", error)
        self._breaker.failed()

    def check(self) -> None:
        with self._lock:
            assert 0 <= self._waiting <= WAITING
