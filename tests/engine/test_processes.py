"""A process that is forked while a network is served: nothing in the fork waits for a thread that is not there.

The forks are those of a process of its own, whose engine is in the middle of a step, with its locks held by threads.
Each fork ends with a traceback of where it waits, if it has not ended by itself before.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATIENCE = 240  # seconds; only a fork that waits for ever takes so long

PARENT = """
import faulthandler, json, multiprocessing, os, subprocess, sys, threading
import torch
from kvcellar import Engine
from kvcellar.sampling_params import SamplingParams
from tests.zoo import ARCHS

SETTINGS = {"cache_bytes": 40_000_000}
GREEDY = {"max_tokens": 3, "temperature": 0, "ignore_eos": True}
network = ARCHS["llama"].build()
engine = Engine(network, **SETTINGS)
expected = engine.generate([5, 6, 7], **GREEDY).token_ids
session = engine.session(chat=False)
session.send([5, 6], **GREEDY)
stream = engine.stream([5, 6, 7], max_tokens=400, temperature=0, ignore_eos=True, shift=True)
next(stream)


def computed():
    # in several threads, if torch has several
    return float(torch.ones(2_000_000).cos().sum() + (torch.ones(300, 300) @ torch.ones(300, 300)).sum())


def new_engine(network):
    with Engine(network, **SETTINGS) as mine:
        computed()
        assert mine.generate([5, 6, 7], **GREEDY).token_ids == expected


def closed():
    engine.close()
    engine.close()
    assert not engine.healthy
    stream.close()
    session.close()


CHILDREN = {
    "leave": lambda: None,
    "close": closed,
    "generate": lambda: engine.generate([5], **GREEDY),
    "submit": lambda: engine.submit([5], SamplingParams(), deliver=print),
    "stream on": lambda: [*stream],
    "stats": lambda: engine.stats(),
    "check": lambda: engine.check(),
    "session": lambda: session.send([5], **GREEDY),
    "the same network": lambda: new_engine(network),
    "many threads": lambda: Engine(ARCHS["llama"].build(), threads=2, **SETTINGS),
    "a new engine": lambda: new_engine(ARCHS["llama"].build()),
}


def child(name):
    faulthandler.dump_traceback_later(float(sys.argv[1]), exit=True)
    try:
        CHILDREN[name]()
        outcome = "done"
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    print(json.dumps([name, outcome]), flush=True)


def forked(name):
    process = os.fork()
    if process == 0:
        child(name)
        if name in ("leave", "close"):
            sys.exit(7)
        os._exit(7)  # the same without taking the interpreter down, which is a second of work each time
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    assert code == 7, f"{name}: {code}"


computed()
held, done = threading.Event(), threading.Event()


def hold():
    with engine._loop._inbox._gate:
        held.set()
        done.wait()


holder = threading.Thread(target=hold)
holder.start()
held.wait()
for name in CHILDREN:
    forked(name)
other = multiprocessing.get_context("fork").Process(target=child, args=("close",))
other.start()
other.join()
assert other.exitcode == 0
assert subprocess.run([sys.executable, "-c", ""], preexec_fn=os.getpid).returncode == 0
done.set()
holder.join()
assert engine.generate([5, 6, 7], **GREEDY).token_ids == expected
stream.close()
engine.close()
print(json.dumps(["parent", os.getpid()]))
"""


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    environment = dict(
        os.environ,
        PYTHONPATH=os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
        OMP_NUM_THREADS="2",  # a parallel region in a fork waits for threads that only its parent has
        OMP_WAIT_POLICY="passive",
        GOMP_SPINCOUNT="0",
    )
    command = [sys.executable, "-c", PARENT, str(PATIENCE)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return dict(json.loads(completion) for completion in ran.stdout.splitlines())


@pytest.mark.parametrize("call", ["generate", "submit", "stats", "check", "session"])
def test_in_a_fork_an_engine_says_whose_it_is(outcomes, call):
    assert outcomes[call].startswith(f"EngineClosed: the engine belongs to process {outcomes['parent']}, which this ")
    assert outcomes[call].endswith("was forked from; make a new one after the fork")


def test_in_a_fork_a_stream_that_has_begun_says_that_nothing_more_comes(outcomes):
    assert outcomes["stream on"].startswith(f"EngineClosed: the request belongs to process {outcomes['parent']}, ")


def test_a_fork_can_be_left_and_its_engine_closed_while_a_thread_of_its_parent_holds_the_locks(outcomes):
    assert (outcomes["leave"], outcomes["close"]) == ("done", "done")


def test_in_a_fork_the_network_of_the_parent_can_be_served(outcomes):
    assert outcomes["the same network"] == "done"


def test_in_a_fork_a_new_engine_works_in_one_thread(outcomes):
    assert outcomes["a new engine"] == "done"
    assert outcomes["many threads"].startswith("BadRequest: threads is 2, but torch belongs to process ")
