# pyright: standard
"""hub: fetches a model from a hub into the local Hugging Face cache.

Nothing of the package calls `look_up` or `pull` by itself: they are called for a command or a request that says so.

Always true: large files are put into the cache with the digest that the hub lists, or not at all; the name of a model
points to a commit whose files were all fetched and checked. Until then the commit that was there before is found.

Errors of a hub are told in one sentence each, with what to do about them.
"""

import glob
import re
import shutil
import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
from huggingface_hub import HfApi, RepoFile, constants, hf_hub_url, snapshot_download
from huggingface_hub.errors import (
    FileMetadataError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import build_hf_headers
from huggingface_hub.utils import logging as hub_logging
from tqdm.auto import tqdm

from kvcellar.errors import KvcellarError, ModelNotFound, ModelRefused, PullFailed, first_few
from kvcellar.library.download import Listed, WrongDigest, download, partial_of, sha256_of
from kvcellar.library.hub_cache import blob_of, bytes_of, existing, is_weights, locked, point, storage_of
from kvcellar.progress import Listener, Progress, rounded
from kvcellar.repository import Repository, is_used

_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"
_KEPT = "What was downloaded is kept: pull it again to continue"


@contextmanager
def explained(repository: Repository, endpoint: str | None) -> Generator[None]:
    """Within the block, errors of huggingface_hub and of the network become `ModelNotFound` and `PullFailed`."""
    hub = endpoint or constants.ENDPOINT
    try:
        yield
    except GatedRepoError as error:
        raise PullFailed(
            f"{repository.name} is gated: accept its terms at {hub}/{repository.name}, then {_LOG_IN}, with an account "
            f"that has access, and pull it again"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelNotFound(
            f"{repository.name} at {hub} has no revision {repository.revision}: there is no such branch, tag or commit"
        ) from error
    except RepositoryNotFoundError as error:
        raise _absent(repository, hub) from error
    except HfHubHTTPError as error:
        raise _of_status(repository, hub, error.response.status_code) from error
    except OfflineModeIsEnabled as error:
        raise PullFailed(
            f"{repository} cannot be pulled, because HF_HUB_OFFLINE is set. Unset it, and pull again"
        ) from error
    except (httpx2.HTTPError, httpx2.InvalidURL, LocalEntryNotFoundError) as error:
        reason = " ".join(f"{type(error.__cause__ or error).__name__}: {error.__cause__ or error}".split())
        raise PullFailed(
            f"{hub} cannot be reached ({reason}). Check the network, and HF_ENDPOINT and HTTPS_PROXY if they are set. "
            f"{_KEPT}"
        ) from error
    except FileMetadataError as error:
        raise _foreign(repository, hub, error) from error


@contextmanager
def not_of_a_hub(repository: Repository, endpoint: str | None) -> Generator[None]:
    """Within the block, what is no listing of a hub raises `PullFailed`."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise _foreign(repository, endpoint or constants.ENDPOINT, error) from error


def _foreign(repository: Repository, hub: str, error: Exception) -> PullFailed:
    return PullFailed(
        f"what {hub} returns for {repository} is not what a hub returns ({type(error).__name__}: {error}). Check "
        f"HF_ENDPOINT and proxies"
    )


def _absent(repository: Repository, hub: str) -> ModelNotFound:
    return ModelNotFound(
        f"{hub} has no model {repository.name}, or it is private. Check the name; for a private model, {_LOG_IN}"
    )


def _of_status(repository: Repository, hub: str, status: int) -> KvcellarError:
    if status == 404:
        return _absent(repository, hub)
    if status in (401, 403):
        return PullFailed(
            f"{hub} refuses the token for {repository.name} (status {status}). Check HF_TOKEN, or log in again with "
            f"`hf auth login`"
        )
    if status == 429:
        return PullFailed(f"{hub} gets too many requests from here (status 429). {_KEPT}, later or with a token")
    return PullFailed(f"{hub} failed to send {repository} (status {status}). {_KEPT}")


_CONNECTIONS = 4  # files that are fetched at once
_SPARE = 64 << 20  # bytes of the disk that stay free
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Available:
    """What a hub has of a model, and what of it is not in the local cache."""

    repository: Repository
    commit: str
    files: tuple[Listed, ...]  # those that are used
    missing: tuple[Listed, ...]
    directory: Path  # where the files will be
    missing_bytes: int  # to be downloaded, less what interrupted downloads have left
    free_bytes: int  # of the disk
    endpoint: str | None
    token: str | bool | None = field(repr=False)

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)


@dataclass(frozen=True, slots=True)
class Pulled:
    """A model that is in the local cache: `Engine(pulled.name)` loads it."""

    name: str
    commit: str
    directory: Path
    files: int
    bytes: int
    downloaded_bytes: int  # of this call
    unchecked: tuple[str, ...]  # weights files for which the hub lists no SHA-256


def look_up(
    name: str, *, revision: str | None = None, endpoint: str | None = None, token: str | bool | None = None
) -> Available:
    """Ask the hub what it has of a model. Downloads no file and changes nothing.

    `endpoint`: None is $HF_ENDPOINT, or else the public hub. `token`: None is $HF_TOKEN, or else the stored login.
    Raises `BadRequest` for what is no name, `ModelNotFound`, `ModelRefused` where the repository has no weights as
    safetensors, and `PullFailed` for everything else, with what to do.
    """
    repository = Repository.parse(name).at(revision)
    with explained(repository, endpoint), not_of_a_hub(repository, endpoint):
        api = HfApi(endpoint=endpoint, token=token)
        about = api.model_info(repository.name, revision=repository.revision, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT)
        commit = about.sha
        if commit is None or not _COMMIT.fullmatch(commit):
            raise ValueError(f"its commit is {commit!r}")
        tree = api.list_repo_tree(repository.name, recursive=True, revision=commit)
        entries = [entry for entry in tree if isinstance(entry, RepoFile)]
        files = tuple(_listed(entry) for entry in entries if is_used(entry.path))
    _check_loadable(repository, {file.path for file in files}, [entry.path for entry in entries])
    storage = storage_of(repository)
    directory = storage / "snapshots" / commit
    missing = tuple(file for file in files if not _is_cached(file, storage, directory))
    half = sum(bytes_of(partial_of(blob_of(storage, file))) for file in missing if file.sha256)
    return Available(
        repository=repository,
        commit=commit,
        files=files,
        missing=missing,
        directory=directory,
        missing_bytes=max(0, sum(file.size for file in missing) - half),
        free_bytes=shutil.disk_usage(existing(storage)).free,
        endpoint=endpoint,
        token=token,
    )


def pull(
    name: str,
    *,
    revision: str | None = None,
    endpoint: str | None = None,
    token: str | bool | None = None,
    progress: Listener | None = None,
) -> Pulled:
    """Download what is missing of a model into the local Hugging Face cache, and check all of its weights.

    `name` is `owner/name` or `owner/name@revision`. Files that are there are not downloaded again, and interrupted
    downloads are continued. `progress` is called with the stage and the bytes, from any thread; what it raises ends the
    download and is raised here. Parameters and exceptions otherwise as of `look_up`.
    """
    if progress is not None:
        progress(Progress(f"looking up {name}"))
    return fetch(look_up(name, revision=revision, endpoint=endpoint, token=token), progress)


def fetch(available: Available, progress: Listener | None = None) -> Pulled:
    """Download what was looked up. As `pull`."""
    _check_space(available)
    repository, storage = available.repository, storage_of(available.repository)
    with explained(repository, available.endpoint), _quiet(), locked(storage, repository, progress):
        fresh = _download(available, progress)
        _link(available)
        _check(available, fresh, progress)
        if repository.revision != available.commit:
            point(storage, repository.revision, available.commit)
    return Pulled(
        name=str(repository),
        commit=available.commit,
        directory=available.directory,
        files=len(available.files),
        bytes=available.bytes,
        downloaded_bytes=available.missing_bytes,
        unchecked=tuple(file.path for file in available.files if is_weights(file.path) and not file.sha256),
    )


# -- what a repository has -----------------------------------------------------------------------------------------


def _listed(entry: RepoFile) -> Listed:
    size = entry.lfs.size if entry.lfs is not None else entry.size
    sha256 = entry.lfs.sha256 if entry.lfs is not None else None
    if not isinstance(size, int) or size < 0 or (sha256 is not None and not _SHA256.fullmatch(sha256)):
        raise ValueError(f"{entry.path} has {size} bytes and sha256 {sha256}")
    return Listed(entry.path, size, sha256)


def _check_loadable(repository: Repository, used: set[str], paths: list[str]) -> None:
    """Raise `ModelRefused` if the repository cannot be loaded whatever is downloaded."""
    if "adapter_config.json" not in used and "config.json" not in used:
        raise ModelRefused(f"{repository} has no config.json, so it is not a model; it has {_some(paths)}")
    if not any(map(is_weights, used)):
        raise ModelRefused(
            f"{repository} has no weights as safetensors, the only format that is downloaded; it has {_some(paths)}. "
            f"Nothing was downloaded"
        )


def _some(paths: list[str]) -> str:
    return first_few(sorted(paths), 8) if paths else "no files"


def _is_cached(file: Listed, storage: Path, directory: Path) -> bool:
    return (directory / file.path).exists() or (file.sha256 is not None and blob_of(storage, file).exists())


def _check_space(available: Available) -> None:
    if available.missing_bytes + _SPARE > available.free_bytes:
        raise PullFailed(
            f"{available.repository} needs {rounded(available.missing_bytes)} more on the disk of "
            f"{constants.HF_HUB_CACHE}, which has {rounded(available.free_bytes)} free. Free some, or set HF_HOME to a "
            f"directory on another disk; nothing was downloaded"
        )


# -- the download --------------------------------------------------------------------------------------------------


class _Stopped(Exception):
    """Another connection has failed, or the user has interrupted the download."""


class _Meter:
    """Adds up the bytes of all connections and reports them."""

    def __init__(self, stage: str, total: int, listener: Listener | None) -> None:
        self._stage, self._total, self._listener = stage, total, listener
        self._lock = threading.Lock()
        self._done, self._stopped = 0, False

    def count(self, number: int) -> None:
        with self._lock:
            if self._stopped:
                raise _Stopped
            self._done += number
            if self._listener is not None:
                self._listener(Progress(self._stage, self._done, self._total, "B"))

    def stop(self) -> None:
        """Ends each connection at its next bytes."""
        self._stopped = True


def _download(available: Available, progress: Listener | None) -> set[Path]:
    """Download the missing files that have a digest; returns where they are."""
    repository, storage = available.repository, storage_of(available.repository)
    headers = build_hf_headers(token=available.token)
    files = {  # one for each content: paths with the same content share it
        file.sha256: file
        for file in available.missing
        if file.sha256 and file.size <= constants.MAX_HTTP_DOWNLOAD_SIZE and not blob_of(storage, file).exists()
    }.values()
    meter = _Meter(f"downloading {repository}", sum(file.size for file in files), progress)
    (storage / "blobs").mkdir(parents=True, exist_ok=True)

    def one(file: Listed) -> Path:
        url = hf_hub_url(repository.name, file.path, revision=available.commit, endpoint=available.endpoint)
        download(url, headers, file, blob_of(storage, file), meter.count)
        return blob_of(storage, file).resolve()

    with ThreadPoolExecutor(_CONNECTIONS, thread_name_prefix="kvcellar-pull") as pool:
        running = [pool.submit(one, file) for file in files]
        try:
            return {future.result() for future in as_completed(running)}
        except WrongDigest as error:
            raise PullFailed(
                f"{repository} was not pulled, because what was downloaded of it is not what the hub lists: {error}. "
                f"That file was removed. Pull it again; if that changes nothing, the file of the hub is damaged"
            ) from error
        finally:
            meter.stop()
            pool.shutdown(wait=False, cancel_futures=True)


def _link(available: Available) -> None:
    """Download all other files, and enter all of them into the cache at this commit."""
    snapshot_download(
        available.repository.name,
        revision=available.commit,
        allow_patterns=[glob.escape(file.path) for file in available.files],
        endpoint=available.endpoint,
        token=available.token,
        max_workers=_CONNECTIONS,
        tqdm_class=_NoBar,
    )


def _check(available: Available, fresh: set[Path], progress: Listener | None) -> None:
    """Hash the files that were in the cache before. Raises `PullFailed`, and removes those with another digest."""
    before = [
        (file, content)
        for file in available.files
        if file.sha256 and (content := (available.directory / file.path).resolve()) not in fresh
    ]
    meter = _Meter(f"checking {available.repository}", sum(file.size for file, _ in before), progress)
    damaged: list[str] = []
    for file, content in before:
        if sha256_of(content, meter.count) != file.sha256:
            damaged.append(file.path)
            (available.directory / file.path).unlink()
            content.unlink(missing_ok=True)
    if damaged:
        raise PullFailed(
            f"{', '.join(damaged)} of {available.repository} in the local Hugging Face cache had another sha256 than "
            f"the hub lists, and was removed. Pull it again"
        )


class _NoBar(tqdm):
    """Shows nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "disable": True})


@contextmanager
def _quiet() -> Generator[None]:
    """Within the block, huggingface_hub logs only errors."""
    before = hub_logging.get_verbosity()
    hub_logging.set_verbosity_error()
    try:
        yield
    finally:
        hub_logging.set_verbosity(before)
