"""tokenizing: routes that turn text into tokens and back: `/tokenize`, `/detokenize` and `/tokenizer_info`.

vLLM's and llama.cpp's bodies are taken on the same routes: `prompt` or `messages` is vLLM's, `content` llama.cpp's.
What the tokenizer puts around a text is added by default for the former, and not for the latter, as these servers do.
"""

from typing import Annotated, Literal

from msgspec import UNSET, UnsetType
from pydantic import FailFast, Field
from starlette.requests import Request
from starlette.responses import Response

from kvcellar.frontend.engine import Engine
from kvcellar.serve.answers import Answer
from kvcellar.serve.generation import forms
from kvcellar.serve.generation.chat_request import ChatRequest, Effort
from kvcellar.serve.generation.field_names import naming_fields
from kvcellar.serve.generation.messages import MAX_MESSAGES, Message, StrictModel, template_messages
from kvcellar.serve.generation.namespaces import Caller
from kvcellar.serve.generation.prepare import chat_tokens
from kvcellar.serve.http.api_errors import invalid
from kvcellar.serve.http.parsing import Fields, validated
from kvcellar.serve.http.sending import json_response
from kvcellar.serve.openai.chat import continued
from kvcellar.serve.openai.fields import implemented, tool_choice
from kvcellar.serve.shared import Shared


class TokenizeBody(StrictModel):
    model: str | None = None  # vLLM: may be left out; otherwise the name in `/v1/models`
    prompt: str | None = None  # vLLM: the text
    # vLLM: a chat, whose prompt is tokenized
    messages: Annotated[list[Message] | None, FailFast()] = Field(default=None, min_length=1, max_length=MAX_MESSAGES)
    content: str | None = None  # llama.cpp: the text
    add_special_tokens: bool | None = None  # vLLM: with begin- and end-of-text; default: true, of a prompt
    add_generation_prompt: bool | None = None  # vLLM: `false`: without the start of the assistant's turn
    continue_final_message: bool | None = None  # vLLM: `true`: up to the text of the last message, of the assistant
    chat_template_kwargs: dict[str, object] | None = None  # vLLM: variables of the chat template
    # vLLM: functions that the model may call, as in a chat
    tools: Annotated[list[dict[str, object]] | None, FailFast(), forms.of(forms.ToolForms)] = None
    # OpenAI: `none`: the prompt has no tools
    tool_choice: Annotated[object, forms.of(forms.ToolChoiceForms)] = None
    reasoning_effort: Effort | None = None  # OpenAI: as in a chat
    # kvcellar: `true`: earlier replies have the tokens that they were generated with, as in the prompt of a chat
    replay_tokens: bool | None = None
    return_token_strs: bool | None = None  # vLLM: `token_strs` has the entries of the vocabulary
    add_special: bool | None = None  # llama.cpp: with begin- and end-of-text; default: false
    parse_special: Literal[True] | None = None  # llama.cpp: only `true`
    with_pieces: bool | None = None  # llama.cpp: each token is an object with its `id` and `piece`


class DetokenizeBody(StrictModel):
    model: str | None = None  # vLLM: may be left out; otherwise the name in `/v1/models`
    tokens: Annotated[list[int], FailFast()]  # vLLM, llama.cpp: token ids
    with_pieces: bool | None = None  # kvcellar: `pieces` has what each token adds to the text


class Tokenized(Answer):
    """For `prompt` and `messages`, as vLLM."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class TokenPiece(Answer):
    id: int
    piece: str | list[int]  # bytes, where they are no text


class TokenizedContent(Answer):
    """For `content`, as llama.cpp."""

    tokens: list[int] | list[TokenPiece]


class Detokenized(Answer):
    """The text under the names of vLLM and of llama.cpp."""

    prompt: str
    content: str
    # a token that is a part of a character: its bytes
    pieces: list[str | list[int]] | UnsetType = UNSET


class TokenizerFields(Answer):
    model: str
    max_model_len: int
    vocab_size: int
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None


def tokenize(engine: Engine, sent: Fields, caller: Caller) -> Tokenized | TokenizedContent:
    """Raises `ApiError`, `BadRequest`, and `PromptTooLong` for more than twice the context."""
    body = validated(TokenizeBody, implemented(TokenizeBody, sent))
    given = [name for name in ("prompt", "messages", "content") if getattr(body, name) is not None]
    if len(given) != 1:
        raise invalid("prompt", "exactly one of prompt, messages and content is needed")
    for name in _OF_CHATS if body.messages is None else _OF_TEXTS:
        if getattr(body, name):
            raise invalid(name, f"{name} has no effect on {given[0]}; leave it out")
    with naming_fields({"prompt": given[0]}):
        return _tokenized(engine, body, caller, limit=2 * engine.model.context)


_OF_CHATS = ("tools", "continue_final_message", "replay_tokens")  # fields that would change the tokens
_OF_TEXTS = ("add_special_tokens", "add_special")


def _tokenized(engine: Engine, body: TokenizeBody, caller: Caller, *, limit: int) -> Tokenized | TokenizedContent:
    if body.content is not None:
        ids = engine.encode(body.content, special=bool(body.add_special), limit=limit)
        return TokenizedContent([_piece(engine, token) for token in ids] if body.with_pieces else ids)
    if body.prompt is not None:
        ids = engine.encode(body.prompt, special=body.add_special_tokens is not False, limit=limit)
    else:
        namespace = caller.namespace(None, ())  # that of a chat without a salt and names of users
        ids = chat_tokens(engine, _chat(body), namespace=namespace, owner=caller.owner, limit=limit)
    strings = [engine.written(token) for token in ids] if body.return_token_strs else None
    return Tokenized(len(ids), engine.model.context, ids, strings)


def _chat(body: TokenizeBody) -> ChatRequest:
    messages = body.messages or []
    return ChatRequest(
        messages=template_messages(messages),
        tools=body.tools or (),
        tool_choice=tool_choice(body.tool_choice),
        variables=body.chat_template_kwargs,
        effort=body.reasoning_effort,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=continued(messages, body.continue_final_message, body.add_generation_prompt),
        replay=bool(body.replay_tokens),
    )


def _piece(engine: Engine, token: int) -> TokenPiece:
    """As llama.cpp: bytes that are no text are a list."""
    raw = engine.token_bytes(token)
    try:
        return TokenPiece(token, raw.decode())
    except UnicodeDecodeError:
        return TokenPiece(token, list(raw))


def detokenize(engine: Engine, sent: Fields, caller: Caller) -> Detokenized:
    """The text under the names of both servers. Raises `ApiError` and `BadRequest`."""
    body = validated(DetokenizeBody, sent)
    tokens = body.tokens
    with naming_fields({"ids": "tokens"}):
        text = engine.decode(tokens) if tokens else ""
    pieces = [_piece(engine, token).piece for token in tokens] if body.with_pieces else UNSET
    return Detokenized(text, text, pieces)


async def tokenizer_info(server: Shared, request: Request) -> Response:
    """What a client needs to use the tokenizer of a model from afar. The query may have the name of the `model`."""
    name = request.query_params.get("model")
    spec = await server.threads.run("library", lambda: server.host.find(name))
    with await server.drain.run_before(server.host.lease(spec)) as lease:
        model = lease.engine.model
        return json_response(
            TokenizerFields(
                model=model.name,
                max_model_len=model.context,
                vocab_size=model.vocab_size,
                chat_template=model.chat_template,
                bos_token=model.special_tokens.get("bos_token"),
                eos_token=model.special_tokens.get("eos_token"),
                pad_token=model.special_tokens.get("pad_token"),
            )
        )
