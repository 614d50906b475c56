"""body: receives the body of a request, within limits on its length, its time, and the memory of all bodies together.

Always true:
  * the bytes of all bodies, and what is kept of them in another form, fit in the budget, not counting the first
    `SHORT_BODY` bytes of each: a share is given back when the bytes that it stands for are free.

Besides, uvicorn holds up to 96 KiB of each connection that were not asked for yet, and each thread that parses holds
one body as text and as objects.
"""

import asyncio
import threading
from collections.abc import AsyncIterator

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from kvcellar.serve.http.api_errors import ApiError, ClientDisconnected, overloaded
from kvcellar.serve.http.json_text import printable
from kvcellar.serve.settings import ServeSettings

SHORT_BODY = 16 * 2**10  # bytes


class BodyBudget:
    """Counts the bytes of bodies that are in memory. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used = limit, 0
        self._lock = threading.Lock()

    def reserve(self, size: int) -> None:
        """Raises `ApiError` 503 if the budget is exceeded."""
        with self._lock:
            if self.used + size > self.limit:
                raise overloaded("the bodies of other requests fill the memory for them; try again later")
            self.used += size

    def release(self, size: int) -> None:
        with self._lock:
            self.used -= size
            assert self.used >= 0, "more bytes were released than reserved"


class RequestBody:
    """One body and its share of the budget. The bytes are freed, and the share released, when the body was read, or at
    the end of the request; but not while a thread reads it."""

    def __init__(self, budget: BodyBudget) -> None:
        self.data = bytearray()
        self._budget = budget
        self._reserved = 0
        self._lock = threading.Lock()  # orders the end of the request and the thread
        self._in_thread = self._ended = False

    def add(self, data: bytes) -> None:
        """Raises `ApiError` 503 if the budget is exceeded."""
        more = max(0, len(self.data) + len(data) - SHORT_BODY) - self._reserved
        self._budget.reserve(more)
        self._reserved += more
        self.data += data

    def enter_thread(self) -> None:
        self._in_thread = True

    def leave_thread(self) -> None:
        with self._lock:
            self._in_thread = False
            if self._ended:
                self._free()

    @property
    def long(self) -> bool:
        return len(self.data) > SHORT_BODY

    def keep(self, size: int) -> None:
        """It was read, and no thread reads it. `size` bytes of it stay in memory in another form, until `release`."""
        with self._lock:
            self._free(max(0, size - SHORT_BODY))

    def release(self) -> None:
        """It is not needed any more: it was read, or its request has ended."""
        with self._lock:
            self._ended = True
            if not self._in_thread:
                self._free()

    def _free(self, kept: int = 0) -> None:
        self.data = bytearray()
        kept = min(kept, self._reserved)
        self._budget.release(self._reserved - kept)
        self._reserved = kept


async def receive_json(scope: Scope, receive: Receive, settings: ServeSettings, body: RequestBody) -> None:
    """Receive the whole body into `body`. Raises `ApiError` 408, 413, 415 or 503, and `ClientDisconnected`.

    The rest of a body that is too long is received and discarded by the connection, so that the client reads the error.
    """
    headers = Headers(scope=scope)
    if (coding := headers.get("content-encoding", "identity").strip().lower()) != "identity":
        raise ApiError(415, f"Content-Encoding {printable(coding, 40)} is not supported; send the body uncompressed")
    kinds = headers.getlist("content-type")
    if not _is_json(kinds) and not _any_type(scope, headers):
        raise ApiError(415, "the body must be JSON in UTF-8; send it with Content-Type: application/json")
    declared = headers.get("content-length", "0")  # h11 has checked that there is one, and that it is a number
    if int(declared) > settings.max_body_bytes:
        raise _too_large(settings)
    try:
        async with asyncio.timeout(settings.body_seconds):
            await _collect(receive, settings, body)
    except TimeoutError:
        message = f"the body did not arrive within {settings.body_seconds:g} seconds"
        raise ApiError(408, message, code="request_timeout", headers={"connection": "close"}) from None


async def _collect(receive: Receive, settings: ServeSettings, body: RequestBody) -> None:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        data = message.get("body", b"")
        if len(body.data) + len(data) > settings.max_body_bytes:
            raise _too_large(settings)
        body.add(data)
        if not message.get("more_body", False):
            return


def _is_json(content_types: list[str]) -> bool:
    if len(content_types) != 1:
        return False
    kind, *parameters = (part.strip().lower() for part in content_types[0].split(";"))
    return kind == "application/json" and all(p in ("", "charset=utf-8", 'charset="utf-8"') for p in parameters)


def _any_type(scope: Scope, headers: Headers) -> bool:
    """Ollama's clients may send no content type, or the one that curl sends with `-d`. A page of another site could
    send such a body without asking first, but its browser names the site in these headers."""
    return scope["path"].startswith("/api/") and not {"origin", "sec-fetch-site"} & set(headers.keys())


def _too_large(settings: ServeSettings) -> ApiError:
    message = f"the body is longer than {settings.max_body_bytes} bytes, which is the limit of this server"
    return ApiError(413, message, code="request_too_large")


async def next_part(parts: AsyncIterator[bytes], seconds: float, what: str) -> bytes | None:
    """The next part of a body that is too large to be held; None after the last. Raises `ApiError` 408 if none arrives
    in time, and `ClientDisconnected`."""
    try:
        async with asyncio.timeout(seconds):
            return await anext(parts, None)
    except TimeoutError:
        message = f"no part of the {what} arrived within {seconds:g} seconds"
        raise ApiError(408, message, code="request_timeout", headers={"connection": "close"}) from None
    except ClientDisconnect:
        raise ClientDisconnected from None
