"""processes: those that descend from one, what CPU time they have used, and their end. Linux alone says it."""

import os
import signal
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")
STARTED = 19  # column of a process


def family(pid: int) -> dict[int, str]:
    """A process and all that descend from it, also those in sessions of their own, with the times of their starts;
    none where the system does not say which do."""
    all_of_them = {int(place.name): fields for place in PROC.glob("[0-9]*") if (fields := _fields(int(place.name)))}
    found = [pid] if pid in all_of_them else []
    for one in found:
        found += [child for child, fields in all_of_them.items() if int(fields[1]) == one]
    return {one: all_of_them[one][STARTED] for one in found}


def cpu_seconds(pids: Iterable[int], root: Path = PROC) -> float:
    """User and system time of processes, and of their children that have ended; 0 for one that has ended."""
    ticks = sum(sum(map(int, _fields(pid, root)[11:15])) for pid in pids)
    return ticks / os.sysconf("SC_CLK_TCK")


def kill(processes: Mapping[int, str]) -> None:
    """Those of a `family` that have not ended."""
    for pid, started in processes.items():
        if (fields := _fields(pid)) and fields[STARTED] == started:  # else another process has its number
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _fields(pid: int, root: Path = PROC) -> list[str]:
    """Of `/proc/PID/stat`, from the state on; none if the process has ended."""
    try:
        return (root / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
