"""hub_errors: what went wrong with a hub, in one sentence each, and what to do about it."""

from collections.abc import Generator
from contextlib import contextmanager

import httpx2
from huggingface_hub import constants
from huggingface_hub.errors import (
    FileMetadataError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from kvcellar.errors import KvcellarError, ModelNotFound, PullFailed
from kvcellar.repository import Repository

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
