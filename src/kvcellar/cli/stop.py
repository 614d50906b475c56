"""stop: the subcommand that makes a running server unload a model."""

from pathlib import Path

import click

from kvcellar.cli.client import AdminClient, server_options
from kvcellar.cli.options import Command


@click.command("stop", cls=Command, epilog="Example: kvcellar stop my-model")
@click.argument("name")
@server_options
def command(name: str, url: str, admin_key_file: Path | None) -> None:
    """Let a running server unload the model NAME when its requests have ended. The next request loads it again.

    Models that were named in the command line of the server stay.
    """
    AdminClient(url, admin_key_file).post("/api/generate", {"model": name, "keep_alive": 0})
