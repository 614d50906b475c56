"""parsing: converts the bytes of a body to a JSON object, and that to a validated record, or raises an error.

Stricter than `json`, so that a proxy and this server cannot read one document differently: UTF-8 without a byte order
mark, no duplicate keys, no NaN or Infinity, no unpaired surrogates, nothing after the end.
"""

import json
import sys
from codecs import BOM_UTF8
from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from kvcellar.errors import BadRequest
from kvcellar.serve.api_errors import ApiError
from kvcellar.serve.json_reader import Limits, Malformed, read
from kvcellar.serve.json_text import printable

# What a field must be, in terms of JSON, by pydantic's name of the error.
MUST: Mapping[str, str] = MappingProxyType(
    {
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
    }
)

Body = TypeVar("Body", bound=BaseModel)
Fields = dict[str, object]  # a body


def parse_object(raw: bytes | bytearray, limits: Limits) -> Fields:
    """`raw` as a JSON object. Raises `ApiError` 400 and `PromptTooLong`."""
    if raw.startswith(BOM_UTF8):
        raise _malformed("it begins with a byte order mark")
    try:
        value = read(raw.decode("utf-8"), limits)
    except UnicodeDecodeError as error:
        raise _malformed(f"byte {error.start} is not UTF-8") from None
    except UnicodeEncodeError:
        raise _malformed("a string has half of a surrogate pair") from None
    except BadRequest:
        raise
    except (Malformed, json.JSONDecodeError) as error:
        raise _malformed(printable(str(error))) from None
    except ValueError:  # the limit of Python on the digits of an integer
        raise _malformed(f"a number has more than {sys.get_int_max_str_digits()} digits") from None
    if not isinstance(value, dict):
        raise _malformed("this is JSON, but no object")
    return value


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
                raise ApiError(400, f"{param} must {must}", param, "invalid_value") from None


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
