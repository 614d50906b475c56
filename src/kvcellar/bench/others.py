"""others: the CPU time of the machine that other processes than those measured have had. Standard library only.

Wall time says how fast something is only where cores were idle. Linux counts the time of all CPUs in `/proc/stat`, with
what a hypervisor took, and that of a process in `/proc/PID/stat`.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path

BUSY = (0, 1, 2, 5, 6, 7)  # columns of `/proc/stat`: user, nice, system, interrupts, soft interrupts, stolen
IDLE = 0.05  # of the CPU time may be others': cores count as idle


class Others:
    """Counts from when it is made."""

    def __init__(self, pids: Sequence[int], *, root: Path = Path("/proc")) -> None:
        """`pids` are of the processes that are measured, beside this one. `root` is where the kernel's files are."""
        self._pids, self._root = (*pids, os.getpid()), root
        self._began, self._before = time.perf_counter(), self._clocks()

    def share(self) -> float | None:
        """The part of all CPU time so far that other processes had; None where the system does not count it."""
        after, seconds = self._clocks(), time.perf_counter() - self._began
        if self._before is None or after is None:
            return None
        busy, measured = after[0] - self._before[0], after[1] - self._before[1]
        return max(0.0, busy - measured) / (seconds * (os.cpu_count() or 1))

    def _clocks(self) -> tuple[float, float] | None:
        """CPU seconds of all processes, and of those measured."""
        try:
            columns = (self._root / "stat").read_text().partition("\n")[0].split()[1:]
        except OSError:
            return None
        ticks = os.sysconf("SC_CLK_TCK")
        return sum(int(columns[at]) for at in BUSY) / ticks, sum(map(self._ticks, self._pids)) / ticks

    def _ticks(self, pid: int) -> int:
        """User and system time of a process, and of its children that have ended; 0 if it has ended."""
        try:
            text = (self._root / str(pid) / "stat").read_text()
        except OSError:
            return 0
        return sum(map(int, text.rpartition(")")[2].split()[11:15]))
