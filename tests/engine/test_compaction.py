"""What an idle engine does with short runs: it joins them, piece by piece, and comes to an end."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.engine.core.compaction import PASSES, SHORT, Compaction, worth_compacting
from kvcellar.memory.attention.sdpa import Sdpa
from kvcellar.memory.cells.cells import Cells
from kvcellar.memory.kv.storage import Fragments
from kvcellar.memory.shapes import StoredAs
from tests.cache.tagged import Tagged
from tests.engine.mixes import assert_at_rest, small_engine
from tests.laws.dumb import causal, chunked, kept_as, member, shifting, sliding
from tests.laws.player import Player
from tests.laws.watch import Wishes, nothing_changes

law = settings(derandomize=True, deadline=None, max_examples=8)


@pytest.mark.parametrize(
    ("cells", "runs", "sequences", "free", "settled", "worth"),
    [
        (1000, 100, 8, 500, 0, True),
        (1000, 100, 8, 500, 50, True),
        (1000, 100, 8, 500, 51, False),  # no better for what it cost last time
        (1000, 100, 51, 500, 0, False),  # as few runs as there can be, or nearly
        (1000, 100, 8, SHORT - 1, 0, False),
        (SHORT * 100, 100, 8, 500, 0, False),
        (SHORT * 100 - 1, 100, 8, 500, 0, True),
        (3, 1, 1, 500, 0, False),
        (0, 0, 0, 500, 0, False),
    ],
)
def test_only_short_runs_that_could_be_fewer_are_worth_it(cells, runs, sequences, free, settled, worth) -> None:
    assert worth_compacting(Fragments(cells, runs, sequences, free), settled) == worth


def scattered(tagged: Tagged, draw: random.Random, sequences: int = 5) -> None:
    """Sequences that grow in the holes of others, forks among them."""
    for seq in range(100, 100 + tagged.memory.storage.capacity()["full"] // 4):
        tagged.step({seq: draw.choice([2, 3, 5])} if tagged.memory.free()["full"] > 4 else {100: 1})
        if tagged.memory.free()["full"] < 5:
            break
    there = [seq for seq in tagged.tokens if seq != 100]
    draw.shuffle(there)
    for _ in range(20):
        while min(tagged.memory.free().values()) < 2 * sequences:
            gone = there.pop()
            tagged.memory.drop(gone)
            del tagged.tokens[gone]
        tagged.step(dict.fromkeys(range(sequences), 1))
    tagged.tokens[50] = tagged.tokens[0][: tagged.memory.fork(0, 50, 12)]
    for seq in [*there, 100]:
        tagged.memory.drop(seq)
        del tagged.tokens[seq]


@law
@given(st.integers(0, 10**6))
def test_every_piece_leaves_memory_as_it_was_and_the_last_leaves_long_runs(seed: int) -> None:
    tagged = Tagged(Sdpa(), 320, names=["full", "window", "chunk"])
    scattered(tagged, random.Random(seed))
    before, most = tagged.memory.storage.fragments()["full"], tagged.memory.storage.piece("full")
    compaction, moved = Compaction(tagged.memory.storage), 0
    while compaction.compact_some():
        assert 0 <= compaction.moved - moved <= most
        moved = compaction.moved
        tagged.check()
    after = tagged.memory.storage.fragments()["full"]
    assert (after.cells, after.tables) == (before.cells, before.tables)
    assert after.runs <= after.tables + 1 or not worth_compacting(before, 0), "a fork has a run of its own behind"
    assert moved <= PASSES * sum(found.cells for found in tagged.memory.storage.fragments().values())
    with nothing_changes(tagged.memory):
        assert not compaction.compact_some(), "what was compacted is not compacted again"


def test_it_holds_for_every_layout_and_for_quantised_planes() -> None:
    members = [
        kept_as(
            shifting(member("full", causal(), [0], (2, 2), 16, 16), turns=True),
            StoredAs.parse("k=int8+hadamard,v=int4"),
        ),
        member("memory", sliding(3, 40), [1], (2, 1), 32, 32),
        member("chunk", chunked(50), [2], (2, 1), 32, 32),
    ]
    player = Player(members, [100] * 3, wishes=Wishes("head"))
    there = list(range(10, 35))
    for seq in there:
        player.step(player.batch({seq: 4}))
    random.Random(2).shuffle(there)
    for _ in range(10):
        while min(player.memory.free().values()) < 3:
            player.drop(there.pop())
        player.step(player.batch(dict.fromkeys(range(3), 1)))
    player.fork(0, 3, 7)
    for seq in there:
        player.drop(seq)
    before = player.memory.storage.fragments()
    compaction = Compaction(player.memory.storage)
    while compaction.compact_some():
        player.check()
    for name, found in player.memory.storage.fragments().items():
        assert found.runs < before[name].runs / 2, name


class Stubborn:
    """A memory that moves cells for ever, and whose runs stay as they are."""

    def __init__(self) -> None:
        self.moved = 0

    def fragments(self) -> dict[str, Fragments]:
        return {"full": Fragments(1000, 400, 3, 500)}

    def piece(self, group: str) -> int:
        return 7

    def compact(self, budget_cells: int, group: str | None = None) -> int:
        self.moved += budget_cells
        return budget_cells


class Poor(Stubborn):
    def compact(self, budget_cells: int, group: str | None = None) -> int:
        self.moved += 1
        raise torch.OutOfMemoryError("no staging")


@pytest.mark.parametrize("memory", [Stubborn(), Poor()])
def test_what_cannot_be_improved_comes_to_an_end(memory: Stubborn) -> None:
    compaction = Compaction(memory)
    while compaction.compact_some():
        assert memory.moved <= PASSES * 1000
    moved = memory.moved
    assert moved > 0
    assert not compaction.compact_some()
    assert memory.moved == moved


def test_an_idle_engine_compacts_what_rests_and_answers_as_before(monkeypatch) -> None:
    take = Cells.take
    monkeypatch.setattr(Cells, "take", lambda self, n, after=None, before=None: take(self, n))  # never where it ends
    greedy = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    with small_engine("gemma2", context=120) as engine:
        sessions = [engine.session(chat=False) for _ in range(2)]
        for session in sessions:
            session.send([5, 6, 7], **greedy)
            session.send([8, 9], **greedy)
        sessions.append(sessions[0].fork())
        loop = engine._loop
        while loop.call(loop.compaction.compact_some):
            engine.check()
        assert engine.stats().compacted > 0
        for found in loop.call(engine._built.memory.storage.fragments).values():
            assert found.runs < 2 * found.tables, "else there would be something to compact"
        for session in sessions:
            prompt = [*session.tokens, 7]
            answer = session.send([7], **greedy)
            assert answer.usage.cached_tokens >= len(prompt) - 2, "all but what was drawn last and what is new"
            with small_engine("gemma2", context=120) as cold:
                assert answer.token_ids == cold.generate(prompt, **greedy).token_ids
            session.close()
        assert_at_rest(engine)


def test_a_call_that_comes_in_waits_for_one_piece_at_most() -> None:
    with small_engine("llama", context=48) as engine:
        loop, pieces, waited = engine._loop, [], []

        def compact_some() -> bool:
            pieces.append(len(pieces))
            if len(pieces) == 5:
                loop.post(lambda: waited.append(len(pieces)))
            return len(pieces) < 50

        def begin() -> None:
            loop.compaction.compact_some = compact_some

        loop.call(begin)
        while len(pieces) < 50:
            loop.call(lambda: None)
        assert waited == [5]
