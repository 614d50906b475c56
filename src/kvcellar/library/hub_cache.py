"""hub_cache: the local Hugging Face cache: which models it has, where their files are, and its locks."""

import fcntl
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants, scan_cache_dir
from huggingface_hub.errors import CacheNotFound
from huggingface_hub.file_download import repo_folder_name

from kvcellar.library.download import Listed
from kvcellar.progress import Listener, Progress
from kvcellar.repository import Repository

_WAIT = 0.2  # seconds between looks at the lock of another process


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model of the local cache."""

    name: str  # as it is loaded: owner/name, or owner/name@revision
    commit: str
    directory: Path
    bytes: int
    modified: float  # seconds since 1970


def cached_models() -> list[CachedModel]:
    """The models in the local Hugging Face cache that have a config and weights as safetensors, in order of their
    names. One with several revisions is listed once for each."""
    try:
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return []
    found: list[CachedModel] = []
    for cached in (repository for repository in repositories if repository.repo_type == "model"):
        for one in cached.revisions:
            names = {file.file_name for file in one.files}
            if "config.json" in names and any(map(is_weights, names)):
                named = [Repository(cached.repo_id, ref) for ref in one.refs or {one.commit_hash}]
                about = (one.commit_hash, one.snapshot_path, one.size_on_disk, one.last_modified)
                found += [CachedModel(str(repository), *about) for repository in named]
    return sorted(found, key=lambda model: model.name)


def is_weights(path: str) -> bool:
    return path.endswith(".safetensors")


def storage_of(repository: Repository) -> Path:
    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repository.name, repo_type="model")


def blob_of(storage: Path, file: Listed) -> Path:
    """Where the cache has the content of a file with a digest."""
    return storage / "blobs" / str(file.sha256)


def bytes_of(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def existing(path: Path) -> Path:
    return next(one for one in (path, *path.parents) if one.exists())


@contextmanager
def locked(storage: Path, repository: Repository, progress: Listener | None) -> Generator[None]:
    """One pull of a repository at a time, of all processes and threads; others wait."""
    locks = _locks(storage)
    locks.mkdir(parents=True, exist_ok=True)
    with open(locks / "kvcellar.lock", "w") as opened:
        while True:
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if progress is not None:
                    progress(Progress(f"waiting for another pull of {repository}"))
                time.sleep(_WAIT)
        yield


def point(storage: Path, revision: str, commit: str) -> None:
    """Make a branch or a tag of the cache name this commit. The caller holds the lock."""
    ref = storage / "refs" / revision
    ref.parent.mkdir(parents=True, exist_ok=True)
    temporary = _locks(storage) / "kvcellar.ref"
    temporary.write_text(commit)
    temporary.replace(ref)


def _locks(storage: Path) -> Path:
    return storage.parent / ".locks" / storage.name
