"""downloads: models that are fetched from a hub by a subcommand, with a progress line, and never unasked."""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvcellar import progress
from kvcellar.cli.progress_line import show_progress
from kvcellar.errors import BadRequest, ModelNotFound
from kvcellar.library.library import Library
from kvcellar.library.names import RESERVED
from kvcellar.places import NoPlace, models
from kvcellar.repository import Repository

if TYPE_CHECKING:
    from kvcellar.library.hub import Available, Pulled

F = TypeVar("F", bound=Callable[..., Any])


def pull_option(function: F) -> F:
    """Adds --pull."""
    return click.option("--pull", is_flag=True, help="Download MODEL first, if it is not on this machine.")(function)


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
            return hub.fetch(available, progress=listener)
    except KeyboardInterrupt:
        click.echo(f"interrupted; what was downloaded is kept: `kvcellar pull {name}` continues", err=True)
        raise


def download_missing(model: str | None, draft: str | None, *, pull: bool, quiet: bool) -> None:
    """Download a model, and one that drafts for it, if they are not on this machine and either `pull` is set or the
    user at the terminal agrees.

    Else nothing happens: loading it raises the error that names `kvcellar pull`. A draft without an owner is no name on
    a hub, but one like `ngram`.
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


def _described(available: "Available") -> str:
    from kvcellar.library.hub_cache import sized

    return (
        f"{available.repository} has {len(available.files)} files with {sized(available.bytes)}; "
        f"{sized(available.missing_bytes)} are missing here, and the disk has {sized(available.free_bytes)} free"
    )


def _is_missing(model: str) -> bool:
    """Whether this is a name that could be downloaded, and nothing on this machine has it."""
    from kvcellar.models.find import find

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
        return model != RESERVED
    return False
