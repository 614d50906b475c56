"""completion: what a shell completes beside files and names of options: names of models, and values of options. Nothing
that loads models is imported, and no server is asked."""

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from kvcellar.library.names import LATEST, RESERVED
from kvcellar.places import NoPlace, models

Completion = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]
DIRECTORIES = CompletionItem("", type="dir")  # the first: shells complete directories where no name fits


def values(*names: str) -> Completion:
    return lambda _, __, begun: _beginning(names, begun)


def library_models(_: click.Context, __: click.Parameter, begun: str) -> list[CompletionItem]:
    """Names of the library."""
    from kvcellar.library.library import Library  # not at the top: commands are completed seldom

    with suppress(NoPlace, OSError):
        found = Library(models(os.environ)).names()
        return _beginning([str(name).removesuffix(f":{LATEST}") for name in found], begun)
    return []


def loadable_models(ctx: click.Context, param: click.Parameter, begun: str) -> list[CompletionItem]:
    """What can be loaded: models that come with kvcellar, of the library, of the local Hugging Face cache, and
    directories."""
    named = _beginning((*RESERVED, *_pulled()), begun)
    return [DIRECTORIES, *library_models(ctx, param, begun), *named]


def drafts(ctx: click.Context, param: click.Parameter, begun: str) -> list[CompletionItem]:
    return [*loadable_models(ctx, param, begun), *_beginning(("ngram", "mtp"), begun)]


def _pulled() -> list[str]:
    """By the folders of the cache: reading what is in them takes long."""
    from huggingface_hub import constants

    folders = Path(constants.HF_HUB_CACHE).glob("models--*")
    return sorted(folder.name.removeprefix("models--").replace("--", "/", 1) for folder in folders)


def _beginning(names: Iterable[str], begun: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in names if name.startswith(begun)]
