"""json_reader: an incremental JSON parser that lets other threads run. `json` holds the interpreter lock throughout.

`json` parses single strings, numbers and constants, and up to a thousand integers of a list at once; this file parses
the structure around them, and the thread sleeps in between (`Pace`). The grammar is that of `json`, except that
duplicate keys, NaN, Infinity, unpaired surrogates and anything after the end are errors.

Always true:
  * between two sleeps at most one string or `RUN` integers are parsed;
  * no more values are kept than `Limits` allow.
"""

import json
import re
from dataclasses import dataclass
from typing import Any, NoReturn

from kvcellar.errors import PromptTooLong
from kvcellar.pace import Pace
from kvcellar.serve.api_errors import ApiError
from kvcellar.serve.json_text import printable

RUN = 1000  # integers
TOO_MANY = "too_many_values"
_SPACE = re.compile(r"[ \t\n\r]*+")
_NUMBERS = re.compile(r"(?:-?(?:0|[1-9][0-9]{0,18})[ \t\n\r]*+,[ \t\n\r]*+){1,1000}+")  # RUN of them


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a whole body, far above what requests need. The limits of each field are checked later."""

    context: int  # token ids of a prompt
    values: int = 100_000  # of all kinds, except integers in lists
    containers: int = 2**14  # lists and objects
    items: int = 2**14  # of a list that is not a prompt; keys of an object
    depth: int = 64


class Malformed(ValueError):
    """Not JSON, or JSON that is not accepted here."""


def read(text: str, limits: Limits) -> Any:
    """The value of `text`. Raises `Malformed`, and `ApiError` or `PromptTooLong` if it exceeds `limits`."""
    return JsonReader(text, limits).read()


class JsonReader:
    """Parses one document. Open containers are on a stack, the innermost last."""

    def __init__(self, text: str, limits: Limits) -> None:
        self._text, self._limits = text, limits
        self._at = 0
        self._open: list[list[Any] | dict[str, Any]] = []
        self._values = self._containers = 0
        self._surrogates = "\\ud" in text or "\\uD" in text  # then each string is checked for unpaired surrogates
        self._decoder = json.JSONDecoder(parse_constant=_no_constant)
        self._pace = Pace()

    def read(self) -> Any:
        self._skip()
        root = self._value()
        while self._open:
            self._pace.pause()
            inner = self._open[-1]
            (self._member if isinstance(inner, dict) else self._item)(inner)  # type: ignore[operator]
        self._skip()
        if self._at != len(self._text):
            raise self._wrong("there is text after the end")
        return root

    def _value(self) -> Any:
        """The value that begins at the current character. A container is pushed on the stack, empty."""
        self._values += 1
        if self._values > self._limits.values:
            raise ApiError(400, f"the body has more than {self._limits.values} values", code=TOO_MANY)
        char = self._char()
        if char not in ("[", "{"):
            return self._scalar()
        if len(self._open) == self._limits.depth:
            raise self._wrong("it is nested too deeply")
        self._containers += 1
        if self._containers > self._limits.containers:
            raise ApiError(400, f"the body has more than {self._limits.containers} lists and objects", code=TOO_MANY)
        inner: list[Any] | dict[str, Any] = [] if char == "[" else {}
        self._open.append(inner)
        self._step()
        return inner

    def _item(self, items: list[Any]) -> None:
        """Parse the next item of a list and the integers before it, or the end of the list."""
        if self._ends("]", empty=not items):
            return
        while (found := _NUMBERS.match(self._text, self._at)) is not None:
            items += json.loads(f"[{found[0][: found[0].rindex(',')]}]")
            self._at = found.end()
            self._check_length(items)
            self._pace.pause()
        items.append(self._value())
        self._check_length(items)

    def _member(self, members: dict[str, Any]) -> None:
        """Parse the next key and value of an object, or its end."""
        if self._ends("}", empty=not members):
            return
        if self._char() != '"':
            raise self._wrong("a key is expected")
        key = self._scalar()
        if key in members:
            raise Malformed(f"the key {key[:80]!r} appears twice")
        if len(members) == self._limits.items:
            raise ApiError(400, f"an object has more than {self._limits.items} keys", code=TOO_MANY)
        self._skip()
        if self._char() != ":":
            raise self._wrong("a colon is expected")
        self._step()
        members[key] = self._value()
        self._skip()

    def _ends(self, bracket: str, *, empty: bool) -> bool:
        """After a value or an opening bracket: whether the container ends here. If not, skips the comma."""
        self._skip()
        char = self._char()
        if char == bracket:
            self._open.pop()
            self._step()
            return True
        if not empty:
            if char != ",":
                raise self._wrong(f"a comma or {bracket} is expected")
            self._step()
        return False

    def _check_length(self, items: list[Any]) -> None:
        """Raises if a list is longer than any field, or any prompt, may be."""
        root = self._open[0]
        field = next(reversed(root)) if isinstance(root, dict) else None
        if field == "prompt" and len(items) > max(self._limits.context, self._limits.items):
            raise PromptTooLong(len(items), self._limits.context, "the model's context", at_least=True)
        if field != "prompt" and len(items) > self._limits.items:
            where = "the body" if field is None else printable(field)
            message = f"{where} has a list of more than {self._limits.items} items"
            raise ApiError(400, message, where if field else None, TOO_MANY)

    def _scalar(self) -> Any:
        value, self._at = self._decoder.raw_decode(self._text, self._at)
        if self._surrogates and isinstance(value, str):
            value.encode("utf-8")
        return value

    def _char(self) -> str:
        """The current character; empty at the end."""
        return self._text[self._at : self._at + 1]

    def _step(self) -> None:
        """Skip one character and the whitespace after it."""
        self._at += 1
        self._skip()

    def _skip(self) -> None:
        found = _SPACE.match(self._text, self._at)
        assert found is not None
        self._at = found.end()

    def _wrong(self, what: str) -> Malformed:
        return Malformed(f"{what} at character {self._at}")


def _no_constant(name: str) -> NoReturn:
    raise Malformed(f"{name} is not JSON")
