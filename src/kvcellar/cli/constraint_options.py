"""constraint_options: what an answer has to match, as options."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from kvcellar.errors import BadRequest
from kvcellar.sample.constraint import MAX_SOURCE_BYTES, Constraint

F = TypeVar("F", bound=Callable[..., Any])
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


def constraint_options(function: F) -> F:
    """Adds --json-schema, --regex, --choice and --grammar, of which one may be given. It becomes the sampling parameter
    `constraint`."""
    for option in (
        click.option(
            "--grammar",
            type=FILE,
            callback=_becomes(lambda path: Constraint("grammar", _read(path, "grammar"), param="grammar")),
            expose_value=False,
            help="A file with a grammar that the answer has to match, in Lark's notation or in GBNF.",
        ),
        click.option(
            "--choice",
            multiple=True,
            callback=_becomes(lambda texts: Constraint.choice(texts, param="choice")),
            expose_value=False,
            help="A text that the answer may be. May be repeated; the answer is one of them.",
        ),
        click.option(
            "--regex",
            callback=_becomes(lambda pattern: Constraint("regex", pattern, param="regex")),
            expose_value=False,
            help="A regular expression that the whole answer has to match.",
        ),
        click.option(
            "--json-schema",
            type=FILE,
            callback=_becomes(lambda path: Constraint.json_schema(_read(path, "json_schema"), param="json_schema")),
            expose_value=False,
            help="A file with a JSON Schema that the answer has to match.",
        ),
    ):
        function = option(function)
    return function


def _becomes(make: Callable[[Any], Constraint]) -> Callable[[click.Context, click.Parameter, Any], None]:
    """A callback that sets the parameter `constraint`."""

    def callback(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        if value is None or value == ():
            return
        if "constraint" in ctx.params:
            raise click.UsageError("give one of --json-schema, --regex, --choice and --grammar")
        try:
            ctx.params["constraint"] = make(value)
        except BadRequest as error:
            raise click.BadParameter(str(error), ctx, param) from error

    return callback


def _read(path: Path, param: str) -> str:
    with path.open("rb") as file:
        read = file.read(MAX_SOURCE_BYTES + 1)
    try:
        return read.decode()
    except UnicodeDecodeError as error:
        raise BadRequest(f"{param}: the file is not UTF-8 text: byte {error.start}", param) from None
