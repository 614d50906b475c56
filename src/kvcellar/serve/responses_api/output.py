"""output: the items of a response, and the events of a stream that tell how they grow.

Always true:
  * an item is open from its `output_item.added` to its `output_item.done`; at most one is open, the last;
  * the deltas of an item, put together, are the text of its `done` event and of the item.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from uuid import uuid4

from kvcellar.serve.json_text import EncodedList
from kvcellar.text.pieces import CallArguments, CallClosed, CallOpened, Content, Piece, Reasoning

Json = dict[str, Any]
Kind = Literal["message", "reasoning", "function_call"]
PREFIXES: dict[Kind, str] = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}


@dataclass(slots=True)
class OutputItem:
    kind: Kind
    id: str
    status: Literal["in_progress", "completed", "incomplete"] = "in_progress"
    texts: list[str] = field(default_factory=list[str])
    logprobs: EncodedList = field(default_factory=EncodedList)  # of a message
    call_id: str = ""
    name: str = ""

    def part(self) -> Json:
        """The content of a message or of reasoning, which has one part."""
        text = "".join(self.texts)
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self.logprobs.copy()}

    def as_json(self, *, empty: bool = False) -> Json:
        """With `empty`, without the part that is not there before its own event."""
        head: Json = {"id": self.id, "type": self.kind, "status": self.status}
        if self.kind == "function_call":
            return head | {"call_id": self.call_id, "name": self.name, "arguments": "".join(self.texts)}
        content = [] if empty else [self.part()]
        if self.kind == "reasoning":
            return head | {"summary": [], "content": content}
        return head | {"role": "assistant", "content": content}


class Output:
    """The items of one response. Methods return events, without their sequence numbers."""

    def __init__(self) -> None:
        self.items: list[OutputItem] = []
        self._logprobs: list[bytes] = []  # JSON, of tokens whose text has not come yet

    def as_json(self) -> list[Json]:
        return [item.as_json() for item in self.items]

    def add(self, pieces: Sequence[Piece], logprobs: Sequence[bytes] = ()) -> list[Json]:
        """`logprobs`, each as JSON, are of the tokens from which the pieces were read; a message has those of its own
        tokens."""
        self._logprobs += logprobs
        events: list[Json] = []
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
                    events.append(self._event("response.function_call_arguments.delta", delta=text))
                case CallClosed():
                    events += self._closed("completed")
        if pieces:
            self._logprobs = []
        return events

    def end(self, *, complete: bool) -> list[Json]:
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

    def _text(self, kind: Kind, text: str) -> list[Json]:
        same = self.items and self.items[-1].kind == kind and self.items[-1].status == "in_progress"
        events = [] if same else self._opened(kind)
        self.items[-1].texts.append(text)
        if kind == "reasoning":
            return [*events, self._event("response.reasoning_text.delta", content_index=0, delta=text)]
        logprobs, self._logprobs = self._logprobs, []
        self.items[-1].logprobs.extend(logprobs)
        encoded = EncodedList(logprobs)
        event = self._event("response.output_text.delta", content_index=0, delta=text, logprobs=encoded)
        return [*events, event]

    def _opened(self, kind: Kind, call_id: str = "", name: str = "") -> list[Json]:
        events = self._closed("incomplete" if self._half_call else "completed") if self.items else []
        self.items.append(OutputItem(kind, PREFIXES[kind] + uuid4().hex, call_id=call_id, name=name))
        events.append(self._item("response.output_item.added", empty=True))
        if kind != "function_call":
            empty = self.items[-1].part()
            events.append(self._event("response.content_part.added", content_index=0, part=empty))
        return events

    def _closed(self, status: Literal["completed", "incomplete"]) -> list[Json]:
        """The events at the end of the last item; none if it has ended."""
        item = self.items[-1]
        if item.status != "in_progress":
            return []
        text = "".join(item.texts)
        if item.kind == "function_call":
            done = [self._event("response.function_call_arguments.done", name=item.name, arguments=text)]
        else:
            about: Json = {"content_index": 0, "text": text}
            part = self._event("response.content_part.done", content_index=0, part=item.part())
            if item.kind == "message":
                about["logprobs"] = item.logprobs.copy()
            kind = "response.output_text.done" if item.kind == "message" else "response.reasoning_text.done"
            done = [self._event(kind, **about), part]
        item.status = status
        return [*done, self._item("response.output_item.done")]

    def _event(self, kind: str, **fields: Any) -> Json:
        return {"type": kind, "item_id": self.items[-1].id, "output_index": len(self.items) - 1, **fields}

    def _item(self, kind: str, *, empty: bool = False) -> Json:
        return {"type": kind, "output_index": len(self.items) - 1, "item": self.items[-1].as_json(empty=empty)}
