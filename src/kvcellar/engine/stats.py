"""stats: how an engine is doing, as records. `count_stats.py` makes them. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupStats:
    """The cells of one group. docs/reference/statistics.md is generated from the comments."""

    name: str  # name of the group
    layers: int  # layers of the group
    cells: int  # all cells, without the null cell
    used: int  # cells of running sequences
    cached: int  # cells in use that belong to no running sequence: the prefix cache; they are evicted when needed
    bytes: int  # bytes of all cells, used or not
    backend: str | None  # attention backend; None: the attention of the model


@dataclass(frozen=True, slots=True)
class TierStats:
    """One place for what leaves the device. docs/reference/statistics.md is generated from the comments."""

    name: str  # host, disk or remote
    bytes: int  # of all that is there
    limit_bytes: int  # cap on these
    written_bytes: int  # since the start
    read_bytes: int  # since the start
    down: bool  # whether it is not used now, because it has failed or was too slow
    failures: Mapping[str, int]  # operations that failed, by kind: each is a miss, or not stored


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What has left the device. docs/reference/statistics.md is generated from the comments."""

    tiers: tuple[TierStats, ...]  # described below, the fastest first
    snapshots: int  # that this engine can read
    staged_bytes: int  # of what is being written and read
    staging_bytes: int  # cap on these
    unwritten: bool  # whether something is left to be written
    written: int  # tokens written since the start
    restored: int  # tokens read back since the start
    declined: int  # requests since the start of which tokens were cheaper to compute than to read back
    failures: Mapping[str, int]  # snapshots that were not written, by kind

    def tier(self, name: str) -> TierStats:
        """Raises `KeyError`."""
        return {tier.name: tier for tier in self.tiers}[name]


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """What drafts do. docs/reference/statistics.md is generated from the comments."""

    drafter: str  # name of what proposes them
    refused: str | None  # why it is not used any more; None: it is used
    deepest: int  # the most drafts of a completion in a step
    rounds: int  # steps of completions in decode since the start, with drafts or without, counted for each completion
    drafted: int  # drafts that were computed since the start
    accepted: int  # of these, drafts that became tokens
    acceptance: tuple[float, ...]  # by position in the step: the rate of acceptance now, of about the last 20 drafts
    seconds_saved: float  # since the start, beside the expected seconds of plain steps; negative: lost
    cache_bytes: int  # bytes of the drafter's own K/V and recurrent state


@dataclass(frozen=True, slots=True)
class RecordingStats:
    """How steps run. docs/reference/statistics.md is generated from the comments."""

    refused: str | None  # why modules run all steps; None: a recording runs those that it can
    executor: str | None  # what runs the recording
    opaque: tuple[str, ...]  # classes of modules that run as they are within it, because they cannot be traced
    steps: int  # forwards that it ran since the start
    by_modules: Mapping[str, int]  # forwards that modules ran in its place, by reason


@dataclass(frozen=True, slots=True)
class PrefixStats:
    """What requests found in memory. docs/reference/statistics.md is generated from the comments."""

    asked: int  # tokens of prompts since the start that could have come from memory: all but the last of each
    matched: int  # of these, tokens that were found
    restored: int  # of these, tokens that were used
    sources: Mapping[str, int]  # restored tokens, by the tier that had them: device, host, disk, remote
    missed: Mapping[str, int]  # tokens that were asked for and computed, by the reason in the `recall` of the request
    forks: int  # sequences that began as copies of others since the start
    tokens: int  # tokens that the prefix tree has, those of running sequences included
    checkpoints: int  # checkpoints that it has
    lost: int  # tokens that it has lost since the start: evicted, removed, expired, or of no use any more
    lost_checkpoints: int  # checkpoints that it has lost since the start


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The state of an engine between two steps. docs/reference/statistics.md is generated from the
    comments."""

    at: float  # when it was so: seconds of the wall clock
    started: float  # when the engine was started, or started again after its process died: seconds of the wall clock
    running: int  # completions in prefill or decode
    waiting: int  # completions waiting for admission
    sequences: int  # sequences in memory: those of running completions
    steps: int  # steps since the start
    preemptions: int  # preemptions since the start
    cache_bytes: int  # bytes of K/V and recurrent state
    scratch_bytes: int  # bytes of the largest step
    staging_bytes: int  # bytes of the largest edit
    limit_bytes: int  # cap on the sum of these three, without what a draft model has
    groups: tuple[GroupStats, ...]  # described below
    prefixes: PrefixStats  # described below
    store: StoreStats | None  # described below; None: no store
    speculation: SpeculationStats | None  # described below; None: nothing is drafted
    recording: RecordingStats  # described below
    rows: int  # rows of recurrent state, without the null row
    rows_used: int  # rows of running sequences
    rows_cached: int  # rows in use that belong to no running sequence
    state_bytes: int  # bytes of all rows
    pinned: int  # tokens that are pinned
    pins_refused: int  # prompts that were not pinned because too much was pinned already
    pins_released: int  # pins that were released because a request that ran alone needed their memory
    shifts: int  # context shifts that rotated keys
    recomputes: Mapping[str, int]  # context shifts that recomputed text instead, by reason
    compacted: int  # cells moved by compaction
    adapter_bytes: int  # bytes of adapters, those included that only running requests use
    kv_events_lost: int  # how often subscribers of KV events were told to forget all blocks, as changes were lost

    @property
    def cells_used(self) -> int:
        return sum(group.used for group in self.groups)

    @property
    def cells_cached(self) -> int:
        return sum(group.cached for group in self.groups)
