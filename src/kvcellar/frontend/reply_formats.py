"""reply_formats: how an engine reads what its model writes: the form that was found, and a reading for each request."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

from kvcellar.constraint import Constraint
from kvcellar.engine.request_options import RequestReading
from kvcellar.errors import BadRequest, shown
from kvcellar.text.conversation import texts
from kvcellar.text.replies.detection import declared, known, probed
from kvcellar.text.replies.form import ReplyForm
from kvcellar.text.replies.grammar import Grammar
from kvcellar.text.replies.machine import Outline, opened
from kvcellar.text.replies.tools import Tool, Tools, checked
from kvcellar.text.template import OpeningOptions

if TYPE_CHECKING:
    from kvcellar.frontend.text_codec import TextCodec

CHOICES = ("auto", "none", "required")
FORMATS = ("json_schema", "json_object")  # constraints of the content; others say what the model writes as a whole


class Replies:
    """How one model writes calls and reasoning. `refusal`: why `tools` cannot be used, if they cannot. Safe to use from
    several threads."""

    def __init__(self, codec: "TextCodec") -> None:
        self._codec = codec
        self._form, self.refusal = _found(codec)

    @property
    def form(self) -> str | None:
        """The name of the form in which the model writes calls; None: it is not known."""
        return self._form.name if self.refusal is None else None

    @property
    def described(self) -> str:
        """How calls are read, in words."""
        if self.refusal is not None:
            return f"tools: refused ({self.refusal})"
        return f"tools: calls are read as {self._form.name} ({self._form.source})"

    @property
    def reasons(self) -> bool:
        """Whether the form has a part for reasoning."""
        return bool(self._form.thoughts or self._form.channels)

    def reading(
        self,
        *,
        tools: Sequence[Any] | None = None,
        choice: str = "auto",
        names: Sequence[str] = (),
        parallel: bool = True,
        deltas: bool = True,
        answer: Constraint | None = None,
        **options: Unpack[OpeningOptions],
    ) -> RequestReading:
        """How the answers of a request are read that was rendered with `options`.

        `choice`: whether the model may call `tools` ("auto"), does not ("none"), or must ("required"); it must call one
        of `names`, if there are any. Without `parallel`, an answer ends with its first call. Without `deltas`, calls
        are told whole: one that is cut off, or no JSON, is content. `answer` is what the content has to match: where a
        call is required, there is none. An answer that continues a message cannot be required to be a call.

        Raises `BadRequest` for tools that are invalid or whose calls cannot be read, and where a call is required and
        `answer` is more than a format of the content.
        """
        if choice not in CHOICES:
            raise BadRequest(f"the choice of tools is one of {', '.join(CHOICES)}, not {shown(choice)}", "tool_choice")
        found = checked(tools) if tools else None
        if found is not None and choice != "none" and self.refusal is not None:
            raise BadRequest(f"tools cannot be used with this model: {self.refusal}", "tools")
        if found is None and (choice == "required" or names):
            raise BadRequest("tool_choice requires a call, and there are no tools", "tool_choice")
        if choice == "required" and answer is not None and answer.kind not in FORMATS:
            both = f"tool_choice requires a call, and {answer.param} another text; send one of them"
            raise BadRequest(both, answer.param)
        wanted = found.only(names) if found is not None and choice != "none" else None
        answers = answer is not None and choice != "required"
        outline = Outline(self._form, wanted, deltas=deltas, parallel=parallel, answers=answers)
        continued = options.get("continued")
        if continued is not None and choice == "required":
            message = "tool_choice cannot require a call where the answer continues a message"
            raise BadRequest(message, "tool_choice")
        begun = continued is not None and any(texts(continued))
        machine = opened(outline, self._codec.template.opening(options), begun=begun)
        return RequestReading(machine, self._constraint(machine.thinking, wanted, choice, answer, parallel=parallel))

    def _constraint(
        self, thinking: str | None, tools: Tools | None, choice: str, answer: Constraint | None, *, parallel: bool
    ) -> Constraint | None:
        """What an answer has to match: calls that are required or strict, and `answer` behind the reasoning."""
        if tools is not None and choice == "required":
            grammar = Grammar(self._form, _closed(tools, every=True), self._codec.added)
            calls = grammar.required(thinking=thinking, parallel=parallel)
            if answer is not None:  # it binds no text of these answers, and is refused where it cannot be honoured
                return replace(answer, around=calls)
            return Constraint("grammar", calls, param="tools")
        free = tools is None or not any(tool.strict for tool in tools.every)
        if answer is None and free:
            return None
        if answer is not None and tools is None and not self.reasons:
            return answer
        grammar = Grammar(self._form, _closed(tools or Tools(()), every=False), self._codec.added, binds=False)
        if answer is None:
            return Constraint("grammar", grammar.strict(thinking=thinking, parallel=parallel), param="tools")
        return replace(answer, around=grammar.answer(thinking=thinking, calls=tools is not None, parallel=parallel))


def _closed(tools: Tools, *, every: bool) -> Tools:
    """The same, where the objects of strict schemas have no properties but those that are named. Raises `BadRequest`
    for schemas that cannot be constraints, of strict tools or of every one: others bind nothing."""

    def closed(tool: Tool) -> Tool:
        if not (every or tool.strict):
            return tool
        constraint = Constraint.json_schema(dict(tool.schema), strict=tool.strict, param="tools")
        return replace(tool, schema=json.loads(constraint.source))

    return Tools(tuple(map(closed, tools.every)))


def _found(codec: "TextCodec") -> tuple[ReplyForm, str | None]:
    """The form of a model, and why `tools` cannot be used."""
    plain = ReplyForm("plain", "nothing")
    if not codec.has_chat:
        return plain, "it has no chat template"
    form = declared(codec.response_template) or known(codec.template.source) or plain
    if not codec.template.renders_tools:
        return form, "its chat template does not render tools"
    if not form.has_calls:
        form = replace(probed(codec.template.written_call) or form, thoughts=form.thoughts)
    return form, None if form.has_calls else "how it writes calls cannot be told from its chat template"
