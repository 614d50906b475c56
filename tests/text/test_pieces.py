"""Pieces of deltas: where it was not said how answers are read, all text is content."""

import pytest

from kvcellar.events import Delta
from kvcellar.text.pieces import Content, Reasoning, pieces_of


@pytest.mark.parametrize("text", ["<think>", "one", '{"name": "f"}'])
def test_text_that_was_not_read_is_content(text):
    assert [*pieces_of(Delta(0, text, (1,)))] == [Content(text)]
    assert not pieces_of(Delta(0, "", (1,)))


def test_what_was_read_of_a_delta_are_its_pieces():
    pieces = (Reasoning("hm"), Content("one"))
    assert pieces_of(Delta(0, "one", (1,), pieces=pieces)) == pieces
    assert not pieces_of(Delta(0, "two", (1,), pieces=()))
