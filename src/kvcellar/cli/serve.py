"""serve: a model over HTTP."""

import gc
import logging
import os
from functools import partial
from pathlib import Path
from typing import Any, get_args

import click

from kvcellar.cli.ending import Ending
from kvcellar.cli.loading import loading
from kvcellar.cli.logs import LEVELS, Format, logged
from kvcellar.cli.options import Size, Verb, engine_options, given, quiet_option
from kvcellar.engine.engine import Engine
from kvcellar.serve.keys import key_digests, permission_warning
from kvcellar.serve.server import SHUTDOWN_SECONDS, bind, run
from kvcellar.serve.settings import ServeSettings

log = logging.getLogger("kvcellar.serve")

LAST_STEP = 1.5  # seconds for the step that the engine is in when the server has ended


@click.command("serve", cls=Verb, epilog="Example: kvcellar serve ./my-model --port 8080 --api-key-file keys.txt")
@click.argument("model", required=False)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8080, show_default=True, help="0: any free port.")
@click.option(
    "--api-key-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="UTF-8 text, one key per line; # begins a comment line. $KVCELLAR_API_KEY is one more key.",
)
@click.option("--allowed-host", multiple=True, help="Accepted in the Host header. May be repeated.")
@click.option("--allow-open", is_flag=True, help="Without keys, serve every client that can reach HOST.")
@click.option("--max-body", type=Size(), default="8MiB", show_default=True, help="Largest request body.")
@click.option(
    "--drain-timeout",
    "drain_seconds",
    type=float,
    default=5.0,
    show_default=True,
    help="Seconds for running requests to end after SIGTERM.",
)
@click.option(
    "--log-level", type=click.Choice(LEVELS), default="info", show_default=True, help="info: a line per request."
)
@click.option("--log-format", type=click.Choice(get_args(Format)), default="text", show_default=True, help="Of stderr.")
@engine_options
@quiet_option
def command(
    model: str | None,
    host: str,
    port: int,
    api_key_file: Path | None,
    allowed_host: tuple[str, ...],
    allow_open: bool,
    max_body: int,
    drain_seconds: float,
    log_level: str,
    log_format: Format,
    quiet: bool,
    **options: Any,
) -> None:
    """Serve MODEL (a directory, a name in the local Hugging Face cache, or the embedded model) as the OpenAI API.

    SIGTERM or SIGINT refuses requests that have not begun, lets running ones end for as long as --drain-timeout says,
    and closes the engine at most 3 seconds later. Exit code 0; or 1 if the engine's last step takes longer than that. A
    second signal ends the process at once, with 128 and the number of the signal.
    """
    settings = ServeSettings(
        host=host,
        port=port,
        key_digests=key_digests(api_key_file, os.environ),
        allow_open=allow_open,
        allowed_hosts=allowed_host,
        max_body_bytes=max_body,
        drain_seconds=drain_seconds,
    )
    say = partial(log.info, "%s") if log_format == "json" else partial(click.echo, err=True)
    # The address is taken before the model is loaded: a port in use is an error at once, not after minutes.
    with logged(log_level, log_format) as end_log, bind(settings) as listener:
        if api_key_file is not None and (warning := permission_warning(api_key_file)) is not None:
            log.warning("%s", warning)
        ending = Ending(drain_seconds + SHUTDOWN_SECONDS + LAST_STEP, last=end_log)
        with ending, _loaded(model, quiet=quiet or log_format == "json", **options) as engine:
            name = engine.model.name
            say(f"{name}: {engine.capacity()}")
            gc.collect()
            gc.freeze()  # else requests set off collections that go through all objects of torch and transformers

            def ready(url: str) -> None:
                say(f"Serving {name} at {url}/v1")

            run(engine, settings, listener=listener, ready=ready, signalled=ending.signalled)


def _loaded(model: str | None, *, quiet: bool, **options: Any) -> Engine:
    with loading(quiet=quiet):
        return Engine(model, **given(**options))
