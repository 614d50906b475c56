"""message_writer: a message of content blocks, whole or as a stream.

In a stream, blocks are numbered, and one is open at a time. `message_start` comes with the first token, when it is
known how many tokens of the prompt came from memory.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal
from uuid import uuid4

from msgspec import Raw
from msgspec.structs import replace

from kvcellar.serve.answers import TEXT, Answer, Anything, EncodedAs, Template
from kvcellar.serve.generation.replies import FinishReason, Item, Replies, ReplyPart
from kvcellar.serve.generation.writer import Writer, named_event
from kvcellar.serve.http.api_errors import ANTHROPIC, AnthropicError, ApiError
from kvcellar.text.pieces import CallArguments, CallClosed, CallOpened, Content, Piece, Reasoning

StopReason = Literal["end_turn", "max_tokens", "tool_use", "stop_sequence"]
STOP_REASONS: Mapping[FinishReason, StopReason] = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
SIGNATURE = "kvcellar"  # of reasoning: clients send it back, and it is not read then


class TextBlock(Answer, kw_only=True):
    type: Literal["text"] = "text"
    text: str = ""


class ThinkingBlock(Answer, kw_only=True):
    type: Literal["thinking"] = "thinking"
    thinking: str = ""
    signature: str = ""


class ToolUseBlock(Answer, kw_only=True):
    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: Annotated[Raw, EncodedAs(Anything)] = Raw(b"{}")


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class CacheCreation(Answer):
    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class MessageUsage(Answer, kw_only=True):
    input_tokens: int  # neither read from memory, nor before a breakpoint
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    cache_creation: CacheCreation
    output_tokens: int
    service_tier: Literal["standard"] = "standard"


class MessageEnd(Answer):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageAnswer(Answer, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: Sequence[AnswerBlock] = ()
    stop_reason: StopReason | None = None  # `null` at the beginning of a stream
    stop_sequence: str | None = None
    usage: MessageUsage


class MessageStartEvent(Answer, kw_only=True):
    type: Literal["message_start"] = "message_start"
    message: MessageAnswer


class BlockStartEvent(Answer, kw_only=True):
    type: Literal["content_block_start"] = "content_block_start"
    index: int
    content_block: AnswerBlock


class TextDelta(Answer, kw_only=True):
    type: Literal["text_delta"] = "text_delta"
    text: str


class ThinkingDelta(Answer, kw_only=True):
    type: Literal["thinking_delta"] = "thinking_delta"
    thinking: str


class SignatureDelta(Answer, kw_only=True):
    type: Literal["signature_delta"] = "signature_delta"
    signature: str


class InputDelta(Answer, kw_only=True):
    type: Literal["input_json_delta"] = "input_json_delta"
    partial_json: str


Delta = TextDelta | ThinkingDelta | SignatureDelta | InputDelta
DELTAS: Mapping[type[AnswerBlock], Delta] = {
    TextBlock: TextDelta(text=TEXT),
    ThinkingBlock: ThinkingDelta(thinking=TEXT),
    ToolUseBlock: InputDelta(partial_json=TEXT),
}


class BlockDeltaEvent(Answer, kw_only=True):
    type: Literal["content_block_delta"] = "content_block_delta"
    index: int
    delta: Delta


class BlockStopEvent(Answer, kw_only=True):
    type: Literal["content_block_stop"] = "content_block_stop"
    index: int


class MessageDeltaEvent(Answer, kw_only=True):
    type: Literal["message_delta"] = "message_delta"
    delta: MessageEnd
    usage: MessageUsage


class MessageMarkEvent(Answer):
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


class TokenCount(Answer):
    input_tokens: int


def usage(replies: Replies, cached: int | None = None) -> MessageUsage:
    """As Anthropic counts. `cached`: tokens that came from memory, before it is known from the end of the request.

    Computed tokens before the last breakpoint are `cache_creation_input_tokens`; without breakpoints there are none,
    although later requests may find those tokens, too.
    """
    prepared = replies.prepared
    (prompt,) = prepared.prompt_tokens
    read = replies.cached_tokens if cached is None else cached
    marked = max(prepared.breakpoints, default=0)
    created = max(0, marked - read)
    hour = created if prepared.retention.ttl == 3600.0 else 0
    return MessageUsage(
        input_tokens=prompt - read - created,
        cache_read_input_tokens=read,
        cache_creation_input_tokens=created,
        cache_creation=CacheCreation(created - hour, hour),
        # at the end with the token that ended the answer, which no delta has
        output_tokens=replies.completion_tokens if cached is None else replies.replies[0].completion_tokens,
    )


class MessageWriter(Writer):
    def __init__(self, model: str, replies: Replies) -> None:
        super().__init__("msg_" + uuid4().hex, replies)
        self._model = model
        self._begun = False  # `message_start` was sent
        self._open: AnswerBlock | None = None  # as it was opened
        self._blocks = 0  # that were opened
        self._delta = Template(b"")  # of the last one

    # -- one response ---------------------------------------------------------------------------------------------

    def response(self) -> MessageAnswer:
        end, content = self._end(), list(map(_block, self._whole.items))
        message = self._message(usage(self._replies))
        return replace(message, content=content, stop_reason=end.stop_reason, stop_sequence=end.stop_sequence)

    # -- a stream -------------------------------------------------------------------------------------------------

    def chunk(self, part: ReplyPart) -> bytes:
        events: list[bytes] = []
        if part.delta is not None and not self._begun:
            events.append(self._start(usage(self._replies, part.delta.cached_tokens)))
        for piece in part.pieces:
            events += self._piece(piece)
        return b"".join(events)

    def last(self) -> bytes:
        used = usage(self._replies)
        events = [] if self._begun else [self._start(replace(used, output_tokens=0))]
        end = _event(MessageDeltaEvent(delta=self._end(), usage=used))
        return b"".join((*events, *self._close(), end, _event(MessageMarkEvent("message_stop"))))

    def failed(self, error: ApiError) -> bytes:
        return named_event("error", error.body(ANTHROPIC))

    def ping(self) -> bytes:
        return _event(MessageMarkEvent("ping"))

    def _start(self, used: MessageUsage) -> bytes:
        self._begun = True
        return _event(MessageStartEvent(message=self._message(used)))

    def _piece(self, piece: Piece) -> Iterator[bytes]:
        match piece:
            case Reasoning(text=text):
                yield from self._opened(ThinkingBlock())
                yield self._delta.fill(text)
            case Content(text=text):
                yield from self._opened(TextBlock())
                yield self._delta.fill(text)
            case CallOpened(id=id, name=name):
                yield from self._opened(ToolUseBlock(id=id, name=name))
            case CallArguments(text=text):
                yield self._delta.fill(text)
            case CallClosed():
                yield from self._close()

    def _opened(self, block: AnswerBlock) -> Iterator[bytes]:
        """Events that open a block, unless one like it is open."""
        if self._open == block:
            return
        yield from self._close()
        self._open = block
        self._blocks += 1
        self._delta = Template(self._change(DELTAS[type(block)]))
        yield _event(BlockStartEvent(index=self._blocks - 1, content_block=block))

    def _close(self) -> Iterator[bytes]:
        if self._open is None:
            return
        if isinstance(self._open, ThinkingBlock):
            yield self._change(SignatureDelta(signature=SIGNATURE))
        self._open = None
        yield _event(BlockStopEvent(index=self._blocks - 1))

    def _change(self, delta: Delta) -> bytes:
        return _event(BlockDeltaEvent(index=self._blocks - 1, delta=delta))

    # -- of both --------------------------------------------------------------------------------------------------

    def _message(self, used: MessageUsage) -> MessageAnswer:
        return MessageAnswer(id=self.id, model=self._model, usage=used)

    def _end(self) -> MessageEnd:
        (reply,) = self._replies.replies
        stop = reply.ended.stop_string
        return MessageEnd("stop_sequence" if stop is not None else STOP_REASONS[reply.finish_reason], stop)


def _event(event: MessageEvent) -> bytes:
    return named_event(event.type, event)


def _block(item: Item) -> AnswerBlock:
    match item.kind:
        case "reasoning":
            return ThinkingBlock(thinking=item.text, signature=SIGNATURE)
        case "content":
            return TextBlock(text=item.text)
        case "call":
            return ToolUseBlock(id=item.id, name=item.name, input=item.arguments())
