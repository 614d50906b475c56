"""form: the record of how one model writes reasoning and calls of tools. Plain data.

A section of calls is written like this, where white space between the parts does not matter to a reader:

    begin  call  between call ...  finish             calls of one section; `apart` is between two sections
    a call: lead  NAME  after_name  arguments  tail   where `body` says how the arguments are written

Of several texts for one part, the first is what the model's template writes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


class Body(Enum):
    """How a call is written."""

    OBJECT = "as a JSON object with its name and its arguments"
    ARGUMENTS = "its arguments as a JSON object, behind its name"
    TAGS = "each argument between tags, behind its name"
    PYTHON = "as calls of functions, in a list"
    LOOSE = "its arguments as an object with keys that are not quoted, and quotes of its own"


class Ids(Enum):
    """What ids of calls look like."""

    CALL = "call_ and 24 letters and digits"
    SHORT = "9 letters and digits, as Mistral's templates want them"
    WRITTEN = "as the model writes them, with the name (functions.name:0)"


@dataclass(frozen=True, slots=True)
class Tags:
    """An argument: `open` KEY `middle` VALUE `close`. Values that are not text are JSON. With `kinds`, the first of
    `middle` is for text, and the second for JSON; otherwise the schema says which it is. `lines`: one line break around
    the value belongs to the tags."""

    open: str
    middle: tuple[str, ...]
    close: str
    kinds: bool = False
    lines: bool = True
    between: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """How calls are written. `bare`: there is no mark in front, so that calls can only begin the answer. `ends_name`
    are texts that end a name, too, and belong to what follows."""

    begin: tuple[str, ...]
    body: Body
    lead: tuple[str, ...] = ("",)
    after_name: tuple[str, ...] = ("",)
    tail: tuple[str, ...] = ("",)
    between: str | None = None  # between two calls of one section; None: there is one call in each
    finish: tuple[str, ...] = ("",)
    apart: str = "\n"
    arguments: str = "arguments"  # for OBJECT: the key of the arguments
    tags: Tags | None = None  # for TAGS
    ends_name: tuple[str, ...] = ()
    bare: bool = False
    quote: str = '"'  # for LOOSE: the mark around strings
    separator: str = ""  # `between` without white space, where that is all that tells two calls apart


@dataclass(frozen=True, slots=True)
class Thought:
    """Reasoning is between `open` and `close`. `apart` follows it in what the template writes."""

    open: str
    close: str
    apart: str = "\n\n"


@dataclass(frozen=True, slots=True)
class Channels:
    """A message has a header, which says what it is: `begin` header `end` text. `call` is in front of the name of a
    function in a header; a header with the word of `thought` is that of reasoning."""

    begin: tuple[str, ...]
    end: str
    call: str
    written: str  # what a template writes in front of a call of NAME
    thought: Thought  # its `open` is the word in the header
    section: Section  # how arguments are written behind the header of a call


@dataclass(frozen=True, slots=True)
class ReplyForm:
    """How a model writes. `source`: where that was found."""

    name: str
    source: str
    sections: tuple[Section, ...] = ()
    thoughts: tuple[Thought, ...] = ()
    channels: Channels | None = None
    ids: Ids = Ids.CALL

    @property
    def has_calls(self) -> bool:
        """Is it known how calls are written?"""
        return bool(self.sections) or self.channels is not None


IdMaker = Callable[[Ids], str]
