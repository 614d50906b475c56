"""create: the subcommand that makes a model of the library from a Modelfile."""

import json
import sys
from pathlib import Path

import click

from kvcellar.cli.models import library, size
from kvcellar.cli.options import Command, quiet_option
from kvcellar.cli.progress_line import show_progress
from kvcellar.errors import BadRequest
from kvcellar.library.create import Created, create
from kvcellar.library.details import details
from kvcellar.library.modelfile import MOST_BYTES, Modelfile, parse
from kvcellar.models.create_tools import CreateTools

DEFAULT = "Modelfile"


@click.command("create", cls=Command, epilog="Example: kvcellar create my-model -f Modelfile --quantize int8")
@click.argument("name")
@click.option(
    "--file",
    "-f",
    type=click.Path(path_type=Path, allow_dash=True),
    help="The Modelfile; - reads stdin. Default: ./Modelfile, or FROM . in the directory of a model.",
)
@click.option("--quantize", "-q", metavar="TYPE", help="Type of the weights that are stored, like int8 or int4.")
@click.option("--draft-quantize", "--quantize-draft", metavar="TYPE", help="The same for those of the draft.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@quiet_option
def command(
    name: str, file: Path | None, quantize: str | None, draft_quantize: str | None, as_json: bool, quiet: bool
) -> None:
    """Make NAME, as [owner/]name[:tag], a model of the library, in place of the model that it was.

    FROM, DRAFT and ADAPTER name directories, relative to the Modelfile or to the working directory, GGUF files, models
    of the library, or models in the local Hugging Face cache. Nothing is downloaded.
    """
    modelfile, folder = _read(file)
    here = Path.cwd()
    with show_progress(quiet=quiet):
        made = create(
            library(),
            name,
            modelfile,
            tools=CreateTools(),
            folders=tuple(dict.fromkeys((folder, here))),
            quantize=quantize,
            draft_quantize=draft_quantize,
        )
    _print(made, as_json=as_json)


def _read(file: Path | None) -> tuple[Modelfile, Path]:
    """The Modelfile, and its directory."""
    here = Path.cwd()
    if file is None:
        file = Path(DEFAULT)
        if not file.exists():
            if not (here / "config.json").is_file():
                raise BadRequest(f"there is neither a {DEFAULT} nor a model in {here}; name a Modelfile", "file")
            return parse("FROM ."), here
    if str(file) == "-":
        return parse(sys.stdin.buffer.read(2 * MOST_BYTES + 1)), here
    with open(file, "rb") as opened:
        return parse(opened.read(2 * MOST_BYTES + 1)), file.absolute().parent


def _print(made: Created, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({**details(made.model), "notes": list(made.notes)}))
        return
    for note in made.notes:
        click.echo(f"note: {note}", err=True)
    click.echo(f"created {made.model.name}, {size(made.model.manifest.size)}, id {made.model.id[:12]}")
