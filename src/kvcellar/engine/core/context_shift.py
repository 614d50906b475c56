"""context_shift: free the context of a completion that has filled it, and the memory that this takes."""

from kvcellar.engine.core.request import Completion
from kvcellar.engine.core.scheduler import Scheduler
from kvcellar.engine.core.sequence_manager import SequenceManager
from kvcellar.errors import CacheFull


def shift(completion: Completion, manager: SequenceManager, scheduler: Scheduler, context: int) -> None:
    """Remove the oldest tokens of a completion that has `context` tokens.

    Whether K/V are moved or recomputed changes the text, so it must not depend on other requests. So if cells are
    missing, what no sequence uses is evicted, and other completions are preempted.
    """
    span = completion.overflow(context)
    while completion in scheduler.running:
        scheduler.current = completion
        try:
            if (reason := manager.shift(completion, span)) is not None:
                manager.drop(completion, span, reason)
            return
        except CacheFull as full:
            scheduler.current = None  # an error during eviction belongs to no completion
            short = full.need - full.free
            if manager.evict(full.group, short) or manager.clear_cache():
                continue
            if not (scheduler.preempt_last(completion) or manager.unpin()):
                scheduler.current = completion
                manager.drop(completion, span, f"too few free cells in group {full.group}")
                return
