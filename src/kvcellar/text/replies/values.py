"""values: the values that models write as arguments: JSON that arrives in parts, and what is not written as JSON:
tagged text with a schema, Python's literals, unquoted keys.

`JsonScan` checks each character when it arrives. Always true:
  * what was told so far begins some JSON value that every reader of JSON takes, and is the text read so far, except
    that control characters within strings are escaped (models write line breaks there), half of a surrogate pair is
    replaced, an escape is told when it is whole, and white space in front is left out;
  * the cost of a character does not depend on what was read before.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from copy import copy
from enum import Enum
from typing import Any, ClassVar, cast

MOST_DEPTH = 100  # of lists and objects within each other

_SPACE = re.compile(r"[ \t\r\n]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_WORD = re.compile(r"[-+.0-9A-Za-z]*")
_WHOLE_WORD = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_LONGEST_WORD = 400  # characters: more digits than a float can have
_HEX = frozenset("0123456789abcdefABCDEF")
_LOST = "\\ufffd"  # in place of half of a surrogate pair


class Status(Enum):
    MORE = "more of the text is needed"
    DONE = "complete"
    FAILED = "the text is not what was expected"


class _At(Enum):
    VALUE = "a value"
    ITEM = "a value, or the end of an empty list"
    FIRST_KEY = "a key, or the end of an empty object"
    KEY = "a key"
    COLON = "a colon"
    AFTER = "a comma or an end"
    STRING = "inside a string"
    ESCAPE = "after a backslash"
    HEX = "inside the digits of an escape"
    WORD = "inside a number, true, false or null"


class JsonScan:
    """One JSON value."""

    def __init__(self) -> None:
        self.status = Status.MORE
        self._at = _At.VALUE
        self._open: list[str] = []  # the ends of the lists and objects that are open
        self._key = False  # whether the string that is open is a key
        self._hex = ""  # digits of the escape that is read
        self._high = ""  # those of the first half of a surrogate pair, while the second one may follow
        self._word = ""

    def feed(self, text: str, start: int, told: list[str]) -> int:
        """Read from `start` on, and append what is told. Returns the place behind what belongs to the value: that of
        the first character that does not, or the end of the text."""
        while start < len(text) and self.status is Status.MORE:
            spaced, read = self._READ[self._at]
            if spaced and (start := self._space(text, start, told)) == len(text):
                break
            start = read(self, text, start, told)
        return start

    def end(self) -> None:
        """No text follows: a number that was not ended by another character is complete."""
        if self._at is _At.WORD and not self._open:
            self._ended_word()
        if self.status is Status.MORE:
            self.status = Status.FAILED

    def copy(self) -> "JsonScan":
        other = copy(self)
        other._open = self._open[:]
        return other

    # -- each reads one or more characters, and returns the place behind them ---------------------------------------

    def _value(self, text: str, at: int, told: list[str]) -> int:
        char = text[at]
        if char == "]" and self._at is _At.ITEM:
            return self._close(char, at, told)
        if char in "{[":
            self._open.append("}" if char == "{" else "]")
            self._at = _At.FIRST_KEY if char == "{" else _At.ITEM
            if len(self._open) > MOST_DEPTH:
                return self._failed(at)
        elif char == '"':
            self._at, self._key = _At.STRING, False
        elif char in "-0123456789tfn":
            self._at, self._word = _At.WORD, ""
            return at
        else:
            return self._failed(at)
        told.append(char)
        return at + 1

    def _read_key(self, text: str, at: int, told: list[str]) -> int:
        if text[at] == "}" and self._at is _At.FIRST_KEY:
            return self._close("}", at, told)
        if text[at] != '"':
            return self._failed(at)
        self._at, self._key = _At.STRING, True
        told.append('"')
        return at + 1

    def _colon(self, text: str, at: int, told: list[str]) -> int:
        if text[at] != ":":
            return self._failed(at)
        self._at = _At.VALUE
        told.append(":")
        return at + 1

    def _after(self, text: str, at: int, told: list[str]) -> int:
        if text[at] == ",":
            self._at = _At.KEY if self._open[-1] == "}" else _At.VALUE
            told.append(",")
            return at + 1
        return self._close(text[at], at, told)

    def _close(self, char: str, at: int, told: list[str]) -> int:
        if char != self._open[-1]:
            return self._failed(at)
        self._open.pop()
        told.append(char)
        self._ended()
        return at + 1

    def _string(self, text: str, at: int, told: list[str]) -> int:
        match = _PLAIN.match(text, at)
        end = match.end() if match is not None else at
        if self._high and text[at] != "\\":
            told.append(_LOST)
            self._high = ""
        told.append(text[at:end])
        if end == len(text):
            return end
        char = text[end]
        if char == '"':
            told.append(char)
            if self._key:
                self._at = _At.COLON
            else:
                self._ended()
        elif char == "\\":
            self._at = _At.ESCAPE
        else:
            told.append(f"\\u{ord(char):04x}")
        return end + 1

    def _escape(self, text: str, at: int, told: list[str]) -> int:
        char = text[at]
        if char not in '"\\/bfnrtu':
            return self._failed(at)
        if char == "u":
            self._at, self._hex = _At.HEX, ""
            return at + 1
        if self._high:
            told.append(_LOST)
            self._high = ""
        told.append("\\" + char)
        self._at = _At.STRING
        return at + 1

    def _digit(self, text: str, at: int, told: list[str]) -> int:
        if text[at] not in _HEX:
            return self._failed(at)
        self._hex += text[at]
        if len(self._hex) == 4:
            self._at = _At.STRING
            told.append(self._escaped(self._hex))
        return at + 1

    def _escaped(self, digits: str) -> str:
        """The escape with these digits, with what was read in front of it and not told."""
        high, self._high = self._high, ""
        if "dc00" <= digits.lower() < "e000":
            return f"\\u{high}\\u{digits}" if high else _LOST
        lost = _LOST if high else ""
        if "d800" <= digits.lower() < "dc00":
            self._high = digits
            return lost
        return f"{lost}\\u{digits}"

    def _in_word(self, text: str, at: int, told: list[str]) -> int:
        match = _WORD.match(text, at)
        end = match.end() if match is not None else at
        self._word += text[at:end]
        told.append(text[at:end])
        if len(self._word) > _LONGEST_WORD:
            return self._failed(end)
        if end < len(text):
            self._ended_word()
        return end

    def _ended_word(self) -> None:
        if _WHOLE_WORD.fullmatch(self._word) is None or not _finite(self._word):
            self.status = Status.FAILED
        else:
            self._ended()

    def _ended(self) -> None:
        """A value ends here."""
        self._at = _At.AFTER
        if not self._open:
            self.status = Status.DONE

    def _space(self, text: str, at: int, told: list[str]) -> int:
        match = _SPACE.match(text, at)
        end = match.end() if match is not None else at
        if end > at and self._open:
            told.append(text[at:end])
        return end

    def _failed(self, at: int) -> int:
        self.status = Status.FAILED
        return at

    _READ: ClassVar = {  # whether white space may come before it, and what reads it
        _At.VALUE: (True, _value),
        _At.ITEM: (True, _value),
        _At.FIRST_KEY: (True, _read_key),
        _At.KEY: (True, _read_key),
        _At.COLON: (True, _colon),
        _At.AFTER: (True, _after),
        _At.STRING: (False, _string),
        _At.ESCAPE: (False, _escape),
        _At.HEX: (False, _digit),
        _At.WORD: (False, _in_word),
    }


def read_json(text: str) -> Any:
    """The value that `text` is, by the rules above. Raises `ValueError`."""
    scan, told = JsonScan(), list[str]()
    end = scan.feed(text, 0, told)
    scan.end()
    if scan.status is not Status.DONE or text[end:].strip():
        raise ValueError("this is not one JSON value")
    return json.loads("".join(told))


def _finite(word: str) -> bool:
    """Is it no number, or one that a double can hold?"""
    return word[0] in "tfn" or math.isfinite(float(word))


MOST_NESTED = 60  # of lists and objects
_WORDS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}
_DIGITS = {"x": 2, "u": 4, "U": 8}


def typed(raw: str, schema: Mapping[str, Any] | None) -> Any:
    """A value between tags. It is the text itself unless the schema says that it is none, and it is JSON."""
    types = schema_types(schema)
    if not types or (types == {"string"}):
        return raw
    if "null" in types and raw in ("null", "None"):
        return None
    if "string" in types:
        return raw
    if raw in ("True", "False"):
        return raw == "True"
    try:
        return read_json(raw)
    except ValueError:
        return raw


def schema_types(schema: Mapping[str, Any] | None) -> set[str]:
    """The types that a schema names; empty: any."""
    if schema is None:
        return set()
    declared: Any = schema.get("type")
    types = {declared} if isinstance(declared, str) else set[str]()
    if isinstance(declared, list):
        types = {one for one in cast("list[Any]", declared) if isinstance(one, str)}
    for union in ("anyOf", "oneOf"):
        listed: Any = schema.get(union)
        for one in cast("list[Any]", listed) if isinstance(listed, list) else ():
            if isinstance(one, Mapping):
                types |= schema_types(cast("Mapping[str, Any]", {**one, "anyOf": None, "oneOf": None}))
    return types


class Literals:
    """Reads a text from its beginning. Raises `ValueError` where it is not what is asked for.

    `raw` is a mark around strings that have no escapes (Gemma's); keys may be without quotes if it is given.
    """

    def __init__(self, text: str, raw: str = "") -> None:
        self._text, self._at, self._raw = text, 0, raw

    def calls(self) -> list[tuple[str, dict[str, Any]]]:
        """`[name(key=value, ...), ...]`, to the end of the text."""
        self._need("[")
        found: list[tuple[str, dict[str, Any]]] = []
        while not self._have("]"):
            if found:
                self._need(",")
            name = self._name()
            self._need("(")
            found.append((name, self._pairs("=", ")", 0, bare=True)))
        if self._text[self._at :].strip() or not found:
            raise ValueError("calls end before the text does, or there are none")
        return found

    def object(self) -> dict[str, Any]:
        """`{key: value, ...}`, to the end of the text."""
        self._need("{")
        found = self._pairs(":", "}", 0, bare=bool(self._raw))
        if self._text[self._at :].strip():
            raise ValueError("the object ends before the text does")
        return found

    def _pairs(self, sign: str, end: str, depth: int, *, bare: bool) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while not self._have(end):
            if found:
                self._need(",")
                if self._have(end):
                    break
            quoted = self._peek() in ('"', "'") or (self._raw != "" and self._text.startswith(self._raw, self._at))
            if not quoted and not bare:
                raise ValueError("a key has no quotes")
            key = self._string() if quoted else self._name()
            if key in found:
                raise ValueError(f"{key} is there twice")
            self._need(sign)
            found[key] = self._value(depth + 1)
        return found

    def _value(self, depth: int) -> Any:
        if depth > MOST_NESTED:
            raise ValueError("nested too deep")
        char = self._peek()
        if char in ('"', "'") or (self._raw and self._text.startswith(self._raw, self._at)):
            return self._string()
        if char == "{":
            self._at += 1
            return self._pairs(":", "}", depth, bare=bool(self._raw))
        if char in ("[", "("):
            self._at += 1
            return self._items("]" if char == "[" else ")", depth)
        if (number := _NUMBER.match(self._text, self._at)) is not None:
            self._at = number.end()
            return read_json(number[0])
        word = self._name()
        if word not in _WORDS:
            raise ValueError(f"{word} is no value")
        return _WORDS[word]

    def _items(self, end: str, depth: int) -> list[Any]:
        found: list[Any] = []
        while not self._have(end):
            if found:
                self._need(",")
                if self._have(end):
                    break
            found.append(self._value(depth + 1))
        return found

    def _string(self) -> str:
        if self._raw and self._text.startswith(self._raw, self._at):
            start = self._at + len(self._raw)
            end = self._text.index(self._raw, start)
            self._at = end + len(self._raw)
            return self._text[start:end]
        quote, parts = self._text[self._at], list[str]()
        plain = re.compile(rf"[^{quote}\\]*")
        self._at += 1
        while True:
            match = plain.match(self._text, self._at)
            assert match is not None
            parts.append(match[0])
            self._at = match.end() + 1
            sign = self._text[match.end() : self._at]
            if sign != "\\":
                break
            parts.append(self._escaped())
        if sign != quote:
            raise ValueError("a string does not end")
        return "".join(parts).encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def _escaped(self) -> str:
        char = self._text[self._at : self._at + 1]
        self._at += 1
        if char in _DIGITS:
            digits = self._text[self._at : self._at + _DIGITS[char]]
            self._at += len(digits)
            if not re.fullmatch(r"[0-9a-fA-F]{2,8}", digits):
                raise ValueError("an escape has no digits")
            return chr(int(digits, 16))
        return _ESCAPES.get(char, char)

    def _name(self) -> str:
        self._peek()
        match = _NAME.match(self._text, self._at)
        if match is None:
            raise ValueError("a name is missing")
        self._at = match.end()
        return match[0]

    def _peek(self) -> str:
        while self._at < len(self._text) and self._text[self._at].isspace():
            self._at += 1
        return self._text[self._at : self._at + 1]

    def _have(self, sign: str) -> bool:
        if self._peek() != sign:
            return False
        self._at += 1
        return True

    def _need(self, sign: str) -> None:
        if not self._have(sign):
            raise ValueError(f"{sign} is missing")


def written(arguments: Mapping[str, Any] | Sequence[Any]) -> str:
    """Arguments as JSON. Raises `ValueError` for numbers that JSON does not have."""
    return json.dumps(arguments, ensure_ascii=False, allow_nan=False)
