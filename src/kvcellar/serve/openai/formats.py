"""formats: what the responses of chats and of text completions contain: their shapes, with the usage and the timings of
a request as OpenAI and llama.cpp name them, and how a `ResponseWriter` fills those of each route.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, Literal

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from kvcellar.events import TokenLogprob
from kvcellar.serve.answers import Answer
from kvcellar.serve.generation.records import RecallFields, SpeculationFields
from kvcellar.serve.generation.replies import FinishReason, Replies, Reply, ReplyPart, WholeReply
from kvcellar.serve.http.api_errors import OpenAIError
from kvcellar.serve.openai.logprobs import ScoredToken, TokenText, finite, top_by_text
from kvcellar.text.pieces import CallArguments, CallOpened, Content, Piece, Reasoning


class Head(Answer):
    id: str
    created: int
    model: str
    system_fingerprint: None = None


class PromptTokensDetails(Answer):
    cached_tokens: int  # prompt tokens that came from memory


class CompletionTokensDetails(Answer):
    reasoning_tokens: int | UnsetType = UNSET
    accepted_prediction_tokens: int | UnsetType = UNSET  # drafts that became tokens
    rejected_prediction_tokens: int | UnsetType = UNSET


class UsageSoFar(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Usage(UsageSoFar):
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    recall: list[RecallFields] | UnsetType = UNSET  # if `return_recall` is set: of each prompt


class TimingsFields(Answer):
    """With the names of llama.cpp. Where drafts were used, there are counts of them."""

    queued_ms: float  # milliseconds from submission to admission
    cache_n: int  # prompt tokens that came from memory
    prompt_n: int  # prompt tokens that were computed
    prompt_ms: float  # milliseconds from admission to the first token
    predicted_n: int  # generated tokens
    predicted_ms: float  # milliseconds from the first token to the last
    predicted_per_second: float  # generated tokens per second
    draft_n: int | UnsetType = UNSET  # drafts that were computed
    draft_n_accepted: int | UnsetType = UNSET  # drafts that became tokens
    # for each prompt: what its drafts have done, described below; `null` without a round
    speculation: list[SpeculationFields | None] | UnsetType = UNSET


def usage(replies: Replies) -> Usage:
    prompt, completion = replies.prompt_tokens, replies.completion_tokens
    details = CompletionTokensDetails()
    if reasoning := replies.reasoning_tokens:
        details.reasoning_tokens = reasoning
    if (counts := replies.drafts) is not None:
        drafted, accepted = counts
        details.accepted_prediction_tokens, details.rejected_prediction_tokens = accepted, drafted - accepted
    found = Usage(prompt, completion, prompt + completion, PromptTokensDetails(replies.cached_tokens))
    if details != CompletionTokensDetails():
        found.completion_tokens_details = details
    return found


def usage_so_far(replies: Replies, reply: Reply) -> UsageSoFar:
    """The usage of one choice, without `prompt_tokens_details`, which are known only at the end."""
    prompt = replies.prepared.prompt_tokens[replies.prompt_of(reply)]
    completion = reply.completion_tokens
    return UsageSoFar(prompt, completion, prompt + completion)


def timings(replies: Replies) -> TimingsFields:
    """Of several prompts, which run at the same time, the longest times."""
    done = [one for _, one in sorted(replies.done.items())]
    completion, decoding = replies.completion_tokens, max(one.timings.decoding for one in done)
    found = TimingsFields(
        queued_ms=1e3 * max(one.timings.queued for one in done),
        cache_n=replies.cached_tokens,
        prompt_n=replies.prompt_tokens - replies.cached_tokens,
        prompt_ms=1e3 * max(one.timings.first_token - one.timings.queued for one in done),
        predicted_n=completion,
        predicted_ms=1e3 * decoding,
        predicted_per_second=completion / decoding if decoding > 0 else 0.0,
    )
    if (counts := replies.drafts) is not None:
        found.draft_n, found.draft_n_accepted = counts
        found.speculation = [one.speculation and SpeculationFields.of(one.speculation) for one in done]
    return found


class PromptScore(Answer):
    logprob: float
    rank: int
    decoded_token: str


PromptScores = Iterable[dict[str, PromptScore] | None]  # of each token, by token id; the first one has none


class Choice(Answer, kw_only=True):
    index: int
    finish_reason: FinishReason  # `tool_calls`: of a chat
    stop_reason: str | None  # the stop string that ended it
    token_ids: Iterable[int] | UnsetType = UNSET
    token_ms: Iterable[float] | UnsetType = UNSET  # of each token: milliseconds since the first one of the choice


class ChunkChoice(Answer, kw_only=True):
    index: int
    finish_reason: FinishReason | None = None  # `tool_calls`: of a chat
    stop_reason: str | UnsetType | None = UNSET
    token_ids: Iterable[int] | UnsetType = UNSET
    token_ms: Iterable[float] | UnsetType = UNSET  # of each token: milliseconds since the first one of the choice


# -- chats --------------------------------------------------------------------------------------------------------


class ChatLogprobs(Answer):
    content: Iterable[ScoredToken]
    refusal: None = None


class CalledFunction(Answer):
    name: str
    arguments: str  # JSON


class ChatCall(Answer):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ChatAnswer(Answer):
    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET  # the same, where the server is set to send both
    tool_calls: list[ChatCall] | UnsetType = UNSET


class ChatChoice(Choice, kw_only=True):
    logprobs: ChatLogprobs | None = None
    message: ChatAnswer


class ChatCompletion(Head, kw_only=True):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage
    timings: TimingsFields
    prompt_logprobs: PromptScores | UnsetType = UNSET
    prompt_token_ids: Iterable[int] | UnsetType = UNSET


class CalledFunctionDelta(Answer):
    arguments: str
    name: str | UnsetType = UNSET


class ChatCallDelta(Answer):
    """The first one of a call has its id and name; later ones only more of its arguments."""

    index: int
    function: CalledFunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(Answer):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ChatCallDelta] | UnsetType = UNSET


class ChatChunkChoice(ChunkChoice, kw_only=True):
    logprobs: ChatLogprobs | None = None
    delta: ChatDelta


class ChatChunk(Head, kw_only=True):
    """The last chunk before `[DONE]` has the usage of the request and no choices, if `include_usage` is set."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: Usage | UsageSoFar | UnsetType | None = UNSET
    timings: TimingsFields | UnsetType = UNSET
    prompt_token_ids: Iterable[int] | UnsetType = UNSET  # in the first chunk


ChatEvent = ChatChunk | OpenAIError  # of a stream; an error is the last one


class ChatFormat:
    """`reasoning`: the names under which responses have what the model wrote before its answer; none: it is left
    out."""

    id_prefix = "chatcmpl-"
    response, chunk = ChatCompletion, ChatChunk

    def __init__(self, reasoning: Sequence[str]) -> None:
        self._reasoning = reasoning

    def first(self, index: int) -> ChatChunkChoice:
        return ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=""))

    def deltas(self, part: ReplyPart) -> list[ChatChunkChoice]:
        """One for each kind of pieces in a row."""
        index, pieces = part.reply.index, part.pieces
        if len(pieces) == 1 and type(pieces[0]) is Content:  # nearly all parts
            return [ChatChunkChoice(index=index, delta=ChatDelta(content=pieces[0].text))]
        found = [self._delta(kind, list(of_kind)) for kind, of_kind in groupby(pieces, key=type)]
        return [ChatChunkChoice(index=index, delta=delta) for delta in found if delta is not None]

    def _delta(self, kind: type[Piece], pieces: Sequence[Piece]) -> ChatDelta | None:
        if kind is Content:
            return ChatDelta(content=_joined(pieces))
        if kind is Reasoning:
            return ChatDelta(**self._reasoned(_joined(pieces))) if self._reasoning else None
        calls = [call for call in map(_call_delta, pieces) if call is not None]
        return ChatDelta(tool_calls=calls) if calls else None

    def _reasoned(self, text: str) -> dict[str, Any]:
        return dict.fromkeys(self._reasoning, text)

    def empty(self, index: int) -> ChatChunkChoice:
        return ChatChunkChoice(index=index, delta=ChatDelta())

    def choice(self, whole: WholeReply, **fields: Any) -> ChatChoice:
        answer = ChatAnswer(whole.content or (None if whole.calls else ""))
        if whole.reasoning:
            answer = replace(answer, **self._reasoned(whole.reasoning))
        if whole.calls:
            answer.tool_calls = [ChatCall(one.id, CalledFunction(one.name, one.text)) for one in whole.calls]
        return ChatChoice(message=answer, **fields)

    def logprobs(self, entries: Sequence[TokenLogprob], offsets: Sequence[int], tokens: TokenText) -> ChatLogprobs:
        return ChatLogprobs(map(tokens.scored, entries))


def _joined(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, Content | Reasoning))


def _call_delta(piece: Piece) -> ChatCallDelta | None:
    """The id and the name are sent once; clients find the call by its index."""
    match piece:
        case CallOpened(call=call, id=id, name=name):
            return ChatCallDelta(call, CalledFunctionDelta("", name), id, "function")
        case CallArguments(call=call, text=text):
            return ChatCallDelta(call, CalledFunctionDelta(text))
        case _:
            return None


# -- text completions ---------------------------------------------------------------------------------------------


class TextLogprobs(Answer):
    tokens: Iterable[str]
    token_logprobs: Iterable[float | None]
    top_logprobs: Iterable[dict[str, float] | None]
    text_offset: Iterable[int]


class TextChoice(Choice, kw_only=True):
    logprobs: TextLogprobs | None = None
    text: str
    prompt_logprobs: PromptScores | UnsetType = UNSET
    prompt_token_ids: Iterable[int] | UnsetType = UNSET


class TextCompletion(Head, kw_only=True):
    object: Literal["text_completion"] = "text_completion"
    choices: list[TextChoice]
    usage: Usage
    timings: TimingsFields


class TextChunkChoice(ChunkChoice, kw_only=True):
    logprobs: TextLogprobs | None = None
    text: str
    prompt_token_ids: Iterable[int] | UnsetType = UNSET  # in the first chunk of a choice


class TextChunk(Head, kw_only=True):
    """The last chunk before `[DONE]` has the usage of the request and no choices, if `include_usage` is set."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[TextChunkChoice]
    usage: Usage | UsageSoFar | UnsetType | None = UNSET
    timings: TimingsFields | UnsetType = UNSET


TextEvent = TextChunk | OpenAIError


class TextFormat:
    id_prefix = "cmpl-"
    response, chunk = TextCompletion, TextChunk

    def first(self, index: int) -> None:
        return None

    def deltas(self, part: ReplyPart) -> list[TextChunkChoice]:
        return [TextChunkChoice(index=part.reply.index, text=text)] if (text := part.text) else []

    def empty(self, index: int) -> TextChunkChoice:
        return TextChunkChoice(index=index, text="")

    def choice(self, whole: WholeReply, **fields: Any) -> TextChoice:
        return TextChoice(text=whole.content, **fields)

    def logprobs(self, entries: Sequence[TokenLogprob], offsets: Sequence[int], tokens: TokenText) -> TextLogprobs:
        return TextLogprobs(
            tokens=(tokens.name(entry.token_id) for entry in entries),
            token_logprobs=(finite(entry.logprob) for entry in entries),
            top_logprobs=(top_by_text(entry, tokens) for entry in entries),
            text_offset=iter(offsets),
        )
