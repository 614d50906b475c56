"""What a server may rely on holds of every engine that it serves: on a thread, in a process, and of the tests' fake."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcellar import BadRequest, Engine, EngineClosed, PromptTooLong
from kvcellar.events import Delta, Done, Finished
from kvcellar.sampling_params import SamplingParams
from tests.engine.mixes import Ear
from tests.engine.places import GREEDY, LONG, SEEDED, SMALL, eventually, model_in
from tests.serve.fake_engine import FakeEngine

PLACES = ("thread", "process", "fake")


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The last test closes them."""
    model = model_in(tmp_path_factory.mktemp("model"))
    with (
        Engine(Path(model), **SMALL) as thread,
        Engine(Path(model), process=True, **SMALL) as process,
        FakeEngine() as fake,
    ):
        yield dict(zip(PLACES, (thread, process, fake), strict=True))


@pytest.fixture(params=PLACES)
def engine(engines: dict[str, Any], request: pytest.FixtureRequest) -> Any:
    return engines[request.param]


def sent(engine: Any, prompt: tuple[int, ...], **sampling: Any) -> tuple[Any, Ear]:
    ear = Ear()
    return engine.submit(prompt, SamplingParams(**sampling), deliver=ear), ear


def test_each_choice_is_told_to_its_end_and_then_the_request_is_done_once(engine: Any) -> None:
    _, ear = sent(engine, (65, 66, 67), **SEEDED | {"n": 3, "logprobs": 2})
    usage = ear.wait().done.usage
    assert ear.reasons == dict.fromkeys(range(3), "length")
    assert (usage.prompt_tokens, usage.completion_tokens) == (3, 3 * 24)
    assert [len(ear.ids(choice)) for choice in range(3)] == [24] * 3
    for event in ear.events:
        if isinstance(event, Delta):
            assert [one.token_id for one in event.logprobs or ()] == list(event.token_ids)


def test_a_text_ends_before_its_stop_string(engine: Any) -> None:
    whole = sent(engine, (65, 66, 67, 68, 69, 70), **GREEDY)[1].wait().text()
    stop = whole[4:6]
    _, ear = sent(engine, (65, 66, 67, 68, 69, 70), **GREEDY | {"stop": (stop,)})
    assert ear.wait().done.usage.completion_tokens == len(ear.ids()) < 24
    assert ear.text() == whole[: whole.index(stop)]
    (finished,) = (event for event in ear.events if isinstance(event, Finished))
    assert (finished.reason, finished.stop_string) == ("stop", stop)


def test_a_request_that_is_cancelled_is_done_with_what_was_drawn(engine: Any) -> None:
    sampling = LONG | {"n": 2, "shift": not isinstance(engine, FakeEngine)}
    ticket, ear = sent(engine, (65, 66), **sampling)
    eventually(lambda: ear.ids(0) and ear.ids(1), "both choices are written")
    assert ticket.begun
    ticket.cancel()
    ticket.cancel()
    usage = ear.wait().done.usage
    assert ear.reasons == {0: "cancelled", 1: "cancelled"}
    assert usage.completion_tokens == len(ear.ids(0)) + len(ear.ids(1))
    ticket.cancel()
    assert isinstance(ear.events[-1], Done)


@pytest.mark.parametrize(
    ("kind", "prompt"), [(BadRequest, ()), (BadRequest, (5, 10**6)), (BadRequest, (-1,)), (PromptTooLong, (5,) * 10**6)]
)
def test_what_is_refused_is_told_nothing(engine: Any, kind: type[Exception], prompt: tuple[int, ...]) -> None:
    ear = Ear()
    with pytest.raises(kind):
        engine.submit(prompt, SamplingParams(), deliver=ear)
    assert not ear.events


def test_statistics_are_there_without_waiting(engine: Any) -> None:
    assert engine.last_stats.groups
    assert engine.healthy
    assert not engine.starting


@pytest.mark.parametrize("place", PLACES)
def test_at_the_end_what_runs_fails_and_what_comes_is_refused(engines: dict[str, Any], place: str) -> None:
    engine = engines[place]
    _, ear = sent(engine, (65, 66), **LONG | {"shift": place != "fake"})
    eventually(lambda: ear.ids(), "it is written")
    engine.close()
    assert isinstance(ear.wait().error, EngineClosed)
    assert not engine.healthy
    with pytest.raises(EngineClosed):
        sent(engine, (65, 66), **GREEDY)
