"""Named conversations: whatever is saved, loaded, forked, rewound and deleted, in whatever order and process, a turn is
answered as a fresh engine would answer it, and what is in memory or in the store is not computed again."""

import json
import logging
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcellar import BadRequest, Engine
from kvcellar.errors import ConversationConflict, ConversationNotSaved, ConversationUnreadable, UnknownConversation
from kvcellar.frontend.conversations import Conversations, TokenSource
from kvcellar.frontend.transcript import Transcript
from kvcellar.memory.prefixes import Prefix, Prefixes
from kvcellar.memory.tiers.archive import Archive, DiskArchive, file_of
from tests.engine.mixes import assert_at_rest, small_engine, tokens
from tests.zoo import ARCHS

KINDS = ["llama", "gemma3", "lfm2"]  # full, sliding, hybrid
GREEDY = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}
SOURCE = TokenSource("model", "tokenizer", 100)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model directories, made when they are first used."""

    class Saved(dict[str, Path]):
        def __missing__(self, name: str) -> Path:
            self[name] = tmp_path_factory.mktemp(name)
            ARCHS[name].build(max_position_embeddings=2048).save_pretrained(self[name])
            return self[name]

    return Saved()


def opened(path: Path | None, store: Path | None) -> Engine:
    limits = {"cache_bytes": 8_000_000, "context": 1024, "max_sequences": 8, "threads": 1}
    return Engine(path, dtype="float32", store=None if store is None else str(store), **limits)


def acknowledged(engine: Engine) -> None:
    until = time.monotonic() + 240
    while engine.stats().store.unwritten:
        assert time.monotonic() < until, "the store does not come to an end"
        time.sleep(0.005)


# -- laws -------------------------------------------------------------------------------------------------------------


class Names:
    """Sessions and named conversations, beside the tokens that each should have after each of its turns."""

    def __init__(self, path: Path, store: Path, cold: Engine, seed: str) -> None:
        self.path, self.store, self.cold, self.draw = path, store, cold, random.Random(seed)
        self.engine = opened(path, store)
        self.session, self.turns = self.engine.session(), [()]
        self.kept: dict[str, list[tuple[int, ...]]] = {}
        self.cached = 0

    def play(self, acts: int) -> None:
        kinds = [*["send"] * 5, *["save"] * 3, "load", "load", "fork", "rewind", "delete", "restart", "evict"]
        for _ in range(acts):
            getattr(self, self.draw.choice(kinds))()
            found = self.engine.conversations.list()
            assert [(info.name, info.tokens, info.turns) for info in found] == [
                (name, len(turns[-1]), len(turns) - 1) for name, turns in sorted(self.kept.items())
            ]
            self.engine.check()

    def send(self) -> None:
        prompt = (*self.turns[-1], *tokens(self.draw, self.draw.choice([2, 9, 80])))
        answer = self.session.send(prompt[len(self.turns[-1]) :], **GREEDY)
        self.cold.clear_cache()
        assert answer.token_ids == self.cold.generate(prompt, **GREEDY).token_ids
        self.cached += answer.usage.cached_tokens
        self.turns = [*self.turns, (*prompt, *answer.token_ids)]

    def save(self) -> None:
        name = self.draw.choice("abc")
        self.session.save(name)
        self.kept[name] = self.turns

    def load(self) -> None:
        name = self.draw.choice("abc")
        if name not in self.kept:
            with pytest.raises(UnknownConversation):
                self.engine.load(name)
            return
        self.session.close()
        self.session, self.turns = self.engine.load(name), self.kept[name]
        assert tuple(self.session.tokens) == self.turns[-1]

    def fork(self) -> None:
        name, to = self.draw.choices("abc", k=2)
        if name == to or name not in self.kept or to in self.kept:
            with pytest.raises((UnknownConversation, ConversationConflict)):
                self.engine.conversations.fork(name, to)
            return
        self.engine.conversations.fork(name, to)
        self.kept[to] = self.kept[name]

    def rewind(self) -> None:
        name, count = self.draw.choice("abc"), self.draw.randint(0, 2)
        if name not in self.kept or count >= len(self.kept[name]):
            with pytest.raises(BadRequest):
                self.engine.conversations.rewind(name, count)
            return
        self.engine.conversations.rewind(name, count)
        self.kept[name] = self.kept[name][: len(self.kept[name]) - count]

    def delete(self) -> None:
        name = self.draw.choice("abc")
        if self.kept.pop(name, None) is None:
            with pytest.raises(UnknownConversation):
                self.engine.conversations.delete(name)
        else:
            self.engine.conversations.delete(name)

    def restart(self) -> None:
        self.session.save("z")
        self.engine.close()
        self.engine = opened(self.path, self.store)
        self.session = self.engine.load("z")
        self.engine.conversations.delete("z")

    def evict(self) -> None:
        self.engine.clear_cache()


@pytest.mark.parametrize("name", KINDS)
def test_whatever_becomes_of_a_conversation_it_is_answered_as_a_fresh_engine_would(saved, tmp_path, name) -> None:
    with opened(saved[name], None) as cold:
        names = Names(saved[name], tmp_path / "store", cold, name)
        try:
            names.play(30)
            assert names.cached > 0
        finally:
            names.engine.close()


@pytest.mark.parametrize("name", KINDS)
def test_after_load_and_after_a_restart_only_what_is_new_is_computed(saved, tmp_path, name) -> None:
    draw = random.Random(name)
    with opened(saved[name], tmp_path) as engine:
        session = engine.session()
        for _ in range(3):
            session.send(tokens(draw, 120), **GREEDY)
        session.save("a")
        known = len(session.tokens) - 1  # the last token of an answer was drawn, and not computed
        session.close()
        acknowledged(engine)
        assert engine.load("a").send([5, 6, 7], **GREEDY).usage.cached_tokens == known
    with opened(saved[name], tmp_path) as engine:
        usage = engine.load("a").send([8, 9], **GREEDY).usage
        assert (usage.prompt_tokens, usage.cached_tokens) == (known + 3, known)


@pytest.mark.parametrize("name", KINDS)
def test_a_rewound_conversation_resumes_where_its_turn_began(saved, tmp_path, name) -> None:
    draw = random.Random(name)
    with opened(saved[name], tmp_path) as engine:
        session = engine.session()
        session.send(tokens(draw, 90), **GREEDY)
        known = len(session.tokens)
        session.send(tokens(draw, 90), **GREEDY)
        session.save("a")
        acknowledged(engine)
    with opened(saved[name], tmp_path) as engine:
        assert engine.conversations.rewind("a").turns == 1
        assert engine.load("a").send([5, 6], **GREEDY).usage.cached_tokens == known


def test_a_chat_is_continued_message_by_message_also_with_shifts(tmp_path) -> None:
    """Of the embedded model, which has windows and recurrent layers."""
    how = {"max_tokens": 8, "temperature": 0.0, "shift": True, "ignore_eos": True}
    limits = {"dtype": "float32", "device": "cpu", "cache_bytes": 32_000_000, "context": 64, "threads": 1}
    with Engine(store=str(tmp_path), **limits) as engine, Engine(**limits) as cold:
        plain = cold.session()
        engine.session().save("a")
        for turn in range(6):
            session = engine.load("a")
            answer = session.send(f"def number_{turn}(value):", **how)
            cold.clear_cache()
            assert answer.text == plain.send(f"def number_{turn}(value):", **how).text
            assert session.messages == plain.messages
            session.save("a")
            session.close()
        assert plain._transcript.last.omitted > 0
        assert engine.conversations.read("a")[1].encoded() == plain._transcript.encoded()
        plain.rewind(3)
        engine.conversations.rewind("a", 3)
        assert engine.conversations.read("a")[1].encoded() == plain._transcript.encoded()


def test_sessions_of_one_conversation_are_apart_until_they_are_saved() -> None:
    with small_engine("llama") as engine:
        session = engine.session()
        session.send([5, 6, 7], **GREEDY)
        session.save("a")
        one, other = engine.load("a"), engine.load("a")
        one.send([8], **GREEDY)
        assert other.tokens == session.tokens == engine.load("a").tokens
        one.save("a")
        assert engine.load("a").tokens == one.tokens
        assert other.tokens == session.tokens
        session.close()
        with pytest.raises(BadRequest, match="closed"):
            session.save("a")
        assert_at_rest(engine)


# -- text behind a shift ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3"])  # keys are rotated, or the text is computed again
def test_no_text_that_a_shift_has_moved_enters_the_tree_or_the_store(saved, tmp_path, name, monkeypatch) -> None:
    """K/V behind a shift encode dropped text: a turn that found them would be answered otherwise than by a fresh
    engine."""
    how = {"max_tokens": 60, "temperature": 0.0, "ignore_eos": True, "shift": True, "num_keep": 4}
    limits = {"dtype": "float32", "cache_bytes": 8_000_000, "context": 96, "threads": 1}
    draw, published = random.Random(name), []
    with Engine(saved[name], store=str(tmp_path), **limits) as engine:
        prefixes, memory = engine._loop.manager.prefixes, engine._built.memory

        def inserted(prefix: Prefix, claim: int, end: int, *spare: Callable[[int], bool]) -> None:
            published.append(end)
            assert (start := memory.derived(prefix.seq)) is None or end <= start
            Prefixes._insert(prefixes, prefix, claim, end, *spare)

        monkeypatch.setattr(prefixes, "_insert", inserted)
        session = engine.session()
        for _ in range(3):
            session.send(tokens(draw, 30), **how)
        session.save("a")
        fork = engine.load("a").fork()
        fork.send([5] * 30, **how)
        stats = engine.stats()
        assert stats.shifts + sum(stats.recomputes.values()) > 2
        assert published
        acknowledged(engine)
        engine.check()
    with Engine(saved[name], store=str(tmp_path), **limits) as engine, Engine(saved[name], **limits) as cold:
        prompt = engine.load("a")._transcript.continued([5] * 30, engine.params(**how), 96, engine.encode).ids
        assert engine.load("a").send([5] * 30, **how).token_ids == cold.generate(prompt, **how).token_ids


# -- what is refused --------------------------------------------------------------------------------------------------


def transcript(*texts: str, tokens: tuple[int, ...] = ()) -> Transcript:
    return Transcript(chat=True, messages=[{"role": "user", "content": text} for text in texts], tokens=tokens)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "conversations"


@pytest.fixture(params=["memory", "disk"])
def conversations(request: pytest.FixtureRequest, folder: Path) -> Conversations:
    archive = Archive(1 << 16) if request.param == "memory" else DiskArchive(folder, 1 << 16)
    return Conversations(archive, SOURCE)


@pytest.mark.parametrize("name", ["", ".", "a/b", "../a", "a b", "-a", "ä", "a" * 129, "a\n", 5, None])
def test_what_is_no_name_is_refused(conversations, name) -> None:
    calls = (
        lambda: conversations.save(name, transcript()),
        lambda: conversations.create(name, transcript()),
        lambda: conversations.read(name),
        lambda: conversations.fork("a", name),
        lambda: conversations.rewind(name),
        lambda: conversations.delete(name),
    )
    conversations.save("a", transcript())
    for call in calls:
        with pytest.raises(BadRequest, match="a name of 1 to 128 letters"):
            call()
    assert [info.name for info in conversations.list()] == ["a"]


@pytest.mark.parametrize("name", ["a", "7", "A.b_c-D", "a" * 128])
def test_names(conversations, name) -> None:
    conversations.save(name, transcript("x"))
    assert conversations.read(name)[1].messages == transcript("x").messages
    assert [info.name for info in conversations.list()] == [name]


def test_what_is_not_there_is_unknown(conversations) -> None:
    for call in (
        conversations.read,
        conversations.rewind,
        conversations.delete,
        lambda name: conversations.fork(name, "b"),
    ):
        with pytest.raises(UnknownConversation, match="no conversation a"):
            call("a")


def test_owners_do_not_see_each_other(conversations) -> None:
    conversations.save("a", transcript("x"), owner="one")
    conversations.save("a", transcript("y"), owner="other")
    assert conversations.read("a", owner="one")[1].messages == transcript("x").messages
    assert conversations.list() == []
    with pytest.raises(UnknownConversation):
        conversations.fork("a", "b")
    conversations.delete("a", owner="other")
    assert [info.name for info in conversations.list(owner="one")] == ["a"]


def test_while_a_conversation_is_held_it_is_read_and_not_changed(conversations) -> None:
    conversations.save("a", transcript("x"))
    with conversations.hold("a") as held:
        for call in (conversations.rewind, conversations.delete, lambda name: conversations.save(name, transcript())):
            with pytest.raises(ConversationConflict, match="a is busy"):
                call("a")
        with pytest.raises(ConversationConflict), conversations.hold("a"):
            pass
        held.transcript = transcript("x", "y")
        assert conversations.read("a")[1].messages == transcript("x").messages
        conversations.fork("a", "b")
        held.save()
    assert conversations.read("a")[1].messages == transcript("x", "y").messages
    assert conversations.read("b")[1].messages == transcript("x").messages
    conversations.delete("a")


def test_what_another_process_has_changed_is_not_overwritten(folder) -> None:
    one, other = (Conversations(DiskArchive(folder, 1 << 16), SOURCE) for _ in range(2))
    one.save("a", transcript("x"))
    with one.hold("a") as held:
        other.save("a", transcript("y"))
        with pytest.raises(ConversationConflict, match="a has changed"):
            held.save()
    assert one.read("a")[1].messages == transcript("y").messages


def test_one_that_is_too_large_is_refused_and_the_one_before_kept(conversations) -> None:
    conversations.save("a", transcript("x"))
    with pytest.raises(ConversationConflict, match=r"a cannot be saved: it has .* bytes are allowed"):
        conversations.save("a", transcript("x" * (1 << 16)))
    assert conversations.read("a")[1].messages == transcript("x").messages


def test_one_that_is_damaged_is_reported_and_others_are_not_affected(folder, caplog) -> None:
    conversations = Conversations(DiskArchive(folder, 1 << 16), SOURCE)
    for name in "abc":
        conversations.save(name, transcript(name))
    whole = (folder / file_of("", "a")).read_bytes()
    (folder / file_of("", "a")).write_bytes(whole[:-1])
    (folder / file_of("", "b")).write_bytes((folder / file_of("", "c")).read_bytes())
    for name, why in (("a", "bytes"), ("b", "another conversation")):
        with pytest.raises(ConversationUnreadable, match=f"{name} cannot be read: .*{why}"):
            conversations.read(name)
        with pytest.raises(ConversationUnreadable):
            conversations.rewind(name)
    with caplog.at_level(logging.WARNING, "kvcellar.engine"):
        assert {info.name for info in conversations.list()} == {"c"}
    assert "cannot be listed" in caplog.text
    assert conversations.read("c")[1].messages == transcript("c").messages
    conversations.delete("a")
    conversations.save("b", transcript("b"))
    assert [info.name for info in conversations.list()] == ["b", "c"]


WRONG = {
    "tokens": [[5, 100], [-1], [1.5], ["a"], "ab", None, 5],
    "messages": [[{}], ["x"], [{"role": 5}], None, [None]],
    "omitted": [-1, 2, "a", None, 0.5],
    "turns": [[[0, 9, [], 0, 0]], [[0, 0, [500], 0, 0]], [[0, 0, [], 9, 0]], [[0, 0]], [5], [["a", 0, [], 0, 0]], None],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in WRONG.items() for value in values])
def test_a_whole_file_with_impossible_content_is_unreadable(conversations, field, value) -> None:
    made = transcript("x", tokens=(5, 6))
    conversations.save("a", made)
    changed = json.dumps(json.loads(made.encoded()) | {field: value}).encode()
    made.encoded = lambda: changed  # type: ignore[method-assign]
    conversations.save("b", made)
    with pytest.raises(ConversationUnreadable, match="b cannot be read"):
        conversations.read("b")
    assert conversations.read("a")[1].tokens == [5, 6]


def test_a_chat_goes_on_with_another_tokenizer_and_a_text_does_not(folder) -> None:
    one, other = (
        Conversations(DiskArchive(folder, 1 << 16), TokenSource(name, name, size))
        for name, size in (("x", 100), ("y", 9))
    )
    chat, text = transcript("x", tokens=(50,)), Transcript(chat=False, tokens=[50])
    one.save("chat", chat)
    one.save("text", text)
    found = other.read("chat")[1]
    assert (found.messages, found.tokens) == (chat.messages, [])
    with pytest.raises(ConversationConflict, match="text has tokens of another model, x"):
        other.read("text")
    assert one.read("text")[1].tokens == [50]


def test_a_medium_that_fails_is_reported_without_a_path(folder, tmp_path) -> None:
    conversations = Conversations(DiskArchive(folder, 1 << 16), SOURCE)
    folder.write_text("this is no directory")
    with pytest.raises(ConversationNotSaved, match="a cannot be saved: ") as raised:
        conversations.save("a", transcript())
    assert str(tmp_path) not in str(raised.value)


def test_an_engine_without_a_store_keeps_names_while_it_is_open_and_writes_nothing(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with small_engine("llama") as engine:
        engine.session().save("a")
        assert [info.name for info in engine.conversations.list()] == ["a"]
    assert not (tmp_path / "state").exists()


def test_a_turn_that_fails_leaves_the_session_and_its_name(saved, tmp_path) -> None:
    with opened(saved["llama"], tmp_path) as engine:
        session = engine.session()
        session.send([5, 6, 7], **GREEDY)
        session.save("a")
        pieces = session.stream([8, 9], max_tokens=50, ignore_eos=True)
        next(pieces)
        with pytest.raises(BadRequest, match="busy"):
            session.save("a")
        pieces.close()
        session.save("b")
        assert engine.load("a").tokens == engine.load("b").tokens == session.tokens


def test_one_owner_has_its_share_of_the_memory_of_conversations() -> None:
    with small_engine("llama", tenant_share=0.25) as engine:
        for number in range(7):
            engine.conversations.save(f"a{number}", transcript("x" * (2 << 20)))
        with pytest.raises(ConversationConflict, match=f"{16 << 20} bytes are allowed"):
            engine.conversations.save("another", transcript("x" * (2 << 20)))
