"""answers: the shapes of what the routes of the inspector's data answer, for the server's OpenAPI document."""

from typing import Literal, NotRequired

from typing_extensions import TypedDict

Kind = Literal["free", "kept", "request", "shared", "other"]


class SeenRecording(TypedDict):
    refused: str | None
    steps: int


class SeenSpeculation(TypedDict):
    drafter: str
    drafted: int
    accepted: int
    seconds_saved: float
    refused: str | None


class SeenEngine(TypedDict):
    """Counts of all tenants together; to one API key of several, those of its own completions only."""

    running: int
    waiting: int
    steps: int
    preemptions: int
    cache_bytes: int
    limit_bytes: int
    rows: int
    rows_used: int
    rows_cached: int
    state_bytes: int
    pinned: int
    compacted: int
    recording: SeenRecording
    speculation: NotRequired[SeenSpeculation]


class SeenRates(TypedDict):
    prefill: float  # tokens per second of the last seconds
    decode: float
    seconds: float


class SeenLiveRequest(TypedDict):
    number: int
    status: Literal["waiting", "prefill", "decode"]
    completions: int
    prompt: int
    computed: int
    produced: int
    seconds: float
    tokens_per_second: float
    restored: int | None


class SeenRecall(TypedDict):
    asked: int
    matched: int
    restored: int
    seconds: float
    reason: str
    sources: dict[str, int]
    detail: str
    entry: str
    ours: str | None
    theirs: str | None


class SeenDrafts(TypedDict):
    drafted: int
    accepted: int


class SeenEndedRequest(TypedDict):
    number: int
    at: float
    outcome: str
    prompt: int
    produced: int
    has_way: bool
    queued: float
    first_token: float
    decoding: float
    tokens_per_second: float
    recall: SeenRecall | None
    drafts: SeenDrafts | None


class SeenRequests(TypedDict):
    live: list[SeenLiveRequest]
    more_live: int
    ended: list[SeenEndedRequest]


class SeenGroup(TypedDict):
    name: str
    layers: int
    cells: int
    bytes: int
    backend: str | None
    counts: dict[Kind, int]
    cells_each: int
    # cells, what has them, and which: an index into the entries of the tree, or the number of a request
    runs: list[tuple[int, Kind, int | None]]


class SeenEntry(TypedDict):
    name: str
    namespace: str
    start: int
    end: int
    checkpoints: int
    users: int
    reused: bool
    pinned: bool
    expires: float | None
    stored: dict[str, int] | None
    parent: int | None
    begins: str | None


class SeenTree(TypedDict):
    entries: list[SeenEntry]
    more: int


class SeenTier(TypedDict):
    name: str
    bytes: int
    limit_bytes: int
    down: bool
    read_bytes: int | None
    written_bytes: int | None
    failures: dict[str, int]


class SeenStore(TypedDict):
    snapshots: int
    written: int
    restored: int
    declined: int


class SeenTiers(TypedDict):
    all: list[SeenTier]
    store: SeenStore | None


class SeenSteps(TypedDict):
    """Columns. `modules` is an index into `reasons`; `null`: a recording ran the step."""

    number: list[int]
    at: list[float]
    seconds: list[float]
    prefill: list[int]
    decode: list[int]
    drafts: list[int]
    sequences: list[int]
    modules: list[int | None]
    reasons: list[str]


class SeenModel(TypedDict):
    name: str
    context: int
    all: list[str]


class Snapshot(TypedDict):
    version: int
    at: float  # seconds of the wall clock
    sums: bool  # whether there are numbers of all tenants together; else it is of one of them only
    engine: SeenEngine
    rates: SeenRates
    requests: SeenRequests
    groups: list[SeenGroup]
    more_groups: int
    tree: SeenTree
    tiers: SeenTiers
    steps: SeenSteps
    instance: str  # another one after the server was started again
    model: SeenModel


class EntryText(TypedDict):
    name: str
    start: int
    end: int
    reads: bool  # whether the texts of its owner are shown
    text: str | None
    tokens: list[int] | None  # of a model without a tokenizer
    shown: int  # tokens


class WayEntry(TypedDict):
    name: str
    start: int
    end: int
    memory: int  # tokens that came from memory
    begins: str | None


class RequestWay(TypedDict):
    number: int
    prompt: int
    restored: int
    entries: list[WayEntry]
    at: float
