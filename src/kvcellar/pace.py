"""pace: long work in Python that leaves the interpreter to the other threads in between.

CPython runs one thread at a time, and takes the interpreter from a busy thread only after 5 ms
(`sys.getswitchinterval`). A step of the engine gives it up and asks for it again at each of its hundreds of operations;
beside a thread that is busy in Python, each of them may wait that long. So whatever takes long in proportion to what a
client sends rests between its pieces, and the others run meanwhile.

Always true:
  * between two rests a thread works for `WORK` seconds of its own CPU time and one piece;
  * what takes less than `FREE` seconds in all never rests.
"""

import time
from collections.abc import Callable

FREE = 0.02  # seconds of CPU time before the first rest
WORK = 0.002  # seconds of CPU time between two rests
REST = 0.004  # seconds; so others have two thirds of the time


class Pace:
    """For one piece of work, on the thread that made it. Pieces should take far less than 5 ms each."""

    def __init__(
        self, clock: Callable[[], float] = time.thread_time, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._until = clock() + FREE

    def breathe(self) -> None:
        """Between two pieces: rest, if it is time to."""
        if self._clock() > self._until:
            self._sleep(REST)
            self._until = self._clock() + WORK
