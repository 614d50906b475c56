"""model_use: the use of a model by one request, from when its body was parsed to the end of the request.

Where the model is loaded, one thread parses the body and submits its prompts. Where it is not, the thread is free while
it is loaded: the request waits on the event loop with the bytes of its body, which the budget counts, and not with what
they were parsed to; a second call parses them again and submits the prompts. A model that is used for the
first time is found on the thread of the library, because its files may have to be compared.

Routes that a model answers at once, without generating, are `ModelRoute`s.

Always true:
  * the lease of the request is released when the request has ended, also if a thread gets it later.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from typing import TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from kvcellar.durations import seconds_of
from kvcellar.errors import EngineClosed, KvcellarError, ModelNotFound
from kvcellar.frontend.engine import Engine
from kvcellar.frontend.served_engine import NamedEngine
from kvcellar.serve.answers import Answer
from kvcellar.serve.generation.namespaces import Caller
from kvcellar.serve.http.api_errors import ApiError
from kvcellar.serve.http.body import RequestBody, receive_json
from kvcellar.serve.http.json_text import printable
from kvcellar.serve.http.parsing import Fields, Limits, parse_object, validated
from kvcellar.serve.http.reader_threads import Kind
from kvcellar.serve.http.request_log import RequestLog
from kvcellar.serve.http.sending import send_json, until_disconnected
from kvcellar.serve.models.model_manager import Lease
from kvcellar.serve.models.model_spec import ModelSpec
from kvcellar.serve.shared import Shared

T = TypeVar("T")
Body = TypeVar("Body", bound=BaseModel)

KeepAlive = Callable[[Fields], float | None]  # of a body: seconds that its model stays loaded; None: the server's


def no_keep_alive(sent: Fields) -> None:
    """Of bodies that do not say it."""


def sent_keep_alive(sent: Fields) -> float | None:
    """The field `keep_alive` of Ollama's bodies. Raises `BadRequest` for what is no time."""
    given = sent.get("keep_alive")
    return None if given is None else seconds_of(given)


class ModelUse(AbstractContextManager["ModelUse"]):
    """A context manager on the event loop."""

    def __init__(self, server: Shared, body: RequestBody, keep_alive: KeepAlive = no_keep_alive) -> None:
        self._host, self._threads, self._body, self._keep_alive = server.host, server.threads, body, keep_alive
        self.spec: ModelSpec | None = None
        self._named = False  # whether the body was read for the next two
        self.name: str | None = None  # of the model, as the client has sent it
        self._keep: float | None = None
        self._lease: Lease | None = None
        self._lock, self._ended = threading.Lock(), False  # orders the end of the request and the thread

    async def run(self, submit: Callable[[NamedEngine, Fields], T]) -> tuple[NamedEngine, T]:
        """The result of `submit`, which is called in a thread with the engine and the body, and the engine."""
        if (done := await self._threads.read(self._body, lambda: self._submit(submit))) is not None:
            return done
        if (spec := self.spec) is None:
            spec = self.spec = await self._threads.run("library", lambda: self._host.find(self.name))
        self._hold(await self._host.lease(spec, self._keep))
        done = await self._threads.read(self._body, lambda: self._submit(submit))
        assert done is not None
        return done

    def _submit(self, submit: Callable[[NamedEngine, Fields], T]) -> tuple[NamedEngine, T] | None:
        """None if the model has to be found, or loaded, first."""
        sent = parse_object(self._body.data, Limits(context=self._host.longest))
        if not self._named:
            self._named, self._keep, name = True, self._keep_alive(sent), sent.get("model")
            self.name = name if isinstance(name, str) else None
            if not self._host.known(self.name):
                return None
            self.spec = self._host.find(self.name)
            self._hold(self._host.take(self.spec, self._keep))
        if (lease := self._lease) is None:
            return None
        return lease.engine, submit(lease.engine, sent)

    def _hold(self, lease: Lease | None) -> None:
        with self._lock:
            self._lease = lease
            if not self._ended:
                return
        self._release()
        raise EngineClosed("the request has ended")

    def _release(self) -> None:
        if self._lease is not None:
            self._lease.release()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._ended = True
        self._release()


Respond = Callable[[Engine, Fields, Caller], Answer]  # slow, in a thread; raises `ApiError` and `BadRequest`


class BodyRoute(ABC):
    """Handles the requests of one route, which have a body. An ASGI application."""

    def __init__(self, server: Shared) -> None:
        self._server = server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with _received(self._server, scope, receive) as body:
            await until_disconnected(receive, self.respond(body, scope, send))

    @abstractmethod
    async def respond(self, body: RequestBody, scope: Scope, send: Send) -> None:
        """While the client is there. The body is released afterwards."""


class ModelRoute(BodyRoute):
    """What a model answers at once."""

    def __init__(self, server: Shared, respond: Respond) -> None:
        super().__init__(server)
        self._answer = respond

    async def respond(self, body: RequestBody, scope: Scope, send: Send) -> None:
        server = self._server
        caller = Caller(scope, server.settings)
        with ModelUse(server, body) as use:

            def work(engine: Engine, sent: Fields) -> Answer:
                RequestLog.of(scope).spec = use.spec
                return self._answer(engine, sent, caller)

            _, found = await server.drain.run_before(use.run(work))
        body.release()
        await send_json(send, found)


async def read_body(server: Shared, request: Request, kind: type[Body]) -> Body:
    """The body, which must be JSON: a web page of another origin cannot send that. Raises `ApiError`."""
    async with _received(server, request.scope, request.receive) as body:

        def parse() -> Body:
            return validated(kind, parse_object(body.data, Limits(server.host.longest)))

        return await server.threads.read(body, parse)


@asynccontextmanager
async def _received(server: Shared, scope: Scope, receive: Receive) -> AsyncIterator[RequestBody]:
    body = RequestBody(server.bodies)
    try:
        await server.drain.run_before(receive_json(scope, receive, server.settings, body))
        yield body
    finally:
        body.release()


async def with_loaded(server: Shared, kind: Kind, name: str | None, work: Callable[[NamedEngine], T]) -> T:
    """The result of `work`, on a thread of its `kind`, with the engine of a model that must be loaded; None: the
    default. Raises `ApiError` 400 for what the engine cannot do."""

    def done() -> T:
        with server.host.loaded(name) as lease:
            return work(lease.engine)

    try:
        return await server.threads.run(kind, done)
    except (EngineClosed, ModelNotFound):
        raise
    except KvcellarError as error:
        raise ApiError(400, printable(str(error), 2000), code="not_possible") from error
