"""progress_line: one line on stderr with the stage of loading a model, if stderr is a terminal."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

from kvcellar.progress import Listener, Progress, listening

WITH_BAR = "{desc} {percentage:3.0f}%|{bar:30}| {n_fmt}/{total_fmt}"
OF_BYTES = "{desc} {percentage:3.0f}%|{bar:10}| {n_fmt}B/{total_fmt}B, {rate_fmt}"


class _Bar(tqdm):
    """tqdm without its monitor thread."""

    monitor_interval = 0


class ProgressLine:
    """The current stage, with a bar if its items are counted. `close` erases the line."""

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
                bar_format="{desc}" if not progress.total else OF_BYTES if progress.unit else WITH_BAR,
                unit=progress.unit or "it",
                unit_scale=bool(progress.unit),
                file=sys.stderr,
                leave=False,
                ncols=_columns(),
                nrows=20,  # tqdm would assume no rows for a terminal of unknown size
            )
        elif progress.total:
            self._bar.update(progress.done - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _columns() -> int:
    """Columns of the terminal; 80 if unknown."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except OSError:
        return 80


@contextmanager
def show_progress(*, quiet: bool) -> Iterator[Listener | None]:
    """Within the block, show progress reports if stderr is a terminal and not `quiet`. Erases the line at the end.
    Yields what shows a report, for those of other threads."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    line = ProgressLine()
    try:
        with listening(line.show):
            yield line.show
    finally:
        line.close()
