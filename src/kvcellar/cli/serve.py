"""serve: a model over HTTP."""

import os
from pathlib import Path
from typing import Any

import click

from kvcellar.cli.options import Size, Verb, engine_options, given
from kvcellar.engine.engine import Engine
from kvcellar.serve.server import run
from kvcellar.serve.settings import ServeSettings, key_digest


@click.command("serve", cls=Verb, epilog="Example: kvcellar serve ./my-model --port 8080 --api-key-file keys.txt")
@click.argument("model", required=False)
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", default=8080, show_default=True, help="0 takes any free one.")
@click.option(
    "--api-key-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file with one key per line. KVCELLAR_API_KEY in the environment is one more.",
)
@click.option("--allowed-host", multiple=True, help="A name that clients may call this server by. May be repeated.")
@click.option("--allow-open", is_flag=True, help="Answer everybody who can reach HOST, without a key.")
@click.option("--max-body", type=Size(), default="8MiB", show_default=True, help="Largest request body.")
@engine_options
def command(
    model: str | None,
    host: str,
    port: int,
    api_key_file: Path | None,
    allowed_host: tuple[str, ...],
    allow_open: bool,
    max_body: int,
    **options: Any,
) -> None:
    """Serve MODEL (a directory, a name in the local Hugging Face cache, or the embedded model) as the OpenAI API."""
    settings = ServeSettings(
        host=host,
        port=port,
        key_digests=tuple(map(key_digest, _keys(api_key_file))),
        allow_open=allow_open,
        allowed_hosts=allowed_host,
        max_body_bytes=max_body,
    )
    with Engine(model, **given(**options)) as engine:
        click.echo(f"{engine.model.name}: {engine.capacity()}", err=True)
        run(engine, settings, ready=lambda url: click.echo(f"Serving {engine.model.name} at {url}/v1", err=True))


def _keys(file: Path | None) -> list[str]:
    lines = file.read_text(encoding="utf-8").splitlines() if file is not None else []
    return [key for line in [*lines, os.environ.get("KVCELLAR_API_KEY", "")] if (key := line.strip())]
