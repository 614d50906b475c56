"""turns: two sides that decode in turn, a few steps each, so that whatever else the machine does falls on both alike.

Each side runs on its own thread and says `step()` whenever it has finished one. Both have read their prompts before the
first turn.
"""

import threading
import time

PATIENCE = 1800.0  # seconds that a side waits for the other before it gives up


class Side:
    """One of the two. `seconds` and `cpu` are what each of its steps took, without the time it waited."""

    def __init__(self, burst: int) -> None:
        self.seconds: list[float] = []
        self.cpu: list[float] = []  # of the whole process, in which nobody else has anything to do meanwhile
        self.other: Side | None = None
        self._burst, self._left = burst, burst
        self._go, self._ready = threading.Semaphore(0), threading.Event()
        self._since: tuple[float, float] | None = None
        self._over = False

    def step(self) -> None:
        """On the side's own thread. The first call only says that the prompts have been read."""
        if self._over:
            return
        if self._since is None:
            self._ready.set()
            self._wait()
            return
        now = _clocks()
        self.seconds.append(now[0] - self._since[0])
        self.cpu.append(now[1] - self._since[1])
        self._left -= 1
        if self._left == 0:
            assert self.other is not None
            self.other._go.release()
            self._wait()
        else:
            self._since = _clocks()

    def _wait(self) -> None:
        if not self._go.acquire(timeout=PATIENCE):
            raise TimeoutError("the other side never came back")
        self._left, self._since = self._burst, _clocks()

    def ready(self) -> None:
        """Wait until the side has read its prompts."""
        if not self._ready.wait(PATIENCE):
            raise TimeoutError("this side never began")

    def go(self) -> None:
        """Give the side its first turn."""
        self._go.release()

    def end(self) -> None:
        """This side takes no more turns: whoever waits for it, or for a turn, goes on."""
        self._over = True
        self._ready.set()
        self._go.release()
        if self.other is not None:
            self.other._go.release()


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def sides(burst: int) -> tuple[Side, Side]:
    """Two sides that know each other."""
    one, two = Side(burst), Side(burst)
    one.other, two.other = two, one
    return one, two
