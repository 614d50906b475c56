"""Helpers for tests of the server: parsing responses, and HTTP on raw sockets."""

import json
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from kvcellar.serve import Server
from tests.serve.fake_engine import PATIENCE

MODEL = "cellar/fake-1"
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
PING = b"\n1\r\n\n\r\n"  # a chunk that is an empty line, behind another chunk or the headers


def completion(prompt: object = "hello", **fields: object) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, **fields}


def chat(content: object = "hello", **fields: object) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error of a response, after a check of its format."""
    assert response.headers["content-type"] == "application/json", response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    expected = "server_error" if response.status_code >= 500 else "invalid_request_error"
    assert body["error"]["type"] == expected
    return body["error"]


def lines_of(stream: str) -> list[str]:
    """The `data` lines of a stream, without empty lines."""
    return [line.removeprefix("data: ") for line in stream.split("\n") if line.startswith("data: ")]


def chunks_of(stream: str) -> list[dict[str, Any]]:
    """The chunks of a successful stream."""
    *chunks, last = lines_of(stream)
    assert last == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]


class Wire:
    """A connection with a buffer of received data."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), PATIENCE)
        self._kept = b""

    def sendall(self, data: bytes) -> None:
        self._socket.sendall(data)

    def recv(self) -> bytes:
        """b"" when the server has closed."""
        if self._kept:
            got, self._kept = self._kept, b""
            return got
        try:
            return self._socket.recv(65536)
        except ConnectionResetError:
            return b""

    def keep(self, data: bytes) -> None:
        self._kept = data + self._kept

    def close(self, *, reset: bool = False) -> None:
        """Close; with `reset` by a TCP reset, as when a process with unread data is killed."""
        if reset:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()


@contextmanager
def connected(server: Server) -> Iterator[Wire]:
    wire = Wire(server.port)
    try:
        yield wire
    finally:
        wire.close()


def request(path: str, body: object = None, *headers: str, method: str | None = None) -> bytes:
    """A request as bytes. `headers` replace default headers of the same name."""
    data = b"" if body is None else json.dumps(body).encode()
    found = {"host": "Host: localhost"}
    if body is not None:
        found |= {"content-type": "Content-Type: application/json", "content-length": f"Content-Length: {len(data)}"}
    found |= {line.partition(":")[0].lower(): line for line in headers}
    first = f"{method or ('GET' if body is None else 'POST')} {path} HTTP/1.1"
    return "\r\n".join([first, *found.values(), "", ""]).encode("latin-1") + data


def read_until(wire: Wire, mark: bytes) -> bytes:
    """Received data up to the end of `mark`."""
    found = b""
    while mark not in found:
        got = wire.recv()
        assert got, f"the connection closed before {mark!r}, after {found!r}"
        found += got
    before, _, after = found.partition(mark)
    wire.keep(after)
    return before + mark


def read_response(wire: Wire) -> tuple[int, bytes]:
    """Status and body of one response with a Content-Length."""
    head = read_until(wire, b"\r\n\r\n")
    (length,) = (int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
    body = b""
    while len(body) < length:
        got = wire.recv()
        assert got, f"the connection closed within a body, after {body!r}"
        body += got
    wire.keep(body[length:])
    return int(head.split()[1]), body[:length]


def read_to_end(wire: Wire) -> bytes:
    """All data until the server closes."""
    found = b""
    while got := wire.recv():
        found += got
    return found
