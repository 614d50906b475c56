"""find: the directory of a model on this machine: a given directory, or a snapshot in the local Hugging Face cache."""

import re
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, IncompleteSnapshotError, LocalEntryNotFoundError

from kvcellar.errors import ModelNotFound, ModelRefused

_NAME = re.compile(r"([A-Za-z0-9][\w.-]{0,95}/)?[A-Za-z0-9][\w.-]{0,95}")
# Files whose absence would change what a model generates without an error. Weights files are not among them: their
# index lists them, and each missing one is an error.
_CONFIGS = ("config.json", "generation_config.json")
_TEXT = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip


def find(model: str | Path) -> tuple[str, Path]:
    """(name, directory) of a model, given as a directory or as a name (`owner/name`, or `name` where there is no owner)
    whose `main` revision is in the local Hugging Face cache. Raises `ModelNotFound`, `ModelRefused`.
    """
    text = str(model)
    if not text or len(text) > 4096 or "\0" in text:
        raise ModelNotFound(f"{text[:80]!r} is neither a directory nor the name of a model")
    if (path := _directory(model)) is not None:
        return path.name, path
    if not _NAME.fullmatch(text):
        raise ModelNotFound(f"there is no directory {text!r}, and it is not a name like owner/model or model")
    try:
        return text, _snapshot(text)
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        raise ModelNotFound(
            f"there is no directory {text!r}, and no main revision of a model of that name in the local Hugging Face "
            "cache. Nothing is downloaded: fetch it first, or give a directory."
        ) from error


def _directory(model: str | Path) -> Path | None:
    """The directory at this path; None if nothing is there."""
    try:
        path = Path(model).expanduser()
        if path.is_dir():
            return path.resolve()
        is_file = path.exists()
    except (OSError, RuntimeError) as error:  # the home of an unknown user, a name too long for the file system, ...
        raise ModelNotFound(f"{str(model)[:80]!r} cannot be read: {error}") from error
    if is_file:
        raise ModelRefused(f"{path} is a file; a model is a directory with config.json and safetensors weights")
    return None


def _snapshot(name: str) -> Path:
    """The cached snapshot of `main`, which may lack files of the repository that are not needed.

    huggingface_hub records which files a repository has; without that record, a snapshot is taken to be complete.
    """
    try:
        return Path(snapshot_download(name, local_files_only=True))
    except IncompleteSnapshotError as error:
        path = Path(error.snapshot_path)
    _require(name, _CONFIGS)
    if any((path / file).is_file() for file in _TEXT):
        _require(name, _TEXT)
    return path


def _require(name: str, files: tuple[str, ...]) -> None:
    """Raise `ModelRefused` if the repository has one of these files and the snapshot does not."""
    try:
        snapshot_download(name, local_files_only=True, allow_patterns=list(files))
    except IncompleteSnapshotError as error:
        raise ModelRefused(
            f"{name} in the local Hugging Face cache lacks files that change what it generates. {error} Fetch these "
            f"files too: allow_patterns must include {', '.join(files)}."
        ) from error
