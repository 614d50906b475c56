"""embeddings: the routes that return vectors of texts, with their bodies and responses: OpenAI's `/v1/embeddings`,
Ollama's `/api/embed` and `/api/embeddings`.

They are served by models whose directory says how hidden states are pooled; others are refused. The inputs of a request
are submitted in groups, so that one request does not fill the queue of the engine.
"""

import asyncio
import base64
import struct
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field
from starlette.types import Scope, Send

from kvcellar.engine.request_options import SubmitOptions
from kvcellar.events import Embedded as Pooled
from kvcellar.frontend.embeddings import PARAMS
from kvcellar.frontend.served_engine import NamedEngine
from kvcellar.memory.retention import NO_OPTIONS, RetentionOptions
from kvcellar.serve.answers import Answer
from kvcellar.serve.generation import forms
from kvcellar.serve.generation.field_names import naming_fields
from kvcellar.serve.generation.http_request import HttpRequest
from kvcellar.serve.generation.messages import StrictModel
from kvcellar.serve.generation.namespaces import Caller
from kvcellar.serve.http.api_errors import ApiError
from kvcellar.serve.http.body import RequestBody
from kvcellar.serve.http.parsing import Fields, validated
from kvcellar.serve.http.request_log import RequestLog
from kvcellar.serve.http.sending import send_json
from kvcellar.serve.models.model_use import BodyRoute, KeepAlive, ModelUse, no_keep_alive
from kvcellar.serve.ollama.fields import NamedBody
from kvcellar.serve.openai.fields import texts_or_ids
from kvcellar.serve.openai.formats import PromptTokensDetails
from kvcellar.serve.shared import Shared

GROUP = 32  # inputs that are submitted at once
MAX_INPUTS = 2048  # as OpenAI allows
Vector = tuple[float, ...]
Named = TypeVar("Named", bound=NamedBody)


class EmbeddingVector(Answer):
    index: int
    embedding: Sequence[float] | str  # as `encoding_format` says
    object: Literal["embedding"] = "embedding"


class EmbeddingsUsage(Answer):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Embeddings(Answer):
    data: Iterable[EmbeddingVector]
    model: str
    usage: EmbeddingsUsage
    object: Literal["list"] = "list"


class OllamaEmbeddings(Answer):
    model: str
    embeddings: Iterable[Vector]
    total_duration: int  # nanoseconds, as `load_duration`
    load_duration: int
    prompt_eval_count: int


class OneEmbedding(Answer):
    embedding: Vector


@dataclass(frozen=True, slots=True)
class Embedded:
    """All vectors of a request, in order, and what they took: the name of the model, tokens, and seconds."""

    model: str
    vectors: Sequence[Vector]
    tokens: int
    cached: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest:
    """`normalised`: of length 1; None: as the model says. `write` makes the response."""

    inputs: Sequence[str | list[int]]
    write: Callable[[Embedded], Answer]
    dimensions: int | None = None
    truncate: bool = False
    normalised: bool | None = None
    salt: str | None = None
    users: tuple[str | None, ...] = ()
    field: str = "input"  # that has the inputs


class EmbeddingsBody(StrictModel):
    """docs/reference/http-fields.md is generated from the comments."""

    model: str | None = None  # OpenAI: may be left out; otherwise the name in `/v1/models`
    # OpenAI: a string, token ids, or a list of either with up to 2048 inputs
    input: Annotated[object, forms.of(forms.Inputs)]
    encoding_format: Literal["float", "base64"] | None = None  # OpenAI: base64 is of little-endian 32-bit floats
    dimensions: int | None = Field(default=None, ge=1, le=2**20)  # OpenAI: only of models that declare Matryoshka
    cache_salt: str | None = None  # vLLM: the request shares memory only with those of the same salt
    user: str | None = None  # OpenAI: the request shares memory only with those of the same user


class EmbedBody(NamedBody):
    keep_alive: Annotated[Any, forms.of(forms.Duration)] = None  # how long the model stays loaded
    input: Annotated[object, forms.of(forms.Inputs | list[str] | None)] = None
    truncate: bool | None = None
    dimensions: int | None = Field(default=None, ge=1, le=2**20)


class EmbeddingBody(NamedBody):
    keep_alive: Annotated[Any, forms.of(forms.Duration)] = None  # likewise
    prompt: str | None = None


def parse_embeddings(sent: Fields) -> EmbeddingRequest:
    """A body of `/v1/embeddings`. Raises `ApiError`."""
    body = validated(EmbeddingsBody, sent)
    encode = _base64 if body.encoding_format == "base64" else list[float]

    def write(found: Embedded) -> Embeddings:
        data = (EmbeddingVector(at, encode(vector)) for at, vector in enumerate(found.vectors))
        usage = EmbeddingsUsage(found.tokens, found.tokens, PromptTokensDetails(found.cached))
        return Embeddings(data, found.model, usage)

    inputs = texts_or_ids("input", body.input, MAX_INPUTS)
    return EmbeddingRequest(
        inputs=inputs, write=write, dimensions=body.dimensions, salt=body.cache_salt, users=(body.user,)
    )


def parse_embed(sent: Fields) -> EmbeddingRequest:
    """A body of Ollama's `/api/embed`: vectors of length 1, of texts that are truncated unless `truncate` is false."""
    body = _named(validated(EmbedBody, sent))
    inputs = [] if body.input in (None, "") else texts_or_ids("input", body.input, MAX_INPUTS, empty=True)

    def write(found: Embedded) -> OllamaEmbeddings:
        return OllamaEmbeddings(
            model=body.named,
            embeddings=iter(found.vectors),
            total_duration=int(1e9 * found.seconds),
            load_duration=0,
            prompt_eval_count=found.tokens,
        )

    truncate = body.truncate is not False
    return EmbeddingRequest(inputs=inputs, write=write, dimensions=body.dimensions, truncate=truncate, normalised=True)


def parse_embedding(sent: Fields) -> EmbeddingRequest:
    """A body of Ollama's older `/api/embeddings`: one vector, as it was pooled."""
    body = _named(validated(EmbeddingBody, sent))
    inputs = [body.prompt] if body.prompt else []

    def write(found: Embedded) -> OneEmbedding:
        return OneEmbedding(found.vectors[0] if found.vectors else ())

    return EmbeddingRequest(inputs=inputs, write=write, truncate=True, normalised=False, field="prompt")


def _named(body: Named) -> Named:
    """A body of Ollama's, which must say which model embeds: vectors of another one are of no use."""
    if not body.model:
        raise ApiError(400, "model is required", "model", "missing_required_parameter")
    return body


def _base64(vector: Vector) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


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
