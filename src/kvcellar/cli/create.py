"""create: the subcommand that makes a model of the library from a Modelfile."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import click

from kvcellar.cli.completion import library_models, values
from kvcellar.cli.library import library
from kvcellar.cli.options import FILE, MOST_TEXT, Command, json_option, quiet_option
from kvcellar.cli.progress_line import show_progress
from kvcellar.engine.models.quantize.kinds import QUANTISED, report_lines
from kvcellar.engine.models.weights.create_tools import CreateTools
from kvcellar.errors import BadRequest
from kvcellar.library.create import Created, create
from kvcellar.library.details import details
from kvcellar.library.modelfile import MOST_BYTES, Modelfile, ModelfileError, parse
from kvcellar.library.names import LATEST
from kvcellar.progress import rounded

DEFAULT = "Modelfile"


@click.command("create", cls=Command, epilog="Example: kvcellar create my-model -f Modelfile --quantize int8")
@click.argument("name", shell_complete=library_models)
@click.option(
    "--file",
    "-f",
    type=click.Path(exists=True, dir_okay=False, path_type=Path, allow_dash=True),
    help="The Modelfile; - reads stdin. Default: ./Modelfile, or FROM . in the directory of a model.",
)
@click.option(
    "--quantize",
    "-q",
    metavar="TYPE",
    shell_complete=values(*QUANTISED),
    help="Type of the weights that are stored, like int8 or int4.",
)
@click.option(
    "--draft-quantize",
    "--quantize-draft",
    metavar="TYPE",
    shell_complete=values(*QUANTISED),
    help="The same for those of the draft.",
)
@click.option("--calibrate", is_flag=True, help="Choose codes of 4 bits by GPTQ, on samples of the model.")
@click.option(
    "--calibration-text",
    type=FILE,
    help="The same, on the first tokens of this text file.",
)
@json_option
@quiet_option
def command(
    name: str,
    file: Path | None,
    quantize: str | None,
    draft_quantize: str | None,
    calibrate: bool,
    calibration_text: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Create or replace model NAME, as [owner/]name[:tag], in the library.

    FROM, DRAFT and ADAPTER name directories, relative to the Modelfile or to the working directory, GGUF files, models
    of the library, or models in the local Hugging Face cache. Nothing is downloaded.
    """
    if quantize is None and (calibrate or calibration_text is not None):
        raise BadRequest("weights are calibrated when they are quantized; add --quantize int4 or mixed", "calibrate")
    text = None if calibration_text is None else _text(calibration_text)
    try:
        modelfile, folder = _read(file)
        with show_progress(quiet=quiet):
            made = create(
                library(),
                name,
                modelfile,
                tools=CreateTools(calibrate=calibrate, calibration_text=text),
                folders=tuple(dict.fromkeys((folder, Path.cwd()))),
                quantize=quantize,
                draft_quantize=draft_quantize,
            )
    except ModelfileError as error:
        where = "stdin" if str(file) == "-" else str(file or DEFAULT)
        raise BadRequest(f"{where}{' ' if str(error).startswith('(') else ': '}{error}") from error
    _print(made, {"model": quantize, "draft": draft_quantize}, as_json=as_json)


def _text(file: Path) -> str:
    """The beginning of a text, which has more tokens than are read."""
    with open(file, encoding="utf-8", errors="replace") as opened:
        return opened.read(MOST_TEXT)


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


def _print(made: Created, kinds: Mapping[str, str | None], *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({**details(made.model), "notes": list(made.notes)}))
        return
    for note in made.notes:
        click.echo(f"note: {note}", err=True)
    name = made.model.name.removesuffix(f":{LATEST}")
    if Path(name).exists():
        click.echo(
            f"note: {name} is also a path here, which has precedence; {made.model.name} names the model", err=True
        )
    reports = made.model.manifest.report or {}
    for part in (part for part, kind in kinds.items() if kind is not None):
        for line in report_lines(reports[part], kinds[part]):
            click.echo(f"{part}: {line}")
    click.echo(f"created {made.model.name}, {rounded(made.model.manifest.size)}, id {made.model.id[:12]}")
