"""cpus: how many threads torch gets on a CPU. Standard library only.

torch's own default knows the CPUs that a process may run on, and not how much of them a container's quota lets it use.
More threads than that stand still together until the next period, in the middle of every product. So a quota is
rounded down: the slowest thread ends a product.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PER_CPU = 4  # threads for each logical CPU of the machine that may be asked for


@dataclass(frozen=True, slots=True)
class Threads:
    """How many, and what limits them."""

    count: int
    because: str


def most_threads() -> int:
    """That may be asked for. OpenMP keeps some bytes of each on the stack: 100000 overflow it, which ends the process
    without an error."""
    return PER_CPU * (os.cpu_count() or 1)


def threads_of(
    asked: int | None, default: int, *, root: Path = Path("/"), environment: Mapping[str, str] = os.environ
) -> Threads:
    """`asked`, or as many of torch's `default` as this process may use.

    `root` is where the kernel's `proc` and `sys` are. Where the user set OMP_NUM_THREADS, `default` follows it.
    """
    if asked is not None:
        return Threads(asked, "threads")
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
    """CPUs that each control group with a quota that this process is in may use, the nearest first."""
    for folder, version in control_groups(root, "cpu"):
        quota, period = _quota(folder, version)
        if quota.isdigit() and period.isdigit() and int(quota) and int(period):
            yield int(quota) / int(period)


def _quota(folder: Path, version: int) -> tuple[str, str]:
    """Microseconds of a period, and the period, as the kernel writes them; no number where there is no quota."""
    if version == 1:
        return read(folder / "cpu.cfs_quota_us"), read(folder / "cpu.cfs_period_us")
    quota, _, period = read(folder / "cpu.max").partition(" ")
    return quota, period


def control_groups(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """The folder and the version of each control group that limits this process by `controller`, the nearest first."""
    for line in read(root / "proc/self/cgroup").splitlines():
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


def read(file: Path) -> str:
    """A small file of the kernel; nothing where it is not there."""
    return file.read_text().strip() if file.is_file() else ""
