"""What holds of an engine wherever it is: on a thread of this process, in a process of its own, or in a replica, here
or in an actor of Ray."""

import io
import json
import threading
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace as with_fields

from kvcellar import BadRequest, Constraint, Engine, EngineClosed, Overloaded, PromptTooLong, WrongStage
from kvcellar.engine.messages import (
    Admitted,
    CheckInvariants,
    DescribeCapacity,
    DescribeDisk,
    Drawn,
    Ended,
    EngineEvent,
    ExportStore,
    ListAdapters,
    ListEntries,
    ListNamespaces,
    Produced,
    ReadStats,
    TakePicture,
)
from kvcellar.events import Done, Failed, PromptScored
from kvcellar.progress import Progress
from kvcellar.sampling_params import SamplingParams
from tests.cluster.in_ray import actor_of
from tests.cluster.replicas import of_addresses, of_replicas, without_store
from tests.engine.mixes import Ear as TextEar
from tests.engine.places import (
    ASKED,
    CHAT,
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
from tests.engine.test_going_on import singly
from tests.engine.tiered import acknowledged
from tests.engine.world import Heard

RAY = find_spec("ray") is not None
PLACES = ("thread", "process", "replica", *(("actor",) if RAY else ()))
no_ray = pytest.mark.skipif(not RAY, reason="ray is not installed (pip install kvcellar[cluster])")
MOST_WAITING = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_in(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reports() -> dict[str, list[Progress]]:
    """What was told while each engine was loaded."""
    return {place: [] for place in PLACES}


@pytest.fixture(scope="module")
def engines(model: Path, tmp_path_factory: pytest.TempPathFactory, reports: Any) -> Iterator[dict[str, Engine]]:
    """One in each place, with a store of its own. The last tests close them."""
    opened: dict[str, Engine] = {}
    shared: Any = {"max_sequences": 4, "max_waiting": MOST_WAITING, "adapters": {"style": model / "adapter"}, **SMALL}
    with ExitStack() as left:
        for place in PLACES:
            settings = shared | {"store": str(tmp_path_factory.mktemp("store"))}
            if place == "replica":
                engine = left.enter_context(of_replicas(model, settings))
            elif place == "actor":
                address = left.enter_context(actor_of(model, settings))
                engine = left.enter_context(of_addresses([address], without_store(settings)))
            else:
                engine = Engine(model, process=place == "process", progress=reports[place].append, **settings)
            opened[place] = left.enter_context(closing(engine))
        yield opened


@pytest.fixture(params=("thread", "process", "replica", pytest.param("actor", marks=no_ray)))
def place(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def engine(engines: dict[str, Engine], place: str) -> Iterator[Engine]:
    """After each test, no request holds anything."""
    yield engines[place]
    at_rest(engines[place])


def heard(events: list[EngineEvent]) -> Heard:
    """Of one request, in the order that all have."""
    told = Heard()
    for event in events:
        told(event)
    assert isinstance(events[0], Admitted)
    assert [event for event in events if isinstance(event, Admitted | Done | Failed)] == [events[0], events[-1]]
    return told


# -- requests ---------------------------------------------------------------------------------------------------------


def test_a_request_begins_is_drawn_for_and_is_done_once(engine: Engine) -> None:
    how = SEEDED | {"n": 3, "logprobs": 2, "prompt_logprobs": 1}
    _, ear = sent(engine._client, (5, 6, 7, 8), **how)
    events = ear.wait()
    told, kinds = heard(events), [type(event) for event in singly(events)]
    assert kinds.index(PromptScored) == 1
    assert (kinds.count(Drawn), kinds.count(Ended), kinds.count(PromptScored)) == (3 * 24, 3, 1)
    assert told.reasons == dict.fromkeys(range(3), "length")
    for event in singly(events):
        if isinstance(event, Drawn):
            assert event.logprobs is not None
            assert [one.token_id for one in event.logprobs] == list(event.token_ids)
    done = events[-1]
    assert isinstance(done, Done)
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (4, 72)


def test_all_places_answer_alike(engines: dict[str, Engine]) -> None:
    """Each beside the others, and alone."""
    for name, asked in ASKED.items():
        thread, *others = (asked(engines[place]) for place in PLACES)
        assert others == [thread] * len(others), name


def test_scores_are_those_of_the_other_places(engines: dict[str, Engine]) -> None:
    found = []
    for place in PLACES:
        engines[place].clear_cache()
        result = engines[place].generate([5, 6, 7, 8], logprobs=2, prompt_logprobs=1, **SEEDED)
        vectors = [one.vector for one in engines[place].embeddings.of(["a b", [9, 8, 7]])]
        found.append((result.logprobs, result.prompt_logprobs, result.usage, result.recall, vectors))
    (logprobs, scored, usage, recall, vectors), *others = found
    assert scored[0] is None
    for other in others:
        assert other[:3] == (logprobs, scored, usage)
        assert replace(other[3], seconds=recall.seconds) == recall
        for ours, theirs in zip(vectors, other[4], strict=True):
            assert theirs == pytest.approx(ours, abs=1e-6)  # what shares a step decides the last bits


def test_requests_that_cannot_all_run_at_once_are_all_answered(engine: Engine) -> None:
    alone = outcome(engine.generate([5, 6], **GREEDY))
    together = engine.generate([[5, 6]] * 9, **GREEDY)
    assert [outcome(one) for one in together] == [alone] * 9
    asked = SEEDED | {"n": 8, "max_tokens": 5}
    assert len({one.token_ids for one in engine.generate([5, 6], **asked).choices}) > 1


def test_a_text_matches_its_schema(engine: Engine) -> None:
    found = json.loads(engine.generate([5, 6], **MATCHING).text)
    assert found.keys() == {"a", "b"}
    assert 100 <= found["b"] <= 99999


def test_a_stop_string_ends_a_text_and_what_is_drawn_behind_it_is_not_counted(engine: Engine) -> None:
    whole = engine.generate([5, 6, 7], **SEEDED)
    stop = whole.text[len(whole.text) // 2 :][:2]
    result = engine.generate([5, 6, 7], stop=stop, **SEEDED)
    assert result.text == whole.text[: whole.text.index(stop)]
    assert (result.finish_reason, result.choices[0].stop_string) == ("stop", stop)
    assert result.usage.completion_tokens == len(result.token_ids) < 24


def test_an_engine_that_is_told_of_the_end_of_a_text_draws_no_more_of_it(engine: Engine) -> None:
    client = engine._client
    number, ear = sent(client, (5, 6), **LONG | {"n": 2})
    eventually(lambda: ear.tokens(0) > 2 < ear.tokens(1), "tokens are drawn for both")
    client.stop(number, 0, 2)
    eventually(lambda: any(isinstance(event, Ended) for event in list(ear.events)), "it is stopped")
    client.cancel(number)
    told = heard(ear.wait())
    assert told.reasons == {0: "stop", 1: "cancelled"}
    assert told.tokens(0) > 2
    done = ear.events[-1]
    assert isinstance(done, Done)
    assert done.usage.completion_tokens == 2 + told.tokens(1)
    client.stop(number, 0, 1)  # no effect


def test_a_request_that_fails_is_told_the_error_that_was_given(engine: Engine) -> None:
    number, ear = sent(engine._client, (5, 6), **LONG)
    engine._client.fail(number, BadRequest("no text", "prompt", hint="None at all"))
    last = ear.wait()[-1]
    assert isinstance(last, Failed)
    assert isinstance(last.error, BadRequest)
    assert (str(last.error), last.error.message) == ("no text. None at all", "no text")
    engine._client.fail(number, BadRequest("again"))  # no effect


def test_a_session_continues_and_is_forked_saved_and_loaded(engine: Engine) -> None:
    with engine.session() as session:
        session.send("Who keeps the cellar?", **SEEDED)
        session.save("talk")
        with session.fork() as fork, engine.load("talk") as loaded:
            turns = [one.send("Why?", **SEEDED) for one in (session, fork, loaded)]
            assert len({(one.text, one.token_ids) for one in turns}) == 1
            assert turns[1].usage.cached_tokens > turns[0].usage.prompt_tokens // 2
            assert session.messages == fork.messages == loaded.messages


def test_the_end_of_a_session_is_that_of_its_turn(engine: Engine) -> None:
    session = engine.session(chat=False)
    turn = session.stream([5, 6], **LONG)
    next(turn)
    session.close()
    for _ in turn:
        pass
    assert session.turns == 1


def test_a_chat_is_answered_from_memory(engine: Engine) -> None:
    first = engine.chat(CHAT, **GREEDY)
    again = [*CHAT, {"role": "assistant", "content": first.text}, {"role": "user", "content": "Why?"}]
    assert engine.chat(again, **GREEDY).usage.cached_tokens >= first.usage.prompt_tokens


def test_an_adapter_changes_the_text_of_requests_that_name_it(engine: Engine, model: Path) -> None:
    plain, style = (outcome(engine.generate([5, 6, 7], adapter=name, **GREEDY)) for name in ("", "style"))
    assert plain != style
    engine.adapters.add("other", model / "other")
    other = outcome(engine.generate([5, 6, 7], adapter="other", **GREEDY))
    assert other not in (plain, style)
    engine.adapters.remove("other", wait=True)
    assert [one.name for one in engine.adapters.list()] == ["style"]


# -- cancelling -------------------------------------------------------------------------------------------------------


def test_a_stream_that_is_left_is_cancelled(engine: Engine) -> None:
    stream = engine.stream([5, 6], **LONG)
    for _ in range(3):
        next(stream)
    assert engine.stats().running == 1
    stream.close()


def test_a_request_can_be_cancelled_before_it_begins_while_it_runs_and_after_its_end(engine: Engine) -> None:
    client = engine._client
    running = [sent(client, (5, 6, one), **LONG) for one in range(7, 11)]
    for _, ear in running:
        eventually(lambda ear=ear: ear.tokens(0), "it runs")
    waiting, last = sent(client, (5, 6), **GREEDY)
    client.cancel(waiting)
    assert [type(event) for event in last.wait()] == [Ended, Done]
    for number, ear in running:
        client.cancel(number)
        assert heard(ear.wait()).reasons == {0: "cancelled"}
        done = ear.events[-1]
        assert isinstance(done, Done)
        assert done.usage.completion_tokens == ear.tokens(0)
    for number in (waiting, *(number for number, _ in running), client.number()):
        client.cancel(number)  # no effect


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_what_is_refused_is_told_nothing_and_holds_nothing(engine: Engine) -> None:
    ear, own, context = TextEar(), Ear(), engine.model.context
    plain, wrong = SamplingParams(), SamplingParams(constraint=Constraint.json_schema({"$ref": "#/nowhere"}))
    for kind, prompt, params, adapter in (
        (BadRequest, [], plain, None),
        (BadRequest, [5, 100_000], plain, None),
        (PromptTooLong, [5] * (context + 1), plain, None),
        (BadRequest, [5], plain, "unknown"),
        (BadRequest, [5], wrong, None),
    ):
        with pytest.raises(kind):
            engine.submit(prompt, params, deliver=ear, adapter=adapter)
    for produced in ((Produced(0, (5, 100_000)),), (Produced(3, ()),)):
        refused = with_fields(submission((5, 6), number=engine._client.number()), produced=produced)
        with pytest.raises(BadRequest, match="produced"):
            engine._client.submit(refused, own)
    assert ear.events == own.events == []
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.cells_used) == (0, 0, 0)


def test_the_reason_of_a_refusal_is_that_of_the_other_places(engines: dict[str, Engine]) -> None:
    errors = []
    for place in PLACES:
        with pytest.raises(BadRequest, match="unknown") as caught:
            engines[place].generate([5], adapter="unknown")
        errors.append((str(caught.value), caught.value.message, caught.value.param, caught.value.hint))
    assert errors[1:] == errors[:1] * (len(PLACES) - 1)


def test_more_requests_than_may_wait_are_refused_unless_they_go_on(engine: Engine) -> None:
    """One that goes on was taken in by an engine that has died."""
    client, ears = engine._client, []
    for one in range(4):
        ears.append(sent(client, (5, 6, 7 + one), **LONG))
        eventually(lambda: ears[-1][1].tokens(0), "it runs")
    ears += [sent(client, (5, 6), **LONG) for _ in range(MOST_WAITING)]
    eventually(lambda: engine.stats().waiting == MOST_WAITING, "the others wait")
    refused = Ear()
    asked = submission((5, 6), number=client.number(), **LONG)
    with pytest.raises(Overloaded, match=f"{MOST_WAITING} requests are waiting"):
        client.submit(asked, refused)
    assert refused.events == []
    goes_on = with_fields(asked, goes_on=True)
    client.submit(goes_on, refused)
    for number in (*(number for number, _ in ears), goes_on.number):
        client.cancel(number)
    for ear in (*(ear for _, ear in ears), refused):
        assert isinstance(ear.wait()[-1], Done)


# -- controls ---------------------------------------------------------------------------------------------------------


def test_what_is_asked_of_all_places_is_answered_alike(engines: dict[str, Engine]) -> None:
    found = []
    for place in PLACES:
        engine = engines[place]
        engine.cache.clear()
        for prompt in ([*range(5, 60)], [*range(5, 30), *range(70, 90)]):
            engine.submit(prompt, SamplingParams(**GREEDY), deliver=(ear := TextEar()), namespace="tenant")
            ear.wait()
        acknowledged(engine)
        client = engine._client
        client.ask(CheckInvariants())
        stats, picture = client.ask(ReadStats()), client.ask(TakePicture())
        assert client.ask(ReadStats()).steps == stats.steps
        assert client.ask(DescribeDisk()).bytes > 0
        entries = [one for part in client.parts(ListEntries("device", "tenant")) for one in part]
        assert len(entries) == len(picture.entries) > 0
        found.append(
            (
                client.ask(DescribeCapacity()),
                client.ask(ListNamespaces()),
                client.ask(ListAdapters()),
                [one.name for one in picture.entries],
                [one["tokens"] for one in entries],
                (stats.cells_cached, stats.prefixes.tokens, stats.groups),
            )
        )
    assert found[1:] == found[:1] * (len(PLACES) - 1)


def test_the_card_of_all_places_is_the_same(engines: dict[str, Engine]) -> None:
    thread, *others = (engines[place]._client.card for place in PLACES)
    assert thread.text.assets is not None
    for other in others:
        assert other.model == thread.model
        assert (other.cells, other.pooling) == (thread.cells, thread.pooling)
        assert (other.text.end_ids, other.text.borders) == (thread.text.end_ids, thread.text.borders)
        assert other.text.assets is not None
        assert other.text.assets.tokenizer.to_str() == thread.text.assets.tokenizer.to_str()


def test_the_load_is_reported(engines: dict[str, Engine], reports: dict[str, list[Progress]]) -> None:
    """What this process imports is reported by an engine on a thread only, and the start of a process by the other.
    What one of them has measured, the other may find in a file."""
    apart = ("importing", "starting the process", "measuring")
    thread, process = ({one.stage for one in reports[place] if not one.stage.startswith(apart)} for place in PLACES[:2])
    assert process == thread != set()


def test_an_archive_goes_out_in_parts_and_comes_in_again(engine: Engine) -> None:
    engine.cache.clear()
    engine.generate([*range(5, 90)], **GREEDY)
    acknowledged(engine)
    stored = [one["tokens"] for one in engine.cache.listed("disk")]
    archive = b"".join(engine.cache.export())
    assert engine.cache.clear().stored > 0
    assert list(engine.cache.listed("disk")) == []
    assert engine.cache.import_from(io.BytesIO(archive)).stored == len(stored) > 0
    assert [one["tokens"] for one in engine.cache.listed("disk")] == stored
    parts = engine._client.parts(ExportStore())
    next(parts)
    assert isinstance(parts, Generator)
    parts.close()
    assert list(parts) == []


def test_a_source_that_raises_ends_the_import(engine: Engine) -> None:
    class Broken:
        def read(self, n: int, /) -> bytes:
            raise OSError("the medium is gone")

    with pytest.raises(OSError, match="the medium is gone"):
        engine.cache.import_from(Broken())
    with pytest.raises(Exception, match="archive"):
        engine.cache.import_from(io.BytesIO(b"no archive"))


def test_statistics_are_told_without_being_asked_for(engine: Engine) -> None:
    """Those that are told last are those of an engine that rests, so also what was told later than its last event."""
    before = engine.stats()
    engine.generate([5, 6, 7], **GREEDY)
    acknowledged(engine)
    now = engine.stats()
    assert now.steps > before.steps

    def alike() -> bool:  # but for when it was so, and for rates of replicas, which fade
        return replace(engine.last_stats, at=0.0, cluster=None) == replace(now, at=0.0, cluster=None)

    eventually(alike, "the last ones are told")


# -- receivers --------------------------------------------------------------------------------------------------------


def test_a_defect_of_the_statistics_ends_no_engine(engines: dict[str, Engine], monkeypatch, caplog) -> None:
    engine, before = engines["thread"], engines["thread"].last_stats

    def broken(_: Any) -> Any:
        raise ArithmeticError("a count is below zero")

    with monkeypatch.context() as patch:
        patch.setattr("kvcellar.frontend.thread_client.stats", broken)
        eventually(lambda: engine.generate([5, 6], **GREEDY) and "below zero" in caplog.text, "it is logged")
    eventually(lambda: engine.generate([5, 6], **GREEDY) and engine.last_stats.steps > before.steps, "it is told again")


def test_a_receiver_that_waits_for_the_engine_is_refused(engine: Engine) -> None:
    refused: list[Exception] = []
    own = threading.Event()

    def deliver(event: object) -> None:
        if isinstance(event, Done):
            for call in (engine.stats, lambda: engine.generate([5]), engine.cache.namespaces):
                with pytest.raises(WrongStage) as caught:
                    call()
                refused.append(caught.value)
            own.set()

    engine.submit([5, 6], SamplingParams(**GREEDY), deliver=deliver)
    assert own.wait(60)
    assert len(refused) == 3


def test_a_receiver_that_raises_ends_its_own_request_only(engine: Engine) -> None:
    other = engine.stream([5, 6], **GREEDY | {"max_tokens": 60})
    text = next(other).text
    calls = []

    def deliver(event: object) -> None:
        calls.append(event)
        raise RuntimeError("no one listens")

    engine.submit([7, 8], SamplingParams(**LONG), deliver=deliver)
    text += "".join(piece.text for piece in other)
    assert outcome(engine.generate([5, 6], **GREEDY | {"max_tokens": 60}))[0][0][0] == text
    at_rest(engine)
    assert len(calls) == 1


# -- the end ----------------------------------------------------------------------------------------------------------


def test_at_the_end_requests_that_are_not_done_fail_and_later_calls_are_refused(engines, place) -> None:
    engine = engines[place]
    client, ears = engine._client, []
    for one in range(6):
        ears.append(sent(client, (5, 6, 7 + one), **LONG))
    eventually(lambda: ears[0][1].tokens(0), "it runs")
    parts, refused = client.parts(ListEntries("device", None)), Ear()
    engine.close()
    for _, ear in ears:
        last = ear.wait()[-1]
        assert isinstance(last, Failed)
        assert isinstance(last.error, EngineClosed)
    assert not engine.healthy
    engine.close()
    for call in (
        engine.stats,
        lambda: engine.generate([5]),
        lambda: client.submit(submission((5,), number=client.number()), refused),
        lambda: list(engine.cache.listed("device")),
    ):
        with pytest.raises(EngineClosed, match="closed"):
            call()
    with pytest.raises(EngineClosed):
        next(parts)
    client.cancel(ears[0][0])
    client.stop(ears[0][0], 0, 1)
    assert refused.events == []
