"""compiled: a C++ source of ours, made into a library by the user's own compiler, once, and kept in the user's cache;
or brought by a wheel (`built`), whose libraries come first, unless `$CXX` names a compiler.

Nothing is compiled before a caller needs it, and nothing is ever installed. The file of a library is named
`SOURCE-INPUTS-CONTENT.so`: INPUTS is a digest of its source, of the headers of ours that it includes (`#include "X.h"`,
beside it), of the options, and of what the compiler reports about itself and this CPU; CONTENT is the digest of the
library's own bytes.

Always true:
  * a library is loaded only if its bytes have the digest in its name: a file that a crash, a
    full disk or a bad disk has damaged is deleted and compiled again, and never runs;
  * a file gets its name only when all of its bytes are on the disk, so that a power cut leaves it whole or absent, and
    processes that compile the same source at the same time do not disturb each other.

`kvcellar.places` names their directory, `$CXX` the compiler.

Every kernel that a recorded step may call has one form, `int function(const void* call)`, which returns 0, 1 if there
is not enough memory, or 2 if an index is out of range. `call` is a structure of the kernel's own, filled in once: it
has the addresses of tensors and of the step's tables, whose content changes from step to step. So a recorded step knows
nothing of its kernels.

Kernels divide their work among the threads of `threads.cpp`, one set per process. A kernel gets its address in its
structure, with the number of threads that it may use; without an address it uses one.
"""

import ctypes
import errno
import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from kvcellar.errors import KvcellarError
from kvcellar.files import Files
from kvcellar.kernels import built
from kvcellar.kernels.built import built_stem, digest_of, folder_of, stem_of
from kvcellar.places import NoPlace, cache, make_private
from kvcellar.progress import report

log = logging.getLogger("kvcellar.compiled")

SOURCES = Path(__file__).parent  # of the C++ files
COMPILERS = ("c++", "g++", "clang++")  # tried in this order, if $CXX names none
OPTIONS = (*built.OPTIONS, "-march=native")
PATIENCE = 300.0  # seconds that a compiler may take
PAUSE = 0.25  # seconds between reports of it, by which a listener ends a load
FULL = ("No space left on device", "Disk quota exceeded")  # what compilers and linkers print of a full disk


INDEX = 2  # what a kernel returns where an index is out of range: `Error` in `step_types.h`


class NotCompiled(KvcellarError):
    """The source could not be compiled here. The message has the reason, and what to do."""


def library(source: Path, environment: Mapping[str, str]) -> ctypes.CDLL:
    """That of `source`: an intact one of the wheel or in the cache, else it is compiled. Raises `NotCompiled`."""
    if os.name != "posix":
        raise NotCompiled("it is only compiled on POSIX systems")
    if (brought := _brought(source, environment)) is not None:
        return brought
    compiler = _compiler(environment)
    stem = stem_of(source, [_about_compiler(environment), shlex.join([*compiler, *OPTIONS]).encode()])
    directory = _directory(environment)
    path = _intact(directory, stem) or _compile(compiler, source, directory, stem, environment)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        message = f"{path} is intact but cannot be loaded ({error}); name another directory in $XDG_CACHE_HOME"
        raise NotCompiled(message) from error


def compiled_for(environment: Mapping[str, str]) -> bytes:
    """What identifies the compiler, and the kind of CPU that it compiles for. Raises `NotCompiled`."""
    if not environment.get("CXX") and (found := folder_of(SOURCES / "any.cpp")) is not None:
        return f"built for {found[0].name}".encode()
    return _about_compiler(environment)


def described(environment: Mapping[str, str]) -> str:
    """Where the kernels of this machine come from, in a few words."""
    if not environment.get("CXX") and (found := folder_of(SOURCES / "any.cpp")) is not None:
        return f"brought by the package, for CPUs with {found[0].name}"
    try:
        return f"compiled by {shlex.join(_compiler(environment))}"
    except NotCompiled as missing:
        return f"none: {missing}"


def _brought(source: Path, environment: Mapping[str, str]) -> ctypes.CDLL | None:
    """The library that came with a wheel; None where there is none that can be used."""
    if environment.get("CXX") or (found := folder_of(source)) is None:
        return None
    level, folder = found
    for path in sorted(folder.glob(f"{built_stem(source, level)}-*.so")):
        try:
            if path.name.endswith(f"-{digest_of(path.read_bytes())}.so"):
                return ctypes.CDLL(str(path))
            log.warning("%s is damaged; install the package again. A compiler is used, if there is one", path)
        except OSError as error:
            log.warning("%s cannot be loaded: %s. A compiler is used, if there is one", path, error)
    return None


def _about_compiler(environment: Mapping[str, str]) -> bytes:
    compiler = _compiler(environment)
    return _about(tuple(compiler), tuple(environment.items()), _stamp(compiler[0], environment))


def _compiler(environment: Mapping[str, str]) -> list[str]:
    named = shlex.split(environment.get("CXX", ""))
    if named:
        if shutil.which(named[0], path=environment.get("PATH")) is None:
            raise NotCompiled(f"$CXX names {named[0]}, which is not there")
        return named
    for name in COMPILERS:
        if found := shutil.which(name, path=environment.get("PATH")):
            return [found]
    raise NotCompiled(f"there is no C++ compiler ({', '.join(COMPILERS)}); install one, or name it in $CXX")


def _directory(environment: Mapping[str, str]) -> Path:
    """Where libraries are kept: ours alone, because what can be written there can make this process run anything."""
    try:
        directory = cache(environment)
        make_private(directory)
    except NoPlace as error:
        raise NotCompiled(f"its library has no place: {error}") from error
    except OSError as error:
        raise NotCompiled(
            f"its library has no place in {error.filename}: {error.strerror}; set $XDG_CACHE_HOME"
        ) from error
    return directory


def _intact(directory: Path, stem: str) -> Path | None:
    """The library of that stem whose bytes have the digest in its name. Damaged ones are deleted, if possible."""
    for path in sorted(directory.glob(f"{stem}-*.so")):
        try:
            damage = None if path.name == f"{stem}-{digest_of(path.read_bytes())}.so" else "its content was changed"
        except OSError as error:
            damage = error.strerror
        if damage is None:
            return path
        log.warning("%s is damaged (%s); it is compiled again", path, damage)
        try:
            path.unlink()
        except OSError as error:
            log.warning("%s cannot be deleted: %s", path, error.strerror)
    return None


def _compile(compiler: Sequence[str], source: Path, directory: Path, stem: str, environment: Mapping[str, str]) -> Path:
    """Compile in a directory inside it, make the bytes durable, then name the file. Raises `NotCompiled`."""
    compiling = partial(report, f"compiling {source.name}, once")
    compiling()
    try:
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            made = Path(scratch) / "made.so"
            # The compiler's own files go there too: then there is one disk that can be full.
            _run([*compiler, *OPTIONS, "-o", str(made), str(source)], {**environment, "TMPDIR": scratch}, compiling)
            with made.open("rb") as file:
                path = directory / f"{stem}-{digest_of(file.read())}.so"
                os.fsync(file.fileno())
            made.replace(path)
            Files().sync_directory(directory)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = "no space left on its disk" if full else error.strerror
        raise NotCompiled(f"its library cannot be kept in {directory}: {reason}") from error
    log.debug("compiled %s into %s", source, path)
    return path


def _stamp(program: str, environment: Mapping[str, str]) -> tuple[int, ...]:
    """Other numbers for another program of this name."""
    path = shutil.which(program, path=environment.get("PATH"))
    found = os.stat(path) if path is not None else None
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns) if found is not None else ()


@lru_cache(maxsize=8)
def _about(compiler: tuple[str, ...], environment: tuple[tuple[str, str], ...], stamp: tuple[int, ...]) -> bytes:
    """What a compiler compiles for by `OPTIONS`: its macros, which have its version. Asked once in a process, and again
    where its `stamp` is another: each engine loads several kernels, and a compiler takes tens of milliseconds."""
    return _run([*compiler, *OPTIONS, "-dM", "-E", "-x", "c++", os.devnull], dict(environment))


def _run(command: Sequence[str], environment: Mapping[str, str], going_on: Callable[[], None] = lambda: None) -> bytes:
    """What a compiler prints, with its messages in English. What `going_on` raises ends it."""
    try:
        status, out, err = _ended(command, {**environment, "LC_ALL": "C"}, going_on)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotCompiled(f"{command[0]} does not run: {error}") from error
    if status == 0:
        return out
    lines = err.decode(errors="replace").splitlines()
    if any(words in line for line in lines for words in FULL):
        raise NotCompiled(f"{command[0]} cannot compile it: no space left on the disk that it writes to")
    first = next((line for line in lines if "error" in line), lines[0] if lines else f"status {status}")
    raise NotCompiled(f"{command[0]} cannot compile it: {first.strip()}")


def _ended(
    command: Sequence[str], environment: Mapping[str, str], going_on: Callable[[], None]
) -> tuple[int, bytes, bytes]:
    """Its status and what it prints, once it has ended. In a process group of its own: a compiler starts others."""
    latest = time.monotonic() + PATIENCE
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, process_group=0, stdout=pipe, stderr=pipe) as process:
        try:
            while True:
                try:
                    out, err = process.communicate(timeout=PAUSE)
                    return process.returncode, out, err
                except subprocess.TimeoutExpired:
                    if time.monotonic() > latest:
                        raise subprocess.TimeoutExpired(command, PATIENCE) from None
                going_on()
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise


class Kernel:
    """A function of a source of ours, `int function(const void* call)`. Raises `NotCompiled` where the source cannot be
    compiled, with the reason."""

    def __init__(self, source: Path, function: str, environment: Mapping[str, str]) -> None:
        """`environment` names the compiler, and the directory of compiled libraries."""
        self.library = library(source, environment)
        self.run = self.library[function]
        self.run.argtypes, self.run.restype = [ctypes.c_void_p], ctypes.c_int


@dataclass(frozen=True, slots=True)
class Native:
    """A call: the address of a compiled function, its structure, and what must live as long as the call may be made."""

    function: int
    call: ctypes.Structure
    alive: tuple[Any, ...] = ()

    @property
    def address(self) -> int:
        """Where the structure is."""
        return ctypes.addressof(self.call)


def error_of(returned: int) -> Exception:
    """What to raise where a kernel did not return 0."""
    if returned == INDEX:
        return IndexError("an index (a token's id, say) is not one of the rows that it selects from")
    return MemoryError("there is not enough memory for a kernel")


def address_of(function: Any) -> int:
    """The address of a function of a compiled library."""
    found = ctypes.cast(function, ctypes.c_void_p).value
    assert found is not None
    return found


THREADS = SOURCES / "threads.cpp"


class Threads:
    """The threads of this process. Raises `NotCompiled` where they cannot be compiled, with the reason."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """`environment` names the compiler, and the directory of compiled libraries."""
        found = library(THREADS, environment)
        found.kvcellar_threads.argtypes, found.kvcellar_threads.restype = [], ctypes.c_void_p
        self.address: int = found.kvcellar_threads()
        nodes = nodes_of()  # which counts until there are threads
        found.kvcellar_threads_nodes((ctypes.c_int64 * len(nodes))(*nodes), ctypes.c_int64(len(nodes)))
        self._touch = found.kvcellar_threads_touch
        self._touch.argtypes, self._touch.restype = [ctypes.c_void_p, ctypes.c_int64], None

    def touch(self, address: int, size: int) -> None:
        """Place the pages of memory that nothing has written on the nodes whose threads are going to read them."""
        self._touch(address, size)


def nodes_of(root: Path = Path("/")) -> list[int]:
    """By CPU, the number of its memory node among those with CPUs that this process may use; -1: it may not use it. One
    node where the system does not tell, or where it may use more CPUs of one than of another: work is divided equally.
    `root` is where the kernel's `sys` is."""
    allowed = os.sched_getaffinity(0) if sys.platform == "linux" else set[int]()
    found = [0 if cpu in allowed else -1 for cpu in range(max(allowed, default=-1) + 1)]
    folders = (root / "sys/devices/system/node").glob("node[0-9]*/cpulist")
    try:
        files = sorted(folders, key=lambda one: int(one.parent.name[4:]))
        lists = [cpus for file in files if (cpus := _cpus(file.read_text()) & allowed)]
    except (OSError, ValueError) as error:
        log.warning("memory nodes are not told apart: %s", error)
        return found
    if len(set(map(len, lists))) > 1:
        log.info("memory nodes are not told apart: this process may use %s of their CPUs", [*map(len, lists)])
        return found
    for node, cpus in enumerate(lists):
        for cpu in cpus:
            found[cpu] = node
    return found


def _cpus(text: str) -> set[int]:
    """Of a list such as "0-3,8"."""
    parts = [part.partition("-") for part in text.strip().split(",") if part]
    return {cpu for first, _, last in parts for cpu in range(int(first), int(last or first) + 1)}
