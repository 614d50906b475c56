"""logs: the log of a server on stderr: lines of text, or JSON objects, one per line.

Only the command line configures logging, while the command runs; the library never does.

Always true:
  * logging never waits for stderr and never raises its errors: a thread writes the lines, and lines that cannot be
    written (a full or closed pipe, a full disk) are dropped and counted;
  * a record begins with a timestamp, and its other lines begin with spaces; control characters are escaped, so that
    logged text cannot look like another record or control a terminal.
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
MAX_QUEUED = 10_000  # records waiting to be written; more are dropped
FLUSH_SECONDS = 1.0  # for queued records when the command ends


class TextFormat(logging.Formatter):
    """`TIME LEVEL logger: message`; further lines are indented."""

    def format(self, record: logging.LogRecord) -> str:
        head = f"{_stamp(record.created)} {record.levelname} {record.name}: "
        return head + "\n    ".join(map(_escaped, _lines(self, record)))


class JsonFormat(logging.Formatter):
    """One ASCII object per record. Request lines have named fields; other records have a `message`."""

    def format(self, record: logging.LogRecord) -> str:
        head = {"time": _stamp(record.created), "level": record.levelname.lower(), "logger": record.name}
        fields = vars(record).get("request") or {"message": "\n".join(_lines(self, record))}
        return json.dumps(head | fields, separators=(",", ":"))


class BackgroundHandler(logging.Handler):
    """Formats in the calling thread and writes in a thread of its own."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        """`write` may block, and may raise `OSError`."""
        super().__init__()
        self._write, self._process = write, os.getpid()
        self._queue: SimpleQueue[str | None] = SimpleQueue()  # `put` never blocks, even in a signal handler
        self._dropped = 0
        self._thread = threading.Thread(target=self._work, name="kvcellar-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:  # noqa: BLE001 - a formatting error must not reach the code that logs
            line = f"{_stamp(record.created)} ERROR kvcellar: a record of {record.name} could not be formatted"
        if os.getpid() != self._process or self._queue.qsize() >= MAX_QUEUED:
            self._dropped += 1  # a forked process does not have the thread
        else:
            self._queue.put(line)

    def close(self) -> None:
        """Write queued records, for at most `FLUSH_SECONDS`. May be called again."""
        self._queue.put(None)
        if os.getpid() == self._process:
            self._thread.join(FLUSH_SECONDS)
        super().close()

    def _work(self) -> None:
        while (line := self._queue.get()) is not None:
            dropped, self._dropped = self._dropped, 0
            note = (
                f"{_stamp(time.time())} WARNING kvcellar: {dropped} lines of the log were dropped\n" if dropped else ""
            )
            try:
                self._write(f"{note}{line}\n".encode(errors="backslashreplace"))
            except (OSError, ValueError):  # ValueError: the stream is closed
                self._dropped += dropped + 1


@contextmanager
def log_to_stderr(level: str, form: Format) -> Iterator[Callable[[], None]]:
    """Within the block the log goes to stderr; records of other libraries from level `warning` on. Yields the function
    that writes queued records and closes the log."""
    write = _stderr()
    handler = logging.NullHandler() if write is None else BackgroundHandler(write)
    handler.setFormatter(JsonFormat() if form == "json" else TextFormat())
    root, package, server = logging.getLogger(), logging.getLogger("kvcellar"), logging.getLogger("uvicorn.error")
    before = [(one, one.level) for one in (root, package, server)]
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    package.setLevel(level.upper())
    server.setLevel(logging.ERROR)  # its warnings, such as invalid HTTP, are lines of requests here
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
    """A function that writes to stderr without Python's buffers: a thread blocked in those would block the exit.

    None if there is no stderr: its file descriptor may belong to another file.
    """
    if sys.stderr is None:
        return None
    try:
        number = sys.stderr.fileno()
    except OSError:  # a stream without a file descriptor
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


def _stamp(seconds: float) -> str:
    """RFC 3339, UTC, milliseconds."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{int(seconds % 1 * 1000):03d}Z"
