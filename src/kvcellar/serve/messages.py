"""messages: the turns of a chat as clients send them, new ones and those that they send back from earlier answers.

What a template cannot read is refused, or accepted without effect where docs/reference/http-fields.md says so. That
page is made from the comments here. `kvcellar.text` checks the order of messages, and renders calls and results.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast

from kvcellar.serve.failures import ApiError

# Fields of a message that are accepted with any value; why ignoring them is harmless.
MESSAGE_NO_EFFECT: Mapping[str, str] = MappingProxyType(
    {
        "annotations": "citations of an earlier answer; its text is in content",
        "cache_control": "the answer does not depend on what was kept in memory",
        "id": "a name that the client gives to the message",
        "provider_specific_fields": "litellm's record of another server",
        "reasoning_details": "the same reasoning as in reasoning_content, as OpenRouter writes it",
        "thinking_blocks": "the same reasoning as in reasoning_content, as Anthropic writes it",
    }
)


def _as_parts(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


class TextPart(Strict):
    type: Literal["text"]
    text: str
    cache_control: object = None  # without effect, as on a message


class FunctionCall(Strict):
    """A call without its id. Templates read no other keys than these."""

    model_config = ConfigDict(extra="ignore")

    name: str
    arguments: object = None  # a string that holds JSON, or an object; `kvcellar.text` checks it


class ToolCall(Strict):
    model_config = ConfigDict(extra="ignore")  # `index`, for one: clients put calls together from a stream

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Strict):
    # `developer` is rendered as `system`, and `function` is `tool`
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    # text, or a list of parts of the type `text`. Required, but for an assistant's message with `tool_calls`,
    # `function_call`, reasoning or `refusal`
    content: Annotated[list[TextPart] | None, FailFast(), BeforeValidator(_as_parts)] = None
    name: str | None = None  # given to the chat template
    tool_calls: Annotated[list[ToolCall] | None, FailFast()] = None  # see [tool calls](../tool-calls.md)
    tool_call_id: str | None = None  # if present, the id of a call in an earlier message
    function_call: FunctionCall | None = None  # deprecated by OpenAI; the same as one entry of `tool_calls`
    # given to the chat template as `reasoning_content` and `thinking`; most templates render none, or only that of the
    # last turn
    reasoning_content: str | None = None
    reasoning: str | None = None  # another name of `reasoning_content`
    thinking: str | None = None  # another name of `reasoning_content`
    refusal: str | None = None  # text in the place of `content`
    audio: None = None  # only `null`
    annotations: object = None
    cache_control: object = None
    id: object = None
    provider_specific_fields: object = None
    reasoning_details: object = None
    thinking_blocks: object = None

    def plain(self, where: str) -> dict[str, object]:
        """As `Engine.render` takes it. `developer` is OpenAI's newer word for `system`; templates know the older.

        Raises `ApiError` for a message that says nothing: only the assistant's may lack content, beside something else.
        """
        fields = self.model_dump(exclude=_NOT_RENDERED, exclude_none=True)
        if self.role == "developer":
            fields["role"] = "system"
        if self.content:
            texts: list[dict[str, object]] = [part.model_dump(include={"type", "text"}) for part in self.content]
            fields["content"] = texts[0]["text"] if len(texts) == 1 else texts
        elif self.role == "assistant" and self.refusal is not None:
            fields["content"] = self.refusal
        elif self.role != "assistant" or not any(fields.get(name) for name in _INSTEAD):
            raise _no_content(where, self.role)
        if self.content and self.refusal is not None:
            message = f"{where} has both content and refusal; send one of them"
            raise ApiError(400, message, f"{where}.refusal", "invalid_value")
        return fields


_INSTEAD = (
    "tool_calls",
    "function_call",
    "reasoning_content",
    "reasoning",
    "thinking",
)  # beside these there may be none
_NOT_RENDERED = {"content", "refusal", "audio", *MESSAGE_NO_EFFECT}


def plain(messages: Sequence[Message]) -> list[dict[str, object]]:
    """The messages as `Engine.render` takes them. Raises `ApiError`."""
    return [message.plain(f"messages[{index}]") for index, message in enumerate(messages)]


def _no_content(where: str, role: str) -> ApiError:
    beside = "tool_calls, function_call, reasoning_content or refusal"
    unless = f". It may be null or left out beside {beside}" if role == "assistant" else ""
    message = f"{where}.content is required: a string, or a list of text parts that is not empty{unless}"
    return ApiError(400, message, f"{where}.content", "missing_required_parameter")
