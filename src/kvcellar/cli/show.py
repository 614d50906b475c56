"""show: the subcommand that prints what is known about a model of the library."""

import json
from collections.abc import Iterator
from typing import Any

import click

from kvcellar.cli.models import library, size
from kvcellar.cli.options import Command
from kvcellar.errors import BadRequest
from kvcellar.library.details import details, modelfile_of
from kvcellar.library.parameters import commands
from kvcellar.models.quantize.report import report_lines

PARTS = ("modelfile", "template", "system", "parameters", "license")


def _part(name: str, text: str) -> Any:
    return click.option(f"--{name}", "part", flag_value=name, help=text)


@click.command("show", cls=Command, epilog="Example: kvcellar show my-model --modelfile > Modelfile")
@click.argument("name")
@_part("modelfile", "Print a Modelfile that creates the same model from this one.")
@_part("template", "Print its chat template.")
@_part("system", "Print SYSTEM.")
@_part("parameters", "Print the parameters.")
@_part("license", "Print the licenses.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(name: str, part: str | None, as_json: bool) -> None:
    """Print what is known about the model NAME of the library."""
    if part is not None and as_json:
        raise click.UsageError(f"--{part} and --json exclude each other")
    model = library().resolve(name)
    found = details(model)
    if as_json:
        click.echo(json.dumps(found))
    elif part == "modelfile":
        inherited = [*(["draft"] if model.draft else []), *(["adapters"] if model.adapters else [])]
        more = f", with its {' and '.join(inherited)}" if inherited else ""
        click.echo(f"# {model.name}{more}. It was created from {json.dumps(model.manifest.source)}.")
        click.echo(str(modelfile_of(model.name, model.manifest)), nl=False)
    elif part is not None:
        click.echo(_text(found, part))
    else:
        click.echo("\n".join(_lines(found)))


def _text(found: dict[str, Any], part: str) -> str:
    if part == "parameters":
        return "\n".join(_parameters(found))
    text = "\n\n".join(found["licenses"]) if part == "license" else found[part]
    if not text:
        raise BadRequest(f"{found['name']} has no {part}", "name")
    return text


def _parameters(found: dict[str, Any]) -> Iterator[str]:
    for one in commands(found["parameters"]):
        yield f"{one.name:<20} {json.dumps(one.args) if one.name == 'stop' else one.args}"


def _lines(found: dict[str, Any]) -> Iterator[str]:
    draft, report = found["draft"], found["report"] or {}
    rows = {
        "name": found["name"],
        "id": found["id"][:12],
        "from": found["source"],
        "architecture": found["architecture"],
        "layers": found["layers"],
        "context length": found["context_length"],
        "embedding length": found["embedding_length"],
        "vocabulary": found["vocabulary"],
        "size": size(found["size"]),
        "quantization": found["quantized"],
        "draft": draft and " ".join(filter(None, (draft["architecture"], draft["quantized"]))),
        "adapters": found["adapters"] or None,
        "requires": found["requires"],
        "directory": found["directory"],
    }
    yield "Model"
    yield from (f"  {name:<18} {value}" for name, value in rows.items() if value is not None)
    for title, lines in (
        ("Parameters", list(_parameters(found))),
        ("System", (found["system"] or "").splitlines()),
        ("Messages", [f"{one['role']}: {one['content']}" for one in found["messages"]]),
        ("License", [text.strip().splitlines()[0] for text in found["licenses"] if text.strip()]),
        ("Quantization", [f"{name}: {line}" for name, one in report.items() for line in report_lines(one)]),
    ):
        if lines:
            yield f"\n{title}"
            yield from (f"  {line}" for line in lines)
