"""trial: the process in which the tokenizer of a model is built and tried before another process builds it: `python -m
kvcellar.text.trial SOCKET`. See `worker`. No torch.

The files of a model are not trusted. Reading one into a tokenizer compiles its regular expressions and normalizes its
added tokens, in a library that recurses, allocates and cannot be stopped. So a file is built in this process first, and
nowhere else if that ends it.

What a tokenizer may do to the memory of texts is read off its parts. How long its regular expressions take cannot be
read off: they are tried on runs of characters, those included that its own expressions name, since an expression that
backtracks does so on runs. One that is slow only on other texts passes; such a text is given up when a request has it
(`TextTokenizer`).
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Raw, Struct
from tokenizers import Tokenizer, models

from kvcellar.errors import BadRequest, ModelRefused, NativePanic, Overloaded, TokenizerFailed, panics_of, shown
from kvcellar.text.tokens import MOST_BYTES, TOKENIZER, TokenizingLimit, flattened, steps_of
from kvcellar.wire import decode
from kvcellar.worker import JobEnded, Worker, serve

SECONDS = 30.0  # of CPU time in which a tokenizer is built and tried; one of 262,144 tokens needs two
MEMORY = 2**31  # bytes; one of 262,144 tokens needs an eighth
STACK = 2**21  # bytes: a quarter of what the threads have that build it afterwards
PATIENCE = 5.0  # seconds for all texts together; tokenizers need a hundredth
MOST_GROWTH = 64  # bytes that normalizers may make of one, in all; Unicode's longest decomposition is 18 characters
MOST_WORD = 256  # characters of a word for WordPiece, whose time grows with their cube
_RUNS = ("a", "A", "1", " ", "\n", "\t", ".", "-", "'", "é", "你", "a ", "a1", ".\n", "'s", "1,")
_LENGTHS = (16, 64, 256, 1024)  # characters
_MOST_OWN = 64  # characters of its own expressions


class Tried(Struct, frozen=True, array_like=True):
    """What is tried: a `tokenizer.json`, or what would be in one."""

    file: Path | None
    described: str = ""


class TokenizerTrial:
    """The trial of one model's tokenizer. For one thread."""

    def __init__(self, file: Path | None) -> None:
        """`file` is the model's `tokenizer.json`, if it has one. It is tried from now on, beside the caller."""
        self._worker = Worker("kvcellar.text.trial", lambda: None)
        self._beside = ThreadPoolExecutor(1, "kvcellar-trial")
        self._file: Future[None] | None = None
        if file is not None:
            self._file = self._beside.submit(self._run, Tried(file))

    def close(self) -> None:
        """End the process, and what it does."""
        self._worker.close()
        self._beside.shutdown()

    def check_file(self) -> None:
        """Wait until the file has been tried. Raises `ModelRefused`, with the reason, if building it ends the process
        or if it takes more time or memory for a text than a server can spare, and `TokenizerFailed` for one that is
        none."""
        if self._file is not None:
            self._file.result()

    def check(self, built: Tokenizer) -> None:
        """Raise `ModelRefused` as `check_file` does, for a tokenizer that was built of the file and of what other files
        say: its parts may be others. Without its vocabulary, which decides neither on time nor on memory."""
        if (reason := _too_large(built)) is not None:
            raise _refused(reason)
        bare = Tokenizer(models.BPE())
        bare.normalizer, bare.pre_tokenizer = built.normalizer, built.pre_tokenizer
        self._run(Tried(None, bare.to_str()))

    def _run(self, what: Tried) -> None:
        try:
            self._worker.run(what, SECONDS)
        except JobEnded as ended:
            if ended.late:
                raise _refused(f"it is not built and tried within {SECONDS:g} seconds") from None
            why = f"it ends the process that builds it, by its depth or by more than {MEMORY >> 30} GiB of memory"
            raise _refused(why) from None


def try_tokenizer(source: Tokenizer) -> None:
    """Raise `ModelRefused`, with the reason, if `source` takes more time or memory for a text than a server can spare.
    Takes at most `PATIENCE` seconds; then a thread may go on with a text until its process ends."""
    if (reason := _too_large(source)) is not None:
        raise _refused(reason)
    source.no_truncation()
    source.no_padding()
    limit, until = TokenizingLimit(MOST_BYTES), time.monotonic() + PATIENCE
    for text in _texts(_expressions(source)):
        work, left = partial(source.encode_batch_fast, [text]), max(0.0, until - time.monotonic())
        try:
            with limit.result(len(text.encode()), "prompt", work, left):
                pass
        except (BadRequest, Overloaded):
            raise _refused(
                f"it takes more than {PATIENCE:g} seconds for short texts, such as {len(text)} characters of "
                f"{shown(text[:8])}. A regular expression in tokenizer.json backtracks"
            ) from None
        except NativePanic as error:
            raise _refused(f"it fails on {shown(text)}: {error.__cause__}") from error
        except TokenizerFailed:
            pass  # it has no token for such a text


def _refused(reason: str) -> ModelRefused:
    return ModelRefused(f"its tokenizer is not used: {reason}")


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


# -- in the process ---------------------------------------------------------------------------------------------------


def opened(_: None) -> Callable[[Raw], None]:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads would take addresses for each core of the machine
    return _try


def _try(what: Raw) -> None:
    tried: Tried = decode(what, Tried)
    try:
        data = tried.described.encode() if tried.file is None else tried.file.read_bytes()
        if (growth := _growth_in(data)) > MOST_GROWTH:
            raise _refused(_grows("its normalizers", growth))
        with panics_of(TOKENIZER):
            source = Tokenizer.from_buffer(data)
    except (MemoryError, ModelRefused):
        raise
    except Exception as error:  # the library raises no other class
        raise TokenizerFailed(f"{type(error).__name__}: {error.__cause__ or error}") from error
    try_tokenizer(source)


class _Described(Struct):
    normalizer: Any


def _growth_in(data: bytes) -> int:
    """Of the normalizers of a `tokenizer.json`: building it normalizes its added tokens. 1 for what is none."""
    try:
        described = msgspec.json.decode(data, type=_Described).normalizer
        return 1 if described is None else prod(map(_growth, flattened(described, "normalizers")))
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return 1  # the library refuses it


if __name__ == "__main__":
    serve(None, opened, stack=STACK, memory=MEMORY)
