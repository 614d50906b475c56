"""pieces: what a reply is made of, as a client of a chat sees it: reasoning, content, and calls of tools.

A `ReplyReader` reads the deltas of one choice and returns its pieces. The pieces of a choice, in order:

  * the texts of all `Content` make up its content, those of all `Reasoning` its reasoning;
  * calls are numbered from 0 in the order in which they are opened; a call is opened once, then gets its arguments, and
    is closed once; at most one is open; the texts of its `CallArguments` make up JSON, unless the model wrote none.
"""

from typing import Protocol

from msgspec import Struct

from kvcellar.events import Delta, Finished


class Reasoning(Struct, frozen=True):
    """Text that the model wrote before its answer."""

    text: str


class Content(Struct, frozen=True):
    """Text of the answer."""

    text: str


class CallOpened(Struct, frozen=True):
    """A call of a tool begins. `call`: its number in the choice. `id`: the name that its result will refer to."""

    call: int
    id: str
    name: str


class CallArguments(Struct, frozen=True):
    """More of the arguments of a call."""

    call: int
    text: str


class CallClosed(Struct, frozen=True):
    """The call is complete."""

    call: int


Piece = Reasoning | Content | CallOpened | CallArguments | CallClosed


class ReplyReader(Protocol):
    """A reader of one choice. After `end` nothing is added."""

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the reasoning so far."""
        ...

    @property
    def calls(self) -> int:
        """Calls that were closed so far: one that was opened and then broke off is none."""
        ...

    def add(self, delta: Delta) -> list[Piece]:
        """The pieces that are certain after `delta`; text that may still become a call is kept back."""
        ...

    def end(self, finished: Finished) -> list[Piece]:
        """The rest. A call that was not complete becomes content."""
        ...


class PlainReader:
    """All text is content: the model has no form of calls or of reasoning."""

    reasoning_tokens = 0
    calls = 0

    def add(self, delta: Delta) -> list[Piece]:
        return [Content(delta.text)] if delta.text else []

    def end(self, finished: Finished) -> list[Piece]:
        return []
