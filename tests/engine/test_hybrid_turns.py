"""Conversations with recurrent models: a state can be resumed at few places, and they are the right ones."""

import random
from itertools import combinations

import pytest

from benchmarks.conversation import Script, Turn, ideal, play, reads
from kvcellar import Engine
from kvcellar.engine.load import capacity
from kvcellar.frontend.session import Session
from kvcellar.memory.prefix.node import common_prefix
from kvcellar.memory.prefixes import NEAR
from kvcellar.sampling_params import SamplingParams
from tests.engine.mixes import Ear, assert_at_rest, small_engine, tokens

GREEDY = {"temperature": 0.0, "ignore_eos": True}
NAMES = ["lfm2", "qwen3.5"]
PIECE = 32


@pytest.fixture
def scarce(monkeypatch):
    """An engine with rows for few checkpoints, whatever its bytes are."""

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
            engine.clear_cache()
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


@pytest.mark.parametrize("parts", [True, False])
def test_checkpoints_inside_a_step_take_no_step_of_their_own_where_the_model_can_leave_them(scarce, parts):
    with scarce("lfm2", 8) as engine:
        if not parts:
            whole_steps(engine)
        engine.generate(tokens(random.Random(3), PIECE), max_tokens=1, **GREEDY)
        assert engine.stats().steps == (1 if parts else 2), "its last token has a step of its own"
        again = engine.generate(tokens(random.Random(3), PIECE), max_tokens=1, **GREEDY)
        assert again.usage.cached_tokens == PIECE - 1


def whole_steps(engine: Engine) -> None:
    """From now on the model cannot leave checkpoints inside a step."""
    engine._built.guest.no_partial_commit = "a test"
    engine._loop.manager.cache.in_parts = False


# -- positions of turns -----------------------------------------------------------------------------------------------


def talked(session: Session, turns: int, *, user: int = 20, answer: int = 18) -> list[int]:
    """So many turns; returns where the text of each began."""
    began: list[int] = []
    for turn in range(turns):
        began.append(len(session.tokens))
        session.send(tokens(random.Random(turn), user), max_tokens=answer, **GREEDY)
    return began


@pytest.mark.parametrize("parts", [True, False])
@pytest.mark.parametrize("back", [1, 3, 5])
@pytest.mark.parametrize("again", [False, True])
def test_a_session_whose_memory_was_evicted_can_be_rewound_as_before(scarce, back, again, parts):
    """Once computed again, all of it can be resumed where a turn began, or where its answer did."""
    with scarce("lfm2", 64) as engine, engine.session(chat=False) as session:
        if not parts:
            whole_steps(engine)
        began = talked(session, 6)
        engine.clear_cache()
        assert session.send([5, 6, 7], max_tokens=1, **GREEDY).usage.cached_tokens == 0
        engine.check()
        session.rewind(1 + back)
        sent = tokens(random.Random(6 - back), 20) if again else [99] * 9
        warm = session.send(sent, max_tokens=4, **GREEDY)
        assert warm.usage.cached_tokens == began[6 - back] + (len(sent) - 1 if again else 0)
        engine.clear_cache()
        cold = engine.generate([*session.tokens[: began[6 - back]], *sent], max_tokens=4, **GREEDY)
        assert (warm.token_ids, cold.usage.cached_tokens) == (cold.token_ids, 0)


def test_a_chat_whose_memory_was_evicted_can_be_rewound_as_before():
    """It has a sliding window, too."""
    limits = {"dtype": "float32", "device": "cpu", "cache_bytes": 32_000_000, "threads": 1}
    with Engine(**limits) as engine, engine.session() as session:
        for text in ("import os", "def read(path):", "class A:"):
            session.send(text, max_tokens=14, **GREEDY)
        engine.clear_cache()
        session.send("import re", max_tokens=1, **GREEDY)
        session.rewind(2)
        asked = [engine.render([*session.messages, {"role": "user", "content": text}]) for text in ("class", "for")]
        warm = session.send("for", max_tokens=4, **GREEDY)
        assert 0 <= common_prefix(*asked) - warm.usage.cached_tokens < NEAR
        engine.clear_cache()
        assert warm.token_ids == engine.chat(session.messages[:-1], max_tokens=4, **GREEDY).token_ids


@pytest.mark.parametrize("parts", [True, False])
def test_where_rows_are_too_few_for_all_checkpoints_late_ones_are_left(scarce, parts):
    with scarce("lfm2", 4, step_tokens=256) as engine, engine.session(chat=False) as session:
        if not parts:
            whole_steps(engine)
        began = talked(session, 12, user=11, answer=8)
        engine.clear_cache()
        session.send([5, 6, 7], max_tokens=1, **GREEDY)
        engine.check()
        assert engine.stats().rows_cached == engine.stats().rows, "all that were free in the last step"
        session.rewind(2)
        assert began[10] < session.send([8, 9], max_tokens=1, **GREEDY).usage.cached_tokens <= began[11]
        assert_at_rest(engine)


@pytest.mark.parametrize("checkpoints", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_prompts_with_checkpoints_compute_the_right_state_however_few_rows_there_are(scarce, checkpoints):
    """Each would leave more checkpoints than there are rows."""
    prompts = [tokens(random.Random(seed), 40) for seed in range(6)]
    with scarce("qwen3.5", checkpoints, step_tokens=256) as engine:
        for number in range(2):
            for prompt in prompts:
                asked = Ear()
                positions = [5, 9, 16, 30][number:]
                how = SamplingParams(max_tokens=2, **GREEDY)
                engine.submit(prompt, how, deliver=asked, checkpoint_positions=positions)
                warm = asked.wait().ids()
                engine.check()
                with small_engine("qwen3.5") as cold:
                    assert warm == cold.generate(prompt, max_tokens=2, **GREEDY).token_ids
        assert_at_rest(engine)


def test_a_model_with_full_attention_only_has_no_step_for_a_position():
    with small_engine("llama", step_tokens=PIECE) as engine, engine.session(chat=False) as session:
        talked(session, 6)
        engine.clear_cache()
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
