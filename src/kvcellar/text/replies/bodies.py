"""bodies: reads what is between the marks of a call, in parts.

A body reads text until it is complete or cannot be what it should be, and returns events: a call begins, has more
arguments, ends. Always true: the arguments of a call that has ended are together one JSON object.
"""

import json
from copy import copy
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from kvcellar.text.replies.json_scan import JsonScan, Status, read_json

MOST_NAME = 256  # characters


@dataclass(frozen=True, slots=True)
class Begun:
    """A call begins. `id`: as the model wrote it, if it did."""

    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Given:
    """More of its arguments."""

    text: str


@dataclass(frozen=True, slots=True)
class Ended:
    """It is complete."""


Event = Begun | Given | Ended


class BodyReader(Protocol):
    """Reads the body of one call, or of several. `feed` returns how many characters belong to it, and what they say."""

    @property
    def status(self) -> Status: ...
    def feed(self, text: str) -> tuple[int, list[Event]]: ...
    def end(self) -> list[Event]:
        """No text follows."""
        ...

    def copy(self) -> "BodyReader": ...


def whole(arguments: str) -> str | None:
    """The arguments as JSON, if they are an object; None otherwise."""
    try:
        found = read_json(arguments)
    except ValueError:
        return None
    return json.dumps(found, ensure_ascii=False) if isinstance(found, dict) else None


class ArgumentsBody:
    """A JSON object, of a call whose name is known."""

    def __init__(self, name: str, call_id: str | None) -> None:
        self.status = Status.MORE
        self._begun: Begun | None = Begun(name, call_id)
        self._scan = JsonScan()

    def feed(self, text: str) -> tuple[int, list[Event]]:
        events: list[Event] = []
        start = len(text) - len(text.lstrip()) if self._begun is not None else 0
        if start == len(text):
            return start, events
        if self._begun is not None:
            if text[start] != "{":
                self.status = Status.FAILED
                return start, events
            events.append(self._begun)
            self._begun = None
        told: list[str] = []
        used = self._scan.feed(text, start, told)
        self.status = self._scan.status
        events.append(Given("".join(told)))
        if self.status is Status.DONE:
            events.append(Ended())
        return used, events

    def end(self) -> list[Event]:
        self.status = Status.FAILED
        return []

    def copy(self) -> "ArgumentsBody":
        other = copy(self)
        other._scan = self._scan.copy()
        return other


class _At(Enum):
    OPEN = auto()
    FIRST_KEY = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    AFTER = auto()


_NEXT = {  # what a character leads to, outside of keys and values
    (_At.OPEN, "{"): _At.FIRST_KEY,
    (_At.COLON, ":"): _At.VALUE,
    (_At.AFTER, ","): _At.KEY,
}
ARGUMENTS = ("arguments", "parameters")
_BESIDE = frozenset({"name", "id", "type", "index", *ARGUMENTS})  # keys of calls


class ObjectBody:
    """A JSON object with the name of a call and its arguments. With `names`, it must be one of these, and no unknown
    key may be there: what looks like a call may be content."""

    def __init__(self, names: frozenset[str] | None = None) -> None:
        self.status = Status.MORE
        self._names = names
        self._at = _At.OPEN
        self._scan: JsonScan | None = None
        self._told: list[str] = []  # of the key or the value that is read
        self._key = ""
        self._name: str | None = None
        self._id: str | None = None
        self._streams = False  # whether the value is the arguments, told as they are read
        self._given: str | None = None  # arguments that were read before the name, or all of them

    def feed(self, text: str) -> tuple[int, list[Event]]:
        events: list[Event] = []
        at = 0
        while at < len(text) and self.status is Status.MORE:
            at = self._in_scan(text, at, events) if self._scan is not None else self._between(text, at, events)
        return at, events

    def end(self) -> list[Event]:
        self.status = Status.FAILED
        return []

    def copy(self) -> "ObjectBody":
        other = copy(self)
        other._scan = self._scan.copy() if self._scan is not None else None
        other._told = self._told[:]
        return other

    def _between(self, text: str, at: int, events: list[Event]) -> int:
        char = text[at]
        if char in " \t\r\n":
            return at + 1
        if self._at is _At.VALUE or (char == '"' and self._at in (_At.KEY, _At.FIRST_KEY)):
            self._scan = JsonScan()
            self._told = []
            is_arguments = self._at is _At.VALUE and self._key in ARGUMENTS
            if is_arguments and self._given is not None:  # a second time
                self.status = Status.FAILED
                return at
            self._streams = is_arguments and char == "{" and self._name is not None
            if self._streams:
                events.append(Begun(self._name or "", self._id))
            return at
        if char == "}" and self._at in (_At.AFTER, _At.FIRST_KEY):
            self._closed(events)
            return at + 1
        after = _NEXT.get((self._at, char))
        if after is None:
            self.status = Status.FAILED
            return at
        self._at = after
        return at + 1

    def _in_scan(self, text: str, at: int, events: list[Event]) -> int:
        assert self._scan is not None
        told: list[str] = []
        at = self._scan.feed(text, at, told)
        if self._streams:
            events.append(Given("".join(told)))
        else:
            self._told += told
        if self._scan.status is Status.FAILED:
            self.status = Status.FAILED
        elif self._scan.status is Status.DONE:
            self._scan = None
            self._took()
        return at

    def _took(self) -> None:
        """A key or a value is complete."""
        text = "".join(self._told)
        if self._at is not _At.VALUE:
            self._key = json.loads(text)
            self._at = _At.COLON
            if self._names is not None and self._key not in _BESIDE:
                self.status = Status.FAILED
            return
        self._at = _At.AFTER
        if self._streams:
            self._given = ""
        elif self._key == "name":
            self._named(json.loads(text))
        elif self._key in ARGUMENTS:
            self._given = _as_object(text)
            if self._given is None:
                self.status = Status.FAILED
        elif self._key == "id" and text[0] == '"':
            self._id = json.loads(text)

    def _named(self, name: object) -> None:
        known = isinstance(name, str) and 0 < len(name) <= MOST_NAME and (self._names is None or name in self._names)
        if known and self._name is None:
            self._name = str(name)
        else:
            self.status = Status.FAILED

    def _closed(self, events: list[Event]) -> None:
        if self._name is None:
            self.status = Status.FAILED
            return
        if not self._streams_done():
            events += [Begun(self._name, self._id), Given(self._given or "{}")]
        events.append(Ended())
        self.status = Status.DONE

    def _streams_done(self) -> bool:
        """Were the arguments told already?"""
        return self._given == ""


def _as_object(text: str) -> str | None:
    """Arguments that are an object, a text with one, or null."""
    if text[0] == "{":
        return text
    if text == "null":
        return "{}"
    return whole(json.loads(text)) if text[0] == '"' else None
