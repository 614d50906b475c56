"""replies: how an engine reads what its model writes: the form that was found, and a reading for each request."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, Unpack

from kvcellar.errors import BadRequest, shown
from kvcellar.sample.constraint import Constraint
from kvcellar.text.pieces import ReplyReader
from kvcellar.text.replies.families import known
from kvcellar.text.replies.form import ReplyForm
from kvcellar.text.replies.outline import Outline
from kvcellar.text.replies.reading import DeltaReader, OpenedReading, ReplyReading
from kvcellar.text.replies.tools import Tools, checked
from kvcellar.text.template import OpeningOptions, checked_options

if TYPE_CHECKING:
    from kvcellar.engine.intake import TextCodec

CHOICES = ("auto", "none", "required")


class ServedReading(ReplyReading, Protocol):
    """How the answers of a request are read. `constraint`: what they have to match, for the sampling parameters."""

    @property
    def constraint(self) -> Constraint | None: ...
    def reader(self) -> ReplyReader:
        """The pieces of one choice, from its deltas."""
        ...


class ServedReplies(Protocol):
    """How a model writes calls and reasoning. `form`: its name, None if that is not known; `refusal`: why `tools`
    cannot be used, if they cannot."""

    @property
    def form(self) -> str | None: ...
    @property
    def refusal(self) -> str | None: ...
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
    ) -> ServedReading:
        """As `Replies.reading`. Raises `BadRequest`."""
        ...


class RequestReading(OpenedReading):
    """How the answers of a request are read, and what they have to match: `constraint` is for its sampling."""

    def __init__(self, outline: Outline, opening: str, constraint: Constraint | None) -> None:
        super().__init__(outline, opening)
        self.constraint = constraint

    def reader(self) -> ReplyReader:
        """The pieces of one choice, from its deltas."""
        return DeltaReader()


class Replies:
    """Of one model. Safe to use from several threads."""

    def __init__(self, codec: "TextCodec") -> None:
        self._codec = codec
        self._form, self.refusal = _found(codec)

    @property
    def form(self) -> str | None:
        """The name of the form in which the model writes calls; None: it is not known."""
        return self._form.name if self.refusal is None else None

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
        are told whole: one that is cut off, or no JSON, is content. `answer` is what the content has to match.

        Raises `BadRequest` for tools that are invalid or whose calls cannot be read.
        """
        if choice not in CHOICES:
            raise BadRequest(f"the choice of tools is one of {', '.join(CHOICES)}, not {shown(choice)}", "tool_choice")
        found = checked(tools) if tools else None
        if found is not None and choice != "none" and self.refusal is not None:
            raise BadRequest(f"tools cannot be used with this model: {self.refusal}", "tools")
        if found is None and (choice == "required" or names):
            raise BadRequest("tool_choice requires a call, and there are no tools", "tool_choice")
        wanted = found.only(names) if found is not None and choice != "none" else None
        constraint = self._constraint(wanted, choice, answer)
        outline = Outline(self._form, wanted, deltas=deltas, parallel=parallel)
        return RequestReading(outline, self._codec.template.opening(checked_options(options)), constraint)

    def _constraint(self, tools: Tools | None, choice: str, answer: Constraint | None) -> Constraint | None:
        if tools is not None and choice == "required":
            raise BadRequest("tool_choice required is not supported with this model", "tool_choice")
        return answer


def _found(codec: "TextCodec") -> tuple[ReplyForm, str | None]:
    """The form of a model, and why `tools` cannot be used."""
    plain = ReplyForm("plain", "nothing")
    if not codec.has_chat:
        return plain, "it has no chat template"
    form = known(codec.template.source)
    if form is None or not form.has_calls:
        return form or plain, "how it writes calls is not known"
    return form, None
