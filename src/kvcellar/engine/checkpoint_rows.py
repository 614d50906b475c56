"""checkpoint_rows: state rows for the checkpoints of a step, of models with recurrent layers."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise

from kvcellar.cache.memory import Memory
from kvcellar.engine.prefixes import Prefixes
from kvcellar.plan import Feed
from kvcellar.policy import trim


def with_rows(
    feeds: Sequence[Feed], memory: Memory, prefixes: Prefixes, evict: Callable[[None, int], bool]
) -> tuple[Feed, ...]:
    """The feeds of a step. Where too few state rows are free, checkpoints inside feeds replace those of the tree that
    are of less value, and are left out otherwise. `evict` frees a row that the step needs."""
    if memory.rows.capacity is None:
        return tuple(feeds)
    free_rows(memory, lambda: evict(None, 1), len(feeds))
    need, left_out = len(feeds), set[tuple[int, int]]()
    for saves, pos, seq in sorted((one for feed in feeds for one in _inside(feed)), reverse=True):
        if free_rows(memory, partial(prefixes.evict_row, saves), need + 1):
            need += 1
        else:
            left_out.add((seq, pos))
    return tuple(
        feed._replace(checkpoints=tuple(pos for pos in feed.checkpoints if (feed.seq, pos) not in left_out))
        for feed in feeds
    )


def free_rows(memory: Memory, evict: Callable[[], bool], need: int) -> bool:
    """Call `evict` until so many state rows are free. False if it returns False before."""
    rows = memory.rows
    trim(rows, most=0, spare=need)
    while (rows.free or 0) < need:
        if not evict():
            return False
    return True


def _inside(feed: Feed) -> Iterator[tuple[int, int, int]]:
    """The checkpoints inside a feed: how many tokens each saves, counted from the one before; its position; and the
    sequence."""
    for before, pos in pairwise((feed.pos.start, *feed.between)):
        yield pos - before, pos, feed.seq
