"""Every call that computes tokens keeps them as its `retention` says."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcellar import BadRequest, Engine, RetentionOptions
from tests.engine.chatting import chat_engine
from tests.engine.mixes import small_engine
from tests.engine.test_retention import Clock

PROMPT = [5, 6, 7, 8] * 8
HOW: dict[str, Any] = {"max_tokens": 2, "temperature": 0.0, "ignore_eos": True}
SHORT = RetentionOptions(ttl=10)
CHAT = [{"role": "user", "content": "Who are you?"}]


def one_turn(engine: Engine, retention: RetentionOptions | None) -> None:
    with engine.session(chat=False, retention=retention) as session:
        session.send(PROMPT, **HOW)


def a_fork(engine: Engine, retention: RetentionOptions | None) -> None:
    with engine.session(chat=False, retention=retention) as session, session.fork() as fork:
        fork.send(PROMPT, **HOW)


def one_loaded(engine: Engine, retention: RetentionOptions | None) -> None:
    with engine.session(chat=False) as session:
        session.save("one")
    with engine.load("one", retention=retention) as session:
        session.send(PROMPT, **HOW)


CALLS: dict[str, Callable[[Engine, RetentionOptions | None], object]] = {
    "generate": lambda engine, retention: engine.generate(PROMPT, retention=retention, **HOW),
    "a batch": lambda engine, retention: engine.generate([PROMPT, PROMPT], retention=retention, **HOW),
    "stream": lambda engine, retention: list(engine.stream(PROMPT, retention=retention, **HOW)),
    "session": one_turn,
    "fork": a_fork,
    "load": one_loaded,
}


def missed(engine: Engine) -> int:
    usage = engine.generate(PROMPT, **HOW).usage
    return usage.prompt_tokens - usage.cached_tokens


@pytest.mark.parametrize("call", CALLS)
def test_what_a_call_computes_expires_if_it_says_so(call) -> None:
    with small_engine("llama") as engine:
        clock = Clock(engine)
        for retention, expires in ((SHORT, True), (None, False)):
            engine.clear_cache()
            CALLS[call](engine, retention)
            clock.now += 11
            assert missed(engine) == (len(PROMPT) if expires else 1)


def test_what_a_chat_computes_expires_if_it_says_so(tmp_path: Path) -> None:
    with chat_engine(tmp_path, "llama") as engine:
        clock = Clock(engine)
        engine.chat(CHAT, retention=SHORT, **HOW)
        clock.now += 11
        assert engine.chat(CHAT, **HOW).usage.cached_tokens == 0
        clock.now += 11
        assert engine.chat(CHAT, **HOW).usage.cached_tokens > 0


@pytest.mark.parametrize("call", CALLS)
def test_what_is_no_retention_is_refused_before_anything_is_computed(call) -> None:
    with small_engine("llama") as engine:
        with pytest.raises(BadRequest, match=r"retention is RetentionOptions\(\.\.\.\), not 'short'"):
            CALLS[call](engine, "short")  # pyright: ignore[reportArgumentType]
        assert engine.stats().cells_cached == 0
