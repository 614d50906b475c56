"""logs: what a server writes to stderr while it runs: lines of text, or JSON objects, one per line.

Only the command line configures logging, for as long as the command runs; the library never does.

Always true:
  * logging never waits for stderr and never raises its errors: lines are written by a thread of their own, and those
    that cannot be written (a pipe that is full or closed, a full disk) are dropped and counted;
  * a record begins with a timestamp, and a line that does not begin a record begins with spaces: control characters are
    escaped, so that nothing that is logged can look like another record, or change a terminal.
"""

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Literal

LEVELS = ("debug", "info", "warning", "error")
Format = Literal["text", "json"]
MOST_WAITING = 10_000  # records that wait to be written; more are dropped
LAST_LINES = 1.0  # seconds for what still waits when the command ends


class TextFormat(logging.Formatter):
    """`TIME LEVEL logger: message`, and indented lines where there is more to say."""

    def format(self, record: logging.LogRecord) -> str:
        head = f"{_time(record)} {record.levelname} {record.name}: "
        return head + "\n    ".join(map(_escaped, _lines(self, record)))


class JsonFormat(logging.Formatter):
    """One object per record, ASCII. A request's fields have names of their own; everything else is a `message`."""

    def format(self, record: logging.LogRecord) -> str:
        head = {"time": _time(record), "level": record.levelname.lower(), "logger": record.name}
        fields = vars(record).get("request") or {"message": "\n".join(_lines(self, record))}
        return json.dumps(head | fields, separators=(",", ":"))


class Background(logging.Handler):
    """Formats where it is called, and writes on a thread of its own."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        """`write` may block, and may raise `OSError`."""
        super().__init__()
        self._write, self._process = write, os.getpid()
        self._waiting: SimpleQueue[str | None] = SimpleQueue()  # its put never blocks, not even in a signal handler
        self._dropped = 0
        self._thread = threading.Thread(target=self._work, name="kvcellar-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:  # noqa: BLE001 - a record that cannot be formatted must not hurt the code that logs it
            line = f"{_time(record)} ERROR kvcellar: a record of {record.name} could not be formatted"
        if os.getpid() != self._process or self._waiting.qsize() >= MOST_WAITING:
            self._dropped += 1  # the thread did not come along into a forked process
        else:
            self._waiting.put(line)

    def close(self) -> None:
        """Write what waits, if that takes no longer than `LAST_LINES`. May be called again."""
        self._waiting.put(None)
        if os.getpid() == self._process:
            self._thread.join(LAST_LINES)
        super().close()

    def _work(self) -> None:
        while (line := self._waiting.get()) is not None:
            dropped, self._dropped = self._dropped, 0
            note = f"{_now()} WARNING kvcellar: {dropped} lines of the log were dropped\n" if dropped else ""
            try:
                self._write(f"{note}{line}\n".encode(errors="backslashreplace"))
            except (OSError, ValueError):  # ValueError: a stream that Python has closed
                self._dropped += dropped + 1


@contextmanager
def logged(level: str, form: Format) -> Iterator[Callable[[], None]]:
    """Within the block the log goes to stderr. Third parties are heard from `warning` on. Gives the call that writes
    what still waits, as far as that is possible, and ends the log."""
    write = _stderr()
    handler = logging.NullHandler() if write is None else Background(write)
    handler.setFormatter(JsonFormat() if form == "json" else TextFormat())
    root, ours, server = logging.getLogger(), logging.getLogger("kvcellar"), logging.getLogger("uvicorn.error")
    before = [(one, one.level) for one in (root, ours, server)]
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    ours.setLevel(level.upper())
    server.setLevel(logging.ERROR)  # what it warns about, like bad HTTP, is a request's line here
    logging.captureWarnings(True)
    try:
        yield handler.close
    finally:
        logging.captureWarnings(False)
        for one, earlier in before:
            one.setLevel(earlier)
        root.removeHandler(handler)
        handler.close()


def _stderr() -> Callable[[bytes], None] | None:
    """How to write to stderr, past Python's buffers: a thread that is stuck in one of those would hang the exit.

    None where there is no stderr: another file could have its number by now.
    """
    if sys.stderr is None:
        return None
    try:
        number = sys.stderr.fileno()
    except OSError:  # a stream without a file, as tests have it
        stream = sys.stderr
        return lambda data: print(data.decode(), end="", file=stream)

    def write(data: bytes) -> None:
        while data:
            data = data[os.write(number, data) :]

    return write


def _lines(formatter: logging.Formatter, record: logging.LogRecord) -> list[str]:
    lines = record.getMessage().split("\n")
    if record.exc_info:
        lines += formatter.formatException(record.exc_info).split("\n")
    return lines


def _escaped(line: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in line)


def _time(record: logging.LogRecord) -> str:
    return _stamp(record.created)


def _now() -> str:
    return _stamp(time.time())


def _stamp(seconds: float) -> str:
    """RFC 3339, UTC, milliseconds."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{int(seconds % 1 * 1000):03d}Z"
