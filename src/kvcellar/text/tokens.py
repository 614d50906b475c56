"""tokens: text to ids and ids to text, by the model's tokenizer, within limits on memory.

A tokenizer is used as it is, with two exceptions: it neither truncates nor pads (a `tokenizer.json` may ask for either,
and a truncated prompt would give a wrong completion), and parts of a text can be marked as plain text, so that
`<|im_end|>` written by a user is encoded as ten characters rather than as the end of the user's message.

tokenizers takes up to 425 bytes of memory for each byte of a text (measured with words of one byte; less where words
are longer). It releases the interpreter lock only for batches, and cannot be interrupted; how long a text takes depends
on the regular expressions of the model's files, which can backtrack. A text cannot be cut so that its parts have the
tokens of the whole, whatever the tokenizer: a word may be as long as the text, and where it ends may depend on what
follows. So a text is checked before it is tokenized:

* one that must have more tokens than the limit, by its length alone, is not tokenized at all (`length_bound`);
* long texts are tokenized one at a time, up to a limit in bytes; short ones beside them, `SHORTS` at a time
  (`TokenizingLimit`); every text on a thread of its own, without the interpreter lock;
* a text that takes longer than its limit in seconds is given up: its request fails, and its thread ends by itself.

Always true:
  * all texts that are being tokenized, those that were given up included, take at most `TokenizingLimit.bytes` of
    memory, on at most `SHORTS` + 1 threads.
"""

import json
import re
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any, Generic, TypeVar, cast

from tokenizers import Encoding, Tokenizer, models

from kvcellar.errors import BadRequest, NativePanic, Overloaded, PromptTooLong, TextTooSlow, TokenizerFailed, panics_of


@dataclass(frozen=True, slots=True)
class TextAssets:
    """Those of one model. `tokenizer` has passed its trial (`trial`). `chat_template` is None where it has none."""

    tokenizer: Tokenizer
    special: Mapping[str, str]  # "bos_token" -> its text, and so on
    chat_template: str | None
    response_template: Any = None  # how the checkpoint says that answers are read, in transformers' format


TOKENIZER = "the tokenizer"
RELEASE_ABOVE = 4096  # ids; fewer are decoded within milliseconds, without releasing the interpreter lock
MOST_BYTES = 2**31  # of one text, where there is no other limit
BYTES_PER_BYTE = 448  # of memory, for a byte of text while it is tokenized
SHORT = 16 * 2**10  # bytes of text
SHORTS = 4  # short texts at the same time
PATIENCE = 10.0  # seconds that any text may take
LEAST_SPEED = 50_000  # bytes of text in each further second; tokenizers do 20 times as much
KNOWN_BYTES = 2**14  # tokens whose bytes are kept
COMPOSED = 4  # the most characters that Unicode's composition (NFC, NFKC) merges into one, as in U+1F82


class TextTokenizer:
    """The tokenizer of a model. Takes ownership of `tokenizer`. Safe to use from several threads.

    `end_ids` end a completion, `special_tokens` are the tokens that chat templates name (`bos_token`, ...), and
    with `add_special`, `encode` adds begin- and end-of-text as the tokenizer does. Texts of more than `most_bytes` in
    UTF-8 are refused.
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
        self._ordinary = Tokenizer(tokenizer.model)  # the same model, without added tokens and post-processing
        if tokenizer.normalizer is not None:
            self._ordinary.normalizer = tokenizer.normalizer
        if tokenizer.pre_tokenizer is not None:
            self._ordinary.pre_tokenizer = tokenizer.pre_tokenizer
        self._add_special = add_special
        self.end_ids = frozenset(end_ids)
        self.special_tokens: Mapping[str, str] = MappingProxyType(dict(special_tokens or {}))
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token for token, about in added.items() if about.special)
        self.control = MappingProxyType(  # tokens that control the model: id -> text
            {token: about.content for token, about in added.items() if about.special or token in self.end_ids}
        )
        self.added = MappingProxyType({about.content: token for token, about in added.items()})  # text -> id
        self.vocab_size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self.decoder_steps = steps_of(tokenizer.decoder, "decoders")
        self._by_bytes = [step["type"] for step in self.decoder_steps if step["type"] != "Fuse"] == ["ByteLevel"]
        self._byte_fallback = any(step["type"] == "ByteFallback" for step in self.decoder_steps)
        self._known_bytes: dict[int, bytes] = {}  # of up to `KNOWN_BYTES` tokens
        self.longest = length_bound(tokenizer)
        self.limit = TokenizingLimit(most_bytes)

    def encode(
        self,
        text: str,
        *,
        special: bool | None = None,
        param: str = "prompt",
        limit: int | None = None,
    ) -> list[int]:
        """The ids of `text`. `special`: add begin- and end-of-text (None: `add_special`).

        Raises `PromptTooLong` for more than `limit` tokens (None: any number), without tokenizing where the length of
        the text implies that; `BadRequest`, naming `param`, for text that is not Unicode, or too long to tokenize, and
        its subclass `TextTooSlow` for text that takes longer than `PATIENCE` seconds and one for each `LEAST_SPEED`
        bytes; `Overloaded` while the texts that were given up take all threads; `TokenizerFailed`.
        """
        add = self._add_special if special is None else special
        with self._encoding(text, param, limit, special=add, offsets=False) as encoding:
            return encoding.ids

    def encode_marked(self, text: str, marks: Sequence[int], *, limit: int | None = None) -> list[int]:
        """The ids of `text`, in which control tokens that contain a mark are encoded as plain text.

        `marks` are positions between characters, ascending; one directly after a control token of one character counts
        as inside. Without marks these are the tokenizer's ids of `text`, with nothing added. With marks, the ids of
        marked control tokens are replaced afterwards, so the text around them is encoded as without marks.
        """
        with self._encoding(text, "messages", limit, special=False, offsets=bool(marks)) as encoding:
            return self._with_plain(text, marks, encoding) if marks else encoding.ids

    def check_length(self, text: str, limit: int | None) -> None:
        """Raise `PromptTooLong` if the length of a text implies that it has more than `limit` tokens."""
        least = 0 if self.longest is None else -(-len(text) // self.longest)
        if limit is not None and least > limit:
            raise PromptTooLong(least, limit, "the model's context", at_least=True)

    def _with_plain(self, text: str, marks: Sequence[int], encoding: Encoding) -> list[int]:
        """Its ids, with the control tokens that contain a mark as plain text."""
        read, ids, copied = encoding.ids, list[int](), 0
        spelled: dict[str, list[int]] = {}
        for index in [index for index, token in enumerate(read) if token in self.control]:
            start, end = cast("tuple[int, int]", encoding.token_to_chars(index))
            nearest = bisect_right(marks, start)  # the first mark after the token's start
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
        """The tokenizer's encoding of `text`, whose memory counts as taken within the block.

        The interpreter lock is released only for batches, so a text is encoded as one.
        """
        self.check_length(text, limit)
        size = check_unicode(text, param)

        def encoded() -> Encoding:
            batch = self._tokenizer.encode_batch if offsets else self._tokenizer.encode_batch_fast
            return batch([text], add_special_tokens=special)[0]

        with self.limit.result(size, param, encoded) as found:
            if limit is not None and len(found) > limit:
                raise PromptTooLong(len(found), limit, "the model's context")
            yield found

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of `ids`; ids without a token are skipped. Raises `BadRequest` for what cannot be an id."""
        for token in ids:
            if not 0 <= token < 2**32:
                raise BadRequest(f"{token} is not a token id; they are 0 to {self.vocab_size - 1}", "ids")
        with panics_of(TOKENIZER):
            if len(ids) <= RELEASE_ABOVE:
                return self._tokenizer.decode(ids, skip_special_tokens=skip_special)
            return self._tokenizer.decode_batch([ids], skip_special_tokens=skip_special)[0]

    def written(self, token: int) -> str | None:
        """The entry of the vocabulary, which is not decoded; None if there is no such token."""
        return self._tokenizer.id_to_token(token)

    def byte_of(self, token: int) -> int | None:
        """The byte of a token of byte fallback, like `<0xE2>`; None for other tokens."""
        written = self.written(token) if self._byte_fallback else None
        found = _BYTE_TOKEN.fullmatch(written) if written else None
        return int(found[1], 16) if found else None

    def token_bytes(self, token: int) -> bytes:
        """The bytes that this token adds to a text that it does not begin. They may be a part of a character."""
        if (known := self._known_bytes.get(token)) is None:
            if len(self._known_bytes) >= KNOWN_BYTES:
                self._known_bytes.clear()
            known = self._known_bytes[token] = self._found_bytes(token)
        return known

    def _found_bytes(self, token: int) -> bytes:
        written = self.written(token)
        if written is None:
            return b""
        if self._by_bytes:
            return _byte_level(written)
        if (byte := self.byte_of(token)) is not None:
            return bytes((byte,))
        once = self.decode((token,), skip_special=False)
        return self.decode((token, token), skip_special=False)[len(once) :].encode()

    def _spelled(self, text: str) -> list[int]:
        """The ids of a control token's text as ordinary text inside a text."""
        ids = self._plain("\n" + text)  # after a newline: some tokenizers add a space before a text
        newline = self._plain("\n")
        ids = ids[len(newline) :] if ids[: len(newline)] == newline else self._plain(text)
        if self.control.keys().isdisjoint(ids):
            return ids
        return [token for char in text for token in self._plain(char)]  # it is a word of the vocabulary, too

    @panics_of(TOKENIZER)
    def _plain(self, text: str) -> list[int]:
        """The ids of ordinary text: without added tokens and post-processing."""

        def encoded() -> list[int]:
            return self._ordinary.encode_batch_fast([text], add_special_tokens=False)[0].ids

        with self.limit.result(len(text.encode()), "messages", encoded) as ids:
            return ids


T = TypeVar("T")


def check_unicode(text: str, param: str) -> int:
    """The number of bytes of `text` in UTF-8. Raises `BadRequest`, naming `param`, for half of a surrogate pair."""
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise BadRequest(
            f"{param} is not Unicode text: half of a surrogate pair at character {error.start}", param
        ) from None


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level(written: str) -> bytes:
    """The bytes of a byte-level token. One with a character outside the alphabet is an added token: plain text."""
    try:
        return bytes([BYTE_ALPHABET[char] for char in written])
    except KeyError:
        return written.encode()


class _Job(Generic[T]):
    """One text. Calls `release` when both its thread and the caller are done with it."""

    def __init__(self, work: Callable[[], T], release: Callable[[], None]) -> None:
        self._work, self._release = work, release
        self._lock, self._holders, self.ended = threading.Lock(), 2, threading.Event()
        self._found: list[T] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._found.append(self._work())
        except BaseException as error:  # noqa: BLE001 - raised again in the caller
            self._error = error
        self.ended.set()
        self.leave()

    def result(self) -> T:
        """Raises `NativePanic` and `TokenizerFailed`."""
        if self._error is None:
            return self._found[0]
        try:
            with panics_of(TOKENIZER):
                raise self._error
        except NativePanic:
            raise
        except BaseException as error:  # its own text may quote a prompt
            raise TokenizerFailed(f"the tokenizer of the model failed with {type(error).__name__}") from error

    def leave(self) -> None:
        with self._lock:
            self._holders -= 1
            last = self._holders == 0
        if last:
            self._found.clear()
            self._release()


class _Lane:
    """Threads for `width` texts at a time. Those that were given up, and whose threads have not ended, are `stuck`.

    Always true: a job that entered has a thread of its own, at once.
    """

    def __init__(self, width: int) -> None:
        self._width, self._taken, self._stuck = width, 0, 0
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        weakref.finalize(self, self._end, self._jobs, width)

    def enter(self, seconds: float) -> bool:
        """Whether there was room within so many seconds. At once False while all room is taken by what is stuck."""
        with self._changed:
            self._changed.wait_for(lambda: self._taken < self._width or self._stuck == self._width, seconds)
            if self._taken == self._width:
                return False
            if self._taken == len(self._threads):
                made = threading.Thread(target=self._work, args=(self._jobs,), name="kvcellar-tokenize", daemon=True)
                made.start()
                self._threads.append(made)
            self._taken += 1
            return True

    def rest(self) -> None:
        """End the threads, and wait for that, unless they are at work. The next text starts others."""
        with self._changed:
            if self._taken:
                return
            ended, self._threads = self._threads, []
            self._end(self._jobs, len(ended))
            for thread in ended:
                thread.join()

    def push(self, run: Callable[[], None]) -> None:
        self._jobs.put(run)

    def give_up(self) -> None:
        with self._changed:
            self._stuck += 1
            self._changed.notify_all()

    def leave(self, *, stuck: bool) -> None:
        with self._changed:
            self._taken -= 1
            self._stuck -= stuck
            self._changed.notify_all()

    @staticmethod
    def _work(jobs: "SimpleQueue[Callable[[], None] | None]") -> None:
        while (run := jobs.get()) is not None:
            run()
            del run  # its text is not kept until the next one comes

    @staticmethod
    def _end(jobs: "SimpleQueue[Callable[[], None] | None]", width: int) -> None:
        for _ in range(width):
            jobs.put(None)


class TokenizingLimit:
    """Bounds the memory and the threads of texts that are being tokenized, by making them wait for each other."""

    def __init__(self, most: int) -> None:
        """`most`: bytes of the longest text, in UTF-8."""
        self.most, self.bytes = most, bytes_for(most)
        self._long, self._short = _Lane(1), _Lane(SHORTS)

    def rest(self) -> None:
        """End the threads, unless they are at work."""
        self._long.rest()
        self._short.rest()

    @contextmanager
    def result(self, size: int, param: str, work: Callable[[], T], patience: float = PATIENCE) -> Generator[T]:
        """The result of `work`, which tokenizes a text of `size` bytes on a thread of its own; its memory is taken
        until the block ends. Raises what `TextTokenizer.encode` raises, with `param` as the field."""
        if size > self.most:
            raise BadRequest(
                f"{param} has {size} bytes of text; at most {self.most} are tokenized at once. Send less, or token ids",
                param,
                hint="Or raise text_bytes.",
            )
        lane, seconds = self._short if size <= SHORT else self._long, patience + size / LEAST_SPEED
        if not lane.enter(seconds):
            raise Overloaded("the tokenizer of the model is busy with texts that take very long; try again later")
        given_up = False
        job = _Job(work, lambda: lane.leave(stuck=given_up))
        lane.push(job.run)
        try:
            if not job.ended.wait(seconds):
                given_up = True
                lane.give_up()
                raise TextTooSlow(param, size, seconds)
            yield job.result()
        finally:
            job.leave()


def bytes_for(most: int) -> int:
    """Bytes of memory for tokenizing texts of up to `most` bytes."""
    return BYTES_PER_BYTE * (most + SHORTS * SHORT)


def longest_text(memory: int) -> int:
    """Bytes of the longest text that can be tokenized in so many bytes of memory."""
    return memory // BYTES_PER_BYTE - SHORTS * SHORT


def length_bound(tokenizer: Tokenizer) -> int | None:
    """The most characters of a text that one token can stand for; None where that is not bounded.

    It is bounded if no part of the tokenizer can remove any number of characters: it is a BPE that has tokens for every
    single character (its bytes, or an unknown token each), and the parts before it only add, replace or compose
    characters. A token then stands for at most as many characters as the longest entry of the vocabulary has (for
    byte-level vocabularies: bytes), times as many as normalizers may merge into one. Unknown parts are not bounded.
    """
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    splitters = steps_of(tokenizer.pre_tokenizer, "pretokenizers")
    normalizers = steps_of(tokenizer.normalizer, "normalizers")
    strips = any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values())
    by_bytes = any(step["type"] == "ByteLevel" for step in (*splitters, *normalizers))
    if strips or not vocabulary or not _keeps_unknown(tokenizer.model, vocabulary, by_bytes=by_bytes):
        return None
    shrinks = [*map(_shrink_of_normalizer, normalizers), *map(_shrink_of_splitter, splitters)]
    reach = max(map(len, vocabulary))
    for shrink in shrinks:
        if shrink is None:
            return None
        reach *= shrink
    return reach


def steps_of(part: Any, inner: str) -> list[dict[str, Any]]:
    """The steps of a part of a tokenizer, flattened. One written in Python has no state to read, and raises."""
    return [] if part is None else flattened(json.loads(part.__getstate__()), inner)


def flattened(described: dict[str, Any], inner: str) -> list[dict[str, Any]]:
    """The same of a part as `tokenizer.json` describes it."""
    waiting, steps = [described], list[dict[str, Any]]()
    while waiting:
        step = waiting.pop(0)
        if step["type"] == "Sequence":
            waiting = [*step[inner], *waiting]
        else:
            steps.append(step)
    return steps


def _keeps_unknown(model: object, vocabulary: Mapping[str, int], *, by_bytes: bool) -> bool:
    """Does each character that is not in the vocabulary become at least one token?"""
    if not isinstance(model, models.BPE):
        return False  # WordPiece and WordLevel: one token for an unknown word; Unigram: for a run of characters
    if by_bytes:
        return _all_in(BYTE_ALPHABET, vocabulary)
    fallback = model.byte_fallback and _all_in((f"<0x{byte:02X}>" for byte in range(256)), vocabulary)
    return fallback or (model.unk_token in vocabulary and not model.fuse_unk)


def _all_in(written: Iterable[str], vocabulary: Mapping[str, int]) -> bool:
    return all(text in vocabulary for text in written)


def _shrink_of_normalizer(step: Mapping[str, Any]) -> int | None:
    """How many characters may be merged into one; None: any number."""
    match step["type"]:
        case "ByteLevel" | "Prepend" | "NFD" | "NFKD" | "Lowercase":
            return 1
        case "NFC" | "NFKC":
            return COMPOSED
        case "Replace":
            pattern, content = step["pattern"].get("String"), step["content"]
            return -(-len(pattern) // len(content)) if pattern and content else None
        case _:
            return None


def _shrink_of_splitter(step: Mapping[str, Any]) -> int | None:
    match step["type"]:
        case "ByteLevel" | "Metaspace" | "Digits" | "UnicodeScripts" | "FixedLength":
            return 1
        case "Split" | "Punctuation":
            return 1 if step["behavior"] != "Removed" else None
        case _:
            return None


def _byte_alphabet() -> dict[str, int]:
    """The character of each byte in byte-level vocabularies: printable Latin-1 itself, others from U+0100 on."""
    printable = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(b): b for b in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTE_ALPHABET: Mapping[str, int] = _byte_alphabet()
