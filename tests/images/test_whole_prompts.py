"""Prompts whose tokens all see each other: computed in one step, and used by no other prompt."""

from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from kvcellar import Engine
from kvcellar.engine.messages import ListEntries
from kvcellar.errors import BadRequest
from tests.engine.tiered import acknowledged
from tests.images.seeing import Pictures, asked, engine_of, pictures_of

MOST = 450  # tokens of a step
BEFORE, AFTER = [5, 6, 7, 8, 31], [12, 13, 14, 15]


@pytest.fixture(scope="module")
def pictures() -> Pictures:
    return pictures_of("paligemma")


@pytest.fixture
def engine(pictures: Pictures, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    with engine_of(pictures, tmp_path, monkeypatch, step_tokens=MOST) as engine:
        yield engine
        engine._built.loop.call(engine._built.loop.check)


def test_a_prompt_that_begins_with_another_is_computed_whole(engine: Engine, pictures: Pictures) -> None:
    """Of the shorter one, all tokens are in memory, and had not seen those behind it."""
    for parts in ([pictures.one, BEFORE], [pictures.one, BEFORE, AFTER], [BEFORE, AFTER], [BEFORE, AFTER, BEFORE]):
        found = asked(engine, pictures, *parts).result()
        assert list(found.choices[0].token_ids) == pictures.greedy(*parts)
        assert found.usage.cached_tokens == 0
        assert found.recall is not None
        assert "see each other" in found.recall.detail


def test_outputs_of_a_prompt_share_it(engine: Engine, pictures: Pictures) -> None:
    before = engine.stats().prefill_tokens
    found = asked(engine, pictures, pictures.one, AFTER, n=3).result()
    assert [list(one.token_ids) for one in found.choices] == 3 * [pictures.greedy(pictures.one, AFTER)]
    assert engine.stats().prefill_tokens - before == found.usage.prompt_tokens


def test_a_prompt_as_long_as_a_step_is_answered_while_a_stream_runs_and_changes_no_text(
    engine: Engine, pictures: Pictures
) -> None:
    long = (MOST * AFTER)[:MOST]
    alone = asked(engine, pictures, BEFORE, max_tokens=100).result().choices[0].token_ids
    loop, all_are_there = engine._built.loop, Event()
    loop.post(all_are_there.wait)
    stream = asked(engine, pictures, BEFORE, max_tokens=100)
    parts = [[long], [pictures.one, AFTER], [long]]
    others = [asked(engine, pictures, *one) for one in parts]
    all_are_there.set()
    for one, text in zip(others, parts, strict=True):
        assert list(one.result().choices[0].token_ids) == pictures.greedy(*text)
    assert stream.result().choices[0].token_ids == alone
    ended = [one.number for one in loop.call(lambda: list(loop.last))][:4]  # the last one first
    assert ended[0] == min(ended), "the stream, which came first, ends last"


def test_what_needs_more_than_a_step_or_parts_of_a_prompt_is_refused(engine: Engine, pictures: Pictures) -> None:
    with pytest.raises(BadRequest, match=f"which see each other, so that .* in windows: {MOST} at most"):
        asked(engine, pictures, (MOST + 1) * [7])
    with pytest.raises(BadRequest, match="see those behind them"):
        asked(engine, pictures, AFTER, prompt_logprobs=1)


def test_an_entry_of_such_a_prompt_names_no_adapter(engine: Engine, pictures: Pictures) -> None:
    asked(engine, pictures, pictures.one, AFTER).result()
    entries = [one for part in engine._client.parts(ListEntries("device", None)) for one in part]
    assert entries
    assert {(one["namespace"], one["adapter"]) for one in entries} == {("", "")}


def test_what_a_record_promises_is_what_was_used_and_what_statistics_count(
    pictures: Pictures, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt in two namespaces and again, a longer one, several outputs, and all after a restart: nothing is read."""
    asks: list[tuple[list[Any], int]] = [
        *3 * [([pictures.one, BEFORE], 1)],
        ([pictures.one, BEFORE, 50 * AFTER], 1),
        ([pictures.two, BEFORE], 4),
        *3 * [([100 * AFTER], 2)],
    ]
    for _ in range(2):
        settings: dict[str, Any] = {"step_tokens": MOST, "max_sequences": 2, "store": str(tmp_path / "store")}
        with engine_of(pictures, tmp_path / "model", monkeypatch, **settings) as engine:
            missed = 0
            first = engine._client.number() + 1
            for number, (parts, n) in enumerate(asks, first):
                found = asked(engine, pictures, *parts, n=n, namespace=f"{number % 2}").result()
                recall, counted = found.recall, engine.stats()
                assert recall is not None
                assert (recall.matched, recall.restored, recall.sources, recall.salted) == (0, 0, (), 0)
                assert found.usage.cached_tokens == recall.restored
                missed += recall.asked
                assert dict(counted.prefixes.missed) == {recall.reason: missed}
                assert (counted.prefixes.asked, counted.prefixes.matched, counted.prefixes.restored) == (missed, 0, 0)
                assert counted.store is not None
                assert counted.store.restored == 0
                way = engine.cache.way(number)
                assert (way.recall, way.prompt) == (recall, found.usage.prompt_tokens)
            acknowledged(engine)
            stored = engine.stats().store
            assert stored is not None
            assert stored.snapshots > 0
