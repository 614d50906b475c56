"""output: the text of a completion, token by token: incremental detokenization, then stop strings.

A `TextStream` turns ids into text. Always true, for the ids pushed so far and whatever follows:
  * the texts that `push` and `flush` return concatenate to `tokenizer.decode(ids)`;
  * no text ends inside a character, and U+FFFD occurs only where the whole text has it;
  * what is held back is at most 3 bytes, or one run of at most 67 byte tokens, or (`WholeStream`) the ids;
  * the cost of a push does not depend on the length of the completion.

One exception: a decoder turns a run of byte tokens (a character that is not in the vocabulary, `<0xE2><0x82><0xAC>`)
into U+FFFD as a whole if any byte of it is invalid. Runs are therefore held back until they end; but one of 64 valid
bytes and more is real text, and is returned at the next end of a character. If it becomes invalid after that, only the
remaining bytes become U+FFFD.

`DecodeStream` of tokenizers is not used: on such runs it disagrees with `decode` or raises, and with bytes that never
become valid it keeps every token and decodes all of them again at each step.

A `StopFinder` finds stop strings. The one that is complete first is met; of those complete at the same character, the
longest. That does not depend on how the text is divided into pushes. Always true:
  * what was returned, and what is held back, is the text so far, cut where the stop string that was met begins;
  * what is held back is the longest suffix of the text that is a prefix of a stop string;
  * a character costs O(stop strings).

A `ReadOutput` is the text of a completion that is read as it is generated. Always true:
  * no control token is in a piece, as far as tokens are known to be that: `WholeStream` has only their text;
  * a stop string is found in the content alone: reasoning and calls are no part of it, and end a content;
  * after a stop string, and after the last call that is wanted, nothing is read.
"""

import codecs
from array import array
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from kvcellar.errors import WrongStage
from kvcellar.text.pieces import Content, Piece
from kvcellar.text.replies.bodies import Marks
from kvcellar.text.replies.machine import Machine, joined
from kvcellar.text.tokens import TextTokenizer

LONG_RUN = 64  # bytes
UNREADABLE = "\ufffd"


class Output:
    """The text of one completion, without partial characters and stop strings. Without a stream (a model that has no
    tokenizer) all texts are empty. `met` is the stop string that ended it, if one did."""

    def __init__(self, stream: "TextStream | None", stops: "Stops") -> None:
        self._stream, self._stops = stream, StopFinder(stops)
        self.met: str | None = None

    @property
    def over(self) -> bool:
        """Has its text ended the completion?"""
        return self.met is not None

    def told(self) -> tuple[tuple[Piece, ...] | None, int]:
        """What was read since the last call, as pieces, and how many tokens of it are reasoning; None: it is text."""
        return None, 0

    def push(self, token: int, *, may_stop: bool) -> str:
        """The text that is final after `token`. Stop strings are ordinary text unless `may_stop`."""
        text = self._stream.push(token) if self._stream is not None else ""
        return self._before_stop(text) if may_stop else text

    def flush(self) -> str:
        """The rest of the text, when no token follows."""
        if self.met is not None:
            return ""
        text = self._before_stop(self._stream.flush() if self._stream is not None else "")
        return text if self.met is not None else text + self._stops.flush()

    def _before_stop(self, text: str) -> str:
        final, self.met = self._stops.push(text)
        return final


def open_stream(tokenizer: TextTokenizer, *, skip_special: bool = True, after: Sequence[int] = ()) -> "TextStream":
    """A stream for one completion. `after` are the ids whose text it continues.

    Tokenizers that write a word as "space, then letters" drop the space of the first word of a text: a completion that
    begins with a word keeps its space with `after`, and loses it without, as in `tokenizer.decode`.
    """
    kind = decoder_kind(tokenizer.decoder_steps)
    if kind is DecoderKind.BYTES:
        return ByteStream(tokenizer, skip_special)
    if kind is DecoderKind.LOCAL:
        return LocalStream(tokenizer, skip_special, after)
    return WholeStream(tokenizer, skip_special)


class ByteStream:
    """For `DecoderKind.BYTES`. `push` returns the text that is final; `flush` returns the rest, and is the end."""

    def __init__(self, tokenizer: TextTokenizer, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset[int]()
        self._reader = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return "" if token in self._skipped else self._reader.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        return self._reader.decode(b"", final=True)

    def check(self) -> None:
        """Assert what is always true."""
        assert len(self._reader.getstate()[0]) <= 3


class LocalStream:
    """For `DecoderKind.LOCAL`: decodes each token after the one before it, its anchor."""

    def __init__(self, tokenizer: TextTokenizer, skip_special: bool, after: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset[int]()
        self._anchor: tuple[int, ...] = ()  # the token before; empty at the beginning
        self._run: list[int] = []  # byte tokens that are held back
        self._bytes = bytearray()  # of these tokens
        self._reader = codecs.getincrementaldecoder("utf-8")("strict")
        self._invalid = False  # this run has an invalid byte: all of it becomes U+FFFD
        for token in reversed(after[-LONG_RUN:]):
            if self._is_text(token) and tokenizer.byte_of(token) is None:
                self._anchor = (token,)
                break

    def push(self, token: int) -> str:
        if not self._is_text(token):
            return ""
        if (byte := self._tokenizer.byte_of(token)) is not None:
            return self._push_byte(token, byte)
        before = self.flush()
        return before + self._decoded((token,))

    def flush(self) -> str:
        """The run of bytes that ends here, whether its last character is complete or not."""
        complete = not self._invalid and not self._pending()
        text = self._decoded(tuple(self._run)) if complete else self._replaced()
        self._invalid = False
        self._reader.reset()
        return text

    def _is_text(self, token: int) -> bool:
        return token not in self._skipped and bool(self._tokenizer.written(token))

    def _push_byte(self, token: int, byte: int) -> str:
        self._run.append(token)
        self._bytes.append(byte)
        if not self._invalid:
            try:
                self._reader.decode(bytes((byte,)))
            except UnicodeDecodeError:
                self._invalid = True
        if self._invalid:
            return self._replaced()
        if len(self._run) >= LONG_RUN and not self._pending():
            return self._decoded(tuple(self._run))
        return ""

    def _pending(self) -> bool:
        """Is a character incomplete?"""
        return bool(self._reader.getstate()[0])

    def _replaced(self) -> str:
        """Each byte that is held back as U+FFFD, as the decoder does."""
        count = len(self._run)
        if count:
            self._advance(self._run[-1])
        return UNREADABLE * count

    def _decoded(self, ids: tuple[int, ...]) -> str:
        """The text of `ids`, which are one token or the run, after the anchor."""
        if not ids:
            return ""
        if self._run and self._anchor:
            text = self._bytes.decode()  # an anchor that is a byte would become part of the run
        else:
            before = self._tokenizer.decode(self._anchor, skip_special=False)
            text = self._tokenizer.decode(self._anchor + ids, skip_special=False)[len(before) :]
        self._advance(ids[-1])
        return text

    def _advance(self, anchor: int) -> None:
        self._anchor = (anchor,)
        self._run.clear()
        self._bytes.clear()

    def check(self) -> None:
        """Assert what is always true."""
        assert len(self._run) == len(self._bytes) < LONG_RUN + 3
        assert not (self._invalid and self._run)
        assert len(self._anchor) <= 1


class WholeStream:
    """For `DecoderKind.WHOLE`: returns nothing before the end."""

    def __init__(self, tokenizer: TextTokenizer, skip_special: bool) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._ids: list[int] = []

    def push(self, token: int) -> str:
        self._ids.append(token)
        return ""

    def flush(self) -> str:
        text = self._tokenizer.decode(self._ids, skip_special=self._skip_special)
        self._ids.clear()
        return text

    def check(self) -> None:
        """Nothing to assert."""


TextStream = ByteStream | LocalStream | WholeStream


class Stops:
    """Tables of non-empty stop strings, shared by all completions of a request. Costs O(characters) to make; never
    changes."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.tables = tuple(_Table(text) for text in dict.fromkeys(texts))
        self.firsts = frozenset(text[0] for text in texts)


class StopFinder:
    """Finds the first of `stops` in one text. Without stop strings it holds nothing back."""

    def __init__(self, stops: Stops) -> None:
        self._stops = stops
        self._matched = [0] * len(stops.tables)  # how many characters of each stop string the text ends with
        self._held = ""
        self._over = False

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that is final after `text`, and the stop string that was met, if any: the last push then.

        Raises `WrongStage` after that, and after `flush`.
        """
        if self._over:
            raise WrongStage("push() after a stop string was met or the text was flushed; nothing may follow")
        if not self._held and self._stops.firsts.isdisjoint(text):
            return text, None  # nothing matches, before or after
        whole = self._held + text
        for end in range(len(self._held), len(whole)):
            if met := self._advance(whole[end]):
                self._held, self._over = "", True
                return whole[: end + 1 - len(met)], met
        keep = max(self._matched)
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep], None

    def _advance(self, char: str) -> str:
        """The longest stop string that is complete at this character, or "". Not to be called after one was met."""
        met = ""
        for number, table in enumerate(self._stops.tables):
            self._matched[number] = table.longer(self._matched[number], char)
            if self._matched[number] == len(table.text) > len(met):
                met = table.text
        return met

    def flush(self) -> str:
        """What was held back, when no text follows."""
        self._over = True
        held, self._held = self._held, ""
        return held

    def check(self) -> None:
        """Assert what is always true."""
        if not self._over:
            assert len(self._held) == max(self._matched, default=0)
            found = zip(self._stops.tables, self._matched, strict=True)
            assert all(self._held.endswith(table.text[:matched]) for table, matched in found)


class _Table:
    """The failure table of a stop string (Knuth, Morris and Pratt)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._shorter = array("I", (0,))  # [n]: its longest shorter prefix that its first n + 1 characters end with
        for char in text[1:]:
            self._shorter.append(self.longer(self._shorter[-1], char))

    def longer(self, matched: int, char: str) -> int:
        """How many characters match after `char`, where `matched` did before it."""
        while matched and self.text[matched] != char:
            matched = self._shorter[matched - 1]
        return matched + 1 if self.text[matched] == char else 0


class DecoderKind(Enum):
    """How the text of a sequence of tokens depends on them, by the steps of the tokenizer's decoder."""

    BYTES = "every token is some bytes; the text is all of them, decoded as UTF-8"
    LOCAL = "the text of a token depends on at most the token before it, except for runs of byte tokens"
    WHOLE = "a later token may change any of it"


def decoder_kind(steps: Sequence[Mapping[str, Any]]) -> DecoderKind:
    """The kind of a decoder with these steps. After `Fuse`, steps apply to one text of all tokens."""
    if [step["type"] for step in steps if step["type"] != "Fuse"] == ["ByteLevel"]:
        return DecoderKind.BYTES
    fused = False
    for step in steps:
        kind = step["type"]
        if kind == "Fuse":
            fused = True
        elif not (_local_in_text(step) if fused else kind in _LOCAL):
            return DecoderKind.WHOLE
    return DecoderKind.LOCAL


_LOCAL = frozenset({"ByteFallback", "Metaspace", "WordPiece", "BPEDecoder", "Replace", "Strip"})


def _local_in_text(step: Mapping[str, Any]) -> bool:
    """Does this step change each part of a text as it would change that part alone?

    Replacing single characters does; stripping one character from the beginning does after the first text.
    """
    if step["type"] == "Replace":
        return len(step["pattern"].get("String", "")) == 1
    return step["type"] == "Strip" and step["start"] <= 1 and step["stop"] == 0


class ReadOutput(Output):
    """An `Output` whose text is the content."""

    def __init__(self, tokenizer: TextTokenizer, stops: Stops, after: Sequence[int], machine: Machine) -> None:
        super().__init__(None, stops)
        self._read = open_stream(tokenizer, skip_special=False, after=after)
        self._tokenizer, self._machine, self._texts = tokenizer, machine, stops
        self._pieces: list[Piece] = []
        self._reasoning = 0  # tokens of it that were not told

    @property
    def over(self) -> bool:
        return self.met is not None or self._machine.over

    def told(self) -> tuple[tuple[Piece, ...] | None, int]:
        pieces, count = tuple(joined(self._pieces)), self._reasoning
        self._pieces, self._reasoning = [], 0
        return pieces, count

    def push(self, token: int, *, may_stop: bool) -> str:
        reasoned = self._machine.reasons
        text = self._read.push(token)
        mark = self._tokenizer.control.get(token, "") if token in self._tokenizer.special_ids else ""
        if mark and text.endswith(mark):
            pieces = [*self._machine.push(text[: -len(mark)]), *self._machine.push(mark, special=True)]
        else:
            pieces = self._machine.push(text)
        self._reasoning += reasoned or self._machine.reasons
        return self._shown(pieces, may_stop=may_stop)

    def flush(self) -> str:
        if self.met is not None:
            return ""
        pieces = [*self._last(self._read.flush()), *self._machine.end()]
        text = self._shown(pieces, may_stop=True)
        return text if self.met is not None else text + self._withheld()

    def _last(self, text: str) -> list[Piece]:
        """The pieces of the text that a stream held back."""
        if not isinstance(self._read, WholeStream):
            return self._machine.push(text)
        control = Marks(self._tokenizer.control[token] for token in self._tokenizer.special_ids)
        pieces: list[Piece] = []
        while text:
            settled, end, mark = control.find(text, ended=True)
            pieces += self._machine.push(text[:settled])
            pieces += self._machine.push(mark, special=True)
            text = text[end:]
        return pieces

    def _shown(self, pieces: Sequence[Piece], *, may_stop: bool) -> str:
        """Add pieces up to a stop string; returns the content in them."""
        shown: list[str] = []
        for piece in pieces:
            if self.met is not None:
                break
            if not isinstance(piece, Content):
                shown.append(self._withheld())
                self._pieces.append(piece)
                continue
            text = piece.text
            if may_stop:
                text, self.met = self._stops.push(text)
            shown.append(text)
            if text:
                self._pieces.append(piece if text == piece.text else Content(text))
        return "".join(shown)

    def _withheld(self) -> str:
        """The content that may have been a stop string: it ends here."""
        text, self._stops = self._stops.flush(), StopFinder(self._texts)
        self._pieces += [Content(text)] if text else []
        return text
