"""Chats from Python: each turn begins with the tokens of the conversation, and the record says where it does not."""

from pathlib import Path
from typing import Any

import pytest

from kvcellar import BadRequest, Engine
from tests.engine.chatting import chat_engine, unspoken
from tests.text.templates import THINKER


def drawn(engine: Engine) -> dict[str, Any]:
    """Sampling by which replies have tokens that the tokenizer would not choose."""
    return {"max_tokens": 10, "temperature": 2.0, "seed": 1, "suppress_tokens": unspoken(engine), "ignore_eos": True}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_sessions_and_chats_find_all_tokens_of_their_replies(tmp_path: Path) -> None:
    with chat_engine(tmp_path, "llama") as engine:
        how = drawn(engine)
        session = engine.session()
        first = session.send("Who are you?", **how)
        known = first.usage.prompt_tokens + first.usage.completion_tokens - 1
        assert session.send("And you?", **how).usage.cached_tokens == known
        session.rewind()
        assert engine.chat([*session.messages, user("Where?")], **how).usage.cached_tokens >= known
        exact, again = engine.render(session.messages), engine.render(session.messages, replay=False)
        assert exact != again
        assert engine.decode(exact) == engine.decode(again)
        replays = engine._built.intake.codec.replays
        assert replays is not None
        replays.check()


def test_replies_of_all_choices_and_of_cancelled_requests_are_known(tmp_path: Path) -> None:
    with chat_engine(tmp_path, "llama") as engine:
        how, messages = drawn(engine), [user("Who are you?")]
        result = engine.chat(messages, n=3, **how)
        prompt = engine.render(messages)
        for answer in result.choices:
            talk = [*messages, {"role": "assistant", "content": answer.text}, user("And you?")]
            assert engine.render(talk)[: len(prompt) + 10] == [*prompt, *answer.token_ids]
        where = engine.render([user("Where?")])
        stream = engine.stream(where, **how)
        part = [next(stream) for _ in range(4)]
        stream.close()
        engine.stats()  # waits until the request has ended
        text = "".join(delta.text for delta in part)
        known = [*where, *(token for delta in part for token in delta.token_ids)]
        talk = [user("Where?"), {"role": "assistant", "content": text}, user("And you?")]
        assert engine.render(talk)[: len(known)] == known


def test_without_bytes_for_them_replies_are_tokenized_again(tmp_path: Path) -> None:
    with chat_engine(tmp_path, "llama", replay_bytes=0) as engine:
        first = engine.chat([user("Who are you?")], **drawn(engine))
        talk = [user("Who are you?"), {"role": "assistant", "content": first.text}, user("And you?")]
        assert engine.render(talk) == engine.render(talk, replay=False)


def test_the_record_of_a_chat_says_what_a_template_costs(tmp_path: Path) -> None:
    """Reasoning that a template drops: here the first letters of the reply."""
    with chat_engine(tmp_path, "gemma3", template=THINKER) as engine:
        how = drawn(engine)
        first = engine.chat([user("Who are you?")], **how)
        sent = {"role": "assistant", "content": first.text[4:], "reasoning_content": first.text[:4]}
        second = engine.chat([user("Who are you?"), sent, user("And you?")], **how)
        assert second.recall is not None
        rewrite = second.recall.rewrite
        assert rewrite is not None
        assert (rewrite.message, rewrite.role, rewrite.by) == (1, "assistant", "template")
        assert 0 < rewrite.tokens <= first.usage.completion_tokens
        assert str(rewrite) in second.recall.detail


def test_bytes_for_replies_are_a_number(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="replay_bytes must be a whole number of at least 0"):
        Engine(tmp_path, replay_bytes=-1)
