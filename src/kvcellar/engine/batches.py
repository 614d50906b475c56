"""batches: the results of several prompts that are submitted together, without filling the queue."""

from collections import deque
from collections.abc import Callable, Sequence

from kvcellar.engine.result import Collector, Result, Ticket
from kvcellar.errors import Overloaded

Started = tuple[Collector, Ticket]


def together(starts: Sequence[Callable[[], Started]], max_waiting: int) -> list[Result]:
    """The results of all prompts; an error of one cancels the others."""
    results: list[Result] = []
    running: deque[Started] = deque()
    try:
        for start in starts:
            while not _joins(running, start, max_waiting // 2):
                results.append(running[0][0].result())
                running.popleft()
        while running:
            results.append(running[0][0].result())
            running.popleft()
    finally:
        for _, ticket in running:
            ticket.cancel()
    return results


def _joins(running: deque[Started], start: Callable[[], Started], most: int) -> bool:
    """Submit one more prompt of a batch. False if some of the batch have to end first."""
    if len(running) > most:
        return False
    try:
        running.append(start())
    except Overloaded:
        if not running:
            raise
        return False
    return True
