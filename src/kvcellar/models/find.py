"""find: the directory of a model on this machine: a directory, or a snapshot in the local Hugging Face cache."""

import re
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, IncompleteSnapshotError, LocalEntryNotFoundError

from kvcellar.errors import ModelNotFound, ModelRefused

_NAME = re.compile(r"([A-Za-z0-9][\w.-]{0,95}/)?[A-Za-z0-9][\w.-]{0,95}")
# Files that decide what a model answers, and whose absence nothing else would show. Weights are not among them: which
# of them are needed stands in their index, and all are missed when they are read.
_DECIDING = ("config.json", "generation_config.json")
_TEXT = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip


def find(model: str | Path) -> tuple[str, Path]:
    """(name, directory) of a model: of a directory, or of a name (`owner/name`, or `name` for those that have no owner)
    whose `main` revision is in the local Hugging Face cache. Raises `ModelNotFound`, `ModelRefused`.
    """
    text = str(model)
    if not text or len(text) > 4096 or "\0" in text:
        raise ModelNotFound(f"{text[:80]!r} is neither a directory nor the name of a model")
    try:
        path = Path(model).expanduser()
        if path.is_dir():
            return path.resolve().name, path.resolve()
        is_file = path.exists()
    except (OSError, RuntimeError) as error:  # an unknown user's home, a name too long for this file system, ...
        raise ModelNotFound(f"{text[:80]!r} cannot be looked at: {error}") from error
    if is_file:
        raise ModelRefused(f"{path} is a file; a model is a directory with config.json and safetensors weights")
    if not _NAME.fullmatch(text):
        raise ModelNotFound(f"there is no directory {text!r}, and it is not a name like owner/model or model")
    try:
        return text, _snapshot(text)
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        raise ModelNotFound(
            f"there is no directory {text!r}, and no main revision of a model of that name in the local Hugging Face "
            "cache. Nothing is downloaded: fetch it first, or give a directory."
        ) from error


def _snapshot(name: str) -> Path:
    """The cached snapshot of `main`, though parts of the repository that are not needed may not have been fetched.

    huggingface_hub notes which files a repository has; where it did not, what is there is taken as all there is.
    """
    try:
        return Path(snapshot_download(name, local_files_only=True))
    except IncompleteSnapshotError as error:
        path = Path(error.snapshot_path)
    _require(name, _DECIDING)
    if any((path / file).is_file() for file in _TEXT):
        _require(name, _TEXT)
    return path


def _require(name: str, files: tuple[str, ...]) -> None:
    """Raise `ModelRefused` if the repository has one of these files and the snapshot does not."""
    try:
        snapshot_download(name, local_files_only=True, allow_patterns=list(files))
    except IncompleteSnapshotError as error:
        raise ModelRefused(
            f"{name} in the local Hugging Face cache lacks files that decide what it answers. {error} Fetch these "
            f"files too: allow_patterns must let {', '.join(files)} through."
        ) from error
