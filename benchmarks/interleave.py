"""interleave: what is compared is measured in turn, so that other load on the machine slows all sides down alike.

Two decoders take turns of a few tokens each: each runs in its own thread and calls `step()` after each of its steps,
and both finish prefill before the first turn. Anything else is called by `in_rounds`.
"""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

TIMEOUT = 1800.0  # seconds that one decoder waits for the other


class Side:
    """One of the two decoders. `seconds` and `cpu` have the duration of each of its steps, without waiting."""

    def __init__(self, burst: int) -> None:
        self.seconds: list[float] = []
        self.cpu: list[float] = []  # of the whole process, in which nothing else runs meanwhile
        self.other: Side | None = None
        self._burst, self._left = burst, burst
        self._go, self._ready = threading.Semaphore(0), threading.Event()
        self._since: tuple[float, float] | None = None
        self._ended = False

    def step(self, tokens: int = 1) -> None:
        """Called on the decoder's thread after a step that gave so many tokens, which a turn is counted in. The first
        call only reports the end of prefill."""
        if self._ended:
            return
        if self._since is None:
            self._ready.set()
            self._wait()
            return
        now = _clocks()
        self.seconds.append(now[0] - self._since[0])
        self.cpu.append(now[1] - self._since[1])
        self._left -= tokens
        assert self.other is not None
        if self._left <= 0 and not self.other._ended:
            self.other._go.release()
            self._wait()
        else:
            self._since = _clocks()

    def _wait(self) -> None:
        if not self._go.acquire(timeout=TIMEOUT):
            raise TimeoutError("the other decoder did not finish its turn")
        self._left, self._since = self._burst, _clocks()

    def wait_ready(self) -> None:
        """Wait for the end of prefill."""
        if not self._ready.wait(TIMEOUT):
            raise TimeoutError("the decoder did not finish prefill")

    def go(self) -> None:
        """Start the first turn of this side."""
        self._go.release()

    def end(self) -> None:
        """Take no more turns; the other side goes on. Releases every thread that waits for this side or in it."""
        self._ended = True
        self._ready.set()
        self._go.release()
        if self.other is not None:
            self.other._go.release()


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def sides(burst: int) -> tuple[Side, Side]:
    """Two sides that alternate."""
    one, two = Side(burst), Side(burst)
    one.other, two.other = two, one
    return one, two


def in_rounds(rounds: int, *runs: Callable[[], T]) -> list[list[T]]:
    """The results of each of `runs`, which are called in turn, after a round that is not counted."""
    results = [[run() for run in runs] for _ in range(rounds + 1)]
    return [list(of_run) for of_run in zip(*results[1:], strict=True)]
