"""A turn of the event loop handles few sockets, all of them in the end, and none that is not waited for any more."""

import os
import selectors
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.serve.http.event_loop import SOCKETS, ShortTurns

PAIRS = 3 * SOCKETS
EVENTS = {"nothing": 0, "read": selectors.EVENT_READ, "write": selectors.EVENT_WRITE}


@pytest.fixture(scope="module")
def pairs() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    with ExitStack() as stack:
        made = [socket.socketpair() for _ in range(PAIRS)]
        for pair in made:
            for end in pair:
                stack.enter_context(end).setblocking(False)
        yield made


def drained(end: socket.socket) -> None:
    while True:
        try:
            end.recv(1000)
        except BlockingIOError:
            return


def test_sockets_that_stay_ready_take_turns(pairs) -> None:
    with ShortTurns() as selector:
        for number, (end, other) in enumerate(pairs):
            drained(end)
            other.send(b"a")
            selector.register(end, selectors.EVENT_READ, number)
        for _ in range(3):
            turns = [selector.select(0.0) for _ in range(PAIRS // SOCKETS)]
            assert {len(turn) for turn in turns} == {SOCKETS}
            assert {key.data for turn in turns for key, _ in turn} == set(range(PAIRS))


def test_a_descriptor_that_is_used_again_is_not_told_what_was_ready_before() -> None:
    """As asyncio registers them: by their numbers."""
    pairs = [socket.socketpair() for _ in range(SOCKETS + 2)]
    with ExitStack() as stack, ShortTurns() as selector:
        for end, other in pairs:
            stack.enter_context(end)
            stack.enter_context(other)
        *ready, (silent, _) = pairs
        for end, other in ready:
            other.send(b"a")
            selector.register(end.fileno(), selectors.EVENT_READ)
        told = {key.fd for key, _ in selector.select(0.0)}
        (left,) = {end.fileno() for end, _ in ready} - told
        selector.unregister(left)
        os.dup2(silent.fileno(), left)
        selector.register(left, selectors.EVENT_READ)
        assert {key.fd for key, _ in selector.select(0.0)} == told


class Waited:
    """What a selector waits for, by number of the socket, beside a dumb model of it."""

    def __init__(self, selector: ShortTurns, ends: list[socket.socket]) -> None:
        self._selector, self._ends = selector, ends
        self.events = dict[int, int]()

    def wait_for(self, number: int, events: int) -> None:
        if not events and number in self.events:
            self._selector.unregister(self._ends[number])
        elif events and number in self.events:
            self._selector.modify(self._ends[number], events, number)
        elif events:
            self._selector.register(self._ends[number], events, number)
        self.events.pop(number, None)
        if events:
            self.events[number] = events

    def select(self) -> set[int]:
        found = self._selector.select(0.0)
        assert len(found) <= SOCKETS
        assert all(events and events & ~self.events[key.data] == 0 for key, events in found)
        return {key.data for key, _ in found}


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["send", "drain", "select", *EVENTS]), st.integers(0, PAIRS - 1))))
def test_what_is_returned_is_waited_for_and_all_that_is_ready_is_returned(pairs, actions) -> None:
    """At first all have something to read."""
    readable = set(range(PAIRS))
    for end, other in pairs:
        drained(end)
        other.send(b"a")
    with ShortTurns() as selector:
        waited = Waited(selector, [end for end, _ in pairs])
        for number in range(PAIRS):
            waited.wait_for(number, selectors.EVENT_READ)
        for act, number in actions:
            if act == "send":
                pairs[number][1].send(b"a")
                readable.add(number)
            elif act == "drain":
                drained(pairs[number][0])
                readable.discard(number)
            elif act == "select":
                waited.select()
            else:
                waited.wait_for(number, EVENTS[act])
        ready = {one for one, events in waited.events.items() if events & selectors.EVENT_WRITE or one in readable}
        assert set[int]().union(*(waited.select() for _ in range(2 * PAIRS // SOCKETS + 1))) >= ready
