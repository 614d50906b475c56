"""messages: what an engine is told and what it tells, as frozen records. An engine knows tokens only: what has text is
in `events`. `engine/control_replies.py` has records that it replies to a `Control`.

Always true:
  * requests are named by numbers, so that a sender needs no object of the engine to stop one;
  * every message can be sent to another process of the same installation (`wire`), and what arrives is equal to it:
    a field is a number, a text, bytes, a tuple, list or mapping of these, such a record, a `Path` or an exception.
"""

from typing import Any, Generic, TypeVar, Union, get_args

from msgspec import Raw, Struct

from kvcellar.engine.control_replies import (
    AdapterInfo,
    NamespaceContents,
    Picture,
    Removed,
    StoreDisk,
    TreeEntry,
    VariantText,
    Way,
)
from kvcellar.engine.stats import EngineStats
from kvcellar.events import (
    Done,
    Embedded,
    Failed,
    FinishReason,
    PoolingMode,
    PromptScored,
    Rewrite,
    Tagged,
    TokenLogprob,
)
from kvcellar.images.image import ImageInput
from kvcellar.memory.prefix.kv_events import KvEvent
from kvcellar.memory.retention import NO_OPTIONS, RetentionOptions
from kvcellar.memory.tiers.upkeep import Imported, Verified
from kvcellar.progress import Progress
from kvcellar.sampling_params import SamplingParams
from kvcellar.version import __version__

R_co = TypeVar("R_co", covariant=True)

VERSION = __version__  # of the messages: they are those of one installation, and no other version reads them


class Produced(Struct, frozen=True, array_like=True):
    """What one choice of a request had when its engine died."""

    choice: int
    token_ids: tuple[int, ...]  # of all its `Drawn`
    ended: int | None = None  # with how many tokens it has ended, as `Ended` or its text told; None: it goes on


class Submission(Tagged, frozen=True, kw_only=True):
    """A request. Its arguments were checked: see `engine/arguments.py`.

    The sender draws `seed` where `params` has none, before the request is sent anywhere: an engine that goes on with it
    after another one died draws each token with the same noise. `params.seed` stays as it was, because a text without a
    seed of its own may depend on drafts.
    """

    number: int  # its place in the order of arrival
    prompt: bytes  # token ids of 8 bytes each: the key of the prefix tree (`memory.prefix.node.ids_of`)
    params: SamplingParams
    seed: int  # of its noise: that of `params`, if it has one
    namespace: str = ""  # shares memory with requests of the same one only
    checkpoint_positions: tuple[int, ...] = ()  # of the prompt, ascending, from which later requests may resume
    retention: RetentionOptions = NO_OPTIONS  # how what it uses and computes is kept
    adapter: str | None = None  # the name of the adapter that it is computed with; "": none; None: the engine's default
    pooling: PoolingMode | None = None  # it ends with its prompt, and gives its hidden states, pooled that way
    images: tuple[ImageInput, ...] = ()  # whose rows are in the prompt, in order: one that is there twice, twice
    image_places: tuple[tuple[int, int], ...] = ()  # of each, message and number in it, from 0; empty: not known
    rewrite: Rewrite | None = None  # what the prompt has in another form than an earlier one of the same chat
    produced: tuple[Produced, ...] = ()  # in another engine, which died: choices that are not named have no tokens
    prompt_told: bool = False  # `PromptScored` or `Embedded` has been told, and is not told again
    goes_on: bool = False  # another engine had taken it in, which died: it is taken in however many wait


class Admitted(Tagged, frozen=True):
    """The request begins to run: the first event."""


class Drawn(Tagged, frozen=True):
    """New tokens of one choice. A token that ends it (`stop_token_ids`, the end of a text) is in none."""

    choice: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None  # one for each of token_ids, if requested
    cached_tokens: int = 0  # of the prompt, that came from memory: the same for all tokens of a request


class Ended(Tagged, frozen=True):
    """The engine draws no more tokens for the choice. `tokens`: how many it has drawn, with the one that ended it."""

    choice: int
    reason: FinishReason
    tokens: int


EngineEvent = Admitted | PromptScored | Embedded | Drawn | Ended | Done | Failed


class ControlWithReply(Tagged, Generic[R_co], frozen=True):
    """What is asked of an engine beside requests, and has a reply of this type."""


class ControlInParts(Tagged, Generic[R_co], frozen=True):
    """The same with any number of replies."""


Control = ControlWithReply[Any] | ControlInParts[Any]


def reply_type(control: Control) -> Any:
    """That of the reply to it, or of each of its replies."""
    kind: Any = type(control)
    return get_args(kind.__orig_bases__[0])[0]


class ListNamespaces(ControlWithReply[list[NamespaceContents]], frozen=True):
    """What each namespace has in memory, the largest first."""


class ListEntries(ControlInParts[list[dict[str, Any]]], frozen=True):
    """Entries of a tier, each after the one that it continues. The replies are parts of the list."""

    tier: str  # device or disk
    namespace: str | None  # None: of all


class DescribeDisk(ControlWithReply[StoreDisk | None], frozen=True):
    """The directory of the store on disk, and what is in it."""


class RemoveEntries(ControlWithReply[Removed], frozen=True):
    """Remove from memory and from the store. Arguments that are not None must all hold, and one must be given."""

    namespace: str | None
    entry: str | None  # its name
    prefix: tuple[int, ...] | None  # tokens


class ClearCacheAndStore(ControlWithReply[Removed], frozen=True):
    """Remove all that no running request uses."""

    all_models: bool  # also what other models have stored in the same directory


class CollectStore(ControlWithReply[int], frozen=True):
    """Remove entries of the store that are of no use."""


class VerifyStore(ControlWithReply[Verified], frozen=True):
    """Read all entries of the store, and remove those that are damaged."""


class ExportStore(ControlInParts[bytes], frozen=True):
    """An archive of the store. The replies are parts of its bytes."""


class ImportStore(ControlWithReply[Imported], frozen=True):
    """Store the entries of an archive, which is sent beside this message."""


class TakePicture(ControlWithReply[Picture], frozen=True):
    """A bounded picture of requests, the prefix tree and cells."""

    replica: str = ""  # of several, the one that is asked: an engine does not read it. "": any


class ShowEntry(ControlWithReply[tuple[TreeEntry, tuple[int, ...]]], frozen=True):
    """An entry of the prefix tree."""

    name: str
    most: int  # of its tokens
    replica: str = ""


class ShowWay(ControlWithReply[Way], frozen=True):
    """The way of a request through the prefix tree."""

    number: int
    replica: str = ""


class AddAdapter(ControlWithReply[AdapterInfo], frozen=True):
    """Load an adapter, the sum of those of the directories, under a name."""

    name: str
    directories: tuple[str, ...]


class RemoveAdapter(ControlWithReply[None], frozen=True):
    """Let no later request have the adapter of this name."""

    name: str
    wait: bool  # until it is freed


class ListAdapters(ControlWithReply[list[AdapterInfo]], frozen=True):
    """Adapters that requests can name."""


class DescribeVariant(ControlWithReply[VariantText], frozen=True):
    """What a model of the library that shares the weights of the engine has of its own: it was created with
    `parameters`, as its manifest has them, and `template`."""

    name: str
    parameters: dict[str, Any]
    template: str | None


class ReadStats(ControlWithReply[EngineStats], frozen=True):
    """The current statistics, between two steps."""


class DescribeCapacity(ControlWithReply[str], frozen=True):
    """What fits into the granted bytes, as text."""


class ClearCache(ControlWithReply[None], frozen=True):
    """Evict all that no running request uses from memory, and forget the texts that drafts are made of."""


class NextPart(ControlWithReply[list[Any]], frozen=True):
    """The next part of the ask `of`, in a list, or an empty list at the end. Of an engine in another process."""

    of: int


class CheckInvariants(ControlWithReply[None], frozen=True):
    """Assert every invariant of the scheduler, of memory and of adapters."""


_EVERY: list[Any] = [*ControlWithReply.__subclasses__(), *ControlInParts.__subclasses__()]
CONTROLS: Any = Union[tuple(_EVERY)]  # noqa: UP007 - the union of all of these


# To an engine in another process.


class Start(Tagged, frozen=True):
    """The first message: load a model."""

    model: str | None  # a directory, a name, or None for the embedded model
    settings: dict[str, Any]  # fields of `Settings`, plain
    log_level: int  # of what is told as `Logged`


class Cancel(Tagged, frozen=True):
    """End a request at the next step."""

    number: int


class Stop(Tagged, frozen=True):
    """The text of a choice has ended with its first `tokens` tokens."""

    number: int
    choice: int
    tokens: int


class Fail(Tagged, frozen=True):
    """End a request with an error: its text could not be made."""

    number: int
    error: Exception


class Ask(Tagged, frozen=True):
    """Take in a request, or do what a `Control` names. One `Reply` or `Refusal` of the same number follows; of a
    control in parts, the `Reply` says that there will be parts."""

    number: int  # of asks, which are counted apart from requests
    what: Raw  # of a `Submission` or `Control`, as `wire.packed` returns it


class EndParts(Tagged, frozen=True):
    """No more parts of this ask are wanted."""

    of: int


class Given(Tagged, frozen=True):
    """What was `Wanted`. Less than that, if there is no more."""

    number: int
    data: bytes


ToEngine = Start | Cancel | Stop | Fail | Ask | EndParts | Given


# From an engine in another process.


class Hello(Tagged, frozen=True):
    """The model is loaded. Of another version it raises `ValueError` when it is decoded, and nothing else of it is."""

    version: str
    card: Raw  # what the front end has to know of the engine, as `wire.packed` returns it

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise ValueError(
                f"the engine's process runs kvcellar {self.version}, and this one {VERSION}. Restart both: the package "
                f"was replaced while one of them ran"
            )


class Loading(Tagged, frozen=True):
    """How far the load of the model is."""

    progress: Progress


class StepEvents(Tagged, frozen=True):
    """All events of one step, in the order in which they are delivered, each with the number of its request."""

    events: tuple[tuple[int, EngineEvent], ...]


class Reply(Tagged, frozen=True):
    """What an `Ask` of this number has returned."""

    number: int
    value: Raw  # as `wire.packed` returns it


class Refusal(Tagged, frozen=True):
    """What an `Ask` of this number has raised, or, with the number 0, the load of the model."""

    number: int
    error: Exception


class Wanted(Tagged, frozen=True):
    """What an `Ask` of this number reads next of its source: up to so many bytes."""

    number: int
    size: int


class Logged(Tagged, frozen=True):
    """A line for the log."""

    logger: str
    level: int
    text: str


class Beat(Tagged, frozen=True):
    """Told about every second: the process is alive, and its engine is in a step that has taken `seconds` so far; 0: in
    none."""

    seconds: float


class EngineSnapshot(Tagged, frozen=True):
    """The engine as it was between two steps: told after the load, and when something may have changed, but no more
    than a few times a second."""

    stats: Raw  # of `EngineStats`, as `wire.packed` returns it


class Blocks(Tagged, frozen=True):
    """What has changed of which blocks memory and tiers have, to a front end that chooses among replicas."""

    events: tuple[KvEvent, ...]  # without tokens


class Leaving(Tagged, frozen=True):
    """The engine will be closed: requests are to go on at another one, and new ones are refused."""


FromEngine = Hello | Loading | StepEvents | Reply | Refusal | Wanted | Logged | Beat | EngineSnapshot | Blocks | Leaving
