"""pace: long work in Python that periodically sleeps, so that other threads can run.

CPython runs one thread at a time and makes a busy thread release the interpreter lock only every 5 ms
(`sys.getswitchinterval`). A step of the engine releases and reacquires the lock in each of its hundreds of operations;
while another thread is busy in Python, each of them can wait that long. Therefore templates, which are code of a model,
sleep between their parts (`text/meter.py`).

Always true:
  * between two sleeps a thread works for at most `WORK` seconds of its own CPU time, and one part;
  * work that takes less than `FREE` seconds in all never sleeps.
"""

import time
from collections.abc import Callable

FREE = 0.02  # seconds of CPU time before the first sleep
WORK = 0.002  # seconds of CPU time between two sleeps
REST = 0.004  # seconds of one sleep; so other threads have two thirds of the time


class Pace:
    """One job, on the thread that created the object. Its parts should each take far less than 5 ms."""

    def __init__(
        self, clock: Callable[[], float] = time.thread_time, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._until = clock() + FREE

    def pause(self) -> None:
        """Call between two parts: sleeps if the CPU time since the last sleep is used up."""
        if self._clock() > self._until:
            self._sleep(REST)
            self._until = self._clock() + WORK
