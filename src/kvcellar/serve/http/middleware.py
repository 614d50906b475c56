"""middleware: checks every request before it is routed, and turns every exception into a response.

Checks, in this order: too many or too long headers (431), a Host header that does not name this server (403), no valid
API key (401), shutdown, or models that are still loaded (503). Routes below `/admin/`, and those that change the
library, need an admin key instead, if the server has any. Unknown routes are checked too, so a client without a key
cannot find out which routes exist. The routes of `health` need no key, and are served during startup and shutdown;
pages that are mounted need no key either. CORS headers are sent to the origins of the settings only, so a web page of
another one cannot read a response; and as bodies need the content type JSON, it cannot send a request that has an
effect.

Every response has the API's format and an `x-request-id`, which Anthropic's clients read as `request-id`; every request
has one line in the log (`request_log`). A key is sent as `Authorization: Bearer KEY`, or as `x-api-key: KEY`.
"""

import asyncio
import logging
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvcellar.errors import KvcellarError
from kvcellar.serve.admin.health import OPEN
from kvcellar.serve.generation.records import Records
from kvcellar.serve.http.api_errors import ApiError, ClientDisconnected, api_error, shutting_down
from kvcellar.serve.http.request_log import RequestLog
from kvcellar.serve.http.sending import ADMIT
from kvcellar.serve.models.failed_loads import forget
from kvcellar.serve.settings import ServeSettings
from kvcellar.serve.shared import Mounted, Shared

log = logging.getLogger("kvcellar.serve")

Pairs = Sequence[tuple[bytes, bytes]]
EXPOSED = b"x-request-id, request-id, retry-after"
PREFLIGHT: Mapping[str, str] = {  # headers
    "access-control-allow-methods": "GET, HEAD, POST, DELETE",
    "access-control-allow-headers": "authorization, content-type, x-api-key",
    "access-control-max-age": "600",
    "vary": "Access-Control-Request-Headers",
}
_NAMES = re.compile(r"[A-Za-z0-9_-]+( *, *[A-Za-z0-9_-]+)*")  # of headers
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:@/\\\s]+)(:[0-9]{1,5})?")


class RequestMiddleware:
    """ASGI middleware. `ended` is called with each request, once it has ended."""

    def __init__(
        self,
        app: ASGIApp,
        server: Shared,
        records: Records | None,
        ended: Callable[[RequestLog], None],
        mounted: Mounted,
    ) -> None:
        self._app, self._server, self._settings = app, server, server.settings
        self._records, self._ended, self._mounted = records, ended, mounted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request, cors = RequestLog.of(scope), self._cors(scope)
        response = ResponseSend(send, request, partial(self._record, request), cors)
        try:
            self._check_head(scope)
            if len(cors) > 1 and _is_preflight(scope):  # it has no key; the request that it asks for is checked then
                await Response(status_code=204, headers=_preflight(scope))(scope, receive, response)
                return
            self._check(scope)
            await self._app(scope, receive, response)
        except ClientDisconnected:
            request.set_error(499, "client_gone")  # nginx's status for a client that has disconnected
        except (ApiError, KvcellarError) as error:
            forget(error)  # its functions had the body, for which the memory is given back now
            await self._send_error(api_error(error), scope, receive, response)
        except asyncio.CancelledError:
            await self._send_error(shutting_down(), scope, receive, response)
            raise
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # noqa: BLE001 -- a panic, too; logged without its message: it may quote a prompt
            where = "".join(traceback.format_tb(error.__traceback__))
            log.error("%s: unexpected %s\n%s", request.request_id, type(error).__name__, where)
            forget(error)
            await self._send_error(api_error(error), scope, receive, response)
        finally:
            request.write()
            self._record(request)
            self._ended(request)

    def _record(self, request: RequestLog) -> None:
        if self._records is not None:
            self._records.add(request)

    def _cors(self, scope: Scope) -> Pairs:
        """The headers that let the page read the response that sends the request."""
        if not self._settings.cors_origins:
            return ()
        vary, origins = (b"vary", b"Origin"), Headers(scope=scope).getlist("origin")
        if len(origins) != 1 or origins[0] not in self._settings.cors_origins:
            return (vary,)
        exposed = (b"access-control-expose-headers", EXPOSED)
        return vary, (b"access-control-allow-origin", origins[0].encode("latin-1")), exposed

    def _check_head(self, scope: Scope) -> None:
        raw = scope["headers"]
        size = sum(len(name) + len(value) + 4 for name, value in raw)
        if len(raw) > self._settings.max_headers or size > self._settings.max_header_bytes:
            raise headers_too_large(self._settings)
        headers = Headers(scope=scope)
        names = self._settings.hosts  # HTTP/1.0 allows a request without Host; browsers always send it
        if names is not None and not all(_name_of(host) in names for host in headers.getlist("host")):
            raise ApiError(403, "the header Host does not name this server", code="host_not_allowed")

    def _check(self, scope: Scope) -> None:
        if scope["path"] in OPEN:
            return
        page = self._mounted.is_open(scope)
        if not page:
            self._server.keys.check(scope, self._mounted.operated)
            scope.get("extensions", {}).get(ADMIT, _no_connection)()
        if self._server.drain.started:
            raise shutting_down()
        if not page:
            self._server.host.startup.refuse(named=True)

    async def _send_error(self, error: ApiError, scope: Scope, receive: Receive, response: "ResponseSend") -> None:
        """Sends nothing if a response has begun: a stream reports its own error, other responses are cut off."""
        response.request.set_error(error.status, error.code)
        if not response.started:
            await error.response(scope["path"])(scope, receive, response)


class ResponseSend:
    """An ASGI `send` that adds `x-request-id` and `more` to the headers and records the status. `ends` is called before
    the last part of the response is sent."""

    def __init__(self, send: Send, request: RequestLog, ends: Callable[[], None], more: Pairs) -> None:
        self._send, self._ends, self._more = send, ends, more
        self.request = request
        self.started = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started, self.request.status = True, message["status"]
            message["headers"] = [
                *message["headers"],
                *((name, self.request.request_id.encode()) for name in (b"x-request-id", b"request-id")),
                *self._more,
            ]
        elif not message.get("more_body", False):
            self._ends()
        await self._send(message)


def headers_too_large(settings: ServeSettings) -> ApiError:
    most = f"{settings.max_headers} headers of {settings.max_header_bytes} bytes together"
    message = f"the headers are too many or too long; at most {most} are allowed"
    return ApiError(431, message, code="headers_too_large", headers={"connection": "close"})


def _is_preflight(scope: Scope) -> bool:
    return scope["method"] == "OPTIONS" and "access-control-request-method" in Headers(scope=scope)


def _preflight(scope: Scope) -> Mapping[str, str]:
    """Packages of clients have headers of their own, and a page of this origin may send any."""
    wanted = Headers(scope=scope).get("access-control-request-headers", "")
    return {**PREFLIGHT, **({"access-control-allow-headers": wanted} if _NAMES.fullmatch(wanted) else {})}


def _no_connection() -> None:
    """In place of `ADMIT` where the application is called without a connection."""


def _name_of(host: str) -> str | None:
    """The name in a Host header, without its port; None if the header is malformed."""
    match = _HOST.fullmatch(host.strip().lower())
    return match[1] if match else None
