"""embedding_fields: the bodies of the routes for embeddings, and their responses."""

import base64
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from kvcellar.serve.answers import Answer
from kvcellar.serve.generation import forms
from kvcellar.serve.generation.messages import StrictModel
from kvcellar.serve.http.api_errors import ApiError
from kvcellar.serve.http.parsing import Fields, validated
from kvcellar.serve.ollama.fields import NamedBody
from kvcellar.serve.openai.fields import texts_or_ids
from kvcellar.serve.openai.usage import PromptTokensDetails

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
