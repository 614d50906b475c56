"""answers_own: what routes answer that are not of another server's API: conversations, the state of the server, and
what its operator reads."""

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from kvcellar.serve.openapi.answers_shared import Anything, RecallFields, SpeculationFields


class ConversationFields(TypedDict):
    object: Literal["conversation"]
    name: str
    kind: Literal["chat", "text"]
    model: str
    created_at: int
    changed_at: int
    turns: int
    messages_count: int
    tokens_count: int


class ConversationList(TypedDict):
    object: Literal["list"]
    data: list[ConversationFields]


class WholeConversation(ConversationFields):
    messages: NotRequired[list[Anything]]  # of a chat, as templates read them
    token_ids: NotRequired[list[int]]  # of a text


class DeletedConversation(TypedDict):
    object: Literal["conversation.deleted"]
    name: str
    deleted: Literal[True]


class ServerState(TypedDict):
    status: Literal["ok", "ready"]
    model: NotRequired[str]  # where the server has no API keys


class OpenApiDocument(TypedDict):
    openapi: str
    info: Anything
    tags: list[Anything]
    paths: dict[str, Any]
    security: list[Anything]
    components: Anything


class RequestSummary(TypedDict):
    """`id`: of the response. The other fields are those of the log line."""

    id: str | None
    created: float  # seconds of the wall clock
    request_id: str
    method: str
    route: str
    status: int
    outcome: str
    key: str | None
    model: str | None
    prompt_tokens: int | None
    cached_tokens: int | None
    recall: str | None
    completion_tokens: int | None
    draft_tokens: int | None
    accepted_tokens: int | None
    ms: float


class RequestSummaries(TypedDict):
    requests: list[RequestSummary]


class OperatorsRecall(RecallFields):
    salted: int  # first tokens that are in memory for the same API key with another salt or user


class PromptRecord(TypedDict):
    prompt: int
    prompt_tokens: int
    queued_ms: float
    first_token_ms: float
    recall: OperatorsRecall | None
    speculation: SpeculationFields | None


class RequestRecord(RequestSummary):
    namespace: str
    prompts: list[PromptRecord]


class DeviceNamespace(TypedDict):
    namespace: str
    entries: int
    tokens: int
    checkpoints: int
    bytes: int
    in_use: int  # tokens that running requests use


class DeviceContents(TypedDict):
    namespaces: list[DeviceNamespace]


class StoredNamespace(TypedDict):
    identity: str
    namespace: str | None  # `null`: sealed with another key
    entries: int
    tokens: int
    bytes: int


class StoreContents(TypedDict):
    directory: str
    bytes: int
    limit_bytes: int
    namespaces: list[StoredNamespace]


class CacheContents(TypedDict):
    device: DeviceContents
    store: StoreContents | None


class DeviceEntry(TypedDict):
    tier: Literal["device"]
    namespace: str
    name: str
    parent: str  # empty at the beginning of a text
    start: int
    end: int
    tokens: list[int]  # the first ones
    checkpoints: list[int]
    users: int  # running sequences
    reused: bool
    value: float  # to eviction
    leaf: bool
    pinned: bool
    expires: float | None  # seconds of the wall clock
    owner: str
    adapter: str
    text: str | None


class StoredEntry(TypedDict):
    """Of one that was sealed with another key, neither namespace, span nor tokens are known."""

    tier: Literal["disk"]
    name: str
    parent: str
    identity: str
    bytes: int
    uses: int
    value: float
    pinned: bool
    expires: float | None
    namespace: str | None
    start: int | None
    end: int | None
    tokens: list[int] | None
    adapter: str | None
    text: str | None


class CacheEntries(TypedDict):
    entries: list[DeviceEntry | StoredEntry]
    more: bool


class RemovedEntries(TypedDict):
    tokens: int  # in memory, as far as no running request uses them
    stored: int  # entries of the store


class CollectedEntries(TypedDict):
    removed: int


class VerifiedEntries(TypedDict):
    read: int
    bytes: int
    damaged: int
    unreadable: int  # sealed with another key, or gone


class ImportedEntries(TypedDict):
    stored: int
    refused: dict[str, int]  # entries that were not stored, by reason


class KeyCounts(TypedDict):
    api: int
    admin: int
    metrics: int


class ReloadedKeys(TypedDict):
    keys: KeyCounts
