"""client: requests to a running server, with the standard library only; and the subcommands that are one (ps, stop)."""

import http.client
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import click

from kvcellar.cli.options import Command
from kvcellar.cli.printing import table
from kvcellar.errors import BadRequest, KvcellarError
from kvcellar.progress import rounded

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
        from kvcellar.serve.http.keys import admin_key  # imports the server, which --help does not need

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


COLUMNS = ("NAME", "ID", "SIZE", "SHARED", "PROCESSOR", "CONTEXT", "UNTIL")
SHORT_ID = 12  # characters of a digest
FOREVER = timedelta(days=36500)


@click.command("ps", cls=Command, epilog="Example: kvcellar ps --url http://127.0.0.1:8080")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@server_options
def ps_command(as_json: bool, url: str, admin_key_file: Path | None) -> None:
    """List the models that a running server has loaded, with the bytes that they take and when they are unloaded.

    SHARED are the bytes that other models use, too: models of the library that have the same weights."""
    found = AdminClient(url, admin_key_file).get("/api/ps")
    click.echo(json.dumps(found) if as_json else models_table(found["models"], datetime.now(UTC)))


def models_table(models: list[dict[str, Any]], now: datetime) -> str:
    return table([COLUMNS, *(_row(one, now) for one in models)])


def _row(one: dict[str, Any], now: datetime) -> tuple[str, ...]:
    processor = "100% GPU" if one["size_vram"] else "100% CPU"
    until = _until(datetime.fromisoformat(one["expires_at"]) - now)
    shared = rounded(one["shared_size"]) if one.get("shared_size") else "-"  # an Ollama server sends none
    name, digest = one["name"], one["digest"][:SHORT_ID] or "-"
    return name, digest, rounded(one["size"]), shared, processor, str(one["context_length"]), until


def _until(left: timedelta) -> str:
    if left > FOREVER:
        return "forever"
    minutes, seconds = divmod(max(0, round(left.total_seconds())), 60)
    hours, minutes = divmod(minutes, 60)
    parts = [f"{count} {unit}" for count, unit in ((hours, "h"), (minutes, "min"), (seconds, "s")) if count]
    return " ".join(parts[:2]) or "now"


@click.command("stop", cls=Command, epilog="Example: kvcellar stop my-model")
@click.argument("name")
@server_options
def stop_command(name: str, url: str, admin_key_file: Path | None) -> None:
    """Let a running server unload the model NAME when its requests have ended. The next request loads it again.

    Models that were named in the command line of the server stay.
    """
    AdminClient(url, admin_key_file).post("/api/generate", {"model": name, "keep_alive": 0})
