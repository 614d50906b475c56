"""Calls that end in time, whatever becomes of them, and are left alone while they would not."""

import threading

import pytest

from kvcellar.memory.tiers.archive import Archive
from kvcellar.memory.tiers.bounded import Bounded, Guard, RemoteFailed


def test_a_call_that_hangs_ends_in_time_and_many_are_not_tried() -> None:
    bounded, go = Bounded(0.01, most=2), threading.Event()
    for _ in range(2):
        with pytest.raises(RemoteFailed, match="no result"):
            bounded(lambda: go.wait(10))
    with pytest.raises(RemoteFailed, match="too many") as raised:
        bounded(lambda: 1)
    assert not raised.value.answers  # the store, by what is known
    go.set()
    for _ in range(1000):
        try:
            assert bounded(lambda: 1) == 1
            break
        except RemoteFailed:
            pass
    else:
        raise AssertionError("calls that have ended still count as hanging")


def test_too_many_calls_of_callers_that_wait_still_are_no_fault_of_the_store() -> None:
    bounded, begun, go = Bounded(60.0, most=1), threading.Event(), threading.Event()
    caller = threading.Thread(target=lambda: bounded(lambda: (begun.set(), go.wait(60))))
    caller.start()
    assert begun.wait(60)
    bounded._seconds = 0.01
    with pytest.raises(RemoteFailed, match="too many") as raised:
        bounded(lambda: 1)
    assert raised.value.answers
    go.set()
    caller.join()
    bounded._seconds = 60.0
    assert bounded(lambda: 1) == 1


@pytest.mark.parametrize("error", [ZeroDivisionError, TimeoutError, KeyError])
def test_what_a_call_raises_is_raised(error: type[Exception]) -> None:
    def fails() -> None:
        raise error

    with pytest.raises(error) as raised:
        Bounded(60.0)(fails)
    assert not isinstance(raised.value, RemoteFailed)


class Slow(Archive):
    """Reading it takes until `go` is set."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds=seconds)
        self.go, self.asked = threading.Event(), 0

    def _opened(self, file: str, *, whole: bool = True):  # type: ignore[no-untyped-def]
        self.asked += 1
        self.go.wait(60)
        return super()._opened(file, whole=whole)


def test_an_archive_that_hangs_is_asked_once_and_others_of_its_callers_do_not_wait() -> None:
    archive = Slow(0.01)
    with pytest.raises(OSError, match="no result"):
        archive.get("a", "x")
    for call in (lambda: archive.get("a", "x"), lambda: archive.put("a", "x", b"", b"")):
        with pytest.raises(OSError, match="left alone"):
            call()
    assert archive.asked == 1
    archive.go.set()


def test_a_listing_that_takes_long_stops_listings_only() -> None:
    archive = Slow(60.0)
    archive._lists = Guard(0.05)
    archive.go.set()
    archive.put("a", "x", b"head", b"body")
    archive.go.clear()
    with pytest.raises(OSError, match="no result"):
        archive.heads("a")
    with pytest.raises(OSError, match="left alone"):
        archive.stamps("a")
    archive.go.set()
    archive.put("b", "y", b"head", b"body")
    assert archive.get("b", "y") is not None


def test_a_store_that_answers_is_asked_again_at_once() -> None:
    guard, asked = Guard(60.0), list[int]()

    def fails(error: OSError) -> None:
        asked.append(1)
        raise error

    for _ in range(2):
        for error in (OSError("no space left"), RemoteFailed("refused", answers=True)):
            with pytest.raises(OSError, match=str(error)):
                guard(lambda error=error: fails(error))
    assert len(asked) == 4
    with pytest.raises(RemoteFailed, match="no route"):
        guard(lambda: fails(RemoteFailed("no route")))
    with pytest.raises(RemoteFailed, match="left alone"):
        guard(lambda: asked.append(1))
    assert len(asked) == 5
