"""sources: where the files of a model, a draft or an adapter come from, and which of them belong to it.

A source is not trusted: only files that a model is loaded from are taken, by name, from the directory itself: a link
that leads out of it is refused, but for those into the library, and those of a Hugging Face cache, from
`snapshots/REVISION` to `blobs` of the same repository. What is pickled or is code is never taken. Everything here
raises `ModelRefused` or `BadRequest` with the path and the reason.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvcellar.errors import BadRequest, ModelNotFound, ModelRefused, shown
from kvcellar.library.library import Library, LibraryModel
from kvcellar.library.manifest import is_file_name, is_module_folder
from kvcellar.library.modelfile import Command
from kvcellar.library.names import RESERVED
from kvcellar.library.tools import Tools
from kvcellar.repository import INDEX, MOST_TEXT, MTP, SINGLE, TEXTS, pickled, weight_map

CONFIG = "config.json"
ADAPTER_FILES = ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NOT_TAKEN = (*ADAPTER_FILES, INDEX, "trainer_state.json", "optimizer.json", "training_args.json")
_GGUF = ".gguf"


@dataclass(frozen=True, slots=True)
class Source:
    """A directory with the files of a model or an adapter, or a GGUF file. `model`: it is one of the library."""

    path: Path
    model: LibraryModel | None = None

    @property
    def is_gguf(self) -> bool:
        return self.model is None and self.path.suffix.lower() == _GGUF and self.path.is_file()

    def same(self, other: "Source") -> bool:
        """Whether both are one place on the disk."""
        return os.path.realpath(self.path) == os.path.realpath(other.path)


def found(command: Command, library: Library, tools: Tools, folders: Sequence[Path]) -> Source:
    """The source that FROM, DRAFT or ADAPTER names: a path, absolute or in one of `folders` (without them, no path is
    read), else a model that comes with kvcellar, a name of the library, or a name of the local Hugging Face cache."""
    text = command.args
    if not text or len(text) > 4096 or "\0" in text:
        raise command.error(
            f"{command.keyword} is {shown(text)}; a directory, a {_GGUF} file, or the name of a model is needed"
        )
    marker = ADAPTER_CONFIG if command.name == "adapter" else CONFIG
    try:
        path = _path(text, folders, marker)
        if path is not None:
            return Source(path)
        if text not in RESERVED and (model := library.find(text)) is not None:
            return Source(model.directory, model)
        return Source(tools.find(text))
    except (ModelNotFound, OSError, RuntimeError) as error:
        where = f"no {text!r} in {' or '.join(map(str, folders))}, " if folders else ""
        looked = f"there is {where}no model of that name in the library, and {error}"
        raise command.error(
            f"{command.keyword} {text}: {looked if isinstance(error, ModelNotFound) else error}"
        ) from error
    except (BadRequest, ModelRefused) as error:
        raise command.error(f"{command.keyword} {text}: {error}") from error


def _path(text: str, folders: Sequence[Path], marker: str) -> Path | None:
    """The directory with the file `marker`, or the GGUF file, at this path; None if there is none, and the text may be
    a name."""
    explicit = text in (".", "..") or text.startswith(("/", "./", "../", "~"))
    if not folders:
        if explicit:
            raise BadRequest("paths of this machine are not read here; give the name of a model")
        return None
    given = Path(text).expanduser()
    paths = [given] if given.is_absolute() else [folder / given for folder in folders]
    for path in paths:
        if (path / marker).is_file() or (path.is_file() and path.suffix.lower() == _GGUF):
            return path
    if explicit:
        raise ModelRefused(f"{paths[0]} {_lacking(paths[0], marker)}")
    return None


def _lacking(path: Path, marker: str) -> str:
    """Why this is no source."""
    os.stat(path)  # raises with the reason for what cannot be read, such as a loop of links
    if not path.is_dir():
        return f"is a file; a directory with {marker}, or a {_GGUF} file, is needed"
    if marker == CONFIG and (inside := sorted(one.name for one in path.iterdir() if one.suffix.lower() == _GGUF)):
        return f"has no {marker}. Name the file: {path / inside[0]}"
    return f"has no {marker}"


# -- files --------------------------------------------------------------------------------------------------------


def model_files(directory: Path) -> tuple[str, ...]:
    """The files that belong to the model of a directory, by their paths in it, in order."""
    weights = _weights(directory)
    texts = [
        entry.name
        for entry in os.scandir(directory)
        if entry.name.endswith(TEXTS) and not entry.name.startswith(".") and entry.name not in _NOT_TAKEN
        if not entry.name.endswith(".index.json") and is_file_name(entry.name) and entry.is_file()
    ]
    texts += module_files(directory)
    for name in texts:
        if (size := (directory / name).stat().st_size) > MOST_TEXT:
            raise ModelRefused(f"{directory / name} has {size} bytes; {MOST_TEXT} are allowed")
    return tuple(sorted({*weights, *texts}))


def resolved(directory: Path, name: str, library: Path) -> Path:
    """The place of a file of a directory, links followed. Raises `ModelRefused` if that is outside of it, and of the
    library, which is trusted."""
    root, place = Path(os.path.realpath(directory)), Path(os.path.realpath(directory / name))
    cache = [root.parent.parent / "blobs"] if root.parent.name == "snapshots" else []
    if not any(place.is_relative_to(one) for one in (root, Path(os.path.realpath(library)), *cache)):
        raise ModelRefused(
            f"{directory / name} is a link that leads out of its directory, to {place}. Copy that file into the "
            f"directory, if it is a part of the model"
        )
    return place


def module_files(directory: Path) -> list[str]:
    """What sentence-transformers has beside the network of a model that embeds: a config for each module."""
    return sorted(
        f"{entry.name}/{CONFIG}"
        for entry in os.scandir(directory)
        if is_module_folder(entry.name) and entry.is_dir() and (directory / entry.name / CONFIG).is_file()
    )


def adapter_files(directory: Path) -> tuple[str, ...]:
    """The names of the files of a peft adapter."""
    for name in ADAPTER_FILES:
        if not (directory / name).is_file():
            raise ModelRefused(f"{directory} has no {name}, so it is no adapter of peft{pickled(directory)}")
    return ADAPTER_FILES


def _weights(directory: Path) -> list[str]:
    """Weights files, with their index, that the model is loaded from."""
    mtp = [MTP] if (directory / MTP).is_file() else []
    if not (shards := sorted(set(weight_map(directory).values()))):
        return [SINGLE, *mtp]
    if strange := [name for name in shards if not is_file_name(name)]:
        raise ModelRefused(
            f"{directory / INDEX} lists {shown(strange[0])}. Names of files of a model have up to 200 letters, digits, "
            f"- _ and ., and begin with a letter or a digit; rename it"
        )
    return [INDEX, *shards, *mtp]
