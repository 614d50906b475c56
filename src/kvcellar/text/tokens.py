"""tokens: text to ids and ids to text, by a tokenizer that somebody else loaded.

A tokenizer is used as it is, with two exceptions: it neither truncates nor pads (a `tokenizer.json` may ask for either,
and a prompt cut in silence is a wrong answer), and it can be told that some of the text is *only* text, so that
`<|im_end|>` written by a user is eleven characters rather than the end of the user's turn.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from types import MappingProxyType
from typing import Any, cast

from tokenizers import Encoding, Tokenizer

from kvcellar.errors import BadRequest, PromptTooLong
from kvcellar.text.room import BYTE_ALPHABET, Desk, reach_of

ONE_GO = 4096  # bytes of text that are tokenized without giving the interpreter up: that takes some milliseconds
MOST_BYTES = 2**31  # of one text, where there is no other limit


class Manner(Enum):
    """How the text of a sequence follows from its tokens; read off the tokenizer's decoder."""

    BYTES = "every token is some bytes; the text is all of them, read as UTF-8"
    PIECES = "what a token adds depends on the token before it at most, except for runs of byte tokens"
    WHOLE = "a later token may change any of it"


class Words:
    """A tokenizer with what a model says about it. Takes ownership of `tokenizer`. Safe to use from several threads.

    `end_ids` end an answer, `special_tokens` are the names by which templates know some tokens (`bos_token`, ...), and
    `add_special` says whether `encode` puts begin- and end-of-text around a prompt, as far as the tokenizer does. Texts
    of more than `most_bytes` in UTF-8 are refused.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        end_ids: Iterable[int] = (),
        special_tokens: Mapping[str, str] | None = None,
        add_special: bool = True,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._add_special = add_special
        self.end_ids = frozenset(end_ids)
        self.special_tokens: Mapping[str, str] = MappingProxyType(dict(special_tokens or {}))
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token for token, about in added.items() if about.special)
        self.control = MappingProxyType(  # what steers the model: id -> how it is written
            {token: about.content for token, about in added.items() if about.special or token in self.end_ids}
        )
        self.vocab_size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        kinds = _decoder_kinds(tokenizer)
        self.manner = _manner(kinds)
        self._byte_fallback = any(kind["type"] == "ByteFallback" for kind in kinds)
        self.reach = reach_of(tokenizer)
        self.desk = Desk(most_bytes)

    def encode(
        self, text: str, *, special: bool | None = None, param: str = "prompt", limit: int | None = None
    ) -> list[int]:
        """The ids of `text`. `special`: add begin- and end-of-text (None: as this model wants it).

        Raises `PromptTooLong` for more than `limit` tokens (None: any number), before anything is done where the length
        of the text tells; and `BadRequest`, naming `param`, for text that is not Unicode, or too long to be tokenized.
        """
        add = self._add_special if special is None else special
        with self._encoding(text, param, limit, special=add, offsets=False) as encoding:
            return encoding.ids

    def encode_marked(self, text: str, marks: Sequence[int], *, limit: int | None = None) -> list[int]:
        """The ids of `text`, in which control tokens that have a mark inside are spelled out as plain text.

        `marks` are places between characters, ascending; a mark directly behind a control token of one character counts
        as inside. Without marks this is exactly what the tokenizer makes of `text`, adding nothing. Where there are
        marks, the tokenizer still decides what a control token is; it is only overruled afterwards, so whatever stands
        around is encoded as ever.
        """
        with self._encoding(text, "messages", limit, special=False, offsets=bool(marks)) as encoding:
            return self._overruled(text, marks, encoding) if marks else encoding.ids

    def _overruled(self, text: str, marks: Sequence[int], encoding: Encoding) -> list[int]:
        """Its ids, with the control tokens that have a mark inside spelled out."""
        read, ids, copied = encoding.ids, list[int](), 0
        spelled: dict[str, list[int]] = {}
        for index in [index for index, token in enumerate(read) if token in self.control]:
            start, end = cast("tuple[int, int]", encoding.token_to_chars(index))
            nearest = bisect_right(marks, start)  # the first mark behind the token's start
            if nearest == len(marks) or marks[nearest] >= max(end, start + 2):
                continue
            written = text[start:end]
            if written not in spelled:
                spelled[written] = self._spelled(written)
            ids += read[copied:index]
            ids += spelled[written]
            copied = index + 1
        return ids + read[copied:]

    @contextmanager
    def _encoding(
        self, text: str, param: str, limit: int | None, *, special: bool, offsets: bool
    ) -> Generator[Encoding]:
        """What the tokenizer makes of `text`, for as long as there is room for it on the desk.

        Only batches are encoded without the interpreter, so a long text is one.
        """
        least = self.reach.least(len(text))
        if limit is not None and least > limit:
            raise PromptTooLong(least, limit, "the model's context", at_least=True)
        size = check_unicode(text, param)
        with self.desk.room(size, param):
            if size <= ONE_GO:
                found = self._tokenizer.encode(text, add_special_tokens=special)
            elif offsets:
                found = self._tokenizer.encode_batch([text], add_special_tokens=special)[0]
            else:
                found = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0]
            if limit is not None and len(found) > limit:
                raise PromptTooLong(len(found), limit, "the model's context")
            yield found

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of `ids`; ids without a token give nothing. Raises `BadRequest` for what cannot be an id."""
        for token in ids:
            if not 0 <= token < 2**32:
                raise BadRequest(f"{token} is not a token id; they are 0 to {self.vocab_size - 1}", "ids")
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special)

    def written(self, token: int) -> str | None:
        """How the vocabulary writes this token, which is not yet text; None if there is no such token."""
        return self._tokenizer.id_to_token(token)

    def byte_of(self, token: int) -> int | None:
        """The byte that this token stands for, if it is one of those that stand for a single byte."""
        written = self.written(token) if self._byte_fallback else None
        found = _BYTE_TOKEN.fullmatch(written) if written else None
        return int(found[1], 16) if found else None

    def token_bytes(self, token: int) -> bytes:
        """The bytes that this token adds to a text it does not begin. They may be a part of a character."""
        written = self.written(token)
        if written is None:
            return b""
        if self.manner is Manner.BYTES:
            return _byte_level(written)
        if (byte := self.byte_of(token)) is not None:
            return bytes((byte,))
        once = self.decode((token,), skip_special=False)
        return self.decode((token, token), skip_special=False)[len(once) :].encode()

    def _spelled(self, text: str) -> list[int]:
        """The ids of a control token's text if it were ordinary text in the middle of some."""
        ids = self._plain("\n" + text)  # behind a newline: some tokenizers put a space before what begins a text
        newline = self._plain("\n")
        ids = ids[len(newline) :] if ids[: len(newline)] == newline else self._plain(text)
        if self.control.keys().isdisjoint(ids):
            return ids
        return [token for char in text for token in self._plain(char)]  # the vocabulary has it as a word, too

    def _plain(self, text: str) -> list[int]:
        """What the tokenizer does to ordinary text, and nothing else that it does."""
        normalizer, splitter = self._tokenizer.normalizer, self._tokenizer.pre_tokenizer
        text = text if normalizer is None else normalizer.normalize_str(text)
        parts = [text] if splitter is None else [part for part, _ in splitter.pre_tokenize_str(text)]
        return [token.id for part in parts for token in self._tokenizer.model.tokenize(part)]


def check_unicode(text: str, param: str) -> int:
    """The bytes of `text` in UTF-8. Raises `BadRequest`, naming `param`, for half of a surrogate pair: it has none."""
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise BadRequest(
            f"{param} is not Unicode text: half of a surrogate pair at character {error.start}", param
        ) from None


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level(written: str) -> bytes:
    """The bytes of a byte-level token. One with a character outside the alphabet was added as it is."""
    try:
        return bytes([BYTE_ALPHABET[char] for char in written])
    except KeyError:
        return written.encode()


def _decoder_kinds(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The steps of the tokenizer's decoder, flattened."""
    if tokenizer.decoder is None:
        return []
    waiting: list[dict[str, Any]] = [json.loads(tokenizer.decoder.__getstate__())]
    steps: list[dict[str, Any]] = []
    while waiting:
        step = waiting.pop(0)
        if step["type"] == "Sequence":
            waiting = [*step["decoders"], *waiting]
        else:
            steps.append(step)
    return steps


def _manner(steps: list[dict[str, Any]]) -> Manner:
    """What is known about a decoder of these steps. `Fuse` makes one text of all tokens: later steps see no borders."""
    if [step["type"] for step in steps if step["type"] != "Fuse"] == ["ByteLevel"]:
        return Manner.BYTES
    fused = False
    for step in steps:
        kind = step["type"]
        if kind == "Fuse":
            fused = True
        elif not (_local_in_text(step) if fused else kind in _LOCAL):
            return Manner.WHOLE
    return Manner.PIECES


_LOCAL = frozenset({"ByteFallback", "Metaspace", "WordPiece", "BPEDecoder", "Replace", "Strip"})


def _local_in_text(step: dict[str, Any]) -> bool:
    """Does this step, done to the whole text, do to each part of it what it would do to that part alone?

    One character replaced everywhere does; so does one stripped from the beginning, once something is there.
    """
    if step["type"] == "Replace":
        return len(step["pattern"].get("String", "")) == 1
    return step["type"] == "Strip" and step["start"] <= 1 and step["stop"] == 0
