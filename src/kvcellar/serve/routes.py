"""routes: every route of the server, one row each: what handles it, what it is for, which model checks its body, and
what it returns. The routes of the application and the OpenAPI document are made of the same rows.

Tests compare every response that they get with its row: a status, a content type or a field that is not declared fails.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.routing import Route

from kvcellar.engine.control_replies import Removed
from kvcellar.memory.tiers.upkeep import Imported, Verified
from kvcellar.serve.admin.cache import (
    ARCHIVE,
    LISTED,
    MOST_LISTED,
    TIERS,
    CacheContents,
    CacheEntries,
    CacheHandler,
    ClearBody,
    CollectedEntries,
    NoFields,
    RemoveBody,
)
from kvcellar.serve.admin.conversations import (
    ConversationFields,
    ConversationList,
    ConversationsHandler,
    CreateBody,
    DeletedConversation,
    ForkBody,
    RewindBody,
    WholeConversation,
    WholeHandler,
)
from kvcellar.serve.admin.health import HealthHandler, ServerState
from kvcellar.serve.admin.replicas import ClusterContents, ReplicasHandler
from kvcellar.serve.admin.routes import KeysHandler, ReloadedKeys, RequestsHandler
from kvcellar.serve.anthropic.fields import MessagesBody, PromptBody
from kvcellar.serve.anthropic.message_writer import MessageAnswer, MessageEvent, TokenCount
from kvcellar.serve.anthropic.routes import count_tokens, parse_messages
from kvcellar.serve.generation.handler import GenerationHandler
from kvcellar.serve.generation.records import MOST, Records, RequestRecord, RequestSummaries
from kvcellar.serve.metrics.exposition import metrics_handler
from kvcellar.serve.metrics.requests import RequestCounts
from kvcellar.serve.models.model_use import ModelRoute, sent_keep_alive
from kvcellar.serve.ollama import fields as ollama
from kvcellar.serve.ollama import writer as lines
from kvcellar.serve.ollama.details import ShownModel
from kvcellar.serve.ollama.library_routes import BlobHandler, LibraryHandler, ProgressEvent, Succeeded
from kvcellar.serve.ollama.routes import (
    CHAT,
    GENERATE,
    ListedModels,
    LoadedModels,
    OllamaGeneration,
    OllamaHandler,
    Version,
)
from kvcellar.serve.openai import formats
from kvcellar.serve.openai.chat import ChatBody, parse_chat
from kvcellar.serve.openai.completions import CompletionBody, parse_completion
from kvcellar.serve.openai.embeddings import (
    EmbedBody,
    EmbeddingBody,
    EmbeddingHandler,
    Embeddings,
    EmbeddingsBody,
    OllamaEmbeddings,
    OneEmbedding,
    parse_embed,
    parse_embedding,
    parse_embeddings,
)
from kvcellar.serve.openai.models_list import ModelFields, ModelList, ModelsHandler
from kvcellar.serve.openai.tokenizing import (
    DetokenizeBody,
    Detokenized,
    TokenizeBody,
    Tokenized,
    TokenizedContent,
    TokenizerFields,
    detokenize,
    tokenize,
    tokenizer_info,
)
from kvcellar.serve.openapi import DocumentHandler, OpenApiDocument
from kvcellar.serve.operation import BYTES, NDJSON, SSE, Operation, Operations, Parameter, Schema
from kvcellar.serve.responses.fields import ResponsesBody, count_input, parse_response
from kvcellar.serve.responses.response_writer import DeletedResponse, InputTokens, ResponseEvent, ResponseObject
from kvcellar.serve.responses.routes import InputItems, KeptHandler
from kvcellar.serve.shared import Shared

CONVERSATION: Mapping[str, Schema] = {"name": {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"}}
DIGEST: Mapping[str, Schema] = {"digest": {"type": "string", "pattern": "^sha256[:-][0-9a-f]{64}$"}}
MODEL = Parameter(about="The name of a model. Default: the first one.", schema={"type": "string"})
MODELS: Mapping[str, Parameter] = {"model": MODEL}
LIMIT = Parameter(
    about="The most entries.", schema={"type": "integer", "minimum": 1, "maximum": MOST_LISTED, "default": LISTED}
)
TIER = Parameter(about="Where the entries are.", schema={"enum": list(TIERS), "default": TIERS[0]})
NAMESPACE = Parameter(about="Only entries of this namespace.", schema={"type": "string"})
MAY_GENERATE = (404, 409)  # there is no such model or conversation; the conversation was changed meanwhile


class Handlers:
    """Of one server: those that several routes share."""

    def __init__(self, server: Shared, requests: RequestCounts, records: Records, operations: Operations) -> None:
        """`operations`: all that the server has, for its document."""
        self.server = server
        self.models = ModelsHandler(server)
        self.responses = KeptHandler(server)
        self.ollama = OllamaHandler(server)
        self.blobs = BlobHandler(server)
        self.library = LibraryHandler(server, self.blobs.uploads)
        self.conversations = ConversationsHandler(server)
        self.health = HealthHandler(server)
        self.metrics = metrics_handler(server, requests)
        self.document = DocumentHandler(server, operations)
        self.records = RequestsHandler(server, records)
        self.cache = CacheHandler(server)
        self.replicas = ReplicasHandler(server)
        self.keys = KeysHandler(server)


@dataclass(frozen=True, slots=True)
class Endpoint(Operation):
    """`slashes`: the last parameter of the path may have them."""

    handler: Callable[[Handlers], Any]
    slashes: bool = field(default=False, kw_only=True)


of_openai = partial(Endpoint, "OpenAI")
of_anthropic = partial(Endpoint, "Anthropic")
of_ollama = partial(Endpoint, "Ollama")
of_conversations = partial(Endpoint, "Conversations")
of_server = partial(Endpoint, "Server")
of_operator = partial(Endpoint, "Operator")
# A model may have no store, not be there, or not be loaded.
of_cache = partial(of_operator, query=MODELS, errors=(400, 404, 409))
of_conversation = partial(of_conversations, path=CONVERSATION)

OPENAI = {
    ("GET", "/v1/models"): of_openai("List the models.", lambda at: at.models.list, answer=ModelList),
    ("GET", "/v1/models/{name}"): of_openai(
        "One model. A name may have slashes.",
        lambda at: at.models.get,
        slashes=True,
        answer=ModelFields,
        errors=(400, 404),
    ),
    ("POST", "/v1/completions"): of_openai(
        "Continue a text or token ids.",
        lambda at: GenerationHandler(at.server, parse_completion),
        body=CompletionBody,
        answer=formats.TextCompletion,
        streams=SSE,
        event=formats.TextEvent,
        errors=MAY_GENERATE,
    ),
    ("POST", "/v1/chat/completions"): of_openai(
        "The next message of a chat.",
        lambda at: GenerationHandler(at.server, parse_chat),
        body=ChatBody,
        answer=formats.ChatCompletion,
        streams=SSE,
        event=formats.ChatEvent,
        errors=MAY_GENERATE,
    ),
    ("POST", "/v1/responses"): of_openai(
        "A response, which later ones can continue.",
        lambda at: GenerationHandler(at.server, partial(parse_response, at.responses.store)),
        body=ResponsesBody,
        answer=ResponseObject,
        streams=SSE,
        event=ResponseEvent,
        errors=MAY_GENERATE,
    ),
    ("POST", "/v1/responses/input_tokens"): of_openai(
        "How many tokens a response would count as input.",
        lambda at: ModelRoute(at.server, partial(count_input, at.responses.store)),
        body=ResponsesBody,
        answer=InputTokens,
        errors=(404,),
    ),
    ("GET", "/v1/responses/{id}"): of_openai(
        "A response that was kept.",
        lambda at: at.responses.get,
        query={"stream": Parameter(about="Only false: it is sent as a whole.", schema={"const": False})},
        answer=ResponseObject,
        errors=(400, 404),
    ),
    ("DELETE", "/v1/responses/{id}"): of_openai(
        "Delete a response that was kept.", lambda at: at.responses.delete, answer=DeletedResponse, errors=(404,)
    ),
    ("GET", "/v1/responses/{id}/input_items"): of_openai(
        "The items that a response which was kept was asked with.",
        lambda at: at.responses.input_items,
        query={
            "limit": Parameter(
                about="Items of a page; without it 20.", schema={"type": "integer", "minimum": 1, "maximum": 100}
            ),
            "order": Parameter(about="Without it desc: the last one first.", schema={"enum": ["asc", "desc"]}),
            "after": Parameter(about="The id of the last item of the page before.", schema={"type": "string"}),
        },
        answer=InputItems,
        errors=(400, 404),
    ),
    ("POST", "/v1/embeddings"): of_openai(
        "Vectors of texts, for models that say how they pool.",
        lambda at: EmbeddingHandler(at.server, parse_embeddings),
        body=EmbeddingsBody,
        answer=Embeddings,
        errors=(404,),
    ),
    ("POST", "/tokenize"): of_openai(
        "Token ids of a text or a chat.",
        lambda at: ModelRoute(at.server, tokenize),
        body=TokenizeBody,
        answer=Tokenized | TokenizedContent,
        errors=(404,),
    ),
    ("POST", "/detokenize"): of_openai(
        "The text of token ids.",
        lambda at: ModelRoute(at.server, detokenize),
        body=DetokenizeBody,
        answer=Detokenized,
        errors=(404,),
    ),
    ("GET", "/tokenizer_info"): of_openai(
        "What the tokenizer is.",
        lambda at: partial(tokenizer_info, at.server),
        query=MODELS,
        answer=TokenizerFields,
        errors=(400, 404),
    ),
}
ANTHROPIC = {
    ("POST", "/v1/messages"): of_anthropic(
        "The next message of a chat.",
        lambda at: GenerationHandler(at.server, parse_messages),
        body=MessagesBody,
        answer=MessageAnswer,
        streams=SSE,
        event=MessageEvent,
        errors=MAY_GENERATE,
    ),
    ("POST", "/v1/messages/count_tokens"): of_anthropic(
        "How many tokens a chat has.",
        lambda at: ModelRoute(at.server, count_tokens),
        body=PromptBody,
        answer=TokenCount,
        errors=(404,),
    ),
}
OLLAMA = {
    ("GET", "/"): of_ollama(
        "Says that the server runs; for a browser, a page to chat in.",
        lambda at: at.ollama.root,
        media=("text/plain", "text/html"),
    ),
    ("GET", "/api/version"): of_ollama("The version.", lambda at: at.ollama.version, answer=Version),
    ("GET", "/api/tags"): of_ollama("List the models.", lambda at: at.ollama.tags, answer=ListedModels),
    ("GET", "/api/ps"): of_ollama("List loaded models.", lambda at: at.ollama.running, answer=LoadedModels),
    ("POST", "/api/show"): of_ollama(
        "One model.", lambda at: at.ollama.show, body=ollama.ShowBody, answer=ShownModel, errors=(404,)
    ),
    ("POST", "/api/generate"): of_ollama(
        "Answer a prompt, as lines unless stream is false. Without a prompt, load or unload a model.",
        lambda at: OllamaGeneration(at.server, at.ollama, GENERATE),
        body=ollama.GenerateBody,
        answer=lines.GenerateAnswer,
        streams=NDJSON,
        event=lines.GenerateEvent,
        errors=MAY_GENERATE,
    ),
    ("POST", "/api/chat"): of_ollama(
        "The next message of a chat, as lines unless stream is false. Without messages, load or unload a model.",
        lambda at: OllamaGeneration(at.server, at.ollama, CHAT),
        body=ollama.OllamaChatBody,
        answer=lines.ChatLineEnd,
        streams=NDJSON,
        event=lines.ChatLineEvent,
        errors=MAY_GENERATE,
    ),
    ("POST", "/api/embed"): of_ollama(
        "Vectors of texts.",
        lambda at: EmbeddingHandler(at.server, parse_embed, sent_keep_alive),
        body=EmbedBody,
        answer=OllamaEmbeddings,
        errors=(404,),
    ),
    ("POST", "/api/embeddings"): of_ollama(
        "One vector.",
        lambda at: EmbeddingHandler(at.server, parse_embedding, sent_keep_alive),
        body=EmbeddingBody,
        answer=OneEmbedding,
        errors=(404,),
    ),
    ("POST", "/api/create"): of_ollama(
        "Create a model, with lines of progress unless stream is false.",
        lambda at: at.library.create,
        body=ollama.CreateModelBody,
        answer=Succeeded,
        streams=NDJSON,
        event=ProgressEvent,
        errors=(404,),
    ),
    ("POST", "/api/copy"): of_ollama(
        "Give a model a second name.", lambda at: at.library.copy, body=ollama.CopyBody, errors=(404,)
    ),
    ("DELETE", "/api/delete"): of_ollama(
        "Delete a model.", lambda at: at.library.delete, body=ollama.NamedBody, errors=(404,)
    ),
    ("POST", "/api/pull"): of_ollama(
        "Download a model, if the server allows it, with lines of progress unless stream is false.",
        lambda at: at.library.pull,
        body=ollama.PullBody,
        answer=Succeeded,
        streams=NDJSON,
        event=ProgressEvent,
        errors=(404,),
    ),
    ("POST", "/api/push"): of_ollama(
        "Refused: models are not pushed.", lambda at: at.library.push, statuses=(), errors=(400,)
    ),
    ("HEAD", "/api/blobs/{digest}"): of_ollama(
        "Whether a file was uploaded.", lambda at: at.blobs.__call__, path=DIGEST, errors=(400, 404)
    ),
    ("POST", "/api/blobs/{digest}"): of_ollama(
        "Upload a file to create a model from. 201: it was stored; 200: it was there.",
        lambda at: at.blobs.__call__,
        path=DIGEST,
        binary=BYTES,
        statuses=(200, 201),
        errors=(507,),
    ),
}
CONVERSATIONS = {
    ("GET", "/kvcellar/conversations"): of_conversations(
        "List the conversations of the key.", lambda at: at.conversations.index, answer=ConversationList
    ),
    ("POST", "/kvcellar/conversations"): of_conversations(
        "Create a conversation.",
        lambda at: at.conversations.create,
        body=CreateBody,
        statuses=(201,),
        answer=ConversationFields,
        errors=(409,),
    ),
    ("GET", "/kvcellar/conversations/{name}"): of_conversation(
        "A whole conversation.", lambda at: WholeHandler(at.server), answer=WholeConversation, errors=(400, 404, 409)
    ),
    ("DELETE", "/kvcellar/conversations/{name}"): of_conversation(
        "Delete a conversation.", lambda at: at.conversations.delete, answer=DeletedConversation, errors=(400, 404, 409)
    ),
    ("POST", "/kvcellar/conversations/{name}/fork"): of_conversation(
        "Copy a conversation.",
        lambda at: at.conversations.fork,
        body=ForkBody,
        statuses=(201,),
        answer=ConversationFields,
        errors=(404, 409),
    ),
    ("POST", "/kvcellar/conversations/{name}/rewind"): of_conversation(
        "Discard the last turns.",
        lambda at: at.conversations.rewind,
        body=RewindBody,
        answer=ConversationFields,
        errors=(404, 409),
    ),
}
SERVER = {
    ("GET", "/health"): of_server(
        "503 while models are loaded, as llama.cpp's server has it, else as /live. Needs no key.",
        lambda at: at.health.health,
        answer=ServerState,
    ),
    ("GET", "/live"): of_server(
        "200 while no engine has failed. Needs no key.", lambda at: at.health.alive, answer=ServerState
    ),
    ("GET", "/ready"): of_server(
        "200 while requests are served. Needs no key.", lambda at: at.health.ready, answer=ServerState
    ),
    ("GET", "/ping"): of_server("As /live.", lambda at: at.health.alive, answer=ServerState),
    ("POST", "/ping"): of_server("As /live.", lambda at: at.health.alive, answer=ServerState),
    ("GET", "/metrics"): of_server(
        "Metrics for Prometheus. Needs a metrics key or admin key, if there are any.",
        lambda at: at.metrics,
        media=("text/plain", "application/openmetrics-text"),
    ),
    ("GET", "/openapi.json"): of_server("This document.", lambda at: at.document.get, answer=OpenApiDocument),
}
OPERATOR = {
    ("GET", "/admin/requests"): of_operator(
        "The last requests.",
        lambda at: at.records.list,
        query={
            "limit": Parameter(
                about="The most requests.", schema={"type": "integer", "minimum": 1, "maximum": MOST, "default": 20}
            )
        },
        answer=RequestSummaries,
        errors=(400,),
    ),
    ("GET", "/admin/requests/{id}"): of_operator(
        "What a request had of memory, and why it was not more, by its id or that of its response.",
        lambda at: at.records.get,
        answer=RequestRecord,
        errors=(404,),
    ),
    ("GET", "/admin/cluster"): of_operator(
        "The replicas of each model, on a gateway of a cluster.", lambda at: at.replicas.get, answer=ClusterContents
    ),
    ("GET", "/admin/cache"): of_cache(
        "What the cache has, by namespace.", lambda at: at.cache.totals, answer=CacheContents
    ),
    ("GET", "/admin/cache/tree"): of_cache(
        "Entries of a tier.",
        lambda at: at.cache.tree,
        query={"limit": LIMIT, "tier": TIER, "namespace": NAMESPACE, "model": MODEL},
        answer=CacheEntries,
    ),
    ("GET", "/admin/cache/hot"): of_cache(
        "Entries that are used most.",
        lambda at: at.cache.hot,
        query={"limit": LIMIT, "tier": TIER, "model": MODEL},
        answer=CacheEntries,
    ),
    ("POST", "/admin/cache/remove"): of_cache(
        "Remove entries.", lambda at: at.cache.remove, body=RemoveBody, answer=Removed
    ),
    ("POST", "/admin/cache/clear"): of_cache(
        "Remove all entries of the model, or of all models.",
        lambda at: at.cache.clear,
        body=ClearBody,
        answer=Removed,
    ),
    ("POST", "/admin/cache/collect"): of_cache(
        "Delete files of no use.", lambda at: at.cache.collect, body=NoFields, answer=CollectedEntries
    ),
    ("POST", "/admin/cache/verify"): of_cache(
        "Check what is stored.", lambda at: at.cache.verify, body=NoFields, answer=Verified
    ),
    ("POST", "/admin/cache/export"): of_cache(
        "All that is stored, as an archive.", lambda at: at.cache.export, body=NoFields, media=(ARCHIVE,)
    ),
    ("POST", "/admin/cache/import"): of_cache(
        "Store an archive.", lambda at: at.cache.import_from, binary=ARCHIVE, answer=Imported
    ),
    ("POST", "/admin/keys/reload"): of_operator(
        "Read the key files again.", lambda at: at.keys.reload, answer=ReloadedKeys, errors=(409,)
    ),
}
TABLE: Mapping[tuple[str, str], Endpoint] = {**OPENAI, **ANTHROPIC, **OLLAMA, **CONVERSATIONS, **SERVER, **OPERATOR}


def routes(handlers: Handlers, *, operated: bool) -> list[Route]:
    """Those of a server. `operated`: it has an admin key."""
    found: dict[tuple[str, Any], list[str]] = {}
    for (method, path), one in TABLE.items():
        if operated or one.api != "Operator":
            pattern = path.removesuffix("}") + ":path}" if one.slashes else path
            found.setdefault((pattern, one.handler(handlers)), []).append(method)
    return [Route(path, handler, methods=methods) for (path, handler), methods in found.items()]
