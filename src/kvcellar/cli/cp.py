"""cp: the subcommand that gives a model of the library a second name."""

import click

from kvcellar.cli.models import library
from kvcellar.cli.options import Command


@click.command("cp", cls=Command, epilog="Example: kvcellar cp my-model my-model:before")
@click.argument("source")
@click.argument("target")
def command(source: str, target: str) -> None:
    """Create or replace model TARGET as a copy of SOURCE. Its files are not copied."""
    library().copy(source, target)
    click.echo(f"copied {source} to {target}")
