"""threads: the threads that kernels of ours divide their work among (`threads.h`, `threads.cpp`). One set per process.

A kernel gets the address in its structure, with the number of threads that it may use; without an address it uses one.
"""

import ctypes
from collections.abc import Mapping

from kvcellar.kernels.compiled import SOURCES, library

SOURCE = SOURCES / "threads.cpp"


class Threads:
    """The threads of this process. Raises `NotCompiled` where they cannot be compiled, with the reason."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """`environment` names the compiler, and the directory of compiled libraries."""
        found = library(SOURCE, environment)
        found.kvcellar_threads.argtypes, found.kvcellar_threads.restype = [], ctypes.c_void_p
        self.address: int = found.kvcellar_threads()
