"""routes: the routes of Anthropic's API, and their bodies as requests. The list of models is OpenAI's, with the fields
of both. The tokens of a prompt are counted without running it.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from kvcellar.constraint import Constraint
from kvcellar.frontend.engine import Engine
from kvcellar.memory.retention import NO_OPTIONS, RetentionOptions
from kvcellar.sampling_params import names_in, renamed, sampling_of
from kvcellar.serve.anthropic.dialogue import TTL, Chat, chat_of, tools_of
from kvcellar.serve.anthropic.fields import MessagesBody, PromptBody
from kvcellar.serve.anthropic.fields import ToolChoice as Choice
from kvcellar.serve.anthropic.message_writer import MessageWriter, TokenCount
from kvcellar.serve.generation.chat_request import AUTO, ChatRequest, ToolChoice
from kvcellar.serve.generation.namespaces import Caller
from kvcellar.serve.generation.prepare import prompt_tokens
from kvcellar.serve.generation.writer import Generation
from kvcellar.serve.http.api_errors import invalid
from kvcellar.serve.http.parsing import Fields, validated

NAMES: Mapping[str, str] = {"prompt": "messages", **renamed("anthropic")}


def parse_messages(engine: Engine, sent: Fields, caller: Caller) -> Generation:
    """A body of `/v1/messages`. Raises `ApiError` and `BadRequest`."""
    body = validated(MessagesBody, sent)
    chat = chat_of(body)
    ttls = list(chat.ttls)
    if body.cache_control is not None:
        chat.breakpoints.append(len(chat.messages))
        ttls.append(TTL[body.cache_control.ttl])
    retention = RetentionOptions(ttl=max(ttls), recurring=True) if ttls else NO_OPTIONS
    request = chat_request(
        body,
        chat,
        sampling=sampling_of(names_in("anthropic"), sent),
        stream=bool(body.stream),
        retention=retention,
        conversation=body.conversation,
    )
    return Generation(request, partial(MessageWriter, body.model or engine.model.name))


def chat_request(body: PromptBody, chat: Chat, *, sampling: dict[str, Any], **common: Any) -> ChatRequest:
    """The request of a body, whose messages are in `chat`. Raises `ApiError` and `BadRequest`."""
    choice = body.tool_choice
    return ChatRequest(
        messages=chat.messages,
        continue_final_message=_prefilled(body),
        breakpoints=tuple(chat.breakpoints),
        tools=tools_of(body.tools) or (),
        tool_choice=AUTO if choice is None else _chosen(choice),
        parallel_tool_calls=choice is None or not choice.disable_parallel_tool_use,
        constraint=_constraint(body),
        sampling=sampling,
        effort=_effort(body),
        salt=body.cache_salt,
        users=(None if body.metadata is None else body.metadata.user_id,),
        names=NAMES,
        places=chat.places,
        **common,
    )


def _prefilled(body: PromptBody) -> bool:
    """Whether the last message is the beginning of the answer: where it is the assistant's. Raises `ApiError`."""
    last, where = body.messages[-1], f"messages[{len(body.messages) - 1}].content"
    if last.role != "assistant":
        return False
    if last.content and (last.content[-1].text or "").rstrip() != (last.content[-1].text or ""):
        message = f"{where}: the message that the answer continues cannot end with white space"
        raise invalid(where, message)
    if body.thinking is not None and body.thinking.type == "enabled":
        message = "thinking cannot be enabled where the answer continues the last message; send thinking: disabled"
        raise invalid("thinking", message)
    return True


def _chosen(choice: Choice) -> ToolChoice:
    """Raises `ApiError`."""
    if choice.type != "tool":
        return ToolChoice("required" if choice.type == "any" else choice.type)
    if not choice.name:
        raise invalid("tool_choice.name", "tool_choice.name is required where its type is tool")
    return ToolChoice("required", (choice.name,))


def _effort(body: PromptBody) -> str | None:
    """How much to reason: `output_config.effort`, unless reasoning is disabled. Reasoning that is enabled without an
    effort has a medium one, which templates that only switch it read as "on"."""
    if body.thinking is not None and body.thinking.type == "disabled":
        return "none"
    if body.output_config is not None and body.output_config.effort is not None:
        return body.output_config.effort
    return "medium" if body.thinking is not None else None


def _constraint(body: PromptBody) -> Constraint | None:
    """Of the answer. Raises `BadRequest`."""
    if body.output_config is None or body.output_config.format is None:
        return None
    schema = body.output_config.format.schema_
    return Constraint.json_schema(schema, strict=True, param="output_config.format.schema")


def count_tokens(engine: Engine, sent: Fields, caller: Caller) -> TokenCount:
    """A body of `/v1/messages/count_tokens`. As many as the message itself is about to count, within the same bounds.
    Raises `ApiError`, `BadRequest`, and `PromptTooLong` for more than the context."""
    body = validated(PromptBody, sent)
    request = chat_request(body, chat_of(body), sampling={})
    return TokenCount(prompt_tokens(engine, request, caller))
