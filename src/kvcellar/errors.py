"""errors: the exceptions of kvcellar. Each message has the numbers and what to change.

A `BadRequest` has two readers. Its `message` is for the author of the request, in Python or over HTTP, where fields
have the same names. Its `hint` is for the operator of the engine: it may name settings and files; `str()` includes it,
but it is never sent to an HTTP client.

The attributes that a class adds are declared in it: between processes, these and the text are sent (`wire`).
"""

import os
import reprlib
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager

_SHOWN = 200  # characters of a value in a message


def shown(value: object) -> str:
    """`value` as a message shows it: at most `_SHOWN` characters of its repr, of its type where it has none.

    Never raises, and reads only a few elements: the value may be a number of a million digits, a list of a million
    prompts, or an object whose repr raises.
    """
    try:
        text = reprlib.repr(value) if not isinstance(value, str) else repr(value[: _SHOWN + 1])
    except Exception:  # noqa: BLE001 - code of the caller's own object, in the middle of refusing it
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def first_few(names: Sequence[str], most: int = 3) -> str:
    """The first few of some names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def extra_missing(what: str, extra: str, error: ImportError) -> str:
    """The message where a package is not installed that only `what` needs."""
    return f"{what} needs the extra {extra}: pip install 'kvcellar[{extra}]' ({error})"


def forked_from(process: int) -> str:
    """The process of this id as a message names it in a fork of it."""
    return f"process {process}, which this process ({os.getpid()}) was forked from"


class NativePanic(RuntimeError):
    """Compiled code of another package has met a defect of its own. What was asked of it has failed; it can go on."""


@contextmanager
def panics_of(what: str) -> Generator[None]:
    """Around calls of packages in Rust: PyO3 raises a panic as a `BaseException`, for which neither a request's error
    handling nor a thread's is made, so it becomes a `NativePanic`. Its message may quote a prompt: it is only the
    cause."""
    try:
        yield
    except (Exception, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise NativePanic(f"{what} has panicked") from error


class KvcellarError(Exception):
    """Base class of every exception that this package raises on purpose."""


class BadRequest(KvcellarError, ValueError):
    """The request is invalid; repeating it will not help. `param` names the invalid field."""

    message: str
    param: str | None
    hint: str | None

    def __init__(self, message: str, param: str | None = None, *, hint: str | None = None) -> None:
        super().__init__(message if hint is None else f"{message}. {hint}")
        self.message, self.param, self.hint = message, param, hint


class PromptTooLong(BadRequest):
    """The prompt alone exceeds the model's context or its memory. It has `tokens` tokens; with `at_least` that is a
    lower bound computed from its length, without tokenizing it."""

    tokens: int
    limit: int
    at_least: bool

    def __init__(
        self, tokens: int, limit: int, limited_by: str, *, at_least: bool = False, hint: str | None = None
    ) -> None:
        count = f"at least {tokens}" if at_least else tokens
        super().__init__(
            f"the prompt has {count} tokens; {limited_by} allows {limit}. Shorten the prompt", "prompt", hint=hint
        )
        self.tokens, self.limit, self.at_least = tokens, limit, at_least


class TextTooSlow(BadRequest):
    """A text was given up while it was tokenized: the tokenizer of the model needs too long for it."""

    def __init__(self, param: str, size: int, seconds: float) -> None:
        super().__init__(
            f"{param} has a text of {size} bytes that the model's tokenizer does not tokenize within {seconds:.0f} "
            f"seconds. Send less, or token ids",
            param,
        )


class TokenizerFailed(KvcellarError):
    """The tokenizer of the model cannot be built, or raised an error on a text that it should accept: its files are
    damaged or hostile."""


class TemplateFailed(BadRequest):
    """The chat template rejected these messages, or exceeded its limits on time and size."""


class UnknownConversation(BadRequest):
    """There is no conversation of that name."""


class ConversationConflict(BadRequest):
    """As conversations are now, this cannot be done: the message has the reason. Nothing has changed."""


class ConversationUnreadable(KvcellarError):
    """A named conversation is damaged, or of a later version. Others are not affected."""


class ConversationNotSaved(KvcellarError):
    """The medium has failed. The conversation is as it was before."""


class ModelNotFound(KvcellarError):
    """No such directory, and no such name in the local Hugging Face cache."""


class PullFailed(KvcellarError):
    """A model could not be downloaded. What was on this machine before can still be loaded."""


class ModelRefused(KvcellarError):
    """The model exists but cannot be served correctly; the message gives the reason."""


class NoBackend(ModelRefused):
    """No attention backend supports a layer; `refused` maps each candidate to its reason."""

    refused: dict[str, str]

    def __init__(self, ask: str, refused: Mapping[str, str]) -> None:
        reasons = "; ".join(f"{name}: {why}" for name, why in refused.items()) or "there are no candidates"
        super().__init__(f"no attention backend can serve {ask}. {reasons}")
        self.refused = dict(refused)


class DraftRefused(ModelRefused):
    """The drafts do not fit the target. `refused` has the reason of each check that failed, `found` what the others
    found."""

    draft: str
    found: dict[str, str]
    refused: dict[str, str]

    def __init__(self, draft: str, target: str, found: Mapping[str, str], refused: Mapping[str, str]) -> None:
        reasons = "; ".join(f"{name}: {why}" for name, why in refused.items())
        super().__init__(f"{draft} does not fit {target} as a draft. {reasons}")
        self.draft, self.found, self.refused = draft, dict(found), dict(refused)


class AdapterRefused(ModelRefused):
    """The adapter has a form that is not supported, or does not fit the model; the message gives the reason."""

    adapter: str
    reason: str

    def __init__(self, adapter: str, reason: str) -> None:
        super().__init__(f"the adapter {adapter} cannot be used: {reason}")
        self.adapter, self.reason = adapter, reason


class CapacityTooSmall(KvcellarError):
    """The memory limit is too small for a single step. The message names the setting to change."""


class CacheFull(KvcellarError):
    """Too few free cells in one group for this step. It can be retried when other requests have ended."""

    group: str
    need: int
    free: int
    unit: str

    def __init__(self, group: str, need: int, free: int, *, unit: str = "cells") -> None:
        super().__init__(
            f"need {need} {unit} in group {group}; {free} are free. "
            f"Wait for a running request, shorten the prompt, or raise cache_bytes."
        )
        self.group, self.need, self.free, self.unit = group, need, free, unit


class NotSupported(KvcellarError):
    """This memory cannot do that here, and nothing has changed. `kept` tokens could be kept instead."""

    reason: str
    kept: int

    def __init__(self, reason: str, kept: int = 0) -> None:
        super().__init__(f"{reason} (nothing has changed; {kept} tokens could be kept)")
        self.reason, self.kept = reason, kept


class UnknownSequence(KvcellarError, KeyError):
    """There is no sequence with this id in memory."""

    seq: int

    def __init__(self, seq: int) -> None:
        super().__init__(f"sequence {seq} is not in memory")
        self.seq = seq

    def __str__(self) -> str:
        return str(self.args[0])


class WrongStage(KvcellarError, RuntimeError):
    """The phases of an operation were called out of order."""


class EngineClosed(KvcellarError):
    """The engine has been closed; open a new one."""


class EngineFailed(KvcellarError):
    """An unexpected error in the engine's thread ended this request."""


class EngineDied(EngineFailed):
    """Processes of the engine have died while they computed this request, or before they had answered a call."""


class NoToken(KvcellarError):
    """No token can be sampled for one completion: its logits are not numbers, or every token is banned."""


class ScoresNotNumbers(NoToken):
    """Scores hold NaN or infinity: those that a token is drawn by, or those of a prompt whose tokens are scored. Or the
    hidden states do that an embedding is pooled from."""


class ConstraintFailed(NoToken):
    """The grammar of a constraint has reached a limit in the middle of an answer, which is not complete."""


class Overloaded(KvcellarError):
    """Too many requests are waiting. Try again later."""
