"""pieces: what a reply is made of, as a client of a chat sees it: reasoning, content, and calls of tools.

The pieces of a choice, in order, are those of its deltas:

  * the texts of all `Content` make up its content, those of all `Reasoning` its reasoning;
  * calls are numbered from 0 in the order in which they are opened; a call is opened once, then gets its arguments, and
    is closed once; at most one is open; the texts of its `CallArguments` make up JSON, unless the model wrote none.
"""

from collections.abc import Sequence

from msgspec import Struct

from kvcellar.events import Delta


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


def pieces_of(delta: Delta) -> Sequence[Piece]:
    """What a delta has added. Where the request did not say how its answers are read, all text is content."""
    if delta.pieces is not None:
        return delta.pieces
    return (Content(delta.text),) if delta.text else ()
