"""routes_table: what every route is for, which model checks its body, and what it returns: one row for each route.

A test compares the table with the routes of a server, so a route without a row, or a row without a route, fails. Tests
also compare every response that they get with its row: a status, a content type or a field that is not declared fails.
"""

from collections.abc import Mapping
from types import MappingProxyType

from kvcellar.serve import ollama_fields as ollama
from kvcellar.serve.admin_cache import ARCHIVE, LISTED, MOST_LISTED, TIERS, ClearBody, NoFields, RemoveBody
from kvcellar.serve.anthropic.fields import MessagesBody, PromptBody
from kvcellar.serve.conversations import CreateBody, ForkBody, RewindBody
from kvcellar.serve.embedding_fields import EmbedBody, EmbeddingBody, EmbeddingsBody
from kvcellar.serve.openai.chat import ChatBody
from kvcellar.serve.openai.completions import CompletionBody
from kvcellar.serve.openapi import answers_anthropic as messages
from kvcellar.serve.openapi import answers_ollama as lines
from kvcellar.serve.openapi import answers_openai as openai
from kvcellar.serve.openapi import answers_own as own
from kvcellar.serve.openapi import answers_responses as responses
from kvcellar.serve.openapi.answers_shared import ModelFields, ModelList
from kvcellar.serve.operation import BYTES, NDJSON, SSE, Api, Operation, Parameter, Schema
from kvcellar.serve.records import MOST
from kvcellar.serve.responses_api.fields import ResponsesBody
from kvcellar.serve.tokenizing import DetokenizeBody, TokenizeBody

ABOUT: Mapping[Api, str] = MappingProxyType(  # of each API, with its rule for fields that it does not know
    {
        "OpenAI": "OpenAI's API. A field that is not in a schema is refused with 400 and its name, except those that "
        "cannot change an answer, which have a description that says so.",
        "Anthropic": "Anthropic's API. Unknown fields are ignored: its clients send new ones with a beta header.",
        "Ollama": "Ollama's API for models. Unknown fields and unknown options are ignored.",
        "Conversations": "Named conversations. An unknown field is refused with 400 and its name.",
        "Server": "The state of the server.",
        "Operator": "For operators: they need an admin key. An unknown field is refused with 400 and its name.",
        "Inspector": "What the inspector shows. An API key sees its own requests only.",
    }
)
CONVERSATION: Mapping[str, Schema] = MappingProxyType(
    {"name": {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"}}
)
DIGEST: Mapping[str, Schema] = MappingProxyType({"digest": {"type": "string", "pattern": "^sha256[:-][0-9a-f]{64}$"}})
MODEL = Parameter(about="The name of a model. Default: the first one.", schema={"type": "string"})
MODELS: Mapping[str, Parameter] = MappingProxyType({"model": MODEL})
LIMIT = Parameter(
    about="The most entries.", schema={"type": "integer", "minimum": 1, "maximum": MOST_LISTED, "default": LISTED}
)
TIER = Parameter(about="Where the entries are.", schema={"enum": list(TIERS), "default": TIERS[0]})
NAMESPACE = Parameter(about="Only entries of this namespace.", schema={"type": "string"})
MAY_GENERATE = (404, 409)  # there is no such model or conversation; the conversation was changed meanwhile
OF_CACHE = (400, 404, 409)  # of a model that has no store, that there is not, that is not loaded

OPENAI = {
    ("GET", "/v1/models"): Operation(api="OpenAI", about="List the models.", answer=ModelList),
    ("GET", "/v1/models/{name}"): Operation(
        api="OpenAI", about="One model. A name may have slashes.", answer=ModelFields, errors=(400, 404)
    ),
    ("POST", "/v1/completions"): Operation(
        api="OpenAI",
        about="Continue a text or token ids.",
        body=CompletionBody,
        answer=openai.TextCompletion,
        streams=SSE,
        event=openai.TextEvent,
        errors=MAY_GENERATE,
    ),
    ("POST", "/v1/chat/completions"): Operation(
        api="OpenAI",
        about="The next message of a chat.",
        body=ChatBody,
        answer=openai.ChatCompletion,
        streams=SSE,
        event=openai.ChatEvent,
        errors=MAY_GENERATE,
    ),
    ("POST", "/v1/responses"): Operation(
        api="OpenAI",
        about="A response, which later ones can continue.",
        body=ResponsesBody,
        answer=responses.ResponseObject,
        streams=SSE,
        event=responses.ResponseEvent,
        errors=MAY_GENERATE,
    ),
    ("POST", "/v1/responses/input_tokens"): Operation(
        api="OpenAI",
        about="How many tokens a response would count as input.",
        body=ResponsesBody,
        answer=responses.InputTokens,
        errors=(404,),
    ),
    ("GET", "/v1/responses/{id}"): Operation(
        api="OpenAI",
        about="A response that was kept.",
        query={"stream": Parameter(about="Only false: it is sent as a whole.", schema={"const": False})},
        answer=responses.ResponseObject,
        errors=(400, 404),
    ),
    ("DELETE", "/v1/responses/{id}"): Operation(
        api="OpenAI", about="Delete a response that was kept.", answer=responses.DeletedResponse, errors=(404,)
    ),
    ("GET", "/v1/responses/{id}/input_items"): Operation(
        api="OpenAI",
        about="The items that a response which was kept was asked with.",
        query={
            "limit": Parameter(
                about="Items of a page; without it 20.", schema={"type": "integer", "minimum": 1, "maximum": 100}
            ),
            "order": Parameter(about="Without it desc: the last one first.", schema={"enum": ["asc", "desc"]}),
            "after": Parameter(about="The id of the last item of the page before.", schema={"type": "string"}),
        },
        answer=responses.InputItems,
        errors=(400, 404),
    ),
    ("POST", "/v1/embeddings"): Operation(
        api="OpenAI",
        about="Vectors of texts, for models that say how they pool.",
        body=EmbeddingsBody,
        answer=openai.Embeddings,
        errors=(404,),
    ),
    ("POST", "/tokenize"): Operation(
        api="OpenAI",
        about="Token ids of a text or a chat.",
        body=TokenizeBody,
        answer=openai.Tokenized | openai.TokenizedContent,
        errors=(404,),
    ),
    ("POST", "/detokenize"): Operation(
        api="OpenAI", about="The text of token ids.", body=DetokenizeBody, answer=openai.Detokenized, errors=(404,)
    ),
    ("GET", "/tokenizer_info"): Operation(
        api="OpenAI",
        about="What the tokenizer is.",
        query=MODELS,
        answer=openai.TokenizerFields,
        errors=(400, 404),
    ),
}
ANTHROPIC = {
    ("POST", "/v1/messages"): Operation(
        api="Anthropic",
        about="The next message of a chat.",
        body=MessagesBody,
        answer=messages.MessageAnswer,
        streams=SSE,
        event=messages.MessageEvent,
        errors=MAY_GENERATE,
    ),
    ("POST", "/v1/messages/count_tokens"): Operation(
        api="Anthropic",
        about="How many tokens a chat has.",
        body=PromptBody,
        answer=messages.TokenCount,
        errors=(404,),
    ),
}
OLLAMA = {
    ("GET", "/"): Operation(api="Ollama", about="Says that the server runs.", media=("text/plain",)),
    ("GET", "/api/version"): Operation(api="Ollama", about="The version.", answer=lines.Version),
    ("GET", "/api/tags"): Operation(api="Ollama", about="List the models.", answer=lines.ListedModels),
    ("GET", "/api/ps"): Operation(api="Ollama", about="List loaded models.", answer=lines.LoadedModels),
    ("POST", "/api/show"): Operation(
        api="Ollama", about="One model.", body=ollama.ShowBody, answer=lines.ShownModel, errors=(404,)
    ),
    ("POST", "/api/generate"): Operation(
        api="Ollama",
        about="Answer a prompt, as lines unless stream is false. Without a prompt, load or unload a model.",
        body=ollama.GenerateBody,
        answer=lines.GenerateAnswer,
        streams=NDJSON,
        event=lines.GenerateEvent,
        errors=MAY_GENERATE,
    ),
    ("POST", "/api/chat"): Operation(
        api="Ollama",
        about="The next message of a chat, as lines unless stream is false. Without messages, load or unload a model.",
        body=ollama.OllamaChatBody,
        answer=lines.ChatLineEnd,
        streams=NDJSON,
        event=lines.ChatLineEvent,
        errors=MAY_GENERATE,
    ),
    ("POST", "/api/embed"): Operation(
        api="Ollama", about="Vectors of texts.", body=EmbedBody, answer=lines.Embedded, errors=(404,)
    ),
    ("POST", "/api/embeddings"): Operation(
        api="Ollama", about="One vector.", body=EmbeddingBody, answer=lines.OneEmbedding, errors=(404,)
    ),
    ("POST", "/api/create"): Operation(
        api="Ollama",
        about="Create a model, with lines of progress unless stream is false.",
        body=ollama.CreateModelBody,
        answer=lines.Succeeded,
        streams=NDJSON,
        event=lines.ProgressEvent,
        errors=(404,),
    ),
    ("POST", "/api/copy"): Operation(
        api="Ollama", about="Give a model a second name.", body=ollama.CopyBody, errors=(404,)
    ),
    ("DELETE", "/api/delete"): Operation(api="Ollama", about="Delete a model.", body=ollama.NamedBody, errors=(404,)),
    ("POST", "/api/pull"): Operation(
        api="Ollama",
        about="Download a model, if the server allows it, with lines of progress unless stream is false.",
        body=ollama.PullBody,
        answer=lines.Succeeded,
        streams=NDJSON,
        event=lines.ProgressEvent,
        errors=(404,),
    ),
    ("POST", "/api/push"): Operation(api="Ollama", about="Refused: models are not pushed.", statuses=(), errors=(400,)),
    ("HEAD", "/api/blobs/{digest}"): Operation(
        api="Ollama", about="Whether a file was uploaded.", path=DIGEST, errors=(400, 404)
    ),
    ("POST", "/api/blobs/{digest}"): Operation(
        api="Ollama",
        about="Upload a file to create a model from. 201: it was stored; 200: it was there.",
        path=DIGEST,
        binary=BYTES,
        statuses=(200, 201),
        errors=(507,),
    ),
}
CONVERSATIONS = {
    ("GET", "/kvcellar/conversations"): Operation(
        api="Conversations", about="List the conversations of the key.", answer=own.ConversationList
    ),
    ("POST", "/kvcellar/conversations"): Operation(
        api="Conversations",
        about="Create a conversation.",
        body=CreateBody,
        statuses=(201,),
        answer=own.ConversationFields,
        errors=(409,),
    ),
    ("GET", "/kvcellar/conversations/{name}"): Operation(
        api="Conversations",
        about="A whole conversation.",
        path=CONVERSATION,
        answer=own.WholeConversation,
        errors=(400, 404, 409),
    ),
    ("DELETE", "/kvcellar/conversations/{name}"): Operation(
        api="Conversations",
        about="Delete a conversation.",
        path=CONVERSATION,
        answer=own.DeletedConversation,
        errors=(400, 404, 409),
    ),
    ("POST", "/kvcellar/conversations/{name}/fork"): Operation(
        api="Conversations",
        about="Copy a conversation.",
        path=CONVERSATION,
        body=ForkBody,
        statuses=(201,),
        answer=own.ConversationFields,
        errors=(404, 409),
    ),
    ("POST", "/kvcellar/conversations/{name}/rewind"): Operation(
        api="Conversations",
        about="Discard the last turns.",
        path=CONVERSATION,
        body=RewindBody,
        answer=own.ConversationFields,
        errors=(404, 409),
    ),
}
SERVER = {
    ("GET", "/health"): Operation(
        api="Server",
        about="503 while models are loaded, as llama.cpp's server has it, else as /live. Needs no key.",
        answer=own.ServerState,
    ),
    ("GET", "/live"): Operation(
        api="Server", about="200 while no engine has failed. Needs no key.", answer=own.ServerState
    ),
    ("GET", "/ready"): Operation(
        api="Server", about="200 while requests are served. Needs no key.", answer=own.ServerState
    ),
    ("GET", "/ping"): Operation(api="Server", about="As /live.", answer=own.ServerState),
    ("POST", "/ping"): Operation(api="Server", about="As /live.", answer=own.ServerState),
    ("GET", "/metrics"): Operation(
        api="Server",
        about="Metrics for Prometheus. Needs a metrics key or admin key, if there are any.",
        media=("text/plain", "application/openmetrics-text"),
    ),
    ("GET", "/openapi.json"): Operation(api="Server", about="This document.", answer=own.OpenApiDocument),
}
OPERATOR = {
    ("GET", "/admin/requests"): Operation(
        api="Operator",
        about="The last requests.",
        query={
            "limit": Parameter(
                about="The most requests.", schema={"type": "integer", "minimum": 1, "maximum": MOST, "default": 20}
            )
        },
        answer=own.RequestSummaries,
        errors=(400,),
    ),
    ("GET", "/admin/requests/{id}"): Operation(
        api="Operator",
        about="What a request had of memory, and why it was not more, by its id or that of its response.",
        answer=own.RequestRecord,
        errors=(404,),
    ),
    ("GET", "/admin/cache"): Operation(
        api="Operator",
        about="What the cache has, by namespace.",
        query=MODELS,
        answer=own.CacheContents,
        errors=OF_CACHE,
    ),
    ("GET", "/admin/cache/tree"): Operation(
        api="Operator",
        about="Entries of a tier.",
        query={"limit": LIMIT, "tier": TIER, "namespace": NAMESPACE, "model": MODEL},
        answer=own.CacheEntries,
        errors=OF_CACHE,
    ),
    ("GET", "/admin/cache/hot"): Operation(
        api="Operator",
        about="Entries that are used most.",
        query={"limit": LIMIT, "tier": TIER, "model": MODEL},
        answer=own.CacheEntries,
        errors=OF_CACHE,
    ),
    ("POST", "/admin/cache/remove"): Operation(
        api="Operator",
        about="Remove entries.",
        body=RemoveBody,
        query=MODELS,
        answer=own.RemovedEntries,
        errors=OF_CACHE,
    ),
    ("POST", "/admin/cache/clear"): Operation(
        api="Operator",
        about="Remove all entries of the model, or of all models.",
        body=ClearBody,
        query=MODELS,
        answer=own.RemovedEntries,
        errors=OF_CACHE,
    ),
    ("POST", "/admin/cache/collect"): Operation(
        api="Operator",
        about="Delete files of no use.",
        body=NoFields,
        query=MODELS,
        answer=own.CollectedEntries,
        errors=OF_CACHE,
    ),
    ("POST", "/admin/cache/verify"): Operation(
        api="Operator",
        about="Check what is stored.",
        body=NoFields,
        query=MODELS,
        answer=own.VerifiedEntries,
        errors=OF_CACHE,
    ),
    ("POST", "/admin/cache/export"): Operation(
        api="Operator",
        about="All that is stored, as an archive.",
        body=NoFields,
        query=MODELS,
        media=(ARCHIVE,),
        errors=OF_CACHE,
    ),
    ("POST", "/admin/cache/import"): Operation(
        api="Operator",
        about="Store an archive.",
        binary=ARCHIVE,
        query=MODELS,
        answer=own.ImportedEntries,
        errors=OF_CACHE,
    ),
    ("POST", "/admin/keys/reload"): Operation(
        api="Operator", about="Read the key files again.", answer=own.ReloadedKeys, errors=(409,)
    ),
}
TABLE: Mapping[tuple[str, str], Operation] = MappingProxyType(
    {**OPENAI, **ANTHROPIC, **OLLAMA, **CONVERSATIONS, **SERVER, **OPERATOR}
)
