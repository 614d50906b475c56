"""Runs the `kvcellar` command: in this process, in a new process, and at a terminal."""

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from kvcellar.cli import progress_line
from kvcellar.cli.main import main

PATIENCE = 120.0  # seconds; only a test that fails waits so long
COMMAND = (sys.executable, "-m", "kvcellar")
_ANSI = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[=>]|\r")


@dataclass(frozen=True)
class Ran:
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str


class _Tty(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


def kvcellar(
    *words: str,
    stdin: bytes = b"",
    stdout: io.BytesIO | None = None,
    typed: str | None = None,
    apart: float = 3600.0,
    config: Path = Path("/nonexistent"),
) -> Ran:
    """Run the command in this process. Its streams are pipes, or with `typed` a terminal. Without one, stages that take
    `apart` seconds are written. `config` has the folder of the user's own settings."""
    stream = io.TextIOWrapper if typed is None else _Tty
    out, err = (stream(into, encoding="utf-8", write_through=True) for into in (stdout or io.BytesIO(), io.BytesIO()))
    streams = {"stdin": stream(io.BytesIO(stdin), encoding="utf-8"), "stdout": out, "stderr": err}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(sys, "argv", ["kvcellar", *words]))
        stack.enter_context(mock.patch.dict(os.environ, {"XDG_CONFIG_HOME": str(config)}))
        stack.enter_context(mock.patch.object(progress_line, "APART", apart))
        for name, stream in streams.items():
            stack.enter_context(mock.patch.object(sys, name, stream))
        if typed is not None:
            keys = stack.enter_context(create_pipe_input())
            keys.send_text(typed)
            stack.enter_context(create_app_session(input=keys, output=DummyOutput()))
        code = 0
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    return Ran(code, *(stream.buffer.getvalue().decode() for stream in (out, err)))  # type: ignore[attr-defined]


def environment(home: Path) -> dict[str, str]:
    """The environment of a new process, with a home directory of the test; compiled libraries are shared."""
    return {
        "XDG_CACHE_HOME": str(Path.home() / ".cache"),
        **os.environ,
        "HOME": str(home),
        "XDG_STATE_HOME": str(home / "state"),
        "XDG_CONFIG_HOME": str(home / "config"),
        "PROMPT_TOOLKIT_NO_CPR": "1",
        "TERM": "xterm",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }


def ordinary_interrupts() -> None:
    """Restore interrupts, which a script may have set to be ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def started(home: Path, *words: str) -> subprocess.Popen[str]:
    """The command in a new process, with pipes."""
    return subprocess.Popen(
        [*COMMAND, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(home),
        preexec_fn=ordinary_interrupts,
    )


class Terminal:
    """A process at a pseudo-terminal: types lines, reads output, presses Ctrl-C. A context manager."""

    def __init__(self, home: Path, words: Sequence[str]) -> None:
        self._screen, theirs = pty.openpty()
        self._process = subprocess.Popen(
            [*COMMAND, *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment(home),
            start_new_session=True,
            preexec_fn=self._own_terminal,
        )
        os.close(theirs)
        self._unread = ""
        self.seen = ""

    @staticmethod
    def _own_terminal() -> None:
        import fcntl
        import termios

        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        ordinary_interrupts()

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        os.close(self._screen)

    def type(self, line: str) -> None:
        self.press(line + "\r")

    def press(self, keys: str) -> None:
        os.write(self._screen, keys.encode())

    def until(self, pattern: str) -> str:
        """Read until `pattern` (a regular expression) matches. Returns everything up to its end."""
        limit = time.monotonic() + PATIENCE
        while not (found := re.search(pattern, self._unread)):
            assert time.monotonic() < limit, f"{pattern!r} is not printed; the screen has {self._unread[-2000:]!r}"
            if not self._read():
                raise AssertionError(f"{pattern!r} did not come before the end: {self._unread[-2000:]!r}")
        text, self._unread = self._unread[: found.end()], self._unread[found.end() :]
        return text

    def _read(self) -> bool:
        if not select.select([self._screen], [], [], 1.0)[0]:
            return True
        try:
            data = os.read(self._screen, 65536)
        except OSError:  # the process has closed its side
            return False
        text = _ANSI.sub("", data.decode(errors="replace"))
        self._unread += text
        self.seen += text
        return bool(data)

    def end(self) -> int:
        """Wait for the process. Returns its exit code."""
        limit = time.monotonic() + PATIENCE
        while self._process.poll() is None and time.monotonic() < limit:
            self._read()
        return self._process.wait(1)
