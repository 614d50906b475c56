"""model_route: routes that a model answers at once, without generating: a body is received and read in a thread."""

from collections.abc import Callable, Coroutine
from functools import partial

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from kvcellar.engine.served_engine import ServedEngine
from kvcellar.serve.body import RequestBody, receive_json
from kvcellar.serve.chat_request import Json
from kvcellar.serve.model_use import ModelUse
from kvcellar.serve.namespaces import namespace, owner
from kvcellar.serve.parsing import Fields
from kvcellar.serve.request_log import RequestLog
from kvcellar.serve.sending import send_json, until_disconnected
from kvcellar.serve.shared import Shared
from kvcellar.serve.writer import Caller

Answer = Callable[[ServedEngine, Fields, Caller], Json]  # slow, in a thread; raises `ApiError` and `BadRequest`


class ModelRoute:
    """An ASGI application."""

    def __init__(self, server: Shared, answer: Answer) -> None:
        self._server, self._answer = server, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await answered(self._server, scope, receive, lambda body: self._respond(body, scope, send))

    async def _respond(self, body: RequestBody, scope: Scope, send: Send) -> None:
        server = self._server
        naming = partial(namespace, scope, server.settings.share_prefixes)
        caller = Caller(owner(scope), Headers(scope=scope), server.settings, naming)
        with ModelUse(server.host, server.threads, body) as use:

            def work(engine: ServedEngine, sent: Fields) -> Json:
                RequestLog.of(scope).spec = use.spec
                return self._answer(engine, sent, caller)

            _, found = await server.drain.run_before(use.run(work))
        body.release()
        await send_json(send, found)


async def answered(
    server: Shared, scope: Scope, receive: Receive, respond: Callable[[RequestBody], Coroutine[None, None, None]]
) -> None:
    """Receive the body of a request, and `respond` to it while the client is there. Then the body is released."""
    body = RequestBody(server.bodies)
    try:
        await server.drain.run_before(receive_json(scope, receive, server.settings, body))
        await until_disconnected(receive, respond(body))
    finally:
        body.release()
