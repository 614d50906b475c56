"""guard: stands before every route, known or not.

Always in this order: headers that are too many or too long (431), a Host that is not ours (403), no key or a wrong
one (401), a server that stops (503). Without a key no client learns which routes exist. There are no CORS headers at
all, so no web page of another origin reads a response; together with the JSON content type that bodies need, none can
make a request that does something.

Whatever happened behind it, a response has the API's own shape and an `x-request-id`, and the log has one line for the
request (`kvcellar.serve.record`).
"""

import asyncio
import hashlib
import hmac
import logging
import re
import traceback

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvcellar.errors import KvcellarError
from kvcellar.serve.drain import Drain
from kvcellar.serve.failures import ApiError, ClientGone, api_error, shutting_down
from kvcellar.serve.record import Record
from kvcellar.serve.settings import ServeSettings

log = logging.getLogger("kvcellar.serve")

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:@/\\\s]+)(:[0-9]{1,5})?")


class Guard:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, settings: ServeSettings, drain: Drain) -> None:
        self._app = app
        self._settings = settings
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = Record.of(scope)
        reply = Reply(send, record)
        try:
            self._admit(scope)
            await self._app(scope, receive, reply)
        except ClientGone:
            record.refused(499, "client_gone")  # nginx's number for a client that has left
        except (ApiError, KvcellarError) as error:
            await self._refuse(api_error(error), scope, receive, reply)
        except asyncio.CancelledError:
            await self._refuse(shutting_down(), scope, receive, reply)
            raise
        except Exception as error:  # noqa: BLE001 -- the last door: logged without its message, which may quote a prompt
            where = "".join(traceback.format_tb(error.__traceback__))
            log.error("%s: unexpected %s\n%s", record.request_id, type(error).__name__, where)
            await self._refuse(api_error(error), scope, receive, reply)
        finally:
            record.write()

    def _admit(self, scope: Scope) -> None:
        raw = scope["headers"]
        size = sum(len(name) + len(value) + 4 for name, value in raw)
        if len(raw) > self._settings.max_headers or size > self._settings.max_header_bytes:
            raise headers_too_large(self._settings)
        headers = Headers(scope=scope)
        names = self._settings.hosts  # HTTP/1.0 may come without a Host; a browser never does
        if names is not None and not all(_name_of(host) in names for host in headers.getlist("host")):
            raise ApiError(403, "the header Host does not name this server", code="host_not_allowed")
        if self._settings.key_digests and not self._knows(headers.getlist("authorization")):
            message = "a valid API key is needed: Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        if self._drain.begun:
            raise shutting_down()

    def _knows(self, authorizations: list[str]) -> bool:
        """Takes the same time whichever key is tried, and however much of it is right."""
        if len(authorizations) != 1:
            return False
        scheme, _, key = authorizations[0].partition(" ")
        digest = hashlib.sha256(key.strip().encode("latin-1")).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._settings.key_digests]
        return any(matches) and scheme.lower() == "bearer"

    async def _refuse(self, error: ApiError, scope: Scope, receive: Receive, reply: "Reply") -> None:
        """Once a response has begun nothing is added: a stream tells its own end, and what was cut off is closed."""
        reply.record.refused(error.status, error.code)
        if not reply.begun:
            await error.response()(scope, receive, reply)


class Reply:
    """`send`, with the request's id in the headers, and the status in its record."""

    def __init__(self, send: Send, record: Record) -> None:
        self._send = send
        self.record = record
        self.begun = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.begun, self.record.status = True, message["status"]
            message["headers"] = [*message["headers"], (b"x-request-id", self.record.request_id.encode())]
        await self._send(message)


def headers_too_large(settings: ServeSettings) -> ApiError:
    most = f"{settings.max_headers} headers of {settings.max_header_bytes} bytes together"
    message = f"the headers are too many or too long; at most {most} are allowed"
    return ApiError(431, message, code="headers_too_large", headers={"connection": "close"})


def _name_of(host: str) -> str | None:
    """The name in a Host header, without its port; None for what is no such header."""
    match = _HOST.fullmatch(host.strip().lower())
    return match[1] if match else None
