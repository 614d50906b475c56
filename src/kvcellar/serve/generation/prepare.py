"""prepare: makes the prompts of a request, and everything that is known before its first token.

Slow, because it renders and tokenizes: it runs in a thread. It raises `ApiError` and `BadRequest`.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from kvcellar.constraint import Constraint
from kvcellar.engine.request_options import RequestReading
from kvcellar.frontend.engine import Engine
from kvcellar.frontend.transcript import Render, chat_prefix, shortened
from kvcellar.memory.prefix.node import common_prefix
from kvcellar.sampling_params import SamplingParams, merged
from kvcellar.serve.admin.conversation_turn import ConversationTurn
from kvcellar.serve.generation.chat_request import ChatRequest, Prepared, Prompts, TextRequest
from kvcellar.serve.generation.field_names import naming_fields
from kvcellar.serve.generation.namespaces import Caller
from kvcellar.serve.http.api_errors import invalid
from kvcellar.text.replies.tools import checked
from kvcellar.text.template import check_continued
from kvcellar.text.turns import packed

MAX_COMPLETIONS = 4096  # prompts times n


def prepare(
    engine: Engine, request: TextRequest | ChatRequest, caller: Caller, turn: ConversationTurn
) -> tuple[Prepared, Prompts]:
    """The request with its prompts; begins `turn` if it continues a conversation."""
    if isinstance(request, ChatRequest) and request.continue_final_message:
        check_continued(request.messages)
    reading = _reading(engine, request) if isinstance(request, ChatRequest) else None
    constraint = request.constraint if reading is None else reading.constraint
    params = _params(engine, request, constraint)
    namespace = caller.namespace(request.salt, request.users)
    if isinstance(request, TextRequest):
        prompts, params = _texts(engine, request, params, turn)
        omitted = 0
    else:
        render = renderer(engine, request, namespace, caller.owner)
        prompts, params, omitted = _chat(engine, request, params, render, turn)
    if len(prompts) * params.n > MAX_COMPLETIONS:
        count = f"{len(prompts)} prompts with n {params.n}"
        message = f"{count} are too many; at most {MAX_COMPLETIONS} completions of one request are allowed"
        raise invalid("n", message)
    lengths, marked = tuple(map(len, prompts)), tuple[int, ...]()
    if isinstance(request, ChatRequest) and request.breakpoints and request.conversation is None:
        closed = replace(request, continue_final_message=False)
        marked = _breakpoints(request, prompts[0], renderer(engine, closed, namespace, caller.owner))
    told = tuple(map(packed, prompts)) if request.returns_prompts else ()
    prepared = Prepared(lengths, params, request.stream, namespace, request.retention, marked, reading, omitted, told)
    return prepared, prompts


def _params(engine: Engine, request: TextRequest | ChatRequest, constraint: Constraint | None) -> SamplingParams:
    given = {name: value for name, value in request.sampling.items() if value is not None}
    if constraint is not None:  # a field of its own: defaults that make answers longer do not count beside it
        given["constraint"] = constraint
    return merged(engine.model.default_sampling, given)


def _texts(
    engine: Engine, request: TextRequest, params: SamplingParams, turn: ConversationTurn
) -> tuple[Prompts, SamplingParams]:
    if request.conversation is not None:
        prompt = turn.begin_text(engine, request.conversation, request.prompts[0], params)
        return [prompt.ids], prompt.params

    def encoded(text: str | list[int]) -> list[int]:
        if not isinstance(text, str):
            return text
        return engine.encode(text, special=request.special, limit=engine.model.context)

    return list(map(encoded, request.prompts)), params


def _chat(
    engine: Engine, request: ChatRequest, params: SamplingParams, render: Render, turn: ConversationTurn
) -> tuple[Prompts, SamplingParams, int]:
    """Also how many messages the prompts omit."""
    if request.conversation is None:
        ids, omitted = _rendered(request, render, engine.model.context)
        return [ids], params, omitted
    if not request.add_generation_prompt:
        message = "add_generation_prompt must not be false with conversation"
        raise invalid("add_generation_prompt", message)
    if request.continue_final_message:
        message = "a turn of a conversation cannot continue a message: send a message of the user"
        raise invalid("conversation", message)
    prompt = turn.begin_chat(engine, request.conversation, request.messages, params, render)
    return [prompt.ids], prompt.params, 0


def _rendered(request: ChatRequest, render: Render, limit: int) -> tuple[list[int], int]:
    """The prompt of a chat, and how many messages it omits."""
    if not request.truncate:
        return render(request.messages, limit=limit), 0
    return shortened(request.messages, 0, limit, render)


def prompt_tokens(engine: Engine, request: ChatRequest, caller: Caller) -> int:
    """How many tokens the prompt of a chat has that continues no conversation, without running it: its replies have the
    tokens that they were generated with. Raises what `prepare` raises about its fields."""
    with naming_fields(request.names, request.places):
        _params(engine, request, request.constraint)
        namespace = caller.namespace(request.salt, request.users)
        return len(chat_tokens(engine, request, namespace=namespace, owner=caller.owner))


def chat_tokens(
    engine: Engine, request: ChatRequest, *, namespace: str, owner: str = "", limit: int | None = None
) -> list[int]:
    """The prompt of a chat that continues no conversation. `limit`: most tokens; None: the context."""
    checked(request.tools)
    if request.continue_final_message:
        check_continued(request.messages)
    return _rendered(request, renderer(engine, request, namespace, owner), limit or engine.model.context)[0]


def _reading(engine: Engine, request: ChatRequest) -> RequestReading:
    """How the answers are read. In one response, calls are read as a whole: one that is cut off is content."""
    return engine.replies.reading(
        choice=request.tool_choice.mode,
        names=request.tool_choice.names,
        parallel=request.parallel_tool_calls and not request.tool_choice.named,
        deltas=request.stream,
        answer=request.constraint,
        tools=_tools(request),
        variables=request.variables,
        effort=request.effort,
        add_generation_prompt=request.add_generation_prompt,
        continued=request.messages[-1] if request.continue_final_message else None,
    )


def _breakpoints(request: ChatRequest, prompt: Sequence[int], render: Render) -> tuple[int, ...]:
    """The positions of a prompt up to which it is what all chats have in common that begin with the messages before a
    breakpoint."""
    found = {common_prefix(prompt, chat_prefix(render, request.messages[:end])) for end in request.breakpoints}
    return tuple(sorted(found))


def renderer(engine: Engine, request: ChatRequest, namespace: str, owner: str) -> Render:
    """A function from messages to the tokens of the prompt. It raises `PromptTooLong` for more than its `limit`."""
    return partial(
        engine.render,
        namespace=namespace,
        owner=owner,
        replay=request.replay,
        tools=_tools(request),
        variables=request.variables,
        effort=request.effort,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
    )


def _tools(request: ChatRequest) -> Sequence[dict[str, Any]] | None:
    """Those in the prompt. A model that must not call tools sees none."""
    return request.tools if request.tools and request.tool_choice.mode != "none" else None
