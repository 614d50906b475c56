"""Which connection is closed when there are too many: laws on random arrivals, and servers that are full of silence."""

import contextlib
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.serve import Server, ServeSettings, key_digest
from kvcellar.serve.http.room import STRANGERS, Room
from tests.serve.fake_engine import FakeEngine
from tests.serve.wire import COMPLETIONS, Wire, completion, connected, read_response, read_to_end, read_until, request

KEY = "Authorization: Bearer sk-good-key"


@dataclass(eq=False)
class Guest:
    address: str
    number: int = 0
    idle: bool = True
    admitted: bool = False


ADDRESSES = [f"10.0.0.{n}" for n in range(4)]
STEPS = st.lists(
    st.tuples(st.sampled_from(["enter", "enter", "enter", "admit", "run", "rest", "leave"]), st.integers(0, 30)),
    max_size=120,
)


@given(limit=st.integers(1, 24), steps=STEPS)
def test_what_is_promised_to_keys_and_to_strangers_holds_at_every_arrival(limit, steps):
    room, inside = Room[Guest](limit), list[Guest]()
    for at, (what, number) in enumerate(steps):
        if what == "enter":
            entering(room, inside, Guest(ADDRESSES[number % len(ADDRESSES)], at), limit)
        elif inside:
            one = inside[number % len(inside)]
            if what == "admit":
                room.admit(one)
                one.admitted = True
            elif what == "leave":
                room.leave(one)
                inside.remove(one)
            elif one.admitted:
                one.idle = what == "rest"
        room.check()
    assert len(inside) <= limit


def entering(room: Room[Guest], inside: list[Guest], guest: Guest, limit: int) -> None:
    before = Counter(one.address for one in inside if not one.admitted)
    strangers = before.total()
    closed = room.enter(guest, guest.address)
    inside.append(guest)
    if closed is None:
        assert len(inside) <= limit
        return
    assert len(inside) == limit + 1, "closed without need"
    inside.remove(closed)
    if closed is guest:
        assert all(one.admitted and not one.idle for one in inside), "refused while another could be closed"
    elif closed.admitted:
        assert closed.idle
        assert strangers < max(1, limit // STRANGERS), "strangers took the place of an idle one"
    else:
        counts = before + Counter([guest.address])
        assert counts[closed.address] == max(counts.values()), "closed for what comes from another address"
        same = [one for one in [*inside, closed] if not one.admitted and one.address == closed.address]
        assert closed.number == min(one.number for one in same), "not the oldest"


@pytest.mark.parametrize(
    ("many", "few"), [("10.0.0.1", "10.0.0.2"), ("2001:db8::1", "2001:db8:0:1::1"), ("::ffff:10.0.0.1", "10.0.0.2")]
)
def test_of_two_networks_the_one_with_more_strangers_loses_its_oldest(many, few):
    room = Room[Guest](3)
    guests = [Guest(few), Guest(many), Guest(many)]
    assert [room.enter(one, one.address) for one in guests] == [None] * 3
    assert room.enter(Guest("192.0.2.1"), "192.0.2.1") is guests[1]


def test_addresses_of_one_ipv6_network_count_together():
    room = Room[Guest](3)
    guests = [Guest("2001:db8:0:1::1"), Guest("2001:db8::1"), Guest("2001:db8::2")]
    for one in guests:
        room.enter(one, one.address)
    new = Guest("2001:db8:0:2::1")
    assert room.enter(new, new.address) is guests[1]


def test_a_connection_that_has_left_is_not_admitted_any_more():
    room, guest = Room[Guest](1), Guest("")
    room.enter(guest, "")
    room.leave(guest)
    room.admit(guest)
    assert room.enter(Guest(""), "") is None
    room.check()


# -- servers --------------------------------------------------------------------------------------------------------

LIMIT = 16


@pytest.fixture
def small(shared_engine: FakeEngine, engine: FakeEngine):
    settings = ServeSettings(port=0, max_connections=LIMIT, key_digests=(key_digest("sk-good-key"),))
    with Server(shared_engine, settings) as server:
        yield server


def test_silent_connections_keep_no_key_holder_waiting(small, engine):
    """Neither those that have a running stream, nor those that come later; and the limit holds."""
    with engine.scripted(delay=0.001, output=b"x" * 300), contextlib.ExitStack() as stack:
        stream = stack.enter_context(connected(small))
        stream.sendall(request(COMPLETIONS, completion(stream=True, max_tokens=300), KEY))
        read_until(stream, b'"text":"x"')
        silent = [stack.enter_context(connected(small)) for _ in range(3 * LIMIT)]
        for _ in range(3):
            with connected(small) as wire:
                wire.sendall(request(COMPLETIONS, completion(max_tokens=1), KEY))
                assert read_response(wire)[0] == 200
        read_until(stream, b"[DONE]")
        first = read_to_end(silent[0])
        assert first.startswith(b"HTTP/1.1 503")
        assert b'"overloaded"' in first


def test_strangers_with_running_or_unread_requests_are_closed_too(small, engine):
    """Those that have sent a wrong key, no key, half a head, or many requests whose responses they do not read."""
    sent = [
        request(COMPLETIONS, completion(), "Authorization: Bearer wrong"),
        request("/health"),
        b"POST /v1/completions HTTP/1.1\r\n",
        request("/health") * 500,
    ]
    with contextlib.ExitStack() as stack:
        for number in range(2 * LIMIT):
            wire = stack.enter_context(connected(small))
            with contextlib.suppress(OSError):  # it may be closed already
                wire.sendall(sent[number % len(sent)])
        for _ in range(LIMIT):
            wire = stack.enter_context(connected(small))
            wire.sendall(request("/v1/models", None, KEY))
            assert read_response(wire)[0] == 200


def test_idle_connections_of_keys_are_closed_for_new_ones(small, engine):
    with contextlib.ExitStack() as stack:
        wires = list[Wire]()
        for _ in range(LIMIT + 1):
            wires.append(stack.enter_context(connected(small)))
            wires[-1].sendall(request("/v1/models", None, KEY))
            assert read_response(wires[-1])[0] == 200
        assert read_to_end(wires[0]) == b""
        wires[-1].sendall(request("/v1/models", None, KEY))
        assert read_response(wires[-1])[0] == 200


def test_without_keys_connections_without_a_request_are_closed_first(shared_engine, engine):
    with Server(shared_engine, ServeSettings(port=0, max_connections=LIMIT)) as server, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connected(server)) for _ in range(LIMIT)]
        wires = [stack.enter_context(connected(server)) for _ in range(2)]
        for wire in wires:
            wire.sendall(request("/v1/models"))
            assert read_response(wire)[0] == 200
        assert [read_response(wire)[0] for wire in silent[:2]] == [503, 503]


def test_an_arrival_is_refused_when_all_others_have_running_requests(small, engine):
    with engine.scripted(delay=0.01, output=b"x" * 5000), contextlib.ExitStack() as stack:
        streams = [stack.enter_context(connected(small)) for _ in range(LIMIT)]
        for stream in streams:
            stream.sendall(request(COMPLETIONS, completion(stream=True, max_tokens=5000), KEY))
            read_until(stream, b'"text":"x"')
        with connected(small) as wire:
            assert read_response(wire)[0] == 503
            assert read_to_end(wire) == b""
        read_until(streams[0], b'"text":"x"')
    assert engine.rest()
