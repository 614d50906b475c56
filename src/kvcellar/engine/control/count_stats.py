"""count_stats: the statistics of an engine, counted between two of its steps. No torch."""

import time
from typing import TYPE_CHECKING

from kvcellar.engine.stats import (
    EngineStats,
    GroupStats,
    PrefixStats,
    RecordingStats,
    SpeculationStats,
    StoreStats,
    TierStats,
)

if TYPE_CHECKING:
    from kvcellar.engine.load.build import Built
    from kvcellar.memory.prefixes import Prefixes
    from kvcellar.memory.store import Store


def stats(built: "Built") -> EngineStats:
    """To be called on the engine's thread, between two steps."""
    loop, memory, scheduler = built.loop, built.memory, built.loop.scheduler
    seeing = loop.manager.seeing
    rows_used = memory.rows.used
    return EngineStats(
        at=time.time(),
        started=loop.started,
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        waiting_tokens=scheduler.waiting_tokens,
        prefilling=scheduler.prefilling,
        max_sequences=built.settings.max_sequences,
        token_seconds=loop.token_seconds,
        restore_seconds=_restore_seconds(loop.manager.store),
        ended=loop.last.count,
        sequences=len(memory.sequences),
        steps=loop.steps,
        prefill_tokens=built.runner.prefill_tokens,
        decode_tokens=built.runner.decode_tokens,
        preemptions=scheduler.preemptions,
        cache_bytes=memory.storage.bytes,
        scratch_bytes=memory.storage.scratch,
        staging_bytes=memory.storage.staging,
        limit_bytes=built.capacity.budget,
        groups=_groups(built),
        prefixes=_prefix_stats(loop.manager.prefixes),
        store=_store_stats(loop.manager.store),
        speculation=_speculation_stats(built),
        recording=_recording_stats(built),
        cluster=None,
        rows=(rows := memory.rows.capacity or 0),
        rows_used=rows_used,
        rows_cached=rows - (memory.rows.free or 0) - rows_used,
        state_bytes=built.capacity.states.bytes,
        pinned=loop.manager.prefixes.tree.pins.tokens,
        pins_refused=loop.manager.pins_refused,
        pins_released=loop.manager.pins_released,
        shifts=loop.manager.shifts,
        recomputes=dict(loop.manager.recomputes),
        compacted=loop.compaction.moved,
        adapter_bytes=built.adapters.bytes,
        images_encoded=seeing.encoded if seeing is not None else 0,
        images_restored=seeing.restored if seeing is not None else 0,
        image_bytes=seeing.bytes if seeing is not None else 0,
        kv_events_lost=loop.manager.events.lost_changes if loop.manager.events is not None else 0,
    )


PROMPT = 512  # tokens: of that many, seconds of one are told


def _restore_seconds(store: "Store | None") -> float:
    return store.restores.restoring.seconds(PROMPT) / PROMPT if store is not None else 0.0


def _groups(built: "Built") -> tuple[GroupStats, ...]:
    memory, guest = built.memory, built.guest
    free, capacity, used = memory.free(), memory.storage.capacity(), memory.used()
    return tuple(
        GroupStats(
            group.name,
            len(group.layers),
            capacity[group.name],
            used[group.name],
            capacity[group.name] - free[group.name] - used[group.name],
            group.bytes(capacity[group.name], guest.dtype.itemsize),
            guest.backends[group.name].name if guest.mode == "flat" else None,
        )
        for group in memory.storage.groups
    )


def _prefix_stats(prefixes: "Prefixes") -> PrefixStats:
    found, tree = prefixes.totals, prefixes.tree.total()
    return PrefixStats(
        asked=found.asked,
        matched=found.matched,
        restored=found.restored,
        sources=dict(found.sources),
        missed=dict(found.missed),
        forks=found.forks,
        tokens=tree.tokens,
        checkpoints=tree.checkpoints,
        lost=found.lost + tree.lost,
        lost_checkpoints=found.lost_checkpoints + tree.lost_checkpoints,
    )


def _speculation_stats(built: "Built") -> SpeculationStats | None:
    if (found := built.loop.manager.drafting.speculator) is None:
        return None
    own = built.draft_capacity
    return SpeculationStats(
        drafter=found.drafter.name,
        refused=found.refused,
        deepest=found.deepest,
        rounds=found.totals.rounds,
        drafted=found.totals.drafted,
        accepted=found.totals.accepted,
        acceptance=found.depth.acceptance(),
        seconds_saved=found.totals.saved,
        cache_bytes=own.bytes if own is not None else 0,
    )


def _recording_stats(built: "Built") -> RecordingStats:
    recording = built.guest.recording
    if recording is None:
        return RecordingStats(built.guest.not_recorded, None, (), 0, {})
    opaque = tuple(recording.captured.opaque)
    return RecordingStats(None, recording.executor.name, opaque, recording.steps, dict(recording.by_modules))


def _store_stats(store: "Store | None") -> StoreStats | None:
    if store is None:
        return None
    transfers, restores = store.transfers, store.restores
    return StoreStats(
        tiers=tuple(
            TierStats(
                tier.name,
                tier.size(),
                tier.cap,
                transfers.traffic[tier.name, "written"],
                transfers.traffic[tier.name, "read"],
                transfers.down(number),
                dict(tier.failures),
            )
            for number, tier in enumerate(transfers.tiers)
        ),
        snapshots=len(store.catalogue),
        staged_bytes=transfers.staged(),
        staging_bytes=transfers.staging,
        unwritten=store.unwritten,
        written=store.written,
        restored=restores.restored,
        declined=restores.declined,
        failures=dict(store.failures),
    )
