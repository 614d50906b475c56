"""ollama_fields: the bodies of Ollama's routes. Unknown fields are ignored, as Ollama does; types are strict.

Ollama's clients send the name of a model as `model`, older ones as `name`.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field

from kvcellar.errors import BadRequest
from kvcellar.sample.params import MAX_LOGPROBS
from kvcellar.serve.messages import MAX_MESSAGES


class OllamaBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False, protected_namespaces=())


class NamedBody(OllamaBody):
    model: str | None = None
    name: str | None = None

    @property
    def named(self) -> str:
        """Raises `BadRequest` without a name."""
        if not (found := self.model or self.name):
            raise BadRequest("model is required", "model")
        return found


class ShowBody(NamedBody):
    verbose: bool | None = None


class LoadBody(NamedBody):
    """What both routes that generate have in common. Without a prompt or messages, they load or unload a model."""

    keep_alive: Any = None  # how long the model stays loaded, see `durations`
    stream: bool | None = None  # NDJSON; default: true
    format: str | dict[str, Any] | None = None  # `json`, or a JSON schema: the answer is valid by it
    options: dict[str, Any] | None = None  # of sampling; unknown ones are ignored
    think: bool | str | None = None  # whether the model reasons before it answers, or how much: `low` to `max`
    logprobs: bool | None = None  # whether to return log-probabilities
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)  # needs `logprobs`
    shift: bool | None = None  # `true`: at the end of the context, drop the oldest tokens and continue


class GenerateBody(LoadBody):
    prompt: str | None = None  # a message of the user; empty: the model is loaded, or unloaded
    system: str | None = None  # in place of the system prompt of the model
    raw: bool | None = None  # `true`: the prompt is not a message of the user, but the text to be continued
    suffix: str | None = Field(default=None, max_length=0)  # only empty: no model has a form for filling in
    template: str | None = Field(default=None, max_length=0)  # only empty: templates come with the model
    images: list[Any] | None = Field(default=None, max_length=0)  # only empty
    context: list[Any] | None = Field(default=None, max_length=0)  # only empty; use `/api/chat`


class ToolFunction(OllamaBody):
    name: str
    arguments: dict[str, Any] | None = None


class OllamaCall(OllamaBody):
    id: str | None = None
    function: ToolFunction


class OllamaMessage(OllamaBody):
    role: Literal["system", "user", "assistant", "tool"]  # required
    content: str | None = None  # may be left out
    thinking: str | None = None  # of the assistant
    tool_calls: list[OllamaCall] | None = Field(default=None, max_length=512)  # of the assistant
    tool_name: str | None = None  # of a result
    tool_call_id: str | None = None  # of a result
    images: list[Any] | None = Field(default=None, max_length=0)  # only empty


class ChatBody(LoadBody):
    # described below; empty: the model is loaded, or unloaded
    messages: Annotated[list[OllamaMessage] | None, FailFast()] = Field(default=None, max_length=MAX_MESSAGES)
    tools: Annotated[list[dict[str, Any]] | None, FailFast()] = None  # in the form of OpenAI's chat API
    truncate: bool | None = None  # `false`: a prompt that is too long is refused; else the oldest turns are omitted


class CopyBody(OllamaBody):
    source: str
    destination: str


class PullBody(NamedBody):
    stream: bool | None = None


class CreateMessage(OllamaBody):
    role: str
    content: str


class CreateBody(NamedBody):
    from_: str | None = Field(default=None, alias="from")
    files: dict[str, str] | None = None
    adapters: dict[str, str] | None = None
    draft: str | None = None
    template: str | None = None
    system: str | None = None
    license: str | list[str] | None = None
    parameters: dict[str, Any] | None = None
    messages: list[CreateMessage] | None = Field(default=None, max_length=4096)
    requires: str | None = None
    quantize: str | None = None
    draft_quantize: str | None = None
    stream: bool | None = None
