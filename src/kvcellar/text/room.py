"""room: how much text may be tokenized at once, and the fewest tokens that a text can have.

tokenizers takes up to 425 bytes of memory for each byte of a text (measured with texts of one-byte words; less where
words are longer). It gives up the interpreter only for batches, and cannot be stopped. Nor can a text be cut so that
its parts have the tokens of the whole, whatever the tokenizer: a word may be as long as the text, and what ends a word
may depend on what follows. So two things are known before a text is tokenized:

* one that must have more tokens than fit, by its length alone, is not tokenized at all (`Reach.least`);
* long texts are tokenized one at a time, up to a limit in bytes; short ones beside them, `SHORTS` at a time (`Desk`).

Always true:
  * all texts that are being tokenized take at most `Desk.bytes` of memory.
"""

import json
import threading
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer, models

from kvcellar.errors import BadRequest

BYTES_PER_BYTE = 448  # of memory, for a byte of text while it is tokenized
SHORT = 16 * 2**10  # bytes of text
SHORTS = 4  # short texts at the same time
COMPOSED = 4  # the most characters that Unicode's composition (NFC, NFKC) makes one of, as in U+1F82


class Desk:
    """Where texts are tokenized. Safe to use from several threads, which wait for each other here."""

    def __init__(self, most: int) -> None:
        """`most`: bytes of the longest text, in UTF-8."""
        self.most, self.bytes = most, bytes_for(most)
        self._long, self._short = threading.Lock(), threading.BoundedSemaphore(SHORTS)

    @contextmanager
    def room(self, size: int, param: str) -> Generator[None]:
        """For one text of `size` bytes. Raises `BadRequest`, naming `param`, if there is never so much."""
        if size > self.most:
            raise BadRequest(
                f"{param} has {size} bytes of text; at most {self.most} are tokenized at once. Send less, or token ids",
                param,
                hint="Or raise text_bytes.",
            )
        with self._short if size <= SHORT else self._long:
            yield


def bytes_for(most: int) -> int:
    """Memory for a desk that takes texts of `most` bytes."""
    return BYTES_PER_BYTE * (most + SHORTS * SHORT)


def longest_text(memory: int) -> int:
    """Bytes of the longest text that a desk with so many bytes of memory takes."""
    return memory // BYTES_PER_BYTE - SHORTS * SHORT


@dataclass(frozen=True, slots=True)
class Reach:
    """The most characters of a text that one token can stand for; None where there is no such number.

    There is one if no part of the tokenizer can make any number of characters vanish: it is a BPE that has tokens for
    every single character (its bytes, or an unknown token each), and what stands before it only adds, replaces or
    composes characters. A token then stands for at most as many characters as the longest of the vocabulary is written
    with (for byte-level vocabularies: bytes), times as many as normalizers may make one of.
    """

    characters: int | None

    def least(self, length: int) -> int:
        """No text of `length` characters has fewer tokens."""
        return 0 if self.characters is None else -(-length // self.characters)


def reach_of(tokenizer: Tokenizer) -> Reach:
    """The reach of `tokenizer`, read off its parts. A part that is not known here has none."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    splitters = _steps(tokenizer.pre_tokenizer, "pretokenizers")
    normalizers = _steps(tokenizer.normalizer, "normalizers")
    strips = any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values())
    by_bytes = any(step["type"] == "ByteLevel" for step in (*splitters, *normalizers))
    if strips or not vocabulary or not _keeps_unknown(tokenizer.model, vocabulary, by_bytes=by_bytes):
        return Reach(None)
    shrinks = [*map(_shrink_of_normalizer, normalizers), *map(_shrink_of_splitter, splitters)]
    reach = max(map(len, vocabulary))
    for shrink in shrinks:
        if shrink is None:
            return Reach(None)
        reach *= shrink
    return Reach(reach)


def _steps(part: Any, inner: str) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, flattened. One that was written in Python has no state to read."""
    if part is None:
        return []
    waiting: list[dict[str, Any]] = [json.loads(part.__getstate__())]
    steps: list[dict[str, Any]] = []
    while waiting:
        step = waiting.pop(0)
        if step["type"] == "Sequence":
            waiting = [*step[inner], *waiting]
        else:
            steps.append(step)
    return steps


def _keeps_unknown(model: object, vocabulary: Mapping[str, int], *, by_bytes: bool) -> bool:
    """Does each character that the vocabulary has not give a token of its own at least?"""
    if not isinstance(model, models.BPE):
        return (
            False  # WordPiece and WordLevel have one token for an unknown word, Unigram for a run of unknown characters
        )
    if by_bytes:
        return _all_in(BYTE_ALPHABET, vocabulary)
    fallback = model.byte_fallback and _all_in((f"<0x{byte:02X}>" for byte in range(256)), vocabulary)
    return fallback or (model.unk_token in vocabulary and not model.fuse_unk)


def _all_in(written: Iterable[str], vocabulary: Mapping[str, int]) -> bool:
    return all(text in vocabulary for text in written)


def _shrink_of_normalizer(step: Mapping[str, Any]) -> int | None:
    """How many characters may become one; None: any number."""
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
    """How byte-level vocabularies write bytes: printable Latin-1 as itself, the rest from U+0100 on."""
    printable = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(b): b for b in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTE_ALPHABET: Mapping[str, int] = _byte_alphabet()
