"""name_patterns: regular expressions of files that are not trusted, matched against names of modules.

Python's own matcher can take time exponential in the length of a name. Here the set of all ends of a match is computed
for each part of a pattern and each position of the name, once: the time is polynomial, and `Effort` bounds it. Patterns
are parsed by Python's own parser; back references, flags and atomic groups are refused.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kvcellar.errors import ModelRefused, shown

MOST = 10_000  # characters of a pattern
EFFORT = 20_000_000  # ends of parts of patterns that are found for one adapter; a few seconds
_REPEATS = frozenset("*+?{")
_parser: Any = re._parser  # pyright: ignore[reportAttributeAccessIssue] - the only parser of these patterns
_op: Any = re._constants  # pyright: ignore[reportAttributeAccessIssue]
_CHARACTERS = (_op.LITERAL, _op.NOT_LITERAL, _op.ANY, _op.IN)


@dataclass(slots=True)
class Effort:
    """How many ends of parts may still be found, of all patterns that have it."""

    left: int = EFFORT


class NamePattern:
    """A pattern of names. Raises `ModelRefused` where it is no pattern, or not a supported one."""

    def __init__(self, pattern: str, what: str, effort: Effort) -> None:
        """`what` names the field that has it."""
        self._pattern, self._what, self._effort = pattern, what, effort
        if len(pattern) > MOST:
            raise ModelRefused(f"{what} has a pattern of {len(pattern)} characters; {MOST} are allowed")
        try:
            self._plain = None if _REPEATS & set(pattern) else re.compile(pattern)
            _supported(self._parts, self)
        except (re.error, RecursionError, OverflowError, ValueError) as error:
            raise ModelRefused(f"{what}: {shown(pattern)} is not a regular expression: {error}") from error

    def matches(self, name: str) -> bool:
        """Whether the pattern matches all of a name, or what follows one of its dots."""
        return self._matches(name, (0, *(at + 1 for at, char in enumerate(name) if char == ".")))

    def fullmatch(self, name: str) -> bool:
        """Whether the pattern matches all of a name."""
        return self._matches(name, (0,))

    def _matches(self, name: str, starts: Iterable[int]) -> bool:
        if self._plain is not None:
            return any(self._plain.fullmatch(name, at) is not None for at in starts)
        ends = _Ends(name, self._effort)
        try:
            return any(len(name) in ends.of(self._parts, at) for at in starts)
        except TimeoutError:
            raise ModelRefused(f"{self._what}: {shown(self._pattern)} takes too long to match. Simplify it") from None

    @cached_property
    def _parts(self) -> Any:
        parsed = _parser.parse(self._pattern)
        if parsed.state.flags & ~re.UNICODE:
            self.refuse("flags")
        return parsed

    def refuse(self, what: str) -> None:
        raise ModelRefused(f"{self._what}: {shown(self._pattern)} has {what}, which are not supported")


def _supported(parts: Iterable[Any], pattern: NamePattern) -> None:
    for op, value in parts:
        if op in (_op.MAX_REPEAT, _op.MIN_REPEAT):
            _supported(value[2], pattern)
        elif op is _op.SUBPATTERN:
            if value[1] or value[2]:
                pattern.refuse("flags")
            _supported(value[3], pattern)
        elif op is _op.BRANCH:
            for branch in value[1]:
                _supported(branch, pattern)
        elif op in (_op.ASSERT, _op.ASSERT_NOT):
            _supported(value[1], pattern)
        elif op not in (*_CHARACTERS, _op.AT):
            pattern.refuse("back references or atomic groups")


class _Ends:
    """Where matches of the parts of one pattern end in one name."""

    def __init__(self, name: str, effort: Effort) -> None:
        self._name, self._effort = name, effort
        self._known: dict[tuple[int, int], frozenset[int]] = {}  # by identity of the parts, and the start
        self._stops: dict[int, list[int]] = {}  # of parts that are one character: the first position without it

    def of(self, parts: Any, start: int) -> frozenset[int]:
        """The ends of all matches of parts in a row that begin at `start`."""
        key = id(parts), start
        if key not in self._known:
            at = frozenset({start})
            for op, value in parts:
                at = frozenset(end for one in at for end in self._one(op, value, one))
            self._known[key] = at
        found = self._known[key]
        self._effort.left -= 1 + len(found)
        if self._effort.left < 0:
            raise TimeoutError
        return found

    def _one(self, op: Any, value: Any, at: int) -> Iterable[int]:
        if op in (_op.MAX_REPEAT, _op.MIN_REPEAT):
            least, most, repeated = value
            return self._repeated(least, most, repeated, at)
        if op is _op.SUBPATTERN:
            return self.of(value[3], at)
        if op is _op.BRANCH:
            return [end for branch in value[1] for end in self.of(branch, at)]
        if op is _op.AT:
            return (at,) if _AT[value](self._name, at) else ()
        if op in (_op.ASSERT, _op.ASSERT_NOT):
            direction, ahead = value
            return (at,) if self._looks(direction, ahead, at) == (op is _op.ASSERT) else ()
        return (at + 1,) if at < len(self._name) and _is(op, value, self._name[at]) else ()

    def _repeated(self, least: int, most: Any, parts: Any, start: int) -> Iterable[int]:
        """Among more repeats than the name has characters one is empty, so that still more change nothing."""
        if len(parts) == 1 and parts[0][0] in _CHARACTERS:
            stop = self._stop(parts)[start]
            return range(start + least, min(stop, start + int(most)) + 1)
        at, found, n = frozenset({start}), set[int](), len(self._name) + 1
        for count in range(min(int(most), n) + 1):
            if count >= min(least, n):
                found |= at
            at = frozenset(end for one in at for end in self.of(parts, one))
        return found

    def _stop(self, parts: Any) -> list[int]:
        """For each position, the first one from there on that has another character."""
        if id(parts) not in self._stops:
            stops, (op, value) = [len(self._name)] * (len(self._name) + 1), parts[0]
            for at in reversed(range(len(self._name))):
                stops[at] = stops[at + 1] if _is(op, value, self._name[at]) else at
            self._stops[id(parts)] = stops
        return self._stops[id(parts)]

    def _looks(self, direction: int, parts: Any, at: int) -> bool:
        if direction > 0:
            return bool(self.of(parts, at))
        return any(at in self.of(parts, start) for start in range(at + 1))


def _is(op: Any, value: Any, char: str) -> bool:
    if op is _op.ANY:
        return char != "\n"
    if op is _op.IN:
        negated = value[0][0] is _op.NEGATE
        return negated != any(_is(kind, of, char) for kind, of in value[negated:])
    if op is _op.RANGE:
        return value[0] <= ord(char) <= value[1]
    if op is _op.CATEGORY:
        return _CATEGORIES[value](char)
    return (ord(char) == value) == (op is _op.LITERAL)


def _word(char: str) -> bool:
    return char.isalnum() or char == "_"


def _boundary(name: str, at: int) -> bool:
    return (at > 0 and _word(name[at - 1])) != (at < len(name) and _word(name[at]))


_CATEGORIES: Mapping[Any, Callable[[str], bool]] = {
    _op.CATEGORY_DIGIT: str.isdecimal,
    _op.CATEGORY_NOT_DIGIT: lambda char: not char.isdecimal(),
    _op.CATEGORY_SPACE: str.isspace,
    _op.CATEGORY_NOT_SPACE: lambda char: not char.isspace(),
    _op.CATEGORY_WORD: _word,
    _op.CATEGORY_NOT_WORD: lambda char: not _word(char),
}
_AT: Mapping[Any, Callable[[str, int], bool]] = {
    _op.AT_BEGINNING: lambda name, at: at == 0,
    _op.AT_BEGINNING_STRING: lambda name, at: at == 0,
    _op.AT_END: lambda name, at: at == len(name),
    _op.AT_END_STRING: lambda name, at: at == len(name),
    _op.AT_BOUNDARY: _boundary,
    _op.AT_NON_BOUNDARY: lambda name, at: not _boundary(name, at),
}
