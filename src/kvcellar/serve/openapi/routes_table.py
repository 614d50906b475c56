"""routes_table: what every route is for, which model checks its body, and what it returns: one row for each route.

A test compares the table with the routes of a server, so a route without a row, or a row without a route, fails.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from pydantic import BaseModel

from kvcellar.serve import ollama_fields as ollama
from kvcellar.serve.admin_cache import RemoveBody
from kvcellar.serve.anthropic.fields import MessagesBody, PromptBody
from kvcellar.serve.conversations import CreateBody, ForkBody, RewindBody
from kvcellar.serve.embedding_fields import EmbedBody, EmbeddingBody, EmbeddingsBody
from kvcellar.serve.openai.chat import ChatBody
from kvcellar.serve.openai.completions import CompletionBody
from kvcellar.serve.responses_api.fields import ResponsesBody
from kvcellar.serve.tokenizing import DetokenizeBody, TokenizeBody

Api = Literal["OpenAI", "Anthropic", "Ollama", "Conversations", "Server", "Operator"]
Schema = dict[str, Any]

ABOUT: Mapping[Api, str] = MappingProxyType(  # of each API, with its rule for fields that it does not know
    {
        "OpenAI": "OpenAI's API. A field that is not in a schema is refused with 400 and its name, except those that "
        "cannot change an answer, which have a description that says so.",
        "Anthropic": "Anthropic's API. Unknown fields are ignored: its clients send new ones with a beta header.",
        "Ollama": "Ollama's API for models. Unknown fields and unknown options are ignored.",
        "Conversations": "Named conversations. An unknown field is refused with 400 and its name.",
        "Server": "The state of the server.",
        "Operator": "For operators: they need an admin key. An unknown field is refused with 400 and its name.",
    }
)


def _object(*required: str, **properties: Schema) -> Schema:
    """An object that has these properties, and perhaps others."""
    return {"type": "object", "required": list(required or properties), "properties": properties}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _const(value: str) -> Schema:
    return {"const": value}


TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
ANY: Schema = {"type": "object"}
USAGE = _object(
    prompt_tokens=WHOLE,
    completion_tokens=WHOLE,
    total_tokens=WHOLE,
    prompt_tokens_details=_object(cached_tokens=WHOLE),
)
CHOICE = _object(index=WHOLE, finish_reason={"enum": ["stop", "length", "tool_calls", None]})
COMPLETION = _object(
    id=TEXT, object=_const("text_completion"), created=WHOLE, model=TEXT, choices=_list(CHOICE), usage=USAGE
)
CHAT = _object(id=TEXT, object=_const("chat.completion"), created=WHOLE, model=TEXT, choices=_list(CHOICE), usage=USAGE)
MODEL = _object(id=TEXT, object=_const("model"), created=WHOLE, owned_by=TEXT)
STATE = _object("status", status=TEXT, model=TEXT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one route."""

    api: Api
    about: str
    body: type[BaseModel] | None = None  # the model that checks the body
    binary: str | None = None  # media type of a body that is no JSON
    answer: Schema | None = None  # of a successful response; None: it has no JSON
    media: str | None = None  # media type of a successful response that is no JSON
    streams: str | None = None  # media type of the response if `stream` is set


SSE, LINES = "text/event-stream", "application/x-ndjson"
TABLE: Mapping[tuple[str, str], Operation] = MappingProxyType(
    {
        ("GET", "/v1/models"): Operation(
            api="OpenAI", about="List the models.", answer=_object(object=_const("list"), data=_list(MODEL))
        ),
        ("GET", "/v1/models/{name}"): Operation(
            api="OpenAI", about="One model. A name may have slashes.", answer=MODEL
        ),
        ("POST", "/v1/completions"): Operation(
            api="OpenAI", about="Continue a text or token ids.", body=CompletionBody, answer=COMPLETION, streams=SSE
        ),
        ("POST", "/v1/chat/completions"): Operation(
            api="OpenAI", about="The next message of a chat.", body=ChatBody, answer=CHAT, streams=SSE
        ),
        ("POST", "/v1/responses"): Operation(
            api="OpenAI",
            about="A response, which later ones can continue.",
            body=ResponsesBody,
            answer=_object(id=TEXT, object=_const("response"), status=TEXT, output=_list(ANY)),
            streams=SSE,
        ),
        ("GET", "/v1/responses/{id}"): Operation(
            api="OpenAI", about="A response that was kept.", answer=_object(id=TEXT, object=_const("response"))
        ),
        ("DELETE", "/v1/responses/{id}"): Operation(
            api="OpenAI", about="Delete a response that was kept.", answer=_object(id=TEXT, deleted={"const": True})
        ),
        ("POST", "/v1/embeddings"): Operation(
            api="OpenAI",
            about="Vectors of texts, for models that say how they pool.",
            body=EmbeddingsBody,
            answer=_object(object=_const("list"), data=_list(ANY), model=TEXT, usage=ANY),
        ),
        ("POST", "/tokenize"): Operation(
            api="OpenAI", about="Token ids of a text or a chat.", body=TokenizeBody, answer=_object(tokens=_list({}))
        ),
        ("POST", "/detokenize"): Operation(
            api="OpenAI", about="The text of token ids.", body=DetokenizeBody, answer=_object(prompt=TEXT, content=TEXT)
        ),
        ("GET", "/tokenizer_info"): Operation(api="OpenAI", about="What the tokenizer is.", answer=ANY),
        ("POST", "/api/embed"): Operation(api="Ollama", about="Vectors of texts.", body=EmbedBody, answer=ANY),
        ("POST", "/api/embeddings"): Operation(api="Ollama", about="One vector.", body=EmbeddingBody, answer=ANY),
        ("POST", "/v1/messages"): Operation(
            api="Anthropic",
            about="The next message of a chat.",
            body=MessagesBody,
            answer=_object(id=TEXT, type=_const("message"), role=_const("assistant"), content=_list(ANY), usage=ANY),
            streams=SSE,
        ),
        ("POST", "/v1/messages/count_tokens"): Operation(
            api="Anthropic",
            about="How many tokens a chat has.",
            body=PromptBody,
            answer=_object(input_tokens=WHOLE),
        ),
        ("GET", "/"): Operation(api="Ollama", about="Says that the server runs.", media="text/plain"),
        ("GET", "/api/version"): Operation(api="Ollama", about="The version.", answer=_object(version=TEXT)),
        ("GET", "/api/tags"): Operation(api="Ollama", about="List the models.", answer=_object(models=_list(ANY))),
        ("GET", "/api/ps"): Operation(api="Ollama", about="List loaded models.", answer=_object(models=_list(ANY))),
        ("POST", "/api/show"): Operation(api="Ollama", about="One model.", body=ollama.ShowBody, answer=ANY),
        ("POST", "/api/generate"): Operation(
            api="Ollama", about="Load or unload a model.", body=ollama.GenerateBody, answer=ANY
        ),
        ("POST", "/api/chat"): Operation(
            api="Ollama", about="Load or unload a model.", body=ollama.GenerateBody, answer=ANY
        ),
        ("POST", "/api/create"): Operation(
            api="Ollama", about="Create a model.", body=ollama.CreateBody, answer=ANY, streams=LINES
        ),
        ("POST", "/api/copy"): Operation(api="Ollama", about="Give a model a second name.", body=ollama.CopyBody),
        ("DELETE", "/api/delete"): Operation(api="Ollama", about="Delete a model.", body=ollama.NamedBody),
        ("POST", "/api/pull"): Operation(
            api="Ollama",
            about="Download a model, if the server allows it.",
            body=ollama.PullBody,
            answer=ANY,
            streams=LINES,
        ),
        ("POST", "/api/push"): Operation(api="Ollama", about="Refused: models are not pushed.", answer=ANY),
        ("HEAD", "/api/blobs/{digest}"): Operation(api="Ollama", about="Whether a file was uploaded."),
        ("POST", "/api/blobs/{digest}"): Operation(
            api="Ollama", about="Upload a file to create a model from.", binary="application/octet-stream"
        ),
        ("GET", "/kvcellar/conversations"): Operation(
            api="Conversations", about="List the conversations of the key.", answer=ANY
        ),
        ("POST", "/kvcellar/conversations"): Operation(
            api="Conversations", about="Create a conversation.", body=CreateBody, answer=ANY
        ),
        ("GET", "/kvcellar/conversations/{name}"): Operation(
            api="Conversations", about="A whole conversation.", answer=ANY
        ),
        ("DELETE", "/kvcellar/conversations/{name}"): Operation(
            api="Conversations", about="Delete a conversation.", answer=ANY
        ),
        ("POST", "/kvcellar/conversations/{name}/fork"): Operation(
            api="Conversations", about="Copy a conversation.", body=ForkBody, answer=ANY
        ),
        ("POST", "/kvcellar/conversations/{name}/rewind"): Operation(
            api="Conversations", about="Discard the last turns.", body=RewindBody, answer=ANY
        ),
        ("GET", "/health"): Operation(
            api="Server", about="200 while no engine has failed. Needs no key.", answer=STATE
        ),
        ("GET", "/ready"): Operation(api="Server", about="200 while requests are served. Needs no key.", answer=STATE),
        ("GET", "/ping"): Operation(api="Server", about="As /health.", answer=STATE),
        ("POST", "/ping"): Operation(api="Server", about="As /health.", answer=STATE),
        ("GET", "/metrics"): Operation(
            api="Server",
            about="Metrics for Prometheus. Needs a metrics key or admin key, if there are any.",
            media="text/plain",
        ),
        ("GET", "/openapi.json"): Operation(
            api="Server", about="This document.", answer=_object(openapi=TEXT, paths=ANY)
        ),
        ("GET", "/admin/requests"): Operation(
            api="Operator", about="The last requests.", answer=_object(requests=_list(ANY))
        ),
        ("GET", "/admin/requests/{id}"): Operation(
            api="Operator", about="What a request had of memory, and why it was not more.", answer=ANY
        ),
        ("GET", "/admin/cache"): Operation(api="Operator", about="What the cache has, by namespace.", answer=ANY),
        ("GET", "/admin/cache/tree"): Operation(api="Operator", about="Entries of a tier.", answer=ANY),
        ("GET", "/admin/cache/hot"): Operation(api="Operator", about="Entries that are used most.", answer=ANY),
        ("POST", "/admin/cache/remove"): Operation(
            api="Operator", about="Remove entries.", body=RemoveBody, answer=ANY
        ),
        ("POST", "/admin/cache/clear"): Operation(api="Operator", about="Remove all entries.", answer=ANY),
        ("POST", "/admin/cache/collect"): Operation(api="Operator", about="Delete files of no use.", answer=ANY),
        ("POST", "/admin/cache/verify"): Operation(api="Operator", about="Check what is stored.", answer=ANY),
        ("POST", "/admin/cache/export"): Operation(
            api="Operator", about="All that is stored, as an archive.", media="application/octet-stream"
        ),
        ("POST", "/admin/cache/import"): Operation(
            api="Operator", about="Store an archive.", binary="application/octet-stream", answer=ANY
        ),
        ("POST", "/admin/keys/reload"): Operation(
            api="Operator", about="Read the key files again.", answer=_object(keys=ANY)
        ),
    }
)
