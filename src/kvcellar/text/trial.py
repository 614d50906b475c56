"""trial: a tokenizer is tried before it is used, because the files of a model are not trusted.

What it may do to the memory is read off its parts; those of the file before it is built, since building normalizes the
added tokens. How long its regular expressions take cannot be read off: they are tried on runs of characters, those
included that its own expressions name, since an expression that backtracks does so on runs. One that is slow only on
other texts passes; such a text is given up when a request has it (`TextTokenizer`).
"""

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from kvcellar.errors import BadRequest, ModelRefused, NativePanic, Overloaded, TokenizerFailed, shown
from kvcellar.text.tokens import TextTokenizer, flattened, steps_of

PATIENCE = 5.0  # seconds for all texts together; tokenizers need a hundredth
MOST_GROWTH = 64  # bytes that normalizers may make of one, in all; Unicode's longest decomposition is 18 characters
MOST_WORD = 256  # characters of a word for WordPiece, whose time grows with their cube
_RUNS = ("a", "A", "1", " ", "\n", "\t", ".", "-", "'", "é", "你", "a ", "a1", ".\n", "'s", "1,")
_LENGTHS = (16, 64, 256, 1024)  # characters
_MOST_OWN = 64  # characters of its own expressions


def try_tokenizer(tokenizer: TextTokenizer, source: Tokenizer) -> None:
    """Raise `ModelRefused`, with the reason, if `source`, of which `tokenizer` was made, takes more time or memory for
    a text than a server can spare. Takes at most `PATIENCE` seconds."""
    if (reason := _too_large(source)) is not None:
        raise ModelRefused(f"its tokenizer is not used: {reason}")
    until = time.monotonic() + PATIENCE
    for text in _texts(_expressions(source)):
        try:
            tokenizer.encode(text, patience=max(0.0, until - time.monotonic()))
        except (BadRequest, Overloaded):
            raise ModelRefused(
                f"its tokenizer is not used: it takes more than {PATIENCE:g} seconds for short texts, such as "
                f"{len(text)} characters of {shown(text[:8])}. A regular expression in tokenizer.json backtracks"
            ) from None
        except NativePanic as error:
            raise ModelRefused(f"its tokenizer is not used: it fails on {shown(text)}: {error.__cause__}") from error
        except TokenizerFailed:
            pass  # it has no token for such a text


def _texts(expressions: Iterable[str]) -> Iterator[str]:
    """Short ones first. Each ends with a character that nothing names, so that a run has to be given back."""
    own = list(dict.fromkeys(char for written in expressions for char in written))[:_MOST_OWN]
    runs = dict.fromkeys((*_RUNS, *own))
    for length in _LENGTHS:
        for run in runs:
            yield (run * length)[:length] + "\u2603"


def _expressions(source: Tokenizer) -> Iterator[str]:
    for step in (*steps_of(source.normalizer, "normalizers"), *steps_of(source.pre_tokenizer, "pretokenizers")):
        pattern = step.get("pattern")
        if isinstance(pattern, Mapping) and "Regex" in pattern:
            yield pattern["Regex"]


def check_tokenizer_file(file: Path) -> None:
    """Raise `ModelRefused` for a `tokenizer.json` that would take too much memory when it is read into a tokenizer.
    What is not in its format is left to `tokenizers` to refuse."""
    try:
        described = json.loads(file.read_bytes())["normalizer"]
        growth = 1 if described is None else prod(map(_growth, flattened(described, "normalizers")))
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return
    if growth > MOST_GROWTH:
        raise ModelRefused(f"{file.name} is not used: {_grows('its normalizers', growth)}")


def _too_large(source: Tokenizer) -> str | None:
    """The reason for which it could take more memory or time than texts are measured by."""
    growth = prod(map(_growth, steps_of(source.normalizer, "normalizers")))
    if growth > MOST_GROWTH:
        return _grows("its normalizers", growth)
    replacing = [step for step in steps_of(source.decoder, "decoders") if step["type"] == "Replace"]
    if any("Regex" in step["pattern"] for step in replacing):
        return "its decoder has a regular expression"
    if (growth := prod(map(_growth, replacing))) > MOST_GROWTH:
        return _grows("its decoder", growth)
    word = getattr(source.model, "max_input_chars_per_word", 0)  # of WordPiece
    return f"it takes words of {word} characters as one; {MOST_WORD} are allowed" if word > MOST_WORD else None


def _grows(what: str, growth: int) -> str:
    return f"{what} can make {growth} bytes of one; {MOST_GROWTH} are allowed"


def _growth(step: Mapping[str, Any]) -> int:
    """The most bytes that one byte can become. Composition and decomposition are bounded by Unicode: they count as 1.
    An expression may match nothing, in front of each character."""
    if step["type"] == "Prepend":
        return max(1, len(step["prepend"].encode()))
    if step["type"] != "Replace":
        return 1
    pattern, content = step["pattern"].get("String"), len(step["content"].encode())
    return 1 + content if not pattern else max(1, -(-content // len(pattern.encode())))
