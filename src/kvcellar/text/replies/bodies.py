"""bodies: reads what is between the marks of a call, in parts.

A body reads text until it is complete or cannot be what it should be, and returns events: a call begins, has more
arguments, ends. Calls whose arguments are not written as JSON are told whole, when they are complete.

Always true: the arguments of a call that has ended are together one JSON object.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple, cast

from kvcellar.text.replies.form import Tags
from kvcellar.text.replies.values import JsonScan, Literals, Status, read_json, typed, written


class Found(NamedTuple):
    """`settled`: the text before this place has no mark and is no part of one. `end`: where `mark` ends, which begins
    at `settled`; without a mark, both are the same place."""

    settled: int
    end: int
    mark: str


class Marks:
    """Texts to find, none of them empty. Of those that occur, the first is met; of those at one place, the longest.
    That does not depend on how the text is divided. Never changes."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = sorted(dict.fromkeys(texts), key=len, reverse=True)
        self._longest = len(self.texts[0]) if self.texts else 0
        self._pattern = re.compile("|".join(map(re.escape, self.texts)))
        self._firsts = frozenset(text[0] for text in self.texts)

    def find(self, text: str, *, ended: bool) -> Found:
        """The first mark of a text. Unless it is `ended`, a mark that may still become another one is not met yet."""
        if self._firsts.isdisjoint(text):
            return Found(len(text), len(text), "")  # no mark begins
        held = len(text) if ended else self._held(text)
        found = self._pattern.search(text)
        if found is not None and found.start() < held:
            return Found(found.start(), found.end(), found[0])
        return Found(held, held, "")

    def at(self, text: str, *, ended: bool) -> str | None:
        """The longest mark that a text begins with; "": none; None: more of the text has to be known."""
        if not ended and any(len(one) > len(text) and one.startswith(text) for one in self.texts):
            return None
        return next((one for one in self.texts if text.startswith(one)), "")

    def _held(self, text: str) -> int:
        """Where the longest end of a text begins that a mark may begin with; its length if there is none."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._firsts:
                rest = text[start:]
                if any(len(one) > len(rest) and one.startswith(rest) for one in self.texts):
                    return start
        return len(text)


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


class ArgumentsBody:
    """A JSON object, of a call whose name is known."""

    def __init__(self, name: str, call_id: str | None) -> None:
        self.status = Status.MORE
        self._begun: Begun | None = Begun(name, call_id)
        self._scan = JsonScan()

    def feed(self, text: str) -> tuple[int, list[Event]]:
        """How many characters belong to the body, and what they say."""
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
    """Arguments that are an object, a text with one, or null; None for others."""
    if text[0] == "{":
        return text
    if text == "null":
        return "{}"
    try:
        found = read_json(json.loads(text)) if text[0] == '"' else None
    except ValueError:
        return None
    return json.dumps(found, ensure_ascii=False) if isinstance(found, dict) else None


MOST_TEXT = 2**20  # characters of one call that is read as a whole
_BEGINS_CALLS = re.compile(r"\[\s*(?:$|[A-Za-z_][A-Za-z0-9_.\-]*\s*(?:$|\())")
_TEXT_KIND, _JSON_KIND = 0, 1


class TagsBody:
    """Arguments between tags. `ends` are texts that end the call; they are read, too."""

    def __init__(
        self, name: str, call_id: str | None, tags: Tags, ends: Sequence[str], properties: Mapping[str, Any]
    ) -> None:
        self.status = Status.MORE
        self._begun, self._tags, self._properties = Begun(name, call_id), tags, properties
        self._starts = Marks([tags.open.strip(), *ends])
        self._middles, self._closes = Marks(tags.middle), Marks([tags.close])
        self._text = ""
        self._key: str | None = None  # of the value that is read
        self._kind = _TEXT_KIND
        self._in_key = False
        self._parts: list[str] = []  # of that value
        self._found: dict[str, Any] = {}

    def feed(self, text: str) -> tuple[int, list[Event]]:
        self._text += text
        while self.status is Status.MORE and self._step():
            pass
        if self.status is not Status.DONE:
            return len(text), []
        return len(text) - len(self._text), [self._begun, Given(written(self._found)), Ended()]

    def copy(self) -> "TagsBody":
        other = copy(self)
        other._parts, other._found = self._parts[:], dict(self._found)
        return other

    def _step(self) -> bool:
        if self._key is not None:
            return self._value(self._key)
        if self._in_key:
            return self._middle()
        self._text = self._text.lstrip()
        mark = self._starts.at(self._text, ended=False) if self._text else None
        if mark is None:
            return False
        self._text = self._text[len(mark) :]
        if mark == self._tags.open.strip():
            self._in_key = True
        else:
            self.status = Status.DONE if mark else Status.FAILED
        return True

    def _middle(self) -> bool:
        settled, end, mark = self._middles.find(self._text, ended=False)
        if settled > MOST_NAME:
            self.status = Status.FAILED
        if not mark:
            return False
        self._key, self._in_key = self._text[:settled].strip(), False
        self._kind = self._tags.middle.index(mark) if self._tags.kinds else _TEXT_KIND
        self._text, self._parts = self._text[end:], []
        return True

    def _value(self, key: str) -> bool:
        settled, end, mark = self._closes.find(self._text, ended=False)
        self._parts.append(self._text[:settled])
        self._text = self._text[end:]
        if not mark:
            return False
        raw = "".join(self._parts)
        if self._tags.lines:
            raw = raw.removeprefix("\n").removesuffix("\n")
        self._key = None
        if not key or key in self._found:
            self.status = Status.FAILED
            return True
        try:
            self._found[key] = self._typed(key, raw)
        except ValueError:
            self.status = Status.FAILED
        return True

    def _typed(self, key: str, raw: str) -> Any:
        if self._tags.kinds:
            return read_json(raw) if self._kind == _JSON_KIND else raw
        schema: Any = self._properties.get(key)
        return typed(raw, cast("Mapping[str, Any]", schema) if isinstance(schema, Mapping) else None)


class BalancedBody:
    """A text from a bracket to the one that closes it, which is read when it is complete. `quotes` are the marks around
    strings, in which brackets do not count; `begins` says whether a text may still be what is expected."""

    def __init__(
        self,
        parse: Callable[[str], Sequence[tuple[Begun, dict[str, Any]]]],
        quotes: Sequence[str],
        begins: Callable[[str], bool] | None = None,
        *,
        escapes: bool,
    ) -> None:
        self.status = Status.MORE
        self._parse, self._begins = parse, begins
        self._marks = Marks([*quotes, "[", "]", "(", ")", "{", "}"])
        self._in_string = {quote: Marks([quote, "\\"] if escapes else [quote]) for quote in quotes}
        self._quote = ""  # around the string that is open
        self._depth = 0
        self._text = ""  # not looked at yet
        self._skips = False  # whether the next character is escaped
        self._parts: list[str] = []
        self._size = 0
        self._head = ""  # the beginning, until it is sure what it is

    def feed(self, text: str) -> tuple[int, list[Event]]:
        if self._begins is not None:
            self._head += text
            if not self._begins(self._head) or len(self._head) > MOST_NAME:
                if len(self._head) <= MOST_NAME or "(" not in self._head[:MOST_NAME]:
                    self.status = Status.FAILED
                    return 0 if len(self._head) == len(text) else len(text), []
            if "(" in self._head:
                self._begins, self._head = None, ""
        self._text += text
        while self.status is Status.MORE and self._step():
            pass
        if self.status is not Status.DONE:
            return len(text), []
        return len(text) - len(self._text), self._parsed()

    def copy(self) -> "BalancedBody":
        other = copy(self)
        other._parts = self._parts[:]
        return other

    def _step(self) -> bool:
        if self._skips and self._text:
            self._read(1)
            self._skips = False
        settled, end, mark = (self._in_string[self._quote] if self._quote else self._marks).find(
            self._text, ended=False
        )
        self._read(end)
        if self._size > MOST_TEXT or (not self._depth and not mark and settled):
            self.status = Status.FAILED
        if not mark:
            return False
        if self._quote:
            self._skips, self._quote = mark == "\\", self._quote if mark == "\\" else ""
        elif mark in self._in_string:
            self._quote = mark
        else:
            self._depth += 1 if mark in "[({" else -1
        if not self._depth:
            self.status = Status.DONE
        return True

    def _read(self, count: int) -> None:
        self._parts.append(self._text[:count])
        self._size += count
        self._text = self._text[count:]

    def _parsed(self) -> list[Event]:
        try:
            calls = self._parse("".join(self._parts))
            told = [(begun, written(arguments)) for begun, arguments in calls]
        except (ValueError, RecursionError, OverflowError):
            self.status = Status.FAILED
            return []
        return [event for begun, arguments in told for event in (begun, Given(arguments), Ended())]


BodyReader = ArgumentsBody | ObjectBody | TagsBody | BalancedBody


def python_body(names: frozenset[str] | None) -> BalancedBody:
    """A list of calls of functions, each of which must be one of `names`, if there are any."""

    def parse(text: str) -> list[tuple[Begun, dict[str, Any]]]:
        calls = Literals(text).calls()
        if names is not None and any(name not in names for name, _ in calls):
            raise ValueError("a name is not that of a tool")
        return [(Begun(name), arguments) for name, arguments in calls]

    return BalancedBody(parse, ("'", '"'), lambda text: _BEGINS_CALLS.match(text) is not None, escapes=True)


def loose_body(name: str, call_id: str | None, quote: str) -> BalancedBody:
    """An object with unquoted keys, and strings between `quote`."""
    return BalancedBody(lambda text: [(Begun(name, call_id), Literals(text, quote).object())], (quote,), escapes=False)
