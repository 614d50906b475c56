"""strict_http: h11, without what it accepts beyond the grammar of RFC 9112.

A proxy in front of this server and the server itself must find the same end of every request: where they do not, a
client can put a request of its own into the connection of another one. So whatever a recipient may either repair or
refuse is refused here, with 400, and the connection is closed.

Always true of a request that `StrictConnection` returns:
  * every line of its head and of its trailers ended with CRLF, was no continuation of the one before, and had no
    control character but the tab;
  * its version is 1.0 or 1.1; one of 1.0 has no Transfer-Encoding;
  * it has one Content-Length, a single number, or one Transfer-Encoding, or neither.
"""

import re

import h11
from h11._receivebuffer import ReceiveBuffer

_BARE = re.compile(rb"(?<!\r)\n|\r(?!\n|\Z)")  # LF or CR alone
_LINE = re.compile(rb"[\x21-\x7e\x80-\xff][\t\x20-\x7e\x80-\xff]*")
_LENGTH = re.compile(rb"content-length:[ \t]*[0-9]+[ \t]*", re.IGNORECASE)
_CHUNK = re.compile(rb"[0-9A-Fa-f]{1,16}(;[\t\x20-\x7e\x80-\xff]*)?\r\n")  # 16 digits: a number of 64 bits
_VERSIONS = b"1.0", b"1.1"
_FRAMING = b"content-length", b"transfer-encoding"


class StrictConnection(h11.Connection):
    """The server's side of one connection. `next_event` raises `h11.RemoteProtocolError` for what is refused.
    `body_left` are the bytes of a body of known length that were not returned yet; 0 of a body in chunks."""

    def __init__(self, max_incomplete_event_size: int) -> None:
        super().__init__(h11.SERVER, max_incomplete_event_size)
        self._receive_buffer = StrictBuffer()  # h11 has no parameter for it
        self.body_left = 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        if isinstance(event, h11.Request):
            coded = any(name == b"transfer-encoding" for name, _ in event.headers)
            if event.http_version not in _VERSIONS or (coded and event.http_version == b"1.0"):
                raise h11.RemoteProtocolError("not HTTP/1.1, or a transfer coding without it")
            lengths = [int(value) for name, value in event.headers if name == b"content-length"]
            self.body_left = lengths[0] if lengths and not coded else 0
        elif isinstance(event, h11.Data) and self.body_left:
            self.body_left -= len(event.data)
        return event

    def send(self, event: h11.Event) -> bytes | None:  # type: ignore[override]
        """A response to a client that waits to be asked for the body closes the connection: nothing tells whether the
        body follows, or the next request."""
        if isinstance(event, h11.Response) and self.they_are_waiting_for_100_continue:
            headers = [*event.headers.raw_items(), (b"connection", b"close")]
            event = h11.Response(status_code=event.status_code, headers=headers, reason=event.reason)
        return super().send(event)


class StrictBuffer(ReceiveBuffer):
    """What was received and not parsed yet. h11 calls `maybe_extract_lines` for a head and for the trailers of a
    chunked body, and `maybe_extract_next_line` for the first line of a chunk. What they raise becomes a
    `RemoteProtocolError` there."""

    def maybe_extract_lines(self) -> list[bytearray] | None:
        if not self._data.startswith(b"\r\n"):  # else there are no lines
            searched = max(0, self._multiple_lines_search - 1)
            if (end := self._data.find(b"\r\n\r\n", searched)) >= 0:
                _check_lines(self._data[:end].split(b"\r\n"))
            elif _BARE.search(self._data, searched) is not None:  # refused before the rest is waited for
                raise h11.LocalProtocolError("a line does not end with CRLF")
        return super().maybe_extract_lines()

    def maybe_extract_next_line(self) -> bytearray | None:
        line = super().maybe_extract_next_line()
        if line is not None and _CHUNK.fullmatch(line) is None:
            raise h11.LocalProtocolError("illegal chunk header")
        return line


def _check_lines(lines: list[bytearray]) -> None:
    framing = 0
    for line in lines:
        if _LINE.fullmatch(line) is None:
            raise h11.LocalProtocolError("illegal characters, a continued line, or one that does not end with CRLF")
        if (name := line.partition(b":")[0].lower()) in _FRAMING:
            framing += 1
            if name == b"content-length" and _LENGTH.fullmatch(line) is None:
                raise h11.LocalProtocolError("bad Content-Length")
    if framing > 1:
        raise h11.LocalProtocolError("more than one Content-Length or Transfer-Encoding")
