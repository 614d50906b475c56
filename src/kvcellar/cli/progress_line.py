"""progress_line: shows on stderr what is being done: at a terminal in one line with a bar; elsewhere, as in the log of
a service, in a line for each stage that takes seconds."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread

import click
from tqdm import tqdm

from kvcellar.progress import Listener, Progress, listening, report, rounded

WITH_BAR = "{desc} {percentage:3.0f}%|{bar:30}| {n_fmt}/{total_fmt}"
OF_BYTES = "{desc} {percentage:3.0f}%|{bar:10}| {n_fmt}B/{total_fmt}B, {rate_fmt}"
APART = 2.0  # seconds to the first line and between two of them, without a terminal
AGAIN = 30.0  # seconds after which a stage that goes on is written again


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


class ProgressLog:
    """Without a terminal. A thread writes the lines, because a stage is reported when it begins: what is short writes
    none."""

    def __init__(self) -> None:
        self._stage = Progress("")
        self._ended = Event()
        self._thread = Thread(target=self._work, name="kvcellar-progress", daemon=True)
        self._thread.start()

    def show(self, progress: Progress) -> None:
        self._stage = progress

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _work(self) -> None:
        written, at = "", 0.0
        while not self._ended.wait(APART):
            now = self._stage
            if now.stage and (now.stage != written or time.monotonic() - at >= AGAIN):
                written, at = now.stage, time.monotonic()
                with suppress(OSError, ValueError):  # stderr is closed
                    click.echo(f"{now.stage}{_counted(now)} ...", err=True)


def _counted(progress: Progress) -> str:
    if not progress.total:
        return ""
    done, total = (rounded(one) if progress.unit else one for one in (progress.done, progress.total))
    return f" ({done} of {total})"


def _columns() -> int:
    """Columns of the terminal; 80 if unknown."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except OSError:
        return 80


@contextmanager
def working(stage: str) -> Iterator[None]:
    """Within the block, show one stage."""
    with show_progress():
        report(stage)
        yield


@contextmanager
def show_progress(*, quiet: bool = False, prints: bool = False) -> Iterator[Listener | None]:
    """Within the block, show progress reports, unless `quiet`; in lines, where the block `prints`. Yields what shows a
    report, for those of other threads."""
    if quiet:
        yield None
        return
    shown = ProgressLine() if sys.stderr.isatty() and not prints else ProgressLog()
    try:
        with listening(shown.show):
            yield shown.show
    finally:
        shown.close()
