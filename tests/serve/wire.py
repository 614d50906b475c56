"""Help for the tests of this room: what is in an answer, and HTTP by hand."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from kvcellar.serve import Server

MODEL = "cellar/fake-1"
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


def completion(prompt: object = "hello", **fields: object) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, **fields}


def chat(content: object = "hello", **fields: object) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error of an answer, after a check that it has the API's shape, whole and alone."""
    assert answer.headers["content-type"] == "application/json", answer.text
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    expected = "server_error" if answer.status_code >= 500 else "invalid_request_error"
    assert body["error"]["type"] == expected
    return body["error"]


def lines_of(stream: str) -> list[str]:
    """The `data` of a stream, in order; other lines (pings) are left out."""
    return [line.removeprefix("data: ") for line in stream.split("\n") if line.startswith("data: ")]


def chunks_of(stream: str) -> list[dict[str, Any]]:
    """The chunks of a stream that ended well."""
    *chunks, last = lines_of(stream)
    assert last == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]


@contextmanager
def connected(server: Server, seconds: float = 10.0) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), seconds) as wire:
        yield wire


def request(path: str, body: object = None, *headers: str, method: str | None = None) -> bytes:
    """A request as bytes. Headers that are given replace those of the same name."""
    data = b"" if body is None else json.dumps(body).encode()
    found = {"host": "Host: localhost"}
    if body is not None:
        found |= {"content-type": "Content-Type: application/json", "content-length": f"Content-Length: {len(data)}"}
    found |= {line.partition(":")[0].lower(): line for line in headers}
    first = f"{method or ('GET' if body is None else 'POST')} {path} HTTP/1.1"
    return "\r\n".join([first, *found.values(), "", ""]).encode("latin-1") + data


def read_answer(wire: socket.socket) -> tuple[int, bytes]:
    """Status and body of one answer with a Content-Length."""
    head = b""
    while b"\r\n\r\n" not in head:
        got = wire.recv(65536)
        assert got, f"the connection closed after {head!r}"
        head += got
    head, _, body = head.partition(b"\r\n\r\n")
    lengths = [line.partition(b":")[2] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")]
    while len(body) < int(lengths[0]):
        body += wire.recv(65536)
    return int(head.split()[1]), body[: int(lengths[0])]


def read_to_end(wire: socket.socket) -> bytes:
    """Whatever comes until the server closes."""
    found = b""
    while True:
        try:
            got = wire.recv(65536)
        except ConnectionResetError:
            return found
        if not got:
            return found
        found += got
