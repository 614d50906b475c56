"""samples: which metrics the statistics of an engine are. docs/reference/metrics.md is generated from the tables.

Values of labels are names of groups, tiers and reasons, of which there are few; never what a client has sent.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvcellar.engine.stats import EngineStats, GroupStats, TierStats

Key = tuple[str, tuple[str, ...]]  # name of a metric, values of its labels but the model
Values = Iterator[tuple[tuple[str, ...], float]]  # of the labels, and of the metric


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric of each model. `labels` are those beside `model_name`."""

    name: str
    text: str
    read: Callable[[EngineStats], Values]
    labels: tuple[str, ...] = ()


def add(sums: Counter[Key], stats: EngineStats, metrics: Sequence[Metric]) -> None:
    """Add the values of an engine: several may have one name."""
    for metric in metrics:
        for labels, value in metric.read(stats):
            sums[metric.name, labels] += value  # pyright: ignore[reportArgumentType] - a counter of fractions, too


def _one(read: Callable[[EngineStats], float]) -> Callable[[EngineStats], Values]:
    def values(stats: EngineStats) -> Values:
        yield (), read(stats)

    return values


def _by(read: Callable[[EngineStats], Mapping[str, float]]) -> Callable[[EngineStats], Values]:
    return lambda stats: (((label,), value) for label, value in read(stats).items())


def _groups(read: Callable[[GroupStats], float]) -> Callable[[EngineStats], Values]:
    return lambda stats: (((one.name,), read(one)) for one in stats.groups)


def _tiers(read: Callable[[TierStats], float]) -> Callable[[EngineStats], Values]:
    return lambda stats: (((one.name,), read(one)) for one in (stats.store.tiers if stats.store is not None else ()))


def _store(read: str) -> Callable[[EngineStats], Values]:
    """A number of the store; nothing without one."""
    return lambda stats: (((), getattr(one, read)) for one in [stats.store] if one is not None)


def _drafts(read: str) -> Callable[[EngineStats], Values]:
    """A number of the drafts; nothing where nothing is drafted."""
    return lambda stats: (((), getattr(one, read)) for one in [stats.speculation] if one is not None)


def _sources(stats: EngineStats) -> Values:
    found = stats.prefixes
    yield from (((tier,), tokens) for tier, tokens in found.sources.items())
    yield ("computed",), found.asked - found.restored


def _tier_failures(stats: EngineStats) -> Values:
    for tier in stats.store.tiers if stats.store is not None else ():
        yield from (((tier.name, kind), number) for kind, number in tier.failures.items())


GAUGES: tuple[Metric, ...] = (
    Metric("kvcellar_completions_running", "Completions in prefill or decode.", _one(lambda s: s.running)),
    Metric("kvcellar_completions_waiting", "Completions waiting for admission.", _one(lambda s: s.waiting)),
    Metric("kvcellar_cells", "Cells of a group of layers.", _groups(lambda g: g.cells), ("group",)),
    Metric("kvcellar_cells_used", "Cells of running sequences.", _groups(lambda g: g.used), ("group",)),
    Metric("kvcellar_cells_cached", "Cells of the prefix cache alone.", _groups(lambda g: g.cached), ("group",)),
    Metric("kvcellar_state_rows", "Rows of recurrent state.", _one(lambda s: s.rows)),
    Metric("kvcellar_state_rows_used", "Rows of running sequences.", _one(lambda s: s.rows_used)),
    Metric("kvcellar_state_rows_cached", "Rows of the prefix cache alone.", _one(lambda s: s.rows_cached)),
    Metric("kvcellar_cache_bytes", "Bytes of K/V and recurrent state, used or not.", _one(lambda s: s.cache_bytes)),
    Metric("kvcellar_scratch_bytes", "Bytes of the largest step.", _one(lambda s: s.scratch_bytes)),
    Metric("kvcellar_limit_bytes", "Cap on the cache, the largest step and edits.", _one(lambda s: s.limit_bytes)),
    Metric("kvcellar_adapter_bytes", "Bytes of adapters.", _one(lambda s: s.adapter_bytes)),
    Metric("kvcellar_prefix_tokens", "Tokens that the prefix tree has.", _one(lambda s: s.prefixes.tokens)),
    Metric("kvcellar_checkpoints", "Checkpoints that the prefix tree has.", _one(lambda s: s.prefixes.checkpoints)),
    Metric("kvcellar_pinned_tokens", "Tokens that are pinned.", _one(lambda s: s.pinned)),
    Metric("kvcellar_tier_bytes", "Bytes in a tier.", _tiers(lambda t: t.bytes), ("tier",)),
    Metric("kvcellar_tier_limit_bytes", "Cap on the bytes of a tier.", _tiers(lambda t: t.limit_bytes), ("tier",)),
    Metric("kvcellar_tier_down", "1 while a tier is not used, as it has failed.", _tiers(lambda t: t.down), ("tier",)),
    Metric("kvcellar_store_snapshots", "Snapshots in all tiers that the engine can read.", _store("snapshots")),
    Metric("kvcellar_store_staged_bytes", "Bytes that are being written or read.", _store("staged_bytes")),
)
COUNTERS: tuple[Metric, ...] = (
    Metric("kvcellar_steps", "Steps.", _one(lambda s: s.steps)),
    Metric("kvcellar_recorded_forwards", "Forwards that a recorded step ran.", _one(lambda s: s.recording.steps)),
    Metric(
        "kvcellar_module_forwards",
        "Forwards that the model's modules ran in its place.",
        _by(lambda s: s.recording.by_modules),
        ("reason",),
    ),
    Metric("kvcellar_preemptions", "Running completions that were preempted.", _one(lambda s: s.preemptions)),
    Metric(
        "kvcellar_asked_tokens",
        "Prompt tokens that could have come from memory: all but the last of each prompt.",
        _one(lambda s: s.prefixes.asked),
    ),
    Metric("kvcellar_matched_tokens", "Of these, tokens that were found.", _one(lambda s: s.prefixes.matched)),
    Metric("kvcellar_restored_tokens", "Of these, tokens that were used.", _one(lambda s: s.prefixes.restored)),
    Metric(
        "kvcellar_recomputed_tokens",
        "Tokens asked for that were computed, by the reason in the record of the request.",
        _by(lambda s: s.prefixes.missed),
        ("reason",),
    ),
    Metric("kvcellar_tokens_by_source", "Tokens asked for, by the tier that had them.", _sources, ("source",)),
    Metric("kvcellar_forks", "Sequences that began as copies of others.", _one(lambda s: s.prefixes.forks)),
    Metric("kvcellar_lost_tokens", "Tokens evicted, expired or removed.", _one(lambda s: s.prefixes.lost)),
    Metric(
        "kvcellar_lost_checkpoints",
        "Checkpoints evicted, expired or removed.",
        _one(lambda s: s.prefixes.lost_checkpoints),
    ),
    Metric("kvcellar_pins_refused", "Prompts not pinned, as too much was.", _one(lambda s: s.pins_refused)),
    Metric("kvcellar_pins_released", "Pins released for a request that ran alone.", _one(lambda s: s.pins_released)),
    Metric("kvcellar_shifts", "Context shifts that rotated keys.", _one(lambda s: s.shifts)),
    Metric(
        "kvcellar_shift_recomputes",
        "Context shifts that computed the text again.",
        _by(lambda s: s.recomputes),
        ("reason",),
    ),
    Metric("kvcellar_compacted_cells", "Cells moved by compaction.", _one(lambda s: s.compacted)),
    Metric("kvcellar_tier_written_bytes", "Bytes written to a tier.", _tiers(lambda t: t.written_bytes), ("tier",)),
    Metric("kvcellar_tier_read_bytes", "Bytes read from a tier.", _tiers(lambda t: t.read_bytes), ("tier",)),
    Metric("kvcellar_tier_failures", "Operations of a tier that failed.", _tier_failures, ("tier", "kind")),
    Metric("kvcellar_store_written_tokens", "Tokens written to the store.", _store("written")),
    Metric("kvcellar_store_restored_tokens", "Tokens read back from the store.", _store("restored")),
    Metric(
        "kvcellar_store_declined_requests",
        "Requests of which tokens were cheaper to compute than to read back.",
        _store("declined"),
    ),
    Metric("kvcellar_draft_rounds", "Decoding steps of completions, while a model drafts.", _drafts("rounds")),
    Metric("kvcellar_draft_tokens", "Drafts that were computed.", _drafts("drafted")),
    Metric("kvcellar_accepted_tokens", "Drafts that became tokens.", _drafts("accepted")),
    Metric("kvcellar_kv_events_lost", "Changes of the cache that subscribers lost.", _one(lambda s: s.kv_events_lost)),
)
