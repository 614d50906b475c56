"""fields: the bodies of Anthropic's routes.

Agents send fields that belong to betas, and new ones appear with each release of a client, so unknown fields are
ignored, as Anthropic's own clients expect of a gateway. Fields that would change the response, and that this server
does not have, are refused by name. Types are strict.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, FailFast, Field, ValidationInfo

from kvcellar.serve.generation import forms
from kvcellar.serve.generation.messages import MAX_MESSAGES, LooseModel

Effort = Literal["low", "medium", "high", "xhigh", "max"]


class CacheControl(LooseModel):
    """A breakpoint: later requests may resume here."""

    type: Literal["ephemeral"]  # required
    # Anthropic: what the request uses and computes is deleted when it was not used for so long
    ttl: Literal["5m", "1h"] | None = None


class ImageSource(LooseModel):
    type: Literal["base64", "url"]  # `file` is not supported: this server keeps no files
    media_type: str | None = None  # of `base64`; which format it is, is read from the data
    data: str | None = None  # of `base64`
    url: str | None = None  # of `url`: a `data:` URL, or one on a host that the server allows


def _of_image(value: object, about: ValidationInfo) -> object:
    """None in blocks of another type, which `dialogue` refuses by name."""
    return value if about.data.get("type") == "image" else None


class Block(LooseModel):
    """A content block. Which fields it has depends on its type; `dialogue` checks that."""

    # `text`, `image`, `thinking`, `redacted_thinking`, `tool_use`, `tool_result`; others, like `document`, are refused
    type: str
    text: str | None = None  # of `text`
    thinking: str | None = None  # of `thinking`; its `signature` is ignored
    id: str | None = None  # of `tool_use`
    name: str | None = None  # of `tool_use`
    input: dict[str, Any] | None = None  # of `tool_use`
    # of `image`: see [images](../howto/images.md)
    source: Annotated[ImageSource | None, BeforeValidator(_of_image, json_schema_input_type=ImageSource | None)] = None
    tool_use_id: str | None = None  # of `tool_result`: the id of a `tool_use` in an earlier message
    # of `tool_result`: a string, or blocks of the types `text` and `image`
    content: Annotated[Any, forms.of(forms.ToolResultContent)] = None
    is_error: bool | None = None  # of `tool_result`: the text of the result begins with "Error: "
    cache_control: CacheControl | None = None  # a breakpoint behind the message of the block


def _as_blocks(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


Blocks = Annotated[list[Block], FailFast(), BeforeValidator(_as_blocks, json_schema_input_type=str | list[Block])]


class AnthropicMessage(LooseModel):
    role: Literal["user", "assistant", "system"]  # `system` may stand in the middle
    content: Blocks  # a string, or a list of blocks


class AnthropicTool(LooseModel):
    """A tool of the client."""

    type: str | None = None  # Anthropic: `custom`, or left out; the tools that Anthropic runs itself are refused
    name: str  # required; up to 64 letters, digits, hyphens and underscores
    description: str | None = None  # is part of the prompt
    input_schema: dict[str, Any] | None = None  # a JSON schema of an object
    strict: bool | None = None  # Anthropic: calls have arguments that are valid by the schema
    cache_control: CacheControl | None = None  # a breakpoint behind the system prompt


class ToolChoice(LooseModel):
    type: Literal["auto", "any", "tool", "none"]  # the model decides, must call one, must call `name`, or calls none
    name: str | None = None  # of `tool`
    disable_parallel_tool_use: bool | None = None  # at most one call


class Thinking(LooseModel):
    # Anthropic: `disabled` switches reasoning off, the others switch it on, where the chat template can
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(default=None, ge=0)  # no limit: `max_tokens` counts reasoning, too


class OutputFormat(LooseModel):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(LooseModel):
    format: OutputFormat | None = None  # Anthropic: the answer is JSON, valid by the schema
    effort: Effort | None = None  # Anthropic: how much the model should reason


class Metadata(LooseModel):
    user_id: str | None = None  # the request shares memory only with those of the same user


class PromptBody(LooseModel):
    """What is a part of the prompt, in both routes."""

    model: str | None = None  # Anthropic: may be left out; otherwise a name in `/v1/models`
    # Anthropic: required; described below
    messages: Annotated[list[AnthropicMessage], FailFast()] = Field(min_length=1, max_length=MAX_MESSAGES)
    # Anthropic: a string, or a list of `text` blocks
    system: Annotated[
        list[Block] | None, FailFast(), BeforeValidator(_as_blocks, json_schema_input_type=str | list[Block] | None)
    ] = None
    # Anthropic: functions of the client that the model may call
    tools: Annotated[list[AnthropicTool] | None, FailFast()] = Field(default=None, max_length=512)
    tool_choice: ToolChoice | None = None  # Anthropic: whether and which tools are called
    thinking: Thinking | None = None  # Anthropic: whether the model reasons before it answers
    output_config: OutputConfig | None = None  # Anthropic: JSON that is valid by a schema, and effort
    mcp_servers: list[Any] | None = Field(default=None, max_length=0)  # Anthropic: only empty
    container: None = None  # Anthropic: only `null`
    metadata: Metadata | None = None  # Anthropic: `user_id`: the request shares memory only with those of the same user
    cache_salt: str | None = None  # vLLM: the request shares memory only with those of the same salt


class MessagesBody(PromptBody):
    max_tokens: int = Field(ge=1, le=2**31 - 1)  # Anthropic: required
    stream: bool | None = None  # Anthropic: server-sent events
    cache_control: CacheControl | None = None  # Anthropic: a breakpoint behind the last message
    conversation: str | None = None  # kvcellar: name of a [conversation](../howto/conversations.md) to continue
