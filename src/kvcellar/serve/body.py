"""body: from the bytes of a request to a checked record, or to a refusal that names the field.

Stricter than `json`, because a server and what stands before it must not read one document in two ways: UTF-8 without a
mark at its start, every key once, no NaN or Infinity, no half surrogates, nothing behind the end.

Always true:
  * the bodies that are under way, each less its first `SHORT_BODY` bytes, take at most as many bytes as were set.
"""

import asyncio
import json
import sys
import threading
from codecs import BOM_UTF8
from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from kvcellar.errors import BadRequest
from kvcellar.serve.failures import RETRY_SECONDS, ApiError, ClientGone, printable
from kvcellar.serve.reader import Limits, Malformed, read
from kvcellar.serve.settings import ServeSettings

SHORT_BODY = 16 * 2**10  # bytes

# What a field must be, by pydantic's name of the error; in JSON's words, where pydantic uses Python's.
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


class Bodies:
    """Counts the bytes of bodies that are arriving, or wait to be read. Safe to use from several threads."""

    def __init__(self, most: int) -> None:
        self.most, self.taken = most, 0
        self._lock = threading.Lock()

    def take(self, size: int) -> None:
        """Raises `ApiError` 503."""
        with self._lock:
            if self.taken + size > self.most:
                message = "the bodies of other requests fill the memory for them; try again later"
                raise ApiError(503, message, code="overloaded", headers={"retry-after": RETRY_SECONDS})
            self.taken += size

    def give(self, size: int) -> None:
        with self._lock:
            self.taken -= size
            assert self.taken >= 0, "a body was given back twice"


class Arrival:
    """One body, and what of it is counted until nothing holds it any more: when its connection has `left`, unless it
    was `handed` to a thread that reads it; when that is `over`, then."""

    def __init__(self, bodies: Bodies) -> None:
        self.data, self.handed = bytearray(), False
        self._bodies = bodies
        self._counted = 0

    def add(self, data: bytes) -> None:
        """Raises `ApiError` 503 if there is too much of other requests."""
        more = max(0, len(self.data) + len(data) - SHORT_BODY) - self._counted
        self._bodies.take(more)
        self._counted += more
        self.data += data

    def left(self) -> None:
        if not self.handed:
            self.over()

    def over(self) -> None:
        self._bodies.give(self._counted)
        self._counted = 0


async def receive_json(scope: Scope, receive: Receive, settings: ServeSettings, arrival: Arrival) -> None:
    """The whole body, into `arrival`. Raises `ApiError` 408, 413, 415 or 503, and `ClientGone`.

    A body that is too long is not read to its end here: the connection throws away what still comes, so that the client
    gets to read the refusal.
    """
    headers = Headers(scope=scope)
    if (coding := headers.get("content-encoding", "identity").strip().lower()) != "identity":
        raise ApiError(415, f"Content-Encoding {printable(coding, 40)} is not supported; send the body uncompressed")
    if not _is_json(headers.getlist("content-type")):
        raise ApiError(415, "the body must be JSON in UTF-8; send it with Content-Type: application/json")
    declared = headers.get("content-length", "0")  # h11 has checked that it is a number, and the only one
    if int(declared) > settings.max_body_bytes:
        raise _too_long(settings)
    try:
        async with asyncio.timeout(settings.body_seconds):
            await _collect(receive, settings, arrival)
    except TimeoutError:
        message = f"the body did not arrive within {settings.body_seconds:g} seconds"
        raise ApiError(408, message, code="request_timeout", headers={"connection": "close"}) from None


def parse_object(raw: bytes | bytearray, limits: Limits) -> dict[str, object]:
    """The JSON object that `raw` holds. Raises `ApiError` 400 and `PromptTooLong`."""
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
    except ValueError:  # Python reads no longer numbers, and says so in its own words
        raise _malformed(f"a number has more than {sys.get_int_max_str_digits()} digits") from None
    if not isinstance(value, dict):
        raise _malformed("this is JSON, but no object")
    return value


def validated(kind: type[Body], fields: dict[str, object]) -> Body:
    """`fields` as a record of `kind`. Raises `ApiError` 400 for the first field that is wrong."""
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


async def _collect(receive: Receive, settings: ServeSettings, arrival: Arrival) -> None:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        data = message.get("body", b"")
        if len(arrival.data) + len(data) > settings.max_body_bytes:
            raise _too_long(settings)
        arrival.add(data)
        if not message.get("more_body", False):
            return


def _in_json(context: Mapping[str, object]) -> dict[str, object]:
    """The numbers and values of an error, with the values that are allowed written as in JSON."""
    expected = str(context.get("expected")).replace("'", '"').replace("False", "false")
    return {**context, "expected": expected}


def _is_json(content_types: list[str]) -> bool:
    if len(content_types) != 1:
        return False
    kind, *parameters = (part.strip().lower() for part in content_types[0].split(";"))
    return kind == "application/json" and all(p in ("", "charset=utf-8", 'charset="utf-8"') for p in parameters)


def _path(loc: tuple[int | str, ...]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")


def _malformed(why: str) -> ApiError:
    return ApiError(400, f"the body must be a JSON object: {why}", code="invalid_json")


def _too_long(settings: ServeSettings) -> ApiError:
    message = f"the body is longer than {settings.max_body_bytes} bytes, which is the limit of this server"
    return ApiError(413, message, code="request_too_large")
