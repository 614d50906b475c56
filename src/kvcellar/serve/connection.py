"""connection: HTTP/1 for clients that do not behave.

uvicorn speaks the protocol. Added here: every refusal has the API's shape; a request must arrive, and an answer be
read, within limits of time; there is a limit on connections.

Always true:
  * a connection without a running request has a timer, ours or uvicorn's for idle ones, at whose end it closes;
  * a connection whose client does not read has a timer, at whose end it is cut, with whatever was still to be sent;
  * no turn of the event loop parses more than `READ` bytes of one connection; what costs much CPU time waits for its
    turn, and nothing is read meanwhile (see `turns`).
"""

import asyncio
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from kvcellar.serve.failures import RETRY_SECONDS, ApiError
from kvcellar.serve.guard import headers_too_large
from kvcellar.serve.record import Record, new_id
from kvcellar.serve.settings import ServeSettings
from kvcellar.serve.turns import Allowance, Turns

READ = 2 * 2**10  # bytes


class ServeConfig(uvicorn.Config):
    """uvicorn's settings, from ours. It configures no logging: that is the command line's."""

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
            h11_max_incomplete_event_size=settings.max_header_bytes,
            timeout_keep_alive=settings.idle_seconds,
            timeout_graceful_shutdown=cast(int, settings.drain_seconds),  # asyncio takes fractions, too
        )
        self.serve = settings
        self.turns = Turns()


class Timer:
    """Calls once, `seconds` after it was set; setting it again while it runs changes nothing."""

    def __init__(self, seconds: float, call: Callable[[], None]) -> None:
        self._seconds = seconds
        self._call = call
        self._handle: asyncio.TimerHandle | None = None

    def set(self) -> None:
        if self._handle is None:
            self._handle = asyncio.get_running_loop().call_later(self._seconds, self._ring)

    def clear(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _ring(self) -> None:
        self._handle = None
        self._call()


class Connection(H11Protocol, asyncio.BufferedProtocol):
    """What has arrived is taken `READ` bytes at a time: a chunk of one byte costs as much as one of thousands."""

    def __init__(
        self,
        config: ServeConfig,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._settings, self._turns = config.serve, config.turns
        self._allowance = Allowance()
        self._arrived = bytearray(READ)
        self._arrival = Timer(config.serve.header_seconds, self._too_slow)
        self._unread = Timer(config.serve.write_seconds, self._cut)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._settings.max_connections:
            message = f"{self._settings.max_connections} connections are open already; try again later"
            self._refuse(ApiError(503, message, code="overloaded", headers={"retry-after": RETRY_SECONDS}))
        else:
            self._arrival.set()

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._arrived

    def buffer_updated(self, nbytes: int) -> None:
        data = bytes(self._arrived[:nbytes])
        if self._allowance.used_up:
            self.transport.pause_reading()
            self._turns.wait(partial(self._parse_in_turn, data))
        else:
            self._parse(data)

    def _parse_in_turn(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._parse(data)
        if not self.flow.read_paused:
            self.transport.resume_reading()

    def _parse(self, data: bytes) -> None:
        began = time.thread_time()
        self.data_received(data)
        self._allowance.spend(time.thread_time() - began)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._answering:
            self._arrival.clear()
        else:
            self._arrival.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._arrival.clear()
        self._unread.clear()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread.set()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread.clear()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._unread.set()  # closing waits for what is still to be sent, for ever if nobody reads it

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls this where h11 has raised. In the middle of an answer nothing can be said any more."""
        error = sys.exception()
        if isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == 431:
            self._refuse(headers_too_large(self._settings))
        else:
            self._refuse(ApiError(400, "this is not a valid HTTP request", code="invalid_http"))

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _too_slow(self) -> None:
        if not self._answering:
            message = f"a whole request did not arrive within {self._settings.header_seconds:g} seconds"
            self._refuse(ApiError(408, message, code="request_timeout"))

    def _cut(self) -> None:
        if self._answering:
            Record.of(cast(Any, self.cycle.scope)).refused(499, "client_too_slow")
        self.transport.abort()

    def _refuse(self, error: ApiError) -> None:
        """Respond without an application, if that is still possible, and close."""
        if self.transport.is_closing():
            return
        record = Record.of(cast(Any, self.cycle.scope)) if self._answering else Record(new_id())
        record.refused(error.status, error.code)
        if not self._answering:  # else the application writes the line, when it has ended
            record.write()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            response = error.response()
            headers = [*response.raw_headers, (b"connection", b"close"), (b"x-request-id", record.request_id.encode())]
            start = h11.Response(status_code=error.status, headers=headers)
            for event in (start, h11.Data(data=bytes(response.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        if self._answering:  # the application waits for a body that cannot come any more
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()
        self._unread.set()
