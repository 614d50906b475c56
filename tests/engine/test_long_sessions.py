"""Conversations that outgrow the context: they go on, and each turn is answered as a fresh engine would answer it."""

import random

import pytest

from kvcellar import BadRequest, Engine, PromptTooLong
from tests.engine.mixes import assert_at_rest, bytes_for, small_engine, tokens

CONTEXT = 48
ARCHITECTURES = ["llama", "gpt2", "gemma2", "gemma3", "bloom"]  # in place, not, in place, two that read again
OTHERS = {
    "nobody else": lambda engine, draw: None,
    "evicted": lambda engine, draw: engine.clear_cache(),
    "others": lambda engine, draw: engine.generate([tokens(draw, 40) for _ in range(3)], max_tokens=8),
}


def remembered(text, keep):
    """What is left of a text that has been read token by token, with a shift whenever the context was full."""
    left = []
    for token in text:
        if len(left) == CONTEXT:
            del left[keep : keep + (CONTEXT - keep) // 2]
        left.append(token)
    return left


@pytest.mark.parametrize("others", OTHERS)
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("keep", [0, 5])
def test_every_turn_is_answered_as_its_prompt_alone_would_be(name, keep, others):
    draw = random.Random(f"{name} {keep}")
    scarce = {"cache_bytes": bytes_for(name, 120, context=CONTEXT)} if others == "others" else {}
    text, cached = [], 0
    with small_engine(name, context=CONTEXT, **scarce) as engine, small_engine(name, context=CONTEXT) as cold:
        session = engine.session(chat=False)
        for _ in range(8):
            new = tokens(draw, draw.choice([1, 4, 9, 20]))
            how = {"max_tokens": draw.choice([1, 6, 40]), "ignore_eos": True, "shift": True, "num_keep": keep}
            answer = session.send(new, **how)
            text += new
            cold.clear_cache()
            assert answer.token_ids == cold.generate(remembered(text, keep), **how).token_ids
            assert answer.usage.prompt_tokens == len(remembered(text, keep))
            text += answer.token_ids
            assert session.tokens == text
            cached += answer.usage.cached_tokens
            OTHERS[others](engine, draw)
            engine.check()
        assert len(text) > 2 * CONTEXT
        assert cached == 0 or others != "evicted"
        session.close()
        assert_at_rest(engine)


def test_what_a_shift_has_moved_is_not_resumed():
    with small_engine("llama", context=CONTEXT) as engine:
        session = engine.session()
        session.send([5, 6, 7], max_tokens=60, ignore_eos=True, shift=True, num_keep=3)
        assert engine.stats().cells_cached == 3, "of the prompt; what was drawn was rotated in place"
        again = session.send([8], max_tokens=1, shift=True, num_keep=3)
        assert again.usage.cached_tokens == 3


def test_half_a_context_is_forgotten_at_once_so_that_most_turns_read_only_what_is_new():
    with small_engine("llama", context=CONTEXT) as engine:
        session = engine.session()
        how = {"max_tokens": 1, "ignore_eos": True, "shift": True, "num_keep": 4}
        read = []
        for turn in range(40):
            usage = session.send([5 + turn, 6], **how).usage
            read.append(usage.prompt_tokens - usage.cached_tokens)
        assert sum(count > 3 for count in read) <= 3 * 40 // 22 + 1
        assert max(read) <= CONTEXT - 4


def test_all_of_the_first_prompt_stays_if_that_is_wanted():
    with small_engine("llama", context=CONTEXT) as engine, small_engine("llama", context=CONTEXT) as cold:
        session, text = engine.session(), []
        for new in ([5, 6, 7, 8, 9], [10] * 20, [11] * 20, [12] * 20):
            how = {"max_tokens": 9, "ignore_eos": True, "shift": True}
            answer = session.send(new, num_keep=-1, **how)
            text += new
            assert answer.token_ids == cold.generate(remembered(text, 5), num_keep=5, **how).token_ids
            text += answer.token_ids


def test_what_is_sent_is_never_cut_or_raises():
    with small_engine("llama", context=CONTEXT) as engine:
        session = engine.session()
        how = {"max_tokens": 4, "ignore_eos": True, "shift": True}
        session.send([5] * 30, **how)
        assert session.send([6] * CONTEXT, **how).usage.prompt_tokens == CONTEXT
        before = list(session.tokens)
        for wrong in (
            {"text": [6] * (CONTEXT + 1)},
            {"text": [6] * 9, "num_keep": 40},
            {"text": [6] * 2, "num_keep": 48},
        ):
            with pytest.raises(PromptTooLong):
                session.send(**how | wrong)
        with pytest.raises(PromptTooLong):
            session.send([6], max_tokens=4)
        assert session.tokens == before
        assert session.send([7], **how).usage.prompt_tokens < CONTEXT


def test_turns_that_forgot_can_be_rewound_and_forked():
    with small_engine("llama", context=CONTEXT) as engine:
        session, stages = engine.session(), [[]]
        how = {"max_tokens": 17, "ignore_eos": True, "shift": True, "num_keep": 2}
        for turn in range(6):
            session.send([5 + turn] * 9, **how)
            stages.append(list(session.tokens))
        twin = session.fork()
        for back in range(6, -1, -1):
            assert session.tokens == stages[back]
            session.rewind(min(back, 1))
        assert twin.send([50], **how).usage.prompt_tokens <= CONTEXT
        twin.rewind(3)
        assert twin.tokens == stages[4]
        wanted = twin.fork().send([60], **how).token_ids
        engine.clear_cache()
        assert twin.send([60], **how).token_ids == wanted
        assert_at_rest(engine)


@pytest.fixture(scope="module")
def chatty():
    with Engine(dtype="float32", device="cpu", cache_bytes=32_000_000, context=96, threads=1) as engine:
        yield engine


def test_a_chat_forgets_its_oldest_turns_whole(chatty):
    how = {"max_tokens": 10, "temperature": 0.0, "shift": True, "ignore_eos": True}
    session, starts, messages = chatty.session(), [], []
    for turn in range(12):
        messages.append({"role": "user", "content": f"def number_{turn}(value):"})
        answer = session.send(messages[-1]["content"], **how)
        start = session._transcript.last.omitted
        assert start % 2 == 0
        chatty.clear_cache()
        assert answer.text == chatty.chat(messages[start:], **how).text
        messages.append({"role": "assistant", "content": answer.text})
        assert session.messages == messages
        starts.append(start)
    assert starts == sorted(starts)
    assert 1 < len(set(starts)) < 8
    assert len(chatty.render(messages[starts[-1] :][:-1])) <= 96
    session.rewind(12)
    assert (session.tokens, session.messages, session._transcript.last.omitted) == ([], [], 0)
    session.close()


def test_a_message_that_is_longer_than_the_context_is_refused_whatever_may_be_forgotten(chatty):
    session = chatty.session()
    how = {"max_tokens": 10, "temperature": 0.0, "shift": True}
    session.send("import os", **how)
    with pytest.raises(PromptTooLong):
        session.send("import sys; " * 60, **how)
    with pytest.raises(BadRequest, match="chat=False"):
        session.send([5], **how)
    assert len(session.messages) == 2
    session.close()
