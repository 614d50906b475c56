"""in_library: what a name stands for in the library of models. Imports no torch, since commands check names first."""

import os
from pathlib import Path
from typing import Any

from kvcellar.library.library import Library, LibraryModel
from kvcellar.library.manifest import Manifest
from kvcellar.library.names import LATEST
from kvcellar.places import NoPlace, models
from kvcellar.text.conversation import Preamble


def in_library(model: object) -> LibraryModel | None:
    """The model of the library that has this name. None for what is there as a path, and for anything else. Raises
    `ModelRefused` if the model is damaged."""
    if not isinstance(model, str) or _is_path(model):
        return None
    try:
        return Library(models(os.environ)).find(model)
    except NoPlace:  # there is no home directory, and so no library
        return None


def located(model: Any) -> Any:
    """The directory of a model of the library; anything else as it is."""
    found = in_library(model)
    return model if found is None else found.directory


def preamble_of(manifest: Manifest) -> Preamble:
    """The messages that a model was created with."""
    return Preamble(manifest.system, tuple({"role": one.role, "content": one.content} for one in manifest.messages))


def shown_name(found: LibraryModel) -> str:
    """The name of a model, without the tag that every name has by default."""
    return found.name.removesuffix(f":{LATEST}")


def _is_path(text: str) -> bool:
    try:
        return Path(text).expanduser().exists()
    except (OSError, RuntimeError, ValueError):  # too long, the home of an unknown user, a null character
        return False
