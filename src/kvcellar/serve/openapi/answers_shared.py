"""answers_shared: shapes that answers of several APIs have in common.

The modules `answers_*` declare what the server answers, for its document. A field that is not `NotRequired` is always
there. Tests compare every answer that they get with these: a field that is not declared fails them.
"""

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

Anything = dict[str, Any]  # an object whose keys are not declared here


class TokensFields(TypedDict):
    tokens: list[int]
    text: str | None


class RewriteFields(TypedDict):
    message: int | None
    role: str
    by: Literal["template", "client"]
    tokens: int


class RecallFields(TypedDict):
    asked: int
    matched: int
    restored: int
    sources: dict[str, int]
    seconds: float
    reason: str
    detail: str
    entry: str
    ours: TokensFields | None
    theirs: TokensFields | None
    rewrite: RewriteFields | None


class SpeculationFields(TypedDict):
    rounds: int
    drafted: int
    accepted: int
    tried_at: list[int]
    accepted_at: list[int]
    acceptance_at: list[float]
    depths: list[tuple[float, int]]
    seconds_saved: float


class TokenScore(TypedDict):
    token: str
    logprob: float
    bytes: list[int] | None  # `null` where the token is a part of a character


class ScoredToken(TokenScore):
    top_logprobs: list[TokenScore]


class OpenAIErrorFields(TypedDict):
    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None  # the field that the client can correct
    code: str | None


class OpenAIError(TypedDict):
    error: OpenAIErrorFields


class OllamaError(TypedDict):
    error: str


class AnthropicErrorFields(TypedDict):
    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "not_found_error",
        "request_too_large",
        "rate_limit_error",
        "overloaded_error",
        "api_error",
    ]
    message: str


class AnthropicError(TypedDict):
    type: Literal["error"]
    error: AnthropicErrorFields


class HealthErrorFields(TypedDict):
    code: int  # the status
    message: str
    type: Literal[
        "invalid_request_error", "authentication_error", "not_found_error", "server_error", "unavailable_error"
    ]


class HealthError(TypedDict):
    """As llama.cpp's server has it."""

    error: HealthErrorFields


class ModelFields(TypedDict):
    """With the fields of OpenAI's API and of Anthropic's."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    type: Literal["model"]
    display_name: str
    created_at: str
    max_model_len: NotRequired[int]  # its context, where it is known before the model is loaded


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelFields]
    has_more: Literal[False]
    first_id: str | None
    last_id: str | None
