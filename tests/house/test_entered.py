"""How many files of the package one generate runs code of: what a reader has to read to follow a token."""

import sys
import threading
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import kvcellar
from kvcellar import Engine
from kvcellar.engine.core.loop import Loop
from kvcellar.frontend.thread_client import ThreadClient

SRC = Path(kvcellar.__file__).parent
LOOP = "kvcellar-engine"  # the name of its thread
APART = (Loop._compact.__code__, ThreadClient._look.__code__)
MOST = 59  # to be lowered whenever the number falls; three are of the seam between a front end and an engine


class Entered:
    """Files of the package in which functions are called, in all threads that are started while `profile` is set.

    Compaction and a look at the statistics are not counted: they are not of a request.
    """

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.counting = False
        self._apart = False

    def profile(self, frame: FrameType, event: str, arg: Any) -> None:
        if event in ("call", "return") and frame.f_code in APART:
            self._apart = event == "call"
        elif event != "call" or not self.counting or (self._apart and threading.current_thread().name == LOOP):
            return
        elif (file := Path(frame.f_code.co_filename)).is_relative_to(SRC):
            self.files.add(str(file.relative_to(SRC)))


@contextmanager
def profiled(profile: Callable[[FrameType, str, Any], None]):
    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def test_one_generate_enters_few_files() -> None:
    entered = Entered()
    with profiled(entered.profile), Engine(threads=1) as engine:
        engine.generate("def main():", max_tokens=2)  # without what is imported or made at first use
        entered.counting = True
        engine.generate("class Cellar:\n", max_tokens=8)
        entered.counting = False
    found = sorted(entered.files)
    assert {"engine/core/loop.py", "engine/models/seam.py", "engine/sample/draw.py", "text/output.py"} <= set(found), (
        "it was not seen"
    )
    assert len(found) <= MOST, f"{len(found)} files: {', '.join(found)}"
