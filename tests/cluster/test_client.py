"""What holds of replicas that are used as one engine: whatever becomes of one of them, requests are answered as if
nothing had happened, or are told why not."""

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace as replace_fields

from kvcellar import BadRequest, Engine, EngineClosed, EngineDied, EngineFailed, Overloaded, RetentionOptions
from kvcellar.cluster import client as client_module
from kvcellar.cluster import observed
from kvcellar.cluster import replica as replica_module
from kvcellar.cluster.client import SILENT, ClusterClient, ReplicaLink, handed_over, load_of
from kvcellar.cluster.observed import Told as ReplicaTold
from kvcellar.cluster.replica import Replica
from kvcellar.cluster.routing import Router
from kvcellar.cluster.scaling import Meter
from kvcellar.cluster.sums import counted, merged, summed
from kvcellar.engine.control_replies import RECENT_SECONDS, AdapterInfo, NamespaceContents
from kvcellar.engine.messages import (
    AddAdapter,
    Admitted,
    Ask,
    Beat,
    Cancel,
    Drawn,
    Ended,
    EngineEvent,
    ListAdapters,
    ListNamespaces,
    ReadStats,
    Reply,
    Start,
    Submission,
)
from kvcellar.engine.stats import EngineStats, GroupStats, samples
from kvcellar.errors import ModelRefused
from kvcellar.events import Done, Failed, Score
from kvcellar.frontend import remote_client as remote_module
from kvcellar.frontend.control_clients import CacheClient
from kvcellar.frontend.remote_client import PLACEMENTS, RemoteClient, RemoteEngine, Request, dropped
from kvcellar.memory import restore_plan
from kvcellar.memory import store as store_module
from kvcellar.memory.prefix.node import ids_of
from kvcellar.memory.tiers.objects import DirectoryObjects
from kvcellar.wire import frame_of, packed
from tests.cluster.replicas import PREFILL, FaultyReplica, address_of, busy, client_of, gateway, states
from tests.engine.drafting import always_restored
from tests.engine.embedding_models import saved
from tests.engine.places import (
    ASKED,
    GREEDY,
    LONG,
    MATCHING,
    PATIENCE,
    SEEDED,
    SMALL,
    Ear,
    eventually,
    model_in,
    outcome,
    sent,
    submission,
)
from tests.engine.test_failures import loses_device
from tests.engine.test_going_on import answered, singly

SETTINGS: Any = SMALL | {"step_tokens": 16, "max_sequences": 4}
POISON = 99  # prompts that begin with it
PREFIX = tuple(range(5, 69))  # four blocks
Pair = tuple[FaultyReplica, FaultyReplica]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_in(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def alone(model: Path) -> Iterator[Engine]:
    """One engine, which does not die."""
    with Engine(model, **SETTINGS) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(alone: Engine) -> dict[str, Any]:
    return {name: asked(alone) for name, asked in ASKED.items()}


@pytest.fixture(scope="module")
def replicas(model: Path) -> Iterator[Pair]:
    with ExitStack() as opened:
        one, other = (opened.enter_context(closing(FaultyReplica(model, SETTINGS))) for _ in range(2))
        yield one, other


@pytest.fixture
def pair(replicas: Pair, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """After each test, nothing is left at any of them."""
    monkeypatch.setattr(client_module, "AGAIN", 0.02)
    monkeypatch.setattr(client_module, "TICK", 0.02)
    for one in replicas:
        one.mend()
    yield replicas
    for one in replicas:
        one.gate.set()
        one.rests()


def named(*replicas: Replica) -> dict[str, Replica]:
    return {f"replica-{number}": one for number, one in enumerate(replicas)}


def place_of(client: ClusterClient, number: int) -> str | None:
    """The replica where a request is now."""
    with client._changed:
        request = client._running.get(number)
        return None if request is None or request.engine is None else request.engine.name


def runs(*ears: Ear) -> None:
    for ear in ears:
        eventually(lambda ear=ear: ear.tokens(0), "it runs")


def failed(ear: Ear) -> Exception:
    last = ear.wait()[-1]
    assert isinstance(last, Failed), last
    return last.error


def begins_with_poison(asked: Submission) -> bool:
    return ids_of(asked.prompt)[0] == POISON


def all_asked(engine: Engine, expected: dict[str, Any], then: Callable[[], object] = lambda: None) -> None:
    """At once."""
    with ThreadPoolExecutor(len(ASKED)) as pool:
        calls = {name: pool.submit(asked, engine) for name, asked in ASKED.items()}
        then()
        for name, call in calls.items():
            assert call.result() == expected[name], name


# -- requests go on ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 3, 9, 24])
def test_answers_are_those_of_one_engine_when_a_replica_dies(pair: Pair, expected, steps: int) -> None:
    """What its last step told is lost."""
    first = pair[0]
    first.steps, first.at_step = steps, first.die_for_good
    with gateway(named(*pair)) as (engine, client):
        all_asked(engine, expected)
        assert first.deaths == 1
        assert client.moved > 0


def test_answers_are_those_of_one_engine_when_a_replica_dies_in_a_prefill(pair: Pair, alone: Engine) -> None:
    prompt = [*range(5, 90)]
    wanted = outcome(alone.generate(prompt, **SEEDED))
    died: list[Submission] = []

    def once(asked: Submission) -> bool:
        died.append(asked)
        return len(died) == 1

    for one in pair:
        one.fatal = once
    with gateway(named(*pair)) as (engine, client):
        assert outcome(engine.generate(prompt, **SEEDED)) == wanted
        assert (client.moved, len(died)) == (1, 2)


def test_answers_are_those_of_one_engine_while_each_replica_dies_and_comes_back(pair: Pair, expected) -> None:
    """Once each: a request that goes on alone may be refused after the second death that it has seen so."""
    for one, steps in zip(pair, (4, 9), strict=True):
        one.steps, one.at_step = steps, one.die
    with gateway(named(*pair)) as (engine, _):
        all_asked(engine, expected)
        assert all(one.deaths == 1 for one in pair)


@pytest.mark.parametrize("after", [2, 12])
def test_answers_are_those_of_one_engine_when_a_replica_loses_its_device(
    pair: Pair, model: Path, expected, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """It ends before any request is told of the error."""
    with closing(FaultyReplica(model, SETTINGS)) as losing, gateway(named(losing, pair[0])) as (engine, client):
        errors = loses_device(losing._client.built, monkeypatch, after)
        all_asked(engine, expected)
        assert (len(errors), losing.deaths) == (1, 1)
        assert client.moved > 0


def test_answers_are_those_of_one_engine_when_a_replica_leaves(pair: Pair, model: Path, expected) -> None:
    """It ends when its requests are elsewhere, and does not wait for longer."""
    with closing(FaultyReplica(model, SETTINGS)) as leaving, gateway(named(leaving, pair[0])) as (engine, client):
        leave = threading.Thread(target=leaving.leave, args=(600.0, 0.0))
        leaving.steps, leaving.at_step = 6, leave.start
        all_asked(engine, expected)
        eventually(lambda: leaving.at_step is None, "it leaves")
        leave.join(60)
        assert not leave.is_alive()
        assert not leaving.alive
        assert client.moved > 0
        assert ASKED["greedy"](engine) == expected["greedy"]


@contextmanager
def gated_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Directories are written to once it is set."""
    gate, write = threading.Event(), DirectoryObjects.write

    def writes(*arguments: Any) -> None:
        gate.wait(PATIENCE)
        write(*arguments)

    monkeypatch.setattr(DirectoryObjects, "write", writes)
    monkeypatch.setattr(store_module, "WAIT", 0.0)  # what any engine waits for at its end
    try:
        yield gate
    finally:
        gate.set()


def test_a_replica_that_leaves_writes_first_what_is_to_be_stored(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_restored(monkeypatch)
    monkeypatch.setattr(restore_plan, "PATIENCE", PATIENCE)
    settings, prompt = SETTINGS | {"store_remote": f"file://{tmp_path}"}, [*range(5, 205)]
    with (
        gated_store(monkeypatch) as gate,
        closing(FaultyReplica(model, settings)) as leaving,
        gateway(named(leaving)) as (engine, _),
    ):
        engine.generate(prompt, **GREEDY)
        leave = threading.Thread(target=leaving.leave, args=(PATIENCE, PATIENCE))
        leave.start()
        leave.join(0.5)
        assert leaving.alive, "it does not wait for what it writes"
        gate.set()
        leave.join(PATIENCE)
        assert not leaving.alive
    with closing(FaultyReplica(model, settings)) as new, gateway(named(new)) as (engine, _):
        recall = engine.generate(prompt, **GREEDY).recall
        assert recall is not None
        assert dict(recall.sources)["remote"] >= 190


def test_a_replica_leaves_though_what_it_writes_to_does_not_answer(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SETTINGS | {"store_remote": f"file://{tmp_path}"}
    with (
        gated_store(monkeypatch) as gate,
        closing(FaultyReplica(model, settings)) as leaving,
        gateway(named(leaving)) as (engine, _),
    ):
        engine.generate([*range(5, 205)], **GREEDY)
        assert leaving._unwritten()
        leaving.leave(PATIENCE, 0.2)
        assert not leaving.alive
        assert not gate.is_set()


def test_requests_wait_while_all_replicas_are_gone_and_go_on_at_a_new_one(pair: Pair, model: Path, expected) -> None:
    for one in pair:
        one.steps, one.at_step = 3, one.die_for_good
    with gateway(named(*pair)) as (engine, client), closing(FaultyReplica(model, SETTINGS)) as new:

        def joins() -> None:
            eventually(lambda: client.starting, "none is there")
            client.found([address_of("new", new)])

        all_asked(engine, expected, joins)
        assert [one.deaths for one in pair] == [1, 1]
        assert states(client) == {"new": "connected"}


@pytest.mark.parametrize("how", ["dies", "leaves"])
def test_events_of_a_request_that_goes_on_are_in_order_and_each_is_told_once(
    pair: Pair, alone: Engine, how: str
) -> None:
    asked = SEEDED | {"n": 3, "logprobs": 1, "prompt_logprobs": 1}
    alone.clear_cache()
    _, whole = sent(alone._client, (5, 6, 7), **asked)
    last = whole.wait()[-1]
    with gateway(named(*pair)) as (engine, client):
        engine.clear_cache()
        _, ear = sent(client, (5, 6, 7), **asked)
        one = next(one for one in pair if one.taken)
        one.steps, one.at_step = 10, one.die_for_good if how == "dies" else one.says_that_it_leaves
        done = ear.wait()[-1]
        assert client.moved == 1
    for choice in range(3):
        assert answered(ear.events, choice) == answered(whole.events, choice)
    kinds = [type(event) for event in singly(ear.events)]
    for kind in {*kinds} - {Admitted}:
        assert kinds.count(kind) == [type(event) for event in singly(whole.events)].count(kind), kind
    assert kinds.index(Done) == len(kinds) - 1
    assert isinstance(done, Done)
    assert isinstance(last, Done)
    assert done.usage == last.usage


# -- what a request is told -------------------------------------------------------------------------------------------


@pytest.fixture(params=["where it began", "where it has moved to"])
def moved(request: pytest.FixtureRequest) -> bool:
    return request.param == "where it has moved to"


def begun(client: ClusterClient, pair: Pair, ear: Callable[[EngineEvent], None], moved: bool) -> int:
    """The number of a request that runs."""
    number = client.number()
    client.submit(submission((5, 6), number=number, **LONG | {"n": 2}), ear)
    if moved:
        name = place_of(client, number)
        assert name is not None
        pair[int(name[-1])].die()
        eventually(lambda: place_of(client, number) not in (None, name), "it moves")
    return number


def drawn(ear: Ear, more: int = 3) -> None:
    before = ear.tokens(0), ear.tokens(1)
    eventually(lambda: ear.tokens(0) > before[0] + more and ear.tokens(1) > before[1] + more, "tokens are drawn")


def test_a_cancel_reaches_the_replica_where_the_request_is(pair: Pair, moved: bool) -> None:
    with gateway(named(*pair)) as (_, client):
        number = begun(client, pair, ear := Ear(), moved)
        drawn(ear)
        client.cancel(number)
        done = ear.wait()[-1]
        assert isinstance(done, Done)
        assert done.usage.completion_tokens == ear.tokens(0) + ear.tokens(1)


def test_a_stop_reaches_the_replica_where_the_request_is(pair: Pair, moved: bool) -> None:
    with gateway(named(*pair)) as (_, client):
        number = begun(client, pair, ear := Ear(), moved)
        drawn(ear)
        client.stop(number, 0, 2)
        eventually(lambda: any(isinstance(event, Ended) for event in list(ear.events)), "it is stopped")
        client.cancel(number)
        done = ear.wait()[-1]
        assert isinstance(done, Done)
        assert done.usage.completion_tokens == 2 + ear.tokens(1)


def test_a_stop_is_known_where_the_request_moves_to_later(pair: Pair) -> None:
    with gateway(named(*pair)) as (_, client):
        number = begun(client, pair, ear := Ear(), False)
        drawn(ear)
        client.stop(number, 0, 2)
        eventually(lambda: any(isinstance(event, Ended) for event in list(ear.events)), "it is stopped")
        before, told = place_of(client, number), (ear.tokens(0), ear.tokens(1))
        assert before is not None
        pair[int(before[-1])].die()
        eventually(lambda: place_of(client, number) not in (None, before) and ear.tokens(1) > told[1], "it goes on")
        client.cancel(number)
        done = ear.wait()[-1]
        assert isinstance(done, Done)
        assert ear.tokens(0) == told[0]
        assert done.usage.completion_tokens == 2 + ear.tokens(1)


def test_a_failure_reaches_the_replica_where_the_request_is(pair: Pair, moved: bool) -> None:
    with gateway(named(*pair)) as (_, client):
        number = begun(client, pair, ear := Ear(), moved)
        drawn(ear)
        client.fail(number, BadRequest("no text"))
        assert str(failed(ear)) == "no text"


def test_a_receiver_that_raises_ends_its_request_at_the_replica_where_it_is(pair: Pair, moved: bool) -> None:
    raises = threading.Event()
    ear = Ear()

    def deliver(event: EngineEvent) -> None:
        ear(event)
        if raises.is_set():
            raise RuntimeError("no one listens")

    with gateway(named(*pair)) as (_, client):
        begun(client, pair, deliver, moved)
        drawn(ear)
        raises.set()
        eventually(lambda: not client._running, "it is removed")


def test_what_is_told_while_no_replica_is_there_is_told_to_the_next_one(pair: Pair) -> None:
    for one in pair:
        one.steps, one.at_step = 5, one.die_for_good
    with gateway(named(*pair)) as (_, client):
        ears = [sent(client, (5, 6, 7 + at), **LONG) for at in range(4)]
        eventually(lambda: client.starting, "none is there")
        client.cancel(ears[0][0])
        client.stop(ears[1][0], 0, 1)
        client.fail(ears[2][0], BadRequest("no text"))
        client.cancel(ears[3][0])
        pair[0].down = False
        for at in (0, 1, 3):
            assert isinstance(ears[at][1].wait()[-1], Done)
        assert str(failed(ears[2][1])) == "no text"


def test_a_request_that_has_lost_its_replica_is_refused_when_none_has_come_for_long(pair: Pair, monkeypatch) -> None:
    """A prompt that is pinned waits on, for the replica that has its blocks."""
    monkeypatch.setattr(client_module, "WAIT_SECONDS", 0.1)
    with gateway(named(pair[0])) as (engine, client):
        engine.pin(PREFIX)
        _, ear = sent(client, (5, 6), **LONG)
        runs(ear)
        pair[0].die_for_good()
        assert isinstance(error := failed(ear), Overloaded)
        assert "no engine runs now" in str(error)
        client.check()
        assert [(one.deliver, len(one.blocks)) for one in client._running.values()] == [(dropped, 4)]
        pair[0].down = False
        eventually(lambda: not client._running, "it is pinned again")
        engine.clear_cache()


def test_a_request_for_which_no_replica_is_there_keeps_no_thread(pair: Pair, alone: Engine, monkeypatch) -> None:
    """It is told by events what becomes of it."""
    with gateway(named(pair[0])) as (_, client):
        pair[0].die_for_good()
        eventually(lambda: not client._engines, "it has gone")
        _, ear = sent(client, (5, 6, 7), **GREEDY)
        named_so = replace_fields(submission((5, 6), number=client.number(), **GREEDY), adapter="unknown")
        client.submit(named_so, unknown := Ear())
        assert client.asked
        client.check()
        pair[0].down = False
        assert answered(ear.wait(), 0) == answered(sent(alone._client, (5, 6, 7), **GREEDY)[1].wait(), 0)
        assert isinstance(failed(unknown), BadRequest)
        pair[0].die_for_good()
        eventually(lambda: not client._engines, "it has gone again")
        monkeypatch.setattr(remote_module, "WAIT_SECONDS", 0.1)
        assert isinstance(failed(sent(client, (5, 6, 7), **GREEDY)[1]), Overloaded)


def test_requests_that_no_replica_has_had_are_refused_where_too_many_wait(pair: Pair) -> None:
    with gateway(named(pair[0])) as (_, client):
        pair[0].die_for_good()
        eventually(lambda: not client._engines, "it has gone")
        sent(client, (5, 6, 7), **GREEDY)
        (request,) = client._running.values()
        assert not request.rest().goes_on
        request.leave("is being shut down")
        assert request.rest().goes_on
        pair[0].down = False


def test_a_request_that_is_cancelled_at_no_replica_ends_at_once_and_asks_for_none(pair: Pair) -> None:
    with gateway(named(pair[0])) as (_, client):
        number, ear = sent(client, (5, 6), **LONG | {"n": 2})
        other, heard = sent(client, (5, 7), **LONG)
        runs(ear, heard)
        drawn(ear)
        client.found([])
        pair[0].die_for_good()
        eventually(lambda: not client._engines and not client._links, "it has gone")
        assert client.asked
        client.fail(other, BadRequest("no text"))
        with client._changed:
            client.cancel(number)
            assert client._running[number].cancelled
        done = ear.wait()[-1]
        assert str(failed(heard)) == "no text"
        assert isinstance(done, Done)
        assert done.usage.completion_tokens == ear.tokens(0) + ear.tokens(1)
        ended = [event for event in ear.events if isinstance(event, Ended)]
        assert [(one.reason, one.tokens) for one in sorted(ended, key=lambda one: one.choice)] == [
            ("cancelled", ear.tokens(0)),
            ("cancelled", ear.tokens(1)),
        ]
        assert not client.asked


def test_a_replica_is_asked_for_at_first_while_there_is_one_and_where_a_request_waits(pair: Pair, expected) -> None:
    addresses = [address_of(name, one) for name, one in named(*pair).items()]
    with closing(client_of(to_zero=True)) as client:
        assert client.asked  # the model is not known yet
        client.found(addresses)
        client.wait()
        with closing(Engine.of(client)) as engine:
            engine.pin([5, 6, 7])
            assert client.asked
            client.found([])
            for one in pair:
                one.die_for_good()
            eventually(lambda: not client._engines, "they have gone")
            client.check()
            assert not client.asked  # for a prompt that is pinned
            assert not client.starting
            for looks in (engine.stats, engine.adapters.list, lambda: [*engine.cache.listed("device")]):
                with pytest.raises(Overloaded, match="no engine runs now; the next request starts one"):
                    looks()
            assert not client.asked
            with ThreadPoolExecutor(1) as pool:
                call = pool.submit(ASKED["greedy"], engine)
                eventually(lambda: client.asked, "it waits")
                for one in pair:
                    one.down = False
                client.found(addresses)
                assert call.result() == expected["greedy"]
            engine.clear_cache()


# -- prompts and what follows at different replicas -------------------------------------------------------------------


Roles = dict[str, FaultyReplica]


@pytest.fixture(scope="module")
def sharing(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Roles]:
    """One for prompts, and one that goes on, with a store that both use."""
    shared = SETTINGS | {"store_remote": f"file://{tmp_path_factory.mktemp('shared')}/store"}
    with ExitStack() as opened:
        yield {name: opened.enter_context(closing(FaultyReplica(model, shared))) for name in (PREFILL, "decode")}


@pytest.fixture
def roles(sharing: Roles, monkeypatch: pytest.MonkeyPatch) -> Iterator[Roles]:
    monkeypatch.setattr(client_module, "AGAIN", 0.02)
    monkeypatch.setattr(client_module, "handed_over", lambda stays, begins, handing: True)
    for one in sharing.values():
        one.mend()
        one._client.ask(client_module.ClearCacheAndStore(all_models=False))
    yield sharing
    for one in sharing.values():
        one.rests()


def test_answers_are_those_of_one_engine_where_prompts_are_computed_elsewhere(roles: Roles, expected) -> None:
    with gateway(roles) as (engine, _):
        all_asked(engine, expected)
        assert roles[PREFILL].taken
        assert all(asked.produced for asked in roles["decode"].taken)


def test_a_prompt_that_was_computed_elsewhere_is_read_from_the_store(roles: Roles, alone: Engine) -> None:
    prompt = [*range(5, 260)]
    wanted = outcome(alone.generate(prompt, **SEEDED))
    with gateway(roles) as (engine, client):
        assert outcome(engine.generate(prompt, **SEEDED)) == wanted
        (begun,), (gone_on,) = roles[PREFILL].taken, roles["decode"].taken
        assert (begun.produced, len(gone_on.produced[0].token_ids)) == ((), 1)
        assert roles["decode"]._client.ask(ReadStats()).prefixes.sources["remote"] >= 240
        assert client.handing > 0


def test_a_prompt_is_handed_over_where_all_streams_wait_for_less_then() -> None:
    stays = Score(
        "stays", 1.0, wait=0.5, restore=0.0, compute=0.5, others=0.0, have=0, restored=0, running=4, measured=True
    )
    begins = replace(stays, replica="begins", running=0)
    assert [handed_over(stays, begins, handing) for handing in (0.0, 1.9, 2.1)] == [True, True, False]
    assert not handed_over(stays, replace(begins, seconds=3.1), 0.0)  # it would wait there for longer
    idle = replace(stays, running=0)
    assert [handed_over(idle, begins, handing) for handing in (0.0, 0.1)] == [True, False]  # it is tried once


def test_what_handing_over_took_counts_for_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """So one that took long does not end it for good."""
    now = [100.0]
    with closing(client_of()) as client:
        monkeypatch.setattr(client_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
        client._router, request = client._make_router(16), Request[ReplicaLink](submission((5, 6)), Ear())

        def handed(seconds: float) -> float:
            request.handed = now[0] - seconds
            client._heard(request, Drawn(0, (7,)))
            return client.handing

        assert client.handing == 0.0
        assert handed(1.5) == 1.5
        assert handed(0.5) == pytest.approx(0.9 * 1.5 + 0.1 * 0.5)
        now[0] += 300.0
        assert client.handing < 1e-3
        assert handed(0.5) == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize("name", [PREFILL, "decode"])
@pytest.mark.parametrize("steps", [1, 12])
def test_answers_are_those_of_one_engine_where_one_of_these_dies(roles: Roles, expected, name: str, steps: int) -> None:
    one = roles[name]
    one.steps, one.at_step = steps, one.die_for_good
    with gateway(roles) as (engine, _):
        all_asked(engine, expected)
        assert one.deaths == 1


def test_a_request_goes_on_though_its_prompt_is_not_stored(roles: Roles, alone: Engine, monkeypatch) -> None:
    monkeypatch.setattr(client_module, "HELD", 0.1)
    monkeypatch.setattr(Router, "stored", lambda self, hashes: False)
    prompt = [*range(5, 100)]
    with gateway(roles) as (engine, _):
        assert outcome(engine.generate(prompt, **SEEDED)) == outcome(alone.generate(prompt, **SEEDED))
        assert [len(one.taken) for one in roles.values()] == [1, 1]


def test_a_request_that_is_never_stored_is_not_handed_over(roles: Roles) -> None:
    kept = RetentionOptions(stored=False)
    with gateway(roles) as (engine, client):
        engine.generate([*range(5, 100)], retention=kept, **GREEDY)
        assert [len(one.taken) for one in roles.values()] == [0, 1]
    with gateway({PREFILL: roles[PREFILL]}) as (engine, client):  # it begins there, as there is no other one yet
        number, ear = client.number(), Ear()
        asked = submission((5, 6), number=number, **LONG)
        client.submit(replace_fields(asked, retention=kept), ear)
        client.found([address_of(name, one, prefill=name == PREFILL) for name, one in roles.items()])
        eventually(lambda: len(client._engines) == 2, "it joins")
        before = ear.tokens(0)
        eventually(lambda: ear.tokens(0) > before + 3, "it goes on")
        assert place_of(client, number) == PREFILL
        client.cancel(number)
        ear.wait()


# -- routing ----------------------------------------------------------------------------------------------------------


def has(client: ClusterClient, prompt: Sequence[int]) -> dict[str, int]:
    """Tokens of a prompt, as the router knows of them, by replica."""
    asked = client._request(submission(prompt), lambda event: None)
    assert client._router is not None
    with client._changed:
        return {score.replica: score.have for score in client._router.rank(asked.blocks, len(prompt))}


def test_all_gateways_know_what_a_request_has_brought_before_its_end_is_told(pair: Pair) -> None:
    publishing = threading.Event()
    with gateway(named(*pair)) as (engine, client), gateway(named(*pair)) as (_, other):
        engine.clear_cache()
        for one in pair:
            one._events.after(publishing.wait)  # the thread that publishes is late
        number, ear = sent(client, PREFIX, **GREEDY)
        (at,) = (one for one in pair if one.taken)
        eventually(lambda: not at._client.ask(ReadStats()).running and not any(map(busy, at._fronts)), "it is done")
        client.ask(ReadStats())  # the answer comes behind all that is told already
        assert number in client._running
        publishing.set()
        assert isinstance(ear.wait()[-1], Done)
        assert sum(has(client, (*PREFIX, 70)).values()) == len(PREFIX)
        eventually(lambda: sum(has(other, (*PREFIX, 70)).values()) == len(PREFIX), "it was sent to the other one first")


def test_requests_that_begin_alike_go_to_the_replica_that_has_their_beginning(pair: Pair) -> None:
    with gateway(named(*pair)) as (engine, client):
        engine.clear_cache()
        engine.generate([*PREFIX], **GREEDY)
        (first,) = [name for name, one in named(*pair).items() if one.taken]
        assert sum(has(client, (*PREFIX, 70)).values()) == len(PREFIX)
        for at in range(70, 74):
            engine.generate([*PREFIX, at], **GREEDY)
        assert [len(one.taken) for name, one in named(*pair).items() if name != first] == [0]
        assert client.unranked == 0
        engine.clear_cache()
        eventually(lambda: set(has(client, (*PREFIX, 70)).values()) == {0}, "it is gone")


def test_what_replicas_had_before_is_known_to_a_gateway_that_begins(pair: Pair) -> None:
    for one in pair:
        one._client.ask(client_module.ClearCache())
    for warm in (0, 1):
        prompt = [at + warm for at in PREFIX]
        with gateway({"alone": pair[warm]}) as (engine, _):
            engine.generate(prompt, **GREEDY)
    for one in pair:
        one.taken.clear()
    with gateway(named(*pair)) as (engine, client):
        for warm in (0, 1):
            prompt = [at + warm for at in PREFIX]
            eventually(lambda prompt=prompt: sum(has(client, (*prompt, 90)).values()) > 0, "it is known")
            engine.generate([*prompt, 90], **GREEDY)
            assert [len(one.taken) for one in pair] == [1, warm]


def test_without_events_the_replica_that_has_fewer_requests_is_chosen(pair: Pair) -> None:
    for one in pair:
        one.deaf = True
    with gateway(named(*pair)) as (_, client):
        ears = [sent(client, PREFIX, **LONG) for _ in range(4)]
        assert [len(one.taken) for one in pair] == [2, 2]
        assert client.unranked == 4
        for number, ear in ears:
            client.cancel(number)
            ear.wait()


# -- replicas that are not used ---------------------------------------------------------------------------------------


def test_a_replica_of_another_version_is_refused_by_name(pair: Pair, expected) -> None:
    with gateway(named(pair[0])) as (engine, client):
        client.found([address_of("replica-0", pair[0]), address_of("other", pair[1], version="0.0.0")])
        eventually(lambda: "it runs kvcellar 0.0.0, and" in states(client)["other"], "it is refused")
        assert ASKED["batch"](engine) == expected["batch"]
        assert pair[1].taken == []
        client.found([address_of("replica-0", pair[0])])
        assert states(client) == {"replica-0": "connected"}


def test_a_replica_of_another_model_is_refused_by_name(pair: Pair, tmp_path: Path, expected) -> None:
    changed = model_in(tmp_path)
    (changed / "chat_template.jinja").write_text("{{ messages }}")
    with closing(FaultyReplica(changed, SETTINGS)) as other, gateway(named(pair[0])) as (engine, client):
        client.found([address_of("replica-0", pair[0]), address_of("other", other)])
        eventually(lambda: "in another form" in states(client)["other"], "it is refused")
        assert ASKED["batch"](engine) == expected["batch"]
        assert other.taken == []


def test_where_all_are_refused_the_reasons_are_raised(pair: Pair) -> None:
    with closing(client_of()) as client:
        client.found([address_of(f"of {at}", one, version=f"0.0.{at}") for at, one in enumerate(pair)])
        eventually(lambda: client.refuses_all, "they are refused")
        with pytest.raises(ModelRefused) as caught:
            client.wait(patience=0.0)
        for at in range(2):
            assert f"replica of {at}: it runs kvcellar 0.0.{at}" in str(caught.value)


def test_where_all_are_refused_later_requests_are_told_the_reasons_at_once(pair: Pair) -> None:
    with gateway(named(pair[0])) as (engine, client):
        client.found([address_of("other", pair[1], version="0.0.0")])
        pair[0].die_for_good()
        eventually(lambda: client._hopeless(), "all are refused")
        with pytest.raises(Overloaded, match=r"replica other: it runs kvcellar 0\.0\.0, and"):
            engine.generate([5, 6], **GREEDY)
        assert engine.starting


def test_a_wait_for_a_replica_ends_with_its_client(pair: Pair) -> None:
    client = client_of()
    with pytest.raises(EngineClosed):
        client.wait(client.close)


def test_a_replica_that_cannot_be_reached_is_tried_again(pair: Pair, expected) -> None:
    pair[1].down = True
    with gateway(named(pair[0])) as (engine, client):
        with socket.create_server(("127.0.0.1", 0)) as closed:
            nowhere = address_of("nowhere", pair[0])
            nowhere = type(nowhere)("nowhere", *closed.getsockname(), b"", nowhere.version, "same", nowhere.block)
        client.found([*(address_of(name, one) for name, one in named(*pair).items()), nowhere])
        assert ASKED["batch"](engine) == expected["batch"]
        found = {"replica-0": "connected", "replica-1": "lost", "nowhere": "lost"}
        eventually(lambda: states(client) == found, "all were tried")
        pair[1].down = False
        eventually(lambda: states(client)["replica-1"] == "connected", "it is tried again")


def test_a_replica_that_leaves_while_it_joins_gets_no_requests(pair: Pair) -> None:
    pair[1]._leaving = True
    with gateway(named(pair[0])) as (engine, client):
        client.found([address_of(name, one) for name, one in named(*pair).items()])
        eventually(lambda: client._lost.get("replica-1") == client_module.ENDS, "it says so")
        engine.generate([[5, 6]] * 6, **GREEDY)
        assert pair[1].taken == []


# -- an update --------------------------------------------------------------------------------------------------------


@pytest.fixture
def updated(pair: Pair) -> Iterator[tuple[Engine, ClusterClient]]:
    """Both are used, and the second one has new weights."""
    with gateway({"old": pair[0]}) as (engine, client):
        client.found(both(pair))
        eventually(lambda: states(client) == {"old": "connected", "new": "connected"}, "both are used")
        yield engine, client


def both(pair: Pair, **how: Any) -> list[Any]:
    return [address_of("old", pair[0]), address_of("new", pair[1], **{"weights": "new"} | how)]


@contextmanager
def going_to(client: ClusterClient, replica: str) -> Iterator[None]:
    """Meanwhile requests go to that replica."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "_choose", lambda request: client._links[replica])
        yield


def begun_at(client: ClusterClient, replica: str, **how: Any) -> tuple[int, Ear]:
    """A request of which that replica has told something."""
    with going_to(client, replica):
        number, ear = sent(client, (5, 6), **LONG | how)
    runs(ear)
    assert place_of(client, number) == replica
    assert client._running[number].weights == client._links[replica].address.weights
    return number, ear


def begin_anew(replica: FaultyReplica) -> bool:
    """Whether nothing was told before of the requests that it got."""
    return all(not one.produced and not one.prompt_told for one in replica.taken)


def test_a_gateway_waits_for_a_replica_of_its_own_and_then_uses_all_that_are_alike(pair: Pair) -> None:
    with closing(client_of(made="now")) as client:
        old, new = address_of("old", pair[0], made="before"), address_of("new", pair[1], made="now")
        client.found([old])
        eventually(lambda: states(client)["old"].startswith("it was made of another model"), "it is refused")
        with pytest.raises(ModelRefused, match="replica old: it was made of another model or settings"):
            client.wait(patience=0.0)
        waits = threading.Thread(target=client.wait)
        waits.start()
        client.found([old, new])
        eventually(lambda: states(client) == {"old": "connected", "new": "connected"}, "both are used")
        waits.join(60)
        assert not waits.is_alive()


def test_a_request_ends_at_a_replica_that_leaves_where_others_have_other_weights(
    pair: Pair, updated, alone: Engine
) -> None:
    """New ones go there."""
    wanted = answered(sent(alone._client, (5, 6), **LONG | {"max_tokens": 60})[1].wait(), 0)
    engine, client = updated
    number, ear = begun_at(client, "old", max_tokens=60)
    pair[0].says_that_it_leaves()
    engine.generate([[5, 6]] * 4, **GREEDY)
    assert len(pair[1].taken) == 4
    assert answered(ear.wait(), 0) == wanted
    assert place_of(client, number) is None
    assert client.moved == 0
    eventually(lambda: "old" not in client._links, "it is not needed any more")
    assert begin_anew(pair[1])


def test_a_request_moves_to_a_replica_with_its_weights(pair: Pair, updated, model: Path) -> None:
    _, client = updated
    with closing(FaultyReplica(model, SETTINGS)) as third:
        client.found([*both(pair), address_of("third", third)])
        eventually(lambda: states(client)["third"] == "connected", "it is used")
        number, ear = begun_at(client, "old")
        pair[0].says_that_it_leaves()
        eventually(lambda: place_of(client, number) == "third", "it moves")
        client.check()
        client.cancel(number)
        ear.wait()
        client.found(both(pair))
    assert begin_anew(pair[1])


def test_a_request_waits_for_a_replica_with_its_weights_to_be_back(pair: Pair, updated) -> None:
    _, client = updated
    number, ear = begun_at(client, "old")
    pair[0].down = True
    pair[0].die()
    eventually(lambda: states(client)["old"] == "lost", "it is not there")
    begun_at(client, "new")
    assert place_of(client, number) is None
    pair[0].down = False
    eventually(lambda: place_of(client, number) == "old", "it goes on")
    client.check()
    for one in list(client._running):
        client.cancel(one)
    ear.wait()
    assert begin_anew(pair[1])


def test_a_request_whose_weights_no_replica_has_any_more_fails_by_name(pair: Pair, updated) -> None:
    engine, client = updated
    _, ear = begun_at(client, "old")
    client.found(both(pair)[1:])
    pair[0].die_for_good()
    error = failed(ear)
    assert isinstance(error, Overloaded)
    assert "other weights now than those that it began with" in str(error)
    engine.generate([5, 6], **GREEDY)
    assert begin_anew(pair[1])


def test_a_request_of_which_nothing_was_told_goes_to_any_replica(pair: Pair, updated, alone: Engine) -> None:
    wanted = outcome(alone.generate([POISON, 6], **GREEDY))
    engine, client = updated
    pair[0].fatal, pair[0].down = begins_with_poison, True
    pair[0].gate.clear()
    with ThreadPoolExecutor(1) as pool:
        with going_to(client, "old"):
            asked = pool.submit(lambda: outcome(engine.generate([POISON, 6], **GREEDY)))
            eventually(lambda: client._running, "it is sent")
        pair[0].gate.set()
        assert asked.result() == wanted
    assert (pair[0].deaths, len(pair[1].taken)) == (1, 1)


def test_a_replica_serves_a_gateway_of_its_version_until_that_ends(pair: Pair, model: Path, expected) -> None:
    """Others have a new version, which this gateway cannot speak."""
    with closing(FaultyReplica(model, SETTINGS)) as leaving:
        with gateway({"old": leaving}) as (engine, client):
            client.found([address_of("old", leaving), address_of("new", pair[1], version="0.0.0", weights="new")])
            eventually(lambda: states(client)["new"].startswith("it runs kvcellar"), "it is refused")
            leave = threading.Thread(target=leaving.leave, args=(600.0, 60.0))
            leave.start()
            eventually(lambda: states(client)["old"] == "leaving", "it says so")
            client.found([address_of("new", pair[1], version="0.0.0", weights="new")])
            assert ASKED["batch"](engine) == expected["batch"]
            assert leave.is_alive()
        leave.join(60)
        assert not leave.is_alive()
    assert pair[1].taken == []


def test_a_replica_that_is_silent_is_given_up_unless_this_process_was_stopped(pair: Pair, alone: Engine) -> None:
    wanted = answered(sent(alone._client, (5, 6), **GREEDY | {"max_tokens": 300})[1].wait(), 0)
    with gateway(named(*pair)) as (_, client):
        links = list(client._links.values())
        _, ear = sent(client, (5, 6), **GREEDY | {"max_tokens": 300})
        runs(ear)
        now = time.monotonic()
        client._give_up_silent(now + SILENT + 1, stopped=True)
        assert all(one.beaten == now + SILENT + 1 for one in links)
        for one in links:
            one.beaten = now
        client._give_up_silent(now + SILENT + 1, stopped=False)
        eventually(lambda: set(map(id, client._engines)).isdisjoint(map(id, links)), "they are given up")
        assert answered(ear.wait(), 0) == wanted


# -- connections that are of no gateway -------------------------------------------------------------------------------


def closed(link: socket.socket) -> None:
    """Wait until the other end has closed it."""
    link.settimeout(PATIENCE)
    until = time.monotonic() + PATIENCE
    with suppress(ConnectionError):
        while link.recv(1 << 16):
            assert time.monotonic() < until, "it stays open"


@pytest.mark.parametrize("more", [b"", b"x" * 31, b"x" * 32, b"\0" * 100], ids=["silent", "short", "wrong", "long"])
def test_a_connection_without_the_secret_is_closed(pair: Pair, expected, monkeypatch, more: bytes) -> None:
    monkeypatch.setattr(replica_module, "GREETING", 0.1)
    with gateway(named(pair[0])) as (engine, _), socket.create_connection(pair[0].address) as link:
        link.sendall(more)
        link.settimeout(PATIENCE)
        with suppress(ConnectionError):
            assert link.recv(1) == b"", "it is told nothing"
        assert ASKED["batch"](engine) == expected["batch"]


def test_a_secret_that_comes_too_slowly_is_given_up(pair: Pair, monkeypatch) -> None:
    """As a whole, not by each of its bytes."""
    monkeypatch.setattr(replica_module, "GREETING", 0.2)
    link = socket.create_connection(pair[0].address)
    link.settimeout(0.05)
    with link, pytest.raises(ConnectionError):  # noqa: PT012 - which of both calls raises is open
        for byte in pair[0].secret[:-1]:
            link.sendall(bytes([byte]))
            with suppress(TimeoutError):
                if not link.recv(1):
                    raise ConnectionError
    eventually(lambda: pair[0]._unknown._value == replica_module.GREETED, "its place is free")


@pytest.mark.parametrize(
    "garbage",
    [b"\xff" * 64, b"\x03\0\0\0abc", bytes(frame_of(Start(None, {}, 0))), bytes(frame_of(["?"]))],
    ids=["long", "no message", "a model", "unknown"],
)
def test_a_gateway_that_sends_garbage_is_closed_and_others_go_on(pair: Pair, expected, garbage: bytes) -> None:
    with gateway(named(pair[0])) as (engine, _), socket.create_connection(pair[0].address) as link:
        link.sendall(pair[0].secret + garbage)
        closed(link)
        assert ASKED["batch"](engine) == expected["batch"]
        eventually(lambda: len(pair[0]._fronts) == 1, "it is forgotten")


def test_an_ask_that_is_no_ask_is_refused(pair: Pair, expected) -> None:
    with gateway(named(pair[0])) as (engine, client):
        with pytest.raises(EngineFailed, match="not a message that was expected"):
            client._asked(["?"])  # type: ignore[arg-type]
        assert ASKED["batch"](engine) == expected["batch"]


def test_connections_that_say_nothing_do_not_keep_gateways_away(pair: Pair, monkeypatch) -> None:
    monkeypatch.setattr(replica_module, "GREETING", 0.2)
    with ExitStack() as opened:
        links = [
            opened.enter_context(socket.create_connection(pair[0].address)) for _ in range(replica_module.GREETED + 8)
        ]
        with gateway(named(pair[0])) as (engine, _):
            engine.generate([5, 6], **GREEDY)
        for link in links:
            closed(link)


def test_a_connection_that_cannot_be_accepted_does_not_end_the_replica(model: Path, monkeypatch) -> None:
    with closing(FaultyReplica(model, SETTINGS)) as replica:
        accept, errors = replica._listener.accept, [OSError(24, "Too many open files")] * 2

        class Full:
            def __getattr__(self, name: str) -> Any:
                return getattr(listener, name)

            def accept(self) -> Any:
                if errors:
                    raise errors.pop()
                return accept()

        listener, replica._listener = replica._listener, Full()  # type: ignore[assignment]
        for _ in range(2):  # the first one was accepted before
            with gateway(named(replica)):
                pass
        assert errors == []


# -- adapters ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def styled(model: Path, alone: Engine) -> Any:
    alone.adapters.add("style", model / "adapter")
    yield outcome(alone.generate([5, 6, 7], adapter="style", **GREEDY))
    alone.adapters.remove("style", wait=True)


def test_adapters_that_were_added_are_known_to_replicas_that_join_later(pair: Pair, model: Path, styled: Any) -> None:
    with gateway(named(pair[0])) as (engine, client):
        engine.adapters.add("style", model / "adapter")
        engine.adapters.add("gone", model / "other")
        engine.adapters.remove("gone")
        client.found([address_of(name, one) for name, one in named(*pair).items()])
        eventually(lambda: states(client)["replica-1"] == "connected", "it joins")
        pair[0].die_for_good()
        eventually(lambda: states(client)["replica-0"] != "connected", "it is gone")
        assert outcome(engine.generate([5, 6, 7], adapter="style", **GREEDY)) == styled
        assert [one.name for one in engine.adapters.list()] == ["style"]
        pair[0].down = False
        eventually(lambda: states(client)["replica-0"] == "connected", "it is back")
        engine.adapters.remove("style", wait=True)
        assert list(engine.adapters.list()) == []


def test_an_adapter_that_is_added_while_a_replica_joins_is_known_to_it(pair: Pair, model: Path, styled: Any) -> None:
    with gateway(named(pair[0])) as (engine, client):
        agree, added = client._agree, threading.Event()

        def agrees(link: ReplicaLink, adapters: Any) -> list[AdapterInfo]:
            found = agree(link, adapters)
            if not added.is_set():
                adding = threading.Thread(target=engine.adapters.add, args=("style", model / "adapter"))
                adding.start()
                adding.join()
                added.set()
            return found

        client._agree = agrees  # type: ignore[method-assign]
        client.found([address_of(name, one) for name, one in named(*pair).items()])
        eventually(lambda: states(client)["replica-1"] == "connected", "it joins")
        pair[0].die_for_good()
        eventually(lambda: states(client)["replica-0"] != "connected", "it is gone")
        assert outcome(engine.generate([5, 6, 7], adapter="style", **GREEDY)) == styled
        pair[0].down = False
        eventually(lambda: states(client)["replica-0"] == "connected", "it is back")
        engine.adapters.remove("style", wait=True)


def test_an_adapter_that_one_replica_refuses_is_added_to_none(pair: Pair, model: Path, styled: Any) -> None:
    """Where there was one of its name before, all have that."""
    with gateway(named(*pair)) as (engine, client):
        style = engine.adapters.add("style", model / "adapter")
        last = pair[0] if client._engines[1].name == "replica-0" else pair[1]
        last.refuses = AddAdapter
        for name in ("style", "new"):
            with pytest.raises(BadRequest, match="this replica does not do that"):
                engine.adapters.add(name, model / "other")
        for one in pair:
            assert [(it.name, it.digest) for it in one._client.ask(ListAdapters())] == [("style", style.digest)]
        assert outcome(engine.generate([5, 6, 7], adapter="style", **GREEDY)) == styled
        engine.adapters.remove("style", wait=True)


def test_adapters_that_were_added_through_another_gateway_are_known(pair: Pair, model: Path, styled: Any) -> None:
    """So that prompts are looked for among what was computed with them."""
    with gateway(named(*pair)) as (engine, _), gateway(named(*pair)) as (other, client):
        for directory in ("adapter", "other"):
            style = engine.adapters.add("style", model / directory)
            other.generate([5, 6, 7], adapter="style", **GREEDY)
            assert client._digests["style"] == style.digest
            other.adapters.remove("style", wait=True)


# -- what replicas die of ---------------------------------------------------------------------------------------------


def test_a_request_that_replicas_die_of_is_refused_and_streams_beside_it_go_on(
    pair: Pair, alone: Engine, expected
) -> None:
    """After the third death: it began with the first replica beside others, or it may have."""
    streams, how = [(5, 6, 7, at) for at in range(8, 12)], GREEDY | {"max_tokens": 100}
    wanted = [answered(sent(alone._client, prompt, **how)[1].wait(), 0) for prompt in streams]
    for one in pair:
        one.fatal = begins_with_poison
    with gateway(named(*pair)) as (engine, client):
        ears = [sent(client, prompt, **how)[1] for prompt in streams]
        runs(*ears)
        _, culprit = sent(client, (POISON, 6), **GREEDY)
        error = failed(culprit)
        assert isinstance(error, EngineDied)
        assert "2 engines in a row have died when they had begun with this request" in str(error)
        assert sum(one.deaths for one in pair) == 3
        assert [answered(ear.wait(), 0) for ear in ears] == wanted
        assert ASKED["seeded"](engine) == expected["seeded"]


def test_a_request_that_replicas_die_of_is_refused_though_one_of_them_leaves(pair: Pair) -> None:
    """It goes on alone still."""
    with gateway(named(*pair)) as (_, client):
        for one in pair:
            one.fatal = begins_with_poison
        with client._changed:
            request = Request[ReplicaLink](submission((POISON, 6), number=client.number(), **GREEDY), Ear(), alone=True)
            request.deaths, request.engine = 1.0, client._engines[0]
            client._running[request.submission.number] = request
            client._sent(request, client._engines[0])
        named(*pair)[request.engine.name].says_that_it_leaves()
        assert isinstance(request.deliver, Ear)
        assert isinstance(failed(request.deliver), EngineDied)
        assert sum(one.deaths for one in pair) == 1


def test_a_request_that_has_survived_a_death_is_handed_over_beside_others() -> None:
    request = Request[ReplicaLink](submission((5, 6), number=0, **GREEDY), Ear(), alone=True)
    request.leave("is being shut down")
    assert request.alone
    request.tell(Drawn(0, (7,)))
    request.leave("is being shut down")
    assert not request.alone


def test_a_request_that_no_engine_died_of_does_not_wait_for_one_that_goes_on_alone(pair: Pair, monkeypatch) -> None:
    monkeypatch.setattr(remote_module, "UNPROVEN_SECONDS", 600.0)
    with gateway(named(*pair)) as (_, client):
        number, ear = sent(client, (5, 6), **LONG)
        runs(ear)
        before = place_of(client, number)
        unproven = client.number()
        with client._changed:
            request = Request[ReplicaLink](submission((7, 8), number=unproven, **GREEDY), Ear(), alone=True)
            request.engine = next(one for one in client._engines if one.name != before)
            client._running[unproven] = request
            client._sent(request, request.engine)
            client._unproven = unproven, request.engine, time.monotonic()
        named(*pair)[before or ""].says_that_it_leaves()
        eventually(lambda: place_of(client, number) == request.engine.name, "it moves")
        with client._changed:
            assert client._unproven is not None
            client._remove(unproven)
        client.cancel(number)
        ear.wait()


# -- several gateways -------------------------------------------------------------------------------------------------


def test_two_gateways_at_the_same_replicas_both_get_their_answers(pair: Pair, expected) -> None:
    """Their requests have the same numbers."""
    with gateway(named(*pair)) as (one, first), gateway(named(*pair)) as (other, second):
        with ThreadPoolExecutor(2) as pool:
            for call in [pool.submit(all_asked, engine, expected) for engine in (one, other)]:
                call.result()
        assert first.number() == second.number()


def test_the_requests_of_a_gateway_that_dies_end_at_replicas_and_those_of_others_go_on(pair: Pair, alone) -> None:
    wanted = answered(sent(alone._client, (5, 6), **GREEDY | {"max_tokens": 300})[1].wait(), 0)
    with gateway(named(*pair)) as (_, lives), closing(client_of()) as dies:
        dies.found([address_of(name, one) for name, one in named(*pair).items()])
        eventually(lambda: len(dies._engines) == 2, "it has both")
        lost = [sent(dies, (7, 8, 9, at), **LONG)[1] for at in range(4)]
        runs(*lost)
        _, ear = sent(lives, (5, 6), **GREEDY | {"max_tokens": 300})
        dies.found([])
        for link in list(dies._links.values()):
            link.link.close()
        assert answered(ear.wait(), 0) == wanted
        eventually(lambda: [len(one._fronts) for one in pair] == [1, 1], "it is forgotten")
        for one in pair:
            one.rests()
        dies.close()
        assert all(isinstance(failed(one), EngineClosed) for one in lost)


def test_a_request_whose_grammar_is_compiled_when_its_gateway_dies_ends(pair: Pair) -> None:
    pair[0].gate.clear()
    with closing(client_of()) as client, ThreadPoolExecutor(1) as pool:
        client.found([address_of("replica", pair[0])])
        client.wait()
        client.number()  # the first one is 0
        call = pool.submit(sent, client, (5, 6), **MATCHING)
        eventually(lambda: pair[0]._fronts and busy(pair[0]._fronts[0]), "it is taken in")
        client.close()
        assert isinstance(call.exception(), EngineClosed)
        eventually(lambda: not pair[0]._fronts, "the gateway is forgotten")
        before = len(pair[0].cancelled)
        pair[0].gate.set()
        eventually(lambda: len(pair[0].cancelled) > before, "it is cancelled")


# -- the end ----------------------------------------------------------------------------------------------------------


def test_nothing_is_told_behind_the_end_though_events_arrive_while_a_client_is_closed(pair: Pair) -> None:
    client, told, inside = client_of(), list[type](), threading.Event()

    def deliver(event: EngineEvent) -> None:
        if isinstance(event, Drawn) and not inside.is_set():
            inside.set()
            eventually(lambda: client._closing, "it is being closed")
            time.sleep(0.05)
        told.append(type(event))

    client.found([address_of("replica", pair[0])])
    client.wait()
    client.submit(submission((5, 6), number=client.number(), **LONG), deliver)
    assert inside.wait(60)
    client.close()
    assert told[-1] is Failed
    assert told.count(Failed) == 1
    assert Drawn in told


def test_a_receiver_can_close_its_engine(pair: Pair) -> None:
    client, over = client_of(), threading.Event()

    def deliver(event: EngineEvent) -> None:
        if isinstance(event, Drawn):
            client.close()
            over.set()

    client.found([address_of(name, one) for name, one in named(*pair).items()])
    client.wait()
    client.submit(submission((5, 6), number=client.number(), **LONG), deliver)
    assert over.wait(60)
    assert client.close()


def test_a_client_is_closed_while_it_connects(pair: Pair) -> None:
    """To one that says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = client_of()
        address = address_of("silent", pair[0])
        address = type(address)("silent", *silent.getsockname(), b"", address.version, "same", address.block)
        client.found([address])
        eventually(lambda: client._links, "it is connected")
        assert client.close()
        eventually(lambda: not client._used, "its thread ends")


def test_threads_of_replicas_that_have_gone_end(pair: Pair) -> None:
    with gateway(named(*pair)) as (_, client):
        for _ in range(3):
            links = list(client._links.values())
            for one in pair:
                one.die()
            eventually(lambda links=links: not any(one.outbox._thread.is_alive() for one in links), "they end")
            eventually(lambda: set(states(client).values()) == {"connected"}, "they are used again")


def test_a_fork_ends_nothing_and_waits_for_nothing(pair: Pair) -> None:
    with gateway(named(*pair)) as (_, client):
        _, ear = sent(client, (5, 6), **GREEDY)
        owner, client._owner = client._owner, -1
        try:
            with client._changed, ThreadPoolExecutor(1) as pool:  # the lock is held, for ever in a fork
                refused = pool.submit(client.submit, submission((5,), number=client.number()), Ear())
                assert isinstance(refused.exception(60), EngineClosed)
                assert pool.submit(client.close).result(60) is False
        finally:
            client._owner = owner
        assert isinstance(ear.wait()[-1], Done)


# -- controls ---------------------------------------------------------------------------------------------------------


def test_what_is_asked_of_all_is_answered_while_one_dies(pair: Pair) -> None:
    with gateway(named(*pair)) as (engine, client):
        engine.clear_cache()
        asked = replace_fields(submission(PREFIX, number=client.number(), **GREEDY), namespace="tenant")
        client.submit(asked, ear := Ear())
        ear.wait()
        for _ in range(5):
            pair[0].die()
            assert engine.stats().running == 0
            assert [one.namespace for one in client.ask(ListNamespaces())] in (["tenant"], [])
        eventually(lambda: states(client)["replica-0"] == "connected", "it is back")


def test_a_namespace_of_several_replicas_is_listed_once() -> None:
    one = NamespaceContents("tenant", 1, 2, 3, 4, 5)
    for found in ([[one], [], [one]], [[], [one], [one]], [[one, one]], [[]]):
        count = sum(map(len, found))
        assert [(it.namespace, it.entries, it.tokens) for it in merged(found)] == [("tenant", count, 2 * count)][:count]


def test_what_replicas_store_at_a_place_of_all_is_listed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [[{"name": f"{value}", "value": value} for value in values] for values in ((9, 4, 1), (), (7, 4, 3))]
    with closing(client_of()) as client:
        monkeypatch.setattr(client, "_holders", lambda control: found)
        monkeypatch.setattr(client, "_parts_of", lambda control, part: iter([part]))
        for tier, values in (("device", [9, 7, 4, 4]), ("disk", [9, 7, 4, 3])):
            assert [one["value"] for one in CacheClient(client).hot(tier, 4)] == values


def shaken(value: Any, draw: Random) -> Any:
    """Such a record with other numbers, and some keys less."""
    if isinstance(value, bool):
        return draw.random() < 0.5
    if isinstance(value, int):
        return draw.randrange(100)
    if isinstance(value, dict):
        return {key: draw.randrange(100) for key in value if draw.random() < 0.7}
    if isinstance(value, tuple):
        return tuple(shaken(one, draw) for one in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{one.name: shaken(getattr(value, one.name), draw) for one in fields(value)})
    return value


def by_sample(stats: EngineStats) -> dict[Any, Any]:
    return {(metric.name, labels): value for metric, labels, value in samples(stats)}


def test_statistics_of_all_are_the_sums(alone: Engine) -> None:
    draw, stats = Random(1), alone.stats()
    reasons = {"a": 1, "b": 2, "c": 3}
    recording = replace(stats.recording, by_modules=reasons)
    stats = replace(stats, recomputes=reasons, recording=recording, groups=(*stats.groups, *more(stats)))
    for _ in range(50):
        every = [shaken(stats, draw) for _ in range(draw.randrange(1, 5))]
        every += [replace(one, groups=(), store=None, speculation=None) for one in every if draw.random() < 0.3]
        draw.shuffle(every)
        wanted: dict[Any, Any] = {}
        for one in every:
            for name, value in by_sample(one).items():
                before = wanted.get(name, 0)
                wanted[name] = before or value if isinstance(value, bool) else before + value
        found = summed(every)
        assert by_sample(found) == wanted
        assert found.at == min(one.at for one in every)
        assert found.ended == sum(one.ended for one in every)
        for group in found.groups:
            assert group.layers == max(one.layers for some in every for one in some.groups if one.name == group.name)


def more(stats: EngineStats) -> list[GroupStats]:
    return [replace(one, name="more") for one in stats.groups]


# -- order ------------------------------------------------------------------------------------------------------------


class Told(RemoteEngine):
    """An engine that another thread is about to tell something of the request that it is sent."""

    def __init__(self) -> None:
        self.beat, self.beaten, self.stats = Beat(0.0), 0.0, None
        self.sent: list[object] = []
        self.meanwhile: Callable[[], None] = lambda: None

    def send(self, message: object) -> None:
        if isinstance(message, Ask):
            thread = threading.Thread(target=self.meanwhile, daemon=True)
            thread.start()
            thread.join(0.1)
        self.sent.append(message)


class OneEngine(RemoteClient[Told]):
    """A client of any engines."""

    @property
    def last_stats(self) -> EngineStats:
        raise NotImplementedError

    def close(self) -> bool:
        return True


def test_a_cancel_does_not_come_before_the_request_that_it_ends() -> None:
    client, first, second = OneEngine(), Told(), Told()
    first.meanwhile = second.meanwhile = lambda: client.cancel(0)
    client._joined(first)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(client.submit, submission((5, 6), number=client.number()), Ear())
        eventually(lambda: len(first.sent) == 2, "both are sent")
        ask = first.sent[0]
        assert isinstance(ask, Ask)
        client._take(first, Reply(ask.number, packed(None)))
        call.result(60)
    client._left(first, "has died", blame=lambda request: 1.0)
    client._joined(second)
    eventually(lambda: len(second.sent) == 3, "it goes on")
    for one in (first, second):
        assert [type(message) for message in one.sent[:2]] == [Ask, Cancel]


def test_a_request_that_has_gone_on_meanwhile_is_not_refused() -> None:
    client, engine = OneEngine(), Told()
    client._running[0] = Request[Told](submission((5, 6), number=0), Ear())
    client._to_go_on.append(0)
    client._joined(engine)
    client.check()
    client._refuse(0, Overloaded("none has come"))
    assert client._running[0].engine is engine
    client.check()


def test_a_prompt_that_an_engine_has_not_pinned_is_pinned_at_no_other() -> None:
    client, engine = OneEngine(), Told()
    client._joined(engine)
    for number, pinned in enumerate((False, True)):
        request = client._running[number] = Request[Told](submission((5, 6 + number), number=number), Ear())
        *_, done = request.end()
        request.engine = engine
        assert isinstance(done, Done)
        client._tell(engine, number, replace_fields(done, pinned=pinned))
        assert len(client._pins) == number


def test_statistics_are_those_of_all_replicas_together(pair: Pair) -> None:
    with gateway(named(*pair)) as (engine, client):
        total = sum(one._client.ask(ReadStats()).steps for one in pair)
        assert engine.stats().steps == total
        eventually(lambda: client.last_stats.steps == total, "they are told")


def counts_of(*every: EngineStats) -> dict[Any, Any]:
    """All counters together."""
    found: Counter[Any] = Counter()
    for stats in every:
        found.update({(one.name, label): count for one, label, count in samples(stats) if one.kind == "counter"})
    return found


def test_no_count_falls_when_a_replica_goes_and_none_is_counted_twice_when_it_comes_back(pair: Pair) -> None:
    with gateway(named(*pair)) as (engine, client):
        engine.generate([[5, at] for at in range(6, 12)], **GREEDY)
        own = [one._client.ask(ReadStats()) for one in pair]
        wanted = counts_of(*own)

        def told() -> bool:
            return (
                counts_of(client.last_stats) >= wanted and counts_of(replace(client.last_stats, cluster=None)) == wanted
            )

        eventually(told, "they are told")
        pair[1].die_for_good()
        eventually(lambda: states(client)["replica-1"] == "lost", "it is gone")
        assert told()
        assert client.last_stats.max_sequences == own[0].max_sequences
        pair[1].down = False
        eventually(lambda: states(client)["replica-1"] == "connected", "it is back")
        assert told()
        assert counts_of(replace(engine.stats(), cluster=None)) == wanted
        began = client.last_stats.started
        client.found([address_of("replica-0", pair[0])])
        pair[1].die_for_good()
        eventually(lambda: list(client._past) == [""], "it is not expected any more")
        assert told()
        assert client.last_stats.started == began


@pytest.mark.parametrize("answers", [True, False])
def test_no_replica_that_goes_or_comes_while_all_are_asked_is_counted_twice_or_not_at_all(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    with gateway(named(*pair)) as (engine, client):
        engine.generate([[5, at] for at in range(6, 12)], **GREEDY)
        wanted = counts_of(*(one._client.ask(ReadStats()) for one in pair))
        eventually(lambda: counts_of(replace(client.last_stats, cluster=None)) == wanted, "they are told")
        from_all = client._from_all

        def then(control: Any) -> Any:
            found = from_all(control)
            if answers:  # and goes then
                pair[1].die_for_good()
                eventually(lambda: "replica-1" not in client._counts, "it has gone")
                return found
            pair[1].die()
            eventually(lambda: set(map(id, client._engines)).isdisjoint(map(id, gone)), "it has gone")
            eventually(lambda: "replica-1" in client._counts, "it is back")
            return {one: stats for one, stats in found.items() if one not in gone}

        gone = [client._links["replica-1"]]
        monkeypatch.setattr(client, "_from_all", then)
        assert counts_of(replace(engine.stats(), cluster=None)) == wanted


def test_statistics_are_as_old_as_those_of_a_replica_that_has_requests(alone: Engine) -> None:
    """One that rests tells nothing."""
    stats = replace(alone.stats(), running=0, waiting=0)
    old, new = replace(stats, at=1.0), replace(stats, at=2.0)
    with closing(client_of()) as client:
        for found, at in (
            ([old, new], 2.0),
            ([old, replace(new, running=1)], 2.0),
            ([replace(old, waiting=1), replace(new, running=1)], 1.0),
        ):
            assert client._together(dict(zip("ab", found, strict=False))).at == at


def test_what_has_gone_adds_its_counts_and_nothing_else(alone: Engine) -> None:
    draw, stats = Random(2), alone.stats()
    for _ in range(50):
        there, gone = (shaken(stats, draw) for _ in range(2))
        found = by_sample(summed([there, counted(gone)]))
        for metric, labels, value in samples(there):
            if metric.kind != "counter":
                assert found[metric.name, labels] == value
        assert counts_of(summed([there, counted(gone)])) == counts_of(there, gone)
        assert counted(summed([counted(there), counted(gone)])) == summed([counted(there), counted(gone)])


# -- what a gateway says of its replicas and requests -----------------------------------------------------------------


def done(ear: Ear) -> Done:
    last = ear.wait()[-1]
    assert isinstance(last, Done), last
    return last


def test_a_request_says_which_replicas_were_considered_and_that_the_best_one_got_it(pair: Pair) -> None:
    with gateway(named(*pair)) as (engine, client):
        engine.clear_cache()
        engine.generate([*PREFIX], **GREEDY)
        prompt = (*PREFIX, 70)
        eventually(lambda: sum(has(client, prompt).values()) == len(PREFIX), "it is published")
        for one in pair:
            one.taken.clear()
        placement, *others = done(sent(client, prompt, **GREEDY)[1]).placements
        (there,) = [name for name, one in named(*pair).items() if one.taken]
        assert (placement.replica, placement.left, others) == (there, "", [])
        assert {one.replica for one in placement.considered} == named(*pair).keys()
        assert placement.considered[0].replica == there
        assert [one.have for one in placement.considered] == [len(PREFIX), 0]
        assert sorted(one.seconds for one in placement.considered) == [one.seconds for one in placement.considered]


def test_without_events_a_request_says_that_nothing_was_compared(pair: Pair) -> None:
    for one in pair:
        one.deaf = True
    with gateway(named(*pair)) as (_, client):
        (placement,) = done(sent(client, PREFIX, **GREEDY)[1]).placements
        assert placement.considered == ()
        cluster = client.last_stats.cluster
        assert cluster is not None
        assert cluster.unranked == 1


@pytest.mark.parametrize("leaves", [False, True])
def test_a_request_that_moved_says_from_where_and_why(pair: Pair, leaves: bool) -> None:
    with gateway(named(*pair)) as (_, client):
        number, ear = sent(client, PREFIX, **LONG)
        runs(ear)
        first = place_of(client, number)
        replica = named(*pair)[first or ""]
        if leaves:
            replica.says_that_it_leaves()
        else:
            replica.die_for_good()
        eventually(lambda: place_of(client, number) not in (None, first), "it goes on")
        second = place_of(client, number)
        client.cancel(number)
        assert [(one.replica, one.left) for one in done(ear).placements] == [
            (first, "is being shut down" if leaves else "has closed its connection"),
            (second, ""),
        ]
        cluster = client.last_stats.cluster
        assert cluster is not None
        assert cluster.moved == 1
        assert cluster.states[states(client)[first or ""]] == 1


def test_of_a_request_that_moves_again_and_again_the_last_places_are_told(pair: Pair) -> None:
    with gateway(named(*pair)) as (_, client):
        number, ear = sent(client, PREFIX, **LONG)
        for _ in range(PLACEMENTS + 1):
            before = ear.tokens(0)
            eventually(lambda before=before: ear.tokens(0) > before, "it runs")
            at = place_of(client, number)
            named(*pair)[at or ""].die()
            eventually(lambda at=at: place_of(client, number) not in (None, at), "it goes on")
            eventually(lambda: set(states(client).values()) == {"connected"}, "it is back")
        client.cancel(number)
        placements = done(ear).placements
        assert len(placements) == PLACEMENTS
        assert [bool(one.left) for one in placements] == [True] * (PLACEMENTS - 1) + [False]


def test_replicas_are_shown_with_their_numbers_and_why_some_are_not_used(pair: Pair) -> None:
    with gateway(named(*pair)) as (engine, client):
        engine.clear_cache()
        number, ear = sent(client, PREFIX, **LONG)
        runs(ear)
        at = place_of(client, number)
        shown = {one.name: one for one in client.replicas}
        eventually(lambda: {one.name: one.running for one in client.replicas if one.running} == {at: 1}, "it is told")
        eventually(lambda: {one.name: one for one in client.replicas}[at or ""].decode_rate > 0, "it is counted")
        shown = {one.name: one for one in client.replicas}
        assert shown[at or ""].cells_used > len(PREFIX)
        assert shown[at or ""].blocks >= len(PREFIX) // 16
        assert sum(one.running for one in shown.values()) == client.last_stats.running
        assert shown["replica-0"].address == f"127.0.0.1:{pair[0].address[1]}"
        named(*pair)[at or ""].die_for_good()
        eventually(lambda: states(client)[at or ""] == "lost", "it is gone")
        lost = {one.name: one for one in client.replicas}[at or ""]
        assert (lost.running, lost.cells, lost.blocks) == (0, 0, 0)
        assert lost.why
        client.cancel(number)
        ear.wait()


def test_a_model_without_cells_has_room_for_prompts_of_any_length(tmp_path: Path) -> None:
    saved(tmp_path, "mamba")
    with closing(FaultyReplica(tmp_path, SETTINGS)) as one, gateway({"one": one}) as (engine, client):
        assert len(engine.generate([*range(5, 90)], **GREEDY).choices[0].token_ids) == 24
        stats = engine.stats()
        assert stats.groups == ()
        assert [(shown.cells, shown.cells_used) for shown in client.replicas] == [(0, 0)]
        meter = Meter(start=1.0)
        meter.note(replace(stats, waiting_tokens=10_000, running=0, waiting=1))
        assert meter._room == 1 / stats.max_sequences
        load = load_of(stats)
        assert (load.cells_free, load.cells) == (client_module.UNLIMITED, client_module.UNLIMITED)


def test_a_replica_reports_how_long_it_took_to_start_and_what_it_has_to_do(pair: Pair) -> None:
    with gateway(named(pair[0])) as (_, client):
        pair[0].meter.read()
        number, ear = sent(client, PREFIX, **LONG)
        runs(ear)
        eventually(lambda: pair[0].meter.read()["room"] > 0, "it is told")
        assert pair[0].meter.read()["start"] > 0
        client.cancel(number)
        ear.wait()


def test_what_is_shown_of_a_replica_is_that_of_no_other(pair: Pair) -> None:
    with gateway(named(*pair)) as (engine, _):
        pictures = {name: engine.cache.picture(name) for name in named(*pair)}
        steps = {name: one._client.ask(ReadStats()).steps for name, one in named(*pair).items()}
        assert {name: one.stats.steps for name, one in pictures.items()} == steps
        for ask in (
            engine.cache.picture,
            lambda name: engine.cache.way(0, name),
            lambda name: engine.cache.entry("", 1, name),
        ):
            with pytest.raises(BadRequest, match="no replica 'nowhere' is connected"):
                ask("nowhere")


def test_rates_are_those_of_the_last_seconds(alone: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    draw, stats, told, now = Random(3), alone.stats(), ReplicaTold(), 100.0
    monkeypatch.setattr(observed, "time", SimpleNamespace(monotonic=lambda: now))
    history: list[tuple[float, int, int]] = []
    for _ in range(300):
        if draw.random() < 0.7:
            before = history[-1] if history else (0.0, 0, 0)
            history.append((now, before[1] + draw.randrange(500), before[2] + draw.randrange(50)))
            told.take(replace(stats, prefill_tokens=history[-1][1], decode_tokens=history[-1][2]))
        if history:
            since = max([at for at, *_ in history if at <= now - RECENT_SECONDS], default=history[0][0])
            (_, *old), (_, *new) = next(one for one in history if one[0] == since), history[-1]
            seconds = min(RECENT_SECONDS, max(1.0, now - since))
            assert told.rates() == tuple((count - less) / seconds for count, less in zip(new, old, strict=True))
        now += draw.choice((0.1, 0.25, 3.0, 20.0) if draw.random() < 0.2 else (0.25,))
    assert len(told._counts) <= 1 + RECENT_SECONDS / 0.1
