"""client: requests to a running server, with the standard library only; and the subcommands that are one (ps, stop,
why)."""

import http.client
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import click

from kvcellar.cli.completion import library_models
from kvcellar.cli.config import gives_way
from kvcellar.cli.options import FILE, Command, json_option, together
from kvcellar.cli.printing import placement_lines, recall_lines, share, table
from kvcellar.cli.progress_line import working
from kvcellar.errors import BadRequest, KvcellarError
from kvcellar.progress import rounded

URL = "http://127.0.0.1:8080"
VARIABLE = "KVCELLAR_URL"
CONNECT = 10.0  # seconds
PART = 2**20  # bytes that are read at once
ADVICE = {
    401: "Name a file with it with --admin-key-file, or set $KVCELLAR_ADMIN_KEY.",
    404: "A server has admin routes only if it was started with an admin key (`kvcellar serve --admin-key-file`).",
}


# That name a running server.
server_options = together(
    click.option(
        "--url", envvar=VARIABLE, default=URL, show_default=True, help=f"Address of the server. Or set ${VARIABLE}."
    ),
    click.option(
        "--admin-key-file",
        type=FILE,
        callback=gives_way("KVCELLAR_ADMIN_KEY", "url"),
        help="File with the admin key of the server. Default: $KVCELLAR_ADMIN_KEY.",
    ),
)


class AdminClient:
    """One server. Raises `KvcellarError` with its message for an error of the server, `BadRequest` for an address that
    is none."""

    def __init__(self, url: str, admin_key_file: Path | None, *, advice: str = "") -> None:
        """`advice` is added to the error where no server can be reached."""
        self._advice = f"Is the server running there (--url, ${VARIABLE})? {advice}".rstrip()
        try:
            self._parts = urlsplit(url if "//" in url else f"//{url}", scheme="http")
            usable = self._parts.scheme in ("http", "https") and self._parts.hostname and self._parts.port != 0
        except ValueError:  # a port that is no number, or brackets that are no address
            usable = False
        if not usable:
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
            try:
                return json.loads(response.read())
            except ValueError as error:
                raise KvcellarError(f"{self._parts.netloc} does not answer as kvcellar does. {self._advice}") from error

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


# -- ps and stop ------------------------------------------------------------------------------------------------------


COLUMNS = ("NAME", "ID", "SIZE", "SHARED", "PROCESSOR", "CONTEXT", "UNTIL")
SHORT_ID = 12  # characters of a digest
FOREVER = timedelta(days=36500)


@click.command("ps", cls=Command, epilog="Example: kvcellar ps --url http://127.0.0.1:8080")
@json_option
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
@click.argument("name", shell_complete=library_models)
@server_options
def stop_command(name: str, url: str, admin_key_file: Path | None) -> None:
    """Let a running server unload the model NAME when its requests have ended. The next request loads it again.

    Models that were named in the command line of the server stay.
    """
    with working(f"waiting for requests of {name} to end"):
        AdminClient(url, admin_key_file).post("/api/generate", {"model": name, "keep_alive": 0})


# -- why -------------------------------------------------------------------------------------------------------------


@click.command("why", cls=Command, epilog="Example: kvcellar why chatcmpl-5f0c2b --admin-key-file admin.txt")
@click.argument("request", required=False)
@click.option("--limit", default=20, show_default=True, help="Without REQUEST: how many of the last requests to list.")
@json_option
@server_options
def why_command(request: str | None, limit: int, as_json: bool, url: str, admin_key_file: Path | None) -> None:
    """Print what the prompt of REQUEST read from memory, and why it was not more; what its drafts did; and of a
    cluster, which replicas were considered for it, by what, and how it moved. Each gateway has its own requests.

    REQUEST is the id of a response, or its header x-request-id; a running server has the last 1000, in its memory only.
    Without REQUEST, list the last ones.
    """
    client = AdminClient(url, admin_key_file, advice="Records of requests are in its memory only, and end with it.")
    if request is None:
        found = client.get(f"/admin/requests?limit={limit}")
        lines = map(_listed, found["requests"])
    else:
        found = client.get(f"/admin/requests/{quote(request, safe='')}")
        lines = _lines(found)
    click.echo(json.dumps(found) if as_json else "\n".join(lines))


def _listed(one: dict[str, Any]) -> str:
    tokens = f"{share(one['cached_tokens'] or 0, one['prompt_tokens'])} prompt tokens from memory"
    return f"{_time(one)} {one['id'] or one['request_id']}: {tokens}; {one['recall'] or one['outcome']}"


def _time(one: dict[str, Any]) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one["created"]))


def _lines(found: dict[str, Any]) -> Iterator[str]:
    name = found["id"] or found["request_id"]
    yield f"{name}: {found['route']}, {found['outcome']}, {_time(found)}, {found['ms']} ms"
    yield f"  x-request-id {found['request_id']}, namespace {found['namespace'] or '(none)'}"
    if not found["prompts"]:
        yield f"  no prompt was computed to its end: {found['outcome']}"
    for one in found["prompts"]:
        if len(found["prompts"]) > 1:
            yield f"  prompt {one['prompt']}:"
        yield from (f"  {line}" for line in placement_lines(one["placements"]))
        yield from (f"  {line}" for line in recall_lines(one["prompt_tokens"], one["recall"]))
        if one["recall"] is not None:
            yield from _sides(one["recall"])
        if one["speculation"] is not None:
            yield from _drafts(one["speculation"])


def _sides(recall: dict[str, Any]) -> Iterator[str]:
    for title, side in (("the prompt", recall["ours"]), (f"entry {recall['entry']}", recall["theirs"])):
        if side is not None:
            shown = side["tokens"] if side["text"] is None else json.dumps(side["text"], ensure_ascii=False)
            yield f"    {title} goes on with {shown}"
    if recall["salted"]:
        yield f"  at least {recall['salted']} of its tokens are there for the same API key with another salt or user"


def _drafts(speculation: dict[str, Any]) -> Iterator[str]:
    drafted, accepted, seconds = (speculation[name] for name in ("drafted", "accepted", "seconds_saved"))
    if not drafted:
        yield f"  no drafts in {speculation['rounds']} steps"
        return
    saved = f"{seconds:.3f} s saved" if seconds >= 0 else f"{-seconds:.3f} s lost"
    yield f"  {accepted} of {drafted} drafts became tokens, in {speculation['rounds']} steps; about {saved}"
    yield f"    accepted by position: {' '.join(f'{rate:.0%}' for rate in speculation['acceptance_at'])}"
    yield f"    drafts of a step over time: {' '.join(f'{mean:.1f}' for mean, _ in speculation['depths'])}"
