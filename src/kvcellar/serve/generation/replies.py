"""replies: the events of a request as parts of its choices, read into pieces; and what is known of the whole.

Always true:
  * a part belongs to one choice; the parts of a choice come in order, the last one has its `end`, and only that one;
  * the counts of a choice include the part that was returned last.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from msgspec import Raw, Struct

from kvcellar.events import Delta, Done, Event, Finished, PromptScored
from kvcellar.serve.generation.chat_request import Json, Prepared
from kvcellar.serve.http.request_log import draft_counts
from kvcellar.text.pieces import CallArguments, CallClosed, CallOpened, Content, Piece, Reasoning, pieces_of

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(slots=True, eq=False)
class Reply:
    """One choice so far."""

    index: int
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    calls: int = 0  # that were closed: one that was opened and then broke off is none
    end: Finished | None = None

    @property
    def ended(self) -> Finished:
        assert self.end is not None, "the choice has not ended"
        return self.end

    @property
    def finish_reason(self) -> FinishReason:
        """`stop`, `length`, or `tool_calls` where the model has stopped to call tools."""
        reason = self.ended.reason
        assert reason != "cancelled", "the request has a response"
        return "tool_calls" if reason == "stop" and self.calls else reason


class ReplyPart(Struct, frozen=True):
    """What one event has added to a choice: the event, which is a `Delta` or the `Finished`, and the pieces that were
    read from it, which may have the text of earlier tokens."""

    reply: Reply
    pieces: Sequence[Piece]
    delta: Delta | None = None
    end: Finished | None = None

    @property
    def text(self) -> str:
        """The text of the content."""
        return "".join(piece.text for piece in self.pieces if isinstance(piece, Content))

    @property
    def only_text(self) -> Content | Reasoning | None:
        """The piece of a part that has one, a text, and does not end its choice: of nearly all parts."""
        if self.end is not None or len(self.pieces) != 1:
            return None
        (piece,) = self.pieces
        return piece if (type(piece) is Content or type(piece) is Reasoning) and piece.text else None


class Replies:
    """All choices of one request, and the `Done` of each prompt that has ended."""

    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared
        self.replies = [Reply(index) for index in range(prepared.choices)]
        self.done: dict[int, Done] = {}  # by number of the prompt
        self.scored: dict[int, PromptScored] = {}  # likewise, before any part of its choices

    def parts(self, batch: Sequence[tuple[int, Event]]) -> Iterator[ReplyPart]:
        """The parts that the events of `batch` add, in their order."""
        for number, event in batch:
            match event:
                case Delta():
                    reply = self._reply(number, event.choice)
                    pieces = pieces_of(event)
                    reply.completion_tokens += len(event.token_ids)
                    reply.reasoning_tokens += event.reasoning_tokens
                    reply.calls += sum(isinstance(piece, CallClosed) for piece in pieces)
                    yield ReplyPart(reply, pieces, delta=event)
                case Finished():
                    reply = self._reply(number, event.choice)
                    reply.end = event
                    yield ReplyPart(reply, (), end=event)
                case Done():
                    self.done[number] = event
                case PromptScored():
                    self.scored[number] = event
                case _:
                    pass

    def prompt_of(self, reply: Reply) -> int:
        """The number of its prompt."""
        return reply.index // self.prepared.params.n

    def _reply(self, number: int, choice: int) -> Reply:
        return self.replies[number * self.prepared.params.n + choice]

    # -- of all prompts together; of those that have ended ------------------------------------------------------

    @property
    def prompt_tokens(self) -> int:
        return sum(one.usage.prompt_tokens for one in self.done.values())

    @property
    def cached_tokens(self) -> int:
        return sum(one.usage.cached_tokens for one in self.done.values())

    @property
    def completion_tokens(self) -> int:
        return sum(one.usage.completion_tokens for one in self.done.values())

    @property
    def reasoning_tokens(self) -> int:
        return sum(one.reasoning_tokens for one in self.replies)

    @property
    def drafts(self) -> tuple[int, int] | None:
        """Drafts that were computed and that became tokens; None if nothing was drafted for."""
        return draft_counts(self.done)


@dataclass(frozen=True, slots=True)
class Item:
    """Reasoning, content or a call, as it was written. `id` and `name` are of a call, whose texts make up JSON."""

    kind: Literal["reasoning", "content", "call"]
    texts: list[str] = field(default_factory=list[str])
    id: str = ""
    name: str = ""

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def arguments(self) -> Raw:
        """Of a call, as JSON on one line: its reader has found the text to be JSON, or none."""
        found: object = json.loads(self.text) if self.text.strip() else {}
        return Raw(json.dumps(found, allow_nan=False, separators=(",", ":")).encode())

    def as_call(self) -> Json:
        """In the form of OpenAI's chat API."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.text}}


class WholeReply:
    """A choice that is collected, for responses that are sent at once. `items` are in the order in which they began;
    between two calls there may be content again."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.calls: list[Item] = []
        self._closed: set[int] = set()  # numbers of calls

    def add(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            match piece:
                case Reasoning(text=text):
                    self._last("reasoning").texts.append(text)
                case Content(text=text):
                    self._last("content").texts.append(text)
                case CallOpened(id=id, name=name):
                    self.items.append(Item("call", id=id, name=name))
                    self.calls.append(self.items[-1])
                case CallArguments(call=call, text=text):
                    self.calls[call].texts.append(text)
                case CallClosed(call=call):
                    self._closed.add(call)

    def _last(self, kind: Literal["reasoning", "content"]) -> Item:
        """The last item, if it is of this kind; else a new one."""
        if not self.items or self.items[-1].kind != kind:
            self.items.append(Item(kind))
        return self.items[-1]

    @property
    def content(self) -> str:
        return self._joined("content")

    @property
    def reasoning(self) -> str:
        return self._joined("reasoning")

    def message(self) -> Json:
        """As `Engine.render` takes it in a later request: without a call that broke off, which has no result."""
        message: Json = {"role": "assistant", "content": self.content}
        if reasoning := self.reasoning:
            message["reasoning_content"] = reasoning
        if self._closed:
            message["tool_calls"] = [call.as_call() for n, call in enumerate(self.calls) if n in self._closed]
        return message

    def _joined(self, kind: str) -> str:
        return "".join(item.text for item in self.items if item.kind == kind)
