"""rm: the subcommand that removes models from the library."""

import click

from kvcellar.cli.models import library
from kvcellar.cli.options import Command


@click.command("rm", cls=Command, epilog="Example: kvcellar rm my-model other/model:v1")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
def command(names: tuple[str, ...]) -> None:
    """Remove models from the library, with the files that no other model has.

    What a running process has loaded stays loaded.
    """
    models = library()
    for name in names:
        models.remove(name)
        click.echo(f"removed {name}")
