"""A picture of an engine: what requests found in memory and where, what steps did, and bounds on all of it."""

import json
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.prefix import Spans, _insert, bushy
from kvcellar import Engine, SamplingParams
from kvcellar.engine.control.contents import Contents
from kvcellar.engine.control.survey import NODES, _Walk
from kvcellar.engine.core.last_requests import KEPT_REQUESTS, KEPT_TOKENS, LastRequests
from kvcellar.engine.core.request import Request
from kvcellar.engine.core.runner import RECENT
from kvcellar.engine.messages import Submission
from kvcellar.engine.request_options import SubmitOptions
from kvcellar.errors import BadRequest
from kvcellar.events import Recall, Rewrite
from kvcellar.frontend.control_clients import CacheClient
from kvcellar.inspector.snapshot import SeenModel, Viewer, _recall, snapshot
from kvcellar.memory.prefix.node import key_of
from kvcellar.memory.prefix.tree import Tree
from kvcellar.memory.retention import RetentionOptions
from kvcellar.serve.http.json_text import to_json
from tests.counted import lines
from tests.engine.mixes import PATIENCE
from tests.engine.tiered import acknowledged
from tests.zoo import ARCHS

EVERYTHING = Viewer(None, True, None)
FIRST = list(range(3, 40))
LONG = [3 + 7 * n % 90 for n in range(160)]
SMALL: dict[str, Any] = {"cache_bytes": 4_000_000, "threads": 1}


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(ARCHS["llama"].build(), **SMALL) as engine:
        yield engine
        engine.check()


def survey(engine: Engine) -> CacheClient:
    return engine.cache


def ended(engine: Engine, count: int) -> Any:
    """The picture once so many requests have ended: their last events are delivered just before."""
    until = time.monotonic() + PATIENCE
    while len((picture := survey(engine).picture()).ended) < count:
        assert time.monotonic() < until
        time.sleep(0.002)
    return picture


def test_the_second_turn_is_shown_with_what_came_from_memory_and_its_way(engine):
    first = engine.generate(FIRST, max_tokens=5, temperature=0).choices[0].token_ids
    turn = [*FIRST, *first, 50, 51, 52]
    result = engine.generate(turn, max_tokens=3, temperature=0)
    picture = ended(engine, 2)
    second, before = picture.ended
    assert (second.number, before.number) == (1, 0)
    assert second.recall == result.recall
    assert (second.usage, second.outcome) == (result.usage, "length")
    way = survey(engine).way(second.number)
    assert (way.prompt, way.recall) == (len(turn), result.recall)
    assert [start for _, start, _, _ in way.entries] == [0, *(end for _, _, end, _ in way.entries[:-1])]
    assert way.entries[-1][2] >= len(turn)
    assert {name for name, *_ in way.entries} <= {entry.name for entry in picture.entries}


def test_a_way_ends_where_other_texts_go_on(engine):
    """The rest of its last entry is not of this request."""
    engine.generate([*FIRST, 60, 61, 62, 63], max_tokens=1, temperature=0)
    collector, ticket = engine._requests.start([*FIRST, 60], engine.params(max_tokens=1, temperature=0), {})
    collector.result()
    ticket.cancel()
    ended(engine, 2)
    entries = survey(engine).way(1).entries
    assert entries[-1][2] <= len(FIRST) + 2
    assert all(len(tokens) <= end - start for _, start, end, tokens in entries)


def test_cells_of_running_requests_and_of_the_tree_are_all_that_are_used(engine):
    engine.generate(FIRST, max_tokens=3)
    held = engine.stream([*FIRST, 70], max_tokens=200, ignore_eos=True)
    next(iter(held))
    picture = survey(engine).picture()
    (live,) = picture.live
    assert (live.prompt, live.status) == (len(FIRST) + 1, "decode")
    for group, cells in zip(picture.stats.groups, picture.maps, strict=True):
        assert cells.counts["request"] == group.used
        assert cells.counts["kept"] == group.cached
        assert cells.counts["free"] == group.cells - group.used - group.cached
        assert {run.which for run in cells.runs if run.kind == "request"} == {live.number}
    held.close()


def test_completions_that_share_a_prompt_are_one_request(engine):
    params = engine.params(max_tokens=100, n=3, ignore_eos=True)
    ears = [engine._requests.start([*FIRST, last], params, {}) for last in (80, 81)]
    until = time.monotonic() + PATIENCE
    while len(engine._loop.scheduler.running) < 6:
        assert time.monotonic() < until
        time.sleep(0.001)
    picture = survey(engine).picture()
    assert [one.completions for one in picture.live] == [3, 3]
    assert sum(cells.counts["shared"] for cells in picture.maps) >= len(FIRST)
    for _, ticket in ears:
        ticket.cancel()


def test_steps_add_up_to_the_tokens_of_the_requests(engine):
    result = engine.generate(FIRST, max_tokens=9, temperature=0, ignore_eos=True)
    steps = ended(engine, 1).steps
    assert [one.number for one in steps] == list(range(1, len(steps) + 1))
    assert sum(one.prefill for one in steps) == len(FIRST)
    assert sum(one.decode for one in steps) == result.usage.completion_tokens - 1
    assert {one.modules for one in steps} == {engine.stats().recording.refused}


def test_recorded_steps_and_drafts_are_told_apart():
    with Engine(ARCHS["llama"].build(), record="auto", draft="ngram", **SMALL) as engine:
        engine.generate([5, 6, 7, 8] * 8, max_tokens=24, temperature=0, ignore_eos=True)
        picture = ended(engine, 1)
    assert {one.modules for one in picture.steps} == {None}
    assert sum(one.drafts for one in picture.steps) == picture.stats.speculation.drafted > 0
    stats = replace(picture.stats, recording=replace(picture.stats.recording, by_modules={"too large": 1}))
    whole, own = (
        seen(replace(picture, stats=stats), one)["engine"] for one in (EVERYTHING, Viewer("other", True, None))
    )
    assert whole["recording"]["steps"] == stats.recording.steps > 0
    assert whole["speculation"]["drafted"] == stats.speculation.drafted
    assert (own["recording"]["steps"], own["recording"]["by_modules"], "speculation" in own) == (0, {}, False)


def test_an_old_step_is_forgotten(engine):
    for number in range(1, 5):
        engine.generate(FIRST, max_tokens=RECENT // 3, ignore_eos=True)
        steps = ended(engine, number).steps
    assert len(steps) == RECENT
    assert steps[-1].number == engine.stats().steps


def test_entries_say_which_tiers_have_them():
    with Engine(ARCHS["llama"].build(), host_bytes=8_000_000, **SMALL | {"cache_bytes": 16_000_000}) as engine:
        engine.generate(LONG, max_tokens=3)
        engine.generate([*LONG[:90], *reversed(LONG[:90])], max_tokens=3)
        ended(engine, 2)
        acknowledged(engine)
        entries = survey(engine).picture().entries
        assert [(entry.parent, entry.start) for entry in entries] == [(None, 0), (0, 90), (0, 90)]
        assert [entry.stored for entry in entries] == [{"host": entry.end - entry.start} for entry in entries]


def test_a_tree_of_more_entries_than_are_shown_shows_those_used_last(engine):
    for last in range(3, 11):
        engine.generate([*FIRST, last, last, last], max_tokens=1)
    whole = ended(engine, 8).entries
    walk = engine._loop.call(lambda: _walk(engine, 4))
    assert len(walk.entries) == 4
    assert walk.left_out > 0
    assert walk.entries[0] == whole[0]
    assert all(entry.parent is None or entry.parent < at for at, entry in enumerate(walk.entries))
    assert NODES >= 4


def _walk(engine: Engine, most: int) -> Any:
    from kvcellar.engine.control.survey import _Walk

    walk = _Walk(engine._built, most)
    while walk.go_on(0.0):
        pass
    return walk


@pytest.mark.parametrize("name", ["gemma3", "lfm2", "mamba"])
def test_every_kind_of_layer_has_a_picture(name):
    with Engine(ARCHS[name].build(), **SMALL | {"cache_bytes": 32_000_000}) as engine:
        engine.generate(FIRST, max_tokens=4)
        engine.generate([*FIRST, 44, 45], max_tokens=4)
        picture = ended(engine, 2)
        for group, cells in zip(picture.stats.groups, picture.maps, strict=True):
            assert cells.counts["free"] == group.cells - group.cached
            assert cells.counts["kept"] == group.cached
        seen(picture, EVERYTHING)


def engine_text(tokens: tuple[int, ...]) -> str:
    return " ".join(map(str, tokens))


def seen(picture: Any, viewer: Viewer) -> Any:
    """A snapshot, after it was sent as JSON."""
    return json.loads(to_json(snapshot(picture, viewer, engine_text, "", SeenModel("model", 64, []))))


def test_what_is_not_there_is_refused(engine):
    for look in (lambda: survey(engine).way(7), lambda: survey(engine).entry("0" * 12, 5)):
        with pytest.raises(BadRequest):
            look()


def test_an_error_in_a_step_leaves_a_picture_that_can_be_taken(engine, monkeypatch):
    monkeypatch.setattr(engine._built.guest, "forward", lambda *_: 1 / 0)
    with pytest.raises(Exception, match="ZeroDivisionError"):
        engine.generate(FIRST, max_tokens=2)
    (one,) = ended(engine, 1).ended
    assert (one.outcome, one.usage.completion_tokens) == ("EngineFailed", 0)


def test_others_are_neither_counted_nor_named_nor_read(engine):
    for tenant in ("mine", "yours"):
        how = SubmitOptions(namespace=tenant, retention=RetentionOptions(owner=tenant))
        engine._requests.result([*FIRST, 90 if tenant == "mine" else 91], engine.params(max_tokens=2), how)
    picture = ended(engine, 2)
    shown = seen(picture, Viewer("mine", True, "mine"))
    text = json.dumps(shown)
    yours = next(entry for entry in picture.entries if entry.owner == "yours")
    assert yours.name not in text
    assert engine_text(yours.tokens) in json.dumps(seen(picture, EVERYTHING))
    assert len(shown["requests"]["ended"]) == 1
    assert [entry["namespace"] for entry in shown["tree"]["entries"]] == ["mine"]
    assert {run[2] for group in shown["groups"] for run in group["runs"] if run[1] == "kept"} == {0}
    assert {run[1] for group in shown["groups"] for run in group["runs"]} == {"kept", "other"}
    assert not shown["sums"]
    operator = seen(picture, Viewer(None, False, None))
    assert len(operator["requests"]["ended"]) == 2
    assert operator["sums"]
    assert engine_text(yours.tokens) not in json.dumps(operator)


def test_what_others_do_changes_no_number_that_a_key_sees(engine):
    """To the digit, whatever they compute and keep."""

    def computed(tenant: str, tokens: int) -> None:
        prompt, how = [5 + len(tenant)] * tokens, engine.params(max_tokens=2, ignore_eos=True)
        engine._requests.result(prompt, how, SubmitOptions(namespace=tenant, retention=RetentionOptions(owner=tenant)))

    def shown() -> dict[str, Any]:
        found = seen(ended(engine, 1), Viewer("mine", True, "mine"))
        kept = [sum(run[0] for run in group["runs"] if run[1] == "kept") for group in found["groups"]]
        return {**found, "at": 0.0, "groups": (kept, [group["counts"] for group in found["groups"]])}

    engine.clear_cache()
    computed("mine", 20)
    before = shown()
    for tokens in (30, 41):
        computed("yours", tokens)
    assert shown() == before
    assert before["groups"][0][0] >= 20


def test_last_requests_are_bounded_in_number_and_tokens():
    chance, last, seen = random.Random(1), LastRequests(), []
    for number in range(400):
        length = chance.choice([1, 10, 5000, KEPT_TOKENS // 3, KEPT_TOKENS + 1])
        request = Request(
            Submission(number=number, prompt=key_of((1,) * length), params=SamplingParams(), seed=0), lambda event: None
        )
        last.add(request)
        seen.append((number, length))
        last.check()
        assert [one.number for one in last] == [n for n, _ in reversed(seen[-KEPT_REQUESTS:])]
        kept, tokens = [], 0
        for n, size in reversed(seen[-KEPT_REQUESTS:]):
            tokens += size
            if tokens > KEPT_TOKENS:
                break
            kept.append(n)
        assert [one.number for one in last if one.text is not None] == kept


def test_a_way_is_the_same_in_slices_of_any_size(engine, monkeypatch) -> None:
    for end in range(10, 38, 3):  # each leaves a node: the next one goes on in another way
        engine.generate([*FIRST[:end], 90 + end % 2], max_tokens=1, temperature=0)
    engine.generate(FIRST, max_tokens=1, temperature=0)
    number = ended(engine, 11).ended[0].number
    whole = survey(engine).way(number)
    assert len(whole.entries) > 5
    monkeypatch.setattr("kvcellar.engine.control.survey.PARTS", 2)
    assert survey(engine).way(number) == whole


class Tables:
    """The claims of a tree whose nodes hold no cells."""

    def __init__(self) -> None:
        self.tables: dict[int, Any] = {}
        self.checkpoints: dict[int, Any] = {}

    def of(self, claim: int) -> "Tables":
        return self


@pytest.mark.parametrize("shape", ["flat", "bushy"])
def test_a_slice_of_a_picture_looks_at_a_bounded_number_of_nodes(shape, monkeypatch) -> None:
    monkeypatch.setattr("kvcellar.engine.control.survey.TURNS", 4)
    monkeypatch.setattr("kvcellar.engine.control.survey.CHILDREN", 32)
    for nodes in (300, 12_000):
        if shape == "bushy":
            tree = bushy(nodes)
        else:
            claims = Spans()
            tree = Tree(claims, anywhere=True)
            for first in range(nodes):
                _insert(tree, claims, [first, 1, 2])
        manager = SimpleNamespace(prefixes=SimpleNamespace(tree=tree), store=None)
        built: Any = SimpleNamespace(loop=SimpleNamespace(manager=manager), memory=SimpleNamespace(claims=Tables()))
        made: list[_Walk] = []
        assert lines(lambda built=built, made=made: made.append(_Walk(built, NODES))) < 50
        going, most = [True], 4 * (80 + 2 * (NODES + 32)) + 6 * NODES  # a turn ranks children; the best become places
        while going[-1]:
            assert lines(lambda walk=made[0], going=going: going.append(walk.go_on(float("inf")))) <= most
        assert len(made[0].entries) == min(NODES, len(list(tree.nodes())))
        roots = [entry for entry in made[0].entries if entry.parent is None]
        assert [entry.start for entry in roots] == [0] * len(roots)


def test_what_was_selected_before_a_recovery_is_not_removed_from_the_new_tree(engine, monkeypatch) -> None:
    engine.generate(FIRST, max_tokens=1, temperature=0)
    contents, loop = Contents(engine._built), engine._loop
    forget = contents._remove_drafts

    def recovered(*args: Any) -> int:
        loop.call(lambda: loop.manager.recover([]))
        engine.generate(FIRST, max_tokens=1, temperature=0)
        return forget(*args)

    monkeypatch.setattr(contents, "_remove_drafts", recovered)
    assert contents.remove(prefix=FIRST[:4]).tokens == 0
    engine.check()
    assert engine.stats().prefixes.tokens >= len(FIRST)


def test_what_a_rewritten_message_says_is_shown_to_those_who_may_read_it() -> None:
    for reads in (False, True):
        for rewrite in (None, Rewrite(1, "user", "client", 3)):
            recall = Recall(99, 80, 64, (), 0.0, "diverged", "the words", entry="7", rewrite=rewrite, image="the image")
            seen = _recall(recall, reads, None)
            assert seen.detail == ("the words" if reads or rewrite is None else "")
            assert (seen.entry, seen.image) == (("7", "the image") if reads else ("", ""))
