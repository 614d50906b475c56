"""output: the items of a response, and the events of a stream that tell how they grow.

Always true:
  * an item is open from its `output_item.added` to its `output_item.done`; at most one is open, the last;
  * the deltas of an item, put together, are the text of its `done` event and of the item.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal
from uuid import uuid4

from msgspec import UNSET, Raw, UnsetType

from kvcellar.serve.answers import Answer, EncodedAs
from kvcellar.serve.openai.logprobs import ScoredToken
from kvcellar.text.pieces import CallArguments, CallClosed, CallOpened, Content, Piece, Reasoning

Kind = Literal["message", "reasoning", "function_call"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]
Scores = list[Annotated[Raw, EncodedAs(ScoredToken)]]  # each is encoded once, and written in up to five places
PREFIXES: dict[Kind, str] = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}


class OutputText(Answer, kw_only=True):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: Sequence[Any] = ()
    logprobs: Scores


class ReasoningText(Answer, kw_only=True):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class OutputMessage(Answer, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class OutputReasoning(Answer, kw_only=True):
    id: str
    type: Literal["reasoning"] = "reasoning"
    status: ItemStatus
    summary: Sequence[Any] = ()
    content: list[ReasoningText]


class OutputCall(Answer, kw_only=True):
    id: str
    type: Literal["function_call"] = "function_call"
    status: ItemStatus
    call_id: str
    name: str
    arguments: str  # JSON


ItemEventKind = Literal["response.output_item.added", "response.output_item.done"]


class OutputItemEvent(Answer, kw_only=True):
    type: ItemEventKind
    output_index: int
    item: OutputMessage | OutputReasoning | OutputCall
    sequence_number: int = 0


class ContentPartEvent(Answer, kw_only=True):
    type: Literal["response.content_part.added", "response.content_part.done"]
    item_id: str
    output_index: int
    content_index: int = 0
    part: OutputText | ReasoningText
    sequence_number: int = 0


class TextDeltaEvent(Answer, kw_only=True):
    type: Literal["response.output_text.delta", "response.reasoning_text.delta"]
    item_id: str
    output_index: int
    content_index: int = 0
    delta: str
    logprobs: Scores | UnsetType = UNSET
    sequence_number: int = 0


class TextDoneEvent(Answer, kw_only=True):
    type: Literal["response.output_text.done", "response.reasoning_text.done"]
    item_id: str
    output_index: int
    content_index: int = 0
    text: str
    logprobs: Scores | UnsetType = UNSET
    sequence_number: int = 0


class ArgumentsDeltaEvent(Answer, kw_only=True):
    type: Literal["response.function_call_arguments.delta"] = "response.function_call_arguments.delta"
    item_id: str
    output_index: int
    delta: str
    sequence_number: int = 0


class ArgumentsDoneEvent(Answer, kw_only=True):
    type: Literal["response.function_call_arguments.done"] = "response.function_call_arguments.done"
    item_id: str
    output_index: int
    name: str
    arguments: str
    sequence_number: int = 0


OutputEvent = (
    OutputItemEvent | ContentPartEvent | TextDeltaEvent | TextDoneEvent | ArgumentsDeltaEvent | ArgumentsDoneEvent
)


@dataclass(slots=True)
class OutputItem:
    kind: Kind
    id: str
    status: ItemStatus = "in_progress"
    texts: list[str] = field(default_factory=list[str])
    logprobs: Scores = field(default_factory=list[Raw])  # of a message
    call_id: str = ""
    name: str = ""

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def part(self) -> OutputText | ReasoningText:
        """The content of a message or of reasoning, which has one part."""
        return self._reasoning() if self.kind == "reasoning" else self._answer()

    def answer(self, *, empty: bool = False) -> OutputMessage | OutputReasoning | OutputCall:
        """With `empty`, without the part that is not there before its own event."""
        id, status = self.id, self.status
        if self.kind == "function_call":
            return OutputCall(id=id, status=status, call_id=self.call_id, name=self.name, arguments=self.text)
        if self.kind == "reasoning":
            return OutputReasoning(id=id, status=status, content=[] if empty else [self._reasoning()])
        return OutputMessage(id=id, status=status, content=[] if empty else [self._answer()])

    def _reasoning(self) -> ReasoningText:
        return ReasoningText(text=self.text)

    def _answer(self) -> OutputText:
        return OutputText(text=self.text, logprobs=[*self.logprobs])


class Output:
    """The items of one response. Methods return events, without their sequence numbers."""

    def __init__(self) -> None:
        self.items: list[OutputItem] = []
        self._logprobs: list[Raw] = []  # of tokens whose text has not come yet

    def answers(self) -> list[OutputMessage | OutputReasoning | OutputCall]:
        return [item.answer() for item in self.items]

    def add(self, pieces: Sequence[Piece], logprobs: Sequence[Raw] = ()) -> list[OutputEvent]:
        """`logprobs` are of the tokens from which the pieces were read; a message has those of its own
        tokens."""
        self._logprobs += logprobs
        events: list[OutputEvent] = []
        for piece in pieces:
            match piece:
                case Content(text=text):
                    events += self._text("message", text)
                case Reasoning(text=text):
                    events += self._text("reasoning", text)
                case CallOpened(id=id, name=name):
                    events += self._opened("function_call", call_id=id, name=name)
                case CallArguments(text=text):
                    self.items[-1].texts.append(text)
                    events.append(ArgumentsDeltaEvent(**self._place(), delta=text))
                case CallClosed():
                    events += self._closed("completed")
        if pieces:
            self._logprobs = []
        return events

    def end(self, *, complete: bool) -> list[OutputEvent]:
        """Nothing is added any more. A response without any item gets an empty message."""
        events = [] if self.items else self._opened("message")
        return events + self._closed("completed" if complete and not self._half_call else "incomplete")

    @property
    def broken(self) -> bool:
        """Did a call break off that was opened?"""
        return any(item.kind == "function_call" and item.status == "incomplete" for item in self.items)

    @property
    def _half_call(self) -> bool:
        return self.items[-1].kind == "function_call" and self.items[-1].status == "in_progress"

    def _text(self, kind: Kind, text: str) -> list[OutputEvent]:
        same = self.items and self.items[-1].kind == kind and self.items[-1].status == "in_progress"
        events = [] if same else self._opened(kind)
        item, place = self.items[-1], self._place()
        item.texts.append(text)
        if kind == "reasoning":
            return [*events, TextDeltaEvent(type="response.reasoning_text.delta", **place, delta=text)]
        logprobs, self._logprobs = self._logprobs, []
        item.logprobs += logprobs
        delta = TextDeltaEvent(type="response.output_text.delta", **place, delta=text, logprobs=logprobs)
        return [*events, delta]

    def _opened(self, kind: Kind, call_id: str = "", name: str = "") -> list[OutputEvent]:
        events = self._closed("incomplete" if self._half_call else "completed") if self.items else []
        self.items.append(OutputItem(kind, PREFIXES[kind] + uuid4().hex, call_id=call_id, name=name))
        events.append(self._item("response.output_item.added", empty=True))
        if kind != "function_call":
            part = self.items[-1].part()
            events.append(ContentPartEvent(type="response.content_part.added", **self._place(), part=part))
        return events

    def _closed(self, status: Literal["completed", "incomplete"]) -> list[OutputEvent]:
        """The events at the end of the last item; none if it has ended."""
        item = self.items[-1]
        if item.status != "in_progress":
            return []
        place, done = self._place(), list[OutputEvent]()
        if item.kind == "function_call":
            done.append(ArgumentsDoneEvent(**place, name=item.name, arguments=item.text))
        else:
            part = item.part()
            ended = "response.output_text.done" if item.kind == "message" else "response.reasoning_text.done"
            scores = part.logprobs if isinstance(part, OutputText) else UNSET
            done.append(TextDoneEvent(type=ended, **place, text=part.text, logprobs=scores))
            done.append(ContentPartEvent(type="response.content_part.done", **place, part=part))
        item.status = status
        return [*done, self._item("response.output_item.done")]

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1].id, "output_index": len(self.items) - 1}

    def _item(self, kind: ItemEventKind, *, empty: bool = False) -> OutputItemEvent:
        return OutputItemEvent(type=kind, output_index=len(self.items) - 1, item=self.items[-1].answer(empty=empty))
