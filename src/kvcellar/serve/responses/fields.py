"""fields: the fields of a request of the Responses API, and the chat that they make.

The rule for unknown fields is that of chats: they are refused, except those of `ignored_fields`. Unknown keys in items
and in tools are ignored.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, FailFast, Field

from kvcellar.constraint import Constraint
from kvcellar.errors import shown
from kvcellar.frontend.engine import Engine
from kvcellar.frontend.transcript import as_json, shown_from
from kvcellar.sampling_params import MAX_LOGPROBS
from kvcellar.serve.generation import forms, ignored_fields
from kvcellar.serve.generation.chat_request import ChatRequest, Effort
from kvcellar.serve.generation.field_names import Place
from kvcellar.serve.generation.messages import LooseModel, StrictModel
from kvcellar.serve.generation.namespaces import Caller
from kvcellar.serve.generation.prepare import prompt_tokens
from kvcellar.serve.generation.structured_fields import SCHEMA_KEYS, of_named_schema, of_response_format
from kvcellar.serve.generation.writer import Generation
from kvcellar.serve.http.json_text import json_size, printable
from kvcellar.serve.http.parsing import Fields
from kvcellar.serve.openai.fields import CommonBody, checked, common, invalid, most_tokens, tool_choice, unsupported
from kvcellar.serve.responses.items import check_results, continues, kept_items, messages_of
from kvcellar.serve.responses.response_writer import (
    LOGPROBS,
    Echo,
    InputTokens,
    RequestFields,
    ResponseReasoning,
    ResponsesWriter,
    ResponseText,
)
from kvcellar.serve.responses.store import ResponseStore

NAMES: Mapping[str, str] = {"prompt": "input", "messages": "input"}
MAX_METADATA = 16
# Values of `include` that ask for what a response has anyway, or never has.
INCLUDES = frozenset({LOGPROBS, "reasoning.encrypted_content"})
INCLUDES_OF_TOOLS = ("file_search_call.", "web_search_call.", "code_interpreter_call.", "computer_call_output.")

# Fields accepted with any value, and those accepted with these only.
NO_EFFECT: Mapping[str, str] = {
    **ignored_fields.NO_EFFECT,
    "client_metadata": "describes the caller",
    "max_tool_calls": "limits tools that a server runs itself; there are none",
}
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    **ignored_fields.NEUTRAL,
    "background": (None, False),
    "context_management": (None, []),
    "prompt": (None,),
}


class ReasoningOptions(LooseModel):
    effort: Effort | None = None  # OpenAI: as `reasoning_effort` of a chat
    # OpenAI: accepted; reasoning is told as it is, without a summary
    summary: Literal["auto", "concise", "detailed", "none"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None  # OpenAI: old name of `summary`


class TextOptions(StrictModel):
    # OpenAI: `text`, `json_object` or `json_schema`
    format: Annotated[dict[str, object] | None, forms.of(forms.TextFormats)] = None
    verbosity: Literal["medium"] | None = None  # OpenAI: only `medium`


def _few(value: object) -> object:
    if isinstance(value, dict) and len(value) > MAX_METADATA:
        raise ValueError(f"have at most {MAX_METADATA} keys, not {len(value)}")
    return value


class ResponsesBody(CommonBody):
    # OpenAI: a text, or a list of items: messages, calls, results of calls, reasoning
    input: Annotated[object, forms.of(forms.ResponseInput)]
    instructions: str | None = None  # OpenAI: a system message before all others, of this response only
    previous_response_id: str | None = None  # OpenAI: a stored response, whose conversation is continued
    max_output_tokens: int | None = Field(default=None, ge=1, le=2**31 - 1)  # OpenAI: most new tokens
    # OpenAI: functions that the model may call; tools that a server would run are refused
    tools: Annotated[list[dict[str, object]] | None, FailFast(), forms.of(forms.ToolForms)] = None
    tool_choice: Annotated[object, forms.of(forms.ToolChoiceForms)] = None  # OpenAI: as in a chat, flat
    parallel_tool_calls: bool | None = None  # OpenAI: `false`: an answer ends with its first call
    text: TextOptions | None = None  # OpenAI: described below
    reasoning: ReasoningOptions | None = None  # OpenAI: described below
    # OpenAI: `auto`: the oldest turns are omitted from a conversation that is too long
    truncation: Literal["auto", "disabled"] | None = None
    store: bool | None = None  # OpenAI: `false`: the response is not kept; default: it is
    include: list[str] | None = None  # OpenAI: `message.output_text.logprobs`; others have no effect
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)  # OpenAI: up to 20; needs its `include`
    metadata: Annotated[dict[str, str] | None, BeforeValidator(_few)] = None  # OpenAI: up to 16; returned as sent
    # vLLM: variables of the chat template; those that it does not use have no effect
    chat_template_kwargs: dict[str, object] | None = None


def count_input(store: ResponseStore, engine: Engine, sent: Fields, caller: Caller) -> InputTokens:
    """A body of `/v1/responses/input_tokens`: how many tokens its response would count as input. Raises `ApiError`,
    `BadRequest`, and `PromptTooLong` for more than the context."""
    request = parse_response(store, engine, {**sent, "store": False}, caller).request
    assert isinstance(request, ChatRequest)
    return InputTokens(prompt_tokens(engine, request, caller))


def parse_response(store: ResponseStore, engine: Engine, sent: Fields, caller: Caller) -> Generation:
    """A body of `/v1/responses`. Raises `ApiError` and `BadRequest`."""
    body, given = checked(ResponsesBody, sent, NEUTRAL, NO_EFFECT)
    if (n := given.get("n", 1)) != 1:
        raise unsupported("n", f"n is {shown(n)}; a response has one answer")
    if body.conversation is not None:
        message = "conversation is not supported here; send previous_response_id, or use /v1/chat/completions"
        raise unsupported("conversation", message)
    previous, (turn, places) = body.previous_response_id, messages_of(body.input)
    parent = None if previous is None else store.get(caller.owner, previous, "previous_response_id").turn
    said = [] if parent is None else parent.all_messages()
    history = [] if parent is None else shown_from(said, parent.omitted)  # else it outgrows the context and a body
    check_results(body.input, history)
    messages = [*history, *turn]
    begun = turn[-1] if continues(body.input) else None
    system = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    choice = tool_choice(body.tool_choice)
    given |= most_tokens(given, "max_output_tokens", body.max_output_tokens) | {"logprobs": _logprobs(body)}
    request = ChatRequest(
        messages=[*system, *messages],
        continue_final_message=begun is not None,
        truncate=body.truncation == "auto",
        sampling=given,
        variables=body.chat_template_kwargs,
        effort=body.reasoning.effort if body.reasoning is not None else None,
        tools=[_nested(tool, f"tools[{at}]") for at, tool in enumerate(body.tools or ())],
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        names=NAMES,
        places=[*(Place("instructions") for _ in system), *(Place("previous_response_id") for _ in history), *places],
        **_common(body),
    )
    echo = Echo(
        model=body.model or engine.model.name,
        fields=_echoed(body, given["max_tokens"]),
        store=store if body.store is not False else None,
        owner=caller.owner,
        messages=as_json(turn if begun is None else turn[:-1]) if body.store is not False else b"",
        begun=begun,
        parent=parent,
        first=len(said) - len(history) - len(system),
        logprobs=_logprobs(body) is not None,
        input=kept_items(body.input) if body.store is not False else b"",
    )
    kept = len(echo.messages) + len(echo.input) + json_size(echo.fields)
    return Generation(request, partial(ResponsesWriter, engine, echo), kept)


def _logprobs(body: ResponsesBody) -> int | None:
    """How many log-probabilities are returned of each token, if any."""
    for at, name in enumerate(body.include or ()):
        if name not in INCLUDES and not name.startswith(INCLUDES_OF_TOOLS):
            raise invalid(f"include[{at}]", f"include[{at}] is {printable(repr(name), 60)}, which is not supported")
    if LOGPROBS in (body.include or ()):
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise invalid("top_logprobs", f"top_logprobs needs include to have {LOGPROBS}")
    return None


def _common(body: ResponsesBody) -> dict[str, Any]:
    """As in chats; the constraint may also be `text.format`, in which a schema is not nested."""
    found = common(body)
    other: Constraint | None = found["constraint"]
    given = _text_format(body)
    if given.get("type") == "json_schema":
        constraint = of_named_schema(given, "text.format", ("type", *SCHEMA_KEYS))
    else:
        constraint = of_response_format(given, "text.format")
    if constraint is not None and other is not None:
        raise invalid("text.format", f"text.format and {other.param} both say what the answer has to match; send one")
    return found | {"constraint": constraint or other}


def _text_format(body: ResponsesBody) -> dict[str, object]:
    given = None if body.text is None else body.text.format
    return {"type": "text"} if given is None else given


def _nested(tool: Mapping[str, object], where: str) -> dict[str, Any]:
    """A tool as chats have it."""
    if tool.get("type", "function") != "function":
        shown = printable(repr(tool["type"]), 40)
        raise unsupported(f"{where}.type", f"{where}.type is {shown}, which is not supported; send functions")
    if "function" in tool:
        return dict(tool)
    function = {name: tool[name] for name in ("name", "description", "parameters", "strict") if name in tool}
    return {"type": "function", "function": function}


def _echoed(body: ResponsesBody, most: Any) -> RequestFields:
    tools: Sequence[Mapping[str, object]] = body.tools or ()
    choice: Any = body.tool_choice
    return RequestFields(
        instructions=body.instructions,
        max_output_tokens=most,
        metadata=body.metadata or {},
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning=ResponseReasoning(body.reasoning.effort if body.reasoning is not None else None),
        safety_identifier=body.safety_identifier,
        store=body.store is not False,
        text=ResponseText(_text_format(body)),
        tool_choice="auto" if choice is None else choice,
        tools=[_flat(tool) for tool in tools],
        top_logprobs=body.top_logprobs or 0,
        truncation=body.truncation or "disabled",
        user=body.user,
    )


def _flat(tool: Mapping[str, object]) -> dict[str, Any]:
    """As it was sent, with the fields that are never absent."""
    return {"type": "function", "description": None, "parameters": None, "strict": None, **tool}
