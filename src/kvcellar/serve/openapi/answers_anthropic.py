"""answers_anthropic: what the routes of Anthropic's API answer, and the events of their streams."""

from typing import Literal

from typing_extensions import TypedDict

from kvcellar.serve.openapi.answers_shared import AnthropicError, Anything

StopReason = Literal["end_turn", "max_tokens", "tool_use", "stop_sequence"]


class TextBlock(TypedDict):
    type: Literal["text"]
    text: str


class ThinkingBlock(TypedDict):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: Anything


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class CacheCreation(TypedDict):
    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class MessageUsage(TypedDict):
    input_tokens: int  # neither read from memory, nor before a breakpoint
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    cache_creation: CacheCreation
    output_tokens: int
    service_tier: Literal["standard"]


class MessageAnswer(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None  # `null` at the beginning of a stream
    stop_sequence: str | None
    usage: MessageUsage


class MessageStartEvent(TypedDict):
    type: Literal["message_start"]
    message: MessageAnswer


class BlockStartEvent(TypedDict):
    type: Literal["content_block_start"]
    index: int
    content_block: AnswerBlock


class TextDelta(TypedDict):
    type: Literal["text_delta"]
    text: str


class ThinkingDelta(TypedDict):
    type: Literal["thinking_delta"]
    thinking: str


class SignatureDelta(TypedDict):
    type: Literal["signature_delta"]
    signature: str


class InputDelta(TypedDict):
    type: Literal["input_json_delta"]
    partial_json: str


class BlockDeltaEvent(TypedDict):
    type: Literal["content_block_delta"]
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStopEvent(TypedDict):
    type: Literal["content_block_stop"]
    index: int


class MessageEnd(TypedDict):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDeltaEvent(TypedDict):
    type: Literal["message_delta"]
    delta: MessageEnd
    usage: MessageUsage


class MessageMarkEvent(TypedDict):
    type: Literal["message_stop", "ping"]


MessageEvent = (
    MessageStartEvent
    | BlockStartEvent
    | BlockDeltaEvent
    | BlockStopEvent
    | MessageDeltaEvent
    | MessageMarkEvent
    | AnthropicError
)


class TokenCount(TypedDict):
    input_tokens: int
