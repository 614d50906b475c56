"""inspecting: mounts the inspector on a server, which know nothing of each other."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import TypeVar

from starlette.requests import Request

from kvcellar.engine.served_engine import ServedEngine
from kvcellar.errors import EngineClosed, KvcellarError, ModelNotFound
from kvcellar.inspector.answers import EntryText, RequestWay, Snapshot
from kvcellar.inspector.routes import API, inspector_routes, open_paths
from kvcellar.inspector.source import Viewer
from kvcellar.serve.api_errors import ApiError
from kvcellar.serve.json_text import printable
from kvcellar.serve.namespaces import api_key, owner
from kvcellar.serve.operation import SSE, Operation, Parameter
from kvcellar.serve.shared import Mounted, Shared

T = TypeVar("T")
MODEL = Parameter(about="The name of a loaded model. Default: the first one.", schema={"type": "string"})
NAME = Parameter(about="The name of an entry.", schema={"type": "string"})
NUMBER = Parameter(about="The number of a request.", schema={"type": "integer", "minimum": 0, "maximum": 10**18 - 1})
MAY_FAIL = (400, 404, 409)  # there is no such entry or model, or the model is not loaded
OPERATIONS: Mapping[tuple[str, str], Operation] = MappingProxyType(
    {
        ("GET", f"{API}snapshot"): Operation(
            api="Inspector", about="What there is now.", query={"model": MODEL}, answer=Snapshot, errors=MAY_FAIL
        ),
        ("GET", f"{API}stream"): Operation(
            api="Inspector",
            about="The same as events, one when something has changed.",
            query={"model": MODEL},
            streams=SSE,
            event=Snapshot,
            errors=MAY_FAIL,
        ),
        ("GET", f"{API}entry"): Operation(
            api="Inspector",
            about="The text of an entry of the tree.",
            query={"name": NAME, "model": MODEL},
            answer=EntryText,
            errors=MAY_FAIL,
        ),
        ("GET", f"{API}request"): Operation(
            api="Inspector",
            about="The way of a request through the tree.",
            query={"number": NUMBER, "model": MODEL},
            answer=RequestWay,
            errors=MAY_FAIL,
        ),
    }
)
OFF = "the inspector of this server is off; start it with --inspector"


def inspector(shared: Shared) -> Mounted:
    """The page and its data. Without the page, only admin keys read the data; without these, there is nothing."""
    page = shared.settings.inspects
    if not page and not shared.keys.now.admin:
        return Mounted(())
    routes = inspector_routes(ServerSource(shared), page=page)
    return Mounted(routes, open_paths() if page else frozenset(), (API,), OPERATIONS)


class ServerSource:
    """A `Source`."""

    def __init__(self, shared: Shared) -> None:
        self._host, self._settings, self._threads = shared.host, shared.settings, shared.threads
        self._drain, self._keys = shared.drain, shared.keys

    def viewer(self, request: Request) -> Viewer:
        """An API key sees what its own requests have computed, an admin key sees all, without texts. A server with one
        API key, or none, has one tenant. Raises `ApiError` 403 for an API key where the page is off."""
        settings, keys, key = self._settings, self._keys.now, api_key(request.scope)
        if not keys.api:
            if not settings.inspects:
                raise ApiError(403, OFF, code="not_allowed")
            return Viewer(None, True, None)
        if key in keys.admin:
            return Viewer(None, False, None)
        if not settings.inspects:
            raise ApiError(403, OFF, code="not_allowed")
        own = owner(request.scope)
        return Viewer(own if len(keys.api) > 1 else None, not settings.share_prefixes, own)

    def models(self) -> Sequence[str]:
        return self._host.names

    async def look(self, model: str | None, work: Callable[[ServedEngine], T]) -> T:
        def looked() -> T:
            with self._host.loaded(model) as lease:
                return work(lease.engine)

        try:
            return await self._threads.run("inspector", looked)
        except (EngineClosed, ModelNotFound):
            raise
        except KvcellarError as error:
            raise ApiError(400, printable(str(error), 500), code="not_possible") from error

    async def pause(self, seconds: float) -> bool:
        ending = asyncio.Event()
        with self._drain.on_start(ending.set), suppress(TimeoutError):
            if not self._drain.started:
                await asyncio.wait_for(ending.wait(), seconds)
        return not self._drain.started
