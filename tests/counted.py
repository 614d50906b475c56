"""Counts the lines of kvcellar that run, as a measure of cost that is the same on every machine."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import kvcellar

OURS = str(Path(kvcellar.__file__).parent)


def lines(act: Callable[[], object], below: str = "") -> int:
    """How many lines of ours ran, each turn of a loop counted; of the files `below` a folder, if that is given."""
    count = 0

    def line(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        count += event == "line"
        return line

    def enter(frame: FrameType, event: str, arg: object) -> Any:
        return line if frame.f_code.co_filename.startswith(f"{OURS}{below}") else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        act()
    finally:
        sys.settrace(before)
    return count
