"""values: the kinds of values that parameters and settings have: how each is checked, and its JSON Schema.

Always true of what `check` returns: plain ints, floats and strings in range, in immutable containers of its own. A
subclass of int or float, whose comparisons may be overridden, becomes the plain type.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn, cast

from kvcellar.errors import BadRequest, shown

MOST, UNBOUNDED = 2**31 - 1, 2**63 - 1
MOST_DEPTH = 64  # drafts of a completion in a step
Json = dict[str, Any]


class Kind:
    """A kind of values."""

    def check(self, name: str, value: Any) -> Any:
        """A copy of `value`. Raises `BadRequest` about the parameter `name`."""
        raise NotImplementedError

    def from_json(self, name: str, value: Any) -> Any:
        """What `check` takes, of a value that was sent as JSON. Raises `BadRequest`."""
        return value

    def schema(self) -> Json:
        """A JSON Schema of what `from_json` takes."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Whole(Kind):
    low: int
    high: int = MOST

    def check(self, name: str, value: Any) -> int:
        plain = int.__int__(value) if isinstance(value, int) and not isinstance(value, bool) else None
        if plain is None or not self.low <= plain <= self.high:
            bounds = f"of at least {self.low}" if self.high == UNBOUNDED else f"from {self.low} to {self.high}"
            raise BadRequest(f"{name} must be a whole number {bounds}, not {sent(value)}", name)
        return plain

    def schema(self) -> Json:
        return {"type": "integer", "minimum": self.low, "maximum": self.high}


@dataclass(frozen=True, slots=True)
class Real(Kind):
    low: float
    high: float
    above: bool = False  # `low` itself is not allowed

    def check(self, name: str, value: Any) -> float:
        """NaN is between no two numbers."""
        plain = float.__float__(value) if isinstance(value, float) else value
        if type(plain) not in (int, float) or not self.low <= plain <= self.high or (self.above and plain == self.low):
            allowed = f"{'above' if self.above else 'from'} {self.low:g} to {self.high:g}"
            raise BadRequest(f"{name} must be a finite number {allowed}, not {sent(value)}", name)
        return float(plain)

    def schema(self) -> Json:
        return {"type": "number", "exclusiveMinimum" if self.above else "minimum": self.low, "maximum": self.high}


class Flag(Kind):
    def check(self, name: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise BadRequest(f"{name} must be true or false, not {sent(value)}", name)
        return value

    def schema(self) -> Json:
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True)
class Text(Kind):
    most: int  # characters
    least: int = 0

    def check(self, name: str, value: Any) -> str:
        if not isinstance(value, str) or not self.least <= len(value) <= self.most:
            allowed = f"a string of {self.least} to {self.most} characters"
            raise BadRequest(f"{name} must be {allowed}, not {sent(value)}", name)
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise BadRequest(
                f"{name} is not Unicode text: half of a surrogate pair at character {error.start}", name
            ) from None
        return str.__str__(value)

    def schema(self) -> Json:
        return {"type": "string", "minLength": self.least, "maxLength": self.most}


@dataclass(frozen=True, slots=True)
class Items(Kind):
    """A list. With `alone`, one item may stand for a list of it."""

    item: Kind
    most: int
    what: str  # the items are
    least: int = 0
    alone: bool = False

    def check(self, name: str, value: Any) -> tuple[Any, ...]:
        items: Any = (value,) if self.alone and isinstance(value, str) else value
        if not isinstance(items, list | tuple) or not self.least <= len(items) <= self.most:
            found = f", not of {len(items)}" if isinstance(items, list | tuple) else f", not {sent(value)}"
            raise BadRequest(f"{name} must be a list of {self.least} to {self.most} {self.what}{found}", name)
        if self.item == TOKEN and set(map(type, items)) == {int} and min(items) >= 0 and max(items) <= MOST:
            return tuple(items)  # a long list, checked in C
        return tuple(self.item.check(name, one) for one in items)

    def schema(self) -> Json:
        item = self.item.schema()
        listed = {"type": "array", "items": item, "minItems": self.least, "maxItems": self.most}
        return {"anyOf": [item, listed]} if self.alone else listed


@dataclass(frozen=True, slots=True)
class Pair(Kind):
    first: Kind
    second: Kind
    what: str

    def check(self, name: str, value: Any) -> tuple[Any, Any]:
        if not isinstance(value, list | tuple) or len(value) != 2:
            raise BadRequest(f"{name} must be a pair: {self.what}", name)
        return self.first.check(name, value[0]), self.second.check(name, value[1])

    def schema(self) -> Json:
        both = [self.first.schema(), self.second.schema()]
        return {"type": "array", "prefixItems": both, "minItems": 2, "maxItems": 2}


@dataclass(frozen=True, slots=True)
class Pairs(Kind):
    """A mapping, or a list of pairs. As JSON, an object where keys are numbers, else the list."""

    pair: Pair
    most: int
    what: str  # a value must do

    def check(self, name: str, value: Any) -> Mapping[Any, Any]:
        pairs = list(value.items()) if isinstance(value, Mapping) else value
        if not isinstance(value, Mapping) and (self._named or not isinstance(value, list | tuple)):
            raise BadRequest(f"{name} must {self.what}, not {sent(value)}", name)
        if len(pairs) > self.most:
            raise BadRequest(f"{name} has {len(pairs)} entries; {self.most} are allowed", name)
        return MappingProxyType(dict(self.pair.check(name, one) for one in pairs))

    @property
    def _named(self) -> bool:
        return isinstance(self.pair.first, Whole)

    def from_json(self, name: str, value: Any) -> Any:
        if self._named and isinstance(value, dict):
            return {self._number(name, key): one for key, one in cast("dict[str, Any]", value).items()}
        if self._named or not isinstance(value, list):
            raise BadRequest(f"{name} must {self.what}, not {sent(value)}", name)
        return value

    def _number(self, name: str, key: str) -> int:
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise BadRequest(f"{name} must {self.what}; {shown(key)} is not a token id", name)
        return int(key)

    def schema(self) -> Json:
        if not self._named:
            return {"type": "array", "items": self.pair.schema(), "maxItems": self.most}
        values = {"propertyNames": {"pattern": "^[0-9]{1,10}$"}, "additionalProperties": self.pair.second.schema()}
        return {"type": "object", **values, "maxProperties": self.most}


TOKEN = Whole(0)


def deeper(value: Any, most: int) -> bool:
    """Are lists and objects within each other more than `most` levels deep?"""
    level: list[Any] = [value]
    for _ in range(most):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return False
    return True


def _inside(value: Any) -> Sequence[Any]:
    if isinstance(value, Mapping):
        return tuple(cast("Mapping[Any, Any]", value).values())
    return cast("Sequence[Any]", value) if isinstance(value, list | tuple) else ()


def no_number(name: str) -> NoReturn:
    """For `parse_constant` of `json.loads`: NaN and infinity are not JSON."""
    raise ValueError(f"{name} is no number of JSON")


def sent(value: object) -> str:
    """A value as the request has it: None and booleans as in JSON."""
    return json.dumps(value) if value is None or isinstance(value, bool) else shown(value)
