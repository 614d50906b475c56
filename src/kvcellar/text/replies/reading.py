"""reading: how the answers of one request are read, and the reader of their pieces on the side of a client."""

import secrets
import string
from typing import Protocol

from kvcellar.events import Delta, Finished
from kvcellar.text.pieces import CallClosed, Piece
from kvcellar.text.replies.form import IdMaker, Ids
from kvcellar.text.replies.machine import Machine
from kvcellar.text.replies.outline import SHORT_ID, Outline


class ReplyReading(Protocol):
    """How the answers of a request are read."""

    def machine(self) -> Machine:
        """The reader of one answer, as tokens are generated."""
        ...


class OpenedReading:
    """By an outline, where the prompt ends with `opening`: what a template writes in front of an answer may begin the
    reasoning. `begun`: the prompt has the beginning of the content, too, which the answer continues. Never changes."""

    def __init__(self, outline: Outline, opening: str, new_id: "IdMaker | None" = None, *, begun: bool = False) -> None:
        self._new_id = new_id or fresh_id
        self._opened = Machine(outline, self._new_id)
        self._opened.push(opening, special=True)  # none of it is told
        if self._opened.outside or self._opened.calls or (begun and not self._opened.reasons):
            self._opened = Machine(outline, self._new_id, blank=not begun)

    @property
    def thinking(self) -> str | None:
        """The mark of the reasoning that the prompt has opened."""
        return self._opened.thinking

    def machine(self) -> Machine:
        return self._opened.copy()


class DeltaReader:
    """The pieces that an engine has read, of one choice: a `ReplyReader`."""

    def __init__(self) -> None:
        self.reasoning_tokens = 0
        self.calls = 0

    def add(self, delta: Delta) -> list[Piece]:
        pieces: list[Piece] = list(delta.pieces or ())
        self.reasoning_tokens += delta.reasoning_tokens
        for piece in pieces:
            self.calls += isinstance(piece, CallClosed)
        return pieces

    def end(self, finished: Finished) -> list[Piece]:
        return []  # the engine sends the rest before it says that a choice has ended


def fresh_id(kind: Ids) -> str:
    """An id for a call that has none of its own."""
    if kind is Ids.SHORT:
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(SHORT_ID))
    return f"call_{secrets.token_hex(12)}"
