"""list: the subcommand that prints the models of the library."""

import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import click

from kvcellar.cli.models import date, library, size, table
from kvcellar.cli.options import Command, quiet_option
from kvcellar.cli.progress_line import show_progress
from kvcellar.errors import ModelNotFound, ModelRefused
from kvcellar.library.library import Library


@click.command("list", cls=Command, epilog="Example: kvcellar list --json")
@click.option("--verify", is_flag=True, help="Read every file. Exit code 1 if one is damaged.")
@click.option("--cached", is_flag=True, help="Also models in the local Hugging Face cache, like pulled ones.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@quiet_option
def command(verify: bool, cached: bool, as_json: bool, quiet: bool) -> None:
    """List the models of the library: name, id, bytes on disk, and when each was created. Also: kvcellar ls."""
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
    known = ("-", "-") if entry["id"] is None else (entry["id"][:12], size(entry["size"]))
    return (entry["name"], *known, entry["modified"][:16].replace("T", " "))
