"""values: arguments that are not written as JSON: tagged text with a schema, Python's literals, unquoted keys."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from kvcellar.text.replies.json_scan import read_json

MOST_DEPTH = 60  # of lists and objects
_WORDS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}
_HEX = {"x": 2, "u": 4, "U": 8}


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
        if depth > MOST_DEPTH:
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
        if char in _HEX:
            digits = self._text[self._at : self._at + _HEX[char]]
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
