"""pull: models that are downloaded from a hub, by a subcommand of their own or by others, and never unasked."""

import dataclasses
import json
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from kvcellar import progress
from kvcellar.cli.options import Command, json_option, quiet_option
from kvcellar.cli.progress_line import show_progress
from kvcellar.engine.load.in_library import located
from kvcellar.engine.models.weights.find import find, locate
from kvcellar.errors import BadRequest, ModelNotFound
from kvcellar.library.library import Library
from kvcellar.library.names import RESERVED
from kvcellar.places import NoPlace, models
from kvcellar.progress import rounded
from kvcellar.repository import Repository

if TYPE_CHECKING:
    from kvcellar.library.hub import Available, Pulled


pull_option = click.option("--pull", is_flag=True, help="Download MODEL first, if it is not on this machine.")


def download(name: str, *, revision: str | None = None, quiet: bool, confirm: bool = False) -> "Pulled | None":
    """Look a model up and download what is missing of it. With `confirm` the user is asked between the two; None: the
    user does not want it."""
    from kvcellar.library import hub  # not at the top: huggingface_hub is imported when it is needed

    with show_progress(quiet=quiet):
        progress.report(f"looking up {name}")
        available = hub.look_up(name, revision=revision)
    if confirm and not click.confirm(f"{_described(available)}. Download it?", err=True):
        return None
    try:
        with show_progress(quiet=quiet) as listener:
            return hub.fetch(available, listener)
    except KeyboardInterrupt:
        click.echo(f"interrupted; what was downloaded is kept: `kvcellar pull {name}` continues", err=True)
        raise


def download_missing(model: str | None, draft: str | None, *, pull: bool, quiet: bool) -> None:
    """Download a model, and one that drafts for it, if they are not on this machine and either `pull` is set or the
    user at the terminal agrees.

    Else raises `ModelNotFound`, which names `kvcellar pull`, before torch is imported. A draft without an owner is no
    name on a hub, but one like `ngram`, and is looked for when it is loaded.
    """
    for name in (model, draft if draft is not None and "/" in draft else None):
        if name is None or not _is_missing(name):
            continue
        if pull:
            download(name, quiet=quiet)
        elif "/" in name and sys.stdin.isatty() and sys.stderr.isatty():
            from huggingface_hub import constants

            if click.confirm(f"{name} is not on this machine. Look it up at {constants.ENDPOINT}?", err=True):
                download(name, quiet=quiet, confirm=True)
    if model is not None:
        locate(located(model))


def _described(available: "Available") -> str:
    return (
        f"{available.repository} has {len(available.files)} files with {rounded(available.bytes)}; "
        f"{rounded(available.missing_bytes)} are missing here, and the disk has {rounded(available.free_bytes)} free"
    )


def _is_missing(model: str) -> bool:
    """Whether this is a name that could be downloaded, and nothing on this machine has it."""
    if model in RESERVED:
        return False
    try:
        Repository.parse(model)
    except BadRequest:
        return False
    with suppress(NoPlace):  # there is no home directory, and so no library
        if Library(models(os.environ)).find(model) is not None:
            return False
    try:
        find(model)
    except ModelNotFound:
        return True
    return False


@click.command("pull", cls=Command, epilog="Example: kvcellar pull Qwen/Qwen3-0.6B && kvcellar run Qwen/Qwen3-0.6B")
@click.argument("model")
@click.option("--revision", help="Branch, tag or commit. Default: main. Or MODEL@REVISION.")
@json_option
@quiet_option
def command(model: str, revision: str | None, as_json: bool, quiet: bool) -> None:
    """Download MODEL (owner/name) from a hub into the local Hugging Face cache, where `kvcellar run` and others find
    it: its weights as safetensors, configs, tokenizer and chat templates, and nothing else.

    What is there is checked, not downloaded again, and an interrupted download is continued. A private or gated model
    needs HF_TOKEN, or a login with `hf auth login`. HF_ENDPOINT names another hub, HF_HOME another cache.
    """
    pulled = download(model, revision=revision, quiet=quiet)
    assert pulled is not None  # only a user who was asked can refuse
    if as_json:
        click.echo(json.dumps({**dataclasses.asdict(pulled), "directory": str(pulled.directory)}))
        return
    click.echo(
        f"{pulled.name}: {pulled.files} files with {rounded(pulled.bytes)}, {rounded(pulled.downloaded_bytes)} of them "
        f"downloaded now (commit {pulled.commit[:12]})"
    )
    if pulled.unchecked:
        click.echo(f"The hub lists no SHA-256 of {', '.join(pulled.unchecked)}: not checked", err=True)
