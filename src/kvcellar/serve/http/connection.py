"""connection: an HTTP/1 connection with time limits, a limit on connections, and errors in the API's format.

Extends uvicorn's protocol class, which parses HTTP with h11.

Always true:
  * there is room for the connection, or it is being closed (see `room`);
  * a connection without a running request has a timer, ours or uvicorn's for idle ones, that closes it;
  * a connection whose client does not read has a timer that aborts it and drops unsent data;
  * at most `READ` bytes of one connection are parsed at a time on the event loop, or `READ_OF_BODY` of a body of known
    length, in which nothing is parsed; a connection over its CPU budget is parsed from a queue, and nothing more is
    read from it meanwhile (see `event_loop`).
"""

import asyncio
import selectors
import sys
import time
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any, cast

import h11
import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from kvcellar.serve.http.api_errors import ApiError, overloaded
from kvcellar.serve.http.event_loop import CpuBudget, ParseQueue
from kvcellar.serve.http.middleware import headers_too_large
from kvcellar.serve.http.request_log import RequestLog, new_id
from kvcellar.serve.http.room import Room
from kvcellar.serve.http.sending import ADMIT, WRITE
from kvcellar.serve.http.strict_http import StrictConnection
from kvcellar.serve.settings import ServeSettings

READ, READ_OF_BODY = 2 * 2**10, 32 * 2**10  # bytes
ACCEPTED = 64  # connections that are accepted before other tasks of the event loop run


class ServeConfig(uvicorn.Config):
    """uvicorn's configuration, from `ServeSettings`. It configures no logging; the command line does."""

    def __init__(self, app: ASGIApp, settings: ServeSettings) -> None:
        super().__init__(
            cast(Any, app),
            http=Connection,
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=ACCEPTED,  # asyncio accepts up to as many at once; the server sets the length of the queue itself
            timeout_keep_alive=settings.idle_seconds,
            timeout_graceful_shutdown=cast(int, settings.drain_seconds),  # asyncio accepts fractions
        )
        self.serve = settings
        self.parse_queue = ParseQueue()
        self.receive_buffer = memoryview(bytearray(READ_OF_BODY))  # of all connections: its bytes are copied at once
        self.room = Room[Connection](settings.max_connections)


class Timer:
    """Calls `call` once, `seconds` after `start`. Starting a running timer changes nothing."""

    def __init__(self, seconds: float, call: Callable[[], None]) -> None:
        self._seconds = seconds
        self._call = call
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        if self._handle is None:
            self._handle = asyncio.get_running_loop().call_later(self._seconds, self._expire)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _expire(self) -> None:
        self._handle = None
        self._call()


class Connection(H11Protocol, asyncio.BufferedProtocol):
    """Received data is parsed a few bytes at a time, because a chunk of one byte costs as much as one of thousands."""

    def __init__(
        self,
        config: ServeConfig,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn = StrictConnection(config.serve.max_header_bytes)
        self._application: Any = self.app
        self.app = self._run  # type: ignore[assignment]
        self._buffer = config.receive_buffer
        self._settings, self._queue, self._room = config.serve, config.parse_queue, config.room
        self._budget = CpuBudget()
        self._read_timer = Timer(config.serve.header_seconds, self._read_timeout)
        self._write_timer = Timer(config.serve.write_seconds, self._abort)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._read_timer.start()
        if (closed := self._room.enter(self, self.client[0] if self.client else "")) is not None:
            closed.make_room()

    @property
    def idle(self) -> bool:
        return not self._request_running

    def make_room(self) -> None:
        """Close for another connection, at once: what is not sent by now is dropped."""
        self._read_timer.stop()
        if self.conn.their_state is h11.IDLE and self.cycle is None:  # it has got no response yet
            message = f"{self._settings.max_connections} connections are open already; try again later"
            self._send_error(overloaded(message))
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer[: max(READ, min(self.conn.body_left, READ_OF_BODY))]

    def buffer_updated(self, nbytes: int) -> None:
        data = bytes(self._buffer[:nbytes])
        if self._budget.used_up:
            self.transport.pause_reading()
            self._queue.add(partial(self._parse_queued, data))
        else:
            self._parse(data)

    def _parse_queued(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._parse(data)
        if not self.flow.read_paused:
            self.transport.resume_reading()

    def _parse(self, data: bytes) -> None:
        began = time.thread_time()
        self.data_received(data)
        self._budget.spend(time.thread_time() - began)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._request_running:
            self._read_timer.stop()
        else:
            self._read_timer.start()

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application, which may write parts of a stream without h11, whose state they do not change, and says
        when the request has the key that it needs."""
        scope["extensions"] = {WRITE: partial(self._write_part, self.cycle), ADMIT: partial(self._room.admit, self)}
        await self._application(scope, receive, send)

    def _write_part(self, cycle: RequestResponseCycle, data: bytes) -> bool:
        """See `WRITE`."""
        if (
            self.flow.write_paused
            or cycle.disconnected
            or cycle.response_complete
            or self.conn.our_state is not h11.SEND_BODY
            or cast(bytes, self.conn.their_http_version) < b"1.1"  # whose responses have no chunks
        ):
            return False
        if data:
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._room.leave(self)
        self._read_timer.stop()
        self._write_timer.stop()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer.start()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._write_timer.stop()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._write_timer.start()  # closing waits for unsent data, forever if the client does not read

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls this when h11 raises. Once a response has begun, no error can be sent."""
        error = sys.exception()
        if isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == 431:
            self._send_error(headers_too_large(self._settings))
        else:
            self._send_error(ApiError(400, "this is not a valid HTTP request", code="invalid_http"))

    @property
    def _request_running(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _read_timeout(self) -> None:
        if self._unread():
            self._read_timer.start()
        elif not self._request_running:
            message = f"a whole request did not arrive within {self._settings.header_seconds:g} seconds"
            self._send_error(ApiError(408, message, code="request_timeout"))

    def _unread(self) -> bool:
        """Whether something has arrived that this process has not read yet: then it is late, and not the client."""
        if not self.transport.is_reading():
            return True
        with selectors.DefaultSelector() as selector:
            selector.register(self.transport.get_extra_info("socket"), selectors.EVENT_READ)
            return bool(selector.select(0))

    def _abort(self) -> None:
        if self._request_running:
            RequestLog.of(cast(Any, self.cycle.scope)).set_error(499, "client_too_slow")
        self.transport.abort()

    def _send_error(self, error: ApiError) -> None:
        """Send a response without the application, if none has begun, and close."""
        if self.transport.is_closing():
            return
        running = self._request_running
        request = RequestLog.of(cast(Any, self.cycle.scope)) if running else RequestLog(new_id())
        request.set_error(error.status, error.code)
        if not running:  # otherwise the middleware writes the line when the application has ended
            request.write()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            path: str = cast(Any, self.cycle.scope)["path"] if running else ""  # unknown before the head is complete
            self._write_response(error.response(path), request.request_id)
        if running:  # the application waits for a body that will not arrive
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()
        self._write_timer.start()

    def _write_response(self, response: Response, request_id: str) -> None:
        headers = [*response.raw_headers, (b"connection", b"close"), (b"x-request-id", request_id.encode())]
        reason = HTTPStatus(response.status_code).phrase.encode()  # some clients show nothing else of an error
        start = h11.Response(status_code=response.status_code, headers=headers, reason=reason)
        for event in (start, h11.Data(data=bytes(response.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
