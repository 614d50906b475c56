"""parsing: converts the bytes of a body to a JSON object, and that to a validated record, or raises an error.

Stricter than `json`, so that a proxy and this server cannot read one document differently: UTF-8 without a byte order
mark, no duplicate keys, no NaN or Infinity, no unpaired surrogates, nothing after the end. msgspec parses, and refuses
all of these except duplicate keys, of which it keeps the last.

Always true:
  * a body makes at most twice `Limits.values` strings and `Limits.containers` lists and objects, and no list of more
    numbers than a prompt may have: they are counted in its bytes before it is parsed. What else it may hold, numbers
    and constants in many lists, takes some ten times its bytes.
"""

import re
from codecs import BOM_UTF8
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError

from kvcellar.errors import PromptTooLong
from kvcellar.serve.http.api_errors import ApiError, invalid
from kvcellar.serve.http.json_text import printable

# What a field must be, in terms of JSON, by pydantic's name of the error.
MUST: Mapping[str, str] = {
    "bool_type": "be true or false",
    "dict_type": "be an object",
    "finite_number": "be a finite number",
    "float_type": "be a number",
    "greater_than_equal": "be at least {ge}",
    "int_type": "be an integer",
    "less_than_equal": "be at most {le}",
    "list_type": "be an array",
    "literal_error": "be {expected}",
    "model_type": "be an object",
    "none_required": "be null",
    "string_type": "be a string",
    "too_long": "have at most {max_length} items",
    "too_short": "not be empty",
    "value_error": "{error}",  # what a validator says
}

Body = TypeVar("Body", bound=BaseModel)
Fields = dict[str, object]  # a body
NO_OBJECT, TWICE = "this is JSON, but no object", "an object has a key twice"
_UNCOUNTED = bytes(set(range(256)) - set(b'"[]{}:,'))


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a whole body, far above what requests need. The limits of each field are checked later."""

    context: int  # token ids of a prompt
    values: int = 100_000  # of all kinds, except integers in lists
    containers: int = 2**14  # lists and objects
    items: int = 2**14  # of a list that is not a prompt; keys of an object
    depth: int = 64


def parse_object(raw: bytes | bytearray, limits: Limits) -> Fields:
    """`raw` as a JSON object. Raises `ApiError` 400 and `PromptTooLong`."""
    if raw.startswith(BOM_UTF8):
        raise _malformed("it begins with a byte order mark")
    outside = outside_strings(raw, limits)
    try:
        if b"," * limits.items in outside:
            _check_lists(raw, outside, limits)
        value = msgspec.json.decode(raw)
    except UnicodeDecodeError:
        raise _malformed("a string is not UTF-8") from None
    except msgspec.ValidationError as error:
        no_object = str(error).startswith("Expected `object`")  # of the first call; the second one takes any value
        raise _malformed(NO_OBJECT if no_object else "a number is out of range") from None
    except msgspec.DecodeError as error:
        raise _malformed(str(error).removeprefix("JSON is malformed: ")) from None
    except RecursionError:
        raise _malformed("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise _malformed(NO_OBJECT)
    found = _Contents(limits)
    found.add_keys(value)
    for field, inner in value.items():
        found.add(inner, field, 2)
    if found.keys != outside.count(b":"):
        raise _malformed(TWICE)
    return value


def outside_strings(raw: bytes | bytearray, limits: Limits) -> bytes:
    """The brackets, colons and commas outside strings: a colon for each key, duplicates too. Raises `ApiError` if there
    are more strings, or lists and objects, than `limits` allow; where `raw` is not JSON, those up to its first error
    are counted."""
    if b"\\" in raw:
        raw = raw.replace(b"\\\\", b"").replace(b'\\"', b"")  # what is left of `"` begins and ends strings
    marks = raw.translate(None, _UNCOUNTED)
    if marks.count(b'"') > 4 * limits.values:  # a key and a value have two each
        raise _too_many(f"the body has more than {limits.values} values")
    outside = b"".join(marks.split(b'"')[::2])
    if outside.count(b"[") + outside.count(b"{") > limits.containers:
        raise _too_many(f"the body has more than {limits.containers} lists and objects")
    return outside


def _check_lists(raw: bytes | bytearray, outside: bytes, limits: Limits) -> None:
    """Raises if a list has too many items that are no lists and objects, one after the other."""
    for field, part in msgspec.json.decode(raw, type=dict[str, msgspec.Raw]).items():
        commas = map(len, re.findall(rb",+", outside_strings(bytes(part), limits)))
        _check_length(max(commas, default=0) + 1, field, limits)
    if b"," * max(limits.context, limits.items) in outside:  # in no field: in one that another with its name replaces
        raise _malformed(TWICE)


class _Contents:
    """Counts what a body holds, and raises if it is more than `limits` allow."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.values = self.keys = 0

    def add(self, value: Any, field: str, depth: int) -> None:
        """`value` is in `field` of the body, in `depth` - 1 containers."""
        if not isinstance(value, list | dict):
            return
        if depth > self._limits.depth:
            raise _malformed("it is nested too deeply")
        if isinstance(value, dict):
            self.add_keys(value)
            inner = value.values()
        else:
            _check_length(len(value), field, self._limits)
            inner = [one for one in value if type(one) is not int]
            self._add_values(len(inner))
        for one in inner:
            self.add(one, field, depth + 1)

    def add_keys(self, value: Fields) -> None:
        if len(value) > self._limits.items:
            raise _too_many(f"an object has more than {self._limits.items} keys")
        self.keys += len(value)
        self._add_values(len(value))

    def _add_values(self, count: int) -> None:
        self.values += count
        if self.values > self._limits.values:
            raise _too_many(f"the body has more than {self._limits.values} values")


def _check_length(length: int, field: str, limits: Limits) -> None:
    """Raises if a list in `field` is longer than any field, or any prompt, may be."""
    if field == "prompt" and length > max(limits.context, limits.items):
        raise PromptTooLong(length, limits.context, "the model's context", at_least=True)
    if field != "prompt" and length > limits.items:
        field = printable(field)
        raise _too_many(f"{field} has a list of more than {limits.items} items", field)


def validated(kind: type[Body], fields: Fields) -> Body:
    """`fields` as a record of `kind`. Raises `ApiError` 400 for the first invalid field."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        param = printable(_path(first["loc"]))
        match first["type"]:
            case "extra_forbidden":
                raise unknown_parameter(param) from None
            case "missing":
                raise ApiError(400, f"{param} is required", param, "missing_required_parameter") from None
            case kind_of_error:
                must = MUST.get(kind_of_error, "have another value").format_map(_in_json(first.get("ctx", {})))
                raise invalid(param, f"{param} must {must}") from None


def unknown_parameter(name: str) -> ApiError:
    param = printable(name)
    return ApiError(400, f"unknown parameter: {param}; leave it out", param, "unknown_parameter")


def _in_json(context: Mapping[str, object]) -> dict[str, object]:
    """The context of a validation error, with its allowed values written as JSON."""
    expected = str(context.get("expected")).replace("'", '"').replace("False", "false")
    return {**context, "expected": expected}


def _path(loc: tuple[int | str, ...]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")


def _malformed(why: str) -> ApiError:
    return ApiError(400, f"the body must be a JSON object: {why}", code="invalid_json")


def _too_many(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param, "too_many_values")
