"""chat: the fields of a chat completion, and the request that they make."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated

from pydantic import FailFast, Field

from kvcellar.frontend.engine import Engine
from kvcellar.sampling_params import MAX_LOGPROBS
from kvcellar.serve.generation import forms
from kvcellar.serve.generation.chat_request import ChatRequest, Effort
from kvcellar.serve.generation.messages import MAX_MESSAGES, Message, StrictModel, continues, template_messages
from kvcellar.serve.generation.namespaces import Caller
from kvcellar.serve.generation.writer import Generation
from kvcellar.serve.http.parsing import Fields
from kvcellar.serve.openai.fields import (
    CommonBody,
    checked,
    common,
    invalid,
    most_tokens,
    response_options,
    tool_choice,
)
from kvcellar.serve.openai.formats import ChatFormat
from kvcellar.serve.openai.response_writer import ResponseWriter


class Reasoning(StrictModel):
    """OpenRouter's form of `reasoning_effort`."""

    effort: Effort | None = None


class ChatBody(CommonBody):
    # OpenAI: described below; up to 4096
    messages: Annotated[list[Message], FailFast()] = Field(min_length=1, max_length=MAX_MESSAGES)
    # OpenAI: new name of `max_tokens`
    max_completion_tokens: int | None = Field(default=None, ge=1, le=2**31 - 1)
    logprobs: bool | None = None  # OpenAI: whether to return log-probabilities
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)  # OpenAI: up to 20; needs `logprobs`
    reasoning_effort: Effort | None = None  # OpenAI: see [tool calls and reasoning](../tool-calls.md)
    reasoning: Reasoning | None = None  # OpenRouter: `{"effort": ...}`, the same as `reasoning_effort`
    # vLLM: variables of the chat template; those that it does not use have no effect
    chat_template_kwargs: dict[str, object] | None = None
    add_generation_prompt: bool | None = None  # vLLM: `false`: render without the start of the assistant's turn
    # vLLM: `true`: the answer continues the last message, of the assistant; not with `add_generation_prompt`
    continue_final_message: bool | None = None
    # OpenAI: functions that the model may call, with a name and a JSON Schema: see [tool calls](../tool-calls.md)
    tools: Annotated[list[dict[str, object]] | None, FailFast(), forms.of(forms.ToolForms)] = None
    # OpenAI: `none`, `auto` (the default), `required`, one function by name, or `allowed_tools`
    tool_choice: Annotated[object, forms.of(forms.ToolChoiceForms)] = None
    parallel_tool_calls: bool | None = None  # OpenAI: `false`: an answer ends with its first call
    include_reasoning: bool | None = None  # vLLM: `false`: the response is without reasoning; it is generated
    # kvcellar: `false`: earlier replies are tokenized again, instead of having the tokens that they were generated with
    replay_tokens: bool | None = None


def parse_chat(engine: Engine, sent: Fields, caller: Caller) -> Generation:
    """A body of `/v1/chat/completions`. Raises `ApiError` and `BadRequest`."""
    body, given = checked(ChatBody, sent)
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "top_logprobs needs logprobs to be true")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    request = ChatRequest(
        messages=template_messages(body.messages),
        sampling=given
        | {"logprobs": logprobs}
        | most_tokens(given, "max_completion_tokens", body.max_completion_tokens),
        variables=body.chat_template_kwargs,
        effort=_effort(body),
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=continued(body.messages, body.continue_final_message, body.add_generation_prompt),
        replay=body.replay_tokens is not False,
        tools=body.tools or (),
        tool_choice=tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        names={"prompt": "messages"},
        **common(body),
    )
    form = ChatFormat(_reasoning_names(body, caller))
    return Generation(request, partial(ResponseWriter, engine, response_options(engine, body, caller), form))


def continued(messages: Sequence[Message], wanted: bool | None, add_generation_prompt: bool | None) -> bool:
    """Whether the answer continues the last message. Raises `ApiError` where a new one is wanted as well."""
    if not (continues(messages) or wanted):
        return False
    if add_generation_prompt:
        message = "add_generation_prompt must not be true where the last message is continued"
        raise invalid("add_generation_prompt", message)
    return True


def _reasoning_names(body: ChatBody, caller: Caller) -> tuple[str, ...]:
    if body.include_reasoning is False:
        return ()
    return ("reasoning_content", "reasoning") if caller.settings.both_reasoning_names else ("reasoning_content",)


def _effort(body: ChatBody) -> Effort | None:
    other = None if body.reasoning is None else body.reasoning.effort
    if None not in (body.reasoning_effort, other) and body.reasoning_effort != other:
        raise invalid("reasoning", "reasoning_effort and reasoning.effort differ; send one of them")
    return body.reasoning_effort or other
