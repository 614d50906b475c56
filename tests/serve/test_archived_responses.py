"""Responses that are kept in a store: any front end finds and continues what another one has kept, a kill at any moment
loses nothing that was acknowledged, and what is in the store is not believed unverified."""

import json
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcellar.frontend.conversations import Conversations, TokenSource
from kvcellar.frontend.documents import Documents
from kvcellar.frontend.transcript import Turn, as_json
from kvcellar.memory.tiers.archive import Archive, Forgets
from kvcellar.memory.tiers.remote_archive import RedisArchive
from kvcellar.serve import Server, ServeSettings, key_digest
from kvcellar.serve.http.api_errors import ApiError
from kvcellar.serve.responses.store import Kept, ResponseStore, open_responses
from tests.serve.fake_engine import FakeEngine
from tests.serve.test_responses_api import events_of
from tests.serve.wire import error_of
from tests.tiers.faults import Killing

PATH = "/v1/responses"
OWN = 1 << 20


def opened(documents: Documents) -> ResponseStore:
    return open_responses(documents, bytes_of_key=OWN, seconds=1000.0)


def has(store: ResponseStore, owner: str, id: str) -> bool:
    """Whether it is kept; that is no use of it."""
    return store._archive.get(owner, f"response {id}") is not None


def kept(id: str, parent: Kept | None = None, size: int = 0) -> Kept:
    said = [{"role": "user", "content": f"{id}?"}, {"role": "assistant", "content": f"{id}!"}]
    before = None if parent is None else parent.turn
    return Kept(json.dumps({"id": id, "padding": "x" * size}).encode(), b"[]", Turn(before, as_json(said), id=id))


def said_in(found: Kept) -> list[str]:
    """The responses of a conversation, from its messages."""
    return [message["content"][:-1] for message in found.turn.all_messages()[::2]]


# -- front ends without HTTP -----------------------------------------------------------------------------------------


class World:
    """Two front ends of one place, beside the line of each response, by owner. `held` are responses of earlier reads,
    as requests have them that are still running."""

    def __init__(self, documents: Documents) -> None:
        self.documents = documents
        self.ends = [opened(documents) for _ in range(2)]
        self.lines: dict[tuple[str, str], list[str]] = {}
        self.held: list[tuple[str, Kept]] = []
        self.turns: dict[tuple[str, str], str | None] = {}  # that were written, with what they continue
        self.number = 0

    def add(self, which: int, owner: str, parent: Kept | None) -> None:
        id, self.number = f"r{self.number}", self.number + 1
        made = kept(id, parent)
        self.ends[which].add(owner, id, made)
        self.lines[owner, id] = [*([] if parent is None else said_in(parent)), id]

    def step(self, which: int, what: str, owner: str, number: int) -> None:
        id = f"r{number % (self.number + 1)}"
        one, there = self.ends[which], (owner, id) in self.lines
        try:
            match what:
                case "begin":
                    self.add(which, owner, None)
                case "go on":
                    self.add(which, owner, one.get(owner, id))
                case "hold":
                    self.held.append((owner, one.get(owner, id)))
                case "late" if self.held:
                    mine, parent = self.held.pop(0)
                    self.add(which, mine, parent)
                case "delete":
                    one.delete(owner, id)
                    del self.lines[owner, id]
                case "restart":
                    self.ends[which] = opened(self.documents)
                case _:
                    pass
        except ApiError:
            assert not there

    def check(self) -> None:
        for one in self.ends:
            one.check()
            for owner in "ab":
                for number in range(self.number):
                    assert has(one, owner, f"r{number}") == ((owner, f"r{number}") in self.lines)

    def check_texts(self) -> None:
        """Each is continued with all that was said, and nothing is stored that no response needs."""
        for owner, id in self.lines:
            fresh = opened(self.documents).get(owner, id)
            assert json.loads(fresh.response)["id"] == id
            assert said_in(fresh) == self.lines[owner, id]
        for owner in "ab":
            heads = [json.loads(head) for head in opened(self.documents)._archive.heads(owner)]
            turns = sorted(head["id"] for head in heads if head["response"] is None)
            needed = {id for (own, _), line in self.lines.items() if own == owner for id in line}
            assert turns == sorted(needed)


STEPS = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.sampled_from(["begin", "go on", "go on", "go on", "hold", "late", "delete", "delete", "restart"]),
        st.sampled_from("aab"),
        st.integers(0, 9),
    ),
    max_size=25,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_two_front_ends_keep_what_one_would(documents: Documents, steps: Any) -> None:
    """A random forest of responses of two keys, continued, deleted, and continued by requests that began before the
    deletion."""
    world = World(documents)
    for archive in {id(one): one for one in world.ends}.values():
        for owner in "ab":
            for head in [*archive._archive.heads(owner)]:
                found = json.loads(head)
                kind = "turn" if found["response"] is None else "response"
                archive._archive.delete(owner, f"{kind} {found['id']}")
    for step in steps:
        world.step(*step)
        world.check()
    world.check_texts()


class Dies(Exception):
    """The front end is killed."""


@contextmanager
def killed_at(archive: Archive, number: int) -> Iterator[list[int]]:
    """Every change of the archive from this number on does not happen; what has happened is counted."""
    done = [0]

    def counted(change: Any) -> Any:
        def act(*given: Any) -> Any:
            if done[0] >= number:
                raise Dies
            done[0] += 1
            return change(*given)

        return act

    for name in ("_replace", "_remove", "_touch"):
        setattr(archive, name, counted(getattr(archive, name)))
    with suppress(Dies):
        yield done
        done.append(-1)


LINE = ("r0", "r1", "r2", "r3")
NEW = ("add", "late", "full")
STAYS = {"add": {*LINE}, "delete": {"r0", "r2", "r3"}}  # whatever happens, of what was acknowledged


def change(one: ResponseStore, owner: str, what: str, last: Kept) -> None:
    match what:
        case "add" | "late":
            one.add(owner, "new", kept("new", last))
        case "full":
            one.add(owner, "new", kept("new", one.get(owner, "r3"), OWN - (OWN >> 4) - 6000))
        case _:
            for id in ("r1", "r0", "r3", "r2") if what == "delete all" else ("r1",):
                one.delete(owner, id)


@pytest.mark.parametrize("what", [*NEW, "delete", "delete all"])
def test_a_kill_between_two_changes_loses_nothing_that_was_acknowledged(documents: Documents, what: str) -> None:
    for number in range(40):
        owner, before = f"owner {number}", opened(documents)
        last: Kept | None = None
        for id in LINE:
            before.add(owner, id, last := kept(id, last))
        assert last is not None
        if what == "late":  # all were deleted while a request continues the last one
            for id in LINE:
                before.delete(owner, id)
        dying = opened(documents)
        with killed_at(dying._archive, number) as done:
            change(dying, owner, what, last)
        after = opened(documents)
        found = {id: after.get(owner, id) for id in (*LINE, "new") if has(after, owner, id)}
        for id, one in found.items():
            said = [*LINE, "new"]
            assert said_in(one) == said[: said.index(id) + 1]
            after.add(owner, f"{id} more", kept(f"{id} more", one))
        assert STAYS.get(what, set()) <= found.keys()
        if done[-1] == -1:  # it was not killed
            assert ("new" in found) == (what in NEW)
            return
    raise AssertionError("it does not come to an end")


@pytest.mark.parametrize("moment", ["stamps", "heads", "delete"])
def test_a_response_that_is_continued_while_it_is_deleted_keeps_what_was_said(
    documents: Documents, moment: str
) -> None:
    """The other front end adds before the stamps are read, between these and the heads, or after them."""
    one, other = opened(documents), opened(documents)
    one.add("me", "r0", kept("r0"))
    parent, archive, added = other.get("me", "r0"), one._archive, list[str]()
    act = getattr(archive, moment)

    def between(*given: Any, **how: Any) -> Any:
        if not added and (moment != "delete" or "unused_since" in how):
            added.append("r1")
            other.add("me", "r1", kept("r1", parent))
        return act(*given, **how)

    setattr(archive, moment, between)
    one.delete("me", "r0")
    assert added
    assert said_in(opened(documents).get("me", "r1")) == ["r0", "r1"]


def test_a_killed_process_leaves_whole_responses_in_a_directory(tmp_path: Path) -> None:
    """A real process is killed at each operation on files, also in the middle of a write."""
    number, ended = 0, False
    while not ended:
        place = Documents(directory=tmp_path / str(number))
        first = opened(place)
        first.add("me", "r0", kept("r0"))
        read, write = os.pipe()
        if not (child := os.fork()):  # nothing of pytest may run here
            try:
                dying = opened(place)
                dying._archive._files = Killing(number)  # type: ignore[attr-defined]
                dying.add("me", "r1", kept("r1", dying.get("me", "r0")))
                os.write(write, b"!")
            finally:
                os._exit(0)
        os.close(write)
        acknowledged = os.read(read, 1) == b"!"
        os.close(read)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        after = opened(place)
        assert said_in(after.get("me", "r0")) == ["r0"]
        assert not acknowledged or has(after, "me", "r1")
        if has(after, "me", "r1"):
            assert said_in(after.get("me", "r1")) == ["r0", "r1"]
        after.add("me", "r2", kept("r2", after.get("me", "r0")))
        number += 1
    assert number > 10


def test_what_a_key_keeps_beyond_its_bytes_drops_its_own_that_were_not_used(documents: Documents) -> None:
    one, parent = opened(documents), None
    one.add("other", "o", kept("o"))
    for number in range(40):
        parent = kept(f"r{number}", parent, OWN // 20)
        one.add("me", f"r{number}", parent)
    there = [number for number in range(40) if has(one, "me", f"r{number}")]
    assert there == list(range(there[0], 40))
    assert 10 < len(there) < 20
    assert said_in(opened(documents).get("me", "r39")) == [f"r{number}" for number in range(40)]
    assert has(one, "other", "o")
    one.add("me", "huge", kept("huge", None, OWN))
    assert not has(one, "me", "huge")
    assert has(one, "me", "r39")


def test_what_was_not_used_for_its_time_is_gone_with_its_turns() -> None:
    now = [1e9]
    archive = Archive(1 << 20, forgets=Forgets(10.0, 1 << 19), clock=lambda: now[0])
    one, other = (ResponseStore(archive, 1 << 18) for _ in range(2))
    for id in "ab":
        one.add("me", id, kept(id))
    one.add("me", "b2", kept("b2", one.get("me", "b")))
    now[0] += 9
    other.get("me", "b2")
    now[0] += 9
    assert [has(one, "me", id) for id in ("a", "b", "b2")] == [False, False, True]
    assert said_in(one.get("me", "b2")) == ["b", "b2"]
    one.add("me", "c", kept("c"))
    assert sorted(json.loads(head)["id"] for head in archive.heads("me")) == ["b", "b2", "b2", "c", "c"]


def test_in_memory_responses_are_continued_too_and_end_with_the_server() -> None:
    one = opened(Documents())
    first = kept("a")
    one.add("me", "a", first)
    one.add("me", "b", kept("b", one.get("me", "a")))
    one.delete("me", "a")
    assert said_in(one.get("me", "b")) == ["a", "b"]
    assert not has(opened(Documents()), "me", "b")
    one.add("me", "large", kept("large", size=OWN))
    assert not has(one, "me", "large")


DAMAGE: dict[str, dict[str, Any]] = {
    "another owner": {"owner": "you"},
    "another response": {"id": "r9"},
    "another kind": {"response": None},
    "a size that is none": {"response": -1},
    "no head": {"owner": 5},
}


@pytest.mark.parametrize("why", [*DAMAGE, "no list", "no messages", "a circle", "no turn", "garbage"])
def test_what_contradicts_itself_in_the_store_is_no_response(documents: Documents, why: str) -> None:
    one = opened(documents)
    for at in range(3):
        one.add("me", f"r{at}", kept(f"r{at}", one.get("me", f"r{at - 1}") if at else None))
    archive = one._archive
    response, turn = (archive.get("me", f"{kind} r1") for kind in ("response", "turn"))
    assert response is not None
    assert turn is not None
    match why:
        case "no list":
            archive.put("me", "turn r1", turn.head, b'{"role": "user"}]')
        case "no messages":
            archive.put("me", "turn r1", turn.head, b'{"role": 5}')
        case "a circle":
            archive.put("me", "turn r0", json.dumps(json.loads(turn.head) | {"id": "r0"}).encode(), turn.body)
        case "no turn":
            archive.delete("me", "turn r1")
        case "garbage":
            archive.put("me", "turn r1", random.Random(0).randbytes(50), b"")
        case _:
            archive.put("me", "response r1", json.dumps(json.loads(response.head) | DAMAGE[why]).encode(), b"[]")
    fresh = opened(documents)
    with pytest.raises(ApiError) as raised:
        fresh.get("me", "r1", "previous_response_id")
    assert (raised.value.status, raised.value.code) == (404, "previous_response_not_found")
    fresh.delete("me", "r1")
    with suppress(ApiError):
        fresh.delete("me", "r2")
    fresh.add("me", "r5", kept("r5"))
    assert said_in(fresh.get("me", "r5")) == ["r5"]


def test_a_long_conversation_is_read_once() -> None:
    """Each later turn of it reads the response that it continues, and no turn."""
    archive, read = Archive(1 << 22, forgets=Forgets(1000.0, 1 << 22)), list[str]()
    one, get = ResponseStore(archive, 1 << 21), archive.get

    def counted(owner: str, name: str) -> Any:
        read.append(name)
        return get(owner, name)

    archive.get = counted  # type: ignore[method-assign]
    parent = None
    for number in range(50):
        one.add("me", f"r{number}", kept(f"r{number}", parent))
        parent = one.get("me", f"r{number}")
    assert read == [f"response r{number}" for number in range(50)]
    other = ResponseStore(archive, 1 << 21)
    read.clear()
    assert len(said_in(other.get("me", "r49"))) == 50
    assert len(read) == 51


# -- servers ---------------------------------------------------------------------------------------------------------


@contextmanager
def serving(documents: Documents, **options: Any) -> Iterator[tuple[httpx.Client, FakeEngine]]:
    with FakeEngine() as engine:
        engine.documents = documents
        source = TokenSource(engine.model.name, "bytes", engine.model.vocab_size)
        engine.conversations = Conversations(documents.archive("conversations"), source)
        with (
            Server(engine, ServeSettings(port=0, **options)) as server,
            httpx.Client(base_url=server.url, timeout=60) as client,
        ):
            yield client, engine


def created(client: httpx.Client, engine: FakeEngine, text: str, **fields: Any) -> dict[str, Any]:
    with engine.scripted(output=text.encode()):
        answer = client.post(PATH, json={"input": "hi"} | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def prompt_of(engine: FakeEngine) -> str:
    return bytes(engine.seen[-1][0]).decode()


def test_a_server_continues_what_another_one_began_also_after_its_end(documents: Documents) -> None:
    with serving(documents) as (one, its):
        first = created(one, its, "one")
        with serving(documents) as (other, engine):
            second = created(other, engine, "two", input="more", previous_response_id=first["id"])
            assert prompt_of(engine) == "<user>hi<assistant>one<user>more"
            assert one.get(f"{PATH}/{second['id']}").json() == second
            (item,) = one.get(f"{PATH}/{second['id']}/input_items").json()["data"]
            assert item["content"][0]["text"] == "more"
        assert one.delete(f"{PATH}/{first['id']}").status_code == 200
    with serving(documents) as (again, engine):
        assert again.get(f"{PATH}/{first['id']}").status_code == 404
        with engine.scripted(output=b"three"):
            body = {"input": "last", "previous_response_id": second["id"], "stream": True}
            events = events_of(again.post(PATH, json=body).text)
        assert events[-1]["type"] == "response.completed"
        assert prompt_of(engine) == "<user>hi<assistant>one<user>more<assistant>two<user>last"
        assert again.get(f"{PATH}/{events[-1]['response']['id']}").json() == events[-1]["response"]


def test_on_every_server_a_response_belongs_to_its_key(documents: Documents) -> None:
    digests = tuple(map(key_digest, ("ours", "theirs")))
    with serving(documents, key_digests=digests) as (one, its), serving(documents, key_digests=digests) as (other, _):
        one.headers["authorization"] = "Bearer ours"
        id = created(one, its, "one")["id"]
        for key, status in (("ours", 200), ("theirs", 404)):
            for client in (one, other):
                client.headers["authorization"] = f"Bearer {key}"
                body = {"input": "hi", "previous_response_id": id}
                found = [
                    client.get(f"{PATH}/{id}"),
                    client.get(f"{PATH}/{id}/input_items"),
                    client.post(PATH, json=body),
                ]
                assert [answer.status_code for answer in found] == [status] * 3
        assert one.delete(f"{PATH}/{id}").status_code == 404
        other.headers["authorization"] = "Bearer ours"
        assert other.delete(f"{PATH}/{id}").status_code == 200


def test_a_turn_of_a_conversation_that_another_server_has_changed_is_refused(documents: Documents) -> None:
    def turn(client: httpx.Client, text: str) -> httpx.Response:
        body = {"conversation": "x", "messages": [{"role": "user", "content": text}]}
        return client.post("/v1/chat/completions", json=body)

    with serving(documents) as (one, its), serving(documents) as (other, _):
        assert one.post("/kvcellar/conversations", json={"name": "x"}).status_code == 201
        hold = its.conversations.hold

        @contextmanager
        def slow(name: str, *, owner: str = "") -> Any:
            with hold(name, owner=owner) as held:
                assert turn(other, "between").status_code == 200
                yield held

        its.conversations.hold = slow  # type: ignore[method-assign]
        lost = turn(one, "lost")
        assert (lost.status_code, error_of(lost)["code"]) == (409, "conversation_conflict")
        for client in (one, other):
            said = client.get("/kvcellar/conversations/x").json()["messages"]
            assert [message["content"] for message in said if message["role"] == "user"] == ["between"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_that_cannot_be_kept_is_not_said_to_be_complete(documents: Documents, stream: bool) -> None:
    def fails(*given: Any) -> None:
        raise OSError("no space left")

    with serving(documents) as (client, engine), pytest.MonkeyPatch.context() as patch:
        id = created(client, engine, "one")["id"]
        for name in ("_replace", "_touch", "_remove"):
            patch.setattr(f"{Archive.__module__}.DiskArchive.{name}", fails)
            patch.setattr(f"{RedisArchive.__module__}.RedisArchive.{name}", fails)
        answer = client.post(PATH, json={"input": "hi", "stream": stream})
        if stream:
            last = events_of(answer.text)[-1]
            assert (last["type"], last["response"]["error"]["code"]) == ("response.failed", "store_failed")
        else:
            assert (answer.status_code, error_of(answer)["code"]) == (503, "store_failed")
        for failed in (
            client.get(f"{PATH}/{id}"),
            client.delete(f"{PATH}/{id}"),
            client.post(PATH, json={"input": "hi", "previous_response_id": id}),
        ):
            assert (failed.status_code, error_of(failed)["code"]) == (503, "store_failed")
        assert client.post(PATH, json={"input": "hi", "store": False}).status_code == 200
