"""Replies that several front ends share: a chat has the tokens that it would have if one had answered all of it, and
whatever is in the archive, or becomes of it, the text that the model reads is that of the template."""

import random
import threading
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.frontend import shared_replies
from kvcellar.frontend.shared_replies import ArchivedReplies
from kvcellar.memory.tiers.archive import Archive, Document, Forgets, file_of
from kvcellar.memory.tiers.bounded import Bounded
from kvcellar.text.replay import Answered, Replays
from kvcellar.text.turns import packed, prompt_key
from tests.text.test_replay import CONVERSATIONS, EXACT, MIB, SPACED, Chat, assistant, pieces, user

TOKENIZER = "digest of a tokenizer"


def archive(cap: int = MIB) -> Archive:
    return Archive(cap, forgets=Forgets(1000.0, cap))


class Ends:
    """A chat that is answered by two front ends in turn. `alone` is one that has answered all of it."""

    def __init__(self, kind: str, name: str = "chatml", place: Archive | None = None, namespace: str = "") -> None:
        self.alone, self.place = Chat(kind, name, namespace=namespace), place or archive()
        self.shared = [ArchivedReplies(self.place, TOKENIZER, seconds=60.0) for _ in range(2)]
        self.replays = [Replays(self.alone.words, MIB, shared=shared) for shared in self.shared]

    def ask(self, which: int, question: str, reply: list[int]) -> list[int]:
        """The prompt at one front end, with whose reply the chat goes on."""
        rendered = self.alone.template.render([*self.alone.messages, user(question)])
        prompt = self.replays[which].encode(rendered, self.alone.namespace)
        self.replays[which].replied(prompt_key(self.alone.namespace, prompt), "", reply)
        self.alone.ask(question, reply)
        self.settle()
        return prompt

    def settle(self) -> None:
        for shared, replays in zip(self.shared, self.replays, strict=True):
            shared.rest()
            shared.check()
            replays.check()


@pytest.mark.parametrize("kind", [*EXACT, *SPACED])
@settings(max_examples=25, deadline=None)
@given(turns=CONVERSATIONS, order=st.lists(st.integers(0, 1), min_size=5, max_size=5), seed=st.integers(0, 99))
def test_two_front_ends_give_a_chat_the_tokens_that_one_would(
    kind: str, turns: list[tuple[str, str]], order: list[int], seed: int
) -> None:
    ends, draw = Ends(kind), random.Random(seed)
    for which, (question, reply) in zip(order, [*turns, ("more", "")], strict=False):
        known = ends.alone.known
        prompt = ends.ask(which, question, pieces(kind, reply, draw))
        assert prompt == ends.alone.known[: len(prompt)]
        assert prompt[: len(known)] == known


@pytest.mark.parametrize("kind", EXACT)
def test_a_front_end_that_knows_the_beginning_of_a_chat_finds_the_rest(kind: str) -> None:
    ends, words = Ends(kind), Chat(kind).words
    reply = [token for letter in "the hills" for token in words.encode_marked(letter, ())]
    assert reply != words.encode_marked("the hills", ()), "the tokenizer would choose the same tokens"
    for which in (0, 1, 1, 0, 1):
        known = ends.alone.known
        assert ends.ask(which, "more", reply)[: len(known)] == known


def test_replies_that_two_front_ends_gave_to_one_prompt_are_both_known() -> None:
    ends = Ends("byte_level")
    replies = [pieces("byte_level", text, random.Random(0)) for text in ("to be", "not to be")]
    rendered = ends.alone.template.render([user("a")])
    for replays, reply in zip(ends.replays, replies, strict=True):
        prompt = replays.encode(rendered, "")
        replays.replied(prompt_key("", prompt), "", reply)
        ends.settle()
    third = Replays(ends.alone.words, MIB, shared=ArchivedReplies(ends.place, TOKENIZER, seconds=60.0))
    for reply in replies:
        said = [user("a"), assistant(ends.alone.words.decode(reply)), user("b")]
        found = third.encode(ends.alone.template.render(said), "")
        assert found[: len(prompt) + len(reply)] == [*prompt, *reply]


def test_replies_count_for_their_owner_and_are_found_for_it_alone() -> None:
    """A client that chooses namespaces has no more space by that."""
    ends, words = Ends("byte_level"), Chat("byte_level").words
    reply = [token for letter in "the hills" for token in words.encode_marked(letter, ())]
    for namespace, owner in (("n", "me"), ("m", "me"), ("n", None)):
        rendered = ends.alone.template.render([user(f"a {namespace} {owner}")])
        prompt = ends.replays[0].encode(rendered, namespace, owner=owner or "")
        ends.replays[0].replied(prompt_key(namespace, prompt), owner, reply)
    ends.settle()
    assert len(ends.place._contents) == 2
    assert {file.partition("-")[0] for file in ends.place._contents} == {file_of("me", "").partition("-")[0]}
    said = ends.alone.template.render([user("a n me"), assistant(words.decode(reply)), user("b")])
    known = [*ends.replays[0].encode(ends.alone.template.render([user("a n me")]), "n"), *reply]
    for owner in ("you", "me"):
        fresh = Replays(words, MIB, shared=ends.shared[1])
        found = fresh.encode(said, "n", owner=owner)
        assert (found[: len(known)] == known) == (owner == "me")


def test_lookups_that_find_others_under_way_do_not_count_as_failures() -> None:
    place = Blocked()
    shared = ArchivedReplies(place, TOKENIZER, seconds=0.01)
    shared._bounded = Bounded(0.01, most=1)
    shared._bounded._free.acquire()
    assert shared.find("", "", b"x") is None
    assert not shared._breaker.down
    place.go.set()


@pytest.mark.parametrize(("namespace", "tokenizer"), [("other", TOKENIZER), ("", "another tokenizer")])
def test_replies_are_those_of_a_namespace_and_a_tokenizer(namespace: str, tokenizer: str) -> None:
    ends = Ends("byte_level")
    ends.ask(0, "a", list(b"to be"))
    messages = [*ends.alone.messages, user("b")]
    rendered = ends.alone.template.render(messages)
    other = Replays(ends.alone.words, MIB, shared=ArchivedReplies(ends.place, tokenizer, seconds=60.0))
    assert other.encode(rendered, namespace) == rendered.encode(ends.alone.words)


def test_a_chat_is_looked_up_only_where_its_last_reply_is_not_known() -> None:
    ends, names = Ends("byte_level"), list[str]()
    get = ends.place.get

    def counted(owner: str, name: str) -> Document | None:
        names.append(name)
        return get(owner, name)

    ends.place.get = counted  # type: ignore[method-assign]
    draw = random.Random(0)
    for which, lookups in ((0, 0), (0, 0), (1, 1), (1, 0), (0, 1)):
        names.clear()
        ends.ask(which, "a", pieces("byte_level", "to be", draw))
        assert len(names) == lookups + 1, "each reply is compared with what is there when it is written"


def _changed(answered: Answered, what: str) -> Answered:
    ids = [*memoryview(answered.ids).cast("I")]
    match what:
        case "other tokens":
            return answered._replace(ids=packed(reversed(ids)).tobytes())
        case "no token":
            return answered._replace(ids=packed([*ids[:-1], 1 << 30]).tobytes())
        case "no token in a reply":
            return answered._replace(replies=(packed([1 << 31]).tobytes(),))
        case "part of a token":
            return answered._replace(ids=answered.ids[:-1])
        case "too long":
            return answered._replace(end=1 << 40)
        case "negative":
            return answered._replace(end=-1)
        case "marks":
            return answered._replace(marks=(1,))
        case "history":
            return answered._replace(history=b"x")
        case _:
            return answered._replace(namespace="other")


CHANGES = ["other tokens", "no token", "no token in a reply", "part of a token", "too long", "negative", "marks"]


@pytest.mark.parametrize("what", [*CHANGES, "history", "namespace", "garbage", "damaged"])
def test_what_does_not_fit_a_prompt_is_not_used_and_replaced(what: str) -> None:
    ends = Ends("byte_level")
    ends.ask(0, "a", pieces("byte_level", "to be", random.Random(0)))
    ((file, content),) = ends.place._contents.items()
    name = f"{TOKENIZER} {_history(ends)}"
    found = ends.place.get("", name)
    assert found is not None
    if what == "damaged":
        ends.place._contents[file] = content[:-1]
    elif what == "garbage":
        ends.place.put("", name, b"", b"no tokens")
    else:
        changed = _changed(msgspec.msgpack.decode(found.body, type=Answered), what)
        ends.place.put("", name, b"", msgspec.msgpack.encode(changed))
    rendered = ends.alone.template.render([*ends.alone.messages, user("b")])
    assert ends.replays[1].encode(rendered, "") == rendered.encode(ends.alone.words)
    first = ends.alone.template.render(ends.alone.messages[:1])
    prompt = ends.replays[1].encode(first, "")
    ends.replays[1].replied(prompt_key("", prompt), "", [*b"to be"])
    ends.settle()
    assert ends.shared[0].find("", "", bytes.fromhex(_history(ends))) is not None


def _history(ends: Ends) -> str:
    from kvcellar.text.replay import history

    return history(ends.alone.template.render(ends.alone.messages[:1]), "").key.hex()


class Blocked(Archive):
    """Each call waits until it is let go."""

    def __init__(self) -> None:
        super().__init__(MIB, forgets=Forgets(1000.0, MIB))
        self.entered, self.go = threading.Semaphore(0), threading.Event()

    def get(self, owner: str, name: str) -> Document | None:
        self.entered.release()
        self.go.wait()
        return super().get(owner, name)


def test_a_request_waits_for_no_archive_and_asks_it_no_more_while_it_fails() -> None:
    place = Blocked()
    shared = ArchivedReplies(place, TOKENIZER, seconds=0.01)
    assert shared.find("", "", b"x") is None
    assert place.entered.acquire(timeout=60)
    assert shared.find("", "", b"x") is None
    assert not place.entered.acquire(blocking=False), "it was asked again at once"
    place.go.set()


def test_replies_do_not_wait_for_an_archive_and_those_that_are_too_many_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_replies, "WAITING", 3)
    place = Blocked()
    shared = ArchivedReplies(place, TOKENIZER, seconds=60.0)
    for number in range(9):
        answered = Answered("", bytes([number]), 0, (), b"", ())
        shared.keep("", lambda answered=answered: answered)
        shared.check()
    place.go.set()
    shared.rest()
    assert len(place._contents) == 3
    shared.keep("", lambda: Answered("", b"later", 0, (), b"", ()))
    shared.rest()
    assert len(place._contents) == 4


@pytest.mark.parametrize("operation", ["get", "put"])
def test_an_archive_that_fails_costs_only_that_replies_are_tokenized_again(operation: str) -> None:
    ends = Ends("byte_level")

    def fails(*given: Any, **named: Any) -> Any:
        raise OSError("no route")

    setattr(ends.place, operation, fails)
    ends.ask(0, "a", pieces("byte_level", "to be", random.Random(0)))
    rendered = ends.alone.template.render([*ends.alone.messages, user("b")])
    assert ends.replays[1].encode(rendered, "") == rendered.encode(ends.alone.words)
    assert ends.replays[0].encode(rendered, "")[: len(ends.alone.known)] == ends.alone.known
