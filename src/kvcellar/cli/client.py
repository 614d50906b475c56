"""client: requests to the admin routes of a running server, with the standard library only."""

import http.client
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import click

from kvcellar.errors import BadRequest, KvcellarError

F = TypeVar("F", bound=Callable[..., Any])
URL = "http://127.0.0.1:8080"
CONNECT = 10.0  # seconds
PART = 2**20  # bytes that are read at once
ADVICE = {
    401: "Name a file with it with --admin-key-file, or set $KVCELLAR_ADMIN_KEY.",
    404: "A server has admin routes only if it was started with an admin key (`kvcellar serve --admin-key-file`).",
}


def server_options(function: F) -> F:
    """Adds the options that name a running server."""
    for option in (
        click.option(
            "--admin-key-file",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            help="File with the admin key of the server. Default: $KVCELLAR_ADMIN_KEY.",
        ),
        click.option("--url", default=URL, show_default=True, help="Address of the server."),
    ):
        function = option(function)
    return function


class AdminClient:
    """One server. Raises `KvcellarError` with its message for an error of the server, `BadRequest` for an address that
    is none."""

    def __init__(self, url: str, admin_key_file: Path | None, *, advice: str = "") -> None:
        """`advice` is added to the error where no server can be reached."""
        self._advice = f"Is the server running? {advice}".rstrip()
        self._parts = urlsplit(url if "//" in url else f"//{url}", scheme="http")
        if self._parts.scheme not in ("http", "https") or not self._parts.hostname:
            raise BadRequest(f"{url!r} is not an address like {URL}", "url")
        from kvcellar.serve.keys import admin_key  # imports the server, which --help does not need

        key = admin_key(admin_key_file, os.environ)
        self._headers = {"authorization": f"Bearer {key}"} if key else {}

    def get(self, path: str) -> Any:
        return self._json("GET", path)

    def post(self, path: str, body: Any) -> Any:
        return self._json("POST", path, json.dumps(body).encode())

    def download(self, path: str) -> Iterator[bytes]:
        with self._answered("POST", path, b"{}") as response:
            while part := response.read(PART):
                yield part

    def upload(self, path: str, parts: Iterator[bytes]) -> Any:
        with self._answered("POST", path, parts, "application/x-tar") as response:
            return json.loads(response.read())

    def _json(self, method: str, path: str, body: bytes | None = None) -> Any:
        with self._answered(method, path, body) as response:
            return json.loads(response.read())

    @contextmanager
    def _answered(
        self, method: str, path: str, body: bytes | Iterator[bytes] | None, kind: str = "application/json"
    ) -> Iterator[http.client.HTTPResponse]:
        parts = self._parts
        made = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = made(parts.hostname or "", parts.port, timeout=CONNECT)
        try:
            connection.connect()
            connection.sock.settimeout(None)  # work on a large cache takes its time
            headers = self._headers | ({"content-type": kind} if body is not None else {})
            chunked = body is not None and not isinstance(body, bytes)
            connection.request(method, parts.path.rstrip("/") + path, body, headers, encode_chunked=chunked)
            response = connection.getresponse()
            if response.status != 200:
                raise _error(response, path)
            yield response
        except (OSError, http.client.HTTPException) as error:
            raise KvcellarError(f"{parts.netloc}: {error or type(error).__name__}. {self._advice}") from error
        finally:
            connection.close()


class ServerLoading(KvcellarError):
    """The server loads its models; it will answer when it has."""


def _error(response: http.client.HTTPResponse, path: str) -> KvcellarError:
    code = None
    try:
        found = json.loads(response.read())["error"]
        message = found if isinstance(found, str) else found["message"]
        code = None if isinstance(found, str) else found.get("code")
    except (ValueError, KeyError, TypeError):
        message = response.reason
    if code == "loading_model":
        return ServerLoading(message)
    advice = "" if response.status == 404 and not path.startswith("/admin/") else ADVICE.get(response.status, "")
    return KvcellarError(f"{message}. {advice}".rstrip(". ") + ".")
