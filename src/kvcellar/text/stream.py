"""stream: the text of an answer, token by token, so that the pieces are exactly the text of the whole.

Always true, for the ids pushed so far and whatever follows:
  * the pieces and what `flush` returns make up `words.decode(ids)`;
  * no piece ends inside a character, and U+FFFD comes only where the whole text has it;
  * what is held back is at most 3 bytes, or one run of at most 67 byte tokens, or (`WholeStream`) the ids;
  * a push costs the same however long the answer is.

One exception: a run of byte tokens (a character that is not in the vocabulary, `<0xE2><0x82><0xAC>`) is turned into
U+FFFD as a whole by its decoder if any byte of it is wrong. Runs are therefore held back until they end; but one of 64
valid bytes and more is real text, and is let go at the next character border. Should it still turn bad, only the rest
does.

tokenizers' own `DecodeStream` is not used: on such runs it disagrees with `decode` or raises, and on bytes that never
become valid it keeps every token and decodes all of them again at each step.
"""

import codecs
from collections.abc import Sequence
from typing import Protocol

from kvcellar.text.tokens import Manner, Words

LONG_RUN = 64  # bytes
UNREADABLE = "\ufffd"


class TextStream(Protocol):
    """Ids in, text out. `push` may return "" while a character is incomplete; `flush` ends it and returns the rest."""

    def push(self, token: int) -> str: ...
    def flush(self) -> str: ...
    def check(self) -> None: ...


def open_stream(words: Words, *, skip_special: bool = True, after: Sequence[int] = ()) -> TextStream:
    """A stream for one answer. `after` are the ids it continues, if its text should continue theirs.

    Tokenizers that write a word as "space, then letters" drop the space of a text's first word; an answer that begins
    with a word keeps its space if it is `after` something, and loses it if it stands alone, as in `words.decode`.
    """
    if words.manner is Manner.BYTES:
        return ByteStream(words, skip_special)
    if words.manner is Manner.PIECES:
        return PieceStream(words, skip_special, after)
    return WholeStream(words, skip_special)


class ByteStream:
    """For tokens that are bytes: reads them as UTF-8."""

    def __init__(self, words: Words, skip_special: bool) -> None:
        self._words = words
        self._skipped = words.special_ids if skip_special else frozenset[int]()
        self._reader = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Text that is now certain."""
        return "" if token in self._skipped else self._reader.decode(self._words.token_bytes(token))

    def flush(self) -> str:
        """The rest: an incomplete character will not be completed."""
        return self._reader.decode(b"", final=True)

    def check(self) -> None:
        """Assert what is always true."""
        assert len(self._reader.getstate()[0]) <= 3


class PieceStream:
    """For tokens whose text depends on their neighbours: decodes each behind the one before it, its anchor."""

    def __init__(self, words: Words, skip_special: bool, after: Sequence[int]) -> None:
        self._words = words
        self._skipped = words.special_ids if skip_special else frozenset[int]()
        self._anchor: tuple[int, ...] = ()  # one token that stands behind the beginning; empty at the beginning
        self._run: list[int] = []  # byte tokens that are not told yet
        self._bytes = bytearray()  # theirs
        self._reader = codecs.getincrementaldecoder("utf-8")("strict")
        self._spoilt = False  # this run has a wrong byte: all of it is unreadable
        for token in reversed(after[-LONG_RUN:]):
            if self._is_text(token) and words.byte_of(token) is None:
                self._anchor = (token,)
                break

    def push(self, token: int) -> str:
        """Text that is now certain."""
        if not self._is_text(token):
            return ""
        if (byte := self._words.byte_of(token)) is not None:
            return self._push_byte(token, byte)
        before = self.flush()
        return before + self._told((token,))

    def flush(self) -> str:
        """The rest: a run of bytes that ends here, whether its last character is complete or not."""
        complete = not self._spoilt and not self._pending()
        text = self._told(tuple(self._run)) if complete else self._unreadable()
        self._spoilt = False
        self._reader.reset()
        return text

    def _is_text(self, token: int) -> bool:
        return token not in self._skipped and bool(self._words.written(token))

    def _push_byte(self, token: int, byte: int) -> str:
        self._run.append(token)
        self._bytes.append(byte)
        if not self._spoilt:
            try:
                self._reader.decode(bytes((byte,)))
            except UnicodeDecodeError:
                self._spoilt = True
        if self._spoilt:
            return self._unreadable()
        if len(self._run) >= LONG_RUN and not self._pending():
            return self._told(tuple(self._run))
        return ""

    def _pending(self) -> bool:
        """Is a character incomplete?"""
        return bool(self._reader.getstate()[0])

    def _unreadable(self) -> str:
        """Tell each held byte as U+FFFD, as the decoder does."""
        count = len(self._run)
        if count:
            self._move_on(self._run[-1])
        return UNREADABLE * count

    def _told(self, ids: tuple[int, ...]) -> str:
        """The text of `ids`, which are one token or the run, at this place."""
        if not ids:
            return ""
        if self._run and self._anchor:
            text = self._bytes.decode()  # behind an anchor bytes are bytes; an anchor that is a byte would join the run
        else:
            before = self._words.decode(self._anchor, skip_special=False)
            text = self._words.decode(self._anchor + ids, skip_special=False)[len(before) :]
        self._move_on(ids[-1])
        return text

    def _move_on(self, anchor: int) -> None:
        self._anchor = (anchor,)
        self._run.clear()
        self._bytes.clear()

    def check(self) -> None:
        """Assert what is always true."""
        assert len(self._run) == len(self._bytes) < LONG_RUN + 3
        assert not (self._spoilt and self._run)
        assert len(self._anchor) <= 1


class WholeStream:
    """For decoders that may change any of the text later: correct, and silent until the end."""

    def __init__(self, words: Words, skip_special: bool) -> None:
        self._words, self._skip_special = words, skip_special
        self._ids: list[int] = []

    def push(self, token: int) -> str:
        """Nothing is certain yet."""
        self._ids.append(token)
        return ""

    def flush(self) -> str:
        """All of it."""
        text = self._words.decode(self._ids, skip_special=self._skip_special)
        self._ids.clear()
        return text

    def check(self) -> None:
        """There is nothing to go wrong."""
