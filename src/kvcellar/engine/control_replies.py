"""control_replies: what an engine replies to the messages that are no requests (`messages.Control`). No torch.

Always true: a reply is a plain value, or a record of plain values, that msgspec encodes, and decodes by its type in
`REPLIES` to an equal one. Entries of the prefix tree and of the store are JSON.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvcellar import messages
from kvcellar.engine.picture import Picture, TreeEntry, Way
from kvcellar.engine.stats import EngineStats
from kvcellar.tiers.upkeep import Imported, Verified


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


# By the type of a message, the type of its reply, or of each of its replies.
REPLIES: Mapping[type, Any] = {
    messages.ListNamespaces: list[NamespaceContents],
    messages.ListEntries: list[dict[str, Any]],
    messages.ListMostValuable: list[dict[str, Any]],
    messages.ListStoredTotals: list[dict[str, Any]],
    messages.DescribeDisk: StoreDisk | None,
    messages.RemoveEntries: Removed,
    messages.ClearCacheAndStore: Removed,
    messages.CollectStore: int,
    messages.VerifyStore: Verified,
    messages.ExportStore: bytes,
    messages.ImportStore: Imported,
    messages.TakePicture: Picture,
    messages.ShowEntry: tuple[TreeEntry, tuple[int, ...]],
    messages.ShowWay: Way,
    messages.AddAdapter: AdapterInfo,
    messages.RemoveAdapter: None,
    messages.ListAdapters: list[AdapterInfo],
    messages.DescribeVariant: VariantText,
    messages.ReadStats: EngineStats,
    messages.DescribeCapacity: str,
    messages.ClearCache: None,
    messages.CheckPinned: None,
    messages.CheckInvariants: None,
}
