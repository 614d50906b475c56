"""control_replies: what an engine replies to the messages that are no requests (`messages.Control`), its picture among
them. No torch.

Always true: a reply is a plain value, or a record of plain values, that msgspec encodes, and decodes by its type to an
equal one. Entries of the prefix tree and of the store are JSON.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from kvcellar.engine.stats import EngineStats
from kvcellar.events import Recall, Speculation, Timings, Usage

BEGINNING = 16  # tokens of an entry
RUNS = 1024  # of a map of cells
RECENT_SECONDS = 10.0  # over which a picture's tokens per second are counted

Kind = Literal["free", "kept", "request", "shared", "other"]


class MapRun(NamedTuple):
    """So many cells in order. `which` is the index of the entry, or the number of the request, that has them; None for
    other kinds: "shared" by running requests, and "other" ones that are held and were not looked at."""

    cells: int
    kind: Kind
    which: int | None


class EndedRequest(NamedTuple):
    """A request that is done. `text`: the keys of its prompt and of its first completion; None: no longer kept."""

    number: int
    at: float  # seconds of the wall clock
    outcome: str
    usage: Usage
    timings: Timings
    recall: Recall | None
    speculation: Speculation | None
    space: str
    owner: str
    text: tuple[bytes, bytes] | None


@dataclass(frozen=True, slots=True)
class CellMap:
    """All cells of a group in order. If these had more than `RUNS` runs, `cells_each` of them are drawn as what the
    busiest one is."""

    cells_each: int
    runs: list[MapRun]
    counts: dict[Kind, int]  # cells, exactly


class StepRecord(NamedTuple):
    """A step that was run. `at` is its end in seconds of the wall clock, `seconds` its time on the engine's thread, in
    which a device may have been ahead. `modules`: why modules ran it (the last one of its forwards); None: a recording
    did."""

    number: int
    at: float
    seconds: float
    prefill: int  # tokens of prompts
    decode: int  # tokens of completions in decode
    drafts: int  # drafts behind these
    sequences: int
    modules: str | None


class TreeEntry(NamedTuple):
    """The tokens [start,end) of all sequences below a node. `stored` has how many of them each tier has; None: not
    looked for."""

    name: str  # as in `Recall.entry`
    parent: int | None  # index of the entry that it continues; None: it begins a text
    namespace: str
    owner: str
    start: int
    end: int
    checkpoints: int
    users: int  # running sequences
    reused: bool
    pinned: bool
    expires: float | None  # seconds of the wall clock
    tokens: tuple[int, ...]  # the first `BEGINNING` ones
    stored: dict[str, int] | None


class LiveRequest(NamedTuple):
    """A request that is not done. Counts of completions are those of all together."""

    number: int
    owner: str
    status: Literal["waiting", "prefill", "decode"]
    completions: int
    prompt: int  # tokens
    computed: int  # tokens of the first completion that are in memory
    produced: int  # tokens
    seconds: float  # since it was submitted
    decoding: float  # seconds since its first token
    recall: Recall | None  # None: it has not begun to run


@dataclass(frozen=True, slots=True)
class Picture:
    """What there is. `more_live`: how many are left out; `more_entries` the same, without those that continue these."""

    at: float  # seconds of the wall clock
    stats: EngineStats
    live: list[LiveRequest]
    more_live: int
    ended: list[EndedRequest]  # the last one first
    entries: list[TreeEntry]
    more_entries: int
    maps: list[CellMap]
    steps: list[StepRecord]


@dataclass(frozen=True, slots=True)
class Way:
    """The way of a request through the tree: the entries that have tokens of its text, and how many of these. `prompt`
    tokens are its prompt's. `recall` is None if it has not begun to run."""

    owner: str
    prompt: int
    recall: Recall | None
    entries: list[tuple[str, int, int, tuple[int, ...]]]  # name, start, end and the first tokens


@dataclass(slots=True)
class NamespaceContents:
    """What one namespace has in memory. `bytes` are those of its cells in groups without a window, and of its state
    rows: windows of checkpoints share cells."""

    namespace: str
    entries: int = 0
    tokens: int = 0
    checkpoints: int = 0
    bytes: int = 0
    in_use: int = 0  # tokens that running requests use


@dataclass(frozen=True, slots=True)
class Removed:
    tokens: int  # in memory, as far as no running request uses them
    stored: int  # entries of the store


@dataclass(frozen=True, slots=True)
class StoreDisk:
    """The store on disk."""

    directory: str
    cap: int  # bytes
    bytes: int
    totals: list[dict[str, Any]]  # entries, tokens and bytes by identity and namespace, the largest first


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """One adapter of an engine."""

    name: str
    digest: str  # of its weights
    rank: int  # the largest of its layers
    layers: int  # that it changes
    bytes: int
    requests: int  # that use it


@dataclass(frozen=True, slots=True)
class VariantText:
    """What a model has of its own beside an adapter: sampling parameters, and the templates of chats and of replies;
    those of the engine's own tokenizer, where it was created without."""

    defaults: dict[str, Any]
    chat_template: str | None
    response_template: Any
