"""failed_loads: the error of a load that has failed, for the log, and for the clients that wait for it: without the
paths of the server."""

import logging
import re
import traceback

from kvcellar.errors import EngineClosed, KvcellarError, ModelNotFound
from kvcellar.serve.http.api_errors import ApiError, api_error
from kvcellar.serve.http.json_text import printable
from kvcellar.serve.models.model_spec import ModelSpec, not_served

log = logging.getLogger("kvcellar.serve")

# Not those of routes, of URLs, or of names like owner/name.
_PATH = re.compile(r"(?<![\w./:~-])(?:~|(?=/(?!v1/|api/)))/(?:[^\s/:;,'\"]+/)+(?=[^\s/:;,'\"])")


def without_paths(message: str) -> str:
    """The message with the last name of each absolute path only: the reason why a model is refused may name a file."""
    return _PATH.sub("", message)


def refused(spec: ModelSpec, error: BaseException) -> Exception:
    """The error of a load, as a client gets it."""
    if isinstance(error, ModelNotFound):  # removed meanwhile
        return not_served(spec.name)
    if isinstance(error, MemoryError | OSError):
        message = f"the model {spec.name} cannot be loaded now; the log of the server has the reason"
        return ApiError(503, message, "model", "model_not_loaded", {"retry-after": "10"})
    if isinstance(error, KvcellarError) and not isinstance(error, EngineClosed):
        message = printable(f"the model {spec.name} cannot be loaded: {without_paths(str(error))}", 2000)
        return ApiError(400, message, "model", "model_refused")
    return error if isinstance(error, Exception) else api_error(error)


def log_failure(spec: ModelSpec, error: BaseException) -> None:
    if isinstance(error, KvcellarError):
        log.error("%s cannot be loaded: %s", spec.name, error)
    else:
        log.error("%s cannot be loaded", spec.name, exc_info=error)


def forget(error: BaseException) -> None:
    """Free the local variables of the functions that an error went through: the half of an engine. Those of its causes,
    too."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        left += [one.__cause__, one.__context__]
        traceback.clear_frames(one.__traceback__)
        one.__traceback__ = None
