"""loading: one line on stderr that says what is being done while a model is loaded, at a terminal."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

from kvcellar.progress import Progress, listening

COUNTED = "{desc} {percentage:3.0f}%|{bar:30}| {n_fmt}/{total_fmt}"


class _Bar(tqdm):
    """tqdm's, without a thread that watches it."""

    monitor_interval = 0


class Line:
    """The line: the present stage, with a bar where things are counted. `close` erases it."""

    def __init__(self) -> None:
        self._bar: _Bar | None = None
        self._stage, self._total = "", 0

    def show(self, progress: Progress) -> None:
        if self._bar is None or (progress.stage, progress.total) != (self._stage, self._total):
            self.close()
            self._stage, self._total = progress.stage, progress.total
            self._bar = _Bar(
                total=progress.total or None,
                initial=progress.done,
                desc=f"{progress.stage} ...",
                bar_format=COUNTED if progress.total else "{desc}",
                file=sys.stderr,
                leave=False,
                ncols=_columns(),
                nrows=20,  # else a terminal that does not say its size is taken for one of no rows
            )
        elif progress.total:
            self._bar.update(progress.done - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _columns() -> int:
    """Of the terminal; 80 where it does not say."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except OSError:
        return 80


@contextmanager
def loading(*, quiet: bool) -> Iterator[None]:
    """Within the block, show what is reported, unless it is to be `quiet` or stderr is no terminal. Then erase it."""
    if quiet or not sys.stderr.isatty():
        yield
        return
    line = Line()
    try:
        with listening(line.show):
            yield
    finally:
        line.close()
