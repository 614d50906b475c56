"""answers_responses: what the routes of OpenAI's Responses answer, and the events of their streams."""

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from kvcellar.serve.openapi.answers_shared import Anything, ScoredToken

Status = Literal["in_progress", "completed", "incomplete", "failed"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ScoredToken]


class ReasoningText(TypedDict):
    type: Literal["reasoning_text"]
    text: str


class OutputMessage(TypedDict):
    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class OutputReasoning(TypedDict):
    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[Any]
    content: list[ReasoningText]


class OutputCall(TypedDict):
    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    arguments: str  # JSON


OutputItem = OutputMessage | OutputReasoning | OutputCall


class InputItems(TypedDict):
    object: Literal["list"]
    data: list[dict[str, Any]]  # as they were sent, each with `id`, `type` and, beside reasoning, `status`
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokensDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(TypedDict):
    reasoning_tokens: int


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(TypedDict):
    code: str
    message: str


class IncompleteDetails(TypedDict):
    reason: Literal["max_output_tokens"] | None  # None: a call broke off


class ResponseReasoning(TypedDict):
    effort: str | None
    summary: None


class ResponseText(TypedDict):
    format: Anything


class ResponseObject(TypedDict):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Status
    model: str
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    output: list[OutputItem]
    usage: ResponseUsage | None
    temperature: float
    top_p: float
    # what the request said
    background: Literal[False]
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ResponseReasoning
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    text: ResponseText
    tool_choice: str | Anything
    tools: list[Anything]
    top_logprobs: int
    truncation: Literal["auto", "disabled"]
    user: str | None


class InputTokens(TypedDict):
    object: Literal["response.input_tokens"]
    input_tokens: int


class DeletedResponse(TypedDict):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ResponseStateEvent(TypedDict):
    """The first two of a stream, and its last one."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: ResponseObject
    sequence_number: int


class OutputItemEvent(TypedDict):
    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem
    sequence_number: int


class ContentPartEvent(TypedDict):
    type: Literal["response.content_part.added", "response.content_part.done"]
    item_id: str
    output_index: int
    content_index: int
    part: OutputText | ReasoningText
    sequence_number: int


class TextDeltaEvent(TypedDict):
    type: Literal["response.output_text.delta", "response.reasoning_text.delta"]
    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: NotRequired[list[ScoredToken]]
    sequence_number: int


class TextDoneEvent(TypedDict):
    type: Literal["response.output_text.done", "response.reasoning_text.done"]
    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: NotRequired[list[ScoredToken]]
    sequence_number: int


class ArgumentsDeltaEvent(TypedDict):
    type: Literal["response.function_call_arguments.delta"]
    item_id: str
    output_index: int
    delta: str
    sequence_number: int


class ArgumentsDoneEvent(TypedDict):
    type: Literal["response.function_call_arguments.done"]
    item_id: str
    output_index: int
    name: str
    arguments: str
    sequence_number: int


ResponseEvent = (
    ResponseStateEvent
    | OutputItemEvent
    | ContentPartEvent
    | TextDeltaEvent
    | TextDoneEvent
    | ArgumentsDeltaEvent
    | ArgumentsDoneEvent
)
