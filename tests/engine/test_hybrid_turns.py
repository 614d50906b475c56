"""Conversations with recurrent models: a state can be gone back to at few places, and they are the right ones."""

import random
from itertools import combinations

import pytest

from kvcellar import Engine
from kvcellar.bench.conversation import Script, Turn, ideal, play, reads
from kvcellar.engine import capacity
from kvcellar.engine.manager import NEAR, common_prefix
from kvcellar.engine.session import Session
from tests.engine.mixes import small_engine, tokens

GREEDY = {"temperature": 0.0, "ignore_eos": True}
NAMES = ["lfm2", "qwen3.5"]
PIECE = 32


@pytest.fixture
def scarce(monkeypatch):
    """An engine with room for few checkpoints, whatever its bytes are. Half of it is also for sessions that rest."""

    def engine(name: str, checkpoints: int, step_tokens: int = PIECE):
        monkeypatch.setattr(capacity, "MOST_CHECKPOINTS", checkpoints // 2)
        made = small_engine(name, max_sequences=1, step_tokens=step_tokens)
        assert made.stats().rows == checkpoints + 2, "one is the sequence's own, and a step takes one"
        return made

    return engine


@pytest.mark.parametrize(("checkpoints", "of_tokens"), [(12, 1.03), (32, 1.02)])
@pytest.mark.parametrize("name", NAMES)
def test_a_conversation_is_read_about_as_little_as_who_knows_its_future_would(scarce, name, checkpoints, of_tokens):
    with scarce(name, checkpoints) as engine:
        with engine.session(chat=False) as session:
            turns = play(session, Script(start=100, user=10, completion=4))
            engine.check()
        found = reads(turns, checkpoints=checkpoints, step_tokens=PIECE)
        assert found.ours <= 1.02 * found.ideal, found
        assert found.ours <= of_tokens * found.by_token, found
        for turn in turns:
            cold = engine.generate(turn.prompt, max_tokens=len(turn.completion), **GREEDY)
            assert (cold.token_ids, cold.usage.cached_tokens) == (turn.completion, 0)


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_that_is_asked_for_again_reads_one_token(scarce, name):
    with scarce(name, 8) as engine, engine.session(chat=False) as session:
        for sent in (tokens(random.Random(1), 70), tokens(random.Random(2), 9)):
            first = session.send(sent, max_tokens=5, **GREEDY)
            session.rewind()
            again = session.send(sent, max_tokens=5, **GREEDY)
            assert again.usage.cached_tokens == again.usage.prompt_tokens - 1
            assert again.token_ids == first.token_ids


def test_who_has_no_session_reads_in_as_few_steps_as_there_can_be(scarce):
    """Nobody comes back to what it leaves, so its last token is read with the others."""
    with scarce("lfm2", 8) as engine:
        before = engine.stats().steps
        engine.generate(tokens(random.Random(3), PIECE), max_tokens=1, **GREEDY)
        assert engine.stats().steps == before + 1
        with engine.session(chat=False) as session:
            session.send(tokens(random.Random(3), PIECE), max_tokens=1, **GREEDY)
            assert engine.stats().steps == before + 3
    with small_engine("llama", step_tokens=PIECE) as engine, engine.session(chat=False) as session:
        session.send(tokens(random.Random(3), PIECE), max_tokens=1, **GREEDY)
        assert engine.stats().steps == 1


# -- checkpoint_positions
# ----------------------------------------------------------------------------------------------------------


def talked(session: Session, turns: int, *, user: int = 20, answer: int = 18) -> list[int]:
    """So many turns; answers where the text of each began."""
    began: list[int] = []
    for turn in range(turns):
        began.append(len(session.tokens))
        session.send(tokens(random.Random(turn), user), max_tokens=answer, **GREEDY)
    return began


def lose(engine: Engine, session: Session) -> None:
    """What others do to it that need its memory."""
    engine._loop.call(lambda: engine._loop.manager.evict_session(session._number))


@pytest.mark.parametrize("back", [1, 3, 5])
@pytest.mark.parametrize("again", [False, True])
def test_a_session_that_lost_its_memory_can_be_rewound_as_before(scarce, back, again):
    """Once read again, all of it is gone back to where the turn began, or where its answer did."""
    with scarce("lfm2", 64) as engine, engine.session(chat=False) as session:
        began = talked(session, 6)
        lose(engine, session)
        assert session.send([5, 6, 7], max_tokens=1, **GREEDY).usage.cached_tokens == 0
        engine.check()
        session.rewind(1 + back)
        sent = tokens(random.Random(6 - back), 20) if again else [99] * 9
        warm = session.send(sent, max_tokens=4, **GREEDY)
        assert warm.usage.cached_tokens == began[6 - back] + (len(sent) - 1 if again else 0)
        cold = engine.generate([*session.tokens[: began[6 - back]], *sent], max_tokens=4, **GREEDY)
        assert (warm.token_ids, cold.usage.cached_tokens) == (cold.token_ids, 0)


def test_a_chat_that_lost_its_memory_can_be_rewound_as_before():
    """A short one: the model has a sliding window, too, and what has slid out of that is not gone back to."""
    limits = {"dtype": "float32", "device": "cpu", "cache_bytes": 32_000_000, "threads": 1}
    with Engine(**limits) as engine, engine.session() as session:
        for text in ("import os", "def read(path):", "class A:"):
            session.send(text, max_tokens=14, **GREEDY)
        lose(engine, session)
        session.send("import re", max_tokens=1, **GREEDY)
        session.rewind(2)
        asked = [engine.render([*session.messages, {"role": "user", "content": text}]) for text in ("class", "for")]
        warm = session.send("for", max_tokens=4, **GREEDY)
        assert 0 < common_prefix(*asked) - warm.usage.cached_tokens < NEAR
        assert warm.token_ids == engine.chat(session.messages[:-1], max_tokens=4, **GREEDY).token_ids


def test_as_many_borders_are_stopped_at_as_states_can_be_kept(scarce):
    """The last ones; and each of them is a step, as are what follows them and the last token."""
    with scarce("lfm2", 4, step_tokens=256) as engine, engine.session(chat=False) as session:
        talked(session, 12, user=11, answer=8)
        lose(engine, session)
        before = engine.stats().steps
        session.send([5, 6, 7], max_tokens=1, **GREEDY)
        assert 2 < engine.stats().steps - before <= 4 + 2


def test_borders_that_lie_close_together_are_one(scarce):
    with scarce("lfm2", 64, step_tokens=256) as engine, engine.session(chat=False) as session:
        talked(session, 20, user=3, answer=2)
        lose(engine, session)
        before = engine.stats().steps
        session.send([5, 6, 7], max_tokens=1, **GREEDY)
        assert engine.stats().steps - before <= len(session.tokens) // 16 + 2


def test_who_has_attention_only_does_not_stop_at_borders():
    with small_engine("llama", step_tokens=PIECE) as engine, engine.session(chat=False) as session:
        talked(session, 6)
        lose(engine, session)
        before = engine.stats().steps
        session.send([5, 6, 7], max_tokens=1, **GREEDY)
        assert engine.stats().steps - before == -(-(len(session.tokens) - 1) // PIECE)


# -- who knows the future ---------------------------------------------------------------------------------------------


def dumb(
    turns: list[Turn], checkpoints: int, piece: int, kept: tuple[int, ...] = (), before: tuple[int, ...] = ()
) -> int:
    """What `ideal` says, had by trying everything."""
    if not turns:
        return 0
    turn, prompt = turns[0], len(turns[0].prompt)
    common = max(n for n in range(len(before) + 1) if before[:n] == turn.prompt[:n] and n < prompt)
    alive = {place for place in (*kept, len(before), 0) if place <= common}
    places = (alive | set(range(piece, prompt - 1, piece)) | {prompt - 1}) - {0}
    ways = [way for n in range(min(checkpoints, len(places)) + 1) for way in combinations(sorted(places), n)]
    return prompt - max(alive) + min(dumb(turns[1:], checkpoints, piece, way, turn.held) for way in ways)


@pytest.mark.parametrize("seed", range(40))
def test_who_knows_the_future_does_as_well_as_who_tries_everything(seed):
    draw = random.Random(seed)
    text: tuple[int, ...] = ()
    turns: list[Turn] = []
    for _ in range(5):
        prompt = (*text[: draw.randint(0, len(text))], *(draw.randrange(3) for _ in range(draw.randint(1, 4))))
        turns.append(Turn(prompt, 0, tuple(draw.randrange(3) for _ in range(draw.randint(1, 3)))))
        text = (*prompt, *turns[-1].completion)
    for checkpoints in (1, 2, 3):
        assert ideal(turns, checkpoints=checkpoints, step_tokens=3) == dumb(turns, checkpoints, 3)
