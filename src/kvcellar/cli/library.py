"""library: the subcommands of the library of the user (list, show, cp, rm), and how others print what is in it."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import click

from kvcellar import places
from kvcellar.cli.completion import library_models
from kvcellar.cli.options import Command, json_option, quiet_option
from kvcellar.cli.printing import date, table
from kvcellar.errors import BadRequest, ModelNotFound, ModelRefused
from kvcellar.library.library import Library
from kvcellar.progress import rounded


def library() -> Library:
    """`$KVCELLAR_MODELS`, or the directory of the user."""
    return Library(places.models(os.environ))


# -- list -------------------------------------------------------------------------------------------------------------


@click.command("list", cls=Command, epilog="Example: kvcellar list --json")
@click.option("--verify", is_flag=True, help="Read every file. Exit code 1 if one is damaged.")
@click.option("--cached", is_flag=True, help="Also models in the local Hugging Face cache, like pulled ones.")
@json_option
@quiet_option
def list_command(verify: bool, cached: bool, as_json: bool, quiet: bool) -> None:
    """List the models of the library: name, id, bytes on disk, and when each was created. Also: kvcellar ls."""
    from kvcellar.cli.progress_line import show_progress

    models = library()
    with show_progress(quiet=quiet):
        found = list(_entries(models, verify=verify))
    pulled = _pulled() if cached else []
    if as_json:
        click.echo(
            json.dumps({"directory": str(models.root), "models": found, **({"cached": pulled} if cached else {})})
        )
    else:
        click.echo(table([("NAME", "ID", "SIZE", "MODIFIED"), *map(_row, [*found, *pulled])]))
        for one in found:
            for damage in one["damage"]:
                click.echo(f"{one['name']} is damaged: {damage}", err=True)
    if any(one["damage"] for one in found):
        sys.exit(1)


def _pulled() -> list[dict[str, Any]]:
    """What is printed about the models of the local Hugging Face cache; the commit takes the place of an id."""
    from kvcellar.library.hub_cache import cached_models  # not at the top: it imports huggingface_hub

    return [
        {
            "name": one.name,
            "modified": date(one.modified),
            "id": one.commit,
            "size": one.bytes,
            "directory": str(one.directory),
        }
        for one in cached_models()
    ]


def _entries(models: Library, *, verify: bool) -> Iterator[dict[str, Any]]:
    """What is printed about each model, without those that are removed meanwhile."""
    for name in models.names():
        with suppress(ModelNotFound):
            yield _entry(models, str(name), verify=verify)


def _entry(models: Library, name: str, *, verify: bool) -> dict[str, Any]:
    """What is printed about one model. `damage` is empty unless something is wrong with it."""
    entry: dict[str, Any] = {"name": name, "modified": date(models.modified(name))}
    try:
        manifest = models.manifest(name)
    except ModelRefused as error:
        return {**entry, "id": None, "size": None, "quantized": None, "damage": [str(error)]}
    entry |= {"id": manifest.id, "size": manifest.size, "quantized": manifest.quantized}
    return {**entry, "damage": list(models.verify(name)) if verify else []}


def _row(entry: dict[str, Any]) -> tuple[str, ...]:
    known = ("-", "-") if entry["id"] is None else (entry["id"][:12], rounded(entry["size"]))
    return (entry["name"], *known, entry["modified"][:16].replace("T", " "))


# -- show -------------------------------------------------------------------------------------------------------------


def _part(name: str, text: str) -> Any:
    return click.option(f"--{name}", "part", flag_value=name, help=text)


@click.command("show", cls=Command, epilog="Example: kvcellar show my-model --modelfile > Modelfile")
@click.argument("name", shell_complete=library_models)
@_part("modelfile", "Print a Modelfile that creates the same model from this one.")
@_part("template", "Print its chat template.")
@_part("system", "Print SYSTEM.")
@_part("parameters", "Print the parameters.")
@_part("license", "Print the licenses.")
@json_option
def show_command(name: str, part: str | None, as_json: bool) -> None:
    """Print what is known about the model NAME of the library."""
    if part is not None and as_json:
        raise click.UsageError(f"--{part} and --json exclude each other")
    from kvcellar.library.details import details, modelfile_of  # not at the top: others of this file need none of it

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
    from kvcellar.library.parameters import commands

    for one in commands(found["parameters"]):
        yield f"{one.name:<20} {json.dumps(one.args) if one.name == 'stop' else one.args}"


def _lines(found: dict[str, Any]) -> Iterator[str]:
    from kvcellar.engine.models.quantize.kinds import report_lines

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
        "size": rounded(found["size"]),
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


# -- cp and rm --------------------------------------------------------------------------------------------------------


@click.command("cp", cls=Command, epilog="Example: kvcellar cp my-model my-model:before")
@click.argument("source", shell_complete=library_models)
@click.argument("target")
def cp_command(source: str, target: str) -> None:
    """Create or replace model TARGET as a copy of SOURCE. Its files are not copied."""
    library().copy(source, target)
    click.echo(f"copied {source} to {target}")


@click.command("rm", cls=Command, epilog="Example: kvcellar rm my-model other/model:v1")
@click.argument("names", nargs=-1, required=True, metavar="NAME...", shell_complete=library_models)
def rm_command(names: tuple[str, ...]) -> None:
    """Remove models from the library, with the files that no other model has.

    What a running process has loaded stays loaded.
    """
    models = library()
    for name in names:
        models.remove(name)
        click.echo(f"removed {name}")
