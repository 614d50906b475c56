"""compiled: a C++ source of ours, made into a library by the user's own compiler, once, and kept in the user's cache.

Nothing is compiled before somebody asks, and nothing is ever installed. A library is kept under a digest of its source,
of how it was compiled and of what the compiler says of itself and of this CPU: another of any of them is another file.

`$XDG_CACHE_HOME/kvcellar` or `~/.cache/kvcellar` holds them; `$CXX` names the compiler.
"""

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvcellar.errors import KvcellarError

COMPILERS = ("c++", "g++", "clang++")  # tried in this order, if $CXX names none
OPTIONS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared", "-pthread")
PATIENCE = 300.0  # seconds that a compiler may take
MODE = 0o700  # of the directory: what lies in it is run


class NotCompiled(KvcellarError):
    """The source could not be made into a library here. Says why, and what to do."""


def library(source: Path, environment: Mapping[str, str]) -> ctypes.CDLL:
    """The library that `source` makes here, compiled unless that was done before. Raises `NotCompiled`."""
    if os.name != "posix":
        raise NotCompiled("it is only compiled on POSIX systems")
    compiler = _compiler(environment)
    text = source.read_bytes()
    about = _run([*compiler, *OPTIONS, "-dM", "-E", "-x", "c++", os.devnull])
    made_of = (text, about, shlex.join([*compiler, *OPTIONS]).encode())
    digest = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in made_of)).hexdigest()[:32]
    path = _directory(environment) / f"{source.stem}-{digest}.so"
    if not path.is_file():
        _compile(compiler, source, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NotCompiled(f"{path} cannot be loaded ({error}); delete it, and it is made again") from error


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
    """Where libraries are kept: ours alone, as whoever can write there can make us run anything."""
    named = environment.get("XDG_CACHE_HOME", "")
    base = Path(named) if os.path.isabs(named) else Path(environment.get("HOME", "/nonexistent")) / ".cache"
    directory = base / "kvcellar"
    try:
        directory.mkdir(MODE, parents=True, exist_ok=True)
        about = directory.stat()
    except OSError as error:
        raise NotCompiled(f"its library has no place in {directory}: {error.strerror}; set $XDG_CACHE_HOME") from error
    if about.st_uid != os.geteuid() or about.st_mode & 0o022:
        raise NotCompiled(f"others can write into {directory}; take that away from them, or set $XDG_CACHE_HOME")
    return directory


def _compile(compiler: Sequence[str], source: Path, path: Path) -> None:
    """Make `path`, or raise. Nobody ever sees half of it."""
    try:
        with tempfile.TemporaryDirectory(dir=path.parent) as directory:
            made = Path(directory) / path.name
            _run([*compiler, *OPTIONS, "-o", str(made), str(source)])
            made.replace(path)
    except OSError as error:
        raise NotCompiled(f"its library cannot be kept in {path.parent}: {error.strerror}") from error


def _run(command: Sequence[str]) -> bytes:
    """What a compiler prints."""
    try:
        return subprocess.run(command, capture_output=True, check=True, timeout=PATIENCE).stdout
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").splitlines()
        said = next((line for line in lines if "error" in line), lines[0] if lines else f"status {error.returncode}")
        raise NotCompiled(f"{command[0]} cannot compile it: {said.strip()}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotCompiled(f"{command[0]} does not run: {error}") from error
