"""requests: the schemas of completion and chat requests, and their conversion to prompts and sampling parameters.

Every field of a request is one of these:

* implemented: part of `CompletionBody` or `ChatBody`. Types are strict: `"5"` is not a number, `true` is not 1. `null`
  is the same as leaving a field out.
* without effect (`ignored_fields.NO_EFFECT`): accepted with any value, because it cannot change the response.
* not implemented (`ignored_fields.NEUTRAL`): accepted with values that have no effect, refused with any other.
* unknown: refused, as OpenAI does.

docs/reference/http-fields.md lists all fields; it is generated from the comments here (`origin: what it does`).
Defaults come from the model's generation config. `model` may be left out; otherwise it must name the served model.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Annotated, Literal, TypeVar

from pydantic import BeforeValidator, FailFast, Field

from kvcellar.errors import BadRequest
from kvcellar.retention import MOST_TTL, PRIORITIES, RetentionOptions
from kvcellar.sample.params import MAX_BIASES, MAX_LOGPROBS, SamplingParams, merged
from kvcellar.serve.api_errors import ApiError
from kvcellar.serve.conversation_turn import ConversationTurn
from kvcellar.serve.ignored_fields import NEUTRAL, NO_EFFECT
from kvcellar.serve.json_text import printable
from kvcellar.serve.messages import Message, StrictModel, template_messages
from kvcellar.serve.parsing import unknown_parameter, validated
from kvcellar.serve.protocols import ServedEngine
from kvcellar.serve.retained import options

MAX_PROMPTS = 256
MAX_COMPLETIONS = 4096  # prompts times n
MAX_MESSAGES = 4096
COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens; chat completions have none

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def _not_many(value: object) -> object:
    """Checks the number of keys before pydantic checks every one of them."""
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise ValueError(f"{len(value)} biases; {MAX_BIASES} are allowed")
    return value


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


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
    return_token_ids: bool | None = None  # vLLM: each choice has `token_ids`
    return_recall: bool | None = None  # kvcellar: `usage` has `recall`, what came from memory and why it was not more
    return_tokens_as_token_ids: bool | None = None  # vLLM: `logprobs` write a token as `token_id:N`
    # OpenAI: most new tokens. Default: the model's; else 16 for a completion, and up to the context for a chat
    max_tokens: int | None = None
    min_tokens: int | None = None  # vLLM: end-of-text and stop ids are banned before this many tokens
    temperature: float | None = None  # OpenAI: sampling
    top_k: int | None = None  # vLLM: sampling
    top_p: float | None = None  # OpenAI: sampling
    min_p: float | None = None  # vLLM: sampling
    typical_p: float | None = None  # llama.cpp: sampling
    repetition_penalty: float | None = None  # vLLM: sampling
    presence_penalty: float | None = None  # OpenAI: sampling
    frequency_penalty: float | None = None  # OpenAI: sampling
    # OpenAI: from token id to bias, -100 to 100
    logit_bias: Annotated[dict[str, float] | None, BeforeValidator(_not_many)] = None
    seed: int | None = None  # OpenAI: makes sampling reproducible
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
    n: int | None = None  # OpenAI: number of completions of each prompt; they share its K/V
    stop: Annotated[list[str] | None, FailFast(), BeforeValidator(_as_list)] = None  # OpenAI: a string, or up to 64
    stop_token_ids: Annotated[list[int] | None, FailFast()] = None  # vLLM: the completion ends at any of these tokens
    ignore_eos: bool | None = None  # vLLM: continue past the end of text
    # Ollama: at the end of the context, drop the oldest tokens and continue; needs `max_tokens`
    shift: bool | None = None
    num_keep: int | None = None  # Ollama: with `shift`, first tokens that are never dropped; -1: the prompt
    repeat_last_n: int | None = None  # Ollama: penalties read this many of the last tokens; 0: none, -1: all
    min_length: int | None = None  # transformers: `min_tokens`, counting the prompt too
    no_repeat_ngram_size: int | None = None  # transformers: no n-gram of this size occurs twice
    bad_words_ids: list[list[int]] | None = None  # transformers: sequences of token ids that are banned
    sequence_bias: list[list[object]] | None = None  # transformers: a list of pairs of token ids and a bias
    suppress_tokens: list[int] | None = None  # transformers: token ids that are banned
    begin_suppress_tokens: list[int] | None = None  # transformers: token ids that are banned as first token
    # transformers: a pair of a number of tokens and a factor
    exponential_decay_length_penalty: list[object] | None = None
    top_h: float | None = None  # transformers: sampling
    epsilon_cutoff: float | None = None  # transformers: sampling
    eta_cutoff: float | None = None  # transformers: sampling


class CompletionBody(CommonBody):
    prompt: object  # OpenAI: a string, token ids, or a list of either with up to 256 prompts
    logprobs: int | None = None  # OpenAI: up to 20
    best_of: int | None = None  # OpenAI: accepted if it equals `n`
    add_special_tokens: bool | None = None  # vLLM: `false`: encode the prompt without begin-of-text and end-of-text


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
    # kvcellar: `false`: earlier replies are tokenized again, instead of having the tokens that they were generated with
    replay_tokens: bool | None = None


AnyBody = TypeVar("AnyBody", bound=CommonBody)


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A validated request, without its prompts. Choice i of prompt p has the index p * n + i."""

    prompt_tokens: tuple[int, ...]  # of each prompt
    params: SamplingParams
    stream: bool
    include_usage: bool  # a last chunk with the usage of the request
    continuous_usage: bool  # and in every other chunk the usage of its choice so far
    namespace: str  # of its memory
    retention: RetentionOptions  # without the owner
    recall: bool  # say in `usage` what came from memory
    token_ids: bool  # return the ids beside the text
    tokens_as_ids: bool  # in logprobs, write a token as "token_id:N"


Prompts = list[list[int]]
Naming = Callable[[str | None, Sequence[str | None]], str]  # the namespace of a salt and of names of users
Parsed = tuple[ParsedRequest, Prompts]
Fields = dict[str, object]  # a body
Parser = Callable[[ServedEngine, Fields, Naming, ConversationTurn], Parsed]


def parse_completion(engine: ServedEngine, sent: Fields, naming: Naming, turn: ConversationTurn) -> Parsed:
    """A body of `/v1/completions`; begins `turn` if it continues a conversation. Raises `ApiError` and `BadRequest`.
    Slow: call it in a thread."""
    body = _checked(CompletionBody, sent)
    params = _params(body, engine, {"logprobs": body.logprobs, "max_tokens": body.max_tokens})
    if body.best_of not in (None, params.n):
        message = f"best_of is {body.best_of}, which is not supported; leave it out, or send n, which is {params.n}"
        raise _unsupported("best_of", message)
    if params.max_tokens is None:
        params = replace(params, max_tokens=COMPLETION_TOKENS)
    namespace = _namespace(body, naming)
    if body.conversation is not None:
        prompt = turn.begin_text(engine, body.conversation, one_prompt(body.prompt), params)
        return _parsed(engine, body, prompt.params, [prompt.ids], namespace)
    return _parsed(engine, body, params, _prompts(engine, body.prompt, body.add_special_tokens), namespace)


def parse_chat(engine: ServedEngine, sent: Fields, naming: Naming, turn: ConversationTurn) -> Parsed:
    """A body of `/v1/chat/completions`; begins `turn` if it continues a conversation. Raises `ApiError` and
    `BadRequest`. Slow: call it in a thread."""
    body = _checked(ChatBody, sent)
    if body.top_logprobs is not None and not body.logprobs:
        raise _invalid("top_logprobs", "top_logprobs needs logprobs to be true")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = _params(body, engine, {"logprobs": logprobs, "max_tokens": _max_tokens(body)})
    namespace, messages = _namespace(body, naming), template_messages(body.messages)
    render = partial(
        engine.render,
        variables=body.chat_template_kwargs,
        effort=_effort(body),
        add_generation_prompt=body.add_generation_prompt is not False,
        namespace=namespace,
        replay=body.replay_tokens is not False,
    )
    if body.conversation is None:
        return _parsed(engine, body, params, [render(messages, limit=engine.model.context)], namespace)
    if body.add_generation_prompt is False:
        raise _invalid("add_generation_prompt", "add_generation_prompt must not be false with conversation")
    prompt = turn.begin_chat(engine, body.conversation, messages, params, render)
    return _parsed(engine, body, prompt.params, [prompt.ids], namespace)


def _namespace(body: CommonBody, naming: Naming) -> str:
    return naming(body.cache_salt, (body.user, body.safety_identifier))


def _max_tokens(body: ChatBody) -> int | None:
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise _invalid("max_completion_tokens", "max_completion_tokens and max_tokens differ; send one of them")
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens


def _effort(body: ChatBody) -> Effort | None:
    other = None if body.reasoning is None else body.reasoning.effort
    if None not in (body.reasoning_effort, other) and body.reasoning_effort != other:
        raise _invalid("reasoning", "reasoning_effort and reasoning.effort differ; send one of them")
    return body.reasoning_effort or other


def _checked(kind: type[AnyBody], sent: Fields) -> AnyBody:
    fields = dict(sent)
    for name in (fields.keys() & (NEUTRAL.keys() | NO_EFFECT.keys())) - kind.model_fields.keys():
        value = fields.pop(name)
        if name in NEUTRAL and not any(type(value) is type(same) and value == same for same in NEUTRAL[name]):
            neutral = " or ".join(json.dumps(same) for same in NEUTRAL[name])
            raise _unsupported(name, f"{name} is not supported; leave it out, or send {neutral}")
    for name in fields:
        if name not in kind.model_fields:
            raise unknown_parameter(name)
    body = validated(kind, fields)
    if body.stream_options is not None and not body.stream:
        raise _invalid("stream_options", "stream_options needs stream to be true")
    return body


_CONVERTED = {"logit_bias", "max_tokens", "stop", "stop_token_ids"}  # fields that `_params` converts itself
_SAMPLING = (CommonBody.model_fields.keys() & {field.name for field in fields(SamplingParams)}) - _CONVERTED


def _params(body: CommonBody, engine: ServedEngine, special: dict[str, int | None]) -> SamplingParams:
    given = body.model_dump(include=_SAMPLING) | special
    if body.logit_bias is not None:
        given["logit_bias"] = {_token(key): bias for key, bias in body.logit_bias.items()}
    if body.stop is not None:
        given["stop"] = tuple(body.stop)
    if body.stop_token_ids is not None:
        given["stop_token_ids"] = tuple(body.stop_token_ids)
    return merged(engine.model.default_sampling, {name: value for name, value in given.items() if value is not None})


def _token(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= 10):
        message = f"logit_bias must map token ids to numbers; {printable(repr(key), 40)} is not a token id"
        raise BadRequest(message, "logit_bias")
    return int(key)


def _prompts(engine: ServedEngine, prompt: object, special: bool | None) -> Prompts:
    limit = engine.model.context
    if isinstance(prompt, str) and prompt:
        return [engine.encode(prompt, special=special, limit=limit)]
    if isinstance(prompt, list) and prompt and "" not in prompt:
        if _are_ids(prompt):
            return [prompt]
        if len(prompt) > MAX_PROMPTS:
            message = f"prompt has {len(prompt)} items; at most {MAX_PROMPTS} prompts are allowed in one request"
            raise _invalid("prompt", message)
        if all(isinstance(item, str) for item in prompt):
            return [engine.encode(item, special=special, limit=limit) for item in prompt]
        if all(isinstance(item, list) and item and _are_ids(item) for item in prompt):
            return prompt
    forms = "a string, a list of strings, a list of token ids, or a list of such lists"
    raise _invalid("prompt", f"prompt must be {forms}; none of them empty")


def one_prompt(prompt: object) -> str | list[int]:
    """The text that begins or continues a conversation; empty: what the model wrote last is continued."""
    if isinstance(prompt, str) or (isinstance(prompt, list) and all(type(item) is int for item in prompt)):
        return prompt
    raise _invalid("prompt", "prompt of a conversation must be one string or one list of token ids")


def _are_ids(items: list[object]) -> bool:
    return set(map(type, items)) == {int}


def _parsed(engine: ServedEngine, body: CommonBody, params: SamplingParams, prompts: Prompts, namespace: str) -> Parsed:
    if len(prompts) * params.n > MAX_COMPLETIONS:
        count = f"{len(prompts)} prompts with n {params.n}"
        message = f"{count} are too many; at most {MAX_COMPLETIONS} completions of one request are allowed"
        raise _invalid("n", message)
    include, continuous = _usage_options(body.stream_options)
    parsed = ParsedRequest(
        prompt_tokens=tuple(map(len, prompts)),
        params=params,
        stream=bool(body.stream),
        include_usage=include,
        continuous_usage=continuous,
        namespace=namespace,
        retention=options(
            key=body.prompt_cache_key,
            retention=body.prompt_cache_retention,
            ttl=body.cache_ttl,
            priority=body.cache_priority,
            pin=body.cache_pin,
        ),
        recall=bool(body.return_recall),
        token_ids=bool(body.return_token_ids) or not engine.model.has_text,
        tokens_as_ids=bool(body.return_tokens_as_token_ids) or not engine.model.has_text,
    )
    return parsed, prompts


def _usage_options(options: StreamOptions | None) -> tuple[bool, bool]:
    """Whether to send the usage of the request, and of every chunk. As in vLLM, the second implies the first, unless
    that is explicitly false, which disables both."""
    if options is None:
        return False, False
    continuous = bool(options.continuous_usage_stats)
    include = continuous if options.include_usage is None else options.include_usage
    return include, include and continuous


def _invalid(param: str, message: str) -> ApiError:
    return ApiError(400, message, param, "invalid_value")


def _unsupported(param: str, message: str) -> ApiError:
    return ApiError(400, message, param, "unsupported_parameter")
