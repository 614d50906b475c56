"""answers_openai: what the routes of OpenAI's API answer, without those of its Responses."""

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from kvcellar.serve.openapi.answers_shared import OpenAIError, RecallFields, ScoredToken, SpeculationFields


class PromptTokensDetails(TypedDict):
    cached_tokens: int  # prompt tokens that came from memory


class CompletionTokensDetails(TypedDict):
    reasoning_tokens: NotRequired[int]
    accepted_prediction_tokens: NotRequired[int]  # drafts that became tokens
    rejected_prediction_tokens: NotRequired[int]


class UsageSoFar(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Usage(UsageSoFar):
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: NotRequired[CompletionTokensDetails]
    recall: NotRequired[list[RecallFields]]  # if `return_recall` is set: of each prompt


class TimingsFields(TypedDict):
    queued_ms: float
    cache_n: int
    prompt_n: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float
    draft_n: NotRequired[int]
    draft_n_accepted: NotRequired[int]
    speculation: NotRequired[list[SpeculationFields | None]]


class PromptScore(TypedDict):
    logprob: float
    rank: int
    decoded_token: str


PromptScores = list[dict[str, PromptScore] | None]  # of each token, by token id; the first one has none


class ChatLogprobs(TypedDict):
    content: list[ScoredToken]
    refusal: None


class TextLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CalledFunction(TypedDict):
    name: str
    arguments: str  # JSON


class ChatCall(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatAnswer(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]  # the same, where the server is set to send both
    tool_calls: NotRequired[list[ChatCall]]


class ChatChoice(TypedDict):
    index: int
    logprobs: ChatLogprobs | None
    message: ChatAnswer
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | None  # the stop string that ended it
    token_ids: NotRequired[list[int]]


class ChatCompletion(TypedDict):
    id: str
    created: int
    model: str
    system_fingerprint: None
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    timings: TimingsFields
    prompt_logprobs: NotRequired[PromptScores]
    prompt_token_ids: NotRequired[list[int]]


class CalledFunctionDelta(TypedDict):
    name: NotRequired[str]
    arguments: str


class ChatCallDelta(TypedDict):
    """The first one of a call has its id and name; later ones only more of its arguments."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: CalledFunctionDelta


class ChatDelta(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[ChatCallDelta]]


class ChatChunkChoice(TypedDict):
    index: int
    logprobs: ChatLogprobs | None
    delta: ChatDelta
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    stop_reason: NotRequired[str | None]
    token_ids: NotRequired[list[int]]


class ChatChunk(TypedDict):
    """The last chunk before `[DONE]` has the usage of the request and no choices, if `include_usage` is set."""

    id: str
    created: int
    model: str
    system_fingerprint: None
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | UsageSoFar | None]
    timings: NotRequired[TimingsFields]
    prompt_token_ids: NotRequired[list[int]]  # in the first chunk


class TextChoice(TypedDict):
    index: int
    logprobs: TextLogprobs | None
    text: str
    finish_reason: Literal["stop", "length"]
    stop_reason: str | None  # the stop string that ended it
    token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[PromptScores]
    prompt_token_ids: NotRequired[list[int]]


class TextCompletion(TypedDict):
    id: str
    created: int
    model: str
    system_fingerprint: None
    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: Usage
    timings: TimingsFields


class TextChunkChoice(TypedDict):
    index: int
    logprobs: TextLogprobs | None
    text: str
    finish_reason: Literal["stop", "length"] | None
    stop_reason: NotRequired[str | None]
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]  # in the first chunk of a choice


class TextChunk(TypedDict):
    """The last chunk before `[DONE]` has the usage of the request and no choices, if `include_usage` is set."""

    id: str
    created: int
    model: str
    system_fingerprint: None
    object: Literal["text_completion"]
    choices: list[TextChunkChoice]
    usage: NotRequired[Usage | UsageSoFar | None]
    timings: NotRequired[TimingsFields]


ChatEvent = ChatChunk | OpenAIError  # of a stream; an error is the last one
TextEvent = TextChunk | OpenAIError


class EmbeddingVector(TypedDict):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str  # as `encoding_format` says


class EmbeddingsUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Embeddings(TypedDict):
    object: Literal["list"]
    data: list[EmbeddingVector]
    model: str
    usage: EmbeddingsUsage


class Tokenized(TypedDict):
    """For `prompt` and `messages`, as vLLM."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class TokenPiece(TypedDict):
    id: int
    piece: str | list[int]  # bytes, where they are no text


class TokenizedContent(TypedDict):
    """For `content`, as llama.cpp."""

    tokens: list[int] | list[TokenPiece]


class Detokenized(TypedDict):
    """The text under the names of vLLM and of llama.cpp."""

    prompt: str
    content: str


class TokenizerFields(TypedDict):
    model: str
    max_model_len: int
    vocab_size: int
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
