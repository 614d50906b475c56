"""body: from the bytes of a request to a checked record, or to a refusal that names the field.

Stricter than `json`, because a server and what stands before it must not read one document in two ways: UTF-8 without a
mark at its start, every key once, no NaN or Infinity, no half surrogates, nothing behind the end.
"""

import asyncio
import json
import re
from typing import NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from kvcellar.serve.failures import ApiError, ClientGone, printable
from kvcellar.serve.settings import ServeSettings

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")

Body = TypeVar("Body", bound=BaseModel)


async def receive_json(scope: Scope, receive: Receive, settings: ServeSettings) -> bytes:
    """The whole body. Raises `ApiError` 408, 413 or 415, and `ClientGone`.

    A body that is too long is not read to its end here: the connection throws away what still comes, so that the client
    gets to read the refusal.
    """
    headers = Headers(scope=scope)
    if (coding := headers.get("content-encoding", "identity").strip().lower()) != "identity":
        raise ApiError(415, f"send the body as it is, not with Content-Encoding {printable(coding, 40)}")
    if not _is_json(headers.getlist("content-type")):
        raise ApiError(415, "the body must be JSON in UTF-8; send it with Content-Type: application/json")
    declared = headers.get("content-length", "0")  # h11 has checked that it is a number, and the only one
    if int(declared) > settings.max_body_bytes:
        raise _too_long(settings)
    try:
        async with asyncio.timeout(settings.body_seconds):
            return await _collect(receive, settings)
    except TimeoutError:
        message = f"the body did not arrive within {settings.body_seconds:g} seconds"
        raise ApiError(408, message, code="request_timeout", headers={"connection": "close"}) from None


def parse_object(raw: bytes) -> dict[str, object]:
    """The JSON object that `raw` holds. Raises `ApiError` 400."""
    try:
        text = raw.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_each_key_once, parse_constant=_no_constant)
        if _SURROGATE.search(text):  # pairs are fine, and only a look at the result tells them from halves
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise _malformed(f"byte {error.start} is not UTF-8") from None
    except UnicodeEncodeError:
        raise _malformed("a string has half of a surrogate pair") from None
    except RecursionError:
        raise _malformed("it is nested too deeply") from None
    except ValueError as error:
        raise _malformed(printable(str(error))) from None
    if not isinstance(value, dict):
        raise _malformed("it must be an object")
    return value


def validated(kind: type[Body], fields: dict[str, object]) -> Body:
    """`fields` as a record of `kind`. Raises `ApiError` 400 for the first field that is wrong."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        param = printable(_path(first["loc"]))
        match first["type"]:
            case "extra_forbidden":
                raise ApiError(400, f"unknown parameter: {param}", param, "unknown_parameter") from None
            case "missing":
                raise ApiError(400, f"{param} is required", param, "missing_required_parameter") from None
            case _:
                raise ApiError(400, f"{param}: {first['msg']}", param, "invalid_value") from None


async def _collect(receive: Receive, settings: ServeSettings) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        if len(body) > settings.max_body_bytes:
            raise _too_long(settings)
        if not message.get("more_body", False):
            return bytes(body)


def _is_json(content_types: list[str]) -> bool:
    if len(content_types) != 1:
        return False
    kind, *parameters = (part.strip().lower() for part in content_types[0].split(";"))
    return kind == "application/json" and all(p in ("", "charset=utf-8", 'charset="utf-8"') for p in parameters)


def _each_key_once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} is there twice")
        found[key] = value
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _path(loc: tuple[int | str, ...]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")


def _malformed(why: str) -> ApiError:
    return ApiError(400, f"the body is not the JSON object that this route takes: {why}", code="invalid_json")


def _too_long(settings: ServeSettings) -> ApiError:
    return ApiError(413, f"the body is longer than {settings.max_body_bytes} bytes", code="request_too_large")
