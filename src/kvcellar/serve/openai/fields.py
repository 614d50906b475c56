"""fields: what the bodies of completions and of chats have in common.

Every field of a request is one of these:

* implemented: part of `CompletionBody` or `ChatBody`, or a sampling parameter. Types are strict: `"5"` is not a number,
  `true` is not 1. `null` is the same as leaving a field out.
* without effect (`ignored_fields.NO_EFFECT`): accepted with any value, because it cannot change the response.
* not implemented (`ignored_fields.NEUTRAL`): accepted with values that have no effect, refused with any other.
* unknown: refused, as OpenAI does.

docs/reference/http-fields.md lists all fields; it is generated from the comments here (`origin: what it does`).
Defaults come from the model's generation config. `model` may be left out; otherwise it must name the served model.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import Field

from kvcellar.frontend.engine import Engine
from kvcellar.memory.retention import MOST_TTL, PRIORITIES, RetentionOptions
from kvcellar.sampling_params import PARAMETERS, Parameter, sampling_of
from kvcellar.serve.generation import forms
from kvcellar.serve.generation.chat_request import AUTO, Mode, ToolChoice
from kvcellar.serve.generation.ignored_fields import NEUTRAL, NO_EFFECT
from kvcellar.serve.generation.messages import StrictModel
from kvcellar.serve.generation.namespaces import Caller
from kvcellar.serve.generation.structured_fields import constraint_of
from kvcellar.serve.http.api_errors import invalid, unsupported
from kvcellar.serve.http.json_text import printable
from kvcellar.serve.http.parsing import Fields, unknown_parameter, validated
from kvcellar.text.replies.tools import MOST_TOOLS

FORMS = '"none", "auto", "required", the name of a function, or allowed_tools'  # of `tool_choice`
LONG = 86400.0  # seconds of "24h"
# Sampling parameters that are fields of the same name.
SAMPLING: Mapping[str, Parameter] = {name: one for name, one in PARAMETERS.items() if one.http is not None}


class StreamOptions(StrictModel):
    include_usage: bool | None = None  # OpenAI: a last chunk with the usage of the request and empty `choices`
    # vLLM: every chunk has the usage of its choice so far; implies `include_usage` unless that is `false`, which
    # disables both
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None  # OpenAI: only `false`; chunks are never padded


class CommonBody(StrictModel):
    model: str | None = None  # OpenAI: may be left out; otherwise the name in `/v1/models`, like `owner/name` or `gpt2`
    stream: bool | None = None  # OpenAI: server-sent events
    stream_options: StreamOptions | None = None  # OpenAI: described below; needs `stream`
    # vLLM: each choice, or chunk of one, has `token_ids`, and there are `prompt_token_ids`
    return_token_ids: bool | None = None
    # kvcellar: each choice, or chunk of one, has `token_ms`: of each of its tokens the milliseconds since its first one
    return_token_times: bool | None = None
    return_recall: bool | None = None  # kvcellar: `usage` has `recall`, what came from memory and why it was not more
    return_tokens_as_token_ids: bool | None = None  # vLLM: `logprobs` write a token as `token_id:N`
    # vLLM: log-probabilities of the prompt's tokens and of this many of the most likely in their place, up to 20; not
    # in a stream. See [scoring](../howto/score-text.md)
    prompt_logprobs: int | None = None
    # kvcellar: name of a [conversation](../howto/conversations.md) that the request continues, and its completion too
    conversation: str | None = None
    cache_salt: str | None = None  # vLLM: the request shares memory only with those of the same salt
    user: str | None = None  # OpenAI: the request shares memory only with those of the same user
    safety_identifier: str | None = None  # OpenAI: new name of `user`
    # OpenAI: announces more requests with the same beginning: what this one computes is worth as much to eviction as
    # what was used again; it separates no memory
    prompt_cache_key: str | None = None
    # OpenAI: `in_memory`: what the request computes is never written to the store; `24h`: as `cache_ttl` of 24 hours
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    # kvcellar: seconds after the last use until what the request uses and computes is deleted; default: no limit
    cache_ttl: float | None = Field(default=None, gt=0, le=MOST_TTL)
    # kvcellar: -8 to 8: each level doubles what it is worth to eviction; above 0 only if the server allows it
    cache_priority: int | None = Field(default=None, ge=PRIORITIES[0], le=PRIORITIES[-1])
    cache_pin: bool | None = None  # kvcellar: the prompt is not evicted; only if the server allows it
    # OpenAI: `text`, `json_object`, or a schema: see [structured output](../howto/structured-output.md)
    response_format: Annotated[dict[str, object] | None, forms.of(forms.ResponseFormats)] = None
    # vLLM: one of `json`, `json_object`, `regex`, `choice`, `grammar`: what the answer has to match
    structured_outputs: Annotated[dict[str, object] | None, forms.of(forms.StructuredOutputsForm | None)] = None
    grammar: str | None = None  # llama.cpp: a grammar that the answer has to match, in GBNF or in Lark's notation
    json_schema: dict[str, object] | None = None  # llama.cpp: a schema of JSON that the answer has to be


AnyBody = TypeVar("AnyBody", bound=CommonBody)


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """What a client wants of its response."""

    model: str  # its name, as the client has sent it
    include_usage: bool  # a last chunk with the usage of the request
    continuous_usage: bool  # and in every other chunk the usage of its choice so far
    recall: bool  # say in `usage` what came from memory
    recall_texts: bool  # with what may be the text of other requests of the namespace
    token_ids: bool  # return the ids beside the text
    token_times: bool  # and when there was each
    tokens_as_ids: bool  # in logprobs, write a token as "token_id:N"
    prompt_logprobs: int | None = None  # return those of the prompt, as vLLM does


def implemented(
    kind: type[StrictModel],
    sent: Fields,
    neutral: Mapping[str, tuple[object, ...]] = NEUTRAL,
    no_effect: Mapping[str, str] = NO_EFFECT,
) -> Fields:
    """The fields that a body has; others may have the values of `neutral`, or any if in `no_effect`. Raises `ApiError`
    for the rest."""
    fields = dict(sent)
    for name in (fields.keys() & (neutral.keys() | no_effect.keys())) - kind.model_fields.keys():
        value = fields.pop(name)
        if name in neutral and not any(type(value) is type(same) and value == same for same in neutral[name]):
            values = " or ".join(json.dumps(same) for same in neutral[name])
            raise unsupported(name, f"{name} is not supported; leave it out, or send {values}")
    for name in fields:
        if name not in kind.model_fields:
            raise unknown_parameter(name)
    return fields


def checked(
    kind: type[AnyBody],
    sent: Fields,
    neutral: Mapping[str, tuple[object, ...]] = NEUTRAL,
    no_effect: Mapping[str, str] = NO_EFFECT,
) -> tuple[AnyBody, dict[str, Any]]:
    """The body, and beside it the sampling parameters that are set, whose values are checked when all are known. Raises
    `ApiError` for fields that are not `implemented`, and for values that are not valid."""
    others = {name: value for name, value in sent.items() if name not in SAMPLING}
    body = validated(kind, implemented(kind, others, neutral, no_effect))
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "stream_options needs stream to be true")
    if body.prompt_logprobs is not None and body.stream:
        raise invalid("prompt_logprobs", "prompt_logprobs needs stream to be false; echo has them in a stream")
    given = sampling_of(SAMPLING, sent)
    if body.prompt_logprobs is not None:
        given["prompt_logprobs"] = body.prompt_logprobs
    return body, given


def most_tokens(given: Mapping[str, Any], name: str, value: int | None) -> dict[str, Any]:
    """`max_tokens`, which a body may also have under the newer `name`, as a sampling parameter. Raises `ApiError`."""
    old = given.get("max_tokens")
    if None not in (old, value) and old != value:
        raise invalid(name, f"{name} and max_tokens differ; send one of them")
    return {"max_tokens": old if value is None else value}


def common(body: CommonBody) -> dict[str, Any]:
    """The other fields of `GenerationRequest`."""
    return {
        "stream": bool(body.stream),
        "salt": body.cache_salt,
        "users": (body.user, body.safety_identifier),
        "conversation": body.conversation,
        "returns_prompts": bool(body.return_token_ids),
        "constraint": constraint_of(body.response_format, body.structured_outputs, body.grammar, body.json_schema),
        "retention": _retention(body),
    }


def _retention(body: CommonBody) -> RetentionOptions:
    ttl = body.cache_ttl
    if body.prompt_cache_retention == "24h":
        if ttl not in (None, LONG):
            raise invalid("cache_ttl", "cache_ttl and prompt_cache_retention differ; send one of them")
        ttl = LONG
    return RetentionOptions(
        stored=body.prompt_cache_retention != "in_memory",
        recurring=bool(body.prompt_cache_key),
        priority=body.cache_priority or 0,
        ttl=ttl,
        pinned=bool(body.cache_pin),
    )


def response_options(engine: Engine, body: CommonBody, caller: Caller) -> ResponseOptions:
    include, continuous = _usage_options(body.stream_options)
    return ResponseOptions(
        model=body.model or engine.model.name,
        include_usage=include,
        continuous_usage=continuous,
        recall=bool(body.return_recall),
        recall_texts=caller.sees_texts,
        token_ids=bool(body.return_token_ids) or not engine.model.has_text,
        token_times=bool(body.return_token_times),
        tokens_as_ids=bool(body.return_tokens_as_token_ids) or not engine.model.has_text,
        prompt_logprobs=body.prompt_logprobs,
    )


def _usage_options(options: StreamOptions | None) -> tuple[bool, bool]:
    """Whether to send the usage of the request, and of every chunk. As in vLLM, the second implies the first, unless
    that is explicitly false, which disables both."""
    if options is None:
        return False, False
    continuous = bool(options.continuous_usage_stats)
    include = continuous if options.include_usage is None else options.include_usage
    return include, include and continuous


def texts_or_ids(name: str, value: object, most: int, *, empty: bool = False) -> list[Any]:
    """The texts or lists of token ids in a field that has one of them, or up to `most`. `empty`: texts may be. Raises
    `ApiError`."""
    found = [value] if isinstance(value, str) or _are_ids(value) else value
    if isinstance(found, list) and len(found) > most:
        raise invalid(name, f"{name} has {len(found)} items; at most {most} are allowed in one request")
    texts = isinstance(found, list) and all(isinstance(one, str) and (one or empty) for one in found)
    if not isinstance(found, list) or not found or not (texts or all(map(_are_ids, found))):
        forms = "a string, a list of strings, a list of token ids, or a list of such lists"
        raise invalid(name, f"{name} must be {forms}; none of them empty")
    return found


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int}


def tool_choice(value: object) -> ToolChoice:
    """`tool_choice` of a request, as OpenAI's chat API has it, or flat as in its Responses. Raises `ApiError`."""
    match value:
        case None:
            return AUTO
        case "none" | "auto" | "required":
            return ToolChoice(cast("Mode", value))
        case {"type": "function"}:
            return ToolChoice("required", (_name(value, "tool_choice"),))
        case {"type": "allowed_tools"}:
            return _allowed(cast("Mapping[str, Any]", value))
        case _:
            raise invalid("tool_choice", f"tool_choice must be {FORMS}")


def _allowed(value: Mapping[str, Any]) -> ToolChoice:
    given: object = value.get("allowed_tools", value)
    where = "tool_choice.allowed_tools" if "allowed_tools" in value else "tool_choice"
    if not isinstance(given, Mapping):
        raise invalid(where, f"{where} must be an object with mode and tools")
    allowed = cast("Mapping[str, Any]", given)
    tools: object = allowed.get("tools")
    if not isinstance(tools, list) or not tools:
        raise invalid(f"{where}.tools", f"{where}.tools must be a list of functions that is not empty")
    if len(cast("Sequence[object]", tools)) > MOST_TOOLS:
        raise invalid(f"{where}.tools", f"{where}.tools may have {MOST_TOOLS} functions")
    names = tuple(_name(tool, f"{where}.tools[{at}]") for at, tool in enumerate(cast("Sequence[object]", tools)))
    match allowed.get("mode", "auto"):
        case "auto" | "required" as mode:
            return ToolChoice(cast("Mode", mode), names)
        case _:
            raise invalid(f"{where}.mode", f'{where}.mode must be "auto" or "required"')


def _name(value: object, where: str) -> str:
    """The name in `{"type": "function", "function": {"name"}}`, or flat in `{"type": "function", "name"}`."""
    match value:
        case {"type": str(kind)} if kind != "function":
            raise invalid(f"{where}.type", f'{where}.type must be "function", not {printable(repr(kind), 40)}')
        case {"function": {"name": str(name)}} | {"name": str(name)}:
            return name
        case _:
            raise invalid(where, f"{where} must have the name of a function")
