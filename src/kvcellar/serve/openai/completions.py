"""completions: the fields of a text completion, and the request that they make."""

from functools import partial
from typing import Annotated

from kvcellar.errors import shown
from kvcellar.frontend.engine import Engine
from kvcellar.serve.generation import forms
from kvcellar.serve.generation.chat_request import TextRequest
from kvcellar.serve.generation.namespaces import Caller
from kvcellar.serve.generation.writer import Generation
from kvcellar.serve.http.parsing import Fields
from kvcellar.serve.openai.fields import (
    CommonBody,
    checked,
    common,
    invalid,
    response_options,
    texts_or_ids,
    unsupported,
)
from kvcellar.serve.openai.formats import TextFormat
from kvcellar.serve.openai.response_writer import Echo, ResponseWriter

MAX_PROMPTS = 256
COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens; chat completions have none


class CompletionBody(CommonBody):
    # OpenAI: a string, token ids, or a list of either with up to 256 prompts
    prompt: Annotated[object, forms.of(forms.Prompts)]
    logprobs: int | None = None  # OpenAI: up to 20
    # OpenAI: the prompt is in front of the text, and its tokens in front of those of `logprobs`; `max_tokens` may be 0
    # then, which scores the prompt only
    echo: bool | None = None
    best_of: int | None = None  # OpenAI: accepted if it equals `n`
    add_special_tokens: bool | None = None  # vLLM: `false`: encode the prompt without begin-of-text and end-of-text


def parse_completion(engine: Engine, sent: Fields, caller: Caller) -> Generation:
    """A body of `/v1/completions`. Raises `ApiError` and `BadRequest`."""
    (body, given), defaults = checked(CompletionBody, sent), engine.model.default_sampling
    n = given.get("n", defaults.n)
    if body.best_of not in (None, n):
        message = f"best_of is {body.best_of}, which is not supported; leave it out, or send n, which is {shown(n)}"
        raise unsupported("best_of", message)
    most = given.get("max_tokens", defaults.max_tokens)
    given |= {"logprobs": body.logprobs, "max_tokens": COMPLETION_TOKENS if most is None else most}
    continued = body.conversation is not None
    if body.echo:
        given["prompt_logprobs"] = _scored(body, score_only=given["max_tokens"] == 0)
    request = TextRequest(
        prompts=[one_prompt(body.prompt)] if continued else texts_or_ids("prompt", body.prompt, MAX_PROMPTS),
        special=body.add_special_tokens,
        sampling=given,
        **common(body),
    )
    echo = Echo(engine, request.prompts) if body.echo else None
    options = response_options(engine, body, caller)
    make = partial(ResponseWriter, engine, options, TextFormat(), echo=echo)
    return Generation(request, make, 0 if echo is None else echo.size)


def _scored(body: CompletionBody, *, score_only: bool) -> int | None:
    """How many of the most likely tokens are wanted at each place of an echoed prompt; None: no log-probabilities."""
    if body.conversation is not None:
        raise invalid("echo", "echo must not be true with conversation, which has its own prompt")
    wanted = [most for most in (body.logprobs, body.prompt_logprobs) if most is not None]
    return max(wanted, default=0 if score_only else None)


def one_prompt(prompt: object) -> str | list[int]:
    """The text that begins or continues a conversation; empty: what the model wrote last is continued."""
    if isinstance(prompt, str) or (isinstance(prompt, list) and all(type(item) is int for item in prompt)):
        return prompt
    raise invalid("prompt", "prompt of a conversation must be one string or one list of token ids")
