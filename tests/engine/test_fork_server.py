"""What holds of processes of engines that are forks of one process, against those that are programs of their own."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from kvcellar import Engine, EngineFailed
from kvcellar.events import Done
from kvcellar.frontend.fork_server import ForkServer, Spawner, in_words, starter_for
from kvcellar.frontend.process_client import ProcessClient
from kvcellar.progress import Progress
from tests.engine.fork_server import FaultyForks, children, parent_of, there
from tests.engine.places import ASKED, GREEDY, LONG, SMALL, eventually, model_in, sent
from tests.engine.test_going_on import answered

ROOT = Path(__file__).parents[2]
ENDS = (0, 1, 7, 70, -signal.SIGKILL, -signal.SIGSEGV, -signal.SIGABRT, -(signal.SIGRTMIN + 3))


@pytest.fixture(scope="module")
def server() -> Iterator[FaultyForks]:
    with closing(FaultyForks()) as started:
        yield started


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_in(tmp_path_factory.mktemp("model"))


def process_of(engine: Engine) -> int:
    client = engine._client
    assert isinstance(client, ProcessClient)
    return client.pid


def opened(pid: int) -> dict[str, str]:
    """What each number of an open file is of, in a process."""
    found = dict[str, str]()
    for number in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found[number.name] = os.readlink(number)
    return found


def sockets(pid: int) -> set[str]:
    return {name for name in opened(pid).values() if name.startswith("socket:")}


def go_on() -> None:
    """Wait."""


def in_python(code: str) -> str:
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


# -- how a process ends -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ENDS)
def test_how_a_fork_has_ended_is_known_as_of_a_child(server, end) -> None:
    code = f"import os, time; os.kill(os.getpid(), {-end}) if {end} < 0 else os._exit({end}); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code]) as child:
        expected = child.wait()
    server.faults = [{"end": end}]
    link, fork = server.start("/", go_on)
    with link, fork:
        assert fork.wait(60.0) == fork.poll() == expected
    assert not there(fork.pid)


def test_a_wait_for_a_fork_is_given_up_and_signals_reach_it_until_it_has_ended(server) -> None:
    server.faults = [{"load": "hangs"}]
    link, fork = server.start("/", go_on)
    with link, fork:
        with pytest.raises(subprocess.TimeoutExpired):
            fork.wait(0.01)
        assert fork.poll() is None
        fork.send_signal(signal.SIGUSR1)
        assert fork.wait(60.0) == -signal.SIGUSR1
        fork.send_signal(signal.SIGUSR1)
        fork.kill()
        assert fork.poll() == -signal.SIGUSR1


def test_an_end_is_said_in_words() -> None:
    assert in_words(-signal.SIGSEGV) == "was ended by SIGSEGV"
    assert in_words(-60) == "was ended by signal 60"
    assert in_words(3) == "has ended with exit code 3"


def test_a_fork_that_fails_is_refused_with_the_reason_and_the_next_one_is_made(server, model) -> None:
    server.faults = [{"errno": errno.ENOMEM}]
    with pytest.raises(EngineFailed, match="could not be forked: Cannot allocate memory"):
        Engine(model, process=server, **SMALL)
    with Engine(model, process=server, **SMALL) as engine:
        assert len(engine.generate([5], **GREEDY).choices[0].token_ids) == 24


# -- what a fork has --------------------------------------------------------------------------------------------------


def test_engines_of_one_server_share_no_open_file_and_have_none_of_their_front_end(server, model, tmp_path) -> None:
    with (
        open(tmp_path / "file", "w") as file,
        Engine(model, process=server, **SMALL) as one,
        Engine(model, process=server, **SMALL) as other,
    ):
        os.set_inheritable(file.fileno(), True)
        parent = parent_of(process_of(one))
        assert parent == parent_of(process_of(other))
        with Engine(model, process=server, **SMALL) as last:
            found = [process_of(engine) for engine in (one, other, last)]
            for pid in found:
                files = opened(pid)
                assert (files["0"], files["1"]) == (os.devnull, os.devnull)
                assert files["2"] == opened(os.getpid())["2"]
                assert str(tmp_path / "file") not in files.values()
                assert len(sockets(pid)) == 2, "its link, and where its end is told"
                assert not sockets(pid) & sockets(os.getpid())
            assert len(set.union(*map(sockets, found))) == 6


def test_all_engines_of_a_server_answer(server, model) -> None:
    with Engine(model, **SMALL) as engine:
        expected = ASKED["seeded"](engine)
    with Engine(model, process=server, **SMALL) as one, Engine(model, process=server, **SMALL) as other:
        os.kill(gone := process_of(one), signal.SIGKILL)
        assert ASKED["seeded"](other) == expected
        eventually(lambda: process_of(one) != gone, "it is replaced")
        one.close()
        assert ASKED["seeded"](other) == expected
        assert len({*server.started[-3:]}) == 3


def test_a_fork_computes_in_several_threads(server, model) -> None:
    """None of torch has run in the server."""
    several = SMALL | {"threads": 2}
    with Engine(model, **several) as engine:
        expected = engine.generate([5, 6, 7], max_tokens=4, temperature=0.0).token_ids
    with Engine(model, process=server, **several) as engine:
        assert engine.generate([5, 6, 7], max_tokens=4, temperature=0.0).token_ids == expected
        assert len(os.listdir(f"/proc/{parent_of(process_of(engine))}/task")) == 1


def test_what_is_imported_asks_no_gpu() -> None:
    """A process that has asked for one cannot use it in a fork."""
    code = """
import torch
def asked(*_): raise AssertionError("a GPU was asked for")
torch.cuda.is_available = torch.cuda.device_count = torch.cuda._lazy_init = asked
import kvcellar.frontend.fork_process
print(torch.cuda.is_initialized())
"""
    assert in_python(code).split() == ["False"]


# -- the server ends --------------------------------------------------------------------------------------------------


def test_answers_are_those_of_an_engine_that_does_not_die_if_the_server_is_killed(server, model, caplog) -> None:
    with Engine(model, **SMALL) as engine:
        _, ear = sent(engine._client, (5, 6, 7), **LONG | {"max_tokens": 600})
        ear.wait()
        expected = answered(ear.events, 0)
    server.started = []
    with Engine(model, process=server, **SMALL) as engine:
        _, ear = sent(engine._client, (5, 6, 7), **LONG | {"max_tokens": 600})
        eventually(lambda: ear.tokens(0), "it runs")
        os.kill(parent_of(process_of(engine)), signal.SIGKILL)
        eventually(lambda: isinstance(ear.events[-1], Done), "it goes on, after all imports")
        assert answered(ear.events, 0) == expected
        eventually(lambda: len(server.started) == 2, "another engine is started")
        assert not there(server.started[0])
    logged = [record.getMessage() for record in caplog.records]
    assert any("of the engine has ended after the process that it was forked from" in line for line in logged)
    assert any("that engines are forked from was ended by SIGKILL; it is started again" in line for line in logged)


def test_signals_that_ask_for_the_end_are_for_the_front_end(server, model) -> None:
    with Engine(model, process=server, **SMALL) as engine:
        forker = parent_of(pid := process_of(engine))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(forker, number)
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: process_of(engine) != pid, "it is replaced")
        assert parent_of(process_of(engine)) == forker


def test_a_server_that_cannot_import_what_engines_need_is_named() -> None:
    class Broken(ForkServer):
        module = "kvcellar.no_such_module"

    with closing(Broken()) as server:
        for _ in range(2):
            with pytest.raises(EngineFailed, match="forked from has ended with exit code 1, before it has forked one"):
                server.start("/", go_on)


def test_a_load_that_is_interrupted_while_the_server_imports_leaves_no_process(model) -> None:
    begun = children()

    def interrupt(progress: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Engine(model, process=True, progress=interrupt, **SMALL)
    assert children() == begun


def test_an_engine_that_has_a_server_of_its_own_ends_it(model) -> None:
    begun = children()
    with Engine(model, process=True, **SMALL) as engine:
        pid = process_of(engine)
        assert parent_of(pid) in children() - begun
    assert children() == begun
    assert not there(pid)


# -- elsewhere --------------------------------------------------------------------------------------------------------


def test_a_process_is_forked_on_linux_only() -> None:
    assert isinstance(starter_for("linux"), ForkServer)
    for platform in ("darwin", "freebsd14"):
        assert isinstance(starter_for(platform), Spawner)


def test_an_engine_that_is_a_program_of_its_own_answers_as_a_fork(server, model) -> None:
    found = []
    for starter in (server, starter_for("darwin")):
        with Engine(model, process=starter, **SMALL) as engine:
            found.append(ASKED["seeded"](engine))
            parent = parent_of(process_of(engine))
        assert (parent == os.getpid()) == (starter is not server)
    assert found[0] == found[1]
