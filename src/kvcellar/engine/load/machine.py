"""machine: how many CPU threads and how much CPU memory this process may use.

The default of torch respects the CPU affinity of the process, but not the CPU quota of a container. Threads beyond the
quota are all stopped until its next period, in the middle of a matrix product, which lasts until its slowest thread is
done. So a quota is rounded down.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PER_CPU = 4  # threads for each logical CPU of the machine that a user may set


@dataclass(frozen=True, slots=True)
class Threads:
    """A number of threads, and what limits it."""

    count: int
    because: str


def most_threads() -> int:
    """The most that a user may set. OpenMP keeps some bytes of each on the stack: 100000 overflow it, which ends the
    process without an error."""
    return PER_CPU * (os.cpu_count() or 1)


def threads_of(
    wanted: int | None, default: int, *, root: Path = Path("/"), environment: Mapping[str, str] = os.environ
) -> Threads:
    """`wanted`, or as many of torch's `default` as this process may use.

    `root` is where the kernel's `proc` and `sys` are. Where the user set OMP_NUM_THREADS, `default` follows it.
    """
    if wanted is not None:
        return Threads(wanted, "threads")
    if environment.get("OMP_NUM_THREADS"):
        return Threads(min(default, most_threads()), "OMP_NUM_THREADS")
    limits = [Threads(default, "torch's default"), Threads(_allowed(), "the CPUs that this process may run on")]
    limits += [Threads(max(1, int(cpus)), f"a CPU quota of {cpus:g}") for cpus in _quotas(root)]
    return min(limits, key=lambda limit: limit.count)


def _allowed() -> int:
    """CPUs in the affinity mask, or all of them."""
    if sys.version_info >= (3, 13):
        return os.process_cpu_count() or 1
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _quotas(root: Path) -> Iterator[float]:
    """CPUs that each control group of this process with a quota may use, the innermost first."""
    for folder, version in _control_groups(root, "cpu"):
        quota, period = _quota(folder, version)
        if quota.isdigit() and period.isdigit() and int(quota) and int(period):
            yield int(quota) / int(period)


def _quota(folder: Path, version: int) -> tuple[str, str]:
    """Microseconds per period, and the period, as the kernel writes them; not a number where there is no quota."""
    if version == 1:
        return _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
    quota, _, period = _read(folder / "cpu.max").partition(" ")
    return quota, period


def _control_groups(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """Folder and version of each control group that limits this process by `controller`, the innermost first."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, version = root / "sys/fs/cgroup", 2
        elif controller in controllers.split(","):
            top, version = root / "sys/fs/cgroup" / controller, 1
        else:
            continue
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder == top.parent:
                break
            yield folder, version


def _read(file: Path) -> str:
    """A small file of the kernel; "" where it does not exist."""
    return file.read_text().strip() if file.is_file() else ""


def free_cpu_bytes(root: Path = Path("/")) -> int:
    """Bytes that this process could still allocate: of the machine, or of one of its control groups if that is less.

    `root` is where the kernel's `proc` and `sys` are.
    """
    return max(0, min([_free_of_machine(root), *_free_of_groups(root)]))


def _free_of_machine(root: Path) -> int:
    """What the kernel reports as available, cached files included."""
    meminfo = root / "proc/meminfo"
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return (
        os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    )  # a system that does not report it: assume half


def _free_of_groups(root: Path) -> Iterator[int]:
    """Bytes below the limit of each control group of this process with a limit, the innermost first."""
    for folder, version in _control_groups(root, "memory"):
        limit, used, files = (
            ("memory.max", "memory.current", "inactive_file")
            if version == 2
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        )
        most = _read(folder / limit)
        if most.isdigit():
            yield int(most) - int(_read(folder / used) or 0) + _stat(folder / "memory.stat", files)


def _stat(file: Path, name: str) -> int:
    for line in _read(file).splitlines():
        if line.split()[:1] == [name]:
            return int(line.split()[1])
    return 0
