"""Pieces of replies: a reader without a form of calls returns all text as content."""

from kvcellar.events import Delta, Finished
from kvcellar.text.pieces import Content, PlainReader, ReplyReader


def test_a_plain_reader_returns_every_text_as_content():
    reader: ReplyReader = PlainReader()
    texts = ["<think>", "", "one", '{"name": "f"}']
    pieces = [piece for text in texts for piece in reader.add(Delta(0, text, (1,)))]
    assert pieces + reader.end(Finished(0, "stop")) == [Content(text) for text in texts if text]
    assert (reader.calls, reader.reasoning_tokens) == (0, 0)
