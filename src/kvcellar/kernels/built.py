"""built: kernels that a wheel brings compiled, so that its users need no compiler. Python's standard library alone: the
build of the wheel (`hatch_build.py`) loads this file by its path.

A wheel has `built/LEVEL/SOURCE-INPUTS-CONTENT.so` beside the sources, for each level of its kind of processor. INPUTS
is a digest of the source, of the headers of ours that it includes and of the options of the level; CONTENT is that
of the library's own bytes. A checkout has none, nor has a wheel for any platform.

Always true:
  * a library of a level is loaded only on a CPU that has all of its features, and only if it was made of the sources
    that are here and its bytes have the digest in its name;
  * the levels of a kind of processor are sorted, the best first, and any CPU of that kind has the features of the last.
"""

import hashlib
import platform
import re
import shlex
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

BUILT = "built"  # the folder beside the sources
OPTIONS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread")
INCLUDE = re.compile(r'^#include "([\w.]+)"$', re.MULTILINE)
CPUINFO = Path("/proc/cpuinfo")


class Level(NamedTuple):
    """`options` are those of GCC; `features`, as Linux names them, those that a CPU needs to run what they make."""

    name: str
    options: tuple[str, ...]
    features: frozenset[str]


_V3 = frozenset("pni ssse3 cx16 sse4_1 sse4_2 popcnt lahf_lm avx avx2 bmi1 bmi2 f16c fma abm movbe xsave".split())
_V4 = _V3 | frozenset("avx512f avx512bw avx512cd avx512dq avx512vl".split())
_VNNI = _V4 | {"avx512_vnni"}
_BF16 = _VNNI | {"avx512_bf16", "avx512vbmi"}
_V4_OPTION = "-march=x86-64-v4"
_BF16_OPTIONS = (_V4_OPTION, "-mavx512vnni", "-mavx512bf16", "-mavx512vbmi")
LEVELS: Mapping[str, tuple[Level, ...]] = MappingProxyType(
    {
        "x86_64": (
            Level("amx", (*_BF16_OPTIONS, "-mamx-tile", "-mamx-bf16"), _BF16 | {"amx_tile", "amx_bf16"}),
            Level("avx512_bf16", _BF16_OPTIONS, _BF16),
            Level("avx512_vnni", (_V4_OPTION, "-mavx512vnni"), _VNNI),
            Level("avx512", (_V4_OPTION,), _V4),
            Level("avx2", ("-march=x86-64-v3",), _V3),
            Level("sse2", ("-march=x86-64",), frozenset()),
        ),
        "aarch64": (
            Level("bf16", ("-march=armv8.2-a+bf16",), frozenset("asimd atomics crc32 asimdrdm bf16".split())),
            Level("neon", ("-march=armv8-a",), frozenset()),
        ),
    }
)


def sources(source: Path) -> list[Path]:
    """A source, and each header of ours that it includes, directly or through another."""
    files = [source]
    for file in files:  # which grows
        for name in INCLUDE.findall(file.read_text("utf-8")):
            if (header := source.parent / name) not in files:
                files.append(header)
    return files


def digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def stem_of(source: Path, made_by: Sequence[bytes]) -> str:
    """The name of what a source makes, before the digest of its content."""
    parts = (*(file.read_bytes() for file in sources(source)), *made_by)
    return f"{source.stem}-{digest_of(b''.join(hashlib.sha256(part).digest() for part in parts))}"


def built_stem(source: Path, level: Level) -> str:
    return stem_of(source, [shlex.join([*OPTIONS, *level.options]).encode()])


def level_of(machine: str, features: frozenset[str]) -> Level | None:
    """The best level for a CPU; None: there is none for such a processor."""
    return next((one for one in LEVELS.get(machine, ()) if one.features <= features), None)


@lru_cache(maxsize=1)
def level_here(cpuinfo: Path = CPUINFO) -> Level | None:
    """That of this machine. Linux reports in `cpuinfo` what CPUID says and the kernel allows; of several kinds of
    cores, what all have."""
    try:
        lines = re.findall(r"^(?:flags|Features)\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE)
    except OSError:
        return None
    return (
        level_of(platform.machine(), frozenset.intersection(*(frozenset(one.split()) for one in lines)))
        if lines
        else None
    )


def folder_of(source: Path) -> tuple[Level, Path] | None:
    """Where libraries of the sources beside `source` are that this CPU can run; None: there are none."""
    if (level := level_here()) is None or not (folder := source.parent / BUILT / level.name).is_dir():
        return None
    return level, folder
