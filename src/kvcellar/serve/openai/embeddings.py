"""embeddings: the routes that return vectors of texts: OpenAI's `/v1/embeddings`, Ollama's `/api/embed` and
`/api/embeddings`.

They are served by models whose directory says how hidden states are pooled; others are refused. The inputs of a request
are submitted in groups, so that one request does not fill the queue of the engine.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from starlette.types import Scope, Send

from kvcellar.engine.request_options import SubmitOptions
from kvcellar.events import Embedded as Pooled
from kvcellar.frontend.embeddings import PARAMS
from kvcellar.frontend.served_engine import NamedEngine
from kvcellar.memory.retention import NO_OPTIONS, RetentionOptions
from kvcellar.serve.answers import Answer
from kvcellar.serve.generation.field_names import naming_fields
from kvcellar.serve.generation.http_request import HttpRequest
from kvcellar.serve.generation.namespaces import Caller
from kvcellar.serve.http.body import RequestBody
from kvcellar.serve.http.parsing import Fields
from kvcellar.serve.http.request_log import RequestLog
from kvcellar.serve.http.sending import send_json
from kvcellar.serve.models.model_use import BodyRoute, KeepAlive, ModelUse, no_keep_alive
from kvcellar.serve.openai.embedding_fields import Embedded, EmbeddingRequest, Vector
from kvcellar.serve.shared import Shared

GROUP = 32  # inputs that are submitted at once

Parse = Callable[[Fields], EmbeddingRequest]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request whose inputs are tokens."""

    request: EmbeddingRequest
    prompts: Sequence[Sequence[int]]
    namespace: str
    retention: RetentionOptions


class EmbeddingHandler(BodyRoute):
    def __init__(self, server: Shared, parse: Parse, keep_alive: KeepAlive = no_keep_alive) -> None:
        super().__init__(server)
        self._parse, self._keep_alive = parse, keep_alive

    async def respond(self, body: RequestBody, scope: Scope, send: Send) -> None:
        await send_json(send, await self._answered(body, scope))

    async def _answered(self, body: RequestBody, scope: Scope) -> Answer:
        """The response, when the model is not used any more."""
        server, log = self._server, RequestLog.of(scope)
        caller = Caller(scope, server.settings)
        with ExitStack() as stack:
            use = stack.enter_context(ModelUse(server, body, self._keep_alive))

            def prepare(engine: NamedEngine, sent: Fields) -> Prepared:
                log.spec, request, embeddings = use.spec, self._parse(sent), engine.embeddings
                embeddings.check(request.dimensions)
                with naming_fields({"prompt": request.field}):
                    prompts = [embeddings.tokens(one, truncate=request.truncate) for one in request.inputs]
                log.set_prompts(prompts)
                request = replace(request, inputs=())  # whose texts are tokens now
                space = caller.namespace(request.salt, request.users)
                return Prepared(request, prompts, space, caller.retention(NO_OPTIONS))

            engine, prepared = await server.drain.run_before(use.run(prepare))
            body.release()
            request, log.namespace, log.owner = prepared.request, prepared.namespace, caller.owner
            vectors: list[Vector] = []
            for start in range(0, len(prepared.prompts), GROUP):
                for pooled in await self._pooled(engine, prepared, start, log):
                    await asyncio.sleep(0)  # each takes up to a millisecond
                    vectors.append(engine.embeddings.vector(pooled, request.dimensions, normalised=request.normalised))
            cached = sum(one.usage.cached_tokens for one in log.done.values())
            tokens = sum(map(len, prepared.prompts))
            name = use.name or engine.model.name
        return request.write(Embedded(name, vectors, tokens, cached, caller.seconds))

    async def _pooled(self, engine: NamedEngine, prepared: Prepared, start: int, log: RequestLog) -> list[Vector]:
        """The pooled hidden states of one group of inputs."""
        server, group = self._server, prepared.prompts[start : start + GROUP]
        found: dict[int, Vector] = {}
        with ExitStack() as stack:
            request = stack.enter_context(HttpRequest(server.settings.max_backlog_events, server.arrivals))
            stack.enter_context(server.drain.on_start(request.refuse_if_queued))
            how = SubmitOptions(
                namespace=prepared.namespace, retention=prepared.retention, pooling=engine.embeddings.mode
            )

            def submit() -> None:
                with naming_fields({"prompt": prepared.request.field}):
                    request.submit(group, lambda ids, to: engine.submit(ids, PARAMS, deliver=to, **how))

            await server.drain.run_before(server.threads.run("short", submit))
            while not request.finished:
                batch = await request.next_batch()
                log.count([(start + number, event) for number, event in batch])
                found.update((number, event.vector) for number, event in batch if isinstance(event, Pooled))
        return [found[number] for number in range(len(group))]
