"""Stop strings: found in any pieces of the text, where a search at every character would find them."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.errors import WrongStage
from kvcellar.text.output import StopFinder, Stops


def dumb(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Read one character more at a time; the first moment at which the text ends with a stop string is the end."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            met = max(complete, key=len)
            return text[: end - len(met)], met
    return text, None


def stream(parts: list[str], stops: list[str]) -> tuple[str, str | None]:
    finder, out = StopFinder(Stops(stops)), ""
    for part in parts:
        emitted, met = finder.push(part)
        finder.check()
        out += emitted
        if met is not None:
            return out, met
    return out + finder.flush(), None


few = st.text("ab😀é", max_size=12)


@given(st.lists(few, max_size=12), st.lists(st.text("ab😀é", min_size=1, max_size=5), max_size=5))
def test_what_comes_out_is_the_text_cut_at_the_first_stop(parts: list[str], stops: list[str]) -> None:
    assert stream(parts, stops) == dumb("".join(parts), stops)


@given(st.lists(few, max_size=12), st.lists(st.text("ab😀é", min_size=1, max_size=5), min_size=1, max_size=5))
def test_no_more_is_held_back_than_could_become_a_stop(parts: list[str], stops: list[str]) -> None:
    finder, pushed, out = StopFinder(Stops(stops)), "", ""
    for part in parts:
        emitted, met = finder.push(part)
        pushed, out = pushed + part, out + emitted
        if met is not None:
            return
        held = pushed[len(out) :]
        could = [n for stop in stops for n in range(len(stop)) if pushed.endswith(stop[:n])]
        assert len(held) == max(could)


def test_the_stop_complete_first_wins_and_of_those_the_longest() -> None:
    assert stream(["xabc"], ["abc", "b"]) == ("xa", "b")
    assert stream(["x", "ab", "c"], ["c", "abc", "bc"]) == ("x", "abc")


def test_without_stops_nothing_is_held_back() -> None:
    assert StopFinder(Stops(())).push("abc") == ("abc", None)


def test_nothing_may_follow_the_end() -> None:
    finder = StopFinder(Stops(["b"]))
    assert finder.push("abc") == ("a", "b")
    with pytest.raises(WrongStage):
        finder.push("d")
    finder = StopFinder(Stops(["b"]))
    assert finder.flush() == ""
    with pytest.raises(WrongStage):
        finder.push("d")


class Counting(str):
    """A text that counts how often one of its characters is looked at."""

    looks = 0

    def __getitem__(self, at):
        type(self).looks += 1
        return super().__getitem__(at)


def test_near_matches_do_not_make_it_slow() -> None:
    stop = Counting("a" * 2000 + "b")
    finder = StopFinder(Stops([stop]))
    built = Counting.looks
    text = ("a" * 1999 + "c") * 5 + "a" * 10_000
    emitted = "".join(finder.push(text[at : at + 7])[0] for at in range(0, len(text), 7))
    assert emitted + finder.flush() == text
    assert Counting.looks - built < 5 * len(text)


def test_many_stops_over_a_long_text() -> None:
    rng = random.Random(5)
    text = "".join(rng.choices("ab", k=3000))
    stops = ["".join(rng.choices("ab", k=12)) + "c" for _ in range(64)]
    assert stream([text], stops) == (text, None)


def test_texts_that_share_stop_strings_do_not_notice_each_other():
    draw = random.Random(5)
    for _ in range(300):
        stops = ["".join(draw.choices("ab", k=draw.randint(1, 4))) for _ in range(3)]
        texts = ["".join(draw.choices("abc", k=12)) for _ in range(3)]
        shared = Stops(stops)
        finders, found = [StopFinder(shared) for _ in texts], [["", None] for _ in texts]
        for at in range(12):
            for text, finder, one in zip(texts, finders, found, strict=True):
                if one[1] is None:
                    final, one[1] = finder.push(text[at])
                    one[0] += final
        for text, finder, (final, met) in zip(texts, finders, found, strict=True):
            assert (final + ("" if met else finder.flush()), met) == dumb(text, stops)
