"""conversations: conversations that are kept by name: save, load, fork, rewind, delete, and turns over HTTP.

What is kept is the text, by turns. Its K/V are in the prefix tree and the store like those of every request: a
conversation that is continued finds there what is left of them, and computes the rest.

Always true:
  * a conversation belongs to one owner; others neither see nor change it;
  * it is changed as a whole or not at all, and by one thread at a time: while a turn is running, it is held;
  * a turn is added only to what it continued, also where another process has changed that meanwhile.
"""

import logging
import re
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock

import msgspec

from kvcellar.errors import (
    BadRequest,
    ConversationConflict,
    ConversationNotSaved,
    ConversationUnreadable,
    UnknownConversation,
    shown,
)
from kvcellar.frontend.transcript import Transcript
from kvcellar.images.image import FIRST
from kvcellar.memory.tiers.archive import Archive, Changed, Full, TooLarge
from kvcellar.memory.tiers.codec import Damaged, Foreign
from kvcellar.places import NoPlace
from kvcellar.wire import prepared

log = logging.getLogger("kvcellar.engine")

PARAM = "conversation"  # of errors
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True)
class ConversationInfo:
    """A conversation in a list. `created` and `changed` are seconds since 1970."""

    name: str
    model: str
    chat: bool
    created: float
    changed: float
    turns: int
    messages: int
    tokens: int


@dataclass(frozen=True, slots=True)
class TokenSource:
    """What decides the meaning of token ids. `tokenizer`: a digest of its files."""

    model: str
    tokenizer: str
    vocab_size: int


@dataclass(frozen=True, slots=True)
class _Head:
    """What is known of a conversation without its text."""

    owner: str
    tokenizer: str
    info: ConversationInfo


_HEAD = prepared(_Head)


def _head_of(content: bytes) -> _Head:
    """Raises `Damaged`."""
    try:
        return msgspec.json.decode(content, type=_HEAD)
    except ValueError as error:
        raise Damaged(f"its head cannot be read: {error}") from error


@dataclass(slots=True)
class Held:
    """A conversation that no other thread of this process changes until it is released. `seal` is of what is in the
    archive."""

    info: ConversationInfo
    transcript: Transcript
    seal: bytes
    _put: Callable[["Held"], None]

    def save(self) -> None:
        """Keep `transcript`. Raises `ConversationConflict` if another process has changed the conversation, and
        `ConversationNotSaved`."""
        self._put(self)


class Conversations:
    """The named conversations of one engine. All methods may be called from any thread, and raise `BadRequest` for what
    is no name, `UnknownConversation`, `ConversationConflict`, `ConversationUnreadable` and `ConversationNotSaved`."""

    def __init__(self, archive: Archive, source: TokenSource) -> None:
        self._archive, self._source = archive, source
        self._held: set[tuple[str, str]] = set()
        self._lock = Lock()

    def beside(self, other: "Conversations", model: str, name: str) -> "Conversations":
        """The conversations of `other`, continued with this one's model under a name; `model` identifies it where its
        tokenizer has no digest."""
        source = replace(self._source, model=name, tokenizer=self._source.tokenizer or model)
        made = Conversations(other._archive, source)
        made._held, made._lock = other._held, other._lock
        return made

    # -- one conversation ---------------------------------------------------------------------------------------

    def save(self, name: str, transcript: Transcript, *, owner: str = "") -> ConversationInfo:
        """Keep `transcript` under a name, in place of what had that name."""
        with self._holding(owner, name):
            return self._put(owner, name, transcript, after=None)[0]

    def create(self, name: str, transcript: Transcript, *, owner: str = "") -> ConversationInfo:
        """As `save`, but raises `ConversationConflict` if there is one of that name."""
        with self._holding(owner, name):
            return self._put(owner, name, transcript, after=b"")[0]

    def read(self, name: str, *, owner: str = "") -> tuple[ConversationInfo, Transcript]:
        """Also while it is held: as it was before."""
        info, transcript, _ = self._get(owner, _checked(name))
        return info, transcript

    def fork(self, name: str, to: str, *, owner: str = "") -> ConversationInfo:
        """A second conversation, `to`, that continues from here."""
        with self._holding(owner, to):
            _, transcript = self.read(name, owner=owner)
            return self._put(owner, to, transcript, after=b"")[0]

    def rewind(self, name: str, turns: int = 1, *, owner: str = "") -> ConversationInfo:
        """Discard the last `turns` turns."""
        with self.hold(name, owner=owner) as held:
            held.transcript.rewind(turns)
            held.save()
            return held.info

    def delete(self, name: str, *, owner: str = "") -> None:
        """Also where it cannot be read."""
        with self._holding(owner, name):
            try:
                found = self._archive.delete(owner, name)
            except OSError as error:
                raise _not_saved(name, error) from error
            if not found:
                raise _unknown(name)

    def list(self, *, owner: str = "") -> list[ConversationInfo]:
        """By name. One that cannot be read is left out, with a line in the log."""
        found: list[ConversationInfo] = []
        try:
            heads = list(self._archive.heads(owner))
        except OSError as error:
            raise ConversationUnreadable(f"conversations cannot be listed: {_why(error)}") from error
        for head in heads:
            try:
                if isinstance(head, Exception):
                    raise head
                found.append(_head_of(head).info)
            except (OSError, Damaged, Foreign) as error:
                log.warning("a named conversation cannot be listed: %s", _why(error))
        return sorted(found, key=lambda info: info.name)

    @contextmanager
    def hold(self, name: str, *, owner: str = "") -> Generator[Held]:
        """For a change, or a turn: within the block the conversation is held."""
        with self._holding(owner, name):
            yield Held(*self._get(owner, name), partial(self._put_held, owner))

    # -- inside -------------------------------------------------------------------------------------------------

    @contextmanager
    def _holding(self, owner: str, name: str) -> Generator[None]:
        key = owner, _checked(name)
        with self._lock:
            if key in self._held:
                why = "is busy with another request; wait for that, or fork the conversation"
                raise ConversationConflict(f"the conversation {name} {why}", PARAM)
            self._held.add(key)
        try:
            yield
        finally:
            with self._lock:
                self._held.discard(key)

    def _get(self, owner: str, name: str) -> tuple[ConversationInfo, Transcript, bytes]:
        try:
            found = self._archive.get(owner, name)
            if found is None:
                raise _unknown(name)
            head = _head_of(found.head)
            if (head.owner, head.info.name) != (owner, name):
                raise Damaged("it is another conversation")
            return head.info, self._transcript(head, found.body), found.seal
        except BadRequest:
            raise
        except (OSError, Damaged, Foreign, RecursionError, ValueError) as error:
            raise ConversationUnreadable(f"the conversation {name} cannot be read: {_why(error)}") from error

    def _transcript(self, head: _Head, body: bytes) -> Transcript:
        """Raises `ValueError`, and `ConversationConflict` for the tokens of another tokenizer."""
        same = head.tokenizer == self._source.tokenizer
        vocab_size = self._source.vocab_size if same else FIRST
        transcript = Transcript.decoded(body, chat=head.info.chat, vocab_size=vocab_size)
        if same:
            return transcript
        if not transcript.chat:
            message = f"the conversation {head.info.name} has tokens of another model, {head.info.model}"
            raise ConversationConflict(message, PARAM)
        return transcript.without_tokens()

    def _put(
        self, owner: str, name: str, transcript: Transcript, *, after: bytes | None, created: float | None = None
    ) -> tuple[ConversationInfo, bytes]:
        """`created`: when the conversation was; None: now."""
        counts, now = (transcript.turns, len(transcript.messages), len(transcript.tokens)), time.time()
        info = ConversationInfo(name, self._source.model, transcript.chat, created or now, now, *counts)
        head = msgspec.json.encode(_Head(owner, self._source.tokenizer, info))
        try:
            return info, self._archive.put(owner, name, head, transcript.encoded(), after=after)
        except Changed:
            what = f"there is a conversation {name} already" if after == b"" else f"the conversation {name} has changed"
            raise ConversationConflict(f"{what}; nothing was saved", PARAM) from None
        except TooLarge as error:
            message = f"the conversation {name} cannot be saved: {error}. Send less, rewind it, or begin another"
            raise BadRequest(message, PARAM) from None
        except Full as error:
            message = f"the conversation {name} cannot be saved: {error}. Delete others, or rewind it"
            raise ConversationConflict(message, PARAM) from None
        except (OSError, NoPlace) as error:
            raise _not_saved(name, error) from error

    def _put_held(self, owner: str, held: Held) -> None:
        info = held.info
        held.info, held.seal = self._put(owner, info.name, held.transcript, after=held.seal, created=info.created)


def _checked(name: object) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        must = "a name of 1 to 128 letters, digits, dots, hyphens and underscores that begins with a letter or digit"
        raise BadRequest(f"a conversation must have {must}, not {shown(name)}", PARAM)
    return name


def _unknown(name: str) -> UnknownConversation:
    return UnknownConversation(f"there is no conversation {name}; save one under that name first", PARAM)


def _not_saved(name: str, error: Exception) -> ConversationNotSaved:
    return ConversationNotSaved(f"the conversation {name} cannot be saved: {_why(error)}")


def _why(error: Exception) -> str:
    """Without the path of a file."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
