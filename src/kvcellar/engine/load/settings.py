"""settings: the settings of an engine, and the memory for texts that follows from them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, TypedDict

from kvcellar.engine.load.machine import PER_CPU, most_threads
from kvcellar.engine.models.quantize.kinds import WEIGHTS
from kvcellar.engine.models.weights.placement import ONE_DEVICE, PARALLEL, why_not_on
from kvcellar.engine.speculate.factory import DrafterFactory
from kvcellar.errors import BadRequest, extra_missing, shown
from kvcellar.memory.shapes import StoredAs
from kvcellar.memory.tiers.codec import AesGcm, Cipher, Plain
from kvcellar.places import state
from kvcellar.text.tokens import SHORT, bytes_for
from kvcellar.values import MOST_DEPTH, UNBOUNDED, Flag, Kind, Real, Whole

# Of several engines, settings that only the first one gets.
OF_ONE_ENGINE = ("kv_events", "kv_events_replay", "kv_events_topic", "kv_events_block", "adapters", "adapter")
RECORD = ("auto", "off")
DTYPES = ("auto", "float32", "bfloat16", "float16")
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
BYTES_PER_TOKEN = 8  # of text; twice as many as texts commonly have
USUAL_TEXT = 256 * 2**10  # bytes of a text that every engine can tokenize by default
LEAST_TEXT_BYTES = 2 * bytes_for(SHORT)
MOST_TEXT_BYTES = 4 * 2**30  # unless more is set
KEY_BYTES = 32
HOST_SHARE = 10  # the part of free CPU memory that what leaves a GPU may have
DOCUMENT_SHARE = 64  # this part of the bytes of a store is for each of `DOCUMENTS`
DOCUMENTS = 3  # kinds of what a front end keeps: named conversations, responses, tokens of replies
NO_DRAFT = "none"
# A forward of a GPU takes some 15 ms to launch, whatever it computes: see docs/howto/cuda.md.
STEP_TOKENS = {"cpu": 512, "cuda": 4096}
SHARE_OF_FREE = {"cpu": 0.3, "cuda": 0.85}  # less of a CPU's memory, which other programs use too


_KINDS: Mapping[str, Kind] = {  # of fields; None is allowed where it is the default
    **dict.fromkeys(("cache_bytes", "context", "max_sequences", "step_tokens", "max_waiting"), Whole(1, UNBOUNDED)),
    **dict.fromkeys(("threads", "draft_bytes", "image_bytes", "kv_events_block"), Whole(1, UNBOUNDED)),
    **dict.fromkeys(("replay_bytes", "host_bytes", "adapter_bytes"), Whole(0, UNBOUNDED)),
    **dict.fromkeys(("store_bytes", "store_remote_bytes"), Whole(2**18, UNBOUNDED)),
    "staging_bytes": Whole(2**16, UNBOUNDED),
    "text_bytes": Whole(LEAST_TEXT_BYTES, UNBOUNDED),
    "draft_depth": Whole(1, MOST_DEPTH),
    "pin_share": Real(0.0, 0.9),
    "tenant_share": Real(0.001, 1.0),  # so that few tenants at once are above it
    "stream_gap": Real(0.001, 60.0),
    "pack": Flag(),
}
_TEXTS = frozenset({
    "adapter", "attention", "kv_dtype", "store", "store_remote", "kv_events", "kv_events_replay", "kv_events_topic",
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of an engine. Raises `BadRequest`, naming the field, for a value out of its bounds.

    docs/reference/settings.md is made from the comments.
    """

    # type of computation: float32, bfloat16, float16 or auto, that of the weights
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    # how weights are multiplied. auto: as the files have them, where quantised ones can be on this machine, else dense;
    # int8, int4, mixed: those of linear layers are quantised at load; dense: in `dtype`
    weights: Literal["auto", "int8", "int4", "mixed", "dense"] = "auto"
    device: str = "auto"  # device: auto, cpu, cuda or cuda:N; auto: CUDA if there is one
    cache_bytes: int | None = None  # cap on the bytes of K/V, state, steps and edits; None: a share of free memory
    context: int | None = None  # most tokens of one sequence; None: from the config of the model
    max_sequences: int = 64  # most completions that run at once
    step_tokens: int | None = None  # most new tokens in one step; None: 512 on CPUs, 4096 on CUDA
    # most seconds between two tokens of a running completion: beside those, prompts are computed in chunks of fewer
    stream_gap: float = 0.1
    max_waiting: int = 512  # most requests waiting for admission; more raise `Overloaded`
    text_bytes: int | None = None  # CPU memory for texts, half for tokenizing, half for prompts; None: by context
    # CPU memory for the texts and tokens of chats, whose replies keep their tokens in later turns; 0: they do not
    replay_bytes: int = 32 * 2**20
    # bytes of `cache_bytes` for what is made of images, for models that take some; None: an eighth, and 256 MiB at most
    # unless layers attend to images by cross-attention
    image_bytes: int | None = None
    # hosts that images in messages may be fetched from, as `host` or `host:port`; none: nothing is fetched
    image_hosts: tuple[str, ...] = ()
    attention: str | None = None  # name of an attention backend; None: the first that supports the model
    threads: int | None = None  # CPU threads of torch; None: its default, within the CPU quota
    kv_dtype: str | None = None  # storage of K/V: int8, or k=int8+hadamard,v=int4; None: as `dtype`
    # directory of a store, in which a later engine finds what this one has computed; None: no store
    store: str | None = None
    store_bytes: int = 10 * 10**9  # most bytes of the store, and no more than a tenth of what is free on its disk
    # 32 bytes: what is stored on disk and elsewhere is encrypted with AES-256-GCM; None: it is not
    store_key: bytes | None = field(default=None, repr=False)
    # URL of a store elsewhere: redis://, rediss://, unix:// or one of fsspec; None: none
    store_remote: str | None = field(default=None, repr=False)
    store_remote_bytes: int = 10 * 10**9  # most bytes that this engine keeps there
    # CPU memory for what leaves the device, on CPUs a part of `cache_bytes`; None: 0 on CPUs, else a tenth of what is
    # free
    host_bytes: int | None = None
    staging_bytes: int = 256 * 2**20  # CPU memory for what is being stored and read back
    pin_share: float = 0.5  # part of the cache that pinned prompts may hold; 0: nothing is pinned
    # most of the bytes of host memory, disk and elsewhere that one tenant may have; what it has beyond such a part of
    # the cache is evicted first; 1: no quota
    tenant_share: float = 1.0
    # where KV events are published, like tcp://127.0.0.1:5557; they contain the tokens of prompts; None: nowhere
    kv_events: str | None = None
    kv_events_replay: str | None = None  # where KV events are replayed; None: nowhere
    kv_events_topic: str = ""  # topic of all KV events
    kv_events_block: int = 16  # tokens of a block in KV events
    # what proposes drafts of the next tokens, which the model verifies: ngram; mtp, its own MTP layers; a directory or
    # name of a smaller model or assistant; or a function that makes a drafter; none: nothing does; None: what the model
    # was created with, if anything
    draft: str | Path | DrafterFactory | None = None
    draft_depth: int | None = None  # most drafts of a completion in a step; None: as many as the drafter allows
    # bytes of `cache_bytes` for a draft model or MTP layers; None: a share by what a token takes in both, at most half
    draft_bytes: int | None = None
    # LoRA adapters in the form of peft, by the name that requests give: a directory, or a list of some that are added
    # up; None: none, or what the model was created with
    adapters: Mapping[str, str | Path | Sequence[str | Path]] | None = None
    adapter: str | None = None  # name of the adapter of requests that name none; None: they have none
    adapter_bytes: int = 2**30  # most bytes of adapters, beside those of the model's weights
    pack: bool = True  # on CPUs, reorder the weights of linear layers for oneDNN at load; a given network's are copied
    # whether steps run as a recording of the model's forward. auto: where its logits are those of the modules; on CUDA
    # devices decoding steps, as graphs
    record: Literal["auto", "off"] = "auto"

    def __post_init__(self) -> None:
        self._one_of("dtype", DTYPES)
        self._one_of("record", RECORD)
        self._one_of("weights", WEIGHTS)
        if not isinstance(self.device, str) or not _DEVICE.fullmatch(self.device):
            if isinstance(self.device, str) and (why := why_not_on(self.device)) is not None:
                raise BadRequest(f"device is {shown(self.device)}: {why}", "device")
            raise BadRequest(f"device must be auto, cpu, cuda or cuda:N, not {shown(self.device)}", "device")
        for one in fields(self):
            kind, value = _KINDS.get(one.name), getattr(self, one.name)
            if kind is not None and not (value is None and one.default is None):
                object.__setattr__(self, one.name, kind.check(one.name, value))
            if one.name in _TEXTS and not isinstance(value, str | type(one.default)):
                raise BadRequest(f"{one.name} must be text, not {shown(value)}", one.name)
        self._tiers()
        if self.kv_events is None and self.kv_events_replay is not None:
            raise BadRequest("kv_events_replay needs kv_events", "kv_events_replay")
        if self.kv_dtype is not None:
            StoredAs.parse(self.kv_dtype)
        if not isinstance(self.image_hosts, list | tuple) or not all(
            isinstance(host, str) for host in self.image_hosts
        ):
            raise BadRequest(f"image_hosts must be a list of names, not {shown(self.image_hosts)}", "image_hosts")
        object.__setattr__(self, "image_hosts", tuple(self.image_hosts))
        self._threads()
        self._draft()
        self._adapters()

    def _one_of(self, name: str, values: Sequence[str]) -> None:
        if not isinstance(value := getattr(self, name), str) or value not in values:
            listed = f"{', '.join(values[:-1])} or {values[-1]}"
            raise BadRequest(f"{name} must be {listed}, not {shown(value)}", name)

    def _adapters(self) -> None:
        if self.adapters is None:
            return
        if not isinstance(self.adapters, Mapping):
            raise BadRequest(f"adapters are directories by name, not {shown(self.adapters)}", "adapters")
        object.__setattr__(self, "adapters", {name: _places(name, path) for name, path in self.adapters.items()})

    def _draft(self) -> None:
        draft = self.draft
        if (draft is not None and not (isinstance(draft, str | Path) or callable(draft))) or draft == "":
            raise BadRequest(
                f"draft must be ngram, mtp, a directory or name of a model, or a function that makes a drafter, not "
                f"{shown(draft)}",
                "draft",
            )

    def _tiers(self) -> None:
        """No message has a key or a URL, which may have a password."""
        if self.store_remote is not None and "://" not in self.store_remote:
            raise BadRequest("store_remote must be a URL like redis://host:6379/0 or s3://bucket/path", "store_remote")
        if self.store_key is not None and (not isinstance(self.store_key, bytes) or len(self.store_key) != KEY_BYTES):
            raise BadRequest(f"store_key must be {KEY_BYTES} bytes", "store_key")

    def _threads(self) -> None:
        if self.threads is not None and self.threads > (most := most_threads()):
            raise BadRequest(
                f"threads is {self.threads}; at most {most} are allowed here, {PER_CPU} for each logical CPU", "threads"
            )


def _places(name: object, path: object) -> tuple[str, ...]:
    """The directories of an adapter, as plain texts."""
    places = path if isinstance(path, list | tuple) else (path,)
    if type(name) is not str or not places or not all(isinstance(one, str | Path) for one in places):
        found = f"{shown(name)}: {shown(path)}"
        raise BadRequest(f"adapters are directories by name, or lists of some, not {found}", "adapters")
    return tuple(str.__str__(one) if isinstance(one, str) else str(one) for one in places)


class EngineOptions(TypedDict, total=False):
    """The fields of `Settings`, where each has its comment, as keyword arguments."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    weights: Literal["auto", "int8", "int4", "mixed", "dense"]
    device: str
    cache_bytes: int | None
    context: int | None
    max_sequences: int
    step_tokens: int | None
    stream_gap: float
    max_waiting: int
    text_bytes: int | None
    replay_bytes: int
    image_bytes: int | None
    image_hosts: Sequence[str]
    attention: str | None
    threads: int | None
    kv_dtype: str | None
    store: str | None
    store_bytes: int
    store_key: bytes | None
    store_remote: str | None
    store_remote_bytes: int
    host_bytes: int | None
    staging_bytes: int
    pin_share: float
    tenant_share: float
    kv_events: str | None
    kv_events_replay: str | None
    kv_events_topic: str
    kv_events_block: int
    draft: str | Path | DrafterFactory | None
    draft_depth: int | None
    draft_bytes: int | None
    adapters: Mapping[str, str | Path | Sequence[str | Path]] | None
    adapter: str | None
    adapter_bytes: int
    pack: bool
    record: Literal["auto", "off"]


def key_in(text: str, where: str) -> bytes:
    """The key of a store, as digits. Raises `BadRequest`, without any of them."""
    try:
        key = bytes.fromhex(text.strip())
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        digits = 2 * KEY_BYTES
        raise BadRequest(
            f"{where} must have {digits} hexadecimal digits; openssl rand -hex {KEY_BYTES} makes some", "store_key_file"
        )
    return key


def store_directory(environment: Mapping[str, str]) -> Path:
    """Where a server stores snapshots, unless it is told another place. Raises `NoPlace`."""
    return state(environment) / "store"


def cipher_of(settings: Settings) -> Cipher:
    """What encrypts content in the store."""
    if settings.store_key is None:
        return Plain()
    try:
        return AesGcm(settings.store_key)
    except ImportError as error:
        raise BadRequest(extra_missing("store_key", "encryption", error), "store_key") from error


def secret_of(settings: Settings) -> bytes:
    """What names in the store depend on, so that with a key they tell nothing about tokens and names."""
    return b"" if settings.store_key is None else blake2b(settings.store_key, person=b"kvcellar-names").digest()


def document_bytes(store_bytes: int) -> int:
    """What of the bytes of a store is for each kind of documents that a front end keeps."""
    return store_bytes // DOCUMENT_SHARE


def step_tokens_of(settings: Settings, kind: str) -> int:
    """Most new tokens in a step on a kind of device: as set, or by default."""
    return STEP_TOKENS[kind] if settings.step_tokens is None else settings.step_tokens


def host_bytes_of(settings: Settings, kind: str, free: int) -> int:
    """Bytes of host memory for what leaves a device of a kind, of `free` ones."""
    if settings.host_bytes is not None:
        return settings.host_bytes
    return 0 if kind == "cpu" else free // HOST_SHARE


def text_bytes_of(settings: Settings, context: int) -> int:
    """Bytes of memory for texts: as set, or enough to tokenize a full context with `BYTES_PER_TOKEN` for each token."""
    if settings.text_bytes is not None:
        return settings.text_bytes
    return min(MOST_TEXT_BYTES, 2 * bytes_for(max(USUAL_TEXT, BYTES_PER_TOKEN * context)))


def settings_of(given: Mapping[str, Any]) -> Settings:
    """The settings with these names. Raises `BadRequest` for a name that there is not."""
    known = {field.name for field in fields(Settings)}
    unknown = sorted(set(given) - known)
    if unknown:
        if unknown[0] in PARALLEL:
            raise BadRequest(f"{unknown[0]} is no engine setting: {ONE_DEVICE}", unknown[0])
        raise BadRequest(f"there is no engine setting {shown(unknown[0])}; there are {sorted(known)}", unknown[0])
    return Settings(**given)
