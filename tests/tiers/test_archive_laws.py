"""Archives that several front ends share and that forget: they do what one in memory does, which is judged by a dumb
model; whatever is in the place, nothing is believed unverified, and a server that fails is as a disk that fails."""

import tempfile
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcellar.errors import ConversationConflict, ConversationNotSaved, ConversationUnreadable, UnknownConversation
from kvcellar.frontend.conversations import Conversations, TokenSource
from kvcellar.frontend.documents import Documents
from kvcellar.frontend.transcript import Transcript
from kvcellar.memory.tiers.archive import BESIDE_HEAD, Archive, Changed, Forgets, Full, TooLarge, file_of
from kvcellar.memory.tiers.codec import Damaged, Foreign
from kvcellar.memory.tiers.remote_archive import RedisArchive
from kvcellar.memory.tiers.tier import Breaker
from tests.tiers.places import Make, needs_server
from tests.tiers.redis_server import RedisServer

CAP, OWN, SECONDS, FILES = 6000, 2500, 100.0, 12
SOURCE = TokenSource("model", "tokenizer", 100)
functions = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


class Clock:
    now = 1e9

    def __call__(self) -> float:
        return self.now


def forgetting(make: Make, clock: Clock) -> Archive:
    return make(CAP, forgets=Forgets(SECONDS, OWN, FILES), clock=clock)


# -- two do what one does --------------------------------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(
        st.integers(0, 1),  # which front end
        st.sampled_from(["put", "put", "put", "after", "get", "touch", "delete", "unused", "wait"]),
        st.sampled_from("ab"),
        st.integers(0, 7),
        st.integers(0, 1500),
    ),
    max_size=30,
)


@dataclass
class Plain:
    """What should be there, by owner and name: content and stamp."""

    kept: dict[tuple[str, str], tuple[bytes, int]] = field(default_factory=dict[tuple[str, str], tuple[bytes, int]])

    def agrees(self, archive: Archive, clock: Clock) -> None:
        """What is there is what was put; what is not there was used no later than all that is there of its owner, or is
        forgotten."""
        oldest = int((clock.now - SECONDS) * 1e6)
        for owner in "ab":
            mine = {name: found for (own, name), found in self.kept.items() if own == owner}
            there = {name for name in mine if archive.get(owner, name) is not None}
            for name, (content, used) in mine.items():
                if name in there:
                    assert archive.get(owner, name).body == content
                    assert used >= oldest
                elif used >= oldest:
                    assert all(used <= mine[other][1] for other in there), "a later one was dropped first"
                    del self.kept[owner, name]
            assert sorted(archive.heads(owner)) == sorted(name.encode() for name in there)
        archive.check()


def act(archive: Archive, what: str, owner: str, name: str, size: int, seals: dict[Any, Any]) -> object:
    """The result of a step, with its error."""
    try:
        match what:
            case "put":
                seals[owner, name] = archive.put(owner, name, name.encode(), bytes(size))
            case "after":
                seals[owner, name] = archive.put(
                    owner, name, name.encode(), bytes(size), after=seals.get((owner, name), b"")
                )
            case "get":
                return archive.get(owner, name)
            case "touch":
                return archive.touch(owner, [name, str((int(name) + 1) % 8)], archive.stamp)
            case "delete":
                return archive.delete(owner, name)
            case _:
                stamps = archive.stamps(owner)
                if size % 2:
                    archive.touch(owner, [name], archive.stamp)
                return archive.delete(owner, name, unused_since=stamps)
    except (Changed, Full) as error:
        return type(error), str(error)
    return seals[owner, name]


@functions
@given(steps=STEPS)
def test_what_is_dropped_was_not_used_for_the_longest_time(steps: Any) -> None:
    clock, plain = Clock(), Plain()
    archive, seals = forgetting(Archive, clock), dict[Any, Any]()
    for _, what, owner, number, size in steps:
        clock.now += 1 if what != "wait" else size / 10
        if what == "wait":
            continue
        result = act(archive, what, owner, str(number), size, seals)
        mine, other = (owner, str(number)), (owner, str((number + 1) % 8))
        stamps = {key: archive._entries().get(file_of(*key)) for key in (mine, other)}
        if isinstance(result, bytes):
            plain.kept[mine] = bytes(size), stamps[mine].used
        elif result is True:
            plain.kept.pop(mine)
        for key, there in stamps.items():
            if there is not None and key in plain.kept:
                plain.kept[key] = plain.kept[key][0], there.used
        plain.agrees(archive, clock)


@functions
@given(steps=STEPS)
def test_two_archives_of_one_place_do_what_one_in_memory_does(make: Make, steps: Any) -> None:
    clock, seals = Clock(), dict[Any, Any]()
    both, alone = [forgetting(make, clock) for _ in range(2)], forgetting(Archive, clock)
    if make is Archive:
        both[1] = both[0]
    for owner in "ab":
        for number in range(8):
            both[0].delete(owner, str(number))
    for which, what, owner, number, size in steps:
        clock.now += 1 if what != "wait" else size / 10
        if what != "wait":
            same = dict(seals)
            found = act(both[which], what, owner, str(number), size, seals)
            assert found == act(alone, what, owner, str(number), size, same)
        assert dict(both[1 - which]._entries()) == dict(alone._entries())
        if alone._entries():
            both[which].check()
    for own in "ab":
        assert sorted(both[0].heads(own)) == sorted(alone.heads(own))


def test_what_is_dropped_makes_room_for_the_next_ones_and_not_for_what_never_fits(make: Make) -> None:
    archive = forgetting(make, Clock())
    for number in range(9):
        archive.put("a", str(number), b"", bytes(250), used=archive.stamp + number)
    assert [archive.get("a", str(number)) is not None for number in range(9)] == [number > 1 for number in range(9)]
    with pytest.raises(TooLarge):
        archive.put("a", "x", b"", bytes(OWN + 1))
    with pytest.raises(Full):
        archive.put("a", "x", b"", bytes(OWN))
    assert len(archive.stamps("a")) == 7, "what never fits has dropped others"


def test_what_was_deleted_is_not_there_to_be_used(make: Make) -> None:
    archive = forgetting(make, Clock())
    for name in "xy":
        archive.put("a", name, b"", b"")
    assert archive.touch("a", ["x", "y", "z"], archive.stamp) == [True, True, False]
    archive.delete("a", "x")
    assert archive.touch("a", ["x", "y"], archive.stamp) == [False, True]


def test_the_owner_that_has_the_most_loses_first(make: Make) -> None:
    archive = forgetting(make, Clock())
    for owner, names, size in (("small", "s", 200), ("large", "abc", 600), ("other", "xy", 900)):
        for at, name in enumerate(names):
            archive.put(owner, name, b"", bytes(size), used=archive.stamp + at)
    archive.put("new", "n", b"", bytes(2000))
    kept = [
        f"{owner} {name}"
        for owner, names in (("small", "s"), ("large", "abc"), ("other", "xy"))
        for name in names
        if archive.get(owner, name) is not None
    ]
    assert kept == ["small s", "large b", "large c", "other x", "other y"]


# -- what is in the place --------------------------------------------------------------------------------------------


def client(url: str) -> Any:
    from redis import Redis

    return Redis.from_url(url)


@pytest.fixture
def redis(server_url: str, tmp_path: Path) -> RedisArchive:
    return RedisArchive(server_url, f"{tmp_path}-", CAP)


@functions
@given(data=st.data())
@needs_server
def test_a_value_that_was_changed_anywhere_is_damaged_and_others_are_not(
    data: Any,
    redis: RedisArchive,
    server_url: str,
    tmp_path: Path,
) -> None:
    for name in "xy":
        redis.put("a", name, b"head", name.encode())
    key, at = f"{tmp_path}-{file_of('a', 'x')}", client(server_url)
    content = bytearray(at.get(key))
    match data.draw(st.sampled_from(["bit", "cut", "longer", "other"])):
        case "bit":
            bit = data.draw(st.integers(0, 8 * len(content) - 1))
            content[bit // 8] ^= 1 << bit % 8
        case "cut":
            del content[data.draw(st.integers(1, len(content) - 1)) :]
        case "longer":
            content += b"\0"
        case _:
            content[:] = data.draw(st.binary(min_size=1, max_size=200))
    at.set(key, bytes(content))
    with pytest.raises((Damaged, Foreign)):
        redis.get("a", "x")
    assert redis.get("a", "y").body == b"y"
    assert redis.delete("a", "x")


@needs_server
def test_no_more_is_read_of_a_value_than_a_document_may_have(
    redis: RedisArchive,
    server_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvcellar.memory.tiers.archive.BODY_LIMIT", 1000)
    redis.put("a", "x", b"head", b"x")
    client(server_url).append(f"{tmp_path}-{file_of('a', 'x')}", bytes(1 << 22))
    with redis._opened(file_of("a", "x")) as found:
        assert len(found.read(1 << 23, 0)) < 1 << 17
    with pytest.raises(Damaged, match="bytes"):
        redis.get("a", "x")
    assert isinstance(redis.heads("a")[0], Damaged)


@needs_server
@pytest.mark.parametrize("name", ["sizes", "used", "totals", file_of("a", "x")])
def test_keys_of_another_kind_are_an_error_of_the_store(
    redis: RedisArchive, server_url: str, tmp_path: Path, name: str
) -> None:
    first = redis.put("a", "x", b"head", b"x")
    client(server_url).delete(f"{tmp_path}-{name}")
    client(server_url).rpush(f"{tmp_path}-{name}", "no document")
    with pytest.raises(OSError, match="the store elsewhere has failed"):
        redis.put("a", "x", b"head", b"y", after=first)


@needs_server
def test_what_the_server_has_evicted_is_as_if_it_was_deleted(redis: RedisArchive, server_url: str, tmp_path: Path):
    for name in "xy":
        redis.put("a", name, b"head", name.encode())
    client(server_url).delete(f"{tmp_path}-{file_of('a', 'x')}")
    assert redis.get("a", "x") is None
    assert list(redis.heads("a")) == [b"head"]
    assert not redis.delete("a", "x")
    redis.put("a", "x", b"head", b"x", after=b"")
    client(server_url).delete(*(f"{tmp_path}-{name}" for name in ("sizes", "used", "totals")))
    assert redis.get("a", "y").body == b"y"
    redis.put("a", "y", b"head", b"y")
    assert redis._entries()[file_of("a", "y")].size == 61
    assert redis._redis.hget(f"{tmp_path}-totals", "all#") == b"1"


@needs_server
@pytest.mark.parametrize("gone", [["sizes"], ["used"], ["totals"], ["sizes", "totals"], ["used", "totals"]])
def test_counts_that_the_server_has_evicted_are_counted_anew(
    redis: RedisArchive, server_url: str, tmp_path: Path, gone: list[str]
) -> None:
    for owner in "ab":
        for name in "xy":
            redis.put(owner, name, b"head", name.encode() * 1000)
    client(server_url).delete(*(f"{tmp_path}-{name}" for name in gone))
    assert all(redis.get(owner, name).body == name.encode() * 1000 for owner in "ab" for name in "xy")
    redis.put("a", "x", b"head", b"new")
    redis.check()
    assert len(redis._entries()) == 4
    with pytest.raises(Full, match="no space"):
        redis.put("a", "z", b"head", bytes(3000))


@needs_server
def test_what_the_server_has_evicted_takes_no_space(redis: RedisArchive, server_url: str, tmp_path: Path) -> None:
    for name in "xyz":
        redis.put("a", name, b"head", bytes(1500))
    with pytest.raises(Full, match="6000 bytes are allowed"):
        redis.put("a", "w", b"head", bytes(1500))
    client(server_url).delete(f"{tmp_path}-{file_of('a', 'x')}")
    with pytest.raises(Full):  # all documents were counted just now: a refusal costs the server little
        redis.put("a", "w", b"head", bytes(1500))
    assert 0 < client(server_url).ttl(f"{tmp_path}-counted") <= 60
    client(server_url).delete(f"{tmp_path}-counted")
    redis.put("a", "w", b"head", bytes(1500))
    redis.check()
    assert sorted(redis._entries()) == sorted(file_of("a", name) for name in "wyz")


@needs_server
def test_heads_are_read_without_bodies(redis: RedisArchive) -> None:
    redis.put("a", "x", b"head", bytes(4000))
    size, content = redis._read(file_of("a", "x"), whole=False)
    assert (size, len(content)) == (4060, BESIDE_HEAD + 4)
    assert [*redis.heads("a")] == [b"head"]


@needs_server
def test_the_server_deletes_what_is_forgotten_by_itself(server_url: str, tmp_path: Path):
    archive = RedisArchive(server_url, f"{tmp_path}-", CAP, forgets=Forgets(SECONDS, OWN))
    archive.put("a", "x", b"head", b"x")
    key, at = f"{tmp_path}-{file_of('a', 'x')}", client(server_url)
    assert 0 < at.pttl(key) <= 1000 * SECONDS
    at.persist(key)
    archive.touch("a", ["x"], archive.stamp)
    assert 0 < at.pttl(key) <= 1000 * SECONDS


# -- conversations ---------------------------------------------------------------------------------------------------


def transcript(*texts: str) -> Transcript:
    return Transcript(chat=True, messages=[{"role": "user", "content": text} for text in texts])


class Names:
    """Two front ends of one place, beside what each conversation should say, by owner and name."""

    def __init__(self, documents: Documents) -> None:
        self.both = [Conversations(documents.archive("conversations"), SOURCE) for _ in range(2)]
        self.said: dict[tuple[str, str], list[str]] = {}
        for owner in "ab":
            for info in self.both[0].list(owner=owner):
                self.both[0].delete(info.name, owner=owner)

    def act(self, which: int, what: str, owner: str, name: str, text: str) -> None:
        """Each error is one that the model expects."""
        to = "xyz"["xyz".index(name) - 1]
        taken, there = (owner, name if what == "create" else to) in self.said, (owner, name) in self.said
        expected: Any = nullcontext()
        if what in ("create", "fork") and taken:
            expected = pytest.raises(ConversationConflict)
        if what not in ("save", "create") and not there:
            expected = pytest.raises((UnknownConversation, ConversationConflict) if taken else UnknownConversation)
        if what == "lost" and there:
            expected = pytest.raises(ConversationConflict, match="has changed; nothing was saved")
        with expected:
            getattr(self, what)(self.both[which], (owner, name), text, to)

    def save(self, one: Conversations, mine: tuple[str, str], text: str, _: str) -> None:
        one.save(mine[1], transcript(text), owner=mine[0])
        self.said[mine] = [text]

    def create(self, one: Conversations, mine: tuple[str, str], text: str, _: str) -> None:
        one.create(mine[1], transcript(text), owner=mine[0])
        self.said[mine] = [text]

    def fork(self, one: Conversations, mine: tuple[str, str], _: str, to: str) -> None:
        one.fork(mine[1], to, owner=mine[0])
        self.said[mine[0], to] = self.said[mine]

    def delete(self, one: Conversations, mine: tuple[str, str], _: str, __: str) -> None:
        one.delete(mine[1], owner=mine[0])
        del self.said[mine]

    def turn(self, one: Conversations, mine: tuple[str, str], text: str, _: str) -> None:
        with one.hold(mine[1], owner=mine[0]) as held:
            held.transcript = transcript(*self.said[mine], text)
            held.save()
        self.said[mine] = [*self.said[mine], text]

    def lost(self, one: Conversations, mine: tuple[str, str], text: str, _: str) -> None:
        """A turn during which the other front end changes the conversation."""
        other = self.both[one is self.both[0]]
        with one.hold(mine[1], owner=mine[0]) as held:
            other.save(mine[1], transcript("in between", text), owner=mine[0])
            self.said[mine] = ["in between", text]
            held.save()

    def check(self) -> None:
        for conversations in self.both:
            for owner in "ab":
                listed = [info.name for info in conversations.list(owner=owner)]
                assert listed == sorted(name for own, name in self.said if own == owner)
                for name in listed:
                    found = conversations.read(name, owner=owner)[1].messages
                    assert [message["content"] for message in found] == self.said[owner, name]


ACTS = st.sampled_from(["save", "create", "fork", "delete", "turn", "turn", "lost"])


@functions
@given(st.lists(st.tuples(st.integers(0, 1), ACTS, st.sampled_from("ab"), st.sampled_from("xyz")), max_size=20))
def test_two_front_ends_have_the_same_conversations(documents: Documents, steps: Any) -> None:
    """And no turn is added to what another front end has changed meanwhile."""
    names = Names(documents)
    for number, (which, what, owner, name) in enumerate(steps):
        names.act(which, what, owner, name, str(number))
        names.check()


@needs_server
def test_a_server_that_cannot_be_reached_is_as_a_disk_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    with tempfile.TemporaryDirectory() as directory:
        server = RedisServer(Path(directory))
        server.start()
        archive = Documents(server=server.url).archive("conversations")
        archive._guard._breaker = Breaker(wait=0.0)
        conversations = Conversations(archive, SOURCE)
        conversations.save("x", transcript("x"))
        server.kill()
        for change in (lambda: conversations.save("x", transcript("y")), lambda: conversations.delete("x")):
            with pytest.raises(ConversationNotSaved, match="x cannot be saved: the store elsewhere has failed"):
                change()
        with pytest.raises(ConversationUnreadable, match="the store elsewhere has failed"):
            conversations.read("x")
        server.start()  # it had no disk
        assert conversations.list() == []
        conversations.save("x", transcript("x"))
        server.kill()
