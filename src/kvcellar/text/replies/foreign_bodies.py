"""foreign_bodies: reads calls whose arguments are not written as JSON. They are told whole, when they are complete."""

import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any, cast

from kvcellar.text.replies.bodies import MOST_NAME, Begun, Ended, Event, Given
from kvcellar.text.replies.form import Tags
from kvcellar.text.replies.json_scan import Status, read_json
from kvcellar.text.replies.marks import Marks
from kvcellar.text.replies.values import Literals, typed, written

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

    def end(self) -> list[Event]:
        self.status = Status.FAILED
        return []

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

    def end(self) -> list[Event]:
        self.status = Status.FAILED
        return []

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
