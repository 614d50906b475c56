"""stats: how an engine is doing between two steps, as records. No torch.

A field says once what it is: `gauge` and `counter` have its name and meaning for Prometheus, from which samples
(`serve/metrics/exposition.py`), docs/reference/statistics.md and docs/reference/metrics.md are made. The meaning of a
field that is no metric is its comment.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, ClassVar, Literal, TypeVar, dataclass_transform, get_args, get_type_hints

T = TypeVar("T")
ReplicaState = Literal["connecting", "connected", "leaving", "lost", "refused"]


@dataclass(frozen=True, slots=True)
class Metric:
    """What a field is for Prometheus. `label`: that of the keys of a mapping, which are names of tiers and reasons, of
    which there are few; never what a client has sent."""

    kind: Literal["gauge", "counter", "histogram"]
    name: str
    text: str
    label: str | None = None

    @property
    def help(self) -> str:
        return f"{self.text[0].upper()}{self.text[1:]}."


def gauge(name: str, text: str, *, by: str | None = None) -> Any:
    return field(metadata={"metric": Metric("gauge", name, text, by)})


def counter(name: str, text: str, *, by: str | None = None) -> Any:
    """It never falls while an engine lives."""
    return field(metadata={"metric": Metric("counter", name, text, by)})


@dataclass_transform(field_specifiers=(gauge, counter))
def statistics(*, frozen: bool) -> Callable[[type[T]], type[T]]:
    """A record, some fields of which are metrics. Where it has a `LABEL`, they have a label of that name, with the
    `name` of the record."""
    return dataclass(frozen=frozen, slots=True)


def declared(cls: type) -> Iterator[tuple[Metric, tuple[str, ...]]]:
    """The metrics of a record and of those in it, with the names of their labels."""
    above = (cls.__dict__["LABEL"],) if "LABEL" in cls.__dict__ else ()
    for one in fields(cls):
        if (metric := one.metadata.get("metric")) is not None:
            yield metric, (*above, metric.label) if metric.label is not None else above
            continue
        kind = get_type_hints(cls)[one.name]
        for part in (kind, *get_args(kind)):
            if isinstance(part, type) and is_dataclass(part):
                yield from ((metric, (*above, *labels)) for metric, labels in declared(part))


def samples(record: Any) -> Iterator[tuple[Metric, tuple[str, ...], Any]]:
    """The metrics of a record and of those in it, with the values of their labels, and their own."""
    above = (record.name,) if "LABEL" in type(record).__dict__ else ()
    for one in fields(record):
        value = getattr(record, one.name)
        if (metric := one.metadata.get("metric")) is None:
            for part in value if isinstance(value, tuple) else (value,):
                if is_dataclass(part):
                    yield from ((metric, (*above, *labels), number) for metric, labels, number in samples(part))
        elif metric.label is not None:
            yield from ((metric, (*above, label), number) for label, number in value.items())
        else:
            yield metric, above, value


@statistics(frozen=True)
class GroupStats:
    """The cells of one group."""

    LABEL: ClassVar = "group"

    name: str  # name of the group
    layers: int  # layers of the group
    cells: int = gauge("kvcellar_cells", "all cells of a group of layers, without the null cell")
    used: int = gauge("kvcellar_cells_used", "cells of running sequences")
    cached: int = gauge(
        "kvcellar_cells_cached", "cells of the prefix cache alone, in use by no running sequence; evicted when needed"
    )
    bytes: int  # bytes of all cells, used or not
    backend: str | None  # attention backend; None: the attention of the model


@statistics(frozen=True)
class TierStats:
    """One place for what leaves the device."""

    LABEL: ClassVar = "tier"

    name: str  # host, disk or remote
    bytes: int = gauge("kvcellar_tier_bytes", "bytes of all that is in a tier")
    limit_bytes: int = gauge("kvcellar_tier_limit_bytes", "cap on the bytes of a tier")
    written_bytes: int = counter("kvcellar_tier_written_bytes", "bytes written to a tier")
    read_bytes: int = counter("kvcellar_tier_read_bytes", "bytes read from a tier")
    down: bool = gauge("kvcellar_tier_down", "whether a tier is not used now, as it has failed or was too slow")
    failures: Mapping[str, int] = counter(
        "kvcellar_tier_failures", "operations of a tier that failed: each is a miss, or not stored", by="kind"
    )


@statistics(frozen=True)
class StoreStats:
    """What has left the device."""

    tiers: tuple[TierStats, ...]  # described below, the fastest first
    snapshots: int = gauge("kvcellar_store_snapshots", "snapshots in all tiers that the engine can read")
    staged_bytes: int = gauge("kvcellar_store_staged_bytes", "bytes that are being written or read")
    staging_bytes: int  # cap on these
    unwritten: bool  # whether something is left to be written
    written: int = counter("kvcellar_store_written_tokens", "tokens written to the store")
    restored: int = counter("kvcellar_store_restored_tokens", "tokens read back from the store")
    declined: int = counter(
        "kvcellar_store_declined_requests", "requests of which tokens were cheaper to compute than to read back"
    )
    failures: Mapping[str, int]  # snapshots that were not written, by kind

    def tier(self, name: str) -> TierStats:
        """Raises `KeyError`."""
        return {tier.name: tier for tier in self.tiers}[name]


@statistics(frozen=True)
class SpeculationStats:
    """What drafts do."""

    drafter: str  # name of what proposes them
    refused: str | None  # why it is not used any more; None: it is used
    deepest: int  # the most drafts of a completion in a step
    rounds: int = counter("kvcellar_draft_rounds", "steps in decode of each completion, with drafts or without")
    drafted: int = counter("kvcellar_draft_tokens", "drafts that were computed")
    accepted: int = counter("kvcellar_accepted_tokens", "of these, drafts that became tokens")
    acceptance: tuple[float, ...]  # by position in the step: the rate of acceptance now, of about the last 20 drafts
    seconds_saved: float  # since the start, beside the expected seconds of plain steps; negative: lost
    cache_bytes: int  # bytes of the drafter's own K/V and recurrent state


@statistics(frozen=True)
class RecordingStats:
    """How steps run."""

    refused: str | None  # why modules run all steps; None: a recording runs those that it can
    executor: str | None  # what runs the recording
    opaque: tuple[str, ...]  # classes of modules that run as they are within it, because they cannot be traced
    steps: int = counter("kvcellar_recorded_forwards", "forwards that a recorded step ran")
    by_modules: Mapping[str, int] = counter(
        "kvcellar_module_forwards", "forwards that modules ran in its place", by="reason"
    )


@statistics(frozen=True)
class PrefixStats:
    """What requests found in memory."""

    asked: int = counter(
        "kvcellar_asked_tokens", "prompt tokens that could have come from memory: all but the last of each prompt"
    )
    matched: int = counter("kvcellar_matched_tokens", "of these, tokens that were found")
    restored: int = counter("kvcellar_restored_tokens", "of these, tokens that were used")
    sources: Mapping[str, int] = counter(
        "kvcellar_tokens_by_source",
        "restored tokens, by their tier: device, host, disk, remote; as a metric also `computed` ones",
        by="source",
    )
    missed: Mapping[str, int] = counter(
        "kvcellar_recomputed_tokens",
        "tokens asked for and computed, by what the recall of the request says",
        by="reason",
    )
    forks: int = counter("kvcellar_forks", "sequences that began as copies of others")
    tokens: int = gauge("kvcellar_prefix_tokens", "tokens of the prefix tree, those of running sequences included")
    checkpoints: int = gauge("kvcellar_checkpoints", "checkpoints of the prefix tree")
    lost: int = counter("kvcellar_lost_tokens", "tokens evicted, removed, expired, or of no use any more")
    lost_checkpoints: int = counter("kvcellar_lost_checkpoints", "checkpoints lost in the same ways")


@statistics(frozen=True)
class ReplicaStats:
    """One replica of an engine, as a gateway knows it. Numbers are 0 of one that is not connected."""

    name: str  # of the replica in Ray Serve
    address: str  # host and port at which it listens for gateways
    state: ReplicaState  # `connecting`, `connected`, `leaving` (it gets no more requests), `lost` or `refused`
    why: str  # why it is lost or refused
    running: int = 0  # completions in prefill or decode
    waiting: int = 0  # completions waiting for admission
    waiting_tokens: int = 0  # their prompt tokens that are not computed yet, with those in prefill
    cells: int = 0  # all cells of the fullest group
    cells_used: int = 0  # of these, cells of running sequences
    cells_cached: int = 0  # of these, cells of the prefix cache alone; the others are free
    prefill_rate: float = 0.0  # prompt tokens per second, of the last seconds
    decode_rate: float = 0.0  # tokens in decode per second
    blocks: int = 0  # blocks of tokens that the router knows to be there


@statistics(frozen=True)
class ClusterStats:
    """Several engines that are used as one, as one gateway knows them."""

    replicas: tuple[ReplicaStats, ...]  # described below
    states: Mapping[str, int] = gauge("kvcellar_cluster_replicas", "replicas of an engine", by="state")
    moved: int = counter(
        "kvcellar_cluster_requests_moved", "requests that went on at another replica, as theirs had died or left"
    )
    unranked: int = counter(
        "kvcellar_cluster_requests_unranked",
        "requests whose replica was chosen by numbers of requests alone, as no replica had published KV events",
    )


@statistics(frozen=True)
class EngineStats:
    """The state of an engine between two steps. What is counted is counted since the start."""

    at: float  # when it was so: seconds of the wall clock
    started: float  # when the engine was started, or started again after its process died: seconds of the wall clock
    running: int = gauge("kvcellar_completions_running", "completions in prefill or decode")
    waiting: int = gauge("kvcellar_completions_waiting", "completions waiting for admission")
    waiting_tokens: int = gauge(
        "kvcellar_waiting_tokens", "prompt tokens that are not computed yet, of completions that wait or are in prefill"
    )
    prefilling: int  # of the running completions, those whose prompt is not computed yet
    max_sequences: int  # completions that run at once, at most
    token_seconds: float  # that a token of a prompt takes, by what was measured lately; 0.0: nothing was
    restore_seconds: float  # that a token read back from the store takes, by what was measured; 0.0: nothing was
    ended: int  # requests that have ended since the start
    sequences: int  # sequences in memory: those of running completions
    steps: int = counter("kvcellar_steps", "steps")
    prefill_tokens: int = counter("kvcellar_prefill_tokens", "prompt tokens that steps have computed")
    decode_tokens: int = counter("kvcellar_decode_tokens", "tokens that steps have computed of completions in decode")
    preemptions: int = counter("kvcellar_preemptions", "running completions that were preempted")
    cache_bytes: int = gauge("kvcellar_cache_bytes", "bytes of K/V and recurrent state, used or not")
    scratch_bytes: int = gauge("kvcellar_scratch_bytes", "bytes of the largest step")
    staging_bytes: int  # bytes of the largest edit
    limit_bytes: int = gauge(
        "kvcellar_limit_bytes", "cap on the cache, the largest step and edits, without a draft model"
    )
    groups: tuple[GroupStats, ...]  # described below
    prefixes: PrefixStats  # described below
    store: StoreStats | None  # described below; None: no store
    speculation: SpeculationStats | None  # described below; None: nothing is drafted
    recording: RecordingStats  # described below
    cluster: ClusterStats | None  # described below; None: it is one engine
    rows: int = gauge("kvcellar_state_rows", "rows of recurrent state, without the null row")
    rows_used: int = gauge("kvcellar_state_rows_used", "rows of running sequences")
    rows_cached: int = gauge(
        "kvcellar_state_rows_cached", "rows of the prefix cache alone, in use by no running sequence"
    )
    state_bytes: int  # bytes of all rows
    pinned: int = gauge("kvcellar_pinned_tokens", "tokens that are pinned")
    pins_refused: int = counter("kvcellar_pins_refused", "prompts that were not pinned, as too much was pinned already")
    pins_released: int = counter(
        "kvcellar_pins_released", "pins that were released, as a request that ran alone needed their memory"
    )
    shifts: int = counter("kvcellar_shifts", "context shifts that rotated keys")
    recomputes: Mapping[str, int] = counter(
        "kvcellar_shift_recomputes", "context shifts that computed the text again", by="reason"
    )
    compacted: int = counter("kvcellar_compacted_cells", "cells moved by compaction")
    adapter_bytes: int = gauge(
        "kvcellar_adapter_bytes", "bytes of adapters, also of those that only running requests use"
    )
    images_encoded: int = counter("kvcellar_images_encoded", "images that a model's towers have made features of")
    images_restored: int = counter("kvcellar_images_restored", "images of which a tier had the features")
    image_bytes: int = gauge("kvcellar_image_bytes", "bytes of the features of images that are kept")
    kv_events_lost: int = counter(
        "kvcellar_kv_events_lost", "times that subscribers of KV events had to forget all blocks, as changes were lost"
    )

    @property
    def cells_used(self) -> int:
        return sum(group.used for group in self.groups)

    @property
    def cells_cached(self) -> int:
        return sum(group.cached for group in self.groups)
