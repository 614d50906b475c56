"""Chats from Python: each turn begins with the tokens of the conversation, and the record says where it does not."""

import threading
from pathlib import Path
from threading import Event, Semaphore
from typing import Any

import pytest

from kvcellar import BadRequest, Engine
from kvcellar.events import Done
from kvcellar.memory.prefix.node import common_prefix
from kvcellar.text import replay
from tests.engine.chatting import chat_engine, unspoken
from tests.text.templates import CHATML, LLAMA2, PLAIN, THINKER


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
        replays = engine._codec.replays
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


@pytest.mark.parametrize("template", [PLAIN, LLAMA2, CHATML], ids=["plain", "llama2", "chatml"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2"])
def test_another_question_after_the_same_system_prompt_computes_only_what_is_new(
    name: str, template: str, tmp_path: Path
) -> None:
    """Also where no control token is between them, and what the model remembers can be resumed at checkpoints only."""
    system = {"role": "system", "content": "You know hills and rivers. Be brief.\n" * 20}
    first, second = [system, user("Which is long?")], [system, user("And who said so?")]
    with chat_engine(tmp_path, name, template=template, record="off") as engine:
        same = common_prefix(engine.render(first, replay=False), engine.render(second, replay=False))
        assert same > 300
        assert engine.chat(first, max_tokens=2).usage.cached_tokens == 0
        assert engine.chat(second, max_tokens=2).usage.cached_tokens == same


def test_the_engine_goes_on_while_others_hold_what_is_known_of_chats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it hashes no prompt."""
    hashed: list[int] = []
    plain = replay.prompt_key
    monkeypatch.setattr(replay, "prompt_key", lambda *key: (hashed.append(threading.get_ident()), plain(*key))[1])
    with chat_engine(tmp_path, "llama", record="off") as engine:
        prompt, replays = engine.render([user("Who?")]), engine._codec.replays
        assert replays is not None
        threads, held, ended = list[int](), Event(), Semaphore(0)

        def deliver(event: object) -> None:
            held.wait(60)
            threads.append(threading.get_ident())
            if isinstance(event, Done):
                ended.release()

        for tokens in (3, 9):
            engine.submit(prompt, engine.params(max_tokens=tokens, ignore_eos=True), deliver=deliver)
        with replays._lock:
            held.set()
            assert ended.acquire(timeout=30)
            assert ended.acquire(timeout=30), "the end of the first stops the engine"
    assert hashed
    assert set(threads).isdisjoint(hashed)


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
