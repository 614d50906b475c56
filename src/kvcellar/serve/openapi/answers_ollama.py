"""answers_ollama: what the routes of Ollama's API answer, and the lines of their streams."""

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from kvcellar.serve.openapi.answers_shared import Anything, OllamaError, ScoredToken


class CalledTool(TypedDict):
    index: int
    name: str
    arguments: Anything


class OllamaToolCall(TypedDict):
    id: str
    function: CalledTool


class OllamaAnswer(TypedDict):
    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[OllamaToolCall]]


class LineHead(TypedDict):
    model: str
    created_at: str
    logprobs: NotRequired[list[ScoredToken]]


class LineEnd(LineHead):
    """Durations are nanoseconds. A model that was loaded or unloaded has none."""

    done: Literal[True]
    done_reason: Literal["stop", "length", "load", "unload"]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    prompt_eval_cached_count: NotRequired[int]  # prompt tokens that came from memory
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]


class GenerateLine(LineHead):
    response: str
    thinking: NotRequired[str]
    done: Literal[False]


class GenerateAnswer(LineEnd):
    """The whole answer, or the last line of a stream."""

    response: str
    thinking: NotRequired[str]


class ChatLine(LineHead):
    message: OllamaAnswer
    done: Literal[False]


class ChatLineEnd(LineEnd):
    """The whole answer, or the last line of a stream."""

    message: OllamaAnswer


GenerateEvent = GenerateLine | GenerateAnswer | OllamaError
ChatLineEvent = ChatLine | ChatLineEnd | OllamaError


class Version(TypedDict):
    version: str


class ModelDetails(TypedDict):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class NamedModel(TypedDict):
    name: str
    model: str
    digest: str
    details: ModelDetails


class ListedModel(NamedModel):
    modified_at: str
    size: int  # bytes


class ListedModels(TypedDict):
    models: list[ListedModel]


class LoadedModel(NamedModel):
    size: int  # bytes
    size_vram: int
    shared_size: int  # of `size`, the bytes that other loaded models use too
    expires_at: str
    context_length: int


class LoadedModels(TypedDict):
    models: list[LoadedModel]


class ShownMessage(TypedDict):
    role: str
    content: str


class ShownModel(TypedDict):
    modelfile: str
    parameters: str
    template: str
    license: str
    system: NotRequired[str]
    messages: NotRequired[list[ShownMessage]]
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[Literal["completion", "tools", "thinking", "embedding"]]
    modified_at: str


class Embedded(TypedDict):
    model: str
    embeddings: list[list[float]]
    total_duration: int  # nanoseconds, as `load_duration`
    load_duration: int
    prompt_eval_count: int


class OneEmbedding(TypedDict):
    embedding: list[float]


class Succeeded(TypedDict):
    status: Literal["success"]


class ProgressLine(TypedDict):
    status: str  # the last line is `success`, or an error
    total: NotRequired[int]
    completed: NotRequired[int]


ProgressEvent = ProgressLine | OllamaError
