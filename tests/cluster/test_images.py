"""Images at replicas: what one has computed of an image another finds in the shared store, and a question that was
begun goes on elsewhere."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvcellar import Engine
from kvcellar.engine.messages import ReadStats
from kvcellar.memory import restore_plan
from tests.cluster.replicas import FaultyReplica, gateway
from tests.engine.drafting import always_restored
from tests.engine.places import PATIENCE
from tests.images.files import picture
from tests.images.test_whole import user
from tests.images.whole import ROWS, write_model

SETTINGS: Any = {"dtype": "float32", "cache_bytes": 60_000_000, "threads": 1, "record": "off", "pack": False}
GREEDY: Any = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
LOOK = 30 * "look at it. "


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    write_model(folder := tmp_path_factory.mktemp("model"))
    return folder


@pytest.fixture(scope="module")
def alone(model: Path) -> Iterator[Engine]:
    with Engine(model, **SETTINGS) as engine:
        yield engine


def encoded(replica: FaultyReplica) -> int:
    return replica._client.ask(ReadStats()).images_encoded


def test_a_second_question_on_an_image_is_answered_by_another_replica_from_the_shared_store(
    tmp_path: Path, model: Path, alone: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_restored(monkeypatch)
    monkeypatch.setattr(restore_plan, "PATIENCE", PATIENCE)
    settings = SETTINGS | {"store_remote": f"file://{tmp_path}"}
    asked = [user(LOOK, picture(seed=1), words) for words in ("what is it?", "which one?")]
    with closing(FaultyReplica(model, settings)) as one, gateway({"one": one}) as (engine, _):
        assert engine.chat(asked[0], **GREEDY).text == alone.chat(asked[0], **GREEDY).text
        assert encoded(one) == engine.stats().images_encoded == 1
        one.leave(PATIENCE, PATIENCE)  # it writes first
    with closing(FaultyReplica(model, settings)) as other, gateway({"other": other}) as (engine, _):
        found = engine.chat(asked[1], **GREEDY)
        assert found.text == alone.chat(asked[1], **GREEDY).text
        assert found.usage.cached_tokens > len(LOOK) + ROWS
        assert found.recall is not None
        assert dict(found.recall.sources)["remote"] > len(LOOK) + ROWS
        assert encoded(other) == 0


@pytest.mark.parametrize("steps", [1, 3, 6])
def test_a_question_on_an_image_goes_on_where_its_replica_dies(model: Path, alone: Engine, steps: int) -> None:
    asked = user("a", picture(seed=2), "and", picture(seed=3), "alike?")
    wanted = alone.chat(asked, **GREEDY)
    with closing(FaultyReplica(model, SETTINGS)) as one, closing(FaultyReplica(model, SETTINGS)) as two:
        for replica in (one, two):
            replica.steps, replica.at_step = steps, replica.die
        with gateway({"one": one, "two": two}) as (engine, _):
            assert engine.chat(asked, **GREEDY).token_ids == wanted.token_ids
            assert one.deaths + two.deaths > 0
