"""Conversations: what was read is not read again, and whatever becomes of their memory, answers are as if it were."""

import gc
import logging
import random
import threading
from functools import partial

import pytest

from kvcellar import BadRequest, Engine, EngineFailed, PromptTooLong
from kvcellar.errors import EngineClosed
from kvcellar.memory.prefix.node import key_of
from kvcellar.memory.prefix.tree import LEAST
from tests.engine.mixes import assert_at_rest, assert_greedy, bytes_for, small_engine, tokens
from tests.engine.spoken import Spoken

ASK = {"max_tokens": 6, "temperature": 0.0}
ARCHITECTURES = ["llama", "gemma3", "llama4", "bloom", "deepseek-v3", "lfm3", "qwen3.5"]


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr(logging.getLogger("kvcellar.engine"), "disabled", True)


@pytest.fixture
def engine():
    with small_engine("llama") as engine:
        yield engine
        if engine.healthy:
            engine.check()


# -- warm equals cold -------------------------------------------------------------------------------------------------


class Tree:
    """Sessions that are sent to, forked, rewound, interrupted and closed at random, beside what each should be."""

    def __init__(self, engine: Engine, cold: Engine, seed: object) -> None:
        self.engine, self.cold, self.draw = engine, cold, random.Random(str(seed))
        self.open = [(engine.session(), [()])]  # with its tokens at the end of each turn
        self.cached = 0

    def play(self, acts: int) -> None:
        kinds = [*["send"] * 6, "fork", "fork", "rewind", "rewind", "close", "leave", "fail", "evict", "others"]
        for _ in range(acts):
            getattr(self, self.draw.choice(kinds))(self.draw.randrange(len(self.open)))
            self.engine.check()
        for session, turns in self.open:
            assert tuple(session.tokens) == turns[-1]
            session.close()

    def send(self, which: int) -> None:
        session, turns = self.open[which]
        prompt = (*turns[-1], *tokens(self.draw, self.draw.randint(1, 9)))
        result = session.send(prompt[len(turns[-1]) :], **ASK)
        self.cold.clear_cache()
        fresh = self.cold.generate(prompt, **ASK)
        assert fresh.usage.cached_tokens == 0
        assert (result.token_ids, result.finish_reason) == (fresh.token_ids, fresh.finish_reason)
        assert result.usage.prompt_tokens == len(prompt)
        assert result.usage.cached_tokens < len(prompt)
        self.cached += result.usage.cached_tokens
        turns.append((*prompt, *result.token_ids))

    def fork(self, which: int) -> None:
        session, turns = self.open[which]
        if len(self.open) < 4:
            self.open.append((session.fork(), list(turns)))

    def rewind(self, which: int) -> None:
        session, turns = self.open[which]
        count = self.draw.randint(0, len(turns) - 1)
        session.rewind(count)
        del turns[len(turns) - count :]

    def close(self, which: int) -> None:
        if len(self.open) > 1:
            self.open.pop(which)[0].close()

    def leave(self, which: int) -> None:
        """A turn that is given up after a token or two is as if it had never been."""
        pieces = self.open[which][0].stream(tokens(self.draw, 3), max_tokens=9, ignore_eos=True)
        for _ in range(self.draw.randint(1, 2)):
            next(pieces)
        pieces.close()

    def fail(self, which: int) -> None:
        guest = self.engine._built.guest
        forward = guest.forward
        guest.forward = lambda *_: 1 // 0
        try:
            with pytest.raises(EngineFailed):
                self.open[which][0].send(tokens(self.draw, 2), **ASK)
        finally:
            guest.forward = forward

    def evict(self, which: int) -> None:
        """What is free when others need memory: some cells or rows, or all that no request uses."""
        manager, some = self.engine._loop.manager, self.draw.randint(1, 30)
        groups = [None, *manager.free()]
        for group in self.draw.choices(groups, k=3):
            prefixes = manager.prefixes
            evict = partial(prefixes.evict, group, some) if group is not None else prefixes.evict_row
            self.engine._loop.call(evict)
        if self.draw.random() < 0.2:
            self.engine.clear_cache()

    def others(self, which: int) -> None:
        self.engine.generate([tokens(self.draw, 20) for _ in range(3)], **ASK)


@pytest.mark.parametrize("memory", ["roomy", "scarce"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_whatever_becomes_of_a_session_it_answers_as_a_fresh_engine_would(name, memory):
    scarce = {"cache_bytes": bytes_for(name, 110)} if memory == "scarce" else {}
    with small_engine(name, **scarce) as engine, small_engine(name) as cold:
        tree = Tree(engine, cold, (name, memory))
        tree.play(30)
        assert tree.cached > 0
        assert_at_rest(engine)


def test_what_a_session_says_is_what_plain_forwards_say(engine):
    session = engine.session()
    for turn in ([5, 6, 7], [8], [9, 10]):
        before = list(session.tokens)
        result = session.send(turn, **ASK)
        assert_greedy("llama", [*before, *turn], result.token_ids, ended=result.finish_reason == "stop")
        assert session.tokens == [*before, *turn, *result.token_ids]
        assert session.last == result


# -- what is remembered -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_all_but_the_last_token_is_remembered_from_turn_to_turn(name):
    with small_engine(name) as engine:
        session, before = engine.session(), 0
        for turn in range(5):
            result = session.send([5 + turn, 6, 7], max_tokens=4, ignore_eos=True)
            assert result.usage.cached_tokens == max(0, before - 1)  # the last one drawn was never read
            before = len(session.tokens)
        session.close()
        assert_at_rest(engine)


def test_a_fork_remembers_what_its_origin_did_and_costs_no_cells(engine):
    session = engine.session()
    session.send(range(3, 43), max_tokens=3, ignore_eos=True)
    held = engine.stats().cells_cached
    twins = [session.fork() for _ in range(3)]
    cached = [twin.send([9], **ASK).usage.cached_tokens for twin in twins]
    assert cached == [42, 43, 43], "the second and third ask what the first has asked"
    assert engine.stats().cells_cached == held + 7, "the same answer is in memory once"
    session.close()
    for twin in twins:
        assert twin.send([9], **ASK).usage.cached_tokens > 43
        twin.close()
    assert_at_rest(engine)


def test_a_rewound_turn_is_read_again_from_where_it_parted(engine):
    session = engine.session()
    first = session.send([5, 6, 7], max_tokens=4, ignore_eos=True)
    session.send([8, 9], max_tokens=4, ignore_eos=True)
    session.rewind()
    assert session.tokens == [5, 6, 7, *first.token_ids]
    again = session.send([8, 10], max_tokens=4, ignore_eos=True)
    assert again.usage.cached_tokens == 8  # both turns began alike
    session.rewind(2)
    assert session.tokens == []
    assert session.send([5, 6, 7], max_tokens=4, ignore_eos=True).token_ids == first.token_ids


def test_a_prompt_that_is_known_to_its_end_still_reads_its_last_token(engine):
    session = engine.session()
    first = session.send([5, 6, 7], max_tokens=1, ignore_eos=True)
    session.rewind()
    again = session.send([5, 6, 7], max_tokens=1, ignore_eos=True)
    assert (again.token_ids, again.usage.cached_tokens) == (first.token_ids, 2)


def test_what_was_used_longest_ago_is_evicted_first():
    """Where nothing was used again yet. And of it little more than is needed: its last tokens, so many that eviction is
    rare."""
    with small_engine("llama", cache_bytes=bytes_for("llama", 100)) as engine:
        sessions = [engine.session() for _ in range(3)]
        for number, session in enumerate(sessions):
            session.send([5 + number] * 25, max_tokens=2, ignore_eos=True)
        engine.generate([9] * 30, max_tokens=4, ignore_eos=True)  # 11 cells more than are free
        left = [engine._loop.manager.prefixes.restorable("", key_of([*s.tokens, 6])) for s in sessions]
        assert left == [26 - LEAST, 26, 26]


def test_a_session_that_fills_most_of_memory_is_not_forgotten_for_its_own_sake():
    """Its next turn needs few new cells, though its whole text would not fit beside itself."""
    with small_engine("llama", cache_bytes=bytes_for("llama", 100)) as engine:
        session = engine.session()
        session.send(range(3, 73), max_tokens=2, ignore_eos=True)
        assert session.send([5, 6], max_tokens=4, ignore_eos=True).usage.cached_tokens == 71


def test_memory_that_was_reclaimed_is_read_again(engine):
    session = engine.session()
    session.send([5, 6, 7], **ASK)
    engine.clear_cache()
    wanted = engine.generate([*session.tokens, 8], **ASK)
    engine.clear_cache()
    again = session.send([8], **ASK)
    assert (again.token_ids, again.usage.cached_tokens) == (wanted.token_ids, 0)
    twin = session.fork()
    engine.clear_cache()
    first = twin.fork().send([9], **ASK)
    engine.clear_cache()
    again = session.send([9], **ASK)
    assert (first.token_ids, first.usage.cached_tokens) == (again.token_ids, again.usage.cached_tokens)
    assert again.usage.cached_tokens == 0


# -- turns that do not come to an end ---------------------------------------------------------------------------------


@pytest.mark.parametrize("turn", ["first", "second"])
def test_a_turn_whose_step_fails_leaves_the_session_as_it_was(engine, monkeypatch, turn):
    session = engine.session()
    if turn == "second":
        session.send([5, 6], **ASK)
    before, last = list(session.tokens), session.last
    with monkeypatch.context() as patch:
        patch.setattr(engine._built.guest, "forward", lambda *_: 1 // 0)
        with pytest.raises(EngineFailed, match="ZeroDivisionError"):
            session.send([7], **ASK)
    assert (session.tokens, session.last) == (before, last)
    engine.check()
    warm = session.send([7], **ASK).token_ids
    engine.clear_cache()
    assert warm == engine.generate([*before, 7], **ASK).token_ids
    session.close()
    assert_at_rest(engine)


def test_a_turn_that_is_refused_leaves_the_session_as_it_was(engine):
    session = engine.session()
    session.send([5, 6], **ASK)
    before = list(session.tokens)
    for wrong in (
        lambda: session.send([1000], **ASK),
        lambda: session.send([5] * 300, **ASK),
        lambda: session.send([5], temperature=-1.0),
        lambda: session.send("text", **ASK),
        lambda: session.send(5, **ASK),
        lambda: session.send([5], n=2),
        lambda: session.rewind(2),
        lambda: session.rewind(-1),
        lambda: session.rewind(1.0),
    ):
        with pytest.raises(BadRequest):
            wrong()
    assert session.tokens == before
    assert session.send([7], **ASK).usage.cached_tokens > 0


def test_an_empty_turn_is_refused_at_the_beginning_and_continues_later(engine):
    session = engine.session()
    with pytest.raises(BadRequest, match="empty"):
        session.send([], **ASK)
    session.send([5, 6], **ASK)
    before = list(session.tokens)
    warm = session.send([], **ASK)
    assert warm.usage.cached_tokens == len(before) - 1
    engine.clear_cache()
    assert warm.token_ids == engine.generate(before, **ASK).token_ids


def test_a_conversation_that_outgrows_the_context_is_told_so_and_can_go_back(engine):
    session = engine.session()
    session.send([5] * 250, max_tokens=6, ignore_eos=True)
    with pytest.raises(PromptTooLong):
        session.send([6], **ASK)
    session.rewind()
    session.send([6], **ASK)


def test_a_session_with_a_running_request_is_busy(engine):
    session = engine.session()
    pieces = session.stream([5], max_tokens=100, ignore_eos=True)
    next(pieces)
    for other in (lambda: session.send([6], **ASK), session.fork, session.rewind, lambda: next(session.stream([6]))):
        with pytest.raises(BadRequest, match="busy"):
            other()
    pieces.close()
    assert session.tokens == []
    session.send([6], **ASK)


def test_of_threads_that_send_to_one_session_all_but_one_are_told_that_it_is_busy(engine):
    session = engine.session()
    outcomes, together = [], threading.Barrier(6)

    def send():
        together.wait(240)
        try:
            outcomes.append(session.send([5], max_tokens=40, ignore_eos=True).token_ids)
        except BadRequest:
            outcomes.append(None)

    threads = [threading.Thread(target=send) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    done = [outcome for outcome in outcomes if outcome]
    assert len(outcomes) == 6
    assert len(done) >= 1
    assert len(session.tokens) == 41 * len(done)


def test_closing_cancels_the_running_request_and_is_idempotent(engine):
    with engine.session() as session:
        pieces = session.stream([5], max_tokens=200, ignore_eos=True)
        next(pieces)
        session.close()
        told = sum(1 for _ in pieces)
        assert told < 199
        session.close()
    assert_at_rest(engine)
    for use in (lambda: session.send([5]), session.fork, session.rewind):
        with pytest.raises(BadRequest, match="closed"):
            use()


def test_a_session_outlives_its_engine_only_to_be_closed():
    with small_engine("llama") as engine:
        session = engine.session()
        session.send([5], **ASK)
    with pytest.raises(EngineClosed):
        session.send([6], **ASK)
    session.close()


# -- text -------------------------------------------------------------------------------------------------------------


def test_what_opens_a_text_opens_a_conversation_once(tmp_path):
    spoken = Spoken(tmp_path)
    with spoken.engine as engine:
        session = engine.session(chat=False)
        for _ in range(3):
            session.send("ab", max_tokens=2, temperature=0.0)
        assert session.tokens.count(spoken.first) == 1
        assert session.tokens[0] == spoken.first


@pytest.fixture(scope="module")
def chatty():
    with Engine(dtype="float32", device="cpu", cache_bytes=32_000_000, threads=1) as engine:
        yield engine


def test_a_chat_sends_the_whole_conversation_and_reads_what_is_new(chatty):
    session, messages, cached = chatty.session(), [], []
    for text in ("def read(path):", "import os", "class A:"):
        messages.append({"role": "user", "content": text})
        result = session.send(text, max_tokens=12, temperature=0.0)
        with Engine(dtype="float32", device="cpu", cache_bytes=32_000_000, threads=1) as cold:
            wanted = cold.chat(messages, max_tokens=12, temperature=0.0)
        assert result.text == wanted.text
        messages.append({"role": "assistant", "content": result.text})
        assert session.messages == messages
        assert result.usage.prompt_tokens == wanted.usage.prompt_tokens
        cached.append(result.usage.cached_tokens)
    assert cached[0] == 0 < cached[1] < cached[2]
    session.rewind(2)
    assert session.messages == messages[:2]
    session.close()


def test_a_turn_that_is_stopped_is_added_with_what_has_come(engine):
    with engine.session() as session:
        assert not session.stop()  # there is none
        pieces = session.stream([5, 6, 7], max_tokens=2000, ignore_eos=True)
        came = [token for _, piece in zip(range(3), pieces, strict=False) for token in piece.token_ids]
        assert session.stop()
        came += [token for piece in pieces for token in piece.token_ids]
        assert session.turns == 1
        assert 3 <= len(came) < 2000
        assert session.tokens == [5, 6, 7, *came]
        assert session.last is not None
        assert session.last.finish_reason == "cancelled"
        assert session.send([], max_tokens=2).usage.cached_tokens == len(session.tokens) - 3


def test_a_system_message_begins_a_chat_and_needs_one(chatty, engine):
    with chatty.session(system="a b") as session:
        session.send("c", max_tokens=2)
        assert [one["role"] for one in session.messages] == ["system", "user", "assistant"]
        first = [{"role": "system", "content": "a b"}, {"role": "user", "content": "c"}]
        assert session.tokens[: len(chatty.render(first))] == chatty.render(first)
    for other, how in ((chatty, {"chat": False}), (engine, {})):
        with pytest.raises(BadRequest, match="a system message needs a chat"):
            other.session(system="a", **how)


def test_a_chat_takes_texts_only(chatty):
    session = chatty.session()
    with pytest.raises(BadRequest, match="chat=False"):
        session.send([5, 6])
    raw = chatty.session(chat=False)
    assert raw.send(chatty.encode("import "), max_tokens=3, temperature=0.0).text


def test_pieces_of_a_turn_are_its_text(chatty):
    session = chatty.session(chat=False)
    told = "".join(piece.text for piece in session.stream("def main():", max_tokens=10, temperature=0.0))
    assert session.last is not None
    assert told == session.last.text


def test_an_engine_is_open_as_long_as_something_refers_to_it_or_to_a_session_of_it() -> None:
    engine = small_engine("llama")
    session, loop = engine.session(chat=False), engine._loop
    del engine
    gc.collect()
    assert len(session.send([5, 6, 7], **ASK).token_ids) == 6
    del session
    gc.collect()
    assert not loop.alive
