"""fields: the bodies of Ollama's routes. Unknown fields are ignored, as Ollama does; types are strict.

Ollama's clients send the name of a model as `model`, older ones as `name`.
"""

import logging
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import FailFast, Field

from kvcellar.errors import BadRequest
from kvcellar.sampling_params import MAX_LOGPROBS, names_in, sampling_of
from kvcellar.serve.generation import forms
from kvcellar.serve.generation.chat_request import Effort
from kvcellar.serve.generation.messages import MAX_MESSAGES, LooseModel
from kvcellar.serve.http.json_text import printable
from kvcellar.serve.http.parsing import validated

log = logging.getLogger("kvcellar.serve")

MOST_NAMED = 8  # unknown options in one line of the log


class NamedBody(LooseModel):
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


class Options(LooseModel):
    """What is not a sampling parameter, or not as such."""

    num_predict: int | None = None  # most new tokens; below 0: up to the end of the context
    num_ctx: int | None = Field(default=None, ge=1)  # no effect: the context is set when the server starts


def sampling_options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """`options` as fields of `SamplingParams`. Unknown ones are ignored, as Ollama does, with a line in the log: a
    client sends those of all its models. Raises `ApiError` and `BadRequest`."""
    sent, names = options or {}, names_in("ollama")
    if unknown := [name for name in sent if name not in names and name not in Options.model_fields]:
        named = ", ".join(printable(name, 40) for name in unknown[:MOST_NAMED])
        log.warning("options without an effect: %s", named)
    own = validated(Options, {name: sent[name] for name in Options.model_fields if name in sent})
    found = sampling_of(names, sent)
    if own.num_predict is not None and found.pop("max_tokens") >= 0:
        found["max_tokens"] = max(own.num_predict, 1)
    return found


class LoadBody(NamedBody):
    """What both routes that generate have in common. Without a prompt or messages, they load or unload a model."""

    # how long the model stays loaded: `5m`, `1h30m`, a number of seconds; below 0: for ever; 0: it is unloaded
    keep_alive: Annotated[Any, forms.of(forms.Duration)] = None
    stream: bool | None = None  # NDJSON; default: true
    # `json`, or a JSON schema: the answer is valid by it
    format: Annotated[str | dict[str, Any] | None, forms.of(Literal["json", ""] | dict[str, Any] | None)] = None
    # of sampling; unknown ones are ignored
    options: Annotated[dict[str, Any] | None, forms.of(Options | None)] = None
    # whether the model reasons before it answers, or how much: `low` to `max`
    think: Annotated[bool | str | None, forms.of(bool | Effort | None)] = None
    logprobs: bool | None = None  # whether to return log-probabilities
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)  # needs `logprobs`
    shift: bool | None = None  # `true`: at the end of the context, drop the oldest tokens and continue


class GenerateBody(LoadBody):
    prompt: str | None = None  # a message of the user; empty: the model is loaded, or unloaded
    system: str | None = None  # in place of the system prompt of the model
    raw: bool | None = None  # `true`: the prompt is not a message of the user, but the text to be continued
    suffix: str | None = Field(default=None, max_length=0)  # only empty: no model has a form for filling in
    template: str | None = Field(default=None, max_length=0)  # only empty: templates come with the model
    images: list[str] | None = None  # in base64, in front of the prompt: see [images](../howto/images.md)
    context: list[Any] | None = Field(default=None, max_length=0)  # only empty; use `/api/chat`


class ToolFunction(LooseModel):
    name: str
    arguments: dict[str, Any] | None = None


class OllamaCall(LooseModel):
    id: str | None = None
    function: ToolFunction


class OllamaMessage(LooseModel):
    role: Literal["system", "user", "assistant", "tool"]  # required
    content: str | None = None  # may be left out
    thinking: str | None = None  # of the assistant
    tool_calls: list[OllamaCall] | None = Field(default=None, max_length=512)  # of the assistant
    tool_name: str | None = None  # of a result
    tool_call_id: str | None = None  # of a result
    images: list[str] | None = None  # in base64, in front of the text: see [images](../howto/images.md)


class OllamaChatBody(LoadBody):
    # described below; empty: the model is loaded, or unloaded
    messages: Annotated[list[OllamaMessage] | None, FailFast()] = Field(default=None, max_length=MAX_MESSAGES)
    # in the form of OpenAI's chat API
    tools: Annotated[list[dict[str, Any]] | None, FailFast(), forms.of(forms.ToolForms)] = None
    truncate: bool | None = None  # `false`: a prompt that is too long is refused; else the oldest turns are omitted


class CopyBody(LooseModel):
    source: str
    destination: str


class PullBody(NamedBody):
    stream: bool | None = None


class CreateMessage(LooseModel):
    role: str
    content: str


class CreateModelBody(NamedBody):
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
