"""serve: the subcommand that serves a model over HTTP.

Once it serves requests, it prints what it serves, where, in how much memory, and for which keys.

A file of prompts to pin is UTF-8 text with one JSON object per line, which has either "prompt", a text or a list of
token ids, or "messages", the first messages of chats. Empty lines are ignored. Any other line raises an error with the
file and the line number, before a model is loaded if that is possible.
"""

import json
import logging
import os
import sys
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from kvcellar.cli.completion import loadable_models
from kvcellar.cli.logs import LEVELS, Format, log_to_stderr
from kvcellar.cli.options import FILE, SIZE, Command, Written, adapter_option, quiet_option, together
from kvcellar.cli.pull import download_missing, pull_option
from kvcellar.cli.setting_options import engine_options, image_options, setting_options
from kvcellar.cli.shutdown import ShutdownTimer
from kvcellar.cli.store_options import events_options, store_options, stored
from kvcellar.collector import settle
from kvcellar.durations import seconds_of
from kvcellar.engine.load.settings import Settings
from kvcellar.errors import BadRequest, KvcellarError, shown
from kvcellar.progress import rounded
from kvcellar.serve.http.key_ring import Keys, Names
from kvcellar.serve.http.keys import permission_warning, read_keys, text_of
from kvcellar.serve.settings import ServeSettings

if TYPE_CHECKING:  # the server is imported when it is needed, so that help and completion are fast
    from kvcellar.cli.hosting import Hosting
    from kvcellar.frontend.engine import Engine
    from kvcellar.serve.models.model_manager import ModelManager

MOST_BYTES = 64 * 2**20  # of a file


@dataclass(frozen=True, slots=True)
class Line:
    """A prompt, and where it is."""

    where: str
    prompt: str | list[Any]


def read_pinned(file: Path) -> list[Line]:
    """The prompts of a file, in order. Raises `BadRequest`."""
    return [
        Line(where, _prompt(where, line))
        for number, line in enumerate(text_of(file, MOST_BYTES, "pin_file").split("\n"), 1)
        if line.strip() and (where := f"{file}, line {number}")
    ]


def pin_all(
    engine: "Engine", lines: list[Line], adapter: str | None, going_on: Callable[[], None] = lambda: None
) -> str:
    """Pin the prompts, for requests with an adapter; returns what that has taken, in words. Raises `BadRequest` with
    the place. `going_on` is called before each, and may raise."""
    tokens = found = 0
    for line in lines:
        going_on()
        try:
            usage = engine.pin(line.prompt, adapter=adapter)
        except KvcellarError as error:
            raise _wrong(f"{line.where}: {error}") from error
        tokens, found = tokens + usage.prompt_tokens, found + usage.cached_tokens
    return f"{len(lines)} prompts with {tokens} tokens are pinned; {found} tokens did not have to be computed"


def _prompt(where: str, line: str) -> str | list[Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _wrong(f"{where}: it is not JSON: {error}") from error
    if not isinstance(found, dict) or len(found) != 1 or not found.keys() <= {"prompt", "messages"}:
        raise _wrong(f'{where}: it must be an object with either "prompt" or "messages", not {shown(found)}')
    ((name, value),) = found.items()
    if name == "prompt" and value and (isinstance(value, str) or _all(value, int)):
        return value
    if name == "messages" and value and _all(value, dict):
        return value
    what = "a text or a list of token ids" if name == "prompt" else "a list of messages"
    raise _wrong(f"{where}: {name} must be {what}, and not empty, not {shown(value)}")


def _all(value: object, kind: type) -> bool:
    return isinstance(value, list) and all(type(one) is kind for one in value)


def _wrong(message: str) -> BadRequest:
    return BadRequest(message, "pin_file")


APIS = {
    "OpenAI": "/v1",
    "Anthropic": "/v1/messages",
    "Ollama": "/api",
    "conversations": "/kvcellar/conversations",
    "metrics": "/metrics",
}
SHOWN = 8  # names of keys of one kind


def show_banner(
    announce: Callable[[str], object], host: "ModelManager", settings: ServeSettings, keys: Keys, url: str
) -> None:
    """Announce each line. `url` is that of the server, without a path."""
    from kvcellar.inspector.routes import PAGE

    announce(f"Serving {', '.join(host.names)} at {url}/v1")
    announce("; ".join(f"{name}: {url}{path}" for name, path in APIS.items()))
    if settings.chat_page:
        announce(f"Chat at {url}/")
    if settings.inspects:
        announce(f"See inside at {url}{PAGE}")
    used, limit = host.bytes, host.limits.max_bytes
    announce(f"Memory: {rounded(used)} of {rounded(limit)}, for at most {host.limits.max_models} models at once")
    announce(f"Keys: {_keys(settings, keys)}")


def _keys(settings: ServeSettings, keys: Keys) -> str:
    kinds = {"API": keys.api, "admin": keys.admin, "metrics": keys.metrics}
    found = [_kind(name, names) for name, names in kinds.items() if names]
    if not keys.api:
        reach = "only this machine" if settings.loopback else f"every machine that reaches {settings.host}"
        found.insert(0, f"no API key is needed, and {reach} can connect")
    return "; ".join(found)


def _kind(kind: str, names: Names) -> str:
    shown, more = list(names.values())[:SHOWN], len(names) - SHOWN
    listed = ", ".join(shown) + (f" and {more} more" if more > 0 else "")
    return f"{len(names)} {kind} key{'s' if len(names) > 1 else ''} ({listed})"


log = logging.getLogger("kvcellar.serve")

SWITCH = 1e-3  # seconds that a thread keeps the interpreter while others wait: the event loop waits for each of them
LAST_STEP = 1.5  # seconds for the engine's current step when the server has stopped
HTTP_OPTIONS = (
    *("host", "port", "allow_open", "allowed_hosts", "cors_origins", "max_body_bytes"),
    *("share_prefixes", "client_pins", "metrics_compat", "inspector", "chat_page", "both_reasoning_names"),
)
SERVER_OPTIONS = (*HTTP_OPTIONS, "max_upload_bytes", "drain_seconds", "allow_pull")


# Of HTTP: of one server and of the gateways of a cluster.
http_options = together(
    setting_options(ServeSettings, "host", "port"),
    click.option(
        "--api-key-file",
        type=FILE,
        help="UTF-8 text with one key per line; # begins a comment line. $KVCELLAR_API_KEY is one more key.",
    ),
    click.option(
        "--admin-key-file",
        type=FILE,
        help="The same for keys of the routes below /admin/, which exist only with such a key. "
        "$KVCELLAR_ADMIN_KEY, too.",
    ),
    click.option(
        "--metrics-key-file",
        type=FILE,
        help="The same for keys of /metrics alone. $KVCELLAR_METRICS_KEY, too.",
    ),
    setting_options(
        ServeSettings, "metrics_compat", "allow_open", cors_origins="--cors-origin", allowed_hosts="--allowed-host"
    ),
    click.option(
        "--max-body", "max_body_bytes", type=SIZE, default="8MiB", show_default=True, help="Largest request body."
    ),
    setting_options(ServeSettings, inspector="--inspector/--no-inspector", chat_page="--chat/--no-chat"),
    setting_options(ServeSettings, "both_reasoning_names", "client_pins", "share_prefixes"),
)


@click.command("serve", cls=Command, epilog="Example: kvcellar serve ./my-model --port 8080 --api-key-file keys.txt")
@click.argument("models", metavar="[MODEL]...", nargs=-1, shell_complete=loadable_models)
@http_options
@click.option(
    "--traces/--no-traces",
    default=None,
    help="Send OpenTelemetry spans. Default: if $OTEL_EXPORTER_OTLP_ENDPOINT is set. Needs kvcellar[otel].",
)
@setting_options(ServeSettings, "allow_pull", max_upload_bytes="--max-upload", drain_seconds="--drain-timeout")
@click.option(
    "--log-level", type=click.Choice(LEVELS), default="info", show_default=True, help="info: a line per request."
)
@click.option(
    "--log-format", type=click.Choice(get_args(Format)), default="text", show_default=True, help="Format of the log."
)
@click.option(
    "--pin",
    "pin_file",
    type=FILE,
    help='Prompts to compute before serving and not to evict: a JSON object with "prompt" or "messages" per line.',
)
@setting_options(Settings, "pin_share")
@click.option("--memory", type=SIZE, help="Bytes of all models with their caches. Default: 90 % of the free memory.")
@click.option(
    "--engine-process",
    type=click.Choice(["yes", "no"]),
    default="yes",
    show_default=True,
    help="Run each engine in a process of its own, which is started again if it dies, and requests go on.",
)
@click.option("--max-models", type=int, default=3, show_default=True, help="Most models that are loaded at once.")
@click.option(
    "--keep-alive",
    type=Written("time", seconds_of, "a time like 30s, 5m or 1h30m, a number of seconds, or -1 for ever"),
    default="5m",
    show_default=True,
    help="Unload a model that was not named here after this time without requests, like 30s or 1h; -1: never.",
)
@store_options
@events_options
@engine_options
@image_options
@adapter_option
@pull_option
@quiet_option
def command(
    models: tuple[str, ...],
    api_key_file: Path | None,
    admin_key_file: Path | None,
    metrics_key_file: Path | None,
    pin_file: Path | None,
    log_level: str,
    log_format: Format,
    traces: bool | None,
    pull: bool,
    quiet: bool,
    engine_process: str,
    **options: Any,
) -> None:
    """Serve models with the APIs of OpenAI, Anthropic and Ollama: each MODEL (a directory, a name of the library or of
    the local Hugging Face cache; without one, the embedded model), which stays loaded, and the models of the library,
    which are loaded when requests name them. Requests without a name get the first MODEL.

    The port answers while the models are loaded: /live is 200, /health is 503, and so are /ready, which says how far
    that is, and requests. A model that cannot be loaded ends the server.

    SIGHUP reads the key files again; one that is wrong changes nothing. SIGTERM or SIGINT refuses requests that have
    not started, waits up to --drain-timeout for running ones, and closes the engine at most 3 seconds later. Exit
    code 0; or 1 if the engine's current step takes longer than that. A second signal ends the process at once, with
    exit code 128 plus the number of the signal.
    """
    from kvcellar.cli.hosting import hosting
    from kvcellar.engine.models.weights.create_tools import CreateTools
    from kvcellar.inspector.routes import inspector
    from kvcellar.serve.http.server import SHUTDOWN_SECONDS, bind, run
    from kvcellar.serve.http.traces import open_traces, wanted

    sys.setswitchinterval(SWITCH)
    stored(options)
    server_options = {name: options.pop(name) for name in SERVER_OPTIONS}
    files = api_key_file, admin_key_file, metrics_key_file
    keys = read_keys(*files, os.environ)
    settings = ServeSettings(**server_options, **keys.fields())
    announce = partial(log.info, "%s") if log_format == "json" else partial(click.echo, err=True)
    spans = open_traces() if wanted(traces, os.environ) else None
    pinned = read_pinned(pin_file) if pin_file is not None else []
    for model in models or (None,):
        download_missing(model, options["draft"], pull=pull, quiet=quiet)
    # The port is bound before the model is loaded, so that a port in use is an error at once.
    with log_to_stderr(log_level, log_format) as flush, bind(settings) as listener:
        timer = ShutdownTimer(settings.drain_seconds + SHUTDOWN_SECONDS + LAST_STEP, flush=flush)
        own_process = engine_process == "yes"
        with (
            timer,
            closing(spans) if spans else nullcontext(),
            hosting(models, quiet=quiet or log_format == "json", engine_process=own_process, **options) as hosted,
        ):
            run(
                hosted.host,
                settings,
                library=hosted.library,
                tools=partial(CreateTools, measure=False),  # models beside those of the host would exceed --memory
                mount=inspector,
                listener=listener,
                read_keys=partial(read_again, *files) if any(files) else None,
                traces=spans,
                load=partial(load, hosted, pinned, announce),
                ready=partial(show_banner, announce, hosted.host, settings, keys),
                signalled=timer.signalled,
            )


def load(hosted: "Hosting", pinned: list[Line], announce: Callable[[str], object]) -> None:
    """Load the models of the command line, and pin prompts of the first one."""
    hosted.load()
    for engine in hosted.engines:
        announce(f"{engine.model.name}: {engine.capacity()}")
    if pinned:
        host = hosted.host
        announce(pin_all(hosted.engines[0], pinned, host.default.adapter, host.startup.going_on))
    settle(rarely="torch" in sys.modules)  # an engine is in this process


def read_again(api: Path | None, admin: Path | None, metrics: Path | None) -> Keys:
    """The keys in the files and in the environment. Raises `BadRequest`."""
    for file in (api, admin, metrics):
        if file is not None and (warning := permission_warning(file)) is not None:
            log.warning("%s", warning)
    return read_keys(api, admin, metrics, os.environ)
