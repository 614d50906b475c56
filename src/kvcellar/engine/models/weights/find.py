"""find: the directory of a model on this machine: a given directory, or a snapshot in the local Hugging Face cache.

Nothing is downloaded: `library/hub.py` does that, when it is called for it.
"""

from pathlib import Path

from kvcellar.engine.models import embedded
from kvcellar.errors import BadRequest, ModelNotFound, ModelRefused
from kvcellar.repository import Repository

# Files whose absence would change what a model generates without an error. Weights files are not among them: their
# index lists them, and each missing one is an error.
_CONFIGS = ("config.json", "generation_config.json")
_TEXT = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip


def locate(model: str | Path) -> tuple[str, Path]:
    """Name and directory of a model that comes with kvcellar, or that `find` finds. Raises `ModelNotFound`,
    `ModelRefused`."""
    here = embedded.found(model)
    return (str(model), here) if here is not None else find(model)


def find(model: str | Path) -> tuple[str, Path]:
    """(name, directory) of a model, given as a directory or as a name: `owner/name`, or `name` where there is no owner,
    each with an optional `@revision`, which is `main` by default, in the local Hugging Face cache. Raises
    `ModelNotFound`, `ModelRefused`.
    """
    text = str(model)
    if not text or len(text) > 4096 or "\0" in text:
        raise ModelNotFound(f"{text[:80]!r} is neither a directory nor the name of a model")
    if (path := _directory(model)) is not None:
        return path.name, path
    try:
        return cached(text)
    except ModelNotFound as error:
        raise ModelNotFound(f"there is no directory {text!r}, and {error}") from error


def cached(text: str) -> tuple[str, Path]:
    """(name, directory) of a model in the local Hugging Face cache, by its name alone: no other directory is looked at.
    Raises `ModelNotFound`, `ModelRefused`."""
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError  # importing it takes tenths of a second

    try:
        repository = Repository.parse(text)
    except BadRequest as error:
        raise ModelNotFound(str(error)) from error
    try:
        return str(repository), _snapshot(repository)
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        raise ModelNotFound(
            f"no {repository.revision} revision of a model of that name in the local Hugging Face cache. Nothing is "
            f"downloaded by itself: `kvcellar pull {repository}` does that."
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


def _snapshot(repository: Repository) -> Path:
    """The cached snapshot, which may lack files of the repository that are not needed.

    huggingface_hub records which files a repository has; without that record, a snapshot is taken to be complete.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import IncompleteSnapshotError

    try:
        return Path(snapshot_download(repository.name, revision=repository.revision, local_files_only=True))
    except IncompleteSnapshotError as error:
        path = Path(error.snapshot_path)
    _require(repository, _CONFIGS)
    if any((path / file).is_file() for file in _TEXT):
        _require(repository, _TEXT)
    return path


def _require(repository: Repository, files: tuple[str, ...]) -> None:
    """Raise `ModelRefused` if the repository has one of these files and the snapshot does not."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import IncompleteSnapshotError

    try:
        snapshot_download(
            repository.name, revision=repository.revision, local_files_only=True, allow_patterns=list(files)
        )
    except IncompleteSnapshotError as error:
        raise ModelRefused(
            f"{repository} in the local Hugging Face cache lacks files that change what it generates: {error} "
            f"`kvcellar pull {repository}` downloads them."
        ) from error
