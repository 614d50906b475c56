"""messages: the schema of chat messages, including those that clients copy from earlier responses.

Fields that no template can read are refused, or ignored as documented in docs/reference/http-fields.md, which is
generated from the comments here. `kvcellar.text` checks the order of messages, and renders tool calls and results.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast

from kvcellar.serve.generation import forms
from kvcellar.serve.http.api_errors import ApiError, invalid

MAX_MESSAGES = 4096

# Fields of a message that are accepted with any value, and why ignoring them is harmless.
MESSAGE_NO_EFFECT: Mapping[str, str] = {
    "annotations": "citations of an earlier response; its text is in content",
    "cache_control": "a hint for the prefix cache; the text does not depend on it",
    "id": "a name that the client gives to the message",
    "provider_specific_fields": "data of another server, kept by litellm",
    "reasoning_details": "OpenRouter's form of reasoning_content",
    "thinking_blocks": "Anthropic's form of reasoning_content",
}


def _as_parts(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def _as_url(value: object) -> object:
    return {"url": value} if isinstance(value, str) else value


class StrictModel(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


class LooseModel(StrictModel):
    """Types are strict, and unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore")


def _known_part(kind: object) -> object:
    """Raises for what other servers take beside texts and images."""
    if why := no_encoder(kind):
        raise ValueError(f"be of text or an image{why}")
    return kind


_NO_PARTS: Mapping[str, str] = {
    **dict.fromkeys(("input_audio", "audio_url", "audio"), "audio; send its words as text"),
    **dict.fromkeys(("video_url", "input_video", "video"), "video; send single frames as images"),
    **dict.fromkeys(("file", "input_file", "document"), "files; send their text, or their pages as images"),
}


def no_encoder(kind: object) -> str:
    """Why parts of this type are refused, as the end of a sentence; "": their type is unknown."""
    what = _NO_PARTS.get(kind) if isinstance(kind, str) else None
    return f": there is no encoder here for {what}" if what else ""


class ImageUrl(LooseModel):
    url: str  # a `data:` URL with the image in base64
    detail: Literal["auto", "low", "high", "original"] | None = None  # no effect: the model's processor decides


class Part(StrictModel):
    type: Annotated[Literal["text", "image_url"], BeforeValidator(_known_part)]
    text: str | None = None  # of `text`
    image_url: Annotated[ImageUrl | None, BeforeValidator(_as_url)] = (
        None  # of `image_url`: see [images](../howto/images.md)
    )
    cache_control: object = None  # ignored, as on a message

    def template_fields(self, where: str) -> dict[str, object]:
        """The part as `Engine.render` takes it. Raises `ApiError`."""
        if self.type == "text" and self.text is not None:
            return {"type": "text", "text": self.text}
        if self.type == "image_url" and self.image_url is not None:
            return {"type": "image_url", "image_url": {"url": self.image_url.url}}
        raise ApiError(400, f"{where}.{self.type} is required", f"{where}.{self.type}", "missing_required_parameter")


class FunctionCall(LooseModel):
    """A call without its id. Other keys are ignored: no template reads them."""

    name: str
    # a string that holds JSON, or an object; `kvcellar.text` checks it
    arguments: Annotated[object, forms.of(str | dict[str, Any] | None)] = None


class ToolCall(LooseModel):  # with an `index`, from clients that assemble calls from a stream
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(StrictModel):
    # `developer` is rendered as `system`, and `function` is `tool`
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    # a string, or a list of parts of the types `text` and `image_url`. Required, except in an assistant's message with
    # `tool_calls`, `function_call`, reasoning or `refusal`
    content: Annotated[
        list[Part] | None,
        FailFast(),
        BeforeValidator(_as_parts, json_schema_input_type=str | list[Part] | None),
    ] = None
    name: str | None = None  # passed to the chat template
    tool_calls: Annotated[list[ToolCall] | None, FailFast()] = None  # see [tool calls](../tool-calls.md)
    tool_call_id: str | None = None  # if present, the id of a call in an earlier message
    function_call: FunctionCall | None = None  # deprecated by OpenAI; the same as one entry of `tool_calls`
    # passed to the chat template as `reasoning_content` and `thinking`; most templates render none, or only that of the
    # last turn
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same as `reasoning_content`
    thinking: str | None = None  # the same as `reasoning_content`
    refusal: str | None = None  # text in place of `content`
    audio: None = None  # only `null`
    # DeepSeek, Mistral: `true` on the last message, of the assistant: the answer continues its text
    prefix: bool | None = None
    annotations: object = None
    cache_control: object = None
    id: object = None
    provider_specific_fields: object = None
    reasoning_details: object = None
    thinking_blocks: object = None

    def template_fields(self, where: str) -> dict[str, object]:
        """The message as `Engine.render` takes it. The role `developer` becomes `system`, which templates have.

        Raises `ApiError` for a message without content, unless it is an assistant's message with one of `_INSTEAD`.
        """
        fields = self.model_dump(exclude=_NOT_RENDERED, exclude_none=True)
        if self.role == "developer":
            fields["role"] = "system"
        if self.content and self.refusal is not None:
            message = f"{where} has both content and refusal; send one of them"
            raise invalid(f"{where}.refusal", message)
        if self.content:
            parts = [part.template_fields(f"{where}.content[{at}]") for at, part in enumerate(self.content)]
            fields["content"] = parts[0].get("text", parts) if len(parts) == 1 else parts
        elif self.role == "assistant" and self.refusal is not None:
            fields["content"] = self.refusal
        elif self.role != "assistant" or not any(fields.get(name) for name in _INSTEAD):
            raise _no_content(where, self.role)
        return fields


# Fields of an assistant's message that may replace its content.
_INSTEAD = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
_NOT_RENDERED = {"content", "refusal", "audio", "prefix", *MESSAGE_NO_EFFECT}


def template_messages(messages: Sequence[Message]) -> list[dict[str, object]]:
    """The messages as `Engine.render` takes them. Raises `ApiError`."""
    return [message.template_fields(f"messages[{index}]") for index, message in enumerate(messages)]


def continues(messages: Sequence[Message]) -> bool:
    """Whether the last message is marked as the beginning of the answer. Raises `ApiError` if another one is."""
    for index, message in enumerate(messages[:-1]):
        if message.prefix:
            where = f"messages[{index}].prefix"
            raise invalid(where, f"{where} must not be true: only the last message can be continued")
    return bool(messages[-1].prefix)


def _no_content(where: str, role: str) -> ApiError:
    fields = "tool_calls, function_call, reasoning_content or refusal"
    unless = f". It may be null or absent with {fields}" if role == "assistant" else ""
    message = f"{where}.content is required: a string, or a list of parts that is not empty{unless}"
    return ApiError(400, message, f"{where}.content", "missing_required_parameter")
