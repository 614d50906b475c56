"""What holds of an engine in a process of its own only: whatever becomes of the process, requests are answered as if
nothing had happened, or are told why not; and it ends with its front end, however that ends."""

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext, suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kvcellar import BadRequest, Constraint, Engine, EngineClosed, EngineDied, EngineFailed, KvcellarError, WrongStage
from kvcellar.engine.messages import Drawn, ExportStore
from kvcellar.events import Done, Failed
from kvcellar.frontend import process_client
from kvcellar.frontend.child_process import _kills_for_memory
from kvcellar.frontend.process_client import ProcessClient
from tests.engine.fork_server import FaultyForks, parent_of, there
from tests.engine.places import (
    ASKED,
    GREEDY,
    LONG,
    MATCHING,
    SEEDED,
    SMALL,
    Ear,
    at_rest,
    eventually,
    model_in,
    outcome,
    sent,
    submission,
)
from tests.engine.test_going_on import answered
from tests.sample.hostile import LARK
from tests.zoo import ARCHS

ROOT = Path(__file__).parents[2]
POISON = 99  # prompts that begin with it


@pytest.fixture(scope="module")
def server() -> Iterator[FaultyForks]:
    with closing(FaultyForks()) as started:
        yield started


@pytest.fixture(autouse=True)
def none_left(server: FaultyForks, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After each test, no process of an engine is there, and all faults were met."""
    monkeypatch.setattr(process_client, "PAUSE", 0.01)
    server.faults, server.started = [], []
    yield
    assert server.faults == []
    assert [pid for pid in server.started if there(pid)] == []


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_in(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, Any]:
    """What an engine on a thread answers."""
    with Engine(model, **SMALL) as engine:
        found = {name: asked(engine) for name, asked in ASKED.items()}
        for name in ("adapter", "other"):
            engine.adapters.add(name, model / name)
            found[name] = outcome(engine.generate([5, 6, 7], adapter=name, **GREEDY))
        return found


def in_a_process(server: FaultyForks, model: object, **settings: Any) -> Engine:
    return Engine(model, process=server, **SMALL | settings)  # type: ignore[arg-type]


def client_of(engine: Engine) -> ProcessClient:
    client = engine._client
    assert isinstance(client, ProcessClient)
    return client


def replaced(engine: Engine, pid: int) -> None:
    """Wait until another process than this one is the engine's."""
    client = client_of(engine)
    eventually(lambda: client.pid != pid and client.alive and not client.starting, "another engine is started")
    assert not there(pid)


def runs(*ears: Ear) -> None:
    for ear in ears:
        eventually(lambda ear=ear: ear.tokens(0), "it runs")


def failed(ear: Ear) -> Exception:
    last = ear.wait()[-1]
    assert isinstance(last, Failed), last
    return last.error


# -- requests go on ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        {"step": 1},
        pytest.param({"step": 3}, marks=pytest.mark.slow),
        {"step": 9, "with_signal": signal.SIGSEGV},
        {"step": 24},
        {"grammar": True},
        {"step": 12, "turn": True},
    ],
    ids=lambda fault: "-".join(fault),
)
def test_answers_are_those_of_an_engine_that_does_not_die(server, model, expected, fault) -> None:
    """With the tokens, the ends and the usage."""
    server.faults = [fault]
    with in_a_process(server, model) as engine, ThreadPoolExecutor(len(ASKED)) as pool:
        calls = {name: pool.submit(asked, engine) for name, asked in ASKED.items()}
        for name, call in calls.items():
            assert call.result() == expected[name], name
        assert len(server.started) == 2
        at_rest(engine)
        client_of(engine).check()


def test_a_request_of_which_the_engine_has_told_something_is_taken_in(server, model, expected) -> None:
    """Before it replies that, and if it dies before it does."""
    server.faults = [{"silent": True}]
    with in_a_process(server, model) as engine, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ASKED["greedy"], engine)
        eventually(answer.done, "it is answered")
        assert answer.result() == expected["greedy"]


def test_an_engine_that_dies_while_none_is_asked_is_replaced(server, model, expected) -> None:
    with in_a_process(server, model) as engine:
        assert ASKED["greedy"](engine) == expected["greedy"]
        os.kill(pid := client_of(engine).pid, signal.SIGKILL)
        eventually(lambda: not there(pid), "it is gone")
        assert ASKED["greedy"](engine) == expected["greedy"]
        assert engine.healthy
        replaced(engine, pid)


def test_an_engine_that_dies_again_before_it_can_go_on_is_replaced_again(server, model, expected) -> None:
    """One dies while it loads the model."""
    server.faults = [{"step": 5}, {"load": "dies"}]
    with in_a_process(server, model) as engine:
        assert ASKED["outputs"](engine) == expected["outputs"]
        assert len(server.started) == 3


def test_events_of_a_request_that_goes_on_are_in_order_and_each_token_is_told_once(server, model) -> None:
    asked = SEEDED | {"n": 3, "logprobs": 1, "prompt_logprobs": 1}
    with Engine(model, **SMALL) as engine:
        _, whole = sent(engine._client, (5, 6, 7), **asked)
        last = whole.wait()[-1]
    server.faults = [{"step": 10}]
    with in_a_process(server, model) as engine:
        _, ear = sent(engine._client, (5, 6, 7), **asked)
        done = ear.wait()[-1]
    for choice in range(3):
        assert answered(ear.events, choice) == answered(whole.events, choice)
    assert [type(event) for event in ear.events].count(type(whole.events[1])) == 1, "the prompt is scored once"
    assert isinstance(done, Done)
    assert isinstance(last, Done)
    assert done.usage == last.usage


def test_all_that_was_taken_in_goes_on_however_many_wait(server, model) -> None:
    server.faults = [{"step": 40}]
    with in_a_process(server, model, max_waiting=1, max_sequences=4) as engine:
        ears = []
        for one in range(5):
            ears.append(sent(engine._client, (5, 6, one), **GREEDY | {"max_tokens": 100})[1])
            runs(*ears[:4])
        for ear in ears:
            assert isinstance(ear.wait()[-1], Done)
        assert len(server.started) == 2


def test_a_cancel_while_the_engine_is_started_again_is_heard(server, model) -> None:
    server.faults = [{}, {"load": "dies"}]
    with in_a_process(server, model) as engine:
        client = client_of(engine)
        (number, ear), (_, other) = sent(client, (5, 6), **LONG), sent(client, (5, 7), **GREEDY | {"max_tokens": 200})
        runs(ear)
        os.kill(client.pid, signal.SIGKILL)
        eventually(lambda: client.starting, "it is started again")
        client.cancel(number)
        done = ear.wait()[-1]
        assert isinstance(done, Done)
        assert done.usage.completion_tokens == ear.tokens(0)
        assert isinstance(other.wait()[-1], Done)


def test_the_request_that_engines_die_of_fails_and_later_ones_are_answered(server, model, expected) -> None:
    """It kills each in the first step that it is in."""
    server.faults = [{"prompt": POISON, "with_signal": signal.SIGSEGV}] * 2
    with in_a_process(server, model) as engine:
        client = client_of(engine)
        _, ear = sent(client, (POISON, 6), **GREEDY)
        pid = client.pid
        eventually(lambda: client.pid != pid, "the first one dies")
        assert ASKED["seeded"](engine) == expected["seeded"], "it was in one of them only"
        assert isinstance(error := failed(ear), EngineDied)
        assert "2 engines in a row have died when they had begun with this request" in str(error)
        assert "SIGSEGV" in str(error)
        assert len(server.started) == 3


def test_streams_beside_a_request_that_engines_die_of_go_on(server, model) -> None:
    """Engines die under them, and only the request which is the reason fails: after the second death, or after the
    third where the first engine died before it had told that it began with it."""
    streams, how = [(5, 6, 7, at) for at in range(8, 12)], LONG | {"max_tokens": 600}
    with Engine(model, **SMALL) as engine:
        wanted = [answered(ear.events, 0) for ear in told_all(engine, streams, how)]
    server.faults = [{"prompt": POISON, "with_signal": signal.SIGSEGV}] * 3
    with in_a_process(server, model) as engine:
        ears = [sent(client_of(engine), prompt, **how)[1] for prompt in streams]
        runs(*ears)
        _, culprit = sent(client_of(engine), (POISON, 6), **GREEDY)
        assert isinstance(failed(culprit), EngineDied)
        for ear in ears:
            assert isinstance(ear.wait()[-1], Done)
        assert len(server.started) in (3, 4)
        assert [answered(ear.events, 0) for ear in ears] == wanted
        client_of(engine).check()


def told_all(engine: Engine, prompts: Sequence[tuple[int, ...]], how: Any) -> list[Ear]:
    ears = [sent(engine._client, prompt, **how)[1] for prompt in prompts]
    for ear in ears:
        ear.wait()
    return ears


def test_the_death_of_an_engine_that_has_told_tokens_of_a_request_does_not_count(server, model, expected) -> None:
    """It goes on in the third engine, though the second one dies before its first token."""
    begun, server.faults = len(server.started), [{"step": 9}, {"step": 1}]
    with in_a_process(server, model) as engine:
        assert ASKED["greedy"](engine) == expected["greedy"]
        assert len(server.started) == begun + 3


@pytest.mark.skipif(_kills_for_memory() is None, reason="this machine does not count what it kills for lack of memory")
@pytest.mark.parametrize("lacks", [False, True], ids=["enough memory", "too little memory"])
def test_an_engine_that_is_killed_counts_against_a_request_at_once_only_where_memory_lacked(
    server, model, expected, monkeypatch, lacks
) -> None:
    if lacks:
        monkeypatch.setattr("kvcellar.frontend.child_process._kills_for_memory", count().__next__)
    server.faults = [{"step": 1}] * 3
    with in_a_process(server, model) as engine, pytest.raises(EngineDied, match="SIGKILL") if lacks else nullcontext():
        assert ASKED["greedy"](engine) == expected["greedy"]


def test_a_request_whose_grammar_engines_die_of_is_refused(server, model, expected) -> None:
    server.faults = [{"grammar": True, "with_signal": signal.SIGSEGV}] * 2
    with in_a_process(server, model) as engine:
        with pytest.raises(EngineDied, match="2 engines in a row have died when they had begun with this request"):
            engine.generate([5, 6], **MATCHING)
        assert ASKED["schema"](engine) == expected["schema"]


def test_a_grammar_that_ends_its_compiler_ends_no_engine(server, model, expected) -> None:
    begun = len(server.started)
    with in_a_process(server, model) as engine:
        with pytest.raises(BadRequest, match="this grammar ends its compiler"):
            engine.generate([5, 6], constraint=Constraint.grammar(LARK["rules"](7500)))
        assert ASKED["schema"](engine) == expected["schema"]
        assert len(server.started) == begun + 1


def test_what_is_asked_beside_requests_is_refused_when_the_engine_dies(server, model, tmp_path) -> None:
    """Parts that have begun, too. It can be asked again."""

    class Dying:
        def read(self, n: int, /) -> bytes:
            os.kill(client.pid, signal.SIGKILL)
            return b""

    with in_a_process(server, model, store=str(tmp_path)) as engine:
        client = client_of(engine)
        engine.generate([*range(5, 60)], **GREEDY)
        parts = client.parts(ExportStore())
        next(parts)
        with pytest.raises(EngineFailed, match=r"ended by SIGKILL\. Send this again"):
            engine.cache.import_from(Dying())
        with pytest.raises(EngineFailed, match="an engine that has died; ask again"):
            next(parts)
        assert engine.stats().running == 0


def test_adapters_are_as_they_were_before_the_engine_died(server, model, expected) -> None:
    """Those that were added are there, and those that were removed are not."""
    with in_a_process(server, model, adapters={"adapter": model / "adapter", "gone": model / "other"}) as engine:
        engine.adapters.add("other", model / "other")
        engine.adapters.add("short", model / "other")
        for name in ("gone", "short"):
            engine.adapters.remove(name)
        assert sorted(client_of(engine)._adapters) == ["gone", "other"], "a new engine has no other names"
        os.kill(pid := client_of(engine).pid, signal.SIGKILL)
        replaced(engine, pid)
        assert [one.name for one in engine.adapters.list()] == ["adapter", "other"]
        for name in ("adapter", "other"):
            assert outcome(engine.generate([5, 6, 7], adapter=name, **GREEDY)) == expected[name]


def test_a_relative_path_is_of_the_folder_in_which_the_engine_was_opened(server, model, monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(model.parent)
    with in_a_process(server, model.name) as engine:
        monkeypatch.chdir(tmp_path)
        os.kill(pid := client_of(engine).pid, signal.SIGKILL)
        replaced(engine, pid)


# -- an engine that cannot be started ---------------------------------------------------------------------------------


def test_an_engine_that_cannot_be_started_again_is_given_up_with_the_reason(server, model, tmp_path) -> None:
    (place := tmp_path / "model").symlink_to(model)
    engine = in_a_process(server, place)
    client = client_of(engine)
    _, ear = sent(client, (5, 6), **LONG)
    runs(ear)
    place.unlink()
    os.kill(client.pid, signal.SIGKILL)
    reason = f"could not be started again: .*{place.name}"
    assert isinstance(error := failed(ear), EngineFailed)
    for call in (lambda: engine.generate([5]), engine.stats, lambda: client.submit(submission((5,), number=9), Ear())):
        with pytest.raises(EngineFailed, match=reason) as caught:
            call()
        assert str(caught.value) == str(error)
    assert not engine.healthy
    assert len(server.started) == 1 + process_client.STARTS
    engine.close()
    with pytest.raises(EngineClosed):
        engine.stats()


def test_an_engine_is_not_started_again_with_another_model(server, model, tmp_path) -> None:
    (place := tmp_path / "model").symlink_to(model)
    (tmp_path / "changed").mkdir()
    changed = model_in(tmp_path / "changed")
    (changed / "chat_template.jinja").write_text("{{ messages }}")
    with in_a_process(server, place) as engine:
        place.unlink()
        place.symlink_to(changed)
        os.kill(client_of(engine).pid, signal.SIGKILL)
        eventually(lambda: not engine.healthy, "it is given up")
        with pytest.raises(EngineFailed, match="files of the model have changed"):
            engine.stats()


def test_the_error_of_a_load_is_that_of_an_engine_on_a_thread(server, model, tmp_path) -> None:
    (empty := tmp_path / "empty").mkdir()
    for place, settings in (
        (tmp_path / "nothing", {}),
        (empty, {}),
        (model, {"cache_bytes": 1000}),
        (model, {"adapters": {"a": empty}}),
        (model, {"context": 10**6}),
        (model, {"draft": "mtp"}),
    ):
        errors = []
        for process in (False, server):
            with pytest.raises(KvcellarError, match=r".") as caught:
                Engine(place, process=process, **SMALL | settings)
            errors.append((type(caught.value), str(caught.value)))
        assert errors[0] == errors[1]


def test_objects_of_this_process_are_refused(server) -> None:
    with pytest.raises(BadRequest, match="not a network"):
        in_a_process(server, ARCHS["llama"].build())
    with pytest.raises(BadRequest, match="not by a function"):
        in_a_process(server, None, draft=lambda *_: None)
    assert server.started == []


def test_a_process_of_another_version_is_refused(server, model) -> None:
    server.faults = [{"version": "0.0.0"}]
    with pytest.raises(EngineFailed, match=r"runs kvcellar 0\.0\.0, and this one .*Restart both"):
        in_a_process(server, model)


def test_a_process_that_dies_in_its_load_is_named(server, model) -> None:
    server.faults = [{"load": "dies"}]
    with pytest.raises(EngineFailed, match="was ended by SIGKILL while it loaded the model"):
        in_a_process(server, model)


@pytest.mark.parametrize("faults", [[], [{"load": "hangs"}]], ids=["reports", "hangs"])
def test_a_load_that_is_interrupted_leaves_no_process(server, model, faults) -> None:
    """Also one that reports nothing."""
    server.faults = faults

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        in_a_process(server, model, progress=interrupt)


# -- its log ----------------------------------------------------------------------------------------------------------


def test_what_the_process_logs_is_in_the_log_of_its_front_end(server, model, caplog) -> None:
    """The error that ends it, too, with where it was."""
    server.faults = [{"step": 3, "turn": True}]
    with in_a_process(server, model) as engine:
        engine.generate([5, 6], **GREEDY)
    logged = [one for one in caplog.records if one.name == "kvcellar.engine"]
    (error,) = [one for one in logged if "an error it did not expect" in one.getMessage()]
    assert error.levelno == logging.ERROR
    assert "in received" in error.getMessage()
    assert "RuntimeError: a defect of the engine itself" in error.getMessage()
    (death,) = [one for one in logged if "of the engine has ended with exit code 70" in one.getMessage()]
    assert logged.index(error) < logged.index(death)


# -- the end ----------------------------------------------------------------------------------------------------------


def test_a_process_that_stands_still_is_killed_and_replaced(server, model, monkeypatch) -> None:
    with in_a_process(server, model) as engine:
        client = client_of(engine)
        ear = sent(client, (5, 6), **GREEDY | {"max_tokens": 200})[1]
        runs(ear)
        os.kill(pid := client.pid, signal.SIGSTOP)
        monkeypatch.setattr(process_client, "STEP_SECONDS", 2.5)
        eventually(lambda: client.pid != pid, "it is replaced")
        monkeypatch.undo()
        assert isinstance(ear.wait()[-1], Done)
        assert not there(pid)


def test_signals_that_ask_for_the_end_are_for_the_front_end(server, model, expected) -> None:
    with in_a_process(server, model) as engine:
        pid = client_of(engine).pid
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(pid, number)
        assert ASKED["greedy"](engine) == expected["greedy"]
        assert client_of(engine).pid == pid


def test_an_engine_can_be_closed_while_it_is_started_again(server, model, monkeypatch) -> None:
    monkeypatch.setattr(process_client, "CLOSE_SECONDS", 600.0)  # no one has to be killed
    server.faults = [{}, {"load": "hangs"}]
    engine = in_a_process(server, model)
    client = client_of(engine)
    ears = [sent(client, (5, 6, one), **LONG)[1] for one in range(2)]
    runs(*ears)
    os.kill(pid := client.pid, signal.SIGKILL)
    eventually(lambda: client.pid != pid, "another one is started")
    waits = ThreadPoolExecutor(1).submit(lambda: engine.generate([5]))
    engine.close()
    for error in (*map(failed, ears), waits.exception()):
        assert isinstance(error, EngineClosed)
    assert not any(there(one) for one in server.started)


def test_a_process_that_does_not_end_is_killed(server, model, monkeypatch) -> None:
    monkeypatch.setattr(process_client, "CLOSE_SECONDS", 0.5)
    engine = in_a_process(server, model)
    os.kill(pid := client_of(engine).pid, signal.SIGSTOP)
    engine.close()
    assert not there(pid)


def test_a_receiver_that_submits_is_refused_as_it_would_wait_for_itself(server, model) -> None:
    with in_a_process(server, model) as engine:
        client, told = client_of(engine), threading.Event()

        def deliver(event: object) -> None:
            if isinstance(event, Done):
                with pytest.raises(WrongStage):
                    client.submit(submission((5,), number=client.number()), Ear())
                told.set()

        client.submit(submission((5, 6), number=client.number(), **GREEDY), deliver)
        assert told.wait(60)


def test_an_engine_is_closed_where_a_receiver_closes_it(server, model) -> None:
    engine, closed = in_a_process(server, model), threading.Event()
    client = client_of(engine)

    def deliver(event: object) -> None:
        if isinstance(event, Drawn):
            engine.close()
            closed.set()

    client.submit(submission((5, 6), number=client.number(), **LONG), deliver)
    assert closed.wait(60)
    engine.close()
    assert not there(server.started[0])


def test_an_engine_that_no_one_refers_to_ends(server, model) -> None:
    engine = in_a_process(server, model)
    pid = client_of(engine).pid
    del engine
    eventually(lambda: not there(pid), "it ends")


FRONT = """
import os, sys, time
from kvcellar import Engine
engine = Engine(sys.argv[1], process=True, threads=1, cache_bytes=8_000_000)
stream = engine.stream([5, 6], max_tokens=100_000, ignore_eos=True, shift=True)
next(stream)
if (fork := os.fork()) == 0:
    time.sleep(600)
print(engine._client.pid, fork, flush=True)
for _ in stream:
    pass
"""


def test_the_process_and_its_fork_server_end_when_their_front_end_is_killed(model) -> None:
    """Though a fork of the front end has its ends of their sockets still."""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    command = [sys.executable, "-c", FRONT, str(model)]
    with subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True) as front:
        assert front.stdout is not None
        pid, child = map(int, front.stdout.readline().split())
        server = parent_of(pid)
        assert there(pid)
        assert parent_of(server) == front.pid
        front.kill()
        front.wait()
        try:
            eventually(lambda: not there(pid) and not there(server), "they end")
        finally:
            for one in (pid, server, child):
                with suppress(ProcessLookupError):
                    os.kill(one, signal.SIGKILL)
